"""Torch functions inside of a forward pass that are computed by their formulas instead, and in-place calls.

Fused attention and `F.hardsigmoid` have no second derivative. `vmap(grad)` followed by reverse mode gives silently
wrong derivatives of `F.layer_norm`, `F.instance_norm` and training-mode `F.batch_norm` (torch 2.13), whatever module
calls them. A module that does keeps its code, parameters and names: its `forward` runs in a context that computes such
calls by elementary operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gradveil.core.errors import FOREIGN
from gradveil.nn.forward_trace import Trace, follow, inplace_argument, overwrites
from gradveil.nn.module_paths import at
from gradveil.nn.normalisation import per_channel, standardise


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale Q K^T + mask) V with scale = 1 / sqrt(d): `F.scaled_dot_product_attention` by its formula.

    With dropout inside, which is hidden from an attacker anyway, it stays torch's own: `check` reports it.

    >>> q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    >>> fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attention(q, k, v, is_causal=True), fused, atol=1e-6)
    True
    """
    if dropout_p > 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and key.dim() > 2:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(repeats, -3) for part in (key, value))
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        is_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_mask else scores + attn_mask
    return scores.softmax(-1) @ value


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions."""
    y = standardise(input, range(-len(normalized_shape), 0), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Apply a weight and a bias per channel."""
    y = y if weight is None else y * per_channel(weight, y)
    return y if bias is None else y + per_channel(bias, y)


