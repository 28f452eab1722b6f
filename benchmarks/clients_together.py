"""Whether the clients of a round are faster as one batch: processor time beside one client after the other.

    python benchmarks/clients_together.py [--models lenet-zhu ...] [--turns 7] [--output FILE]

Ten clients compute the same update, one gradient or five local steps, from the same parameters on images of noise: by
`Client.update` one after the other, as the engine does, and by `Client.updates` in one batch, as attacks do. Both take
turns in one process with one thread; the ratio of a turn is taken within the turn, shown are median and quartiles over
the turns. Above 1 the batch is faster. The first turn, in which shapes are checked once, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from gradveil.attacks.plan import keep_freed_memory
from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.nn.models import build

CLIENTS, STEPS = 10, 5
MODELS = ("lenet-zhu", "scheliga-cnn")


def ratio_of(name: str, batch: int, *, steps: int, turns: int) -> dict[str, Any]:
    """Time both ways in turns."""
    key = Key(0)
    net = build(name, channels=1, size=32, classes=10, generator=key.child("model").generator())
    local = Local(batch=batch, lr=0.01, epochs=1) if steps > 1 else None
    client, draw = Client(net, local=local), key.child("data").generator()
    params = client.params()
    shape = (CLIENTS, batch * steps, 1, 32, 32)
    data = Batch(torch.randn(shape, generator=draw), torch.randint(10, shape[:2], generator=draw))
    spec = client.noise_spec(params, Batch(data.inputs[0], data.targets[0]))
    drawn = [spec.sample(key.child("noise", number)) for number in range(CLIENTS)]
    stacked = {one: torch.stack([noise[one] for noise in drawn]) for one in drawn[0]}
    ratios, alone, together = [], 0.0, 0.0
    for turn in range(turns + 1):
        began = time.process_time()
        for number, noise in enumerate(drawn):
            client.update(params, Batch(data.inputs[number], data.targets[number]), noise, {})
        between = time.process_time()
        client.updates(params, data, stacked, {})
        ended = time.process_time()
        if turn:
            alone, together = between - began, ended - between
            ratios.append(alone / together)
    low, middle, high = quantiles(ratios, n=4)
    return {
        "model": name,
        "batch": batch,
        "steps": steps,
        "ratio": middle,
        "quartiles": [low, high],
        "milliseconds_alone": 1e3 * alone,
        "milliseconds_together": 1e3 * together,
    }


def main() -> None:
    """Measure and print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in given.models:
            for batch in given.batches:
                for steps in (1, STEPS):
                    row = ratio_of(name, batch, steps=steps, turns=given.turns)
                    rows.append(row)
                    low, high = row["quartiles"]
                    what = f"{name:14} batch {batch:3}, {steps} steps"
                    print(f"{what}: {row['ratio']:.2f} times as fast together ({low:.2f} to {high:.2f})", flush=True)
    if given.output:
        told = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "clients": CLIENTS,
            "rows": rows,
        }
        given.output.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
