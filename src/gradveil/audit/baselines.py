"""Baselines: the chance of an attacker that only guesses, and tests of attacks against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradveil.audit.result_rows import Row
from gradveil.core.formatting import plural
from gradveil.core.noise import Key
from gradveil.core.space import Space
from gradveil.core.streams import Stream
from gradveil.data import Dataset
from gradveil.metrics import Risk, risk, wilson
from gradveil.metrics.statistics import added, beta_binomial, bootstrap_maximum, holm, matches, upper_tail

PAIRS = 60_000
"""Pairs of 32x32 images with one channel that all classes of a run are judged by: half a second to two of one core."""
TESTED = 400
"""So many images of a class that a guess may pass for are enough: a share of them is known to 2.5 points."""
AVERAGED = 1000
"""So many images of a class that its mean is taken over."""

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


class GuessSample(NamedTuple):
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
        class. The guesses are chosen greedily to cover the public images. `exact`: almost exactly.
        """
        if not self._testable(label):
            return UNTESTABLE
        found = self._field(label)
        return (found.exactly if exact else found.chances).first(guesses)[-1]

    def at_most(self, label: int, guesses: int = 1, *, exact: bool = False) -> Chance:
        """Return the larger chance of an image: by guesses of its class, if any can be tested, or of any class."""
        classes = [label, None] if self._testable(label) else [None]
        return max((self.chance(one, guesses, exact=exact) for one in classes), key=lambda chance: chance.share)

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
            curve = (found.exactly if exact else found.chances).first(counts.total())
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
        space = self.public.space
        passes = space.passes(found.similarity, space.exactly if exact else self.threshold)
        return _Curve(passes, found.places, weights).first(counts.total())[-1]

    def sample(self, label: int) -> GuessSample:
        """Count what the chance of a class rests on."""
        found = self._field(label)
        guesses, images = found.similarity.shape
        return GuessSample(guesses, images, found.of)

    def images(self, label: int | None) -> Tensor:
        """Return the views of the public images of a class (None: of any) that guesses are compared with."""
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
            mean = public.space.average(public.views.double()) if label is None else self.mean()
            self._fields[label] = _compare(public, mean, self.threshold, self._pairs(), len(members))
        return self._fields[label]

    def _pairs(self) -> int:
        # `PAIRS` is meant for 1024 values of a view: larger views get fewer pairs, at the same cost.
        return PAIRS * 1024 // math.prod(self.public.space.view_shape) // self.classes


class NamingChance(NamedTuple):
    """The chance that a guess names an image, by being nearer to it than to any other private image."""

    share: float
    gallery: int
    """The number of private images of its class."""
    exact: bool
    """Whether each guess names one image of so many, all equally likely; otherwise the share is an upper bound."""
    aimed: float
    """The chance at most if the attacker knows the other images of the batch, and aims all guesses at this one."""

    def record(self) -> dict[str, float | int]:
        """Return the chance as an image's record holds it."""
        return {"identified": self.share, **({"gallery": self.gallery} if self.exact else {})}


