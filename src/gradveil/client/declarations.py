"""Noise, state and side inputs of one update, declared by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.client.pipeline import Pipeline
from gradveil.core.chain import split
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, single, under, wide
from gradveil.core.types import Batch, Transform
from gradveil.nn.stochastic import model_noise
from gradveil.nn.token_layout import perturbation_of


class NoiseParts(NamedTuple):
    """The random tensors of one update, by when they are drawn."""

    once: NoiseSpec
    """For what is sent, and the order of examples; without local training all."""
    step: NoiseSpec
    """For every gradient; without local training a part of `once`."""
    epoch: NoiseSpec


@dataclass(frozen=True)
class Declared:
    """The declarations of a client's parts, united. `sent` are the trained parameters, in the model's order.

    Transforms of updates compute in single precision at least, whatever the model does.
    """

    pipeline: Pipeline

    def init(self, sent: Tensors) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        step, send, layers = self.pipeline.gradient.step, self.pipeline.send, self.pipeline.private.layers
        state = under("step", step.init(wide(sent)) if step else {})
        state |= under("send", send.init(wide(sent)) if send else {})
        if layers:
            like = next(iter(sent.values()))
            own = {name: like.new_zeros(noise.shape) for name, noise in layers.items()}
            state |= under("kept", {"joined": like.new_zeros(()), **own})
        return state

    def noise(self, sent: Tensors, batch: Batch) -> NoiseSpec:
        """Declare every random tensor of one update for a batch of these shapes."""
        (once, step, epoch), local = self.parts(sent, batch), self.pipeline.batches.local
        if local is None:
            return once | step
        examples = len(batch.inputs)
        return once | epoch.times(self.pipeline.batches.epochs(examples)) | step.times(local.count(examples))

    def parts(self, sent: Tensors, batch: Batch) -> NoiseParts:
        """Declare the same by when it is drawn."""
        batches, examples, dtype = self.pipeline.batches, len(batch.inputs), _precision(batch, sent)
        local, send, (each, mean) = batches.local, self.pipeline.send, split(self.pipeline.gradient.step)
        once = self.pipeline.private.layers | (local.drawn(examples) if local else batches.spec(batch))
        once = once.to(dtype) | (self._of_slot(send, sent, batch).under("send") if send else NoiseSpec())
        size = local.at_once(examples) if local else examples
        shown = Batch(batch.inputs[:size], batch.targets[:size])
        step = model_noise(self.pipeline.gradient.objective.model, shown.inputs).under("model")
        step = (step | batches.spec(shown, "step") if local else step).to(dtype)
        if each is not None:
            step = step | each.noise(wide(sent)).to(single(dtype)).times(size).under("step")
        if mean is not None:
            step = step | self._of_slot(mean, sent, shown).under("step")
        return NoiseParts(once, step, batches.spec(batch, "epoch").to(dtype) if local else NoiseSpec())

    def _of_slot(self, slot: Transform, sent: Tensors, batch: Batch) -> NoiseSpec:
        """Declare what a transform of the mean update draws."""
        dtype = single(_precision(batch, sent))
        perturbation = perturbation_of(self.pipeline.gradient.objective.model)
        shown = Batch(perturbation.zeros(batch.inputs).to(dtype), batch.targets)
        return (slot.noise(wide(sent)) | slot.directions(shown)).to(dtype)

    def intermediates(self, sent: Tensors) -> NoiseSpec:
        """Declare the intermediates of the sent update (masks, scales) that an attacker may pin through the noise."""
        send, mean = self.pipeline.send, split(self.pipeline.gradient.step)[1]
        spec = send.intermediates(wide(sent)).under("send") if send else NoiseSpec()
        if self.pipeline.batches.local is None and mean is not None:
            spec = spec | mean.intermediates(wide(sent)).under("step")
        return spec

    def evidence(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the intermediates that a sent update gives away."""
        step, send = self.pipeline.gradient.step, self.pipeline.send
        if send is not None:
            return under("send", send.evidence(sent))
        return under("step", step.evidence(sent)) if step and self.pipeline.batches.local is None else {}


def trained_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Name the parameters that match a pattern, in the model's order: without patterns, those that want a gradient."""
    named = list(model.named_parameters())
    if patterns is None:
        return [name for name, value in named if value.requires_grad]
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name, _ in named)]
    known = ", ".join(name for name, _ in named)
    refuse([Problem("client.trainable", f"'{p}' matches no parameter", f"parameters: {known}") for p in unused])
    return [name for name, _ in named if any(fnmatchcase(name, p) for p in patterns)]


def _precision(batch: Batch, sent: Tensors) -> torch.dtype:
    """Return the dtype of the inputs, or that of the parameters where the inputs are token numbers."""
    inputs = batch.inputs
    return inputs.dtype if inputs.is_floating_point() or not sent else next(iter(sent.values())).dtype
