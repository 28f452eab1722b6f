"""Rows of tables: numbers and categories, compared cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gradveil.core.errors import Problem
from gradveil.core.space import ExampleWords, Space
from gradveil.metrics.matching import match as match_by_cost

TOLERANCE = 0.319
"""A number is right within so many standard deviations: the mean hits a normal column with probability 1/4."""
_PART = 256


@dataclass(frozen=True)
class TableColumn:
    """One column: a category where it has levels, otherwise a number with its public mean, deviation and range."""

    name: str
    levels: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0
    high: float = 1.0
    whole: bool = False
    """Whether the numbers are whole."""
    usual: float = 0.0
    """The share of public rows that the best constant is right for."""
    inferred: float = 0.0
    """The share of public rows that a linear model of the other columns is right for."""
    standardised: bool = True
    """Whether a model reads (number - mean) / std; otherwise it reads the numbers as they are."""

    @property
    def scaling(self) -> tuple[float, float]:
        """The centre and the scale of a number's input: it is (number - centre) / scale."""
        return (self.mean, self.std) if self.standardised else (0.0, 1.0)

    @property
    def tolerance(self) -> float:
        """The largest error of a right number's input."""
        return TOLERANCE * self.std / self.scaling[1]

    @property
    def guessed(self) -> float:
        """The share of rows that the better of both guesses is right for."""
        return max(self.usual, self.inferred)

    @property
    def width(self) -> int:
        """How many inputs the column has."""
        return len(self.levels) or 1

    def words(self, value: float) -> str:
        """Write a cell.

        >>> TableColumn("sex", ("female", "male")).words(1.0), TableColumn("age", std=9.0, whole=True).words(41.0)
        ('male', '41')
        """
        if value != value:
            return "none"
        if self.levels:
            return self.levels[int(value)]
        return f"{value:,.0f}" if self.whole else f"{value:.4g}"


