"""Whether a denoiser that is trained on public images helps a search, as a prior or at its end.

    python -m benchmarks.denoiser_prior --data-dir FOLDER [--data mnist] [--output FILE.csv]

The search of `portfolio`, with steps of 0.1, on clients simulated with public images, on which the denoiser was not
trained: the truth is the attacker's own, so this is what an attacker can find out before it attacks. With weights
of the total variation (`tv`) and of the denoiser (`denoise`); `ssim` is the mean, `enhanced` that of the images after
the denoiser went over them once, with the best of three noise levels. The small network of the studies, untrained, one
image an update, labels known.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.guard_sweep import facts
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.denoiser import ENOUGH, kept_denoiser
from gradveil.attacks.inversion.descent import Cosine
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, ClientTask, drawn_update
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.models import build

DEFENCES = ("none", "prune(0.9)", "dp(clip=20, sigma=1e-3)", "sign")
WEIGHTS = ((0.03, 0.0), (0.1, 0.0), (0.0, 10.0), (0.0, 100.0), (0.03, 10.0))
"""Weights of the total variation and of the denoiser."""
LEVELS = (0.05, 0.1, 0.2)
COLUMNS = ("data", "defence", "tv", "denoise", "ssim", "recovered", "images", "enhanced", "iterations", "seconds")
COLUMNS += ("date", "machine", "torch", "seed")
_FIRST = 5000
"""Place of the first simulated client's image: the denoiser is trained on those before."""


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each defence and pair of weights."""
    count = options.target_clients
    public = load(options.data, data_dir=options.data_dir, limit_public=_FIRST + count, limit_private=1).public
    space, known = public.space, Batch(public.inputs[:ENOUGH], public.targets[:ENOUGH])
    net = build("scheliga-cnn", channels=space.shape[0], size=space.shape[1], classes=10, generator=_generator())
    inputs, targets = public.inputs[_FIRST:, None], public.targets[_FIRST:, None]
    denoiser, truth = kept_denoiser(space.view(known.inputs)), space.view(inputs)
    for text in options.defences:
        client = parse(text)(Client(net, domain=Domain(space, 10)), Key(0))
        params = client.params()
        tasks = [ClientTask(Batch(inputs[i], targets[i]), Key(0, (i,)), client.init(params)) for i in range(count)]
        sent = [drawn_update(client, params, *task)[0] for task in tasks]
        update = {name: torch.stack([each[name] for each in sent]) for name in sent[0]}
        seen = Observation(params, update, 1, tuple(range(count)))
        attack: Any = make_attack("portfolio")
        ways = {name: how for name, how in attack.knowledge.items() if name != "public"}
        knowledge = Knowledge(space, 10, targets=targets, public=known, tensors=ways)
        steps = {"stepper": Adam(lr=0.1), "schedule": Cosine(20)}
        descent = replace(attack.descent, iterations=options.iterations, **steps)
        for tv, weight in WEIGHTS:
            tried = replace(attack, variants=(), tv=tv, denoise=weight, descent=descent)
            began = time.process_time()
            found = space.view(tried([seen], client, knowledge, Key(0)).inputs)
            seconds = time.process_time() - began
            flat, scores = found.flatten(0, 1).float(), space.scores(found, truth)["ssim"]
            cleaned = (denoiser(flat, torch.full((count,), level)).clamp(0, 1) for level in LEVELS)
            enhanced = [float(space.scores(c.view_as(found).double(), truth.double())["ssim"].mean()) for c in cleaned]
            yield {
                "data": options.data,
                "defence": text,
                "tv": tv,
                "denoise": weight,
                "ssim": round(float(scores.mean()), 3),
                "recovered": int((scores > 0.5).sum()),
                "images": count,
                "enhanced": round(max(enhanced), 3),
                "iterations": options.iterations,
                "seconds": round(seconds, 1),
            }


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the files of MNIST and CIFAR-10")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--defences", nargs="+", default=[*DEFENCES])
    parser.add_argument("--target-clients", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--output", type=Path, help="a CSV file, to which lines are appended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in measured(options):
        print(*line.values(), sep="\t", flush=True)
        if options.output:
            new = not options.output.exists()
            with options.output.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*COLUMNS], lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow({**line, **facts()})


if __name__ == "__main__":
    main()
