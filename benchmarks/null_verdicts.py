"""How often attackers that only guess are called a leak, and how often real leaks are found.

    python -m benchmarks.null_verdicts --runs 100 --out benchmarks/results

Null runs: bundled digits (32x32 pixels) and faces are split at random into auxiliary and private images; attackers
answer with guesses from the auxiliary images; their answers are scored and tested as an audit does. In the sources
with near copies, 30% of the private images have one among the auxiliary images. In the source with an easy class, all
digits but the ones are half noise, and about half of the targets are ones. Synthetic null runs draw the chance of each
candidate guess instead, and its share among few public images from that. Verdicts are those of
`gradveil.audit.baselines.tests_of`, Holm's correction over attackers and criteria included.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.audit.baselines import Gallery, Guessing, tests_of
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.data import Dataset, load
from gradveil.metrics import ssim_pairs
from gradveil.metrics.matching import match
from gradveil.spaces import ImageSpace

KINDS = ("one image", "random images", "class mean", "best guess", "mix")
ALMOST = "almost exact"
"""The guesses that pass most often at the SSIM of the criterion 'recovered almost exactly'."""
BATCHES = ("easiest class", "best of batch")
"""Guesses at a batch: all at the class where they hit most, or each where it adds most."""
IMAGES = (8, 32, 128)
ATTACKERS = (1, 2, 5)
THRESHOLD = 0.5
COPIED = 0.3
"""The share of private images with a near copy among the auxiliary images, in the sources with copies."""


class Hits(NamedTuple):
    """What an attacker's answers came to, image by image."""

    success: Sequence[bool]
    identified: Sequence[bool] | None
    exact: Sequence[bool] | None = None


def row(number: int, hits: Hits, expected: Sequence[dict[str, float]], labels: Sequence[int], batch: int = 1) -> Row:
    """Make the trial that an audit would have recorded."""
    records = []
    for client in range(0, len(labels), batch):
        places = range(client, client + batch)
        images = [
            {
                "success": int(hits.success[place]),
                "identified": None if hits.identified is None else bool(hits.identified[place]),
                "exact": None if hits.exact is None else bool(hits.exact[place]),
                "expected": expected[place],
            }
            for place in places
        ]
        records.append({"target_client": client, "label": [labels[place] for place in places], "per_image": images})
    return Row(number, Trial({"attack": f"guess-{number}", "seed": 0, "controls": {}}, records))


def called_a_leak(rows: Sequence[Row]) -> bool:
    """Report whether the verdict on these trials is a leak."""
    return any(test.leaks for test in tests_of(rows))


