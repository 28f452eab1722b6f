"""Knowledge of each named tensor of the simulated client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor

from gradveil.core.errors import fail
from gradveil.core.noise import Law
from gradveil.core.space import Space
from gradveil.core.tree import root
from gradveil.core.types import Batch


@dataclass(frozen=True)
class Known:
    """The true value, leading V. The audit grants a missing value and reports it as side information."""

    value: Tensor | None = None


@dataclass(frozen=True)
class Optimise:
    """Unknown: optimised together with the inputs, from a draw of its law, within its box.

    `weight` scales the tensor's prior in the objective; `signed` uses only its gradient's sign. The prior is the law's
    penalty, or with `std` the distance of the tensor's mean from 0 and of its standard deviation from `std`.
    """

    weight: float = 0.0
    signed: bool = False
    std: float | None = None

    def prior(self, law: Law, value: Tensor) -> Tensor:
        """Return the unweighted prior [N] of values [N, ...].

        >>> import torch
        >>> from gradveil.core.noise import Normal
        >>> Optimise(std=1.0).prior(Normal(), torch.tensor([[1.0, -1.0], [3.0, 3.0]]))
        tensor([ 0., 10.])
        """
        if self.std is None:
            return law.penalty(value)
        flat = value.flatten(1)
        spread = root(flat.var(1, unbiased=False))
        return flat.mean(1).square() + (spread - self.std).square()


@dataclass(frozen=True)
class Sample:
    """Unknown: drawn from its law by the attacker, in each iteration or once."""

    every_iteration: bool = True


@dataclass(frozen=True)
class Infer:
    """Inferred from the sent update, as a mask is from its zeros."""


@dataclass(frozen=True)
class Neutral:
    """Ignored: set to the value without effect."""


How = Known | Optimise | Sample | Infer | Neutral
"""Treatment of one named tensor by an attacker."""


@dataclass(frozen=True)
class Knowledge:
    """Public facts about the data, and the treatment of each named tensor.

    The first pattern (`model.*`, `send.noise.*`) that matches a name decides. A name without a match is neutral.
    """

    space: Space
    """Shape and valid values of an example."""
    classes: int
    tensors: Mapping[str, How] = field(default_factory=dict)
    targets: Tensor | None = None
    """[V, B] true labels, where the audit grants them."""
    public: Batch | None = None
    """Auxiliary data [M, ...] from the distribution of the private images, or None."""

    def __post_init__(self) -> None:
        """Refuse impossible facts."""
        if self.classes < 2:
            raise fail("knowledge.classes", f"is {self.classes}", "give at least 2")

    def __repr__(self) -> str:
        """Name the facts; of tensors their shapes, of granted values that they are granted."""
        treated = ", ".join(f"{name}: {type(how).__name__.lower()}" for name, how in self.tensors.items())
        labels = "unknown" if self.targets is None else str([*self.targets.shape])
        public = "none" if self.public is None else f"{len(self.public.targets)} examples"
        shape = " x ".join(map(str, self.space.shape))
        facts = f"{type(self.space).__name__} of {shape}, {self.classes} classes, labels {labels}, public {public}"
        return f"Knowledge({facts}, tensors {{{treated}}})"

    def how(self, name: str, number: int = 0) -> How:
        """Return the treatment of a named tensor in an observed round (numbered from 0).

        A value granted under the tensor's name belongs to the first round. Later rounds have `round1.<name>`, …
        """
        full_name = f"round{number}.{name}" if number else name
        for pattern, how in self.tensors.items():
            if fnmatchcase(name, pattern) or pattern == full_name:
                if number and isinstance(how, Known) and pattern != full_name:
                    continue
                if isinstance(how, Known) and how.value is None:
                    raise fail(f"knowledge.{name}", "was never granted", "let the audit grant it, or give a value")
                return how
        return Neutral()
