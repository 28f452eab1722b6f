"""What became of the rows of a descent: their best answers, their objectives, and how each of them ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradveil.attacks.base import Status
from gradveil.core.tree import Tensors

CONVERGED, STALLED, BUDGET, DIVERGED = range(4)
"""Codes of the statuses, as tensors on the device hold them."""
STATUSES: tuple[Status, ...] = ("converged", "stalled", "budget", "diverged")
"""The words that results use for these codes."""


@dataclass(eq=False)
class Solution:
    """What became of every row."""

    variables: Tensors
    """What the best iterate shows: its variables, or what was made of them."""
    objective: Tensor
    initial: Tensor
    iterations: Tensor
    status: Tensor
    trace: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Best answer (what is shown first) and its objective, for every row, after so many iterations."""

    @classmethod
    def empty(cls, shown: Tensors) -> Solution:
        """Make room for every row."""
        first = next(iter(shown.values()))
        rows = first.shape[0]
        return cls(
            variables={name: value.detach().clone() for name, value in shown.items()},
            objective=first.new_full((rows,), torch.inf),
            initial=first.new_full((rows,), torch.inf),
            iterations=torch.zeros(rows, dtype=torch.long, device=first.device),
            status=torch.full((rows,), BUDGET, dtype=torch.long, device=first.device),
        )

    def note(self, iterations: int, rows: Tensor, shown: Tensors, objective: Tensor) -> None:
        """Remember the best answers so far: of rows that have left, their last; of those under way, their best."""
        name = next(iter(self.variables))
        values, objectives = self.variables[name].clone(), self.objective.clone()
        values[rows], objectives[rows] = shown[name], objective
        self.trace[iterations] = (values, objectives)

    def stood(self, counts: Iterable[int]) -> None:
        """Note the answers at these iterations too, where every row had ended before them: their last."""
        first = next(iter(self.variables.values()))
        for count in counts:
            self.trace.setdefault(count, (first.clone(), self.objective.clone()))

    def go_on(self, rows: Tensor, later: Solution, after: int, keep: str) -> None:
        """Put in what became of some rows in a second descent, after this many iterations: of the best, or the last."""

        def ahead(new: Tensor, old: Tensor) -> Tensor:
            return new < old if keep == "best" else torch.isfinite(new)

        better = ahead(later.objective, self.objective[rows])
        name = next(iter(self.variables))
        for count, (found, objective) in later.trace.items():
            values, objectives = self.variables[name].clone(), self.objective.clone()
            taken = ahead(objective, objectives[rows])
            values[rows] = _where(taken, found, values[rows])
            objectives[rows] = torch.where(taken, objective, objectives[rows])
            self.trace[after + count] = (values, objectives)
        for other in self.variables.keys() & later.variables.keys():
            self.variables[other][rows] = _where(better, later.variables[other], self.variables[other][rows])
        self.objective[rows] = torch.where(better, later.objective, self.objective[rows])
        self.iterations[rows] += later.iterations
        self.status[rows] = later.status


def joined(parts: Sequence[Solution]) -> Solution:
    """Put the chunks' solutions in a row."""
    joined = replace(parts[0], trace={})
    joined.variables = {n: torch.cat([part.variables[n] for part in parts]) for n in parts[0].variables}
    for name in ("objective", "initial", "iterations", "status"):
        setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    counts = {count for part in parts for count in part.trace}
    ended = {part: (next(iter(part.variables.values())), part.objective) for part in parts}
    for count in counts:
        found = [part.trace.get(count, ended[part]) for part in parts]
        joined.trace[count] = (torch.cat([value for value, _ in found]), torch.cat([score for _, score in found]))
    return joined


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (one.ndim - 1)), one, other)
