"""The chance of an attacker that only guesses, from auxiliary data: how often one image passes for another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

ALIKE = 8
"""Fewer images than this of a class say nothing about guesses at it: images of any class stand for them."""

_KEY = Key(0, (Stream.BASELINE, Stream.IMAGES))


class Chance(NamedTuple):
    """The chance that a guess passes for an image of a class."""

    share: float
    """The share of the class's public images that the best guesses pass for, themselves left out."""
    images: int
    """The number of public images that it is a share of."""
    guess: str
    """The name of the best guess."""


UNTESTABLE = Chance(1.0, 0, "")
"""The chance at a class with fewer than two public images: nothing bounds how many of its images a guess passes for."""


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
    candidate. The maximum over candidates makes the chance rather too high where there are few images. It may be too
    low by chance, which tests allow for by the number of images behind it. Of a class with fewer than two public images
    nothing is known: its chance is 1, and that of every batch with an image of it.

    Large classes are sampled by an explicit key: `sample` has the numbers.
    """

    public: Dataset
    threshold: float
    classes: int
    """The number of classes that share the budget of pairs."""
    _fields: dict[int | None, _Field] = field(default_factory=dict["int | None", "_Field"])
    _batches: dict[tuple[frozenset[tuple[int, int]], bool], Chance] = field(
        default_factory=dict["tuple[frozenset[tuple[int, int]], bool]", "Chance"]
    )

    def chance(self, label: int | None, guesses: int = 1, *, exact: bool = False) -> Chance:
        """Return the chance that an image of a class (None: any) is passed for by one of so many guesses at that class.

        Of a batch it is not known which reconstruction shows which image, so each may be passed for by any guess at its
        class. The guesses are chosen greedily to cover the public images. `exact`: above `EXACT`, not the threshold.
        """
        if not self._testable(label):
            return UNTESTABLE
        found = self._field(label)
        chances = found.exactly if exact else found.chances
        return chances[min(guesses, len(chances)) - 1]

    def of_batch(self, labels: Sequence[int], *, exact: bool = False) -> list[Chance]:
        """Return the chance of each image of a batch, given the labels of the batch.

        Any guess of the batch may be matched with any of its images, so an attacker may aim all of them at the easiest
        class. Every image of the batch has the same chance: the average over its images of what the best choice of
        guesses passes for. Among choices of the same average, one that treats all images alike is the most likely to
        hit clearly more images than that (W. Hoeffding, 1956).
        """
        counts = Counter(labels)
        if not all(map(self._testable, counts)):
            return [UNTESTABLE] * len(labels)
        if len(counts) == 1:
            return [self.chance(labels[0], len(labels), exact=exact)] * len(labels)
        where = frozenset(counts.items()), exact
        if where not in self._batches:
            choices = self._aimed(counts, exact), self._anywhere(counts, exact)
            self._batches[where] = max(choices, key=lambda one: one.share)
        return [self._batches[where]] * len(labels)

    def _aimed(self, counts: Counter[int], exact: bool) -> Chance:
        """Return the average chance where each guess aims at one class, and as many guesses do so as is best."""
        gains, images = list[float](), list[int]()
        for label, count in counts.items():
            found = self._field(label)
            curve = (found.exactly if exact else found.chances)[: counts.total()]
            shares = [0.0, *(chance.share for chance in curve)]
            gains += [count * (after - before) for before, after in pairwise(shares)]
            images.append(curve[min(count, len(curve)) - 1].images)
        # A class's gains fall from guess to guess; if one rises, the largest ones add up to more than can be had.
        most = sum(sorted(gains, reverse=True)[: counts.total()])
        return Chance(min(1.0, most / counts.total()), min(images), "guesses at the easiest classes")

    def _anywhere(self, counts: Counter[int], exact: bool) -> Chance:
        """Return the average chance where a guess may pass for images of any class, weighted as the batch's labels."""
        found = self._field(None)
        weights = torch.zeros(len(found.targets), dtype=torch.double)
        for label, count in counts.items():
            members = found.targets == label
            if int(members.sum()) < ALIKE:
                members = torch.ones_like(members)
            weights[members] += count / int(members.sum())
        passes = found.similarity > (EXACT if exact else self.threshold)
        curve = _cover(passes, found.places, weights)
        return curve[min(counts.total(), len(curve)) - 1]

    def sample(self, label: int) -> Sample:
        """Count what the chance of a class rests on."""
        found = self._field(label)
        guesses, images = found.similarity.shape
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

    def _testable(self, label: int | None) -> bool:
        return len(self._members(label)) > 1

    def _members(self, label: int | None) -> Tensor:
        """List the places of the public images of a class (None: of any)."""
        return torch.arange(len(self.public)) if label is None else (self.public.targets == label).nonzero().flatten()

    def _field(self, label: int | None) -> _Field:
        members = self._members(label)
        if label is not None and len(members) < 2:
            return self._field(None)  # for controls, which describe the data: an image of any class stands for it
        if label not in self._fields:
            key = _KEY.child(Stream.ALL if label is None else label)
            order = members[torch.randperm(len(members), generator=key.generator())[:AVERAGED]]
            public = self.public.subset(order)
            mean = public.pixels.double().mean(0) if label is None else self.mean()
            self._fields[label] = _compare(public, mean, self.threshold, self._pairs(public.pixels), len(members))
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
        self._image, self._targets = without_copies(pixels), targets.cpu()
        self._distinct = int(self._image.max()) + 1

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


