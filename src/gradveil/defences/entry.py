"""An entry of the catalogue of defences: how to build it, what it changes, and what it guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradveil.core.chain import chain
from gradveil.core.errors import fail
from gradveil.core.settings import Argument, Flag, NamedEntry
from gradveil.core.types import Transform
from gradveil.defences.composition import Defence
from gradveil.defences.error_feedback import Feedback

Slot = Literal["model", "batch", "step", "send"]
"""The places where a client can be defended."""

Trait = Literal[
    "anything",
    "changes updates",
    "is unknown",
    "zeros entries",
    "zeros by size",
    "zeros the largest",
    "draws entries",
    "shapes noise",
    "mixes",
    "transforms inputs",
    "drops units",
    "draws features",
    "locks",
    "turns gradients",
    "adds proxies",
]
"""What a defence does that decides which attacks are tried on it: the rows of `gradveil.audit.attackers` ask for these.

The first two follow from the slots it fills, and what is in no catalogue is unknown. The others: it sends zeros, which
show their places; zeros in place of the smallest, so that what was sent bounds the rest; zeros in place of the largest
too; entries that are drawn one by one, by a known law; noise of a known covariance; inputs mixed with others; inputs
behind known transforms; units dropped at random; features drawn in a bottleneck; layers scaled by a key that each
client keeps; gradients turned by a right angle, whose norms remain; or gradients of proxies added, which a search
finds."""

PRUNED: tuple[Trait, ...] = ("zeros entries",)
ORDERED: tuple[Trait, ...] = (*PRUNED, "zeros by size")
DUAL: tuple[Trait, ...] = (*ORDERED, "zeros the largest")
"""What pruning does: zeros, of the smallest entries, of the largest too."""


def feedback_argument(default: bool) -> Argument:
    """Return the argument that wraps a compressor in error feedback."""
    return Argument("feedback", Flag(), default, "Add in the next round what was not sent in this one.")


@dataclass(frozen=True, kw_only=True)
class DefenceEntry(NamedEntry):
    """One named defence of the table. Calling it with arguments builds the defence, named by its canonical text."""

    changes: tuple[Slot, ...]
    """The slots it fills: the model, the batch, each local gradient (step), what is sent once a round (send)."""
    cost: str
    """What a client pays: computation, where measured in plain gradients of 64 images (docs/performance.md); after the
    semicolon bytes, as a share of those of an update in which nothing is zero, for a small CNN."""
    traits: tuple[Trait, ...] = ()
    """What it does that decides which attacks are tried on it."""
    adaptive: tuple[str, ...] = ()
    """Attacks to try besides those that the table finds, as texts: for a package that brings its own."""
    guarantee: str = ""
    """The formal guarantee; by default that of the factory, if it has one."""
    stage: str = "own"
    """Name of the factory's transform in its chain: a prefix of noise and state."""
    feedback: bool | None = None
    """Whether a compressor has error feedback by default; None for what takes no `feedback`."""
    identity: Mapping[str, Any] | None = None
    """Arguments at which it changes nothing; None if there are none."""

    def __post_init__(self) -> None:
        """Complete the arguments and the guarantee."""
        super().__post_init__()
        if self.feedback is not None and all(argument.name != "feedback" for argument in self.arguments):
            object.__setattr__(self, "arguments", (*self.arguments, feedback_argument(self.feedback)))
        object.__setattr__(self, "guarantee", self.guarantee or getattr(self.factory, "guarantee", Transform.guarantee))

    @property
    def kind(self) -> str:
        """The kind of examples that it is for; images stand for any."""
        return "texts" if getattr(self.factory, "needs", None) == "tokens" else "images"

    def __call__(self, **values: Any) -> Defence:
        """Build the defence; every unknown, missing or impossible argument is refused at once."""
        full = self.filled(values)
        return replace(self._defence(**full), name=self.text(full))

    def _defence(self, **values: Any) -> Defence:
        """Put what the factory returns into its slot, unless that is a defence already."""
        fed_back = self.feedback is not None and values.pop("feedback")
        made = self.factory(**values)
        if isinstance(made, Defence):
            return made
        if len(self.changes) != 1:
            what = f"returned {type(made).__name__}, not a defence"
            raise fail(self.name, what, "return a Defence that holds it, which names its slots")
        held: Any = (made,)
        if self.changes[0] in ("step", "send"):
            held = chain(**{self.stage: Feedback(made) if fed_back else made})
        return Defence(self.name, **{self.changes[0]: held})
