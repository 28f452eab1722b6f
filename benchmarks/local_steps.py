"""Attacks on updates of many local steps: a surrogate's single gradient against the simulation of every step.

    python -m benchmarks.local_steps --data-dir FOLDER [--clients 2] [--output FILE.csv]

Clients hold the first images of CIFAR-10's test set and train the small CNN for 5 epochs: of 2 steps (8 images in
batches of 4) and of 10 steps (20 in batches of 2). A line is one attack on one client: mean SSIM
of the images, matched one to one, how many exceed 0.5, seconds of the processor, and an iteration's cost in units of an
iteration on one gradient of the same images. `one gradient` lines attack that gradient.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.guard_sweep import facts
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.space import Space
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics import match_batch, ssim
from gradveil.nn.models import build

COLUMNS = (
    *("images", "batch", "steps", "lr", "client", "update", "attack", "iterations", "ssim", "recovered"),
    *("objective", "seconds", "cost", "date", "machine", "torch", "seed"),
)
CASES = ((8, 4, 0.01), (20, 2, 0.004))
SEARCH = "lr=1, sign=plain, tv=0.01"
ATTACKS = {
    "one gradient": (f"ig({SEARCH}, iterations=1000)",),
    "local steps": ("sme", f"ig({SEARCH}, iterations=40)", f"ig({SEARCH}, iterations=200)"),
}
SEED = 0


def attacked(client: Client, batch: Batch, text: str, space: Space) -> dict[str, Any]:
    """Attack one update of a client, whose order of examples the attacker does not know."""
    params = client.params()
    spec = client.noise_spec(params, batch)
    update, _ = client.update(params, batch, spec.sample(Key(SEED, ("order",))), client.init(params))
    seen = Observation(params, {name: value[None] for name, value in update.items()}, len(batch.targets), (0,))
    attack = make_attack(text)
    began = time.process_time()
    found = attack([seen], client, Knowledge(space, 10, targets=batch.targets[None]), Key(SEED))
    seconds = time.process_time() - began
    images, truth = space.view(found.inputs[0]), space.view(batch.inputs)
    order = match_batch(images[None], truth[None])[0][0]
    scores = ssim(images[order], truth)
    return {
        "attack": text,
        "iterations": attack.descent.iterations,
        "ssim": round(float(scores.mean()), 3),
        "recovered": int((scores > 0.5).sum()),
        "objective": round(float(found.objective[0]), 4),
        "seconds": round(seconds, 1),
    }


def measured(folder: str, clients: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of every case."""
    private = load("cifar10", data_dir=folder, limit_public=100, limit_private=32).private
    net = build("scheliga-cnn", channels=3, size=32, classes=10, generator=Key(SEED).generator())
    for images, size, lr in CASES:
        local = Local(batch=size, lr=lr, epochs=5)
        for number in range(min(clients, len(private) // images)):
            rows = slice(number * images, (number + 1) * images)
            batch = Batch(private.inputs[rows], private.targets[rows])
            facts_here = {"images": images, "batch": size, "lr": lr, "client": number}
            unit = 0.0
            for update, attacks in ATTACKS.items():
                client = Client(net, local=local if update == "local steps" else None)
                for text in attacks:
                    found = attacked(client, batch, text, private.space)
                    each = found["seconds"] / found["iterations"]
                    unit = unit or each
                    steps = local.count(images) if client.local else 1
                    yield {**facts_here, "steps": steps, "update": update, **found, "cost": round(each / unit, 2)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with CIFAR-10's files")
    parser.add_argument("--clients", type=int, default=2, help="clients of each case, as far as 32 images go")
    parser.add_argument("--output", type=Path, help="a CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for line in measured(options.data_dir, options.clients):
        lines.append({**line, **facts()})
        print(*(line.get(name, "") for name in COLUMNS[:13]), sep="\t", flush=True)
    if options.output:
        with options.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
