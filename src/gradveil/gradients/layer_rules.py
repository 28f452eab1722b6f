"""Rules for gradients that separate by client, one per kind of layer.

Shapes: N examples, O and C channels out and in, M positions of one example, K = C x kernel entries.

With delta the gradient at a layer's output and x its input, target client v's gradient is: linear sum_m delta_m x_m^T
over its examples and tokens m; convolution the same over unfolded inputs; norms sum delta * normalised x; biases sum
delta.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from gradveil.gradients.convolution import (
    Geometry,
    Window,
    convolve,
    only_position,
    outer,
    outer_sum,
    squared_outer_sums,
    squared_weight_gradients,
    unfold,
    weight_gradient,
)
from gradveil.gradients.inner_products import convolution_products, cut, products, shorter
from gradveil.gradients.recorder import Recorder, Rule, Unsupported, unpacked

_AT_ONCE = 1 << 20
"""Entries of examples' derivatives that are held at once."""
_FEW_CHANNELS = 4
"""Of fewer, windows are copied in longer runs with the channels first (0.14 against 0.4 ms for one channel)."""


def squared_weight_moves(
    delta: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], factor: Tensor, geometry: Geometry
) -> Tensor:
    """Return sum_n f_n (dg_n)^2, entry by entry, of the derivatives dg_n of each example's weight gradient [O, C, ...].

    Pairs are a value and its derivative. Channels stand last while windows are copied, which are longer runs then.
    """
    columns = delta[0].flatten(2), delta[1].flatten(2)
    shape = (-1, x[0].shape[1], *geometry.kernel)
    if x[0].shape[1] < _FEW_CHANNELS:
        first, second = (unfold(value, len(value), geometry).mT for value in x)
        return squared_moves(columns, (first, second), factor).view(shape)
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    both = torch.stack(x, 1)
    both = (F.pad(both, (pw, pw, ph, ph)) if ph or pw else both).permute(0, 1, 3, 4, 2).contiguous()
    n, _, high, wide, channels = both.shape
    line = wide * channels
    # Axes: example, value or derivative, H', W', kh, kw, C. Windows overlap in this view; `reshape` copies them apart.
    windows = both.as_strided(
        (n, 2, *delta[0].shape[2:], kh, kw, channels),
        (2 * high * line, high * line, sh * line, sw * channels, dh * line, dw * channels, 1),
    )
    right = windows.reshape(n, 2, columns[0].shape[2], -1)
    found = squared_moves(columns, (right[:, 0], right[:, 1]), factor)
    # The K entries stand as (kh, kw, C) here, in a weight as (C, kh, kw).
    return found.view(-1, kh, kw, channels).permute(0, 3, 1, 2)