def without_copies(pixels: Tensor) -> Tensor:
    """Assign numbers to images [N, C, H, W], from 0 on; exact copies get the same one.

    >>> without_copies(torch.tensor([3.0, 5.0, 3.0]).view(3, 1, 1, 1)).tolist()
    [0, 1, 0]
    """
    known: dict[bytes, int] = {}
    flat = pixels.detach().cpu().contiguous().flatten(1) + 0.0  # no negative zeros
    return torch.tensor([known.setdefault(one.numpy().tobytes(), len(known)) for one in flat])


@dataclass(frozen=True)
class _Field:
    """The public images of a class, and which of them each candidate passes for."""

    tested: Tensor
    targets: Tensor
    """The labels of these images."""
    mean: Tensor
    similarity: Tensor
    """SSIM [guesses, images], -1 for a guess and itself."""
    places: Tensor
    """Places of the guesses among the images, -1 for one that is none of them."""
    chances: tuple[Chance, ...]
    """For one guess, two, and so on, until more are of no use."""
    exactly: tuple[Chance, ...]
    """The same above `EXACT` instead of the threshold."""
    of: int


def _compare(public: Dataset, overall: Tensor, threshold: float, pairs: int, of: int) -> _Field:
    """Compare the candidates of a class with its images, as far as the budget of pairs goes."""
    pixels = public.pixels.double()
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
    places = torch.cat([guesses, torch.full((len(averaged),), -1)])
    similarity = torch.cat([alike, averaged])
    even = torch.ones(len(tested), dtype=torch.double)
    chances, exactly = (tuple(_cover(similarity > least, places, even)) for least in (threshold, EXACT))
    return _Field(tested, public.targets[: len(tested)], mean, similarity, places, chances, exactly, of)


def _candidates(tested: Tensor, count: int) -> Tensor:
    """Choose images to guess with: those nearest to the mean, and the first ones (the images are in random order)."""
    central = (tested - tested.mean(0)).square().flatten(1).sum(1).argsort()
    chosen = torch.cat([central[: (count + 1) // 2], torch.arange(min(count // 2, len(tested)))])
    return chosen.unique()


def _cover(passes: Tensor, places: Tensor, weights: Tensor) -> list[Chance]:
    """Choose guesses greedily, each for the most images that none before passes for; return the share after each.

    Shares are of the weights of those images that are no guesses themselves.
    """
    covered, left = torch.zeros(len(weights), dtype=torch.bool), weights.clone()
    found: list[Chance] = []
    while left.any():
        itself = torch.where(places >= 0, left[places], 0.0)
        reached = covered | passes
        own = reached[torch.arange(len(places)), places]
        gains = reached.double() @ left - itself * own
        shares = gains / (left.sum() - itself).clamp(min=1e-12)
        best = int(shares.argmax())
        covered = covered | passes[best]
        if places[best] >= 0:
            left[places[best]] = 0
        share = float(left[covered].sum() / left.sum()) if left.any() else 1.0
        if found and share <= found[-1].share + 1e-12:
            break
        found.append(Chance(share, int((left > 0).sum()), _name(best - len(passes))))
    return found or [Chance(1.0, 0, "")]


def _name(place: int) -> str:
    """Name a candidate, counted from the last."""
    if place == -1:
        return "the mean image"
    return "the mean of the class" if place >= -1 - len(CONTRASTS) else "an image of the class"
