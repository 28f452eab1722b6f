"""What unmixed features are worth to a search for a batch on a convolutional network.

    python -m benchmarks.mixed_features --data-dir FOLDER [--models lenet-zhu] [--batches 4 8] [--defences none]

The first test images of CIFAR-10, untrained models, labels known; the search of `portfolio` with one weight of the
total variation, without and with `features`. A line: model, batch, defence, weight of the features, iterations, mean
SSIM of the images, matched one to one, the recovered ones (SSIM above 0.5), and seconds of the processor.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, ClientTask, drawn_update
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.models import build
from gradveil.nn.surgery import replace_batchnorm


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, type=Path, help="folder with the files of the data")
    parser.add_argument("--models", nargs="+", default=["scheliga-cnn"])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--defences", nargs="+", default=["none"])
    parser.add_argument("--features", nargs="+", type=float, default=[0.0, 0.03])
    parser.add_argument("--iterations", nargs="+", type=int, default=[300])
    parser.add_argument("--tv", type=float, default=0.03)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load("cifar10", data_dir=options.data_dir, limit_public=1, limit_private=options.images).private
    space = data.space
    for name, examples, defence in product(options.models, options.batches, options.defences):
        draw = torch.Generator().manual_seed(options.seed)
        model = build(name, channels=space.shape[0], size=space.shape[1], classes=10, generator=draw)
        model = replace_batchnorm(model, "group")
        client = parse(defence)(Client(model, domain=Domain(space, 10)), Key(options.seed))
        params, clients = client.params(), range(options.images // examples)
        inputs, targets = (value.unflatten(0, (len(clients), examples)) for value in (data.inputs, data.targets))
        tasks = [
            ClientTask(Batch(inputs[i], targets[i]), Key(options.seed, (i,)), client.init(params)) for i in clients
        ]
        sent = stack([drawn_update(client, params, *task)[0] for task in tasks])
        seen = Observation(params, sent, examples, tuple(clients))
        for iterations, weight in product(options.iterations, options.features):
            attack: Any = replace(make_attack("portfolio"), variants=(), tv=options.tv, features=weight)
            attack = replace(attack, descent=replace(attack.descent, iterations=iterations))
            ways = {name: how for name, how in attack.knowledge.items() if name != "public"}
            began = time.process_time()
            found = attack([seen], client, Knowledge(space, 10, targets=targets, tensors=ways), Key(options.seed))
            seconds, truth = time.process_time() - began, space.view(inputs)
            ssim = space.scores(space.match(space.view(found.inputs), truth)[1], truth)["ssim"]
            recovered = f"{int((ssim > 0.5).sum())} of {ssim.numel()}"
            facts = (name, examples, defence, weight, iterations, round(float(ssim.mean()), 3), recovered)
            print(*facts, round(seconds, 1), sep="\t", flush=True)


if __name__ == "__main__":
    main()
