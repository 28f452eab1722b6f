"""A client's loss and its gradients, as pure functions of parameters, batch and named noise."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.core.errors import fail
from gradveil.core.tree import Tensors, plain, qualified
from gradveil.core.types import Batch, Features, Loss
from gradveil.nn.module_paths import call_on, caught_by_linear
from gradveil.nn.stochastic import buffer_places, collect_penalties
from gradveil.nn.token_layout import TokenModel, own_loss

_caught: ContextVar[list[Tensor] | None] = ContextVar("caught", default=None)


@contextmanager
def caught_outputs() -> Generator[list[Tensor]]:
    """Collect the outputs of the model when plain gradients are computed: who needs them saves a forward pass."""
    caught: list[Tensor] = []
    token = _caught.set(caught)
    try:
        yield caught
    finally:
        _caught.reset(token)


@dataclass(frozen=True)
class Objective:
    """What a client minimises: the model's structure and frozen buffers, and the loss. Parameters are arguments."""

    model: nn.Module
    loss: Loss
    replaced: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Buffers that stand in for the model's own."""

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module, found once: an attack asks thousands of times."""
        return tuple(self.model.modules())

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        return buffer_places(self.model)

    def buffers(self) -> Tensors:
        """Return the buffers that travel with the client (everything but the noise)."""
        own = {name: getattr(module, local) for name, module, local in self._places}
        return {**own, **self.replaced}

    @cached_property
    def tied(self) -> bool:
        """Whether a tensor of the model has several names."""
        own = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        return len({id(value) for _, value in own}) < len(own)

    def copied(self) -> Objective:
        """Return one of its own model and loss: what they keep from call to call (a state, a mean) stays in the copy.

        Parameters are shared. What lies outside of both (a closure's variables, say) is not copied.
        """
        # `deepcopy` takes what its memo holds for copied already.
        shared: dict[int, object] = {id(value): value for value in self.model.parameters()}
        return Objective(*deepcopy((self.model, self.loss, dict(self.replaced)), shared))

    def outputs(
        self, params: Mapping[str, Tensor], inputs: Tensor, noise: Mapping[str, Tensor], *, checked: bool = False
    ) -> Tensor:
        """Run the model; a missing noise tensor is refused, unless these names are `checked` already."""
        tensors = {**params, **self.buffers(), **noise}
        if checked and not self.tied:
            return self._lent(tensors, inputs)
        if self.tied:
            return call_on(self.model, tensors, inputs, strict=not checked)
        return functional_call(self.model, tensors, (inputs,), tie_weights=False, strict=not checked)

    @cached_property
    def _slots(self) -> dict[str, tuple[dict[str, Tensor | None], str]]:
        """Find where each parameter and buffer is kept: its module's own dictionary, and its name there."""
        found: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for path, module in cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules()):
            for kept in (vars(module)["_parameters"], vars(module)["_buffers"]):
                found |= {qualified(path, local): (kept, local) for local in kept}
        return found

    def _lent(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Run the model on tensors that take the place of its own: `functional_call`, without looking names up again.

        An attack runs a small model thousands of times, and the looking up is a fifth of the time that takes.
        """
        own: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        try:
            for name, value in tensors.items():
                kept, local = self._slots[name]
                own.append((kept, local, kept[local]))
                kept[local] = value
            return self.model(inputs)
        finally:
            for kept, local, value in own:
                kept[local] = value

    def value(
        self, params: Mapping[str, Tensor], batch: Batch, noise: Mapping[str, Tensor], *, checked: bool = False
    ) -> Tensor:
        """Mean loss over the batch plus what the modules add (KL terms)."""
        with collect_penalties() as penalties:
            outputs = self.outputs(params, batch.inputs, noise, checked=checked)
        caught = _caught.get()
        if caught is not None and plain(batch.inputs, *noise.values()):
            caught.append(outputs.detach())
        return self.total(outputs, batch.targets, penalties)

    def total(self, outputs: Tensor, targets: Tensor, penalties: list[Tensor]) -> Tensor:
        """Reduce the loss to one scalar and add the penalties."""
        value = self.loss(outputs, targets)
        if not value.dtype.is_floating_point:
            raise fail("loss", f"returns {value.dtype}", "return a floating-point tensor")
        if value.ndim:
            value = value.mean() if value.numel() > 1 else value.view(())
        for penalty in penalties:
            value = value + penalty
        return value


def last_inputs(objective: Objective, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> Features:
    """Return what the linear layer that the model runs last takes for a batch, and which layer that is."""
    with caught_by_linear(objective.model) as caught:
        objective.outputs(params, batch.inputs, noise)
    if not caught:
        raise fail("model", "runs no nn.Linear, so no last layer is known", "end the model with a linear classifier")
    return Features(*caught[-1])


def mean_gradient(
    objective: Objective, trainable: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> Tensors:
    """Gradient of the mean loss with respect to the trainable parameters."""

    def value(params: Tensors) -> Tensor:
        return objective.value({**params, **frozen}, batch, noise)

    return grad(value)(trainable)


def example_gradients(
    objective: Objective, trainable: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> Tensors:
    """Gradient of each example's own loss: leading dimension B. Model noise has the batch as its first dimension."""

    def one(inputs: Tensor, targets: Tensor, noise_1: Tensors) -> Tensors:
        single = Batch(inputs.unsqueeze(0), targets.unsqueeze(0))
        own = {name: value.unsqueeze(0) for name, value in noise_1.items()}
        return mean_gradient(objective, trainable, frozen, single, own)

    return vmap(one)(batch.inputs, batch.targets, dict(noise))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy an example; targets are class numbers [B] or class probabilities [B, K]."""
    if targets.dtype.is_floating_point:
        return -(targets * torch.log_softmax(outputs, dim=-1)).sum(-1)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def is_cross_entropy(loss: Loss) -> bool:
    """Return whether a loss is plain cross-entropy, ours or that of torch: without weights of classes or smoothing."""
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and not loss.label_smoothing
    return plain or loss is cross_entropy or loss is nn.functional.cross_entropy


def usual_loss(model: nn.Module) -> Loss:
    """Return the loss that a model is trained with: its own for language models, else cross-entropy."""
    return own_loss if isinstance(model, TokenModel) and model.layout.predicts_words else cross_entropy
