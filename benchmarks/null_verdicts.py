"""How often attackers that only guess are called a leak, and how often real leaks are found.

    python -m benchmarks.null_verdicts --runs 100 --out benchmarks/results

Null runs: bundled digits (32x32 pixels) and faces are split at random into auxiliary and private images; attackers
answer with guesses from the auxiliary images; their answers are scored and tested as an audit does. Synthetic null
runs draw the chance of each candidate guess instead, and its share among few public images from that. Verdicts are
those of `gradveil.audit.evidence.tests_of`, Holm's correction over attackers and criteria included.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.audit.evidence import tests_of
from gradveil.audit.guessing import Gallery, Guessing
from gradveil.audit.rows import Row
from gradveil.audit.store import Cell
from gradveil.core.assign import match
from gradveil.data import Dataset, load
from gradveil.metrics import ssim_pairs

KINDS = ("one image", "random images", "class mean", "best guess", "mix")
IMAGES = (8, 32, 128)
ATTACKERS = (1, 2, 5)
THRESHOLD = 0.5


class Hits(NamedTuple):
    """What an attacker's answers came to, image by image."""

    success: Sequence[bool]
    identified: Sequence[bool] | None


def row(number: int, hits: Hits, expected: Sequence[dict[str, float]], labels: Sequence[int], batch: int = 1) -> Row:
    """Make the trial that an audit would have recorded."""
    records = []
    for client in range(0, len(labels), batch):
        places = range(client, client + batch)
        images = [
            {
                "success": int(hits.success[place]),
                "identified": None if hits.identified is None else bool(hits.identified[place]),
                "expected": expected[place],
            }
            for place in places
        ]
        records.append({"victim": client, "label": [labels[place] for place in places], "per_image": images})
    return Row(number, Cell({"attack": f"guess-{number}", "seed": 0, "controls": {}}, records))


def called_a_leak(rows: Sequence[Row]) -> bool:
    """Report whether the verdict on these trials is a leak."""
    return any(test.leaks for test in tests_of(rows))


@dataclass(frozen=True)
class Pool:
    """All images of a data set, with what does not depend on how they are split."""

    data: Dataset
    passes: Tensor
    """Whether an image passes for another of its class [images, images]."""
    distance: Tensor
    """Squared distances [images, images]."""

    @staticmethod
    def of(name: str, size: int) -> Pool:
        """Pool both splits of a bundled data set."""
        splits = load(name, size=size)
        inputs = torch.cat([splits.public.inputs, splits.victims.inputs])
        targets = torch.cat([splits.public.targets, splits.victims.targets])
        data = replace(splits.public, inputs=inputs, targets=targets, marks=())
        pixels, passes = data.pixels.float(), torch.zeros(len(data), len(data), dtype=torch.bool)
        for label in data.targets.unique():
            own = (data.targets == label).nonzero().flatten()
            passes[own[:, None], own] = ssim_pairs(pixels[own], pixels[own]) > THRESHOLD
        return Pool(data, passes, torch.cdist(pixels.flatten(1), pixels.flatten(1)).square())


