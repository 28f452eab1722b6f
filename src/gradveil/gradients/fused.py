"""Objectives of many rows in few passes over memory, and how much memory a computation writes.

Of the objectives rows come first: [N, ...]. Each is differentiable once with respect to its first argument.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradveil.core.tree import plain


def cosine_distance(vectors: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """1 - cosine between rows of concatenated tensors: [N], from two lists of [N, ...] tensors.

    Computed as half the squared distance of the normalised vectors, 1/2 |g/|g| - t/|t||^2, which keeps its digits where
    the angle is small. Where a row or its target is all zeros, the distance is 1, as at a right angle, without a
    gradient.
    """
    return _apply(_Cosine, [target.detach() for target in targets], *vectors)


def squared_distance(vectors: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """|g - t|^2 of the rows of concatenated tensors: [N], from two lists of [N, ...] tensors."""
    return _apply(_Squared, [target.detach() for target in targets], *vectors)


def inner_products(vectors: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """<g, t> and |g|^2 of the rows of concatenated tensors: [N, 2], from two lists of [N, ...] tensors."""
    return _apply(_RowProducts, [target.detach() for target in targets], *vectors)


def squared_lengths(vectors: Sequence[Tensor]) -> Tensor:
    """|g|^2 of the rows of concatenated tensors: [N]."""
    return _norm(_packed(vectors)).square()


def total_variation(images: Tensor) -> Tensor:
    """Anisotropic total variation, mean |dx| + mean |dy| over all differences of a row: [N] from [N, ..., H, W]."""
    return _apply(_Variation, images)


def with_slope(at: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """Return values of single entries `at`, with derivatives that were computed together with them, in few passes."""
    return _apply(_WithSlope, at, values, slopes)


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function that treats every entry of equally shaped tensors by itself: `function(*tensors)`, to the bit.

    What it computes in between stays in the cache, where the tensors are large, on a CPU, and nobody differentiates
    or batches them.

    >>> in_blocks(lambda x, y: (x + y, x * y), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    (tensor([4., 6.]), tensor([3., 8.]))
    """
    first = tensors[0]
    if first.numel() <= _BLOCK or first.device.type != "cpu" or not plain(*tensors):
        return function(*tensors)
    parts = zip(*(value.reshape(-1).split(_BLOCK) for value in tensors), strict=True)
    out: list[Tensor] = []
    for i, part in enumerate(parts):
        found = function(*part)
        out = out or [torch.empty(first.shape, dtype=value.dtype) for value in found]
        for whole, value in zip(out, found, strict=True):
            whole.view(-1)[i * _BLOCK : i * _BLOCK + len(value)] = value
    return tuple(out)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


_BLOCK = 1 << 16
"""Entries that stay in a core's cache while several operations pass over them (256 KiB in float32)."""
_SMALL = 1 << 14
"""Entries that are sooner copied than passed over by one more call."""

_lengths = cast(Callable[..., Tensor], torch.linalg.vector_norm)