class Gallery:
    """The private images that a guess can name: exact copies are one image, and naming it identifies all of them."""

    def __init__(self, pixels: Tensor, targets: Tensor) -> None:
        """Find the exact copies among images [N, C, H, W] of these classes."""
        self._image, self._targets = without_copies(pixels), targets.cpu()
        self._distinct = int(self._image.max()) + 1

    def twins(self, places: Sequence[int]) -> list[bool]:
        """Return which images of a batch, at these places of the gallery, are in it more than once."""
        images = [int(self._image[place]) for place in places]
        return [images.count(image) > 1 for image in images]

    def of_batch(self, labels: Sequence[int]) -> list[NamingChance]:
        """Return the chance of each image of a batch to be named by a guess, given the labels of the batch.

        An image of a class is equally likely to be any private image of it. The guesses at a class name the images of
        it that have the most copies. A batch's guesses may also all go where they hit the most images of the batch: the
        chance of an image is at least the average share that these reach.
        """
        members = {label: self._targets == label for label in set(labels)}
        weights, found = torch.zeros(len(self._targets), dtype=torch.double), dict[int, NamingChance]()
        for label, count in Counter(labels).items():
            size = int(members[label].sum())
            weights[members[label]] = count / size
            copies = torch.bincount(self._image[members[label]])
            share = min(1.0, _most(copies, count) / size)
            # Known are count - 1 of the class's images: it is one of the others.
            aimed = min(1.0, _most(copies, len(labels)) / (size - count + 1))
            found[label] = NamingChance(share, size, int(copies.max()) == 1, aimed)
        hits = torch.zeros(self._distinct, dtype=torch.double).index_add_(0, self._image, weights)
        average = float(hits.topk(min(len(labels), self._distinct)).values.sum()) / len(labels)
        for label, one in found.items():
            if average > one.share + 1e-9:
                found[label] = NamingChance(min(1.0, average), one.gallery, False, max(one.aimed, min(1.0, average)))
        return [found[label] for label in labels]


def _most(copies: Tensor, guesses: int) -> int:
    """Count the images that so many guesses name at most."""
    return int(copies.topk(min(guesses, len(copies))).values.sum())


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
    """The headline score [guesses, images], -1 for a guess and itself."""
    places: Tensor
    """Places of the guesses among the images, -1 for one that is none of them."""
    chances: _Curve
    """For one guess, two, and so on, until more are of no use."""
    exactly: _Curve
    """The same for images recovered almost exactly."""
    of: int


