"""What guessing is expected to recover of the target images in docs/results.md, and how many are beyond guessing.

    python -m benchmarks.guess_baselines --data-dir FOLDER [--data mnist ...] [--output FILE]

Nothing is sampled: each public image of a class, the mean of the class (its contrast raised, too) and the mean of all
images are compared with every other public image of the class, at most 1,000 (`gradveil.audit.baselines`). Target
images are the first of the test split. Of settings with more than 32 of them the labels of as many public images are
taken instead. A row has the fewest recovered images that the audit's exact test finds beyond guessing at 5%, alone and
as one of ten tests (Bonferroni).
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.baselines import LEVEL, Chance, Guessing
from gradveil.data import DATA_DIR, load
from gradveil.metrics.statistics import added, beta_binomial, upper_tail

PUBLIC, PRIVATE, THRESHOLD, TESTS = 10_000, 32, 0.5, 10
SETTINGS = (
    *((1, clients) for clients in (4, 8, 16, 32, 64, 128)),
    *((4, 4), (4, 8), (8, 4), (16, 4), (32, 2), (64, 2), (64, 4)),
)
"""(images of a client, clients)"""


class WholeGuessing(Guessing):
    """Guesses that are compared with every public image, however many pairs these are."""

    def _pairs(self, pixels: Tensor) -> int:
        return len(pixels) ** 2


def counts(labels: Sequence[int], chances: Sequence[Chance]) -> Sequence[float]:
    """Return the distribution of the number of images that guesses pass for."""
    groups = Counter(zip(labels, chances, strict=True))
    return added(beta_binomial(count, chance.share, chance.images) for (_, chance), count in groups.items())


def fewest(mass: Sequence[float], level: float) -> int | str:
    """Return the fewest images that guessing recovers with at most this probability; empty if all are too few."""
    return next((count for count in range(len(mass)) if upper_tail(mass, count) <= level), "")


def measured(data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per setting."""
    splits = load(data, data_dir=folder, size=32, limit_public=PUBLIC, limit_private=PRIVATE)
    guessing = WholeGuessing(splits.public, THRESHOLD, 1)
    for batch, clients in SETTINGS:
        images = batch * clients
        first = splits.private if images <= len(splits.private) else splits.public
        labels = first.targets[:images].tolist()
        if len(labels) < images:
            continue
        dealt = [labels[start : start + batch] for start in range(0, images, batch)]
        chances = [chance for each in dealt for chance in guessing.of_batch(each)]
        mass = counts(labels, chances)
        yield {
            "data": data,
            "batch": batch,
            "clients": clients,
            "images": images,
            "labels": "targets" if first is splits.private else "public",
            "public": len(splits.public),
            "expected": round(sum(chance.share for chance in chances) / images, 4),
            "least": round(min(chance.share for chance in chances), 4),
            "most": round(max(chance.share for chance in chances), 4),
            "beyond": fewest(mass, LEVEL),
            "beyond_of_ten": fewest(mass, LEVEL / TESTS),
        }


def main() -> None:
    """Measure, and write a CSV file whose every line names its command, date and machine."""
    parser = argparse.ArgumentParser(description="Compute what guessing is expected to recover.")
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10", "digits"])
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--machine", default=f"{platform.machine()}, torch {torch.__version__}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    told = shlex.join(["python", "-m", "benchmarks.guess_baselines", "--data", *given.data])
    facts = {"date": datetime.now(UTC).date().isoformat(), "machine": given.machine, "command": told}
    out = given.output.open("w", newline="") if given.output else sys.stdout
    writer: csv.DictWriter[str] | None = None
    for row in (row for data in given.data for row in measured(data, given.data_dir)):
        if writer is None:
            writer = csv.DictWriter(out, [*row, *facts])
            writer.writeheader()
        writer.writerow(row | facts)
        out.flush()


if __name__ == "__main__":
    main()
