"""Analytic reconstruction from the first layer: its input from its gradient, without a search.

With z = W x + b, every row of the gradient is dL/dW_i = dL/db_i x: the weight's gradient divided by the bias's is the
image (Phong et al. 2017). A vision transformer adds a position embedding to the patches' outputs, whose gradient gives
the errors z_t of every patch: dW = sum_t z_t x_t^T is solved for all patches at once (Lu et al. 2022, "APRIL").

A defence that prunes entries or adds noise violates these equations: `prior` weights them against likely images
(`attacks.closed_form.disturbed`).

A batch's gradient mixes its images. Behind a fully connected layer they are separated by label: the error p_c - y_c of
an output is large and negative only for examples of its class. Combinations of rows in which one output's error remains
thus contain mostly that class's images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.disturbed import equations, prior_problems, weighed
from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.attacks.simulated_updates import Simulated
from gradveil.attacks.undo_batch_defence import Undo, undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked
from gradveil.core.streams import Stream
from gradveil.core.tree import qualified
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.module_paths import call_on


@dataclass(frozen=True)
class Analytic(Checked):
    """Solve the first layer's equations: no iteration, no restart."""

    name: str = "analytic"
    labels: FoundLabels = "given"
    prior: Annotated[
        Literal["none", "public"],
        "Images on which the error of each equation is estimated, and whose law is the prior.",
    ] = "none"
    undo: Undo = False

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """`full` with a prior, or if a batch defence is undone."""
        return "naive" if self.prior == "none" and not self.undo else "full"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """The public images of the prior."""
        known: dict[str, How] = {} if self.prior == "none" else {"public": Known()}
        return undoing(known) if self.undo else known

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse a model whose first layer does not reveal its input, and labels that cannot be read off."""
        simulated_client = prospect.simulated_client
        layer, problems = shown(
            simulated_client.model, simulated_client.params(), prospect.shape, simulated_client.trained()
        )
        yield from problems
        yield from _batch_problems(layer, prospect.examples)
        yield from label_problems(self.labels, prospect)
        if self.prior == "public":
            yield from prior_problems(prospect.shape, prospect.examples, prospect.public > 0)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Solve for every target client's images from the last round's update."""
        began = time.perf_counter()
        seen = observations[-1]
        defended = simulated_client
        simulated_client = replace(simulated_client, batch=()) if self.undo else simulated_client
        target_clients, examples = len(seen.target_clients), seen.examples
        layer, problems = shown(simulated_client.model, seen.params, knowledge.space.shape, simulated_client.trained())
        refuse(problems or list(_batch_problems(layer, examples)))
        assert layer is not None
        seen, finite = _with_finite_equations(seen, layer)
        targets = find_labels(self.labels, seen, simulated_client, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        if self.prior == "public":
            refuse(list(prior_problems(knowledge.space.shape, examples, knowledge.public is not None)))
            flat, misfit = weighed(layer, seen, simulated_client, knowledge, key)
        elif examples == 1:
            flat, misfit = _solved(layer.read(seen.update[layer.errors]), seen.update[layer.weight].flatten(2))
            # The values of a patch are in the order of the layer's weight: `pixels` tells where in the image each
            # belongs.
            flat = torch.zeros_like(flat.flatten(1)).index_copy_(1, layer.pixels.flatten(), flat.flatten(1))
        else:
            flat, misfit = _Mixture(layer, seen, targets, simulated_client, knowledge).unmixed()
        inputs = flat.view(target_clients, examples, *knowledge.space.shape)
        lower, upper = knowledge.space.bounds(inputs)
        inputs = torch.clamp(inputs.nan_to_num(0.0), lower, upper)
        result = in_closed_form(inputs, targets, misfit, finite, began, progress)
        match = self.match([seen], defended, replace(knowledge, targets=targets), key, inputs, {})
        result = replace(result, match=match)
        return undone(result, defended, knowledge) if self.undo else result

    def match(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return `Reconstruction.match`: first 1 - cosine of the whole update, not only of the first layer."""
        assert knowledge.targets is not None, "evaluation knows the true labels"
        simulated_client = replace(simulated_client, batch=()) if self.undo else simulated_client
        return Simulated(simulated_client, observations[-1:]).match(inputs, knowledge.targets.to(inputs.device), key)

    def evaluate(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the misfit [V] of the equations at inputs [V, B, ...]."""
        seen = observations[-1]
        simulated_client = replace(simulated_client, batch=()) if self.undo else simulated_client
        layer, problems = shown(simulated_client.model, seen.params, knowledge.space.shape, simulated_client.trained())
        refuse(problems or list(_batch_problems(layer, seen.examples)))
        assert layer is not None
        seen, finite = _with_finite_equations(seen, layer)
        weight = seen.update[layer.weight].flatten(2)
        x = inputs.to(weight).flatten(1)[:, layer.pixels]
        if self.prior == "public":
            known = equations(layer, seen, simulated_client, knowledge, key)
            misfits = [of_client.misfit(images) for of_client, images in zip(known, x.double(), strict=True)]
            misfit = torch.stack(misfits).to(weight)
        elif seen.examples == 1:
            rest = weight - layer.read(seen.update[layer.errors]).transpose(1, 2) @ x
            misfit = _size(rest) / _size(weight)
        else:
            assert knowledge.targets is not None, "evaluation knows the true labels"
            targets = knowledge.targets.to(inputs.device)
            misfit = _Mixture(layer, seen, targets, simulated_client, knowledge).explain(inputs)[-1]
        return torch.where(finite, misfit, torch.inf)


def _with_finite_equations(seen: Observation, layer: InputEquations) -> tuple[Observation, Tensor]:
    """Replace equations with NaN or Inf by zeros. Returns the target clients [V] whose equations are finite, too."""
    parts = {name: seen.update[name] for name in (layer.weight, layer.errors)}
    finite = torch.stack([torch.isfinite(value).flatten(1).all(1) for value in parts.values()]).all(0)
    parts = {n: torch.where(finite.view(-1, *[1] * (v.ndim - 1)), v, 0.0) for n, v in parts.items()}
    return replace(seen, update={**seen.update, **parts}), finite


def _batch_problems(layer: InputEquations | None, examples: int) -> Iterator[Problem]:
    """Refuse batches of patches, which cannot be assigned to images."""
    if layer is not None and examples > 1 and len(layer.pixels) > 1:
        problem = f"the patches of {examples} images are mixed in one update"
        yield Problem("client.batch", problem, "give batch 1, or choose another attack, such as ig")


_DAMPINGS = torch.cat([torch.zeros(1), torch.logspace(-14, 2, 65)]).double()
"""Tried ridges, in units of the largest squared singular value."""


def _solved(errors: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Solve dW = sum_t z_t x_t^T for the x_t: [V, T, D] and [V, D, P] -> [V, T, P], and the misfit [V].

    Generalised cross-validation chooses the ridge of the least squares (Golub, Heath, Wahba 1979) without knowledge of
    the noise: no ridge for an exact update, and a larger one the more the equations contradict each other.
    """
    left, sizes, right = torch.linalg.svd(errors.transpose(1, 2).double(), full_matrices=False)
    projected = left.transpose(1, 2) @ weight.double()
    outside = (weight.double() - left @ projected).square().sum((1, 2))
    largest = sizes[:, :1].clamp_min(torch.finfo(sizes.dtype).tiny)
    ridge = _DAMPINGS.to(sizes.device) * largest.square()
    # Share s^2 / (s^2 + ridge) of each singular direction that the solution explains: [V, directions, ridges].
    kept = sizes.square().unsqueeze(2) / (sizes.square().unsqueeze(2) + ridge.unsqueeze(1)).clamp_min(_TINY)
    rest = ((1 - kept).square() * projected.square().sum(2).unsqueeze(2)).sum(1) + outside.unsqueeze(1)
    free = weight.shape[1] - kept.sum(1)
    # Generalised cross-validation: |residual|^2 / (equations - trace of the hat matrix)^2, up to constants.
    scores = torch.where(free > _FREE, rest / free.square(), torch.inf)
    best = scores.argmin(1)
    at_best = ridge.gather(1, best.unsqueeze(1))
    slopes = sizes / (sizes.square() + at_best).clamp_min(_TINY)
    solution = right.transpose(1, 2) @ (slopes.unsqueeze(2) * projected)
    left_over = rest.gather(1, best.unsqueeze(1)).squeeze(1).sqrt()
    return solution.to(weight), (left_over / _size(weight)).to(weight)


_TINY, _FREE = 1e-300, 1e-6
"""Smallest divisor, and the fewest equations in excess of the unknowns for which a score is defined."""


_ROUNDS, _DAMPING = 30, 0.5


class _Mixture:
    """The equations of a fully connected first layer for a batch.

    J is the derivative of the outputs with respect to the first layer's: images x_b with the errors
    r_bc = p_c - [c is b's label] give the weight's gradient s sum_b J_b^T r_b x_b^T / B. The scale s is 1 for one
    gradient. For local steps or after a clip, s follows from the bias's gradient s sum_b J_b^T r_b / B.
    """

    def __init__(
        self, layer: InputEquations, seen: Observation, targets: Tensor, simulated_client: Client, knowledge: Knowledge
    ) -> None:
        """Read the layer's part of the update, and the facts of the batch."""
        self.weight, self.bias = seen.update[layer.weight].flatten(2), layer.read(seen.update[layer.errors])[:, 0]
        self.examples, self.shape = targets.shape[1], (*targets.shape, *knowledge.space.shape)
        self.hot = nn.functional.one_hot(targets, knowledge.classes).to(self.weight)
        self.lower, self.upper = knowledge.space.bounds(self.weight)
        name, params = qualified(layer.path, "bias"), seen.params
        fixed = {**params, **simulated_client.objective.buffers()}

        # An offset of the bias shifts the layer's outputs: the derivative by it is J.
        def outputs(offset: Tensor, image: Tensor) -> Tensor:
            return call_on(simulated_client.model, {**fixed, name: params[name] + offset}, image.unsqueeze(0))[0]

        self._zero = torch.zeros_like(params[name])
        self._slopes = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))
        self._answers = torch.func.vmap(outputs, in_dims=(None, 0))

    def explain(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return J [V, B, c, D], the errors [V, B, c], the scale [V, 1, 1] and the misfit [V] of images [V, B, ...]."""
        flat = images.flatten(0, 1)
        slope = self._slopes(self._zero, flat).unflatten(0, images.shape[:2])
        errors = torch.softmax(self._answers(self._zero, flat), -1).view_as(self.hot) - self.hot
        passed = torch.einsum("vbcr,vbc->vbr", slope, errors) / self.examples
        bias = passed.sum(1)
        scale = (bias * self.bias).sum(1) / bias.square().sum(1).clamp_min(torch.finfo(bias.dtype).tiny)
        scale = torch.where(scale > 0, scale, 1.0).view(-1, 1, 1)
        rest = scale * torch.einsum("vbr,vbp->vrp", passed, images.flatten(2)) - self.weight
        return slope, errors, scale, _size(rest) / _size(self.weight)

    def unmixed(self) -> tuple[Tensor, Tensor]:
        """Separate a batch by label: [V, B, ...] and the misfit [V]. All examples of one label get their mean.

        Rows combined by pinv of the mean J are s sum_b r_bc x_b / B. J, the errors and s are computed at grey images,
        then repeatedly at the solved images, with the errors damped by half. The images that explain the weight's
        gradient best are returned.
        """
        images = ((self.lower + self.upper) / 2).expand(self.shape)
        least, best = torch.full_like(self.weight[:, 0, 0], torch.inf), images
        errors: Tensor | None = None
        for _ in range(_ROUNDS):
            slope, fresh, scale, misfit = self.explain(images)
            better = misfit < least
            least = torch.where(better, misfit, least)
            best = torch.where(better.view(-1, *[1] * (images.ndim - 1)), images, best)
            errors = fresh if errors is None else torch.lerp(errors, fresh, _DAMPING)
            # pinv(J)^T J^T = I for a J of full row rank.
            mixed = torch.einsum("vrc,vrp->vcp", torch.linalg.pinv(slope.mean(1)), self.weight / scale)
            # The pseudoinverse is the shortest solution: images with equal errors share what is known of their sum.
            solved = self.examples * (torch.linalg.pinv(errors.transpose(1, 2), rtol=_TOLERANCE) @ mixed)
            images = torch.clamp(solved.nan_to_num(0.0).view(self.shape), self.lower, self.upper)
        return best, least


_TOLERANCE = 1e-3
"""Directions of the errors below this share of the strongest contain only noise, and are left out."""


def _size(value: Tensor) -> Tensor:
    return value.flatten(1).norm(dim=1).clamp_min(torch.finfo(value.dtype).tiny)
