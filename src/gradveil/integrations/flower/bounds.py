"""Bounds on one reply: the norm of its update, the running statistics in it, and its weight in a mean.

The defaults are wide: an honest training, its privacy noise included, does not reach them. They stop a single absurd
reply from destroying the model. Robustness against clients that lie within the bounds takes tighter ones, and a robust
strategy of Flower's behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradveil.core.allowed import BOUND, Choice, Range, collect
from gradveil.core.errors import Problem, refuse
from gradveil.core.tree import Tensors
from gradveil.federated.layout import place_of
from gradveil.nn.weights import is_statistic

Accepted = Literal["refuse", "bounded", "accept"]
"""Treatment of running statistics in a reply."""
_OPTIONAL = Range(0, low_open=True, unlimited=True, optional=True)
_USUAL = 1000.0
"""Root mean square of an update's entries, in units of one plus that of the parameters, which no training reaches."""
_VARIANCE = "running_var"


@dataclass(frozen=True)
class Bounds:
    """The bounds of `Protected`, checked when it is made."""

    max_norm: float | None = None
    """l2 norm of an update. None: 1000 times the norm of the parameters plus the root of their number."""
    max_ratio: float | None = None
    """Norm of an update in units of the round's upper median. None: no such bound."""
    max_examples: float | None = None
    """Weight in a mean; a larger one counts as this. None: no such bound."""
    statistics: Accepted = "bounded"
    max_change: float = 1e4
    """Change of a running mean or standard deviation, in units of one plus the standard deviation before."""

    def __post_init__(self) -> None:
        """Reject bounds that are no positive numbers."""
        optional = ("max_norm", "max_ratio", "max_examples")
        checks = [(name, _OPTIONAL, getattr(self, name)) for name in optional]
        rest = [
            ("statistics", Choice(get_args(Accepted)), self.statistics),
            ("max_change", BOUND, self.max_change),
        ]
        refuse(collect("Protected", [*checks, *rest]))

    def problems(self, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[Problem]:
        """Yield each bound that an update of these arrays exceeds."""
        size = norm(update)
        if not size <= (most := self._most(before, update)):
            remedy = "give Protected another max_norm if honest clients send such updates"
            yield Problem("reply, update", f"has the norm {size:.4g}, above {most:.4g}", remedy)
        means = [name for name in update if is_statistic(name)]
        if means and self.statistics == "refuse":
            remedy = "let clients keep them, or give Protected statistics='bounded'"
            yield Problem(f"reply, {place_of(means[0])}", "is a running statistic, and none is accepted", remedy)
        elif means and self.statistics == "bounded":
            for name in means:
                yield from self._statistic(name, before, update)

    def _most(self, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> float:
        if self.max_norm is not None:
            return self.max_norm
        trained = {name: before[name] for name in update if not is_statistic(name)}
        return _USUAL * (norm(trained) + math.sqrt(sum(value.numel() for value in trained.values())))

    def _statistic(self, name: str, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[Problem]:
        """Compare a running mean or variance with the one that the server holds."""
        old, new = before[name].double(), before[name].double() - update[name].double()
        where = f"reply, {place_of(name)}"
        if name.endswith(_VARIANCE):
            if bool((new < 0).any()):
                yield Problem(where, f"makes a variance negative ({float(new.min()):.4g})", "leave this reply out")
                return
            old, new = old.clamp(min=0).sqrt(), new.sqrt()
            scale = 1 + old
        else:
            variance = before.get(name.removesuffix("running_mean") + _VARIANCE)
            scale = 1 + old.abs() + (0 if variance is None else variance.double().clamp(min=0).sqrt())
        change = float(((new - old).abs() / scale).max()) if new.numel() else 0.0
        if not change <= self.max_change:
            what = f"moves a running statistic by {change:.4g} standard deviations, above {self.max_change:g}"
            yield Problem(where, what, "give Protected another max_change, or statistics='refuse'")

    def outliers(self, norms: Sequence[float]) -> Iterator[tuple[int, str]]:
        """Yield the replies whose update is too large beside the round's others, each with the reason.

        The upper median of two norms is the larger one, so it takes more than half of the replies to exclude another.
        """
        if self.max_ratio is None or not norms:
            return
        usual = sorted(norms)[len(norms) // 2]
        for index, size in enumerate(norms):
            if usual > 0 and size > self.max_ratio * usual:
                what = f"has the norm {size:.4g}, above {self.max_ratio:g} times the round's median {usual:.4g}"
                yield index, str(Problem("reply, update", what, "give Protected another max_ratio if this is honest"))


def norm(update: Mapping[str, Tensor]) -> float:
    """Compute the l2 norm of what is trained, in double precision: squares of large float32 overflow."""
    parts = [torch.linalg.vector_norm(value.double()) for name, value in update.items() if not is_statistic(name)]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0


def finite(update: Tensors, after: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield the arrays that an update moves beyond what their type holds; one infinity spoils the mean of all."""
    for name in update:
        if not bool(after[name].isfinite().all()):
            yield Problem(f"reply, {place_of(name)}", "moves parameters beyond all numbers", "leave this reply out")
