"""Per-client gradients of shared weights in one batched sweep, several times as fast as `vmap(grad)`.

The two guards against hidden randomness and missing noise live in `vmap` and `strict=True`. So the first step of each
shape is computed both ways, with made-up weights and examples (`gradveil.gradients.made_up`): `obstacle` says why the
batched sweep may not be used, or None. That is a trial. Where a guarantee depends on it that examples do not meet, each
one's gradient is computed alone (`gradveil.client.defended_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.core.errors import UNFIT
from gradveil.core.tree import Tensors, plain, straight_through
from gradveil.core.types import Batch
from gradveil.gradients import made_up
from gradveil.gradients.layer_rules import RULES
from gradveil.gradients.objective import Objective, caught_outputs, mean_gradient
from gradveil.gradients.recorder import Recorder, Unsupported
from gradveil.nn.stochastic import collect_penalties

_RELATIVE_ERROR = {torch.float64: 1e-8, torch.float32: 1e-3}
_SMALL_SHARE = 1e-3
"""A tensor with a smaller share of the whole gradient's norm is held to that share: some are zero but for rounding."""


def per_client_gradients(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> Tensors:
    """Return every target's mean gradient [V, *shape], the parameters shared by all; equal to `vmap(mean_gradient)`.

    Inputs [V, B, ...], targets [V, B] or [V, B, K] and model noise [V, B, ...] are differentiable, the parameters are
    constants. Raises `Unsupported` for a model or loss whose gradients do not come apart by target client. The names of
    the noise are not looked at: `obstacle`, which is asked first, has.
    """
    create_graph = torch.is_grad_enabled() and any(value.requires_grad for value in (*batch, *noise.values()))
    if len(batch.inputs) == 1:  # nothing to take apart: plain double backward
        leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
        params = {**leaves, **{name: value.detach() for name, value in frozen.items()}}
        own, own_noise = Batch(batch.inputs[0], batch.targets[0]), {name: value[0] for name, value in noise.items()}
        with torch.enable_grad():
            loss = objective.value(params, own, own_noise, checked=True)
            gradients = torch.autograd.grad(
                loss, list(leaves.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        return {name: g.unsqueeze(0) for name, g in zip(leaves, gradients, strict=True)}
    with torch.enable_grad():
        total, recorder = _recorded(objective, trained, frozen, batch, noise)
        return recorder.gradients(total, create_graph=create_graph)


def per_client_cosines(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    targets: Tensors,
    squares: Tensor,
    masks: Tensors | None = None,
) -> Tensor:
    """Return 1 - cosine between every target's mean gradient and its targets [V, *shape], whose |.|^2 is given: [V].

    With masks [V, *shape] it is that of the masked gradient. No gradient of a large layer is made, if `shortens` says
    so, but of some that are masked. Where a gradient or its targets are all zeros, the distance is 1. It is a
    difference of two numbers near 1, and has no more digits than that leaves; it is never 0.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        total, recorder = _recorded(objective, trained, frozen, batch, noise)
        found = recorder.products(total, targets, masks or {}, create_graph=create_graph)
    dot, square = found.unbind(1)
    none = (square == 0) | (squares == 0)
    # A 1 for 0 under the root, whose slope at 0 is infinite.
    size = torch.where(none, 1.0, square).sqrt() * torch.where(none, 1.0, squares).sqrt()
    distance = 1 - dot / size
    # A row at 0 has converged, whatever the tolerance: rounding must not say so.
    distance = straight_through(distance.clamp_min(torch.finfo(distance.dtype).eps), distance)
    return torch.where(none, 1.0, distance)


def shortens(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> bool:
    """Say whether `per_client_cosines` serves, and is shorter than making the gradients; `obstacle` is asked first.

    The first call of each shape tries. In half precision too few digits would be left.
    """
    if batch.inputs.dtype not in _RELATIVE_ERROR:
        return False
    known = _SHORTENS.setdefault(objective.model, {})
    key = _key(objective, trained, batch, noise)
    if key not in known:
        detached = Batch(*(value.detach() for value in batch))
        given = trained, frozen, detached, {name: value.detach() for name, value in noise.items()}
        try:
            with torch.enable_grad():
                short = _recorded(objective, *given)[1].shortens()
            # One target client's gradients are not taken apart, so `obstacle` has not tried how.
            known[key] = short and (len(batch.inputs) > 1 or _found(_recorded_difference, objective, *given) is None)
        except (Unsupported, RuntimeError):
            known[key] = False
    return known[key]


_SHORTENS: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def _recorded(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> tuple[Tensor, Recorder]:
    """Run the target clients' examples forward, and return the sum of their mean losses with what was recorded."""
    target_clients, examples = batch.inputs.shape[:2]
    flat = Batch(batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1))
    rows = {name: value.flatten(0, 1) for name, value in noise.items()}
    weights = {name: value.detach() for name, value in trained.items()}
    fixed = {name: value.detach() for name, value in frozen.items()}
    with collect_penalties() as penalties, Recorder(RULES, weights, target_clients, examples) as recorder:
        outputs = objective.outputs({**weights, **fixed}, flat.inputs, rows, checked=True)
    # The mean over V x B examples, times V: the sum of the target clients' own means.
    return objective.total(outputs, flat.targets, penalties) * target_clients, recorder


def weighted_sum(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    weigh: Callable[[Tensors], Tensors | None],
) -> Tensors | None:
    """Return sum_b f_b g_b of the examples' own gradients g_b in one sweep, which makes none of them (Bu et al. 2022).

    `weigh` makes factors [B] out of squared norms [B], both by parameter; None where it does. `obstacle` is asked
    first, with the examples as target clients.
    """
    weights = {name: value.detach() for name, value in trained.items()}
    examples = len(batch.inputs)
    with torch.enable_grad():
        with collect_penalties() as penalties, Recorder(RULES, weights, examples, 1) as recorder:
            outputs = objective.outputs({**weights, **frozen}, batch.inputs, noise, checked=True)
        # The mean over B, times B: g_b is the gradient of example b's own loss.
        total = objective.total(outputs, batch.targets, penalties) * examples
        return recorder.weighted_sum(total, weigh)


def reference_gradients(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> Tensors:
    """Return the same by `vmap` over target clients: slower, works for every model, refuses hidden randomness."""

    def one(own: Batch, own_noise: Tensors) -> Tensors:
        return mean_gradient(objective, trained, frozen, own, own_noise)

    return vmap(one)(batch, dict(noise))


def obstacle(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> str | None:
    """Say why `per_client_gradients` does not serve here, or None if it does. The first call of each shape tries it.

    Refuses (by raising, as `vmap` does) a model that draws random numbers by itself or lacks a noise tensor.
    """
    values = (*trained.values(), *frozen.values())
    if not plain():
        return "the update is itself computed under torch.func"
    if torch.is_grad_enabled() and any(value.requires_grad for value in values):
        return "the parameters are to be differentiated"
    known = _OBSTACLES.setdefault(objective.model, {})
    key = _key(objective, trained, batch, noise)
    if key not in known:
        detached = Batch(*(value.detach() for value in batch))
        given = trained, frozen, detached, {k: v.detach() for k, v in noise.items()}
        with caught_outputs():  # those of a trial, perhaps in double precision, are not those of the step
            known[key] = _found(_difference, objective, *given)
    return known[key]


def _found(
    difference: Callable[..., str | None],
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Tensors,
) -> str | None:
    """Look for a difference; again in float64, where rounding does not say on which side of a kink a value is."""
    real = trained, frozen, batch, noise
    try:
        objective, trained, frozen, batch = _made_up(objective, trained, frozen, batch)
        found = difference(objective, trained, frozen, batch, noise)
    except (*UNFIT, AssertionError) as error:
        reference_gradients(objective, *real)  # a model that nothing fits is refused
        return f"a trial with made-up examples fails: {error}"
    if found is None or batch.inputs.dtype != torch.float32 or batch.inputs.device.type == "mps":
        return found

    def wide(values: Mapping[str, Tensor]) -> Tensors:
        return {name: value.double() if value.is_floating_point() else value for name, value in values.items()}

    targets = batch.targets.double() if batch.targets.is_floating_point() else batch.targets
    exact = replace(objective, replaced=wide(objective.buffers()))
    try:
        return difference(exact, wide(trained), wide(frozen), Batch(batch.inputs.double(), targets), wide(noise))
    except (RuntimeError, TypeError):  # a model that computes in float32 only
        return found


def _made_up(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch
) -> tuple[Objective, Tensors, Tensors, Batch]:
    """Return weights, statistics and examples to try, of the same shapes, and a loss that takes any whole numbers.

    These go through all classes, once the outputs of the step that is tried say how many there are.
    """
    given = objective.buffers()
    own = {n: v.to(given[n].dtype) for n, v in replace(objective, replaced={}).buffers().items()}
    objective = replace(objective, replaced=own | made_up.statistics(given))
    trained, frozen = made_up.parameters(trained), made_up.parameters(frozen)
    inputs = made_up.numbers(batch.inputs, "inputs")
    if batch.targets.dtype.is_floating_point:
        return objective, trained, frozen, Batch(inputs, made_up.numbers(batch.targets, "targets"))

    loss = objective.loss

    def of_any_class(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets % _classes(targets, outputs.shape))

    targets = torch.arange(batch.targets.numel(), device=inputs.device).view(batch.targets.shape)
    return replace(objective, loss=of_any_class), trained, frozen, Batch(inputs, targets.to(batch.targets))


def _classes(examples: Tensor, outputs: torch.Size) -> int:
    """Count the classes of outputs [B, K, ...] with labels [B, ...], as torch has it, or of outputs [B, ..., K]."""
    behind = len(outputs) > 1 and outputs[2:] == examples.shape[1:]
    return max(1, outputs[1] if behind else outputs[-1])


_OBSTACLES: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def _key(objective: Objective, trained: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> Any:
    tensors = {**noise, "inputs": batch.inputs, "targets": batch.targets}
    shapes = tuple((name, value.shape, value.dtype, value.device) for name, value in tensors.items())
    modes = tuple(module.training for module in objective.modules)
    return objective.loss, tuple(trained), shapes, modes


def _difference(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> str | None:
    """Compute one step both ways and compare."""
    reference = reference_gradients(objective, trained, frozen, batch, noise)
    try:
        found = per_client_gradients(objective, trained, frozen, batch, noise)
    except Unsupported as reason:
        return str(reason)
    except RuntimeError as error:  # the reference ran, so what the sweep's own forward pass refuses is no mistake
        return f"the batched sweep fails: {error}"
    return _disagreement(found, reference) or _loss_obstacle(objective, trained, frozen, batch, noise)


def _recorded_difference(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> str | None:
    """Compute one target client's step by the sweep for many, and compare."""
    with torch.enable_grad():
        total, recorder = _recorded(objective, trained, frozen, batch, noise)
        found = recorder.gradients(total, create_graph=False)
    return _disagreement(found, per_client_gradients(objective, trained, frozen, batch, noise))


def _disagreement(found: Tensors, reference: Tensors) -> str | None:
    whole = torch.stack([_sizes(value) for value in reference.values()]).square().sum(0).sqrt()
    for name, value in reference.items():
        allowed = torch.maximum(_sizes(value), _SMALL_SHARE * whole) * _RELATIVE_ERROR.get(value.dtype, 0.03)
        if not bool(torch.isfinite(_sizes(value)).all()):
            return f"the gradient of '{name}' is not finite at made-up weights, so nothing can be compared"
        if not bool((_sizes(found[name] - value) <= allowed).all()):
            return f"the batched gradient of '{name}' differs from the reference: the model mixes examples, or worse"
    return None


def _loss_obstacle(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> str | None:
    """Try the loss on labels of every class: those of this batch may be too alike to show that it mixes target clients.

    A mean weighted by class, or one that leaves a class out, divides by what the labels of all target clients sum to.
    """
    examples = batch.targets[0]
    if len(batch.targets) == 1 or examples.dtype.is_floating_point:
        return None
    with torch.no_grad():
        outputs = objective.outputs({**trained, **frozen}, batch.inputs[0], {k: v[0] for k, v in noise.items()})
    # As many rows as show every class, where the batch has fewer.
    count = max(len(batch.targets), -(-_classes(examples, outputs.shape) // max(1, examples.numel())))
    labels = torch.arange(count * examples.numel(), device=outputs.device).view(count, *examples.shape).to(examples)

    def mean(given: Tensor, targets: Tensor) -> Tensor:
        return objective.total(given, targets, [])

    try:
        rows = outputs.detach().repeat(count, *[1] * outputs.dim()).requires_grad_()
        apart = vmap(torch.func.grad(mean))(rows.detach(), labels)
        with torch.enable_grad():
            total = mean(rows.flatten(0, 1), labels.flatten(0, 1)) * count
        (together,) = torch.autograd.grad(total, rows)
    except (RuntimeError, LookupError, ValueError) as error:
        return f"the loss fails for other labels than those of the batch: {error}"
    tolerance = _RELATIVE_ERROR.get(apart.dtype, 0.03) * apart.abs().amax()
    if not bool(((together - apart).abs() <= tolerance).all()):
        return "the loss mixes the examples of all target clients"
    return None


def _sizes(value: Tensor) -> Tensor:
    """Norm of each target client's tensor."""
    return torch.sqrt(torch.sum(torch.square(value.reshape(len(value), -1)), dim=1))
