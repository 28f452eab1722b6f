"""What a round of the engine costs beside federated averaging written by hand: processor time of the same computation.

    python benchmarks/engine_speed.py [--models scheliga-cnn ...] [--rounds 7] [--output FILE]

Two clients train one epoch of batches of 64 on images of noise; both loops take the same steps with the same
optimisers, and average. They take turns in one process with one thread. The ratio of a turn is taken within the turn;
shown are the median over the turns and the quartiles. The first turn, in which the engine checks each shape once, is
left out and shown by itself. A whole round does more than such a loop does: it encodes every update to count its bytes,
looks at eight images of test data and packs a checkpoint; that is a third ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.client import Client, Local
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.federated.engine import ClientShare, Federation
from gradveil.federated.training_state import Standing, pack_standing
from gradveil.nn.models import build

BATCH, CLIENTS = 64, 2


@dataclass(frozen=True)
class Case:
    """A model, its input's channels, its optimiser, and examples a client."""

    channels: int
    optimiser: str
    examples: int


CASES = {
    "scheliga-cnn": Case(1, "adam", 1280),
    "lenet-zhu": Case(1, "sgd", 1280),
    "resnet18": Case(3, "sgd", 640),
}


def experiment(name: str, case: Case) -> Federation:
    """Set up two clients with images of noise."""
    key = Key(0)
    net = build(name, channels=case.channels, size=32, classes=10, generator=key.child("model").generator())
    lr, momentum = (1e-3, 0.0) if case.optimiser == "adam" else (0.01, 0.9)
    local = Local(batch=BATCH, lr=lr, epochs=1, optimiser=case.optimiser, momentum=momentum)
    generator = key.child("data").generator()

    def images(count: int) -> Batch:
        inputs = torch.randn(count, case.channels, 32, 32, generator=generator)
        return Batch(inputs, torch.randint(10, (count,), generator=generator))

    return Federation(Client(net, local=local), [ClientShare(images(case.examples)) for _ in range(CLIENTS)], images(8))


def engine(federation: Federation) -> dict[str, Tensor]:
    """Run one round's local training and averaging."""
    standing = federation.start()
    with torch.no_grad():
        updates = {i: federation.local_update(standing, i, 1)[0] for i in range(CLIENTS)}
        mean, server = federation.server.mean(updates, dict.fromkeys(updates, 1), standing.server)
        return federation.server.step(standing.params, mean, server)[0]


def whole(federation: Federation, standing: Standing) -> Standing:
    """Run one round with all that a training does in it, to the bytes of its checkpoint."""
    after = federation.round(standing)
    pack_standing(after, "benchmark")
    return after


def by_hand(federation: Federation, orders: list[Tensor]) -> dict[str, Tensor]:
    """Do the same as one writes it without a library."""
    model, local = federation.client.model, federation.client.local
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for share, order in zip(federation.shares, orders, strict=True):
        own: nn.Module = copy.deepcopy(model)
        weights = list(own.parameters())
        adam = local.optimiser == "adam"
        step = torch.optim.Adam(weights, local.lr) if adam else torch.optim.SGD(weights, local.lr, local.momentum)
        for rows in order:
            step.zero_grad()
            F.cross_entropy(own(share.train.inputs[rows]), share.train.targets[rows]).backward()
            step.step()
        for total, p in zip(sums, weights, strict=True):
            total.add_(p.detach(), alpha=1 / CLIENTS)
    return dict(zip(dict(model.named_parameters()), sums, strict=True))


def measure(name: str, rounds: int) -> dict[str, object]:
    """Let both take turns."""
    federation = experiment(name, CASES[name])
    params = federation.client.params()
    keys = [federation.key.child("client", i, "round", 1) for i in range(CLIENTS)]
    specs = [federation.client.noise_parts(params, share.train).once for share in federation.shares]
    orders = [spec.sample(key)["schedule"] for spec, key in zip(specs, keys, strict=True)]
    spent: dict[str, list[float]] = {"engine": [], "by hand": [], "whole": []}
    standing = federation.start()
    for _ in range(rounds + 1):
        start = time.process_time()
        found = engine(federation)
        middle = time.process_time()
        expected = by_hand(federation, orders)
        end = time.process_time()
        standing = whole(federation, standing)
        spent["engine"].append(middle - start)
        spent["by hand"].append(end - middle)
        spent["whole"].append(time.process_time() - end)
    apart = max(float((found[n] - v).abs().max() / v.abs().max()) for n, v in expected.items())
    ratios = [a / b for a, b in zip(spent["engine"][1:], spent["by hand"][1:], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    whole_ratio = median(a / b for a, b in zip(spent["whole"][1:], spent["by hand"][1:], strict=True))
    return {
        "model": name,
        "optimiser": CASES[name].optimiser,
        "by_hand_seconds": median(spent["by hand"][1:]),
        "first_turn_seconds": spent["engine"][0],
        "ratio": median(ratios),
        "quartiles": [low, high],
        "whole_round_ratio": whole_ratio,
        "largest_relative_difference": apart,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    results = []
    for name in options.models:
        results.append(row := measure(name, options.rounds))
        low, high = row["quartiles"]
        print(
            f"{name:14} {row['optimiser']:5} by hand {row['by_hand_seconds']:.2f} s, engine {row['ratio']:.3f}x "
            f"({low:.3f} to {high:.3f}), a whole round {row['whole_round_ratio']:.3f}x, first turn "
            f"{row['first_turn_seconds']:.2f} s, parameters differ by {row['largest_relative_difference']:.1e}"
        )
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    if options.output:
        options.output.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
