"""The gradients of one batch at given parameters, each kind computed the cheapest way that serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from gradveil.client.batched import obstacle, victim_gradients, weighted_sum
from gradveil.client.gradient import Objective, example_gradients, mean_gradient
from gradveil.core.tree import Tensors, all_finite, plain, single
from gradveil.core.types import Batch, Transform

_SHOWN = 4
"""Examples whose gradients are computed both ways before the sweep that makes none of them is trusted."""


class At(NamedTuple):
    """A model at these parameters, with one batch [B] and the model's noise for it."""

    objective: Objective
    trained: Tensors
    frozen: Tensors
    batch: Batch
    noise: Mapping[str, Tensor]

    def mean(self) -> Tensors:
        """Compute the gradient of the mean loss."""
        return self._swept(mean_gradient, whole=True)

    def each(self) -> Tensors:
        """Compute every example's gradient: leading dimension B."""
        return self._swept(example_gradients, whole=False)

    def weighed(self, transform: Transform) -> Tensors | None:
        """Average the examples' gradients times what `transform` multiplies them by, making none of them, or None.

        Somebody who differentiates needs them, and so does a transform that does more than multiply.
        """
        examples = len(self.batch.inputs)
        by_norm = transform.factors({name: value.new_ones(()) for name, value in self.trained.items()}) is not None
        if examples < 2 or not by_norm or not plain(*self.trained.values(), *self.batch, *self.noise.values()):
            return None
        if any(value.dtype != single(value.dtype) for value in self.trained.values()):
            return None  # squares in half precision tell no norm
        # A few examples show whether the sweep serves: all of their gradients at once would fill memory.
        if self._apart(1, _SHOWN) is None:
            return None

        def factors(squares: Tensors) -> Tensors | None:
            # A square is a product of two here, which may overflow (or be no number) where the gradient's does not,
            # and what is not finite has no multiple. The gradients themselves tell.
            return transform.factors(squares) if bool(all_finite(squares)) else None

        total = weighted_sum(self.objective, self.trained, self.frozen, self.batch, self.noise, factors)
        return None if total is None else {name: value / examples for name, value in total.items()}

    def _swept(self, reference: Callable[..., Tensors], *, whole: bool) -> Tensors:
        """Compute `reference`'s gradients, of the whole batch or of each example, in one sweep where that serves."""
        apart = self._apart(0 if whole else 1)
        if apart is None:
            return reference(*self)
        found = victim_gradients(self.objective, self.trained, self.frozen, *apart)
        return {name: value[0] for name, value in found.items()} if whole else found

    def _apart(self, place: int, first: int | None = None) -> tuple[Batch, Tensors] | None:
        """Give examples and noise the dimension that a sweep goes over, at a place, if a sweep can do it."""
        batch = Batch(*(value[:first].unsqueeze(place) for value in self.batch))
        noise = {name: value[:first].unsqueeze(place) for name, value in self.noise.items()}
        swept = obstacle(self.objective, self.trained, self.frozen, batch, noise) is None
        return (batch, noise) if swept else None
