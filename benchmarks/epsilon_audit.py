"""Lower bounds of epsilon that replay audits find, next to the epsilon of the mechanism.

    python benchmarks/epsilon_audit.py --output benchmarks/results/epsilon-audit.csv

One gradient of eight faces, clip 1, each sigma and number of replays with several seeds. One client adds half of the
noise that it promises.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from functools import cache
from pathlib import Path

import torch

from gradveil.assurance.replay_audit import audit_epsilon
from gradveil.client import Client
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.models import build
from gradveil.theory.accounting import Participation, epsilon

CLIENTS = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (0.5, 1.0))
"""Noise multipliers, as they are and as they are promised."""
REPLAYS = (100, 1_000, 10_000)
DELTA = 1e-5
COLUMNS = ("sigma", "promised_sigma", "replays", "claimed", "median", "least", "most", "violated", "seeds")


@cache
def bounds(sigma: float, replays: int, seeds: int) -> list[float]:
    """Audit a client with noise `sigma`, with several seeds."""
    faces = load("faces", size=16).private
    batch = Batch(faces.inputs[:8].float(), faces.targets[:8])
    client = parse(f"dp(clip=1, sigma={sigma})")(
        Client(build("lenet-zhu", channels=1, size=16, classes=2, generator=torch.Generator().manual_seed(0)))
    )
    audits = (audit_epsilon(client, batch, replays=replays // 2, delta=DELTA, seed=seed) for seed in range(seeds))
    return [each.found for each in audits]


def measure(sigma: float, promised: float, replays: int, seeds: int) -> dict[str, float | int]:
    """Compare the bounds of a client with noise `sigma` with the epsilon of `promised`."""
    claimed = epsilon(promised, Participation(1, delta=DELTA))
    found = bounds(sigma, replays, seeds)
    spread = statistics.median(found), min(found), max(found)
    values = (sigma, promised, replays, claimed, *spread, sum(each > claimed for each in found), seeds)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = [(sigma, promised, replays) for replays in REPLAYS for sigma, promised in CLIENTS]
    stream = options.output.open("w", newline="") if options.output else sys.stdout
    writer = csv.DictWriter(stream, list[str](COLUMNS), lineterminator="\n")
    writer.writeheader()
    for setting in settings:
        row = measure(*setting, options.seeds)
        writer.writerow({key: f"{value:.4g}" for key, value in row.items()})
        stream.flush()


if __name__ == "__main__":
    main()