class Split:
    """A random split of a pool into auxiliary and private images, and the guesses at the private ones."""

    def __init__(self, pool: Pool, rng: np.random.Generator) -> None:
        """Split a pool in half, and compare all guesses with the private images."""
        order = torch.from_numpy(rng.permutation(len(pool.data)))
        public, private = order[: len(order) // 2], order[len(order) // 2 :]
        self.labels = pool.data.targets[private].tolist()
        self.classes = sorted(set(self.labels))
        self.guessing = Guessing(pool.data.subset(public.tolist()), THRESHOLD, len(self.classes))
        pixels = pool.data.pixels.float()
        self.gallery = Gallery(pixels[private], pool.data.targets[private])
        # Guesses: every public image, the mean of each class, the mean image; the last columns of `passes` are theirs.
        means = torch.stack(
            [*(self.guessing.class_mean(label) for label in self.classes), self.guessing.mean()]
        ).float()
        self.means = {label: len(public) + place for place, label in enumerate(self.classes)}
        flat = pixels[private].flatten(1)
        self.passes = torch.cat([pool.passes[public[:, None], private], ssim_pairs(means, pixels[private]) > THRESHOLD])
        self.distance = torch.cat(
            [pool.distance[public[:, None], private], torch.cdist(means.flatten(1), flat).square()]
        )
        self.nearest = self.distance.argmin(1)
        targets = pool.data.targets[public]
        self.own = {label: (targets == label).nonzero().flatten().numpy() for label in self.classes}
        self.best: dict[int, list[int]] = {}
        for label, own in self.own.items():
            among = pool.passes[public[own][:, None], public[own]].double()
            found = among.sum(1).sub(1).argsort(descending=True)
            mean = float(
                (ssim_pairs(means[self.means[label] - len(public)][None], pixels[public[own]]) > THRESHOLD)
                .double()
                .mean()
            )
            top = own[found.numpy()].tolist()
            first = float(among[found[0]].sum() - 1) / max(1, len(own) - 1)
            self.best[label] = [self.means[label], *top] if mean >= first else [top[0], self.means[label], *top[1:]]
        # One image for all targets passes for images of other classes too.
        self.fixed = rng.choice(len(public), 8, replace=False)
        self.passes[torch.from_numpy(self.fixed)] = ssim_pairs(pixels[public[self.fixed]], pixels[private]) > THRESHOLD

    def expected(self, targets: Sequence[int], batch: int) -> list[dict[str, float]]:
        """Compute the chances that an audit records."""
        found: list[dict[str, float]] = []
        for first in range(0, len(targets), batch):
            labels = [self.labels[target] for target in targets[first : first + batch]]
            chances = zip(self.guessing.of_batch(labels), self.gallery.of_batch(labels), strict=True)
            found += [{"recovered": one.share, "public": one.images, **named.record()} for one, named in chances]
        return found

    def guesses(self, kind: str, targets: Sequence[int], batch: int, rng: np.random.Generator) -> list[int]:
        """Answer without an update."""
        if kind == "one image":
            return [int(rng.choice(self.fixed))] * len(targets)
        if kind == "mix":
            each = [self.guesses(other, targets, batch, rng) for other in KINDS[:-1]]
            return [each[int(rng.integers(len(each)))][place] for place in range(len(targets))]
        found: list[int] = []
        for first in range(0, len(targets), batch):
            used: Counter[int] = Counter()
            for target in targets[first : first + batch]:
                label = self.labels[target]
                if kind == "random images":
                    found.append(int(rng.choice(self.own[label])))
                elif kind == "class mean":
                    found.append(self.means[label])
                else:  # the best guess; of a batch, the next best ones for further images of a class
                    found.append(self.best[label][used[label] % len(self.best[label])])
                used[label] += 1
        return found

    def score(self, guesses: Sequence[int], targets: Sequence[int], batch: int) -> Hits:
        """Match batches by least squared distance, and score as an audit does."""
        guess, target = torch.tensor(guesses).reshape(-1, batch), torch.tensor(targets).reshape(-1, batch)
        if batch > 1:
            order = match(self.distance[guess[:, None, :], target[:, :, None]].double())
            guess = guess.gather(1, order)
        return Hits(self.passes[guess, target].flatten().tolist(), (self.nearest[guess] == target).flatten().tolist())


def real_runs(
    splits: Sequence[Split], n: int, attackers: int, kind: str, batch: int, runs: int, rng: np.random.Generator
) -> Iterator[bool]:
    """Yield for each null run whether it is called a leak."""
    for run in range(runs):
        split = splits[run % len(splits)]
        targets = rng.choice(len(split.labels), n, replace=False).tolist()
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


def power(floor: float, excess: float, attackers: int, n: int, runs: int, rng: np.random.Generator) -> float:
    """Compute how often one attacker above a known floor is found among others that only guess.

    Identification is tested as well, with attackers that are right by chance among 100 images.
    """
    found = 0
    expected: list[dict[str, Any]] = [{"recovered": floor, "public": None, "identified": 0.01, "gallery": None}] * n
    for _ in range(runs):
        rows = []
        for number in range(attackers):
            rate = floor + (excess if number == 0 else 0)
            rows.append(
                row(number, Hits((rng.random(n) < rate).tolist(), (rng.random(n) < 0.01).tolist()), expected, [0] * n)
            )
        found += called_a_leak(rows)
    return found / runs


def null_table(runs: int, seed: int) -> list[dict[str, Any]]:
    """Run so many null runs in every cell of source, batch, kind of guess, number of attackers and of images."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []

    def add(source: str, kind: str, attackers: int, n: int, batch: int, outcomes: Iterator[bool]) -> None:
        leaks = sum(outcomes)
        cell = {"source": source, "kind": kind, "attackers": attackers, "n": n, "batch": batch}
        rows.append({**cell, "runs": runs, "leaks": leaks, "rate": leaks / runs})
        print(*rows[-1].values(), flush=True)

    cells = [(kind, attackers, n) for kind in KINDS for attackers in ATTACKERS for n in IMAGES]
    for name, count in (("digits", 20), ("faces", 50)):
        pool = Pool.of(name, 32)
        splits = [Split(pool, rng) for _ in range(count)]
        private = len(pool.data) // 2
        for batch in (1, 8):
            for kind, attackers, n in cells:
                most = min(n, private - private % 8)
                add(name, kind, attackers, most, batch, real_runs(splits, most, attackers, kind, batch, runs, rng))
    for public in (20, 50, 200, None):
        for kind, attackers, n in cells:
            source = f"synthetic, {public or 'all'} public"
            add(source, kind, attackers, n, 1, synthetic_runs(n, attackers, kind, public, runs, rng))
    return rows


def power_table(runs: int, seed: int) -> list[dict[str, Any]]:
    """Compute the power for several floors, excesses and numbers of attackers."""
    rng = np.random.default_rng(seed)
    return [
        {
            "floor": floor,
            "excess": excess,
            "attackers": attackers,
            "n": n,
            "runs": runs,
            "power": round(power(floor, excess, attackers, n, runs, rng), 4),
        }
        for floor in (0.0, 0.1, 0.3, 0.5)
        for excess in (0.1, 0.25, 0.4)
        for attackers in (1, 5)
        for n in IMAGES
    ]


def beyond_error(row: dict[str, Any], level: float = 0.05) -> bool:
    """Report whether a cell has more false leaks than its Monte-Carlo error explains (three standard errors)."""
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
    parser.add_argument("--runs", type=int, default=100, help="null runs in each of the 360 cells")
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
        f"{len(bad)} of {len(nulls)} cells exceed 5% beyond their error",
        *bad,
        sep="\n",
    )
    if given.out:
        note = f"{given.note}, seed {given.seed}".strip(", ")
        write(given.out / "null-verdicts.csv", nulls, note)
        write(given.out / "verdict-power.csv", powers, note)


if __name__ == "__main__":
    main()
