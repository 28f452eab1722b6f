"""One gradient with the defences that act on it: per example, then on the mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.core.chain import split
from gradveil.core.errors import FOREIGN
from gradveil.core.tree import Tensors, all_finite, plain, select, single, wide
from gradveil.core.types import Batch, Context, Domain, Features, Multiplier, Public, Transform
from gradveil.gradients.input_sensitivity import example_squared_row_norms
from gradveil.gradients.objective import Objective, example_gradients, last_inputs, mean_gradient
from gradveil.gradients.per_client import obstacle, per_client_gradients, weighted_sum
from gradveil.nn.stochastic import switched_off
from gradveil.nn.token_layout import perturbation_of

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

    def weighed(self, transform: Transform | None) -> Tensors | None:
        """Average the examples' gradients times what `transform` multiplies them by, making none of them, or None.

        Somebody who differentiates needs them, and so does a transform that does more than multiply.
        """
        examples = len(self.batch.inputs)
        by_norm = Multiplier() if transform is None else transform.multiplier(self.trained, {}, ())
        if (
            examples < 2
            or by_norm is None
            or by_norm.masks
            or not plain(*self.trained.values(), *self.batch, *self.noise.values())
        ):
            return None
        if any(value.dtype != single(value.dtype) for value in self.trained.values()):
            return None  # squares in half precision tell no norm
        # A few examples show whether the sweep serves: all of their gradients at once would fill memory.
        if not self._apart(1, _SHOWN):
            return None

        def factors(squares: Tensors) -> Tensors | None:
            # A square is a product of two here, which may overflow (or be no number) where the gradient's does not,
            # and what is not finite has no multiple. The gradients themselves tell.
            return by_norm.of_norms(squares) if bool(all_finite(squares)) else None

        total = weighted_sum(self.objective, self.trained, self.frozen, self.batch, self.noise, factors)
        return None if total is None else {name: value / examples for name, value in total.items()}

    def _swept(self, reference: Callable[..., Tensors], *, whole: bool) -> Tensors:
        """Compute `reference`'s gradients, of the whole batch or of each example, in one sweep where that serves."""
        if not self._apart(0 if whole else 1, None if whole else _SHOWN):
            return reference(*self)
        found = per_client_gradients(self.objective, self.trained, self.frozen, *self._with(0 if whole else 1))
        return {name: value[0] for name, value in found.items()} if whole else found

    def _apart(self, place: int, first: int | None) -> bool:
        """Return whether a sweep serves for the first examples, over a dimension at a place."""
        return obstacle(self.objective, self.trained, self.frozen, *self._with(place, first)) is None

    def _with(self, place: int, first: int | None = None) -> tuple[Batch, Tensors]:
        """Give examples and noise the dimension that a sweep goes over."""
        batch = Batch(*(value[:first].unsqueeze(place) for value in self.batch))
        return batch, {name: value[:first].unsqueeze(place) for name, value in self.noise.items()}


LOG = logging.getLogger("flwr.gradveil")
"""What a deployed client has to say to its operator alone."""