def _compare(public: Dataset, overall: Tensor, threshold: float, pairs: int, of: int) -> _Field:
    """Compare the candidates of a class with its images, as far as the budget of pairs goes."""
    space, views = public.space, public.views.double()
    few = len(views) ** 2 <= pairs
    # Between the limits six images a guess: sqrt(6 pairs) images and sqrt(pairs / 6) guesses.
    tested = views if few else views[: max(16, min(TESTED, math.isqrt(6 * pairs)))]
    guesses = torch.arange(len(tested)) if few else _candidates(space, tested, max(8, pairs // len(tested)))
    alike = space.similarity(tested[guesses], tested)
    alike[torch.arange(len(guesses)), guesses] = -1
    averaged = torch.cat([space.guesses(views, len(tested)), overall.expand_as(tested)[None]])
    averaged = space.similarity(averaged, tested)
    places = torch.cat([guesses, torch.full((len(averaged),), -1)])
    similarity = torch.cat([alike, averaged])
    even = torch.ones(len(tested), dtype=torch.double)
    levels = threshold, space.exactly
    chances, exactly = (_Curve(space.passes(similarity, least), places, even) for least in levels)
    return _Field(tested, public.targets[: len(tested)], space.average(views), similarity, places, chances, exactly, of)


def _candidates(space: Space, tested: Tensor, count: int) -> Tensor:
    """Choose images to guess with: the most typical, and the first ones (the images are in random order)."""
    chosen = torch.cat([space.central(tested)[: (count + 1) // 2], torch.arange(min(count // 2, len(tested)))])
    return chosen.unique()


class _Curve:
    """The chances of one guess, two, and so on; a guess is chosen when it is asked for."""

    def __init__(self, passes: Tensor, places: Tensor, weights: Tensor) -> None:
        """Take which images [guesses, images] each guess passes for, the guesses' places, the images' weights."""
        self._further, self._found = _cover(passes, places, weights), list[Chance]()

    def first(self, guesses: int) -> list[Chance]:
        """Return the chances of up to so many guesses: fewer where more are of no use, but at least one."""
        self._found += islice(self._further, max(0, guesses - len(self._found)))
        return self._found[:guesses]


def _cover(passes: Tensor, places: Tensor, weights: Tensor) -> Iterator[Chance]:
    """Choose guesses greedily, each for the most images that none before passes for; yield the share after each.

    Shares are of the weights of those images that are no guesses themselves.
    """
    covered, left = torch.zeros(len(weights), dtype=torch.bool), weights.clone()
    passing, passes_itself = passes.double(), passes[torch.arange(len(places)), places]
    before = -1.0
    while left.any():
        itself = torch.where(places >= 0, left[places], 0.0)
        # A place of -1 reads the last image here; `itself` = 0 leaves that out of the gains.
        own = covered[places] | passes_itself
        gains = left[covered].sum() + passing @ torch.where(covered, 0.0, left) - itself * own
        shares = gains / (left.sum() - itself).clamp(min=1e-12)
        best = int(shares.argmax())
        covered = covered | passes[best]
        if places[best] >= 0:
            left[places[best]] = 0
        # The same weights in another order may add up to slightly more.
        share = min(1.0, float(left[covered].sum() / left.sum())) if left.any() else 1.0
        if share <= before + 1e-12:
            return
        before = share
        guess = "the mean image" if best == len(passes) - 1 else "the mean of the class"
        guess = "an image of the class" if places[best] >= 0 else guess
        yield Chance(share, int((left > 0).sum()), guess)
    if before < 0:
        yield UNTESTABLE


LEVEL = 0.05
"""The probability, at most, of calling attackers that only guess a leak, per defence and setting."""


class Criterion(NamedTuple):
    """One way in which an image can leak: the field of an image's score, and those of its chance by a guess."""

    flag: str
    expected: str
    control: str
    size: str
    """The number of images behind the chance."""


CRITERIA = {
    "recovered": Criterion("success", "expected", "recovered", "public"),
    "recovered almost exactly": Criterion("exact", "expected", "exact", "public_exact"),
    "identified": Criterion("identified", "expected", "identified", "gallery"),
    "recovered as trained on": Criterion("success_transformed", "expected_transformed", "recovered", "public"),
    "identified as trained on": Criterion("identified_transformed", "expected_transformed", "identified", "gallery"),
}
"""Criteria of a leak: of the private images, and of what a batch defence made of them, where one was used."""


@dataclass(frozen=True)
class Test:
    """A one-sided exact test of the number of images hit against an attacker that only guesses."""

    attack: str
    """The attack's canonical text."""
    number: int
    """The trial's place in the run."""
    criterion: str
    observed: int
    images: int
    expected: float
    """The number of images that the best guess hits on average."""
    p: float
    adjusted: float
    """The p-value after Holm's correction for all attackers and criteria of the verdict."""
    noun: str = "image"
    of_parts: bool = False
    """Whether parts of examples were counted, such as tokens of texts."""

    @property
    def count(self) -> str:
        """What was hit, in words: of parts with what they are called."""
        return f"{self.observed} of {plural(self.images, self.noun) if self.of_parts else self.images} {self.criterion}"

    @property
    def hits_half(self) -> bool:
        """Whether at least half of the images were recovered."""
        return self.criterion.startswith("recovered") and 2 * self.observed >= self.images

    @property
    def baseline(self) -> float:
        """The share of images that the best guess is expected to hit."""
        return self.expected / self.images

    def plain(self) -> dict[str, Any]:
        """Return it as one plain object, its p-value corrected for all attackers and criteria."""
        counts = {"criterion": self.criterion, "observed": self.observed, "images": self.images}
        parts = {"parts": self.noun} if self.of_parts else {}
        return counts | parts | {"baseline": self.baseline, "p": self.adjusted}

    @property
    def leaks(self) -> bool:
        """Whether guessing is rejected at 5%."""
        return self.adjusted <= LEVEL


def tests_by_trial(rows: Sequence[Row]) -> list[tuple[Test, ...]]:
    """Test each trial by each criterion that it has, corrected for all of them (Holm)."""
    found = [
        [*(test for name in CRITERIA if (test := _test(row, name)) is not None), *_tests_of_parts(row)] for row in rows
    ]
    adjusted = iter(holm([test.p for tests in found for test in tests]))
    return [tuple(replace(test, adjusted=next(adjusted)) for test in tests) for tests in found]


def tests_of(rows: Sequence[Row]) -> tuple[Test, ...]:
    """Test all trials of a verdict together."""
    return tuple(test for tests in tests_by_trial(rows) for test in tests)


def leaks(row: Row) -> bool:
    """Report whether one trial alone hits more images than guessing explains, by any criterion."""
    return any(test.leaks for test in tests_of([row]))


def identifies(row: Row) -> bool:
    """Report whether one trial alone identifies more images than guessing explains."""
    return any(test.leaks and test.criterion.startswith("identified") for test in tests_of([row]))


def expected_of(row: Row, criterion: str) -> float | None:
    """Compute how many images of a trial the best guess hits on average; None where that is not known."""
    test = _test(row, criterion)
    return None if test is None else test.expected


def _test(row: Row, name: str) -> Test | None:
    """Test one trial by one criterion; None where the criterion or its chance is not there."""
    criterion = CRITERIA[name]
    images = [image for image in _images(row) if image.scores.get(criterion.flag) is not None]
    chances = [_chance(row, image.scores, criterion) for image in images]
    known = [chance for chance in chances if chance is not None]
    if not images or len(known) < len(images):
        return None
    counts = _identified if criterion.control == "identified" else _recovered
    observed = sum(bool(image.scores[criterion.flag]) for image in images)
    # Nobody knows how many copies of an image one guess hits at a time: the number with the largest p counts. It
    # changes the spread of the hits and not their mean, so that the first distribution gives `expected`.
    most = max(_multiplicities(images).values())
    masses = [added(counts(images, known, together)) for together in range(1, most + 1)]
    expected = sum(count * share for count, share in enumerate(masses[0]))
    p = max(upper_tail(mass, observed) for mass in masses)
    return Test(row.attack, row.number, name, observed, len(images), expected, p, p, row.words.noun)


def _tests_of_parts(row: Row) -> Iterator[Test]:
    """Yield the tests of parts of examples that the trial's record holds."""
    for each in row.info.get("parts") or ():
        shares = each["observed"], each["parts"], each["expected"], each["p"], each["p"]
        if each["parts"]:
            yield Test(row.attack, row.number, each["criterion"], *shares, each["noun"], of_parts=True)


class _ScoredImage(NamedTuple):
    client: int
    label: int
    scores: Mapping[str, Any]


class _Chance(NamedTuple):
    share: float
    images: int | None
    """The number of images behind the share; None where it is known exactly, or an upper bound."""


def _images(row: Row) -> Iterator[_ScoredImage]:
    for record in row.trial.records:
        scores = record.get("per_image", ())
        labels = record.get("label") or [0] * len(scores)
        for label, each in zip(labels, scores, strict=True):
            yield _ScoredImage(int(record["target_client"]), int(label), each)


def _chance(row: Row, scores: Mapping[str, Any], criterion: Criterion) -> _Chance | None:
    """Look up the probability that a guess hits one image."""
    expected = scores.get(criterion.expected) or {}
    if criterion.control in expected:
        return _Chance(float(expected[criterion.control]), expected.get(criterion.size) or None)
    if expected or criterion.expected != "expected" or criterion.control == "exact":
        return None
    # An earlier version recorded one draw of each guess.
    baseline = row.baseline if criterion.control == "recovered" else row.baseline_of("identified")
    return None if baseline is None else _Chance(baseline, None)


def _multiplicities(images: Sequence[_ScoredImage]) -> Counter[tuple[int, int]]:
    """Count the target images that are exact copies of each other, and each other one by itself."""
    return Counter(
        (1, place) if image.scores.get("copy_of") is None else (0, int(image.scores["copy_of"]))
        for place, image in enumerate(images)
    )


def _recovered(
    images: Sequence[_ScoredImage], chances: Sequence[_Chance], together: int
) -> Iterator[tuple[float, ...]]:
    """Yield the distributions of the number of images that guesses pass for, one per class.

    Images of a class share one chance, which is known from the auxiliary data only. Of exact copies so many at a time
    are hit by the same guess, `together`: all by one that is made for each of them.
    """
    return _in_blocks(images, chances, together, [image.label for image in images])


def _in_blocks(
    images: Sequence[_ScoredImage], chances: Sequence[_Chance], together: int, kinds: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """Yield the distributions of hits per kind and chance, where exact copies are hit in blocks."""
    copies = Counter(
        (kind, chance, image.scores.get("copy_of")) for kind, image, chance in zip(kinds, images, chances, strict=True)
    )
    blocks = Counter[tuple[int, _Chance, int]]()
    for (kind, chance, copy), count in copies.items():
        size = 1 if copy is None else together
        blocks[kind, chance, size] += count // size
        if count % size:
            blocks[kind, chance, count % size] += 1
    for (_, chance, size), count in blocks.items():
        mass = [0.0] * (count * size + 1)
        # A block is hit as a whole: hits come in multiples of its size.
        mass[::size] = beta_binomial(count, chance.share, chance.images)
        yield tuple(mass)


def _identified(
    images: Sequence[_ScoredImage], chances: Sequence[_Chance], together: int
) -> Iterator[tuple[float, ...]]:
    """Yield the distributions of the number of images that guesses single out, one per class.

    Given its class, an image is as likely to be any of the gallery's. Different guesses at one class point at different
    images of it, which exclude each other or come together: the counts are no sum of independent ones.
    """
    groups: dict[tuple[int, int | None], Counter[int]] = {}
    for image, chance in zip(images, chances, strict=True):
        groups.setdefault((image.label, chance.images), Counter())[image.client] += 1
    for (_, gallery), clients in groups.items():
        if gallery is not None and clients.total() <= gallery:
            yield matches(tuple(sorted(clients.values())), gallery)
    rest = [
        (image, _Chance(chance.share, None))
        for image, chance in zip(images, chances, strict=True)
        if chance.images is None or groups[image.label, chance.images].total() > chance.images
    ]
    yield from _in_blocks([image for image, _ in rest], [chance for _, chance in rest], together, [0] * len(rest))


def baseline(row: Row) -> float:
    """Compute the rate of recovered and identified images that the best guess is expected to reach."""
    each = [_headline(row, scores) for _, _, scores in row.scores()]
    return fmean(each) if each else 0.0


def _headline(row: Row, scores: Mapping[str, Any]) -> float:
    expected = scores.get("expected") or {}
    if "identifiable" in expected:
        return float(expected["identifiable"])
    chances = [_chance(row, scores, CRITERIA[name]) for name in ("recovered", "identified")]
    return min((chance.share for chance in chances if chance is not None), default=0.0)


def risk_of(row: Row) -> Risk:
    """Compute the risk of the headline over the larger of baseline and mismatch control."""
    return risk(
        row.identifiable, row.images, max(baseline(row), row.control("wrong_target_client", "identifiable") or 0.0)
    )


def interval_of(best: Row, judged: Sequence[Row]) -> tuple[float, float]:
    """Compute the 95% interval of the headline: Wilson's, or wider where it is the maximum over several attackers.

    The lower end of the highest of k rates is Wilson's at 1 - 0.05 / k: the highest rate is partly luck. Clients are
    also drawn with replacement, the same ones for all attackers, with the maximum taken in each draw (bootstrap); the
    wider of the two counts.
    """
    same = [row for row in judged if row.singled_out.keys() == best.singled_out.keys()]
    low, high = wilson(best.identifiable, best.images)
    if len(same) < 2:
        return low, high
    clients = sorted({client for client, _ in best.singled_out})
    sizes = Counter(client for client, _ in best.singled_out)
    hits = [Counter(client for (client, _), hit in row.singled_out.items() if hit) for row in same]
    counts = [[one[client] for client in clients] for one in hits]
    drawn = bootstrap_maximum(counts, [sizes[client] for client in clients], Key(0, (Stream.BOOTSTRAP,)))
    careful, _ = wilson(best.identifiable, best.images, 1 - LEVEL / len(same))
    return min(careful, drawn[0]), max(high, drawn[1])
