"""How many images `r-gap(simulated_client=full)` recovers, by noise, by share of entries sent, by model and data set.

    python benchmarks/defended_layers.py --data-dir FOLDER [--data mnist ...] [--model lenet-zhu ...]
        [--defence TEXT ...] [--images 32] [--output FILE]

The first test images, one an update, untrained models, seed 0. Labels are read off the update. A row is added to the
file as soon as it is measured, and a measured one is not repeated. `mismatch` counts reconstructions that are recovered
when they are scored against another client's image. `seconds` are of the processor, for each image.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.audit.attack_selection import trials
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.core.noise import Key
from gradveil.data import DATA_DIR

ATTACK, SEED, PUBLIC = "r-gap(labels=restore, simulated_client=full)", 0, 2000
MODELS = ("scheliga-cnn", "lenet-zhu", "cnn6")
DEFENCES = (
    *(f"dp(clip=20, sigma={sigma})" for sigma in ("1e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")),
    *(f"prune(ratio={ratio})" for ratio in (0.5, 0.8, 0.9, 0.95, 0.99)),
    *(f"dgp(top={top}, bottom={bottom})" for top, bottom in ((0.05, 0.75), (0.1, 0.6), (0.2, 0.6), (0.3, 0.6))),
    "gaussian(std=0.01) + prune(ratio=0.5)",
    "quantise(bits=8)",
    "quantise(bits=4)",
)
FIELDS = ("data", "model", "defence", "images", "recovered", "mismatch", "ssim", "stalled", "seconds")


def measured(data: str, model: str, defence: str, images: int, folder: Path) -> dict[str, Any]:
    """Attack one setting; the ground truth only scores."""
    wanted = {
        "name": "defended-layers",
        "data": {"name": data, "size": 32, "public": PUBLIC, "gallery": images},
        "model": {"name": model},
        "target_clients": images,
        "defences": [defence],
        "attacks": [ATTACK],
        "seeds": [SEED],
        "images": False,
    }
    experiment = open_experiment(resolve(wanted), folder)
    trial = trials(experiment.config)[0]
    client = experiment.client(trial.client, trial.defence, trial.seed)
    seen, truth = observe(experiment, trial, client, range(images))
    began = time.process_time()
    found = make_attack(ATTACK)(seen, client, Knowledge(experiment.space, experiment.classes), Key(SEED, ("attack",)))
    seconds = time.process_time() - began
    views, own = experiment.views(found.inputs), experiment.views(truth.raw.inputs)
    score, other = (experiment.space.scores(views, each)["ssim"] for each in (own, own.roll(1, 0)))
    return {
        "data": data,
        "model": model,
        "defence": defence,
        "images": images,
        "recovered": int((score > experiment.config.threshold).sum()),
        "mismatch": int((other > experiment.config.threshold).sum()),
        "ssim": round(float(score.mean()), 3),
        "stalled": found.status.count("stalled"),
        "seconds": round(seconds / images, 2),
    }


def main() -> None:
    """Measure what is asked for and not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--defence", nargs="+", default=DEFENCES)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/defended-layers.csv"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    done = set[tuple[str, ...]]()
    if chosen.output.exists():
        with chosen.output.open(encoding="utf-8", newline="") as file:
            done = {(row["data"], row["model"], row["defence"], row["images"]) for row in csv.DictReader(file)}
    with chosen.output.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for model in chosen.model:
            for data in chosen.data:
                for defence in chosen.defence:
                    if (data, model, defence, str(chosen.images)) not in done:
                        row = measured(data, model, defence, chosen.images, chosen.data_dir)
                        writer.writerow(row)
                        file.flush()
                        print(row, flush=True)


if __name__ == "__main__":
    main()
