"""The style of figures: colours and marks that survive colour blindness and grey print, fonts, sizes, files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gradveil.core.errors import Problem
from gradveil.core.release import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEED = "pip install 'gradveil[plot]'"
"""The command that installs matplotlib."""
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""The palette of Okabe and Ito, darkest first, grey instead of its yellow, which is too light for lines."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
QUIET = "#6E6E6E"
"""The colour of guides and notes."""
TEXT, SMALL = 8.0, 7.0
"""Font sizes in points."""
_FAMILIES = {"sans": ("DejaVu Sans", "dejavusans"), "serif": ("STIXGeneral", "stix")}
"""Fonts that matplotlib brings, so that every machine draws the same figure."""


def missing_extra() -> Iterator[Problem]:
    """Find out whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        yield Problem("matplotlib", "is not installed, and figures are drawn with it", NEED)


@contextmanager
def styled(font: str) -> Iterator[None]:
    """Draw in the style of the figures; the user's own settings are back afterwards."""
    import matplotlib

    family, mathtext = _FAMILIES[font]
    settings: Any = {
        **matplotlib.rcParamsDefault,
        "font.family": family,
        "mathtext.fontset": mathtext,
        "font.size": TEXT,
        "axes.labelsize": TEXT,
        "axes.titlesize": TEXT,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "legend.fontsize": SMALL,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.minor.size": 1.5,
        "ytick.minor.size": 1.5,
        "lines.linewidth": 1.2,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "legend.handlelength": 2.2,
        "legend.columnspacing": 1.2,
        "legend.borderaxespad": 0.2,
        "figure.constrained_layout.h_pad": 0.02,
        "figure.constrained_layout.w_pad": 0.02,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.fonttype": "path",
        "svg.hashsalt": "gradveil",
        "image.composite_image": False,
    }
    settings.pop("backend", None)
    with matplotlib.rc_context():
        matplotlib.rcParams.update(settings)
        yield


def new_figure(width: float, height: float, dpi: float, font: str, layout: str | None = "constrained") -> Figure:
    """Make a figure of this size in inches, which a notebook shows; pyplot never hears of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout)  # pyright: ignore[reportArgumentType]
    vars(figure)["_repr_png_"] = partial(encoded, figure, "png", dpi, font)
    return figure


def encoded(figure: Figure, kind: str, dpi: float, font: str) -> bytes:
    """Write a figure as a file: of equal figures the bytes are equal, without dates."""
    program = f"Gradveil {__version__}"
    metadata: Mapping[str, Mapping[str, str | None]] = {
        "pdf": {"Creator": program, "CreationDate": None},
        "svg": {"Creator": program, "Date": None},
        "png": {"Software": program},
    }
    file = io.BytesIO()
    with styled(font):
        figure.savefig(file, format=kind, dpi=dpi, metadata=dict(metadata[kind]))
    return file.getvalue()


def colour(place: int) -> str:
    """Return the colour of a series."""
    return COLOURS[place % len(COLOURS)]


def marker(place: int) -> str:
    """Return the marker of a series."""
    return MARKERS[place % len(MARKERS)]


def line(place: int) -> Any:
    """Return the line style of a series."""
    return LINES[place % len(LINES)]


def legend_below(axes: Axes, handles: list[Any], *, outside: bool) -> None:
    """Put the legend below the axes, in as many columns as fit, or into axes that are not ours."""
    if not handles:
        return
    if not outside:
        axes.legend(handles=handles)
        return
    figure: Any = axes.figure
    columns = _legend_columns([str(handle.get_label()) for handle in handles], figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def legend_rows(labels: list[str], width: float) -> int:
    """Return how many lines a legend of these labels takes below a figure of this width in inches."""
    if not labels:
        return 0
    return -(-len(labels) // _legend_columns(labels, width))


def _legend_columns(labels: list[str], width: float) -> int:
    """Estimate how many columns fit, from the longest label in the small font."""
    return max(1, min(len(labels), int(width / (0.4 + 0.055 * max(map(len, labels))))))