@dataclass(frozen=True)
class DefendedGradient:
    """How a client comes from a batch to a gradient: its model and loss, what is trained, the transform of a step.

    Transforms get updates and all that they may ask for in single precision at least, whatever the model computes in.
    """

    objective: Objective
    trained: Collection[str]
    step: Transform | None
    expected: int = 0
    """Where Poisson sampling draws the examples of a local step: how many it draws on average."""
    domain: Domain | None = None

    def __call__(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        state: Tensors,
        included: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return the gradient, the mean over the batch or over what Poisson sampling took, and the state after it."""
        each, mean = split(self.step)
        at = At(self.objective, *self.parted(params), batch, select(noise, "model"))
        if each is not None and each.exact:
            g = self._added_exactly(each, params, batch, noise, included)
        elif included is not None and plain(included, *params.values(), *batch, *noise.values()):
            g = self._of_drawn(each, params, batch, noise, included)
        elif each is None and included is None:
            g = at.mean()
        else:
            g = at.weighed(each) if included is None else None
            g = self.averaged(each, at.each(), params, batch, noise, included) if g is None else g
        return self.of_mean(mean, g, params, batch, noise, state, included)

    def _of_drawn(
        self, each: Transform | None, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], included: Tensor
    ) -> Tensors:
        """Return the same mean from gradients of the examples that were drawn: a small part of a client's."""
        drawn = included.nonzero().flatten()
        if not len(drawn):
            return {name: torch.zeros_like(params[name]) for name in self.trained}
        own, weights = self._by_example(each, params, noise), included[drawn]
        part = Batch(*(value[drawn] for value in batch))
        inner = {name: value[drawn] if name in own else value for name, value in noise.items()}
        at = At(self.objective, *self.parted(params), part, select(inner, "model"))
        mean = at.weighed(each) if bool((weights == 1).all()) else None
        if mean is None:
            return self.averaged(each, at.each(), params, part, inner, weights)
        # `weighed` divides by the number drawn; Poisson sampling divides by the expected number, whoever was drawn.
        return {name: value * (len(drawn) / self.expected) for name, value in mean.items()}

    def _by_example(self, each: Transform | None, params: Tensors, noise: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the noise that has a tensor for each example."""
        of_each = each.noise({name: params[name] for name in self.trained}) if each is not None else ()
        return {name for name in noise if name.startswith("model.")} | {f"step.{name}" for name in of_each}

    def averaged(
        self,
        each: Transform | None,
        rows: Tensors,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        included: Tensor | None = None,
    ) -> Tensors:
        """Transform every example's gradient [B, ...], and average them."""
        if each is not None:
            rows = self._transformed(each, rows, params, batch, noise)
        return {name: self._mean(value, included) for name, value in rows.items()}

    def _added_exactly(
        self,
        each: Transform,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        included: Tensor | None,
    ) -> Tensors:
        """Return the same mean from sums in float64 of the examples that were drawn, each computed by itself.

        Its size on the machine is that of one example, whatever the others are and however many: not even rounding
        tells of them. Each has a copy of the model and the loss, which may keep something of the examples they have
        seen. One whose gradient cannot be computed, or is not finite, counts as zeros.
        """
        examples = len(batch.inputs)
        by_example = self._by_example(each, params, noise)
        total = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.trained}
        weights = [1.0] * examples if included is None else [*map(float, included)]
        for place, weight in enumerate(weights):
            if not weight:
                continue
            own = slice(place, place + 1)
            # In memory of its own: where it would lie among the others decides by which steps some kernels add.
            part = Batch(*(value[own].clone() for value in batch))
            inner = {name: noise[name][own].clone() for name in by_example}
            try:
                row, factors = self._row(each, params, part, inner)
            except FOREIGN as error:
                LOG.error("an example's gradient cannot be computed: %s: %s", type(error).__name__, error)
                continue
            for name, value in row.items():
                total[name].add_(value, alpha=weight * factors[name])
        return {name: value / (examples if included is None else self.expected) for name, value in total.items()}

    def _row(
        self, each: Transform, params: Tensors, one: Batch, noise: Mapping[str, Tensor]
    ) -> tuple[Tensors, dict[str, float]]:
        """Return the gradient of one example, and what its tensors are multiplied by."""
        # In no sweep: a trial of whether examples meet in a model says nothing of other weights.
        rows = wide(example_gradients(self.objective.copied(), *self.parted(params), one, select(noise, "model")))
        if not bool(all_finite(rows)):
            LOG.error("an example's gradient is not finite")
            return {}, {}
        by_norm = each.multiplier(params, {}, ())
        if by_norm is not None and not by_norm.masks:
            factors = by_norm.of_norms({name: _squares(value) for name, value in rows.items()})
        else:
            rows = self._transformed(each, rows, params, one, noise)
            factors = {name: value.new_ones(1) for name, value in rows.items()}
        return {name: value[0] for name, value in rows.items()}, {name: float(value) for name, value in factors.items()}

    def _transformed(
        self, each: Transform, rows: Tensors, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]
    ) -> Tensors:
        """Transform every example's gradient [B, ...]."""
        drawn, inner = select(noise, "step"), wide(select(noise, "model"))
        of_each = {name: drawn[name] for name in each.noise({n: params[n] for n in rows})}
        context = Context(wide(params), Batch(**wide(batch._asdict())), inner)

        def apply(row: Tensors, noise_1: Tensors) -> Tensors:
            return each.apply(row, {}, noise_1, context)[0]

        return vmap(apply)(wide(rows), of_each)

    def of_mean(
        self,
        mean: Transform | None,
        g: Tensors,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        state: Tensors,
        included: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Transform the mean gradient; return it with the state after it.

        It is in single precision at least: rounded here, it would reach the noise of what is sent as another sum.
        """
        if mean is None:
            return wide(g), {}
        context = self.context(params, batch, select(noise, "model"))
        if included is not None:
            context = replace(context, expected=self.expected, included=included)
        return mean.apply(wide(g), state, select(noise, "step"), context)

    def context(
        self,
        params: Tensors,
        batch: Batch,
        inner: Mapping[str, Tensor],
        messages: Tensors | None = None,
        outputs: Tensor | None = None,
    ) -> Context:
        """Say what a transform may ask for at these parameters."""
        objective, params, inner = self._single(), wide(params), wide(inner)
        batch = Batch(**wide(batch._asdict()))
        outputs = None if outputs is None else outputs.to(single(outputs.dtype))
        trained, frozen = self.parted(params)
        own = objective, trained, frozen, batch, inner

        def gradient(examples: Batch) -> Tensors:
            return mean_gradient(objective, trained, frozen, examples, inner)

        def features(examples: Batch) -> Features:
            return last_inputs(objective, params, examples, inner)

        def sensitivity(directions: Tensor, offset: Tensor) -> Tensors:
            return example_squared_row_norms(*own, directions, offset, outputs)

        def of_public(examples: Batch) -> Tensors:
            shown = Batch(examples.inputs.to(batch.inputs.dtype), examples.targets)
            return mean_gradient(objective, trained, frozen, shown, switched_off(objective.model, shown.inputs))

        def loss(at: Tensors) -> Tensor:
            return objective.value({**at, **frozen}, batch, inner)

        def predict(inputs: Tensor) -> Tensor:
            return objective.outputs(params, inputs, inner)

        public = Public(self.domain, of_public, batch.inputs.shape[0]) if self.domain else None
        return Context(
            params,
            batch,
            inner,
            gradient,
            features,
            sensitivity,
            messages or {},
            public,
            loss=loss,
            predict=predict,
            perturbation=perturbation_of(objective.model),
        )

    def _single(self) -> Objective:
        """Return the objective with no buffer in half precision."""
        held = self.objective.buffers()
        if all(value.dtype == single(value.dtype) for value in held.values() if value.is_floating_point()):
            return self.objective
        return replace(self.objective, replaced=wide(held))

    def parted(self, params: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """Part the parameters into the trained and the frozen ones."""
        names = set(self.trained)
        trained = {name: value for name, value in params.items() if name in names}
        return trained, {name: value for name, value in params.items() if name not in names}

    def _mean(self, rows: Tensor, included: Tensor | None) -> Tensor:
        """Average over examples; where some were drawn, sum over those and divide by the expected number."""
        if included is None:
            return rows.mean(0)
        flat, weights = rows.reshape(len(rows), -1), included.to(rows.dtype)
        # What was not drawn may be no number, and zero times that is none either.
        if plain(flat, weights):
            drawn = weights.nonzero().flatten()
            total = weights[drawn] @ flat[drawn]
        else:
            total = weights @ torch.where(weights.unsqueeze(1) != 0, flat, 0.0)
        return total.reshape(rows.shape[1:]) / self.expected


def _squares(rows: Tensor) -> Tensor:
    """Sum the squares of each row in float64, of which float32 numbers overflow none."""
    linalg: Any = torch.linalg
    return cast(Tensor, linalg.vector_norm(rows.reshape(len(rows), -1), dim=1, dtype=torch.float64).square())
