"""Inputs that do not suit a model: their size, their channels, and batches too small for its normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gradveil.core.errors import Problem
from gradveil.nn.forward_trace import Trace
from gradveil.nn.module_paths import at
from gradveil.nn.normalisation import BatchStatistics
from gradveil.nn.stochastic import Stochastic
from gradveil.nn.surgery import BatchNorm, uses_batch


def input_remedy(model: nn.Module, inputs: Tensor) -> str:
    """Return what to change about inputs that a model cannot be run on."""
    remedies = [*_channel_remedies(model, inputs), *_size_remedies(model, inputs)]
    return "; ".join(remedies) or "check the number of channels, the image size and the dtype that the model expects"


def _channel_remedies(model: nn.Module, inputs: Tensor) -> Iterator[str]:
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None or inputs.dim() != 4 or inputs.shape[1] == first.in_channels:
        return
    wanted, present = first.in_channels, inputs.shape[1]
    if inputs.shape[3] == wanted:
        yield f"put the channels first, inputs.permute(0, 3, 1, 2): they are {tuple(inputs.shape)}"
    elif (present, wanted) == (1, 3):
        yield "give the model colour, which it expects: inputs.repeat(1, 3, 1, 1), or --set data.channels=3"
    elif (present, wanted) == (3, 1):
        yield "give the model grey images, which it expects: inputs.mean(1, keepdim=True), or --set data.channels=1"
    else:
        yield f"give the model inputs of {wanted} channels: they have {present}"


def _size_remedies(model: nn.Module, inputs: Tensor) -> Iterator[str]:
    wanted = expected_size(model)
    if wanted is not None and inputs.dim() == 4 and tuple(inputs.shape[2:]) != wanted:
        high, wide = wanted
        remedy = f"resize the images to {high} x {wide}, which the model expects: F.interpolate(inputs, {wanted})"
        yield remedy + (f", or --set data.size={high}" if high == wide else "")


def expected_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that a model declares, as vision transformers of the large libraries do."""
    parts: tuple[Any, ...] = (
        getattr(getattr(model, "config", None), "image_size", None),  # transformers
        getattr(getattr(model, "patch_embed", None), "img_size", None),  # timm
        getattr(model, "image_size", None),  # torchvision
        getattr(model, "input_shape", ())[1:],
    )
    for size in parts:
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
            return int(size[0]), int(size[1])
    return None


def visit_problems(model: nn.Module, trace: Trace) -> list[Problem]:
    """Return the problems of single calls: normalisations of one value, and noise that would serve two calls."""
    problems: dict[str, Problem] = {}
    seen: set[str] = set()
    for visit in trace.done:
        module = at(model, "" if visit.path == "model" else visit.path)
        if _by_batch(module) and visit.inputs and visit.inputs[0].numel() == visit.inputs[0].shape[1]:
            shape = tuple(visit.inputs[0].shape)
            what = f"normalises one value per channel, inputs of shape {shape}, by its own mean: nothing is left of it"
            remedy = "give a client at least 2 examples (client_batch=2, or --set client.batch=2), give larger images, "
            remedy += "or put the model into evaluation mode"
            problems[visit.path] = Problem(visit.path, what, remedy)
        if isinstance(module, Stochastic) and visit.path in seen:
            what = f"{type(module).__name__} runs more than once in a forward pass, and has one draw for all of them"
            remedy = "write a module of its own for each place, or put this one into evaluation mode"
            problems[visit.path] = Problem(visit.path, what, remedy)
        seen.add(visit.path)
    return list(problems.values())


def _by_batch(module: nn.Module) -> bool:
    return isinstance(module, BatchStatistics) or (isinstance(module, BatchNorm) and uses_batch(module))
