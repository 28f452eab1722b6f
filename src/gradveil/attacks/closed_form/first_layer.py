"""The closed form of a first layer: its input from its gradient, without a search.

With z = W x + b, every row of the gradient is dL/dW_i = dL/db_i x: the weight's gradient divided by the bias's is the
image (Phong et al. 2017). A vision transformer adds a position embedding to the patches' outputs, and its gradient says
the same of every patch: dW = sum_t z_t x_t^T is solved for all patches at once (Lu et al. 2022, "APRIL").

A defence that leaves entries out or adds noise makes these equations false: `prior` weighs them against images that are
likely (`attacks.likely`).

A batch's gradient mixes its images. Behind a fully connected layer they are taken apart by label: the error p_c - y_c
of an output is large and negative only for examples of its own class, so rows combined such that one output's error
remains show mostly that class's images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.disturbed import equations, prior_problems, weighed
from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import Labels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.attacks.simulated_updates import Simulated
from gradveil.attacks.undo import undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.module_paths import call_on


@dataclass(frozen=True)
class Analytic:
    """Solve the first layer's equations: no iteration, no restart."""

    name: str = "analytic"
    labels: Labels = "given"
    """Where a batch's labels come from; a single image needs none."""
    prior: Literal["none", "public"] = "none"
    """With `public` it knows the defence, and weighs the equations by how that disturbs public images'."""
    undo: bool = False
    """Undo the client's batch defence by its public transforms, once the images it trained on are solved for."""

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """Only with a prior is there anything to believe, and where a batch defence is undone."""
        return "naive" if self.prior == "none" and not self.undo else "full"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """The public images of the prior."""
        known: dict[str, How] = {} if self.prior == "none" else {"public": Known()}
        return undoing(known) if self.undo else known

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse a model whose first layer does not show its input, and labels that cannot be read off."""
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
        defended, simulated_client = (
            simulated_client,
            replace(simulated_client, batch=()) if self.undo else simulated_client,
        )
        target_clients, examples = len(seen.target_clients), seen.examples
        layer, problems = shown(simulated_client.model, seen.params, knowledge.space.shape, simulated_client.trained())
        refuse(problems or list(_batch_problems(layer, examples)))
        assert layer is not None
        seen, sound = _sound(seen, layer)
        targets = find_labels(self.labels, seen, simulated_client, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        if self.prior == "public":
            refuse(list(prior_problems(knowledge.space.shape, examples, knowledge.public is not None)))
            flat, misfit = weighed(layer, seen, simulated_client, knowledge, key)
        elif examples == 1:
            flat, misfit = _solved(layer.read(seen.update[layer.errors]), seen.update[layer.weight].flatten(2))
            flat = torch.zeros_like(flat.flatten(1)).index_copy_(1, layer.pixels.flatten(), flat.flatten(1))
        else:
            flat, misfit = _Mixture(layer, seen, targets, simulated_client, knowledge).unmixed()
        inputs = flat.view(target_clients, examples, *knowledge.space.shape)
        lower, upper = knowledge.space.bounds(inputs)
        inputs = torch.clamp(inputs.nan_to_num(0.0), lower, upper)
        found = in_closed_form(inputs, targets, misfit, sound, began, progress)
        found = replace(found, match=self.match([seen], defended, replace(knowledge, targets=targets), key, inputs, {}))
        return undone(found, defended, knowledge) if self.undo else found

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
        """Return `Reconstruction.match`: first 1 - cosine of the whole update and what was sent.

        The objective looks at the first layer alone.
        """
        assert knowledge.targets is not None, "the true labels are told"
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
        seen, sound = _sound(seen, layer)
        weight = seen.update[layer.weight].flatten(2)
        x = inputs.to(weight).flatten(1)[:, layer.pixels]
        if self.prior == "public":
            known = equations(layer, seen, simulated_client, knowledge, key)
            misfit = torch.stack([one.misfit(own) for one, own in zip(known, x.double(), strict=True)]).to(weight)
        elif seen.examples == 1:
            rest = weight - layer.read(seen.update[layer.errors]).transpose(1, 2) @ x
            misfit = _size(rest) / _size(weight)
        else:
            assert knowledge.targets is not None, "the true labels are told"
            targets = knowledge.targets.to(inputs.device)
            misfit = _Mixture(layer, seen, targets, simulated_client, knowledge).explain(inputs)[-1]
        return torch.where(sound, misfit, torch.inf)


def _sound(seen: Observation, layer: InputEquations) -> tuple[Observation, Tensor]:
    """Put zeros in the place of equations that hold what is no number; say whose [V] hold none."""
    parts = {name: seen.update[name] for name in (layer.weight, layer.errors)}
    sound = torch.stack([torch.isfinite(value).flatten(1).all(1) for value in parts.values()]).all(0)
    parts = {n: torch.where(sound.view(-1, *[1] * (v.ndim - 1)), v, 0.0) for n, v in parts.items()}
    return replace(seen, update={**seen.update, **parts}), sound


def _batch_problems(layer: InputEquations | None, examples: int) -> Iterator[Problem]:
    """Refuse batches whose patches are mixed: nothing tells which patch is whose."""
    if layer is not None and examples > 1 and len(layer.pixels) > 1:
        what = f"the patches of {examples} images are mixed in one update"
        yield Problem("client.batch", what, "give batch 1, or choose another attack, such as ig")


_DAMPINGS = torch.cat([torch.zeros(1), torch.logspace(-14, 2, 65)]).double()
"""Ridges that are tried, in units of the largest singular value squared."""


def _solved(errors: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Solve dW = sum_t z_t x_t^T for the x_t: [V, T, D] and [V, D, P] -> [V, T, P], and the misfit [V].

    By least squares with the ridge that generalised cross-validation chooses (Golub, Heath, Wahba 1979), which needs no
    knowledge of the noise: none where the update is exact, more the more the equations contradict each other.
    """
    left, sizes, right = torch.linalg.svd(errors.transpose(1, 2).double(), full_matrices=False)
    seen = left.transpose(1, 2) @ weight.double()
    outside = (weight.double() - left @ seen).square().sum((1, 2))
    largest = sizes[:, :1].clamp_min(torch.finfo(sizes.dtype).tiny)
    ridge = _DAMPINGS.to(sizes.device) * largest.square()
    kept = sizes.square().unsqueeze(2) / (sizes.square().unsqueeze(2) + ridge.unsqueeze(1)).clamp_min(_TINY)
    rest = ((1 - kept).square() * seen.square().sum(2).unsqueeze(2)).sum(1) + outside.unsqueeze(1)
    free = weight.shape[1] - kept.sum(1)
    scores = torch.where(free > _FREE, rest / free.square(), torch.inf)
    best = scores.argmin(1)
    at_best = ridge.gather(1, best.unsqueeze(1))
    slopes = sizes / (sizes.square() + at_best).clamp_min(_TINY)
    found = right.transpose(1, 2) @ (slopes.unsqueeze(2) * seen)
    left_over = rest.gather(1, best.unsqueeze(1)).squeeze(1).sqrt()
    return found.to(weight), (left_over / _size(weight)).to(weight)