@dataclass(frozen=True)
class Pool:
    """All images of a data set and a near copy of each, with what does not depend on how they are split."""

    data: Dataset
    """The images, then their near copies in the same order."""
    similarity: Tensor
    """SSIM of images and all data [images, 2 * images]."""
    distance: Tensor
    """Squared distances [images, 2 * images]."""

    @staticmethod
    def of(name: str, size: int, easy: int | None = None) -> Pool:
        """Pool both splits of a bundled data set; with `easy`, noise makes the images of all other classes unlike."""
        splits = load(name, size=size)
        inputs = torch.cat([splits.public.inputs, splits.private.inputs])
        targets = torch.cat([splits.public.targets, splits.private.targets])
        (low, high), draw = splits.public.space.bounds(splits.public.inputs), torch.Generator().manual_seed(0)
        if easy is not None:
            noise = torch.rand(inputs.shape, generator=draw) * (high - low)
            inputs = torch.where((targets == easy)[:, None, None, None], inputs, (inputs + low + noise) / 2)
        # Copies differ by noise that no eye sees: their SSIM is about 0.97.
        noise = 0.005 * torch.randn(inputs.shape, generator=draw) * (high - low)
        inputs, targets = torch.cat([inputs, (inputs + noise).clamp(low, high)]), targets.repeat(2)
        data = replace(splits.public, inputs=inputs, targets=targets, marks=())
        pixels = data.views.float()
        images = pixels[: len(data) // 2]
        alike = torch.cat([ssim_pairs(part, pixels) for part in images.split(64)])
        return Pool(data, alike, torch.cdist(images.flatten(1), pixels.flatten(1)).square())

    @property
    def images(self) -> int:
        """The number of images, copies left out."""
        return len(self.data) // 2


class Cover(NamedTuple):
    """Guesses at a class, each for the most auxiliary images that none before passes for, and how many it adds."""

    guesses: list[int]
    gains: list[float]

    @staticmethod
    def of(passes: Tensor, places: Sequence[int], count: int = 8) -> Cover:
        """Choose guesses by what they pass for [guesses, images]; `places` are the guesses' numbers."""
        left, guesses, gains = torch.ones(passes.shape[1], dtype=torch.bool), list[int](), list[float]()
        for _ in range(count):
            adds = (passes & left).sum(1)
            best = int(adds.argmax())
            left &= ~passes[best]
            guesses.append(places[best])
            gains.append(float(adds[best]) / passes.shape[1])
        return Cover(guesses, gains)


class Split:
    """A random split of a pool into auxiliary and private images, and the guesses at the private ones."""

    def __init__(self, pool: Pool, rng: np.random.Generator, copied: float = 0.0, easy: int | None = None) -> None:
        """Split a pool in half, replace a share of the private images by near copies of auxiliary ones, and compare.

        Half of the target images are of the `easy` class, if one is named.
        """
        order = torch.from_numpy(rng.permutation(pool.images))
        public, private = order[: pool.images // 2], order[pool.images // 2 :].clone()
        count = int(copied * len(public))
        private[:count] = public[:count] + pool.images
        self.labels = pool.data.targets[private].tolist()
        self.classes = sorted(set(self.labels))
        members = np.array(self.labels) == easy
        self.odds = np.where(members, members.sum().clip(1) ** -1.0, (~members).sum() ** -1.0)
        self.odds /= self.odds.sum()
        self.guessing = Guessing(pool.data.subset(public.tolist()), THRESHOLD, len(self.classes))
        pixels = pool.data.views.float()
        self.gallery = Gallery(pixels[private], pool.data.targets[private])
        # Guesses: every public image, the mean of each class, the mean image.
        means = torch.stack([*(self.guessing.class_mean(label) for label in self.classes), self.guessing.mean()])
        means = means.float()
        self.means = {label: len(public) + place for place, label in enumerate(self.classes)}
        similarity = torch.cat([pool.similarity[public][:, private], ssim_pairs(means, pixels[private])])
        self.passes, self.exactly = similarity > THRESHOLD, similarity > ImageSpace.exactly
        apart = torch.cdist(means.flatten(1), pixels[private].flatten(1)).square()
        self.distance = torch.cat([pool.distance[public][:, private], apart])
        self.nearest = self.distance.argmin(1)
        targets = pool.data.targets[public]
        self.own = {label: (targets == label).nonzero().flatten().numpy() for label in self.classes}
        self.best: dict[int, Cover] = {}
        self.almost: dict[int, Cover] = {}
        for label, own in self.own.items():
            images = public[torch.from_numpy(own)]
            among = pool.similarity[images][:, images].fill_diagonal_(-1)
            mean = ssim_pairs(means[self.means[label] - len(public)][None], pixels[images])
            alike, places = torch.cat([among, mean]), [*own.tolist(), self.means[label]]
            self.best[label] = Cover.of(alike > THRESHOLD, places)
            self.almost[label] = Cover.of(alike > ImageSpace.exactly, places)

    def expected(self, targets: Sequence[int], batch: int) -> list[dict[str, float]]:
        """Compute the chances that an audit records."""
        found: list[dict[str, float]] = []
        for first in range(0, len(targets), batch):
            labels = [self.labels[target] for target in targets[first : first + batch]]
            levels = self.guessing.of_batch(labels), self.guessing.of_batch(labels, exact=True)
            for one, exact, named in zip(*levels, self.gallery.of_batch(labels), strict=True):
                chances = {"recovered": one.share, "public": one.images}
                found.append(chances | {"exact": exact.share, "public_exact": exact.images} | named.record())
        return found

    def guesses(self, kind: str, targets: Sequence[int], batch: int, rng: np.random.Generator) -> list[int]:
        """Answer without an update."""
        if kind == "one image":
            return [int(rng.integers(sum(map(len, self.own.values()))))] * len(targets)
        if kind == "mix":
            each = [self.guesses(other, targets, batch, rng) for other in KINDS[:-1]]
            return [each[int(rng.integers(len(each)))][place] for place in range(len(targets))]
        found: list[int] = []
        for first in range(0, len(targets), batch):
            labels = [self.labels[target] for target in targets[first : first + batch]]
            if kind == "random images":
                found += [int(rng.choice(self.own[label])) for label in labels]
            elif kind == "class mean":
                found += [self.means[label] for label in labels]
            else:
                found += self.aimed(kind, labels)
        return found

    def aimed(self, kind: str, labels: Sequence[int]) -> list[int]:
        """Choose the guesses at one batch that are expected to pass for the most images, in one of several ways."""
        counts, cover = Counter(labels), self.almost if kind == ALMOST else self.best
        chosen = labels
        if kind == "easiest class":
            chosen = [max(counts, key=lambda label: counts[label] * sum(cover[label].gains[: len(labels)]))]
            chosen *= len(labels)
        elif kind == "best of batch":
            gains = [(counts[label] * gain, label) for label in counts for gain in cover[label].gains]
            chosen = [label for _, label in sorted(gains, reverse=True)[: len(labels)]]
        used, found = Counter[int](), list[int]()
        for label in chosen:
            found.append(cover[label].guesses[used[label]])
            used[label] += 1
        return found

    def score(self, guesses: Sequence[int], targets: Sequence[int], batch: int) -> Hits:
        """Match batches by least squared distance, and score as an audit does."""
        guess, target = torch.tensor(guesses).reshape(-1, batch), torch.tensor(targets).reshape(-1, batch)
        if batch > 1:
            order = match(self.distance[guess[:, None, :], target[:, :, None]].double())
            guess = guess.gather(1, order)
        named = (self.nearest[guess] == target).flatten().tolist()
        return Hits(
            self.passes[guess, target].flatten().tolist(), named, self.exactly[guess, target].flatten().tolist()
        )


def real_runs(
    splits: Sequence[Split], n: int, attackers: int, kind: str, batch: int, runs: int, rng: np.random.Generator
) -> Iterator[bool]:
    """Yield for each null run whether it is called a leak."""
    for run in range(runs):
        split = splits[run % len(splits)]
        targets = rng.choice(len(split.labels), n, replace=False, p=split.odds).tolist()
        expected, labels = split.expected(targets, batch), [split.labels[target] for target in targets]
        yield called_a_leak(
            [
                row(
                    number,
                    split.score(split.guesses(kind, targets, batch, rng), targets, batch),
                    expected,
                    labels,
                    batch,
                )
                for number in range(attackers)
            ]
        )


def synthetic_runs(
    n: int, attackers: int, kind: str, public: int | None, runs: int, rng: np.random.Generator
) -> Iterator[bool]:
    """Yield for each null run of synthetic chances whether it is called a leak."""
    for _ in range(runs):
        classes = int(rng.choice([1, 2, 10]))
        # The chance of each candidate guess of each class: one stands out, the others are of all kinds.
        chances = np.concatenate([rng.beta(1, 4, (classes, 30)), rng.uniform(0, 0.9, (classes, 1))], 1)
        shares = chances if public is None else rng.binomial(public, chances) / public
        gallery = int(rng.integers(max(2, n // classes), 4 * n))
        labels = np.sort(rng.integers(0, classes, n))
        labels = np.concatenate([np.full(min(gallery, (labels == c).sum()), c) for c in range(classes)])
        expected: list[dict[str, Any]] = [
            {"recovered": float(shares[c].max()), "public": public, "identified": 1 / gallery, "gallery": gallery}
            for c in labels
        ]
        place = np.concatenate([rng.permutation(gallery)[: (labels == c).sum()] for c in range(classes)])
        # One uniform number per image decides which guesses pass for it: easy images are easy for all attackers.
        ease = rng.random(len(labels))
        rows = []
        for number in range(attackers):
            names = KINDS[:-1] if kind == "mix" else (kind,)
            chosen = np.empty(len(labels), dtype=int)
            pointed = np.empty(len(labels), dtype=int)
            for c in range(classes):
                own = labels == c
                picks = {
                    "one image": np.full(own.sum(), rng.integers(31)),
                    "random images": rng.integers(0, 31, own.sum()),
                    "class mean": np.full(own.sum(), 30),
                    "best guess": np.full(own.sum(), shares[c].argmax()),
                }
                which = rng.integers(len(names), size=own.sum())
                chosen[own] = np.stack([picks[name] for name in names])[which, np.arange(own.sum())]
                many = kind in ("random images", "mix")
                pointed[own] = rng.permutation(gallery)[: own.sum()] if many else rng.integers(gallery)
            passed = ease < chances[labels, chosen]
            rows.append(row(number, Hits(passed.tolist(), (pointed == place).tolist()), expected, labels.tolist()))
        yield called_a_leak(rows)


def power(baseline: float, excess: float, attackers: int, n: int, runs: int, rng: np.random.Generator) -> float:
    """Compute how often one attacker above a known baseline is found among others that only guess.

    Identification is tested as well, with attackers that are right by chance among 100 images.
    """
    found = 0
    expected: list[dict[str, Any]] = [{"recovered": baseline, "public": None, "identified": 0.01, "gallery": None}] * n
    for _ in range(runs):
        rows = []
        for number in range(attackers):
            rate = baseline + (excess if number == 0 else 0)
            rows.append(
                row(number, Hits((rng.random(n) < rate).tolist(), (rng.random(n) < 0.01).tolist()), expected, [0] * n)
            )
        found += called_a_leak(rows)
    return found / runs


def null_table(runs: int, seed: int) -> list[dict[str, Any]]:
    """Run so many null runs in every trial of source, batch, kind of guess, number of attackers and of images."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []

    def add(source: str, kind: str, attackers: int, n: int, batch: int, outcomes: Iterator[bool]) -> None:
        leaks = sum(outcomes)
        trial = {"source": source, "kind": kind, "attackers": attackers, "n": n, "batch": batch}
        rows.append({**trial, "runs": runs, "leaks": leaks, "rate": leaks / runs})
        print(*rows[-1].values(), flush=True)

    trials = [(attackers, n) for attackers in ATTACKERS for n in IMAGES]
    singly, together = (1, (*KINDS, ALMOST)), (8, (*KINDS, ALMOST, *BATCHES))
    for name, count, easy in (("digits", 20, None), ("faces", 50, None), ("digits", 20, 1)):
        pool = Pool.of(name, 32, easy)
        private = pool.images // 2
        sources = {name: 0.0, f"{name}, near copies": COPIED} if easy is None else {f"{name}, one easy class": 0.0}
        for source, copied in sources.items():
            splits = [Split(pool, rng, copied, easy) for _ in range(count)]
            for batch, kinds in (singly, together) if easy is None else (together,):
                for kind, (attackers, n) in product(kinds, trials):
                    most = min(n, private - private % 8)
                    outcomes = real_runs(splits, most, attackers, kind, batch, runs, rng)
                    add(source, kind, attackers, most, batch, outcomes)
    for public in (20, 50, 200, None):
        for kind, (attackers, n) in product(KINDS, trials):
            source = f"synthetic, {public or 'all'} public"
            add(source, kind, attackers, n, 1, synthetic_runs(n, attackers, kind, public, runs, rng))
    return rows


def power_table(runs: int, seed: int) -> list[dict[str, Any]]:
    """Compute the power for several baselines, excesses and numbers of attackers."""
    rng = np.random.default_rng(seed)
    return [
        {
            "baseline": baseline,
            "excess": excess,
            "attackers": attackers,
            "n": n,
            "runs": runs,
            "power": round(power(baseline, excess, attackers, n, runs, rng), 4),
        }
        for baseline in (0.0, 0.1, 0.3, 0.5)
        for excess in (0.1, 0.25, 0.4)
        for attackers in (1, 5)
        for n in IMAGES
    ]


def beyond_error(row: dict[str, Any], level: float = 0.05) -> bool:
    """Report whether a trial has more false leaks than its Monte-Carlo error explains (three standard errors)."""
    return row["rate"] > level + 3 * math.sqrt(level * (1 - level) / row["runs"])


def write(file: Path, rows: Sequence[dict[str, Any]], note: str) -> None:
    """Write a table as CSV, its circumstances in every row."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*rows[0], "note"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, "note": note} for line in rows)


def main() -> None:
    """Run and record both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="null runs in each of the 756 trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for null-verdicts.csv and verdict-power.csv")
    parser.add_argument("--note", default="", help="date and machine")
    given = parser.parse_args()
    nulls, powers = null_table(given.runs, given.seed), power_table(5 * given.runs, given.seed)
    for line in powers:
        print(*line.values())
    bad = [line for line in nulls if beyond_error(line)]
    print(
        f"{sum(line['leaks'] for line in nulls)} of {sum(line['runs'] for line in nulls)} null runs are called a leak; "
        f"{len(bad)} of {len(nulls)} trials exceed 5% beyond their error",
        *bad,
        sep="\n",
    )
    if given.out:
        note = f"{given.note}, seed {given.seed}".strip(", ")
        write(given.out / "null-verdicts.csv", nulls, note)
        write(given.out / "verdict-power.csv", powers, note)


if __name__ == "__main__":
    main()
