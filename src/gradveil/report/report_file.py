"""The report of a run directory, written as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradveil.audit.defence_costs import joined
from gradveil.audit.run_directory import RUN, load_run
from gradveil.core.errors import fail
from gradveil.core.private_files import write_private
from gradveil.federated.training_run import is_training, load_training
from gradveil.report.audit_page import audit_page
from gradveil.report.training_page import training_page

NAME = "report.html"
"""The file name of a report in its run directory."""
_OTHER_PLACE = "choose another place with --out"


def write_report(run_dir: Path, out: Path | None = None, trainings: Sequence[Path] = ()) -> Path:
    """Write the report of an audit or a training, by default as `report.html` in its run directory; return its path.

    An audit is joined with `trainings`, on the same data with the same model, for what its defences cost.
    The page of an audit shows private images, so only its owner may read it. The file is written whole or not at all.
    """
    run_dir = Path(run_dir)
    out = run_dir / NAME if out is None else Path(out)
    is_audit = (run_dir / RUN).is_file() or not is_training(run_dir)
    text = _joined_page(run_dir, trainings) if is_audit else training_page(run_dir)
    if out.is_dir():
        raise fail(str(out), "is a folder", f"name a file in it, such as {out / NAME}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(str(out), f"cannot be written: {error.strerror}", _OTHER_PLACE) from error
    write_private(out, text.encode(), _OTHER_PLACE)
    return out


def _joined_page(run_dir: Path, trainings: Sequence[Path]) -> str:
    run = load_run(run_dir)
    (costs,) = joined([run], [load_training(folder) for folder in trainings])
    return audit_page(run, costs)
