"""The catalogue of defences: names as papers and people use them, and the texts that name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.settings import REQUIRED
from gradveil.core.text_form import read
from gradveil.core.user_code import imported
from gradveil.defences.additive_noise import NOISES
from gradveil.defences.aligned import ALIGNED
from gradveil.defences.ats import ATS
from gradveil.defences.batch_defences import BATCHING
from gradveil.defences.composition import NONE, Defence
from gradveil.defences.compression import COMPRESSING
from gradveil.defences.concealing import CONCEALING
from gradveil.defences.deployed_filters import FILTERS
from gradveil.defences.dp import CLIPS, PRIVATE
from gradveil.defences.entry import DefenceEntry, Slot
from gradveil.defences.feature_hiding import HIDING
from gradveil.defences.low_rank import LOW_RANK
from gradveil.defences.model_defences import MODEL_DEFENCES
from gradveil.defences.optimal import INFORMED
from gradveil.defences.orthogonal import ORTHOGONAL
from gradveil.defences.pruning import PRUNING
from gradveil.defences.standin import STANDIN
from gradveil.defences.user_defence import own_defence

_UNDEFENDED = DefenceEntry(
    name="none",
    factory=lambda: NONE,
    description="No defence: the control of every comparison",
    changes=(),
    cost="nothing; all bytes",
    citation="McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data",
    identity={},
)
_ENTRIES = (
    _UNDEFENDED,
    *CLIPS,
    *NOISES,
    *PRIVATE,
    *PRUNING,
    *ALIGNED,
    *COMPRESSING,
    *LOW_RANK,
    *STANDIN,
    *ORTHOGONAL,
    *CONCEALING,
    *INFORMED,
    *HIDING,
    *FILTERS,
)
DEFENCES: dict[str, DefenceEntry] = {entry.name: entry for entry in (*_ENTRIES, *BATCHING, *ATS, *MODEL_DEFENCES)}
"""Every defence by name. `DEFENCES["dp"](clip=20, sigma=1e-4)` builds one; `gradveil.defences.parse` reads a text."""


def _plugged(plugin: Plugin) -> DefenceEntry:
    """Make the entry of a defence that a package has: its own entry, a defence, or what returns one."""
    found = imported(plugin.path, plugin.path)
    if isinstance(found, DefenceEntry):
        return replace(found, name=plugin.name)
    own = own_defence(plugin.path)
    ready = all(argument.default is not REQUIRED for argument in own.arguments)
    made: Defence | None = own() if ready else None
    slots: tuple[Slot, ...] = ("model", "batch", "step", "send")
    return DefenceEntry(
        name=plugin.name,
        factory=own,
        description=own.description,
        citation="",
        arguments=own.arguments,
        changes=tuple(slot for slot in slots if made is None or getattr(made, slot)),
        guarantee="no formal guarantee: the package says none",
        cost="the package does not say",
    )


ALL_DEFENCES: Catalogue[DefenceEntry] = Catalogue("defences", "defence", DEFENCES, _plugged)
"""`DEFENCES`, and those of installed packages."""


def parse(text: str, table: Mapping[str, DefenceEntry] = ALL_DEFENCES, own: bool = False) -> Defence:
    """Read a defence; every mistake in the text is reported at once, each with its place.

    The name of the result is its canonical text: reading it gives the same defence. `own=True` reads `pkg.module:name`
    too, by importing it: for texts that say what code to run, such as your own run file, never for one from others.

    >>> parse("prune(.5)+dp( clip = 20.0, sigma=1e-4 )").name
    'prune(ratio=0.5) + dp(sigma=0.0001)'
    """
    built = Defence("none")
    for _, part in read(text, table, "defence", own_defence if own else None):
        built = built + part
    return built


def entries(text: str, table: Mapping[str, DefenceEntry] = ALL_DEFENCES) -> list[DefenceEntry]:
    """Look up what a defence is made of: descriptions, guarantees, citations. No import path is followed for it.

    >>> [entry.name for entry in entries("dp(sigma=1) + dropout")]
    ['dp', 'dropout']
    """
    return [entry for entry, _ in read(text, table, "defence")]
