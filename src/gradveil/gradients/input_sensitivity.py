"""Sensitivity of a gradient to the inputs, or to the word embeddings of texts: derivatives of per-example gradients.

The mean gradient of B examples has ||dg_i/dX||^2 = B^-2 sum_b ||dg_i^(b)/dx_b||^2, as examples meet in the mean only.
A direction of the whole batch adds the examples' derivatives up before they are squared, so that one direction is one
draw of (J v)_i^2. Here they are squared first: B directions of one example each cost as much, and are B draws. They go
to the examples in proportion to how much their loss asks of the outputs, and are weighted by the inverse.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from gradveil.core.tree import Tensors, norm, plain, root
from gradveil.core.types import Batch
from gradveil.gradients.layer_rules import RULES
from gradveil.gradients.objective import Objective, mean_gradient
from gradveil.gradients.per_client import obstacle
from gradveil.gradients.recorder import Recorder, Unsupported, dual, unpacked
from gradveil.nn.stochastic import collect_penalties
from gradveil.nn.token_layout import perturbation_of

EVEN = 0.1
"""The share of the directions that goes to all examples alike."""
_PROBES_AT_ONCE = 1 << 24
"""Entries of examples' own gradients that the reference holds at once."""
_SHOWN = 4
"""Examples whose derivatives are computed both ways before the sweep is trusted."""
_ERROR = {torch.float64: 1e-8, torch.float32: 1e-3}


def example_squared_row_norms(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    probe: Tensor,
    offset: Tensor,
    outputs: Tensor | None = None,
) -> Tensors:
    """Estimate ||dg_i/dX||^2 of the mean gradient g of a batch from directions [N, ...] in the space of one example.

    Direction n goes to the example at quantile (n + offset) / N of the examples' shares, whose place is drawn by
    offset ~ U(0, 1): the estimate is unbiased. Model noise has the examples in front. `outputs` are those of the model
    for this batch, where they are known.
    """
    if outputs is None or len(outputs) != len(batch.inputs):
        outputs = objective.outputs({**trained, **frozen}, batch.inputs, noise)
    share = shares(objective, outputs, batch.targets)
    at = (torch.arange(len(probe), device=probe.device) + offset) / len(probe)
    # The first example whose cumulated share exceeds the quantile. Rounding can leave the last sum below 1.
    rows = (share.detach().cumsum(0).unsqueeze(0) <= at.unsqueeze(1)).sum(1).clamp(max=len(share) - 1)
    own = Batch(batch.inputs[rows], batch.targets[rows])
    # B^-2 of the mean, and the inverse of N p_b, the expected number of example b's directions.
    factor = 1 / (len(probe) * len(share) ** 2 * share[rows])
    given = objective, trained, frozen, own, {name: value[rows] for name, value in noise.items()}, probe, factor
    return _swept(*given) if _serves(*given) else reference(*given)


