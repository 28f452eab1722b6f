"""An imprint block: all measures are one number of the image, each passes those above its own threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.base import Prospect
from gradveil.attacks.infer import Labels
from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.planted import Measures, Planting
from gradveil.attacks.undo import undoing
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key

_CLEAR = 6.0
"""How many times a bin's gradient must be as large as that of bins which hold no example, but may hold noise."""
_EXACT = 1e-9
"""The share of the largest below which a bin is empty where there is no noise."""


@dataclass(frozen=True)
class Imprint(Planting):
    """Rob: bins of one measurement, so that neighbouring rows differ by the examples of one bin (Fowl et al. 2022).

    Row i lets those through whose measurement is above threshold c_i; so (dW_i - dW_{i+1}) / (db_i - db_{i+1}) is the
    mean of the examples in bin i, and the example itself where it is alone. The thresholds are quantiles of the
    measurement over public images, of a normal or Laplace law with their mean and spread, or of the images themselves.

    With `sparse` each row lets through the examples of its own bin alone: it shows them without its neighbour, and
    rows of empty bins are zero, so that pruning leaves most of the others.
    """

    name: str = "rob"
    bins: int = 64
    measure: Literal["brightness", "random"] = "brightness"
    law: Literal["normal", "laplace", "empirical"] = "normal"
    sparse: bool = False
    gain: float = 1e-3
    decoys: int = 0
    labels: Labels = "given"
    undo: bool = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images, to place the bins by."""
        known: dict[str, How] = {"public": Known()}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure a bin."""
        return self.bins

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to place bins without public images."""
        yield from super().problems(prospect)
        if not prospect.public:
            yield Problem("data.public", "no public images to place the bins by", "choose data that has, or curious")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Repeat one measurement, with the thresholds as biases."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            raise fail(
                f"attack {self.name}", "was given no public images to place its bins by", "give Knowledge.public"
            )
        row = torch.full((pixels,), 1 / pixels)
        if self.measure == "random":
            row = torch.randn(pixels, generator=key.generator()) / pixels**0.5
        span = knowledge.upper - knowledge.lower
        images = ((knowledge.public.inputs - knowledge.lower) / span).flatten(1).cpu().to(row)
        # No measurement of pixels in [0, 1] lies outside of the sums of negative and of positive weights.
        margin = 1e-3 * float(row.abs().sum())
        ends = torch.stack([row.clamp(max=0).sum() - margin, row.clamp(min=0).sum() + margin])
        cuts = self._quantiles(images @ row).clamp(float(ends[0]), float(ends[1]))
        thresholds = torch.cat([ends[:1], cuts])
        widths = torch.cat([cuts, ends[1:]]) - thresholds
        return Measures(row.expand(self.bins, -1), -thresholds, widths if self.sparse else None)

    def _quantiles(self, values: Tensor) -> Tensor:
        """Return the 1/K, 2/K, ... (K - 1)/K quantiles of the measurement."""
        shares = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        if self.law == "empirical":
            return torch.quantile(values.double(), shares).to(values)
        spread = values.std(correction=0)
        if self.law == "normal":
            return values.mean() + spread * torch.special.ndtri(shares).to(values)
        tails = -(1 - 2 * (shares - 0.5).abs()).log() * (shares - 0.5).sign() / 2**0.5
        return values.mean() + spread * tails.to(values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Take neighbouring rows from each other; bins whose gradient is largest hold examples."""
        alone, errors = weight, bias
        if not self.sparse:
            alone = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
            errors = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
        size = errors.abs()
        # As many bins as there are examples may be full: of the others the median is empty, or the largest of few.
        empty = min((self.bins - 1) // 2, self.bins - count - 1)
        noise = float(size.sort().values[empty]) if empty >= 0 else 0.0
        floor = max(_CLEAR * noise, _EXACT * float(size.max()))
        best = size.argsort(descending=True, stable=True)[:count]
        clear = int((size[best] > floor).sum())
        # Where some bins stand out, the others are empty: what they hold is no image.
        best = best[: clear or int((size[best] > 0).sum())]
        return alone[best] / errors[best].unsqueeze(1), clear

    def planted(self) -> str:
        """Say what the block is."""
        return f"an imprint block of {self.bins} bins{self.and_decoys()} before the first layer"