def _norm(vectors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each row of concatenated [N, P] tensors."""
    lengths = [_lengths(v, dim=1) for v in vectors]
    return lengths[0] if len(lengths) == 1 else _lengths(torch.stack(lengths), dim=0)


def _rows(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [v.reshape(v.shape[0], -1) for v in vectors]


def _packed(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate neighbours that are small together."""
    groups: list[list[Tensor]] = []
    room = 0
    for row in _rows(vectors):
        # A large row has room for nobody behind it: what is left is below 0.
        if row.numel() > room:
            groups.append([])
            room = _SMALL
        groups[-1].append(row)
        room -= row.numel()
    return [group[0] if len(group) == 1 else torch.cat(group, 1) for group in groups]


def _unpacked(packed: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut packed rows into tensors of these shapes."""
    remaining = list(shapes)
    out: list[Tensor] = []
    for group in packed:
        at = 0
        while at < group.shape[1]:
            shape = remaining.pop(0)
            size = shape[1:].numel()
            out.append(group[:, at : at + size].view(shape))
            at += size
    return out


def _blocks(*vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut [N, P] tensors, in step, into column blocks that fit the cache; elsewhere than on a CPU leave them whole."""
    for parts in zip(*vectors, strict=True):
        rows, size = parts[0].shape
        width = max(1, _BLOCK // rows) if parts[0].device.type == "cpu" else size
        if size <= 2 * width:
            yield parts
        else:
            yield from zip(*(part.split(width, 1) for part in parts), strict=True)


def _inverse(norm: Tensor) -> Tensor:
    """1 / norm as a column; 0 for a row of zeros, NaN for one that diverged."""
    return torch.nan_to_num(norm.reciprocal(), nan=torch.nan, posinf=0.0).unsqueeze(1)


class _WithSlope(Function):
    @staticmethod
    def forward(ctx: Any, at: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Any, ...]:
        return uppers[0] * ctx.saved_tensors[0], None, None


class _Cosine(Function):
    """With a = 1/|g|, b = 1/|t| and D the distance, the gradient is a^2 (1 - D) g - a b t."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[Tensor], *vectors: Tensor) -> Tensor:
        g, t = _packed(vectors), _packed(targets)
        a, b = _inverse(_norm(g)), _inverse(_norm(t))
        minus = -b
        parts = [_lengths(torch.addcmul(t_b * minus, g_b, a), dim=1) for g_b, t_b in _blocks(g, t)]
        distance = (parts[0].square() if len(parts) == 1 else torch.stack(parts).square().sum(0)) / 2
        # 1 for rows of zeros also ends their gradient: of a (1 - D) and a b one factor each is 0.
        distance = torch.where(((a == 0) | (b == 0)).squeeze(1), 1.0, distance)
        ctx.save_for_backward(a, b, distance, *g, *t)
        ctx.shapes = [v.shape for v in vectors]
        return distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Any, ...]:
        a, b, distance, *saved = ctx.saved_tensors
        g, t = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        upper = uppers[0].unsqueeze(1)
        # Scalars of a row [N, 1]: the gradient is of_g g + of_t t, one pass over each.
        of_t = -(a * b * upper)
        of_g = a * a * (1 - distance.unsqueeze(1)) * upper
        out = [torch.empty_like(g_l) for g_l in g]
        # The blocks are views: this fills `out`.
        for g_b, t_b, out_b in _blocks(g, t, out):
            torch.mul(t_b, of_t, out=out_b).addcmul_(g_b, of_g)
        return None, *_unpacked(out, ctx.shapes)


class _Squared(Function):
    @staticmethod
    def forward(ctx: Any, targets: Sequence[Tensor], *vectors: Tensor) -> Tensor:
        differences = [g - t for g, t in zip(_packed(vectors), _packed(targets), strict=True)]
        ctx.save_for_backward(*differences)
        ctx.shapes = [v.shape for v in vectors]
        return _norm(differences).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Any, ...]:
        scale = 2 * uppers[0].unsqueeze(1)
        return None, *_unpacked([difference * scale for difference in ctx.saved_tensors], ctx.shapes)


class _RowProducts(Function):
    @staticmethod
    def forward(ctx: Any, targets: Sequence[Tensor], *vectors: Tensor) -> Tensor:
        g, t = _packed(vectors), _packed(targets)
        ctx.save_for_backward(*g, *t)
        ctx.shapes = [v.shape for v in vectors]
        dots = [torch.linalg.vecdot(g_l, t_l, dim=1) for g_l, t_l in zip(g, t, strict=True)]
        return torch.stack([torch.stack(dots).sum(0), _norm(g).square()], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        g, t = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        of_t, of_g = uppers[0][:, :1], 2 * uppers[0][:, 1:]
        return None, *_unpacked([t_l * of_t + g_l * of_g for g_l, t_l in zip(g, t, strict=True)], ctx.shapes)


class _Variation(Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        down = images[..., 1:, :] - images[..., :-1, :]
        right = images[..., 1:] - images[..., :-1]
        ctx.save_for_backward(down, right)
        vertical, horizontal = (_lengths(d.flatten(1), 1, dim=1) / max(1, d[0].numel()) for d in (down, right))
        return vertical + horizontal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> Tensor:
        upper = uppers[0]
        down, right = ctx.saved_tensors
        high, wide = right.shape[-2], down.shape[-1]
        grad = upper.new_zeros(*right.shape[:-1], wide)
        column = (-1, *[1] * (grad.dim() - 1))
        # An image of one pixel's height or width has no differences, and no gradient.
        for difference, axis, size in ((down, -2, high), (right, -1, wide)):
            if size > 1:
                step = difference.sign() * (upper / difference[0].numel()).view(column)
                # |x[i + 1] - x[i]| gives sign to pixel i + 1, and -sign to pixel i.
                grad.narrow(axis, 1, size - 1).add_(step)
                grad.narrow(axis, 0, size - 1).sub_(step)
        return grad


class _Written(TorchDispatchMode):
    """Adds up the bytes that operations write.

    Saved-tensor hooks would say what is kept, but `torch.func.grad` refuses them; what an iteration writes is an upper
    bound of what it keeps, and grows with it.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def written_bytes(function: Callable[[], Any]) -> int:
    """Count the bytes that the operations of a function write."""
    with _Written() as counter:
        function()
    return counter.bytes