def shares(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how the directions are shared out: in proportion to ||d loss_b / d outputs_b||, and a tenth evenly.

    Examples that a model is sure of hardly move its gradient.
    """

    def total(given: Tensor) -> Tensor:
        return objective.total(given, targets, [])

    asked = grad(total)(outputs)
    # `tiny` keeps 0 / 0 away where no example asks for anything.
    size = root(asked.flatten(1).square().sum(1)) + torch.finfo(asked.dtype).tiny
    return (1 - EVEN) * size / size.sum() + EVEN / len(size)


def reference(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    probe: Tensor,
    factor: Tensor,
) -> Tensors:
    """Return sum_n f_n (J_n v_n)_i^2 by `vmap` over examples [N, ...]; can be differentiated, and runs under `vmap`."""
    perturbation = perturbation_of(objective.model)

    def product(inputs: Tensor, targets: Tensor, own: Tensors, direction: Tensor) -> Tensors:
        inner = {name: value.unsqueeze(0) for name, value in own.items()}
        still = Batch(inputs.unsqueeze(0), targets.unsqueeze(0))

        def gradient(added: Tensor) -> Tensors:
            with perturbation.added(still, added) as moved:
                return mean_gradient(objective, trained, frozen, moved, inner)

        start = perturbation.zeros(still.inputs).to(direction.dtype)
        return jvp(gradient, (start,), (direction.unsqueeze(0),))[1]

    load_forward_mode()
    entries = sum(value.numel() for value in trained.values())
    some = max(1, _PROBES_AT_ONCE // entries)
    total: Tensors = {}
    for start in range(0, len(probe), some):
        part = slice(start, start + some)
        own = {name: value[part] for name, value in noise.items()}
        rows = vmap(product)(batch.inputs[part], batch.targets[part], own, probe[part])
        sums = {
            name: (factor[part] @ value.square().reshape(len(value), -1)).view(value.shape[1:])
            for name, value in rows.items()
        }
        total = {name: total[name] + value for name, value in sums.items()} if total else sums
    return total


def _swept(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    probe: Tensor,
    factor: Tensor,
) -> Tensors:
    """Return the same from one pass in forward mode over all examples, which makes few of their own gradients."""
    load_forward_mode()
    weights = {name: value.detach() for name, value in trained.items()}
    fixed = {name: value.detach() for name, value in frozen.items()}
    perturbation, still = perturbation_of(objective.model), Batch(batch.inputs.detach(), batch.targets)
    start = perturbation.zeros(still.inputs)
    with (
        forward_ad.dual_level(),
        torch.enable_grad(),
        perturbation.added(still, dual(start, probe.to(start.dtype))) as moved,
    ):
        with collect_penalties() as penalties, Recorder(RULES, weights, len(probe), 1, forward_mode=True) as recorder:
            outputs = objective.outputs({**weights, **fixed}, moved.inputs, noise, checked=True)
        if penalties:
            # The mean over N rows, times N: each row's gradient is that of its own loss.
            total = objective.total(outputs, batch.targets, penalties) * len(probe)
            return recorder.squared_moves(total, factor)
        return recorder.squared_moves(outputs, factor, _upper(objective, outputs, batch.targets))


def _upper(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return d loss_n / d outputs_n of each example with its tangent, by two backward passes: a Hessian is symmetric.

    Forward mode through the loss takes longer than through a small network.
    """
    primal, tangent = unpacked(outputs)
    leaf = primal.detach().requires_grad_()
    total = objective.total(leaf, targets, []) * len(leaf)
    (upper,) = torch.autograd.grad(total, leaf, create_graph=True)
    moved: Tensor | None = None
    if upper.requires_grad:  # a linear loss has no second derivative
        (moved,) = torch.autograd.grad(upper, leaf, tangent.detach(), allow_unused=True)
    moved = torch.zeros_like(leaf) if moved is None else moved
    return dual(upper.detach(), moved)


_SERVES: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def _serves(
    objective: Objective,
    trained: Tensors,
    frozen: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    probe: Tensor,
    factor: Tensor,
) -> bool:
    """Say whether the sweep serves. The first call of each shape computes a few examples both ways."""
    if not plain(*trained.values(), *batch, *noise.values(), probe):
        return False
    few = Batch(*(value[:_SHOWN] for value in batch))
    inner = {name: value[:_SHOWN] for name, value in noise.items()}
    apart = Batch(*(value.unsqueeze(1) for value in few))
    # `obstacle` is asked with each example as a target client of its own: [N, 1, ...].
    if obstacle(objective, trained, frozen, apart, {k: v.unsqueeze(1) for k, v in inner.items()}) is not None:
        return False
    known = _SERVES.setdefault(objective.model, {})
    modes = tuple(module.training for module in objective.modules)
    key = objective.loss, tuple(trained), few.inputs.shape, few.inputs.dtype, few.inputs.device, tuple(noise), modes
    if key not in known:
        given = objective, trained, frozen, few, inner, probe[:_SHOWN], factor[:_SHOWN]
        expected = reference(*given)
        try:
            found = _swept(*given)
        except (Unsupported, RuntimeError):  # forward mode has no rule for some operation's derivative
            found = None
        known[key] = found is not None and _same(found, expected)
    return known[key]


def _same(found: Tensors, expected: Tensors) -> bool:
    for name, value in expected.items():
        allowed = _ERROR.get(value.dtype, 0.03) * norm({"": value}) + torch.finfo(value.dtype).tiny
        if not bool(norm({"": found[name] - value}) <= allowed):
            return False
    return True


@cache
def load_forward_mode() -> None:
    """Let torch load its forward-mode rules, without the warning that torch gives itself for its use of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))
