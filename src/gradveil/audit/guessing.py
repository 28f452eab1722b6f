"""The chance of an attacker that only guesses, from auxiliary data: how often one image passes for another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.data import Dataset
from gradveil.metrics import ssim_pairs

PAIRS = 60_000
"""Pairs of 32x32 images with one channel that all classes of a run are judged by: half a second to two of one core."""
TESTED = 400
"""So many images of a class that a guess may pass for are enough: a share of them is known to 2.5 points."""
AVERAGED = 1000
"""So many images of a class that its mean is taken over."""

EXACT = 0.9
"""An image is recovered almost exactly where its SSIM is above this: hardly any guess is, whatever its class."""

CONTRASTS = (1.0, 1.3, 1.7)
"""The mean of a class is also tried with its contrast raised: SSIM asks for the contrast of a single image."""

_KEY = Key(0, (Stream.BASELINE, Stream.IMAGES))


class Chance(NamedTuple):
    """The chance that a guess passes for an image of a class."""

    share: float
    """The share of the class's public images that the best guesses pass for, themselves left out."""
    images: int
    """The number of public images that it is a share of."""
    guess: str
    """The name of the best guess."""


class Sample(NamedTuple):
    """The numbers of guesses tried, of public images they were compared with, and of all public images of the class."""

    guesses: int
    images: int
    of: int


@dataclass(frozen=True)
class Guessing:
    """The best guesses without an update, per class: no answer that ignores the update is expected to pass more often.

    Candidates are public images of the class, the mean of the class (its contrast raised, too) and the mean of all
    public images. A candidate's chance is the share of the class's *other* public images that its SSIM is above the
    threshold for; the mean of a class is taken without the image that it is compared with. Two assumptions: target
    images of a class are drawn like its public images; and no guess passes for clearly more of them than the best
    candidate. The maximum over candidates makes the chance rather too high where there are few images, never too low.

    Large classes are sampled by an explicit key: `sample` has the numbers.
    """

    public: Dataset
    threshold: float
    classes: int
    """The number of classes that share the budget of pairs."""
    _fields: dict[int | None, _Field] = field(default_factory=dict["int | None", "_Field"])

    def chance(self, label: int | None, guesses: int = 1, *, exact: bool = False) -> Chance:
        """Return the chance that an image of a class (None: any) is passed for by one of so many guesses at that class.

        Of a batch it is not known which reconstruction shows which image, so each may be passed for by any guess at its
        class. The guesses are chosen greedily to cover the public images. `exact`: above `EXACT`, not the threshold.
        """
        found = self._field(label)
        chances = found.exactly if exact else found.chances
        return chances[min(guesses, len(chances)) - 1]

    def of_batch(self, labels: Sequence[int], *, exact: bool = False) -> list[Chance]:
        """Return the chance of each image of a batch, given the labels of the batch.

        Any guess of the batch may be matched with any of its images. So an image has the larger of two chances: by as
        many guesses at its class as the batch has images of it, and by all guesses of the batch at any class.
        """
        of_class = Counter(labels)
        chances = {label: self.chance(label, count, exact=exact) for label, count in of_class.items()}
        if len(of_class) > 1:
            anything = self.chance(None, len(labels), exact=exact)
            chances = {label: max(chance, anything, key=lambda one: one.share) for label, chance in chances.items()}
        return [chances[label] for label in labels]

    def sample(self, label: int) -> Sample:
        """Count what the chance of a class rests on."""
        found = self._field(label)
        guesses, images = found.passes.shape
        return Sample(guesses, images, found.of)

    def images(self, label: int | None) -> Tensor:
        """Return the public images of a class (None: of any) that guesses are compared with, as pixels."""
        return self._field(label).tested

    def class_mean(self, label: int) -> Tensor:
        """Return the mean of the public images of a class."""
        return self._field(label).mean

    def mean(self) -> Tensor:
        """Return the mean of all public images."""
        return self._field(None).mean

    def _field(self, label: int | None) -> _Field:
        members = (
            torch.arange(len(self.public)) if label is None else (self.public.targets == label).nonzero().flatten()
        )
        if label is not None and len(members) < 2:
            return self._field(None)  # the class has no image to spare: an image of any class stands for it
        if label not in self._fields:
            key = _KEY.child(Stream.ALL if label is None else label)
            order = members[torch.randperm(len(members), generator=key.generator())[:AVERAGED]]
            pixels = self.public.subset(order).pixels.double()
            mean = pixels.mean(0) if label is None else self.mean()
            self._fields[label] = _compare(pixels, mean, self.threshold, self._pairs(pixels), len(members))
        return self._fields[label]

    def _pairs(self, pixels: Tensor) -> int:
        return PAIRS * 1024 // pixels[0].numel() // self.classes


class Named(NamedTuple):
    """The chance that a guess names an image, by being nearer to it than to any other private image."""

    share: float
    gallery: int
    """The number of private images of its class."""
    exact: bool
    """Whether each guess names one image of so many, all equally likely; otherwise the share is an upper bound."""

    def record(self) -> dict[str, float | int]:
        """Return the chance as an image's record holds it."""
        return {"identified": self.share, **({"gallery": self.gallery} if self.exact else {})}


