"""Module replacement: copies of a model in which layers that cannot be audited are replaced by equivalent ones.

Every function returns a new model with the same weights under the same names. Only torch's own layer types are
replaced: subclasses and layers with hooks or parametrisations may compute something else. They keep their code; where
that calls a fused torch function, `prepare` computes the call by its formula (`gradveil.nn.formulas`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail, refuse
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Loss
from gradveil.nn.formulas import (
    BatchNormWay,
    ByFormula,
    Rewritten,
    by_formula,
    call_counts,
    rewrite,
    rewrite_overwriting,
)
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.model_outputs import returning_logits
from gradveil.nn.module_paths import at, last_layer, put
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, InstanceNorm, LayerNorm, group_norm
from gradveil.nn.recurrence import Recurrence, RecurrentCell
from gradveil.nn.stochastic_layers import Dropout

TOLERANCE_DOUBLE, TOLERANCE = 1e-5, 5e-2
"""Largest rounding difference, relative to the norm: in double precision, and in any other."""
_ROUNDING = 1e-15
"""A few roundings in double precision."""
_SMALL = 1e-3
"""Smallest share of the whole gradient's norm with which differences are compared: less may be pure rounding."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Dropout layers of torch with an explicit counterpart."""
_SINGLE: dict[type[nn.Module], int] = {nn.Dropout1d: 2, nn.Dropout3d: 4}
"""Dimensions of an input without a batch, to torch's channelwise dropout; `nn.Dropout2d` knows none."""
_EXAMPLES = 4


@dataclass(frozen=True)
class Answers:
    """The outputs of a model on a batch, and the gradients of its parameters; None if the loss has no gradient."""

    outputs: Any
    slopes: Tensors | None


@dataclass(frozen=True)
class Comparison:
    """A batch and a loss for comparing models."""

    batch: Batch
    loss: Loss

    def difference(self, before: nn.Module, after: nn.Module) -> str | None:
        """Describe a difference of outputs or gradients beyond rounding; None if they agree.

        Also None if `before` cannot be run on the batch, which `gradveil.nn.check` reports. Both models see the same
        random numbers, with torch's dropout layers switched off. They run in double precision if possible: single
        precision rounds the gradients of deep networks by up to a percent.
        """
        for double in (True, False):
            try:
                old = self._answers(before, double)
            except FOREIGN:
                continue
            try:
                new = self._answers(after, double)
            except GradveilError:  # the replacement itself says what it does not take
                raise
            except FOREIGN as error:
                return f"the forward pass fails: {type(error).__name__}: {error}"
            limit = TOLERANCE_DOUBLE if double else TOLERANCE
            if (text := _differs(new, old, limit)) and double and self._amplifies_rounding(before, old):
                return _differs(new, old, TOLERANCE)
            return text
        return None

    def _amplifies_rounding(self, model: nn.Module, answers: Answers) -> bool:
        """Return whether rounding alone makes a difference: batch norms of two values do, one after the other."""
        return _differs(self._answers(model, True, 1 + _ROUNDING), answers, TOLERANCE_DOUBLE) is not None

    def _answers(self, model: nn.Module, double: bool, scale: float = 1.0) -> Answers:
        copy = deepcopy(model)
        for module in copy.modules():
            if isinstance(module, DROPOUTS) or is_drop_path(module):
                module.eval()
        inputs, targets = (value.detach()[:_EXAMPLES].clone() for value in self.batch)
        if len(inputs) == 1:  # training-mode BatchNorm may raise for a single example
            inputs, targets = torch.cat([inputs, inputs.flip(-1)]), torch.cat([targets, targets])
        if double:
            copy, inputs = copy.double(), inputs.double() * scale
            targets = targets.double() if targets.dtype.is_floating_point else targets
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = copy(inputs)
            params = {name: value for name, value in copy.named_parameters() if value.requires_grad}
            try:
                loss, every = self.loss(outputs, targets).mean(), list(params.values())
                slopes = torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True)
            except FOREIGN:
                return Answers(outputs, None)
        return Answers(outputs.detach(), dict(zip(params, slopes, strict=True)))


