"""Table of mainstream image classifiers: which can be audited as they are, which with `prepare`, and what it costs.

Run it where transformers, timm and torchvision are installed with the torch that they were built for:

    python -m benchmarks.mainstream_models --out benchmarks/results/mainstream-models.csv

Weights are random. Two images of a model's size are checked, one is timed, with one thread.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError, Problem
from gradveil.core.types import Batch
from gradveil.nn.check import check
from gradveil.nn.models import build
from gradveil.nn.surgery import prepare

CLASSES = 10
MODELS: dict[str, dict[str, Any]] = {
    "torchvision:resnet18": {},
    "torchvision:resnet50": {},
    "torchvision:densenet121": {},
    "torchvision:mobilenet_v3_small": {},
    "torchvision:efficientnet_b0": {},
    "torchvision:googlenet": {},
    "torchvision:convnext_tiny": {},
    "torchvision:vit_b_16": {},
    "torchvision:swin_t": {},
    "timm:vit_tiny_patch16_224": {},
    "timm:deit3_small_patch16_224": {},
    "timm:resnet50": {},
    "timm:efficientnet_b0": {},
    "timm:convnext_atto": {},
    "timm:ghostnet_100": {},
    "hf:vit": {},
    "hf:beit": {},
    "hf:swin": {"patch_size": 2, "window_size": 4},
    "hf:convnext": {},
    "hf:resnet": {},
}
"""Models by name, with their options."""
SIZE = 64
"""Side of the images: of transformers too, which get as many positions as that needs."""
FIELDS = ("model", "parameters", "works", "changes", "problem", "gradient_s", "iteration_s", "size", "torch", "library")
_PACKAGES = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision"}
_REPEATS = 3


def measured(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a model."""
    row: dict[str, Any] = {"model": name, "size": SIZE}
    row["torch"] = torch.__version__.partition("+")[0]
    row["library"] = version(_PACKAGES[name.partition(":")[0]])
    generator = torch.Generator().manual_seed(0)
    model = build(name, channels=3, size=SIZE, classes=CLASSES, generator=generator, **options)
    batch = Batch(torch.rand(2, 3, SIZE, SIZE, generator=generator), torch.tensor([0, 1]))
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    ready, done = model, []
    problem = _first(check(model, batch))
    if problem is not None:
        try:
            ready, done = prepare(model, batch=batch)
            problem = _first(check(ready, batch))
        except GradveilError as error:
            problem = error.problems[0]
    row["works"] = "no" if problem else "with prepare" if done else "as is"
    row["changes"] = "; ".join(line.partition(":")[0] for line in done)
    row["problem"] = str(problem) if problem else ""
    if problem is None:
        row |= _seconds(ready, Batch(batch.inputs[:1], batch.targets[:1]))
    return row


def _first(problems: Iterable[Problem]) -> Problem | None:
    return next((problem for problem in problems if problem.severity == "error"), None)


def _seconds(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Time one gradient, and one iteration of an attack: the derivative of its cosine distance to another."""
    params = [value for value in model.parameters() if value.requires_grad]
    inputs = batch.inputs.clone().requires_grad_()

    def gradient(create_graph: bool) -> list[Tensor]:
        loss = F.cross_entropy(model(inputs), batch.targets)
        slopes = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
        return [slope for slope in slopes if slope is not None]

    target = [torch.randn_like(slope) for slope in gradient(False)]

    def iteration() -> None:
        slopes = gradient(True)
        dot = sum((a * b).sum() for a, b in zip(slopes, target, strict=True))
        norm = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()
        torch.autograd.grad(1 - dot / norm, inputs)

    return {"gradient_s": _timed(lambda: gradient(False)), "iteration_s": _timed(iteration)}


def _timed(run: Callable[[], object]) -> float:
    """Return the least seconds of a few runs."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return round(min(seconds), 3)


def main() -> None:
    """Measure every model, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mainstream-models.csv"))
    parser.add_argument("--only", nargs="*", help="names of models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in arguments.only or MODELS:
        rows.append(measured(name, MODELS.get(name, {})))
        print({key: rows[-1].get(key) for key in FIELDS[:7]}, flush=True)
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
