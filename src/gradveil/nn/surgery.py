"""Surgeries: copies of a model in which a layer that cannot be audited is replaced by one that can.

Every function returns a new model and leaves the given one as it is. Weights stay, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.dropout import Dropout
from gradveil.nn.norms import BatchStatistics, FrozenNorm, InstanceNorm, LayerNorm, group_norm
from gradveil.nn.paths import last_layer, put

__all__ = [
    "last_layer",
    "prepare",
    "remove_inplace",
    "replace_activations",
    "replace_batchnorm",
    "replace_dropout",
    "replace_layernorm",
]

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Every BatchNorm of torch, whatever its dimension."""
InstanceNorms = nn.modules.instancenorm._InstanceNorm
"""Every InstanceNorm of torch, whatever its dimension."""
BATCHNORM_WAYS = ("group", "frozen", "batch_statistics")
"""What a BatchNorm can be replaced by: group normalisation, its own frozen statistics, or those of the batch."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The hidden dropout layers of torch that have an explicit counterpart."""


def replace_batchnorm(model: nn.Module, way: str = "group", *, groups: int = 2) -> nn.Module:
    """Replace every BatchNorm.

    `"group"`: a GroupNorm with that many groups; `"frozen"`: the running statistics as constants, in training mode too;
    `"batch_statistics"`: the batch's own statistics; running ones of a trained model are kept, for attackers, and not
    used. Weight and bias are taken over.
    """
    if way not in BATCHNORM_WAYS:
        raise fail("batchnorm", f"unknown way '{way}'", f"choose one of: {', '.join(BATCHNORM_WAYS)}")

    def new(old: nn.Module) -> nn.Module | None:
        if not isinstance(old, BatchNorm):
            return None
        if way == "group":
            return _with_weights(group_norm(old.num_features, groups), old)
        if way == "batch_statistics":
            own = BatchStatistics(old.num_features, old.eps, affine=old.affine)
            own.remember(dict(old.named_buffers()))
            return _with_weights(own, old)
        if old.running_mean is None or old.running_var is None:
            what = "it keeps no running statistics that could be frozen"
            raise fail("batchnorm", what, "choose 'group' or 'batch_statistics'")
        frozen = _with_weights(FrozenNorm(old.num_features, old.eps, affine=old.affine), old)
        assert isinstance(frozen, FrozenNorm)
        frozen.running_mean, frozen.running_var = old.running_mean.clone(), old.running_var.clone()
        return frozen

    return _replace(model, new)


def replace_dropout(model: nn.Module, *, active_only: bool = False) -> nn.Module:
    """Replace `nn.Dropout` and `nn.Dropout1d/2d/3d` by the dropout whose mask is an argument.

    The explicit dropout knows no evaluation mode: it drops whenever a mask is supplied. `active_only` leaves alone what
    is in evaluation mode. Alpha dropouts, and dropouts inside `nn.MultiheadAttention` and recurrent layers, cannot be
    replaced; `check` finds them.
    """

    def new(old: nn.Module) -> nn.Module | None:
        if not isinstance(old, DROPOUTS) or old.p >= 1 or (active_only and not old.training):
            return None
        return Dropout(old.p, channelwise=not isinstance(old, nn.Dropout))

    return _replace(model, new)


def replace_layernorm(model: nn.Module) -> nn.Module:
    """Replace `nn.LayerNorm` and `nn.InstanceNorm` by explicit ones, for which `vmap(grad)` can be differentiated."""

    def new(old: nn.Module) -> nn.Module | None:
        if isinstance(old, nn.LayerNorm):
            affine = old.elementwise_affine
            return _with_weights(
                LayerNorm(old.normalized_shape, old.eps, affine=affine, bias=old.bias is not None), old
            )
        if isinstance(old, InstanceNorms) and not old.track_running_stats:
            return _with_weights(InstanceNorm(old.num_features, old.eps, affine=old.affine), old)
        return None

    return _replace(model, new)


def replace_activations(model: nn.Module, relu_to: Callable[[], nn.Module] = nn.Softplus) -> nn.Module:
    """Replace every `nn.ReLU`, whose second derivative is zero, by another activation: `relu_to=nn.Sigmoid`."""
    return _replace(model, lambda old: relu_to() if isinstance(old, nn.ReLU) else None)


def remove_inplace(model: nn.Module) -> nn.Module:
    """Switch off `inplace=True` wherever a module has it."""
    copy = deepcopy(model)
    for module in copy.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return copy


def prepare(model: nn.Module, *, batchnorm: str = "batch_statistics", groups: int = 2) -> tuple[nn.Module, list[str]]:
    """Do every surgery that the model needs to be audited; return the new model and what was done, in words.

    BatchNorm is only touched where it would use the batch (training mode, or no running statistics); by default it goes
    on using the batch, which leaves the update unchanged. Dropout is only touched in training mode.
    """
    done: list[str] = []

    def step(what: str, before: nn.Module, after: nn.Module) -> nn.Module:
        pairs = zip(_described(before), _described(after), strict=True)
        changed = [path for (path, old), (_, new) in pairs if old != new]
        if changed:
            modules = "module" if len(changed) == 1 else "modules"
            done.append(f"{what}: {modules} {', '.join(repr(path) for path in changed)}")
        return after if changed else before

    result = step("in-place operations removed", model, remove_inplace(model))
    if any(isinstance(m, BatchNorm) and (m.training or m.running_mean is None) for m in result.modules()):
        replaced = replace_batchnorm(result, batchnorm, groups=groups)
        result = step(f"BatchNorm replaced ({batchnorm})", result, replaced)
    result = step("LayerNorm or InstanceNorm made explicit", result, replace_layernorm(result))
    result = step("hidden dropout made explicit", result, replace_dropout(result, active_only=True))
    return (result if done else deepcopy(model)), done


def _described(model: nn.Module) -> list[tuple[str, tuple[type, object]]]:
    return [(path or "model", (type(m), getattr(m, "inplace", None))) for path, m in model.named_modules()]


def _replace(model: nn.Module, new: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Copy a model and put `new(module)` in the place of each module for which it is not None."""
    copy = deepcopy(model)
    made: dict[int, nn.Module] = {}
    for path, module in list(copy.named_modules(remove_duplicate=False)):
        replacement = made.get(id(module)) or new(module)
        if replacement is not None:
            made[id(module)] = replacement.train(module.training)
            copy = put(copy, path, replacement)
    return copy


@torch.no_grad()
def _with_weights(new: nn.Module, old: nn.Module) -> nn.Module:
    """Take over weight and bias, on their device and in their dtype."""
    for name in ("weight", "bias"):
        value: Tensor | None = getattr(old, name, None)
        if value is not None:
            taken = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            setattr(new, name, taken)
    return new