def _differs(new: Answers, old: Answers, limit: float) -> str | None:
    return _outputs_differ(new.outputs, old.outputs, limit) or _slopes_differ(new.slopes, old.slopes, limit)


def _outputs_differ(new: Any, old: Any, limit: float) -> str | None:
    if not isinstance(old, Tensor):
        return None  # the model cannot be audited anyway
    if not isinstance(new, Tensor) or new.shape != old.shape:
        return f"the outputs have the shape {tuple(getattr(new, 'shape', ()))}, not {tuple(old.shape)}"
    return _differ("the outputs", new, old, limit)


def _slopes_differ(new: Tensors | None, old: Tensors | None, limit: float) -> str | None:
    if old is None:
        return None
    if new is None:
        return "the loss has no gradient"
    if new.keys() != old.keys():
        return f"the trained parameters are others: {', '.join(sorted(new.keys() ^ old.keys()))}"
    whole = float(torch.stack([_size(slope) for slope in old.values()]).norm()) if old else 0.0
    each = (_differ(f"the gradient of '{name}'", new[name], old[name], limit, _SMALL * whole) for name in old)
    return next((text for text in each if text), None)


def _differ(what: str, new: Tensor, old: Tensor, limit: float, least: float = 0.0) -> str | None:
    """Describe a difference relative to the larger of both norms, and of the `least` norm that counts."""
    error, size = float(_size(new - old)), max(float(_size(new)), float(_size(old)), least)
    return f"a difference of {100 * error / size:.3g}% in {what}" if error > limit * size else None


def _size(value: Tensor) -> Tensor:
    return value.detach().double().nan_to_num().norm()


__all__ = [
    "last_layer",
    "prepare",
    "remove_inplace",
    "replace_activations",
    "replace_batchnorm",
    "replace_drop_path",
    "replace_dropout",
    "replace_layernorm",
    "replace_recurrent",
]

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Every BatchNorm of torch, whatever its dimension."""
InstanceNorms = nn.modules.instancenorm._InstanceNorm
"""Every InstanceNorm of torch, whatever its dimension."""
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Types of BatchNorm whose formula is known."""
INSTANCENORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Types of InstanceNorm whose formula is known."""
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
"""Types of recurrent layers whose formula is known."""
CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
"""Types of single steps of recurrent layers."""
BATCHNORM_WAYS = ("group", "frozen", "batch_statistics")
"""Replacements of BatchNorm: group normalisation, its frozen statistics, or the batch's statistics."""