class Gallery:
    """The private images that a guess can name: exact copies are one image, and naming it identifies all of them."""

    def __init__(self, pixels: Tensor, targets: Tensor) -> None:
        """Find the exact copies among images [N, C, H, W] of these classes."""
        known: dict[bytes, int] = {}
        flat = pixels.detach().cpu().contiguous().flatten(1) + 0.0  # no negative zeros
        self._image = torch.tensor([known.setdefault(one.numpy().tobytes(), len(known)) for one in flat])
        self._targets, self._distinct = targets.cpu(), len(known)

    def of_batch(self, labels: Sequence[int]) -> list[Named]:
        """Return the chance of each image of a batch to be named by a guess, given the labels of the batch.

        An image of a class is equally likely to be any private image of it. The guesses at a class name the images of
        it that have the most copies. A batch's guesses may also all go where they hit the most images of the batch: the
        chance of an image is at least the average share that these reach.
        """
        members = {label: self._targets == label for label in set(labels)}
        weights, found = torch.zeros(len(self._targets), dtype=torch.double), dict[int, Named]()
        for label, count in Counter(labels).items():
            size = int(members[label].sum())
            weights[members[label]] = count / size
            copies = torch.bincount(self._image[members[label]])
            share = min(1.0, int(copies.topk(min(count, len(copies))).values.sum()) / size)
            found[label] = Named(share, size, int(copies.max()) == 1)
        hits = torch.zeros(self._distinct, dtype=torch.double).index_add_(0, self._image, weights)
        average = float(hits.topk(min(len(labels), self._distinct)).values.sum()) / len(labels)
        for label, one in found.items():
            if average > one.share + 1e-9:
                found[label] = Named(min(1.0, average), one.gallery, False)
        return [found[label] for label in labels]


@dataclass(frozen=True)
class _Field:
    """The public images of a class, and which of them each candidate passes for."""

    tested: Tensor
    mean: Tensor
    passes: Tensor
    """[guesses, images], false for a guess and itself."""
    chances: tuple[Chance, ...]
    """For one guess, two, and so on, until more are of no use."""
    exactly: tuple[Chance, ...]
    """The same above `EXACT` instead of the threshold."""
    of: int


def _compare(pixels: Tensor, overall: Tensor, threshold: float, pairs: int, of: int) -> _Field:
    """Compare the candidates of a class with its images, as far as the budget of pairs goes."""
    count = len(pixels)
    few = count * count <= pairs
    tested = pixels if few else pixels[: max(16, min(TESTED, math.isqrt(6 * pairs)))]
    guesses = torch.arange(len(tested)) if few else _candidates(tested, max(8, pairs // len(tested)))
    alike = ssim_pairs(tested[guesses], tested)
    alike[torch.arange(len(guesses)), guesses] = -1
    mean = pixels.mean(0)
    others = (mean * count - tested) / max(1, count - 1)
    level = others.mean((-3, -2, -1), keepdim=True)
    means = [(level + contrast * (others - level)).clamp(0, 1) for contrast in CONTRASTS]
    averaged = ssim_pairs(torch.stack([*means, overall.expand_as(tested)]), tested)
    # Places of the candidates among the images; the means are none of them.
    places = torch.cat([guesses, torch.full((len(averaged),), -1)])
    similarity = torch.cat([alike, averaged])
    chances, exactly = (tuple(_cover(similarity > least, places)) for least in (threshold, EXACT))
    return _Field(tested, mean, similarity > threshold, chances, exactly, of)


def _candidates(tested: Tensor, count: int) -> Tensor:
    """Choose images to guess with: those nearest to the mean, and the first ones (the images are in random order)."""
    central = (tested - tested.mean(0)).square().flatten(1).sum(1).argsort()
    chosen = torch.cat([central[: (count + 1) // 2], torch.arange(min(count // 2, len(tested)))])
    return chosen.unique()


def _cover(passes: Tensor, places: Tensor) -> list[Chance]:
    """Choose guesses greedily, each for the most images that none before passes for; return the share after each."""
    count = passes.shape[1]
    covered, left = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    found: list[Chance] = []
    while left.any():
        # A share is of the images that are not guesses themselves.
        inside = (places >= 0) & left[places]
        reached = covered | passes
        itself = inside & reached[torch.arange(len(places)), places]
        gains = (reached & left).sum(1) - itself.long()
        shares = gains / (left.sum() - inside.long()).clamp(min=1)
        best = int(shares.argmax())
        covered = covered | passes[best]
        if places[best] >= 0:
            left[places[best]] = False
        images = int(left.sum())
        share = int((covered & left).sum()) / images if images else 1.0
        if found and share <= found[-1].share:
            break
        found.append(Chance(share, images, _name(best - len(passes))))
    return found or [Chance(1.0, 0, "")]


def _name(place: int) -> str:
    """Name a candidate, counted from the last."""
    if place == -1:
        return "the mean image"
    return "the mean of the class" if place >= -1 - len(CONTRASTS) else "an image of the class"
