"""Trap weights: measures that few images pass, so that some of them pass one image alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import Prospect
from gradveil.attacks.infer import Labels
from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.planted import Measures, Planting
from gradveil.attacks.undo import undoing
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream

_SAME = 1e-3
"""How near to each other, in units of their size, two rows' images are that show one and the same example."""


_LISTED = 4
"""How many different images are looked at, in units of those that are sought."""
_INSIDE = 0.99
"""The share of an image's pixels that must lie in [0, 1]: a difference of images has others."""


@dataclass(frozen=True)
class Trap(Planting):
    """Curious: of each row half of the weights are negative, the others the same numbers, positive and a bit smaller.

    Row i is then below zero for most images of pixels in [0, 1], and dW_i / db_i is an example where it alone passes
    (Boenisch et al. 2023). With a `share` the factor is chosen by public images: rows pass this share of them.
    """

    name: str = "curious"
    rows: int = 256
    scale: float = 0.95
    std: float = 0.5
    share: float | None = None
    gain: float = 1e-3
    decoys: int = 0
    labels: Labels = "given"
    undo: bool = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images where the factor is chosen by them."""
        known: dict[str, How] = {"public": Known()} if self.share is not None else {}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure a row."""
        return self.rows

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to choose the factor without public images."""
        yield from super().problems(prospect)
        if self.share is not None and not prospect.public:
            yield Problem("data.public", "no public images to choose the factor by", "give scale in the place of share")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Draw the rows."""
        half = pixels // 2
        sizes = self.std * torch.randn(self.rows, half, generator=key.child(Stream.SIZES).generator()).abs()
        shuffled = torch.rand(self.rows, pixels, generator=key.child(Stream.PLACES).generator()).argsort(1)
        below, above = shuffled[:, :half], shuffled[:, half : 2 * half]
        negative = torch.zeros(self.rows, pixels).scatter_(1, below, -sizes)
        positive = torch.zeros(self.rows, pixels).scatter_(1, above, sizes)
        scale = self.scale if self.share is None else self._scale(negative, positive, knowledge, self.share)
        return Measures(negative + scale * positive, torch.zeros(self.rows))

    def _scale(self, negative: Tensor, positive: Tensor, knowledge: Knowledge, share: float) -> float:
        """Choose the factor at which rows pass a share of public images, on the average."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            raise fail(
                f"attack {self.name}",
                "was given no public images to choose its factor by",
                "give scale in the place of share",
            )
        span = knowledge.upper - knowledge.lower
        images = ((knowledge.public.inputs - knowledge.lower) / span).flatten(1).cpu().to(negative)
        # A row passes an image at every factor above the ratio of its negative to its positive part.
        ratios = (-(images @ negative.T) / (images @ positive.T).clamp_min(torch.finfo(negative.dtype).tiny)).flatten()
        rank = max(1, round(len(ratios) * share))
        return float(ratios.kthvalue(rank).values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Divide row by row; images that several rows show, and that are no mixtures, passed these rows alone."""
        passed = bias != 0
        images = weight[passed] / bias[passed].unsqueeze(1)
        if not len(images):
            return images, 0
        size = images.norm(dim=1)
        near = torch.cdist(images, images) <= _SAME * torch.minimum(size.unsqueeze(0), size.unsqueeze(1))
        strength, free = bias[passed].abs(), torch.ones(len(images), dtype=torch.bool, device=images.device)
        distinct: list[int] = []
        rows: list[int] = []
        while len(distinct) < _LISTED * count and bool(free.any()):
            alike = (near & free).sum(1) * free
            most = alike.max()
            place = int(torch.where(alike == most, strength, -1.0).argmax())
            distinct.append(place)
            rows.append(int(most))
            free = free & ~near[place]
            free[place] = False
        whole = (images[distinct] - 0.5).abs().le(0.5 + _SAME).double().mean(1) > _INSIDE
        alone = whole & ~_between(images[distinct], whole)
        # Sorting is stable: among the images alone, those that most rows show come first.
        order = (~alone).long().argsort(stable=True)[:count].tolist()
        clear = sum(rows[place] > 1 and bool(alone[place]) for place in order)
        return images[[distinct[place] for place in order]], clear

    def planted(self) -> str:
        """Say what the block is."""
        return f"a block of {self.rows} trap rows{self.and_decoys()} before the first layer"


def _between(images: Tensor, ends: Tensor) -> Tensor:
    """Tell which images lie between two of the marked ones: what two examples show together, when both pass."""
    products = images @ images.T
    found: list[Tensor] = []
    for place in range(len(images)):
        # The way from this image to one, times the way to another: they are opposite where it lies between the two.
        inner = products - products[place] - products[:, place : place + 1] + products[place, place]
        size = inner.diagonal().clamp_min(0).sqrt() * ends
        lengths = size.unsqueeze(1) * size
        found.append(((inner <= -(1 - _SAME) * lengths) & (lengths > 0)).any())
    return torch.stack(found)