def squared_moves(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], factor: Tensor) -> Tensor:
    """Return sum_n f_n (l'_n r_n + l_n r'_n)^2, entry by entry: [O, K], from pairs [N, O, M] and [N, M, K].

    With one position m the square comes apart, and no product of one example is made.
    """
    # On l and l' it becomes f_n once the sum is squared.
    scale = factor.sqrt().view(-1, 1, 1)
    (a, moved_a), (b, moved_b) = left, right
    outputs, inputs, positions = a.shape[1], b.shape[2], a.shape[2]
    if positions == 1:
        a, moved_a, b, moved_b = (a * scale)[..., 0].t(), (moved_a * scale)[..., 0].t(), b[:, 0], moved_b[:, 0]
        # sum_n (a' b + a b')^2 = sum_n 2 a a' b b' + a'^2 b^2 + a^2 b'^2: three products of matrices over n. Rounding
        # can leave the sum below 0.
        found = (2 * a * moved_a) @ (b * moved_b)
        return found.addmm_(moved_a.square(), b.square()).addmm_(a.square(), moved_b.square()).clamp_(min=0)
    # [l', l] [r; r'] = l' r + l r' in one product.
    wide, tall = torch.cat((moved_a, a), 2) * scale, torch.cat((b, moved_b), 1)
    some = max(1, _AT_ONCE // (outputs * inputs))
    found = a.new_zeros(outputs, inputs)
    for wide_n, tall_n in zip(wide.split(some), tall.split(some), strict=True):
        found += torch.bmm(wide_n, tall_n).square_().sum(0)
    return found


def connect(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by constant weights: `F.linear` for forward mode, in which torch spends most of it on zero tangents."""
    return cast(Tensor, _Linear.apply(x, weight, bias))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        return F.linear(moved[0], ctx.saved_tensors[0])

    @staticmethod
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        # delta W, by `connect` again: the backward pass must have forward mode, too. The rules find the weight's
        # gradient.
        return connect(uppers[0], ctx.saved_tensors[0].t(), None), None, None


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    sides = (value,) * 2 if isinstance(value, int) else tuple(value)
    return (sides[0], sides[-1])


def _conv2d(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    recorder.batched(input, "a convolution")
    if groups != 1 or isinstance(padding, str):
        raise Unsupported("a convolution with groups, or with padding by name, has no rule for many target clients")
    geometry = Geometry(_pair(weight.shape[2:]), _pair(stride), _pair(padding), _pair(dilation))
    if geometry.kernel == tuple(input.shape[2:]) and geometry.padding == (0, 0):
        # The kernel covers the image: one position, a linear layer.
        flat = recorder.view(weight, weight.flatten(1))
        return _linear(recorder, func, input.flatten(1), flat, bias)[..., None, None]
    if not recorder.forward_mode and (only := only_position(input.shape[2], input.shape[3], geometry)) is not None:
        return _met_once(recorder, input, weight, bias, *only)
    out = convolve(input, weight, bias, geometry)
    positions = len(input) // recorder.target_clients * out[0, 0].numel()
    recorder.use(
        weight,
        out,
        lambda delta: weight_gradient(delta, input, recorder.target_clients, geometry),
        lambda delta: squared_weight_gradients(delta, input, geometry),
        lambda delta, factor: squared_weight_moves(delta, unpacked(input), factor, geometry),
        (
            lambda delta, target, mask=None: convolution_products(
                delta, input, recorder.target_clients, geometry, target, mask
            )
        )
        if shorter(len(weight), weight[0].numel(), positions)
        else None,
    )
    if bias is not None:
        recorder.use(bias, out, lambda delta: recorder.summed(delta, (bias.numel(), 1, 1)))
    return out


def _met_once(
    recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, window: Window
) -> Tensor:
    """Convolve at one position: a linear layer of the part of the kernel that meets the image."""
    seen = input[:, :, window.rows, window.columns].flatten(1)
    recorder.hold(seen)

    def met(value: Tensor) -> Tensor:
        return value[..., window.kernel_rows, window.kernel_columns].flatten(-3).contiguous()

    def gradient(delta: Tensor) -> Tensor:
        found = outer_sum(columns(delta), columns(seen))
        found = found.view(*found.shape[:2], weight.shape[1], *geometry.kernel)
        # Entries of the kernel outside of the window met padding only. `F.pad` takes the last dimension first.
        after = weight.shape[3] - window.kernel_columns.stop, weight.shape[2] - window.kernel_rows.stop
        return F.pad(found, (window.kernel_columns.start, after[0], window.kernel_rows.start, after[1]))

    def columns(value: Tensor) -> Tensor:
        return _columns(value, recorder.target_clients)

    def inner(delta: Tensor, target: Tensor, mask: Tensor | None = None, /) -> Tensor | None:
        place = window.kernel_rows, window.kernel_columns
        return products(columns(delta), columns(seen), cut(target, *place), None if mask is None else cut(mask, *place))

    out = F.linear(seen, met(weight), bias)
    recorder.use(
        weight,
        out,
        gradient,
        lambda delta: squared_outer_sums(columns(delta), columns(seen)),
        inner=inner if shorter(len(weight), seen.shape[1], len(input) // recorder.target_clients) else None,
    )
    if bias is not None:
        recorder.use(bias, out, lambda delta: recorder.summed(delta, bias.shape))
    return out[..., None, None]


def _linear(recorder: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    recorder.batched(input, "a linear layer")
    out = (connect if recorder.forward_mode else F.linear)(input, weight, bias)

    def columns(value: Tensor) -> Tensor:
        return _columns(value, recorder.target_clients)

    def gradient(delta: Tensor) -> Tensor:
        # One example and one position a target client: nothing is summed.
        if delta.dim() == 2 and recorder.rows == recorder.target_clients:
            return outer(delta, input)
        return outer_sum(columns(delta), columns(input))

    def moves(delta: tuple[Tensor, Tensor], factor: Tensor) -> Tensor:
        (d, moved_d), (x, moved_x) = delta, unpacked(input)
        return squared_moves((columns(d), columns(moved_d)), (columns(x).mT, columns(moved_x).mT), factor)

    recorder.use(
        weight,
        out,
        gradient,
        lambda delta: squared_outer_sums(columns(delta), columns(input)),
        moves,
        (lambda delta, target, mask=None: products(columns(delta), columns(input), target, mask))
        if shorter(len(weight), weight.shape[1], input[..., 0].numel() // recorder.target_clients)
        else None,
    )
    if bias is not None:
        recorder.use(bias, out, lambda delta: recorder.summed(delta, bias.shape))
    return out


def _columns(value: Tensor, target_clients: int) -> Tensor:
    """[V B, ..., R] -> [V, R, M]: a target client's examples and tokens stand side by side."""
    return value.reshape(target_clients, -1, value.shape[-1]).transpose(1, 2)


def _scaled(
    recorder: Recorder, y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int] | None = None
) -> Tensor:
    """Compute y * weight + bias for a normalised y; `shape` is the parameters' shape for broadcasting."""
    out = y
    for parameter, combine in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            out = combine(out, parameter if shape is None else parameter.view(shape))
    # Adding the bias changes no gradient: both uses can sit at the end.
    if weight is not None:
        recorder.use(weight, out, lambda delta: recorder.summed(delta * y, shape or weight.shape))
    if bias is not None:
        recorder.use(bias, out, lambda delta: recorder.summed(delta, shape or bias.shape))
    return out


def _group_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    recorder.batched(input, "a group norm")
    if recorder.forward_mode:
        y = _normalised(input.reshape(len(input), num_groups, -1), (2,), eps).reshape(input.shape)
    else:
        y = F.group_norm(input, num_groups, eps=eps)
    return _scaled(recorder, y, weight, bias, (input.shape[1], *[1] * (input.dim() - 2)))


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """Normalise by elementary operations: torch has no forward mode for the derivatives of its own."""
    centred = x - x.mean(dims, keepdim=True)
    # The biased variance, as in torch's own norms.
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _instance_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    recorder.batched(input, "an instance norm")
    if running_mean is not None or not use_input_stats:
        raise Unsupported("an instance norm with running statistics has no rule for many target clients")
    y = F.instance_norm(input, eps=eps)
    return _scaled(recorder, y, weight, bias, (input.shape[1], *[1] * (input.dim() - 2)))


def _batch_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    recorder.batched(input, "a batch norm")
    if training or running_mean is None or running_var is None:
        raise Unsupported("a batch norm in training mode mixes the examples of all target clients")
    shape = (input.shape[1], *[1] * (input.dim() - 2))
    y = (input - running_mean.view(shape)) * (running_var.view(shape) + eps).rsqrt()
    return _scaled(recorder, y, weight, bias, shape)


def _layer_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    recorder.batched(input, "a layer norm")
    return _scaled(recorder, F.layer_norm(input, list(normalized_shape), eps=eps), weight, bias)


def _embedding(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table [N, T] -> [N, T, D]: a target client's gradient is a sum at the rows that its tokens take."""
    recorder.batched(input, "an embedding")
    if max_norm is not None or scale_grad_by_freq:
        raise Unsupported("an embedding renormalises its rows, or scales their gradients by frequency")
    # Without a gradient to the table, whose rule works from the gradient at `out`.
    out, words = F.embedding(input, weight.detach()), len(weight)
    # The row of padding gets no gradient, as in torch.
    counted = torch.ones_like(input, dtype=out.dtype) if padding_idx is None else (input != padding_idx).to(out.dtype)

    def gradient(delta: Tensor) -> Tensor:
        owner = torch.arange(recorder.target_clients, device=input.device).repeat_interleave(
            recorder.rows // recorder.target_clients
        )
        # The tables of all target clients one below the other: client v's word i is row v * words + i.
        places = input + words * owner.view(-1, *[1] * (input.dim() - 1))
        rows = (delta * counted.unsqueeze(-1)).reshape(-1, weight.shape[1])
        total = rows.new_zeros(recorder.target_clients * words, weight.shape[1]).index_add(0, places.flatten(), rows)
        return total.view(recorder.target_clients, *weight.shape)

    def squares(delta: Tensor) -> Tensor:
        """Sum the products of the tokens' rows with those of equal tokens."""
        ids, own = (value.reshape(recorder.target_clients, -1) for value in (input, counted))
        rows = delta.reshape(*ids.shape, -1) * own.unsqueeze(-1)
        # |G|^2 = sum_tt' [id_t = id_t'] <delta_t, delta_t'>.
        return ((rows @ rows.mT) * (ids.unsqueeze(1) == ids.unsqueeze(2))).sum((1, 2)).clamp_min(0)

    recorder.use(weight, out, gradient, squares)
    return out


_broadcast = cast(Callable[..., torch.Size], torch.broadcast_shapes)  # pyright: ignore[reportUnknownMemberType]


def _elementwise(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Give every example its own copy of the parameter: the gradient of the copies is summed for each target client."""
    parameters = recorder.trained_among(args)
    tensors = [value for value in args if isinstance(value, Tensor)]
    if len(parameters) != 1 or len(tensors) != 2 or kwargs:
        raise Unsupported(f"a parameter is combined with another one, or with a number, in {func.__name__}")
    shape = _broadcast(*(value.shape for value in tensors))
    copies = _copies(recorder, parameters[0], shape)
    return func(*(copies if value is parameters[0] else value for value in args))


def _repeated(recorder: Recorder, func: Any, value: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """`expand` or `repeat` to one copy an example (a class token)."""
    shape = func(value, *sizes, **kwargs).shape
    if value.dim() != len(shape) or value.shape[0] != 1 or value.shape[1:] != shape[1:]:
        raise Unsupported(f"a parameter is repeated from {tuple(value.shape)} to {tuple(shape)}")
    return _copies(recorder, value, shape)


def _copies(recorder: Recorder, value: Tensor, shape: torch.Size) -> Tensor:
    # A leaf of its own: the gradient that arrives here is not yet summed over what was broadcast.
    copies = value.detach().expand(shape)
    recorder.batched(copies, "an element-wise operation")
    copies.requires_grad_()
    recorder.use(value, copies, lambda delta: recorder.summed(delta, value.shape))
    return copies


def _reshaped(recorder: Recorder, func: Any, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return recorder.view(value, func(value, *args, **kwargs))


def _indexed(recorder: Recorder, func: Any, value: Tensor, index: Any) -> Tensor:
    """`p[None, :, None]`: new dimensions only."""
    parts = cast(tuple[Any, ...], index if isinstance(index, tuple) else (index,))
    if not all(part is None or part is Ellipsis or part == slice(None) for part in parts):
        raise Unsupported("a part of a parameter is taken by an index")
    return _reshaped(recorder, func, value, index)


RULES: dict[Any, Rule] = {
    torch.conv2d: _conv2d,
    F.linear: _linear,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.embedding: _embedding,
    **dict.fromkeys(("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv"), _elementwise),
    **dict.fromkeys(("expand", "expand_as", "repeat"), _repeated),
    **dict.fromkeys(("reshape", "view", "unsqueeze", "flatten"), _reshaped),
    "getitem": _indexed,
}
"""Functions (or names of tensor methods and operators) for which gradients come apart by target client."""