@dataclass(frozen=True)
class TableSpace(Space):
    """Rows of these columns.

    Inputs are numbers as (number - mean) / std, or as they are where columns say so, and categories as one-hot vectors
    in the order of their levels. Views have one number a column: the number itself, or the place of the level.

    >>> space = TableSpace((TableColumn("age", mean=40.0, std=10.0), TableColumn("sex", ("female", "male"))))
    >>> space.encode(torch.tensor([50.0, 1.0])).tolist(), space.view(torch.tensor([1.0, 0.2, 0.8])).tolist()
    ([1.0, 0.0, 1.0], [50.0, 1.0])
    """

    columns: tuple[TableColumn, ...]

    words: ClassVar[ExampleWords] = ExampleWords(
        "rows", "row", "cells", "cells right", "at least {threshold:.0%} of the cells are right", "differing cells"
    )
    threshold: ClassVar[float] = 0.9
    exactly: ClassVar[float] = 1.0
    offers: ClassVar[frozenset[str]] = frozenset({"numbers", "columns"})

    @cached_property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of inputs."""
        return (sum(column.width for column in self.columns),)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The number of columns."""
        return (len(self.columns),)

    def model_facts(self) -> Mapping[str, Any]:
        """Return the width of each column: 1 for a number, the number of levels for a category."""
        return {"columns": tuple(len(column.levels) for column in self.columns)}

    def problems(self, inputs: Tensor) -> Iterator[Problem]:
        """Find rows that are not finite."""
        if not bool(inputs.isfinite().all()):
            row = int((~inputs.isfinite()).flatten(1).any(1).nonzero()[0])
            yield Problem("inputs", f"row {row} has cells that are no finite numbers", "fill or remove them")

    def passes(self, similarity: Tensor, least: float) -> Tensor:
        """Return which shares of right cells are at least `least`."""
        # Rounding of the share must not decide.
        return similarity >= least - 1e-6

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest inputs: of the public numbers, and 0 and 1 of categories."""
        low, high = list[float](), list[float]()
        for column in self.columns:
            centre, scale = column.scaling
            numbers = ((column.low - centre) / scale, (column.high - centre) / scale)
            least, most = (0.0, 1.0) if column.levels else numbers
            low += [least] * column.width
            high += [most] * column.width
        return torch.tensor(low, dtype=torch.float64).to(like), torch.tensor(high, dtype=torch.float64).to(like)

    def limits(self, like: Tensor) -> None:
        """Return None: a private number may lie outside the public ones."""

    def encode(self, views: Tensor) -> Tensor:
        """Turn numbers into inputs, and write categories as one-hot vectors."""
        parts = views.split([len(group) for group in self._groups], -1)
        return torch.cat(
            [
                one_hot(cells[..., 0].nan_to_num(0.0).round().long(), len(group[0].levels)).to(views)
                if group[0].levels
                else (cells - _row(cells, [column.scaling[0] for column in group]))
                / _row(cells, [column.scaling[1] for column in group])
                for group, cells in zip(self._groups, parts, strict=True)
            ],
            -1,
        )

    def view(self, inputs: Tensor) -> Tensor:
        """Turn inputs into cells: the likeliest level of each category; a cell with NaN is NaN."""
        cells = list[Tensor]()
        for group, part in self._parts(inputs):
            if group[0].levels:
                cells.append(torch.where(part.isnan().any(-1), torch.nan, part.argmax(-1).to(part))[..., None])
                continue
            centres, scales = (_row(part, [column.scaling[i] for column in group]) for i in (0, 1))
            value = part * scales + centres
            whole = torch.tensor([column.whole for column in group], device=part.device)
            cells.append(torch.where(whole, value.round(), value) + 0.0)  # no negative zeros
        return torch.cat(cells, -1)

    def written(self, views: Tensor) -> list[dict[str, str]]:
        """Write rows [N, K], the cells by their columns.

        >>> TableSpace((TableColumn("sex", ("female", "male")),)).written(torch.tensor([[1.0]]))
        [{'sex': 'male'}]
        """
        return [
            {column.name: column.words(cell) for column, cell in zip(self.columns, row, strict=True)}
            for row in views.tolist()
        ]

    def relaxed(self, variables: Tensor) -> Tensor:
        """Turn free variables into inputs: a sigmoid between the bounds of numbers, a softmax over levels.

        Vero, Balunović, Dimitrov, Vechev: TabLeak: Tabular Data Leakage in Federated Learning (ICML 2023).
        """
        lower, upper = self.bounds(variables)
        inside = lower + (upper - lower) * variables.sigmoid()
        parts = zip(self._parts(variables), self._parts(inside), strict=True)
        return torch.cat([free.softmax(-1) if group[0].levels else part for (group, free), (_, part) in parts], -1)

    def projected(self, inputs: Tensor) -> Tensor:
        """Move numbers into their bounds, and categories to their likeliest level."""
        lower, upper = self.bounds(inputs)
        return torch.where(inputs.isfinite(), self.encode(self.view(torch.clamp(inputs, lower, upper))), inputs)

    def pooled(self, inputs: Tensor) -> Tensor:
        """Pool answers [R, ..., width] of several restarts: the median of numbers, the mean of categories."""
        parts = self._parts(inputs)
        return torch.cat([part.mean(0) if group[0].levels else part.median(0).values for group, part in parts], -1)

    def agreement(self, inputs: Tensor) -> Tensor:
        """Return how far answers [R, ..., width] agree in each cell [..., K] (TabLeak's certainty, from 0 to 1).

        Of a category it is 1 less the entropy of the pooled levels, as a share of the largest one; of a number the
        share of answers within the tolerance of their median.
        """
        found = list[Tensor]()
        for group, part in self._parts(inputs):
            if group[0].levels:
                shares = part.clamp(min=0).mean(0)
                shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-12)
                entropy = -torch.xlogy(shares, shares).sum(-1)
                # Of two levels at least: log 1 = 0 would give 0 / 0 for a column with one level, which is certain.
                found.append((1 - entropy / math.log(max(2, len(group[0].levels))))[..., None])
            else:
                apart = (part - part.median(0).values).abs()
                found.append((apart <= _row(part, [column.tolerance for column in group])).to(part).mean(0))
        return torch.cat(found, -1)

    def right(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Return which cells [..., K] are right: the same level, a number within the tolerance."""
        scale, category = self._scale(truths)
        return torch.where(category, candidates == truths, (candidates - truths).abs() <= TOLERANCE * scale + 1e-9)

    def cost(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Return the mean cost [...] of cells: 1 for another level, deviations up to 1 for a number; NaN costs 1."""
        scale, category = self._scale(truths)
        apart = ((candidates - truths).abs() / scale).clamp(max=1)
        each = torch.where(category, (candidates != truths).to(apart), apart)
        return each.nan_to_num(1.0, 1.0, 1.0).mean(-1)

    def match(self, candidates: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
        """Match by least total cost of cells."""
        order = match_by_cost(self.cost(candidates[:, None], truths[:, :, None]))
        return order, torch.stack([rows[places] for rows, places in zip(candidates, order, strict=True)])

    def scores(self, candidates: Tensor, truths: Tensor) -> Mapping[str, Tensor]:
        """Compute the share of right cells, of numbers and of categories, and the mean error in deviations."""
        right, (scale, category) = self.right(candidates, truths).double(), self._scale(truths)
        found = {"cells": right.mean(-1)}
        for name, chosen in (("numbers", ~category), ("categories", category)):
            if bool(chosen.any()):
                found[name] = right[..., chosen].mean(-1)
        if bool((~category).any()):
            error = ((candidates - truths).abs() / scale)[..., ~category].mean(-1)
            found["deviations"] = error.nan_to_num(1e6, 1e6, 1e6).clamp(max=1e6)
        return found

    def similarity(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute the share of right cells."""
        parts = candidates.split(_PART)
        wide = [part if part.ndim == truths.ndim + 1 else part[:, None] for part in parts]
        return torch.cat([self.right(part, truths[None]).double().mean(-1) for part in wide])

    def nearest(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        """Return the index of the row with the least cost of cells."""
        found = torch.cat([self.cost(part[:, None], gallery[None]).argmin(1) for part in candidates.split(_PART)])
        return torch.where(candidates.isfinite().all(-1), found, -1)

    def neighbours(self, candidates: Tensor, gallery: Tensor, count: int) -> Tensor:
        """Return the indices of the rows with the least costs."""
        parts = candidates.split(_PART) if len(candidates) else ()
        found = [self.cost(p[:, None], gallery[None]).topk(count, largest=False).indices for p in parts]
        return torch.cat(found) if found else torch.zeros(0, count, dtype=torch.long)

    def identified(self, candidates: Tensor, places: Tensor, gallery: Tensor) -> Tensor:
        """Return whether the own row is strictly the nearest among all that differ from it."""
        flat, own = candidates.reshape(-1, candidates.shape[-1]), gallery[places.flatten()]
        found = list[Tensor]()
        for some, mine in zip(flat.split(_PART), own.split(_PART), strict=True):
            others = self.cost(some[:, None], gallery[None])
            same = (mine[:, None] == gallery[None]).all(-1)
            nearest = torch.where(same, torch.inf, others).min(1).values
            found.append((self.cost(some, mine) < nearest) & some.isfinite().all(-1))
        return torch.cat(found).view(places.shape)

    def average(self, views: Tensor) -> Tensor:
        """Return the row of the most frequent levels and of medians."""
        pairs = zip(self.columns, views.unbind(-1), strict=True)
        return torch.stack([cells.mode().values if column.levels else cells.median() for column, cells in pairs])

    def guesses(self, views: Tensor, tested: int) -> Tensor:
        """Return the row of modes and medians, and cells drawn one by one from other rows (public marginals)."""
        count = len(views)
        usual = self.average(views).expand(tested, -1)
        # Each column is shifted by 1 to count - 1 rows, so that no cell is the row's own. The prime factor gives
        # different columns different shifts.
        steps = [1 + (7919 * (place + 1)) % max(1, count - 1) for place in range(len(self.columns))]
        pairs = zip(steps, views.unbind(-1), strict=True)
        drawn = torch.stack([cells.roll(step)[:tested] for step, cells in pairs], -1)
        return torch.stack([usual, drawn])

    def in_words(self, view: Tensor) -> str:
        """Return a row's cells with the names of their columns."""
        return ", ".join(f"{column}: {cell}" for column, cell in self.written(view.unsqueeze(0))[0].items())

    def central(self, views: Tensor) -> Tensor:
        """Return the indices of the rows, those nearest to modes and medians first."""
        return self.cost(views, self.average(views)).argsort(stable=True)

    def of_trial(
        self, candidates: Tensor, truths: Tensor, private: bool, certainty: Tensor | None = None
    ) -> Mapping[str, Any]:
        """Return each column with its share of right cells, and how many of the surest quarter of all are right."""
        right = self.right(candidates, truths).flatten(0, -2).double()
        pairs = zip(self.columns, right.mean(0).tolist(), strict=True)
        found: dict[str, Any] = {"columns": [asdict(column) | {"right": share} for column, share in pairs]}
        if certainty is not None:
            sure = certainty.flatten(0, -2).to(right)
            for column, share in zip(found["columns"], sure.mean(0).tolist(), strict=True):
                column["certainty"] = share
            count = max(1, sure.numel() // 4)
            best = sure.flatten().argsort(descending=True, stable=True)[:count]
            found["surest"] = {"cells": count, "right": float(right.flatten()[best].mean())}
        return found

    @cached_property
    def _groups(self) -> tuple[tuple[TableColumn, ...], ...]:
        """The columns in order: neighbouring numbers together, each category by itself."""
        found = list[tuple[TableColumn, ...]]()
        for levels, some in groupby(self.columns, lambda column: bool(column.levels)):
            group = tuple(some)
            found += [(column,) for column in group] if levels else [group]
        return tuple(found)

    def _parts(self, inputs: Tensor) -> Iterator[tuple[tuple[TableColumn, ...], Tensor]]:
        widths = [sum(column.width for column in group) for group in self._groups]
        yield from zip(self._groups, inputs.split(widths, -1), strict=True)

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        scale = _row(like, [column.std for column in self.columns])
        return scale, torch.tensor([bool(column.levels) for column in self.columns], device=like.device)


def _row(like: Tensor, numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
