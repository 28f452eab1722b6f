"""What each part of a search is worth: schedule, steps, distance, first images, resolution, prior, and a feature term.

    python -m benchmarks.search_ablation --data-dir FOLDER --output benchmarks/results/search-ablation.csv
        [--data mnist] [--models lenet-zhu] [--iterations 300 1000]

The search of `portfolio` with one weight of the total variation, changed in one thing at a time. Target clients hold
the first test images, one image an update; models are untrained, labels known. `tiles` starts from one random tile of
4 x 4 pixels, repeated. `features` adds the squared distance of the last layer's inputs from those that its gradient
shows, relative to their squared length; without a bias in that layer it is left out. `falling` lowers the weight of
the total variation from 0.1 to 0.003 during the search. `signed` takes steps of 0.1 by the gradient's sign, `layers`
compares each layer by its own cosine, `channels` smooths channels and not the differences between colours, `scales`
adds up images of a quarter, of half and of the full resolution, and `solved` starts from what
`r-gap(simulated_client=full)` finds, in models that are plain chains of layers.

A line is a mean over the target clients; `error` is the standard error of the paired difference to the first variant.
Lines that the output has already are left out.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.guard_sweep import facts
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.descent import Cosine, Plateau
from gradveil.attacks.inversion.image_sources import INPUTS, Canvas, Drawing, Pixels
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client, ClientTask, drawn_update
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.models import build
from gradveil.nn.module_paths import features, last_layer
from gradveil.nn.surgery import replace_batchnorm

COLUMNS = ("data", "model", "defence", "variant", "tv", "iterations", "ssim", "error", "recovered", "target_clients")
COLUMNS += ("seconds", "date", "machine", "torch", "seed")
DEFENCES = {"none": 0.03, "dp(clip=20, sigma=1e-3)": 0.1, "dgp(top=0.2, bottom=0.6)": 0.1}
DEFENCES |= {"prune(0.9)": 0.1, "sign": 0.1, "soteria": 0.03, "precode": 0.01}
"""Defences, each with the weight of the total variation that suits it."""
_TILE, _FEATURES, _FALLING = 4, 0.01, (0.1, 0.003)
_SCALES = (2, 4)
"""Factors by which the coarser of the images that are added up are smaller."""


@dataclass(frozen=True)
class Started(Pixels):
    """Pixels that start from tiles, are searched at several scales, or have a term for the last layer's input."""

    model: nn.Module
    tiles: bool = False
    scales: tuple[int, ...] = ()
    weight: float = 0.0

    def open(self, canvas: Canvas, key: Key) -> Any:
        """Prepare a call."""
        return _Started(self, canvas, super().open(canvas, key))


