"""Noise, state and side inputs of one update, declared by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from gradveil.client.local_training import Batching, Local
from gradveil.core.chain import split
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, below, multiplied, select, single, under, wide
from gradveil.core.types import Batch, Multiplier, Transform
from gradveil.nn.stochastic import model_noise


@dataclass(frozen=True)
class Declared:
    """The declarations of a client's parts, united. `sent` are the trained parameters, in the model's order.

    Transforms of updates compute in single precision at least, whatever the model does.
    """

    model: nn.Module
    kept: NoiseSpec
    """What the model has of the client's own: drawn once, never sent."""
    batching: Batching
    local: Local | None
    step: Transform | None
    send: Transform | None

    def init(self, sent: Tensors) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        state = under("step", self.step.init(wide(sent)) if self.step else {})
        state |= under("send", self.send.init(wide(sent)) if self.send else {})
        if self.kept:
            like = next(iter(sent.values()))
            own = {name: like.new_zeros(noise.shape) for name, noise in self.kept.items()}
            state |= under("kept", {"joined": like.new_zeros(()), **own})
        return state

    def noise(self, sent: Tensors, batch: Batch) -> NoiseSpec:
        """Declare every random tensor of one update for a batch of these shapes."""
        examples = batch.inputs.shape[0]
        once, step = self.of_round(sent, batch), self.of_step(sent, batch)
        if self.local is None:
            return once | step
        epochs = self.of_epoch(batch).times(self.batching.epochs(examples))
        return once | epochs | step.times(self.local.count(examples))

    def of_round(self, sent: Tensors, batch: Batch) -> NoiseSpec:
        """Declare what an update draws once: for the batch of one gradient, for what is sent, the order of examples."""
        spec = self.kept
        if self.local is None:
            spec = spec | self.batching.spec(batch)
        if self.local:
            spec = spec | self.local.drawn(batch.inputs.shape[0])
        spec = spec.to(batch.inputs.dtype)
        return spec | _of_slot(self.send, sent, batch).under("send") if self.send else spec

    def of_epoch(self, batch: Batch) -> NoiseSpec:
        """Declare what local training draws in every epoch."""
        return self.batching.spec(batch, "epoch").to(batch.inputs.dtype) if self.local else NoiseSpec()

    def of_step(self, sent: Tensors, batch: Batch) -> NoiseSpec:
        """Declare what each gradient draws."""
        examples = batch.inputs.shape[0]
        size = self.local.at_once(examples) if self.local else examples
        shown = Batch(batch.inputs[:size], batch.targets[:size])
        spec = model_noise(self.model, shown.inputs).under("model")
        if self.local is not None:
            spec = spec | self.batching.spec(shown, "step")
        spec = spec.to(batch.inputs.dtype)
        each, mean = split(self.step)
        if each is not None:
            own = each.noise(wide(sent)).to(single(batch.inputs.dtype))
            spec = spec | own.times(size).under("step")
        if mean is not None:
            spec = spec | _of_slot(mean, sent, shown).under("step")
        return spec

    def intermediates(self, sent: Tensors) -> NoiseSpec:
        """Declare the intermediates of the sent update (masks, scales) that an attacker may pin through the noise."""
        spec = self.send.intermediates(wide(sent)).under("send") if self.send else NoiseSpec()
        if self.local is None and (mean := split(self.step)[1]) is not None:
            spec = spec | mean.intermediates(wide(sent)).under("step")
        return spec

    def only_masks(
        self, sent: Tensors, examples: int, noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Tensors | None:
        """Return the masks that the mean gradient of so many examples is multiplied by: None where more may be done."""
        if examples > 1 and split(self.step)[0] is not None:
            return None  # each example's gradient is scaled by itself
        found: Tensors = {}
        for name, slot in (("step", self.step), ("send", self.send)):
            own = slot.multiplier(sent, select(noise, name), below(name, off)) if slot else Multiplier()
            if own is None or not own.keeps_direction:
                return None
            found = multiplied(found, own.masks)
        return found

    def evidence(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Say what a sent update gives away about the intermediates."""
        found = under("send", self.send.evidence(sent)) if self.send else {}
        if self.local is None and self.send is None and self.step:
            found |= under("step", self.step.evidence(sent))
        return found


def trained_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Name the parameters that match a pattern, in the model's order: without patterns, those that want a gradient."""
    named = list(model.named_parameters())
    if patterns is None:
        return [name for name, value in named if value.requires_grad]
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name, _ in named)]
    known = ", ".join(name for name, _ in named)
    refuse([Problem("client.trainable", f"'{p}' matches no parameter", f"parameters: {known}") for p in unused])
    return [name for name, _ in named if any(fnmatchcase(name, p) for p in patterns)]


def _of_slot(slot: Transform, sent: Tensors, batch: Batch) -> NoiseSpec:
    """Declare what a transform of the mean update draws."""
    dtype = single(batch.inputs.dtype)
    shown = Batch(batch.inputs.to(dtype), batch.targets)
    return (slot.noise(wide(sent)) | slot.directions(shown)).to(dtype)
