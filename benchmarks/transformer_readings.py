"""Which reading of the combination study's attack recovers images from its undefended transformer.

    python -m benchmarks.transformer_readings cifar10 --images 2 --out readings.csv "1: ig-scheliga(iterations=1000)"

A reading is the standard deviation of the initial class token and positions, and an attack. Images are the first
training images, in three channels. A line per reading is added to the file. Where the objective of the private image is
above that of the result, the attack's prior and not its search is what keeps the image from being recovered.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradveil import audit
from gradveil.audit.audit_run import machine
from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.nn.models import build


def measure(data: str, images: int, std: float, attack: str) -> dict[str, Any]:
    """Attack an untrained transformer, and return the line of this reading."""
    splits = load(data, size=32, channels=3, limit_public=images, limit_private=1)
    model = build("vit", channels=3, size=32, classes=10, generator=Key(0).generator(), position_std=std)
    began = time.perf_counter()
    (trial,) = audit(model, splits.public, attacks=[attack], progress=False, target_clients=images).trials
    health = trial.info["health"]
    scores = [image["ssim"] for record in trial.records for image in record["per_image"]]
    return {
        "data": data,
        "position_std": std,
        "attack": attack,
        "images": images,
        "iterations": max(record["iterations"] for record in trial.records),
        "ssim": round(sum(scores) / len(scores), 3),
        "recovered": sum(score > 0.5 for score in scores),
        "objective": f"{health['objective']:.3g}",
        "objective_truth": f"{health['objective_truth']:.3g}",
        "ssim_earlier": "; ".join(f"{at['iterations']}: {at['ssim_mean']:.2f}" for at in trial.info["trace"][-3:]),
        "seconds": round(time.perf_counter() - began),
        "seed": 0,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine('cpu')['cores']} cores, {machine('cpu').get('cpu', '')}",
        "command": f"python -m benchmarks.transformer_readings {data} --images {images} '{std:g}: {attack}'",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the readings, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=("mnist", "cifar10"))
    parser.add_argument("readings", nargs="+", help="'STD: ATTACK'")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for reading in options.readings:
        std, _, attack = reading.partition(":")
        line = measure(options.data, options.images, float(std), attack.strip())
        print(line, flush=True)
        if options.out is not None:
            new = not options.out.exists()
            with options.out.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, line, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(line)


if __name__ == "__main__":
    main()
