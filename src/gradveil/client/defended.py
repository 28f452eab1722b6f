"""One gradient with the defences that act on it: on each example's, then on their mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.client.at import At
from gradveil.client.gradient import Objective, example_gradients, last_inputs, mean_gradient
from gradveil.client.probing import example_squared_row_norms
from gradveil.core.tree import Tensors, alike, plain, select, single, wide
from gradveil.core.types import Batch, Context, Domain, Features, Public, Transform
from gradveil.nn.stochastic import switched_off

_AT_ONCE = 1 << 25
"""Entries of examples' gradients that are held at once where they are added up exactly: 128 MiB of float32."""


@dataclass(frozen=True)
class Defended:
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
        each, mean = self.step.split() if self.step else (None, None)
        at = At(self.objective, *self.parted(params), batch, select(noise, "model"))
        if each is None and included is None:
            g = at.mean()
        elif each is not None and each.exact:
            g = self._added_exactly(each, params, batch, noise, included)
        else:
            g = at.weighed(each) if each is not None and included is None else None
            g = self.averaged(each, at.each(), params, batch, noise, included) if g is None else g
        return self.of_mean(mean, g, params, batch, noise, state, included)

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
        """Return the same mean from sums in float64, without holding all examples' gradients at once."""
        examples = len(batch.inputs)
        by_example = [name for name in noise if name.startswith("model.")]
        by_example += [f"step.{name}" for name in each.noise({name: params[name] for name in self.trained})]
        some = max(1, _AT_ONCE // sum(params[name].numel() for name in self.trained))
        total: Tensors = {}
        for start in range(0, examples, some):
            own = slice(start, start + some)
            part = Batch(*(value[own] for value in batch))
            inner = {name: noise[name][own] for name in by_example}
            # Each alone, and in no sweep: a trial of whether examples meet in a model says nothing of other weights.
            rows = wide(example_gradients(self.objective, *self.parted(params), part, select(inner, "model")))
            squares = {name: _squares(value) for name, value in rows.items()}
            factors = each.factors(squares)
            if factors is None:  # it does more than multiply
                rows = self._transformed(each, rows, params, part, inner)
                factors = {name: torch.ones_like(square) for name, square in squares.items()}
            for name, value in rows.items():
                weights = factors[name] if included is None else factors[name] * included[own]
                total.setdefault(name, torch.zeros_like(value[0], dtype=torch.float64))
                for row, weight in zip(value, map(float, weights), strict=True):
                    if weight:  # what was not drawn, or is clipped to zero, may be no number
                        total[name].add_(row, alpha=weight)
        return {name: value / (examples if included is None else self.expected) for name, value in total.items()}

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
        """Transform the mean gradient; return it with the state after it."""
        if mean is None:
            return alike(g, params), {}
        context = self.context(params, batch, select(noise, "model"))
        if included is not None:
            context = replace(context, expected=self.expected, included=included)
        sent, after = mean.apply(wide(g), state, select(noise, "step"), context)
        return alike(sent, params), after

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

        public = Public(self.domain, of_public, batch.inputs.shape[0]) if self.domain else None
        return Context(params, batch, inner, gradient, features, sensitivity, messages or {}, public)

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
