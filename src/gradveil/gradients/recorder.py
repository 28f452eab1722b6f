"""Record every use of a trained parameter in one batched forward pass, and how its gradient separates by client.

A use that no rule covers raises `Unsupported`; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from gradveil.core.tree import Tensors
from gradveil.gradients.fused import inner_products
from gradveil.gradients.inner_products import Inner

_mode = cast(Any, forward_ad)


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Give a tensor a tangent, within `forward_ad.dual_level`."""
    return _mode.make_dual(value, tangent)


def unpacked(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor and its tangent, which is zero where there is none."""
    primal, tangent = _mode.unpack_dual(value)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


class Unsupported(Exception):
    """A parameter is used in a way that has no batched per-target client rule."""


@dataclass(frozen=True)
class Use:
    """One use of a parameter: where it enters the graph, and its gradient [V, ...] from the gradient there."""

    parameter: str
    shape: torch.Size
    """Its own, or that of the view of it that is used."""
    at: Tensor
    gradient: Callable[[Tensor], Tensor]
    squares: Callable[[Tensor], Tensor] | None = None
    """Squared norms [V] of these gradients, of targets with one example, where there is a shorter way to them."""
    moves: Callable[[tuple[Tensor, Tensor], Tensor], Tensor] | None = None
    """From the gradient there with its tangent, and factors [V]: the weighted sum over targets of the squared tangents
    of these gradients, where there is a shorter way to it."""
    inner: Inner | None = None
    """From the gradient there, and targets and masks in the shape of this use: the products of these gradients with the
    targets and with themselves, where there is a shorter way to them."""


Rule = Callable[..., Tensor]
"""(recorder, arguments of the function it replaces) -> that function's result, its parameters' uses noted."""


_OUT_OF_PLACE: dict[str, Callable[..., Any]] = {
    f"{name}_": getattr(torch, name) for name in ("add", "sub", "mul", "div")
}


class Recorder(TorchFunctionMode):
    """Within this context, functions of trained parameters are replaced by ones whose gradients come apart by target.

    Every other function is left alone. A shared parameter, or a module that is called twice, is used twice: its
    gradients add up.
    """

    def __init__(
        self,
        rules: Mapping[Any, Rule],
        trained: Mapping[str, Tensor],
        target_clients: int,
        examples: int,
        forward_mode: bool = False,
    ) -> None:
        """Watch these parameters in a pass over target clients x examples rows, with tangents in forward mode."""
        super().__init__()
        self.rules = rules
        self.forward_mode = forward_mode
        self.target_clients = target_clients
        self.rows = target_clients * examples
        self.uses: list[Use] = []
        self.shapes = {name: value.shape for name, value in trained.items()}
        self._names = {id(value): name for name, value in trained.items()}
        self._views: list[Tensor] = []  # kept alive, so that no other tensor gets their id
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._stale: dict[int, Any] = {}  # kept alive, too

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace a function that takes a trained parameter."""
        given = kwargs or {}
        name: str = getattr(func, "__name__", str(func))
        if self._stale and _among((args, *given.values()), self._stale):
            raise Unsupported("an in-place operation overwrites what a layer takes or returns")
        # A recorded tensor must keep its value, so `x += y` and `inplace=True` make another one. That is the same as
        # long as nobody reads the old one again.
        if given.get("inplace") and args:
            given = {**given, "inplace": False}
            self._stale[id(args[0])] = args[0]
        if name in _OUT_OF_PLACE and id(args[0]) in self._held:
            func = _OUT_OF_PLACE[name]
            self._stale[id(args[0])] = args[0]
        trained = self.trained_among(args)
        if given:
            trained += self.trained_among(given.values())
        if not trained:
            return func(*args, **given)
        rule = self.rules.get(func) or self.rules.get(name.removeprefix("__").removesuffix("__"))
        if rule is not None:
            return rule(self, func, *args, **given)
        result = func(*args, **given)
        parts = cast(Iterable[Any], result if isinstance(result, tuple | list) else (result,))
        if any(isinstance(part, Tensor) for part in parts):
            raise Unsupported(
                f"'{self._names[id(trained[0])]}' goes into {name}, which has no rule for many target clients"
            )
        return cast(Any, result)

    def trained_among(self, values: Iterable[Any]) -> list[Tensor]:
        """Find the trained parameters among arguments, and their views."""
        return _among(values, self._names)

    def trains(self, value: Tensor) -> bool:
        """Say whether this is a trained parameter or a view of one."""
        return id(value) in self._names

    def view(self, of: Tensor, value: Tensor) -> Tensor:
        """Note that `value` is a parameter in another shape, its entries in the same order."""
        if self.trains(of):
            self._names[id(value)] = self._names[id(of)]
        self._views.append(value)
        return value

    def use(
        self,
        value: Tensor,
        at: Tensor,
        gradient: Callable[[Tensor], Tensor],
        squares: Callable[[Tensor], Tensor] | None = None,
        moves: Callable[[tuple[Tensor, Tensor], Tensor], Tensor] | None = None,
        inner: Inner | None = None,
    ) -> None:
        """Note a use of a parameter, if it is trained."""
        if self.trains(value):
            # Parameters are constants here, so that nothing before this use may ask for a gradient: the graph starts at
            # it.
            if not at.requires_grad:
                at.requires_grad_()
            self.uses.append(Use(self._names[id(value)], value.shape, at, gradient, squares, moves, inner))
            self.hold(at)

    def hold(self, value: Tensor) -> None:
        """Note a tensor whose value the gradients need: `gradients` refuses if it was overwritten."""
        self._held.setdefault(id(value), (value, value._version))

    def batched(self, value: Tensor, layer: str) -> None:
        """Refuse a tensor whose first dimension is not the batch of all target clients."""
        if value.dim() < 2 or value.shape[0] != self.rows:
            raise Unsupported(f"{layer} takes a tensor {tuple(value.shape)} without the batch in front")
        self.hold(value)

    def summed(self, delta: Tensor, shape: Iterable[int]) -> Tensor:
        """Sum [N, ...] over each target client's examples and over what was broadcast from `shape`: [V, *shape]."""
        shape = tuple(shape)
        # Aligned at the end, as in broadcasting. Dimension 0 holds the rows, which are no broadcast.
        full = (1,) * (delta.dim() - len(shape)) + shape
        over = [d for d, size in enumerate(full) if size == 1 and d > 0]
        if self.rows == self.target_clients:
            total = delta.sum(over) if over else delta
        else:
            # [V, B, ...]: over B, and over the dimensions behind it, which are one further now.
            total = delta.reshape(self.target_clients, -1, *delta.shape[1:]).sum([1, *(d + 1 for d in over)])
        return _shaped(total, (self.target_clients, *shape))

    def gradients(self, value: Tensor, *, create_graph: bool) -> Tensors:
        """Return the gradient of `value` for each parameter and target client; zeros for what was not used."""
        total: Tensors = {}
        found = self._deltas(value, create_graph=create_graph)
        with torch.set_grad_enabled(create_graph):
            for use, delta in found:
                self._add(total, use, delta)
        return {
            name: total[name] if name in total else value.new_zeros(self.target_clients, *shape)
            for name, shape in self.shapes.items()
        }

    def shortens(self) -> bool:
        """Say whether some parameter's gradients have a shorter way to their products with targets."""
        return any(own[0].inner is not None for own in self._by_parameter().values() if len(own) == 1)

    def products(self, value: Tensor, targets: Tensors, masks: Tensors, *, create_graph: bool) -> Tensor:
        """Return the products of each target client's gradient of `value` with the targets and with itself: [V, 2].

        Of the parameters that have a target, masked where they have a mask [V, *shape]; gradients are made only where
        there is no shorter way.
        """
        # |G1 + G2|^2 has a cross term: the products of two uses don't add up.
        alone = {name for name, own in self._by_parameter().items() if len(own) == 1}
        total = value.new_zeros(self.target_clients, 2)
        made: Tensors = {}
        found = self._deltas(value, create_graph=create_graph)
        with torch.set_grad_enabled(create_graph):
            for use, delta in found:
                name = use.parameter
                if name not in targets:
                    continue
                given = [_shaped(of[name], (self.target_clients, *use.shape)) for of in (targets, masks) if name in of]
                own = use.inner(delta, *given) if name in alone and use.inner is not None else None
                if own is not None:
                    total = total + own
                else:
                    self._add(made, use, delta)
            made = {name: value * masks[name] if name in masks else value for name, value in made.items()}
            if made:
                total = total + inner_products(list(made.values()), [targets[name] for name in made])
        return total

    def _by_parameter(self) -> dict[str, list[Use]]:
        uses: dict[str, list[Use]] = {name: [] for name in self.shapes}
        for use in self.uses:
            uses[use.parameter].append(use)
        return uses

    def weighted_sum(self, value: Tensor, weigh: Callable[[Tensors], Tensors | None]) -> Tensors | None:
        """Return sum_v f_v g_v of targets with one example each, without making each target's gradient g_v.

        `weigh` makes the factors f [V] of each parameter out of the squared norms [V] of its gradients; None where it
        does. g_v is linear in the gradient at a layer's output, so that one is multiplied, and all rows then count as
        one target client's.
        """
        found = self._deltas(value, create_graph=False)
        with torch.no_grad():
            factors = weigh(self._squares(found, value))
            if factors is None:
                return None
            total: Tensors = {}
            # The rules' closures read it: they now sum over all rows, as over one client's.
            target_clients, self.target_clients = self.target_clients, 1
            for use, delta in found:
                factor = factors[use.parameter].view(-1, *[1] * (delta.dim() - 1))
                self._add(total, use, delta * factor)
            self.target_clients = target_clients
        return {
            name: total[name].squeeze(0) if name in total else value.new_zeros(shape)
            for name, shape in self.shapes.items()
        }

    def squared_moves(self, value: Tensor, factor: Tensor, upper: Tensor | None = None) -> Tensors:
        """Return sum_v f_v (dg_v)^2, entry by entry, of target clients with one example each in a pass in forward mode.

        dg_v is the tangent of target client v's gradient of `value`, or of <value, upper>; f [V] are factors.
        """
        # The backward pass of a dual forward pass: each delta carries its tangent.
        found = self._deltas(value, create_graph=False, upper=upper)
        if len({use.parameter for use, _ in found}) < len(found):
            raise Unsupported("a parameter is used twice: its derivatives would be added before they are squared")
        total: Tensors = {}
        with torch.no_grad():
            for use, delta in found:
                shape = self.shapes[use.parameter]
                if use.moves is not None:
                    total[use.parameter] = use.moves(unpacked(delta), factor).reshape(shape)
                else:
                    moved = unpacked(use.gradient(delta))[1].reshape(self.target_clients, -1)
                    total[use.parameter] = (factor @ moved.square()).view(shape)
        return {name: total[name] if name in total else value.new_zeros(s) for name, s in self.shapes.items()}

    def _squares(self, found: Sequence[tuple[Use, Tensor]], value: Tensor) -> Tensors:
        """Return the squared norm [V] of each target client's gradient for each parameter."""
        uses: dict[str, list[tuple[Use, Tensor]]] = {name: [] for name in self.shapes}
        for use, delta in found:
            uses[use.parameter].append((use, delta))
        squares: Tensors = {}
        for name, own in uses.items():
            if len(own) == 1 and own[0][0].squares is not None:
                squares[name] = own[0][0].squares(own[0][1])
                continue
            total: Tensors = {}
            for use, delta in own:  # gradients of a parameter that is used twice are added before they are squared
                self._add(total, use, delta)
            squares[name] = (
                total[name].reshape(self.target_clients, -1).square().sum(1)
                if own
                else value.new_zeros(self.target_clients)
            )
        return squares

    def _add(self, total: Tensors, use: Use, delta: Tensor) -> None:
        name = use.parameter
        part = _shaped(use.gradient(delta), (self.target_clients, *self.shapes[name]))
        total[name] = total[name] + part if name in total else part

    def _deltas(self, value: Tensor, *, create_graph: bool, upper: Tensor | None = None) -> list[tuple[Use, Tensor]]:
        """Return the uses that `value` depends on, and its gradients there."""
        if any(tensor._version != version for tensor, version in self._held.values()):
            raise Unsupported("an in-place operation overwrites what a layer takes or returns")
        at = [use.at for use in self.uses]
        deltas: Sequence[Tensor | None] = ()
        if at:
            found = torch.autograd.grad(value, at, upper, create_graph=create_graph, allow_unused=True)
            deltas = cast(Sequence[Tensor | None], found)
        return [(use, delta) for use, delta in zip(self.uses, deltas, strict=True) if delta is not None]


def _among(values: Iterable[Any], known: Mapping[int, Any]) -> list[Tensor]:
    """Find the tensors whose id is known, in lists and tuples, too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if id(value) in known:
                found.append(value)
        elif isinstance(value, tuple | list):
            found += _among(cast(Iterable[Any], value), known)
    return found


def _shaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape where that changes anything: a view is a call, and another one in the backward pass."""
    return value if value.shape == shape else value.reshape(shape)