@dataclass(frozen=True)
class BatchNormWay:
    """The replacement of training-mode batch normalisation; see `gradveil.nn.surgery.replace_batchnorm`."""

    name: str = "batch_statistics"
    groups: int = 2

    def __call__(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalise [B, C, ...]; running statistics stay as they are."""
        if not training and running_mean is not None:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
        if self.name == "group":
            return F.group_norm(input, self.groups, weight, bias, eps)
        if self.name == "frozen" and running_mean is not None:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
        return _affine(standardise(input, (0, *range(2, input.dim())), eps), weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of each example by its own mean and variance over the positions."""
    if running_mean is not None or not use_input_stats:
        return F.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats=use_input_stats, momentum=momentum, eps=eps
        )
    return _affine(standardise(input, range(2, input.dim()), eps), weight, bias)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x + 3, 0), 6) / 6; torch's own has no second derivative."""
    return F.relu6(input + 3) / 6


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`, which uses fused attention only if no weights are asked for."""
    wanted: dict[str, Any] = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
    self_attention = wanted["query"] is wanted["key"] is wanted["value"] and not wanted.get("use_separate_proj_weight")
    plain = all(wanted.get(name) is None for name in _RARE) and not wanted.get("add_zero_attn")
    if not (self_attention and plain) or wanted["query"].dim() != 3 or wanted.get("need_weights", True):
        in_full: dict[str, Any] = {**wanted, "need_weights": True}
        outputs, weights = F.multi_head_attention_forward(**in_full)
        return outputs, weights if wanted.get("need_weights", True) else None
    x = wanted["query"].transpose(0, 1)  # [B, T, W]: the batch in front, as everywhere else
    heads, mask = wanted["num_heads"], wanted.get("attn_mask")
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in F.linear(x, wanted["in_proj_weight"], wanted["in_proj_bias"]).chunk(3, -1)
    )
    if mask is not None:
        # True forbids in `F.multi_head_attention_forward`, and allows in `attention`.
        mask = ~mask if mask.dtype == torch.bool else mask
        # [B heads, T, T] -> [B, heads, T, T].
        mask = mask.unflatten(0, (len(x), heads)) if mask.dim() == 3 else mask
    dropout = wanted["dropout_p"] if wanted.get("training", True) else 0.0
    joined = attention(q, k, v, mask, dropout).transpose(1, 2).flatten(2)
    return F.linear(joined, wanted["out_proj_weight"], wanted["out_proj_bias"]).transpose(0, 1), None


_MULTI_HEAD = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
_RARE = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")

_FORMULAS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.instance_norm: instance_norm,
    F.hardsigmoid: hardsigmoid,
}
_ARITHMETIC = {"add", "sub", "mul", "div", "true_divide", "pow", "square", "sqrt", "exp", "clamp", "clamp_min", "neg"}
_ACTIVATIONS = {
    "relu",
    "relu6",
    "sigmoid",
    "tanh",
    "silu",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "hardtanh",
    "threshold",
}
_PURE = _ARITHMETIC | _ACTIVATIONS | {"masked_fill", "addcmul", "addcdiv", "hardswish", "hardsigmoid", "mish", "gelu"}
"""Functions whose in-place form `name_` returns what the function itself does."""
_SUMS = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.true_divide,
    "__ipow__": torch.pow,
}
KINDS: dict[str, tuple[Any, ...]] = {
    "fused attention": (F.scaled_dot_product_attention, F.multi_head_attention_forward),
    "layer normalisation": (F.layer_norm, torch.layer_norm),
    "batch normalisation": (F.batch_norm,),
    "instance normalisation": (F.instance_norm,),
    "hardsigmoid": (F.hardsigmoid,),
}
"""Calls that are computed by a formula, by kind."""
IN_PLACE = "in-place calls"
"""The kind of calls that overwrite a tensor."""


class Formulas(TorchFunctionMode):
    """Context in which torch functions are computed by their formulas, and in-place calls out of place."""

    def __init__(self, way: BatchNormWay | None = None, *, out_of_place: bool = True) -> None:
        """Take the replacement of batch normalisation, and whether in-place calls are replaced."""
        super().__init__()
        self.formulas = {**_FORMULAS, F.batch_norm: way or BatchNormWay()}
        self.out_of_place = out_of_place

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a call by its formula, if it has one."""
        options = dict(kwargs or {})
        formula = self.formulas.get(func)
        if formula is not None:
            return formula(*args, **options)
        if self.out_of_place and overwrites(func, args, options):
            return _without_overwriting(func, args, options)
        return func(*args, **options)


def _without_overwriting(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what an in-place call returns, without overwriting anything."""
    name = getattr(func, "__name__", "")
    if name in _SUMS:
        # In place the left side keeps its dtype; `x + y` may be wider.
        return _SUMS[name](*args, **options).to(args[0].dtype)
    if name.endswith("_"):
        twin = getattr(Tensor, name[:-1], None) or getattr(F, name[:-1], None)
        return func(*args, **options) if name[:-1] not in _PURE or twin is None else twin(*args, **options)
    if "inplace" in options:
        return func(*args, **{**options, "inplace": False})
    place = inplace_argument(func)
    return func(*(False if i == place else value for i, value in enumerate(args)), **options)


@dataclass(eq=False)
class ByFormula:
    """The forward pass of a module in the context of `Formulas`."""

    forward: Callable[..., Any]
    formulas: Formulas

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code."""
        with self.formulas:
            return self.forward(*args, **kwargs)


def by_formula(module: nn.Module) -> bool:
    """Return whether a module's own calls are computed by their formulas."""
    return isinstance(vars(module).get("forward"), ByFormula)


@dataclass(frozen=True)
class Rewritten:
    """A copy of a model whose calls are computed by formulas, and the paths of the modules by kind of call."""

    model: nn.Module
    paths: Mapping[str, Sequence[str]]


def rewrite(model: nn.Module, inputs: Tensor, way: BatchNormWay, *, kinds: Iterable[str] = KINDS) -> Rewritten | None:
    """Copy a model and compute its modules' own calls of some kinds by formulas; None if it makes no such calls.

    The calls are found by a forward pass; None, too, if that fails, which `gradveil.nn.check` reports.
    """
    trace = _traced(model, inputs)
    if trace is None:
        return None
    found = {kind: [p for p, calls in trace.functions.items() if {*calls} & {*KINDS[kind]}] for kind in kinds}
    found = {kind: [p for p in places if not _is_constant(_at(model, p))] for kind, places in found.items()}
    paths = {kind: _left(model, places) for kind, places in found.items()}
    return _with_formulas(model, paths, lambda: Formulas(way, out_of_place=False))


def rewrite_overwriting(model: nn.Module, inputs: Tensor, way: BatchNormWay) -> Rewritten | None:
    """Copy a model and make the in-place calls in its modules' code out of place; None if there are none.

    None, too, if that changes the outputs or the buffers: code may rely on a tensor being overwritten.
    """
    trace = _traced(model, inputs)
    calls = {} if trace is None else trace.overwriting
    paths = [path for path, names in calls.items() if any(n in _SUMS or n.rstrip("_") in _PURE for n in names)]
    rewritten = _with_formulas(model, {IN_PLACE: paths}, lambda: Formulas(way))
    if rewritten is None:
        return None
    try:
        (before, old), (after, new) = _outputs(model, inputs), _outputs(rewritten.model, inputs)
    except FOREIGN:
        return None
    same = isinstance(before, Tensor) and before.shape == after.shape
    same = same and torch.allclose(before, after, 1e-3, 1e-5, equal_nan=True)
    # Rounding apart: a buffer that the model overwrites is one step further, and the other is not.
    kept = all(torch.allclose(value, new[name], 1e-3, 1e-5, equal_nan=True) for name, value in old.items())
    return rewritten if same and kept else None


def call_counts(model: nn.Module, inputs: Tensor) -> dict[str, int]:
    """Return how often each module runs in a forward pass; nothing if that fails."""
    trace = _traced(model, inputs)
    return {} if trace is None else dict(Counter(visit.path for visit in trace.done))


def _with_formulas(
    model: nn.Module, paths: Mapping[str, Sequence[str]], formulas: Callable[[], Formulas]
) -> Rewritten | None:
    if not any(paths.values()):
        return None
    copy = deepcopy(model)
    for path in {path for places in paths.values() for path in places}:
        module = _at(copy, path)
        before = vars(module).get("forward")
        forward = before.forward if isinstance(before, ByFormula) else module.forward
        module.forward = ByFormula(forward, formulas())
    return Rewritten(copy, {kind: places for kind, places in paths.items() if places})


def _left(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Leave out the modules whose calls are computed by formulas already."""
    return [path for path in paths if not by_formula(_at(model, path))]


def _is_constant(module: nn.Module) -> bool:
    """Return whether a module is a batch normalisation by running statistics, which torch computes right."""
    return isinstance(module, _BatchNorm) and not module.training and module.running_mean is not None


def _at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at the path of a trace, which calls the model itself "model"."""
    return at(model, "" if path == "model" else path)


def _traced(model: nn.Module, inputs: Tensor) -> Trace | None:
    trace, copy = Trace(values=False), deepcopy(model)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            follow(copy, lambda: copy(inputs.clone()), trace)
    except FOREIGN:
        return None
    return trace


def _outputs(model: nn.Module, inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Return the outputs, and the buffers after the pass but for batch norms', whose statistics an audit keeps."""
    copy = deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        outputs = copy(inputs.clone())
    norms = [f"{path}." for path, module in copy.named_modules() if isinstance(module, _BatchNorm)]
    return outputs, {name: value for name, value in copy.named_buffers() if not name.startswith(tuple(norms))}