def replaceable(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module has exactly one of these types and no hooks, so that its formula is known."""
    return type(module) in types and not (module._forward_hooks or module._forward_pre_hooks)


def replace_batchnorm(model: nn.Module, way: str = "group", *, groups: int = 2, active_only: bool = False) -> nn.Module:
    """Replace every BatchNorm and keep its weight and bias.

    `"group"`: a GroupNorm with `groups` groups; `"frozen"`: constant running statistics, in training mode too;
    `"batch_statistics"`: the batch's statistics; running ones are kept for attackers only. `active_only` skips layers
    that do not use the batch, because they are in evaluation mode and have running statistics.
    """
    if way not in BATCHNORM_WAYS:
        raise fail("batchnorm", f"unknown way '{way}'", f"choose one of: {', '.join(BATCHNORM_WAYS)}")

    def new(old: nn.Module) -> nn.Module | None:
        if not isinstance(old, BatchNorm) or not replaceable(old, BATCHNORMS) or (active_only and not uses_batch(old)):
            return None
        if way == "group":
            return _with_weights(group_norm(old.num_features, groups), old)
        if way == "batch_statistics":
            norm = BatchStatistics(old.num_features, old.eps, affine=old.affine)
            norm.remember(dict(old.named_buffers()))
            return _with_weights(norm, old)
        if old.running_mean is None or old.running_var is None:
            what = "it keeps no running statistics that could be frozen"
            raise fail("batchnorm", what, "choose 'group' or 'batch_statistics'")
        frozen = _with_weights(FrozenNorm(old.num_features, old.eps, affine=old.affine), old)
        assert isinstance(frozen, FrozenNorm)
        frozen.running_mean, frozen.running_var = old.running_mean.clone(), old.running_var.clone()
        return frozen

    return _replace(model, new)


def replace_dropout(model: nn.Module, *, active_only: bool = False) -> nn.Module:
    """Replace `nn.Dropout` and `nn.Dropout1d/2d/3d` by dropout whose mask is an argument.

    Explicit dropout has no evaluation mode: it drops whenever a mask is supplied. `active_only` skips layers in
    evaluation mode. Alpha dropout, and dropout inside `nn.MultiheadAttention` and recurrent layers, cannot be replaced;
    `check` reports them.
    """

    def new(old: nn.Module) -> nn.Module | None:
        if not isinstance(old, DROPOUTS) or not replaceable(old, DROPOUTS):
            return None
        if not 0 < old.p < 1 or (active_only and not old.training):
            return None
        return Dropout(old.p, channelwise=not isinstance(old, nn.Dropout), single=_SINGLE.get(type(old)))

    return _replace(model, new)


_DROP_PATHS = ("DropPath", "StochasticDepth")
"""Ends of the names of modules that drop whole examples: timm's, torchvision's, and those of transformers."""
_DRAWS = 4096


def is_drop_path(module: nn.Module) -> bool:
    """Return whether a module is of a type that drops whole examples (stochastic depth), going by its name."""
    return type(module).__name__.endswith(_DROP_PATHS) and not [*module.parameters(), *module.children()]


def drop_probability(module: nn.Module) -> float | None:
    """Return the probability with which a module drops examples; None if it computes anything else.

    What it computes is seen by running it: y = x or 0, times 1 / (1 - p), for each example by itself.
    """
    p = getattr(module, "drop_prob", getattr(module, "p", None))
    if not is_drop_path(module) or not isinstance(p, float) or not 0 < p < 1:
        return None
    copy = deepcopy(module).train()
    with drawing_from(torch.Generator().manual_seed(0)), torch.no_grad():
        try:
            outputs = copy(torch.ones(_DRAWS, 2, 2, 2))
        except FOREIGN:
            return None
    if not isinstance(outputs, Tensor) or outputs.shape != (_DRAWS, 2, 2, 2):
        return None
    rows = outputs.flatten(1)
    dropped = rows[:, 0] == 0
    scaled = torch.where(dropped, 0.0, 1 / (1 - p)).unsqueeze(1).expand_as(rows)
    usual = 5 * (p * (1 - p) / _DRAWS) ** 0.5  # five standard deviations of the share
    return p if torch.allclose(rows, scaled) and abs(float(dropped.float().mean()) - p) <= usual else None


def replace_drop_path(model: nn.Module, *, active_only: bool = False) -> nn.Module:
    """Replace stochastic depth (`DropPath`, `StochasticDepth` of single examples) by dropout whose mask is an argument.

    Modules that drop a whole batch together, or do not scale what they keep, stay; `check` reports them.
    """

    def new(old: nn.Module) -> nn.Module | None:
        p = None if active_only and not old.training else drop_probability(old)
        return None if p is None else Dropout(p, examplewise=True)

    return _replace(model, new)


def replace_layernorm(model: nn.Module) -> nn.Module:
    """Replace `nn.LayerNorm` and `nn.InstanceNorm` by explicit ones, for which `vmap(grad)` can be differentiated."""

    def new(old: nn.Module) -> nn.Module | None:
        if isinstance(old, nn.LayerNorm) and replaceable(old, (nn.LayerNorm,)):
            affine = old.elementwise_affine
            return _with_weights(
                LayerNorm(old.normalized_shape, old.eps, affine=affine, bias=old.bias is not None), old
            )
        if isinstance(old, InstanceNorms) and replaceable(old, INSTANCENORMS) and not old.track_running_stats:
            return _with_weights(InstanceNorm(old.num_features, old.eps, affine=old.affine), old)
        return None

    return _replace(model, new)


def replace_recurrent(model: nn.Module) -> nn.Module:
    """Replace `nn.RNN`, `nn.LSTM` and `nn.GRU` by loops over their steps, which torch can batch over target clients.

    `nn.RNNCell`, `nn.LSTMCell` and `nn.GRUCell`, the steps themselves, are computed by their formulas.

    Those that drop out between layers, or project their outputs, stay; `check` reports them.
    """

    def new(old: nn.Module) -> nn.Module | None:
        if isinstance(old, nn.RNNCellBase) and replaceable(old, CELLS):
            return RecurrentCell(old)
        if not isinstance(old, nn.RNNBase) or not replaceable(old, RECURRENT):
            return None
        return None if (old.dropout and old.training) or old.proj_size else Recurrence(old)

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


def prepare(
    model: nn.Module,
    *,
    batchnorm: str = "batch_statistics",
    groups: int = 2,
    batch: Batch | None = None,
    loss: Loss = F.cross_entropy,
    compare: bool | Literal["each"] = True,
) -> tuple[nn.Module, list[str]]:
    """Make every replacement that an audit needs; return the new model and a list of the changes.

    BatchNorm is replaced only if it uses the batch (training mode, or no running statistics); the default replacement
    also uses the batch, which leaves the update unchanged. Dropout is replaced only in training mode.

    With a `batch`, a forward pass shows what modules call themselves: fused attention and normalisations are computed
    by their formulas, in-place calls out of place, and logits are taken from outputs that hold more. Outputs and
    gradients are compared before and after (unless `compare` is False). If they differ, each kind of replacement is
    compared by itself, and an error names the modules that compute something else. Modes stay, but replaced dropout
    layers are switched off, as their masks differ. Group and frozen normalisation change the model on purpose: they are
    listed, not compared.
    """
    done: list[str] = []
    compared = None if batch is None or not compare else Comparison(batch, loss)
    way = BatchNormWay(batchnorm, groups)
    meant = "" if batchnorm == "batch_statistics" else ", which changes what the model computes"
    one_by_one = bool(meant) or compare == "each"

    def step(what: str, before: nn.Module, after: nn.Module, same: bool = True) -> nn.Module:
        pairs = zip(_described(before), _described(after), strict=True)
        changed = [path for (path, old), (_, new) in pairs if old != new]
        if not changed:
            return before
        if same and compared is not None and one_by_one:
            refuse(_problems(what, before, after, changed, compared))
        modules = "module" if len(changed) == 1 else "modules"
        done.append(f"{what}: {modules} {', '.join(repr(path or 'model') for path in changed)}")
        return after

    def rewritten(what: str, before: nn.Module, new: Rewritten | None, same: bool = True) -> nn.Module:
        return before if new is None else step(what, before, new.model, same)

    result = original = model
    if batch is not None and (logits := returning_logits(model, batch.inputs[:_EXAMPLES])) is not model:
        result = original = logits
        done.append("logits taken from the model's outputs")
    result = step("in-place operations removed", result, remove_inplace(result))
    if any(isinstance(m, BatchNorm) and uses_batch(m) and not by_formula(m) for m in result.modules()):
        replaced = replace_batchnorm(result, batchnorm, groups=groups, active_only=True)
        result = step(f"BatchNorm replaced ({batchnorm}){meant}", result, replaced, not meant)
    result = step("LayerNorm or InstanceNorm made explicit", result, replace_layernorm(result))
    result = step("recurrent layers computed step by step", result, replace_recurrent(result))
    for what, explicit in (("hidden dropout", replace_dropout), ("stochastic depth", replace_drop_path)):
        after = _with_masks(explicit(result, active_only=True), batch)
        result = step(f"{what} made explicit", result, after)
    if batch is not None:
        inputs = _two(batch.inputs)
        calls = rewrite(result, inputs, way)  # one pass for most models, which make none
        for kind, same in _BY_FORMULA.items() if calls else ():
            whole = same or not meant
            new = rewrite(result, inputs, way, kinds=[kind])
            result = rewritten(f"{kind} computed by its formula{'' if whole else meant}", result, new, whole)
        result = rewritten("in-place calls made out of place", result, rewrite_overwriting(result, inputs, way))
    if result is not original and compared is not None and not one_by_one and compared.difference(original, result):
        return prepare(model, batchnorm=batchnorm, groups=groups, batch=batch, loss=loss, compare="each")
    return (result if done else deepcopy(model)), done


def is_named_in(remedy: str) -> bool:
    """Return whether a problem's remedy is one of these functions: `prepare` applies it too."""
    return re.search(r"gradveil\.nn\.(prepare|remove_inplace|replace_\w+)\(model", remedy) is not None


def _with_masks(model: nn.Module, batch: Batch | None) -> nn.Module:
    """Give each explicit dropout, in place, as many masks as it runs times in a forward pass on the batch."""
    drops = {path: module for path, module in model.named_modules() if isinstance(module, Dropout)}
    if batch is not None and drops:
        for path, count in call_counts(model, _two(batch.inputs)).items():
            if path in drops:
                drops[path].calls = count
    return model


_BY_FORMULA = {
    "fused attention": True,
    "layer normalisation": True,
    "instance normalisation": True,
    "batch normalisation": False,
    "hardsigmoid": True,
}
"""Whether a kind of call is computed as before, whatever replaces BatchNorm."""


def _two(inputs: Tensor) -> Tensor:
    """Return two inputs: training-mode BatchNorm may raise for a single example."""
    inputs = inputs.detach()[:2]
    return torch.cat([inputs, inputs.flip(-1)]) if len(inputs) == 1 else inputs


def uses_batch(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Return whether a BatchNorm normalises by the batch: in training mode, or without running statistics."""
    return norm.training or norm.running_mean is None


def _problems(
    what: str, before: nn.Module, after: nn.Module, changed: list[str], compared: Comparison
) -> list[Problem]:
    """Return a problem for each module whose replacement makes a difference, for all of them if none does alone."""
    difference = compared.difference(before, after)
    if difference is None:
        return []
    remedy = "replace it yourself in the model by one that computes the same, or audit without prepare"
    alone = {path: compared.difference(before, _only(before, after, path)) for path in changed}
    culprits = {path: text for path, text in alone.items() if text}
    return [
        Problem(path or "model", f"{what}: {text}, so another network would be audited", remedy)
        for path, text in (culprits or dict.fromkeys(changed, difference)).items()
    ]


def _only(before: nn.Module, after: nn.Module, path: str) -> nn.Module:
    """Copy `before` with the module at one path, and at its other paths, taken from `after`."""
    copy, new = deepcopy(before), deepcopy(at(after, path))
    old = at(copy, path)
    for name, module in list(copy.named_modules(remove_duplicate=False)):
        if module is old:
            copy = put(copy, name, new)
    return copy


def _described(model: nn.Module) -> list[tuple[str, tuple[Any, ...]]]:
    return [(path, (type(m), getattr(m, "inplace", None), _formulas(m))) for path, m in model.named_modules()]


def _formulas(module: nn.Module) -> bool | None:
    """Return whether a module's in-place calls are replaced, too; None if it runs as it is written."""
    forward = vars(module).get("forward")
    return forward.formulas.out_of_place if isinstance(forward, ByFormula) else None


def _replace(model: nn.Module, new: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Copy a model and replace each module for which `new(module)` is not None; shared modules stay shared."""
    copy = deepcopy(model)
    replacements: dict[int, nn.Module] = {}
    for path, module in list(copy.named_modules(remove_duplicate=False)):
        replacement = replacements.get(id(module)) or new(module)
        if replacement is not None:
            replacements[id(module)] = replacement.train(module.training)
            copy = put(copy, path, replacement)
    return copy


def _with_weights(new: nn.Module, old: nn.Module) -> nn.Module:
    """Reuse the weight and bias of the old module, so that tied ones stay tied."""
    for name in ("weight", "bias"):
        if getattr(old, name, None) is not None:
            setattr(new, name, getattr(old, name))
    return new
