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

KNOWING = ("portfolio", "learned")
"""What is random is inferred, optimised or, where its mean is zero, averaged out over the rounds; or all is learned."""
PRUNED = ("portfolio", 'portfolio(objective="layerwise-cosine")', "learned")
"""The zeros show the masks; the residual of error feedback follows from the rounds. Two ways to compare the rest."""
ORDERED = (*PRUNED, "portfolio(pruned=ordered)")
"""Besides, the smallest and the largest that was sent bound what was not."""
DUAL = (*ORDERED, "cdia(objective=l2, pruned=ordered, rounds=all)")
"""Where the largest are cut too, angles say little of the rest: a third way to compare, with the bounds."""

PLANTED = (
    "rob(bins=512)",
    "rob(bins=512, sparse=true)",
    "curious(rows=1024, share=0.03)",
    "fishing(simulated_client=full)",
)
"""What a malicious server sends: blocks whose rows are compared or stand alone, trap weights, a last layer."""
DECOYS = ("rob(bins=512, sparse=true, decoys=64)", "rob(bins=512, sparse=true, decoys=256)")
"""Rows with larger gradients for a client to cut in the place of those that show the images: few and many."""


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
    adaptive: tuple[str, ...]
    """Attacks that aim at it, as texts: a defence names those that could break it."""
    guarantee: str = ""
    """The formal guarantee; by default that of the factory, if it has one."""
    stage: str = "own"
    """Name of the factory's transform in its chain: a prefix of noise and state."""
    feedback: bool | None = None
    """Whether a compressor has error feedback by default; None for what takes no `feedback`."""
    malicious: tuple[str, ...] = PLANTED
    """Attacks of a server that changes the model it sends, as texts."""
    identity: Mapping[str, Any] | None = None
    """Arguments at which it changes nothing; None if there are none."""

    def __post_init__(self) -> None:
        """Complete the arguments and the guarantee; refuse a defence without an attack that aims at it."""
        super().__post_init__()
        if self.feedback is not None and all(argument.name != "feedback" for argument in self.arguments):
            object.__setattr__(self, "arguments", (*self.arguments, feedback_argument(self.feedback)))
        object.__setattr__(self, "guarantee", self.guarantee or getattr(self.factory, "guarantee", Transform.guarantee))
        if not self.adaptive:
            what = "names no attacker that aims at it"
            raise fail(f"{self.name}.adaptive", what, 'name at least one, such as "portfolio" and "learned"')

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
