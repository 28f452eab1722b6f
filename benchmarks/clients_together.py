"""Whether a round is faster where its clients compute at once: processor time beside one client after the other.

    python benchmarks/clients_together.py [--models lenet-zhu ...] [--clients 10 ...] [--turns 7] [--output FILE]

A round of `gradveil train`'s engine: clients with images of noise compute one gradient or five local steps, send it
through the defence, and the server encodes, averages, and looks at 100 test images. With `together=True` and
`together=False` it takes turns in one process with one thread, from the same standing; the ratio of a turn is taken
within the turn, shown are median and quartiles over the turns. Above 1 clients at once are faster. The first turn, in
which shapes are looked at once, is left out. `at once` says how many clients shared a gradient, `auto` whether the rule
of `gradveil.federated.parallel_clients` has them do so by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from gradveil.client import Client, Local
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.engine import ClientShare, Federation
from gradveil.federated.parallel_clients import groups
from gradveil.nn.models import build

STEPS = 5
DEFENCES = ("none", "dp(clip=1, sigma=0.1)", "dgp")
CHANNELS = {"lenet-zhu": 1, "scheliga-cnn": 1, "cnn6": 3, "mnist-conv": 1, "resnet18": 3}


def experiment(name: str, defence: str, clients: int, batch: int, steps: int) -> Federation:
    """Set up clients with as many images as their steps take, whose updates move nothing far."""
    key, channels = Key(0), CHANNELS[name]
    net = build(name, channels=channels, size=32, classes=10, generator=key.child("model").generator())
    local = Local(batch=batch, lr=0.01, epochs=1) if steps > 1 else None
    generator = key.child("data").generator()

    def images(count: int) -> Batch:
        inputs = torch.randn(count, channels, 32, 32, generator=generator)
        return Batch(inputs, torch.randint(10, (count,), generator=generator))

    client = parse(defence)(Client(net, local=local), key.child("defence"))
    return Federation(client, [ClientShare(images(batch * steps)) for _ in range(clients)], images(100))


def ratio_of(federation: Federation, turns: int) -> dict[str, Any]:
    """Time both ways in turns."""
    ways = [replace(federation, together=which) for which in (False, True)]
    standing = federation.start()
    batches = {i: share.train for i, share in enumerate(federation.shares)}
    spent: list[tuple[float, float]] = []
    for _ in range(turns + 1):
        began = time.process_time()
        alone = ways[0].round(standing)
        between = time.process_time()
        together = ways[1].round(standing)
        spent.append((between - began, time.process_time() - between))
    params = federation.client.params()
    apart = max(
        float((together.params[name] - value).abs().max() / (value - params[name]).abs().max().clamp_min(1e-12))
        for name, value in alone.params.items()
    )
    ratios = [one / other for one, other in spent[1:]]
    low, middle, high = quantiles(ratios, n=4)
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "seconds_alone": median(one for one, _ in spent[1:]),
        "seconds_together": median(other for _, other in spent[1:]),
        "at_once": max(map(len, groups(federation.client, params, batches, True))),
        "auto": max(map(len, groups(federation.client, params, batches, "auto"))) > 1,
        "largest_difference_to_the_step": apart,
    }


def main() -> None:
    """Measure and print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CHANNELS, default=("lenet-zhu", "scheliga-cnn", "mnist-conv"))
    parser.add_argument("--defences", nargs="+", default=DEFENCES)
    parser.add_argument("--clients", nargs="+", type=int, default=[10])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for name in given.models:
        for defence in given.defences:
            for clients in given.clients:
                for batch in given.batches:
                    for steps in (1, STEPS):
                        case = {"model": name, "defence": defence, "clients": clients, "batch": batch, "steps": steps}
                        row = case | ratio_of(experiment(name, defence, clients, batch, steps), given.turns)
                        rows.append(row)
                        low, high = row["quartiles"]
                        print(
                            f"{name:13} {defence:22} {clients:3} clients, {batch:2} images, {steps} steps: "
                            f"{row['ratio']:.2f} times as fast at once ({low:.2f} to {high:.2f}), "
                            f"{row['at_once']} at once, auto {row['auto']}, "
                            f"{row['largest_difference_to_the_step']:.0e} apart",
                            flush=True,
                        )
    if given.output:
        told = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "turns": given.turns,
            "rows": rows,
        }
        given.output.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
