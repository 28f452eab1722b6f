"""What an attacker knows of each named tensor of the client he believes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor

from gradveil.core.errors import fail
from gradveil.core.space import Space
from gradveil.core.types import Batch


@dataclass(frozen=True)
class Known:
    """The true value, leading V. Without a value it waits for the audit to grant it (and to say so)."""

    value: Tensor | None = None


@dataclass(frozen=True)
class Optimise:
    """Unknown: optimised together with the inputs, started from its law, kept in its box.

    `weight` scales the tensor's prior (its law's penalty) in the objective; `signed` uses only its gradient's sign.
    """

    weight: float = 0.0
    signed: bool = False


@dataclass(frozen=True)
class Sample:
    """Unknown: drawn from its law by the attacker, afresh each iteration or once."""

    every_iteration: bool = True


@dataclass(frozen=True)
class Infer:
    """Read off the sent update (a mask from its zeros)."""


@dataclass(frozen=True)
class Neutral:
    """Ignored: the value that switches it off."""


How = Known | Optimise | Sample | Infer | Neutral
"""What an attacker may know or do about one named tensor."""


@dataclass(frozen=True)
class Knowledge:
    """The public facts about the data, and how each named tensor is known.

    Patterns (`model.*`, `send.noise.*`) are tried in order; the first that matches decides; without a match: neutral.
    """

    space: Space
    """What an example is: its shape, its valid values."""
    classes: int
    tensors: Mapping[str, How] = field(default_factory=dict)
    targets: Tensor | None = None
    """[V, B] true labels, where the audit grants them."""
    public: Batch | None = None
    """Examples [M, ...] like the targets' own, none of them a target's, where the attacker has such data."""

    def __post_init__(self) -> None:
        """Refuse impossible facts."""
        if self.classes < 2:
            raise fail("knowledge.classes", f"is {self.classes}", "give at least 2")

    def how(self, name: str, number: int = 0) -> How:
        """Say how a named tensor of an observed round (numbered from 0) is known.

        A value that was granted under the tensor's own name is the first round's; later ones are `round1.<name>`, …
        """
        own = f"round{number}.{name}" if number else name
        for pattern, way in self.tensors.items():
            if fnmatchcase(name, pattern) or pattern == own:
                if number and isinstance(way, Known) and pattern != own:
                    continue
                if isinstance(way, Known) and way.value is None:
                    raise fail(f"knowledge.{name}", "was never granted", "let the audit grant it, or give a value")
                return way
        return Neutral()