_TINY, _FREE = 1e-300, 1e-6
"""Keeps what is zero from being divided by; equations beyond the unknowns that a score needs."""


_ROUNDS, _DAMPING = 30, 0.5


class _Mixture:
    """What a fully connected first layer shows of a batch, and how well images explain it.

    J is the derivative of the outputs with respect to the first layer's: images x_b with the errors
    r_bc = p_c - [c is b's label] give the weight's gradient s sum_b J_b^T r_b x_b^T / B. The scale s is 1 for one
    gradient; local steps, or a clip, make it another, which the bias's gradient s sum_b J_b^T r_b / B shows.
    """

    def __init__(
        self, layer: InputEquations, seen: Observation, targets: Tensor, simulated_client: Client, knowledge: Knowledge
    ) -> None:
        """Take what was sent of the layer, and what is known of the batch."""
        self.weight, self.bias = seen.update[layer.weight].flatten(2), layer.read(seen.update[layer.errors])[:, 0]
        self.examples, self.shape = targets.shape[1], (*targets.shape, *knowledge.space.shape)
        self.hot = nn.functional.one_hot(targets, knowledge.classes).to(self.weight)
        self.lower, self.upper = knowledge.space.bounds(self.weight)
        name, params = f"{layer.path}.bias", seen.params
        fixed = {**params, **simulated_client.objective.buffers()}

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
        found = passed.sum(1)
        scale = (found * self.bias).sum(1) / found.square().sum(1).clamp_min(torch.finfo(found.dtype).tiny)
        scale = torch.where(scale > 0, scale, 1.0).view(-1, 1, 1)
        rest = scale * torch.einsum("vbr,vbp->vrp", passed, images.flatten(2)) - self.weight
        return slope, errors, scale, _size(rest) / _size(self.weight)

    def unmixed(self) -> tuple[Tensor, Tensor]:
        """Take a batch apart by label: [V, B, ...] and the misfit [V]; one label's examples all get their mean.

        Rows combined by pinv of the mean J show s sum_b r_bc x_b / B. J, the errors and s are computed at grey images,
        then at the images found, again and again, with the errors moving half of the way; the images that explain the
        weight's gradient best are kept.
        """
        images = ((self.lower + self.upper) / 2).expand(self.shape)
        best, kept = torch.full_like(self.weight[:, 0, 0], torch.inf), images
        errors: Tensor | None = None
        for _ in range(_ROUNDS):
            slope, fresh, scale, misfit = self.explain(images)
            better = misfit < best
            best = torch.where(better, misfit, best)
            kept = torch.where(better.view(-1, *[1] * (images.ndim - 1)), images, kept)
            errors = fresh if errors is None else torch.lerp(errors, fresh, _DAMPING)
            mixed = torch.einsum("vrc,vrp->vcp", torch.linalg.pinv(slope.mean(1)), self.weight / scale)
            solved = self.examples * (torch.linalg.pinv(errors.transpose(1, 2), rtol=_TOLERANCE) @ mixed)
            images = torch.clamp(solved.nan_to_num(0.0).view(self.shape), self.lower, self.upper)
        return kept, best


_TOLERANCE = 1e-3
"""Directions of the errors that are this much weaker than the strongest are left out: they would only show noise."""


def _size(value: Tensor) -> Tensor:
    return value.flatten(1).norm(dim=1).clamp_min(torch.finfo(value.dtype).tiny)