@dataclass(frozen=True)
class _Started:
    images: Started
    canvas: Canvas
    pixels: Drawing
    labelled = False

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        drawn, constants = self.pixels.start(key)
        if self.images.tiles:
            height, width = drawn[INPUTS].shape[-2:]
            tile = drawn[INPUTS][..., :_TILE, :_TILE]
            drawn[INPUTS] = tile.repeat(1, 1, height // _TILE, width // _TILE)
        count, channels, height, width = drawn[INPUTS].shape
        for scale in self.images.scales:
            drawn[f"images.scale{scale}"] = drawn[INPUTS].new_zeros(count, channels, height // scale, width // scale)
        return drawn, constants

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Learn nothing."""

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, Tensor | None]:
        images, labels = self.pixels.draw(variables, constants)
        for scale in self.images.scales:
            coarse = F.interpolate(variables[f"images.scale{scale}"].flatten(0, 1), images.shape[-2:], mode="bilinear")
            images = images + coarse.view_as(images)
        return images, labels

    def penalty(self, variables: Tensors, constants: Tensors) -> Tensor | None:
        if not self.images.weight:
            return None
        last = last_layer(self.images.model)
        weight, bias = (constants[f"observed.{last}.{name}"] for name in ("weight", "bias"))
        sent = (weight != 0) & (bias != 0).unsqueeze(-1)
        scale = (bias.square().unsqueeze(-1) * sent).sum(1)
        wanted = (weight * bias.unsqueeze(-1) * sent).sum(1) / scale.clamp_min(1e-20)
        own = features(self.images.model, variables[INPUTS].flatten(0, 1))
        distance = ((own - wanted).square() * (scale > 0)).sum(1)
        return self.images.weight * distance / wanted.square().sum(1).clamp_min(1e-20)

    def tuned(self, rows: int) -> Tensors:
        return {}


class FromRecursion(Inversion):
    """A search that starts from what the layer-by-layer recursion finds behind a defence."""

    @property
    def solver(self) -> Any:
        """The recursion."""
        return make_attack("r-gap(simulated_client=full)")


def variants(attack: Any, prospect: Prospect) -> dict[str, Any]:
    """Name the searches that are compared: that of before, and changes of the present one."""
    model = prospect.simulated_client.model
    own = attack.descent.stepper.lr

    def with_steps(lr: float, schedule: Cosine | Plateau) -> Any:
        return replace(attack, descent=replace(attack.descent, stepper=Adam(lr=lr), schedule=schedule))

    bias = getattr(model.get_submodule(last_layer(model)), "bias", None)
    shown = Started(model, weight=_FEATURES)
    signs = replace(attack.descent, stepper=Adam(lr=0.1, sign="signed"))
    solved = FromRecursion(**{each.name: getattr(attack, each.name) for each in fields(attack)})
    return {
        "plateau, 0.1": with_steps(0.1, Plateau(patience=400)),
        **{f"cosine, {lr:g}": with_steps(lr, Cosine()) for lr in sorted({0.1, own, 1.0})},
        f"cosine, {own:g}, tiles": replace(attack, images=Started(model, tiles=True)),
        **({} if bias is None else {f"cosine, {own:g}, features": replace(attack, images=shown)}),
        f"cosine, {own:g}, falling": replace(attack, tv=_FALLING[0], tv_end=_FALLING[1]),
        "cosine, 0.1, signed": replace(attack, descent=signs),
        f"cosine, {own:g}, layers": replace(attack, objective="layerwise-cosine"),
        f"cosine, {own:g}, channels": replace(attack, tv_over="channels"),
        f"cosine, {own:g}, scales": replace(attack, images=Started(model, scales=_SCALES)),
        **({} if any(solved.solver.problems(prospect)) else {f"cosine, {own:g}, solved": solved}),
    }


def measured(options: argparse.Namespace, done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each model, defence, variant and number of iterations that is not done."""
    count = options.target_clients
    data = load(options.data, data_dir=options.data_dir, limit_public=1, limit_private=count, size=32).private
    space, inputs, targets = data.space, data.inputs[:, None], data.targets[:, None]
    truth = space.view(inputs)
    for name in options.models:
        draw = torch.Generator().manual_seed(options.seed)
        model = build(name, channels=space.shape[0], size=space.shape[1], classes=10, generator=draw)
        model = replace_batchnorm(model, "group")
        for text in options.defences:
            client = parse(text)(Client(model, domain=Domain(space, 10)), Key(options.seed))
            params = client.params()
            tasks = [
                ClientTask(Batch(inputs[i], targets[i]), Key(options.seed, (i,)), client.init(params))
                for i in range(count)
            ]
            sent = [drawn_update(client, params, *task)[0] for task in tasks]
            update = {name: torch.stack([each[name] for each in sent]) for name in sent[0]}
            seen = Observation(params, update, 1, tuple(range(count)))
            attack: Any = replace(make_attack("portfolio"), variants=(), tv=DEFENCES.get(text, options.tv))
            ways = {name: how for name, how in attack.knowledge.items() if name != "public"}
            knowledge = Knowledge(space, 10, targets=targets, tensors=ways)
            for iterations in options.iterations:
                first: Tensor | None = None
                tries = variants(attack, Prospect(client, space.shape, 1, 10, 0))
                missing = {v for v in tries if (options.data, name, text, v, str(iterations)) not in done}
                for variant, tried in (tries if missing else {}).items():
                    if variant not in missing and first is not None:
                        continue
                    tried = replace(tried, descent=replace(tried.descent, iterations=iterations))
                    began = time.process_time()
                    found = tried([seen], client, knowledge, Key(options.seed)).inputs
                    seconds = time.process_time() - began
                    scores = space.scores(space.view(found), truth)["ssim"].flatten().double()
                    first = scores if first is None else first
                    if variant not in missing:  # only compared with
                        continue
                    yield {
                        "data": options.data,
                        "model": name,
                        "defence": text,
                        "variant": variant,
                        "tv": tried.tv,
                        "iterations": iterations,
                        "ssim": round(float(scores.mean()), 3),
                        "error": round(float((scores - first).std(correction=0)) / max(1, count - 1) ** 0.5, 3),
                        "recovered": int((scores > 0.5).sum()),
                        "target_clients": count,
                        "seconds": round(seconds / count, 3),
                    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the files of the data")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--models", nargs="+", default=["scheliga-cnn"])
    parser.add_argument("--defences", nargs="+", default=[*DEFENCES])
    parser.add_argument("--tv", type=float, default=0.03, help="weight of the total variation of other defences")
    parser.add_argument("--iterations", nargs="+", type=int, default=[100, 300, 1000])
    parser.add_argument("--target-clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a CSV file, to which lines are appended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    new, done = not options.output.exists(), set[tuple[str, ...]]()
    if not new:
        with options.output.open(newline="", encoding="utf-8") as file:
            of_line = ("data", "model", "defence", "variant", "iterations")
            done = {tuple(line[name] for name in of_line) for line in csv.DictReader(file)}
    with options.output.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS], lineterminator="\n", extrasaction="ignore")
        if new:
            writer.writeheader()
        for line in measured(options, done):
            print(*(line[name] for name in COLUMNS[:10]), sep="\t", flush=True)
            writer.writerow({**line, **facts(), "seed": options.seed})
            file.flush()


if __name__ == "__main__":
    main()
