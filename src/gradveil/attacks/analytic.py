"""The closed form: a fully connected first layer shows its input (Phong et al. 2017).

With z = W x + b, every row of the gradient is dL/dW_i = dL/db_i x: the weight's gradient divided by the bias's is the
image. A batch's gradient mixes its images. They are taken apart by label: the error p_c - y_c of an output is large and
negative only for examples of its own class, so rows combined such that one output's error remains show mostly that
class's images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks.base import Observation, Progress, Prospect, Reconstruction
from gradveil.attacks.infer import Labels, find_labels, label_problems
from gradveil.attacks.knowledge import How, Knowledge
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.nn.paths import at, first_layer


@dataclass(frozen=True)
class Analytic:
    """Divide the first layer's gradients: no iteration, no restart."""

    name: str = "analytic"
    labels: Labels = "given"
    """Where a batch's labels come from; a single image needs none."""
    belief: Literal["naive", "full"] = "naive"
    knowledge: Mapping[str, How] = field(default_factory=dict)

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse a model that does not begin with a linear layer, and labels that cannot be read off."""
        yield from _linear_start(prospect.belief, prospect.belief.params(), prospect.shape)[1]
        yield from label_problems(self.labels, prospect.belief, prospect.examples, prospect.classes)

    def __call__(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Solve for every victim's images from the last round's update."""
        began = time.perf_counter()
        seen = observations[-1]
        victims, examples = len(seen.victims), seen.examples
        path, problems = _linear_start(belief, seen.params, knowledge.shape)
        refuse(problems)
        weight, bias = seen.update[f"{path}.weight"], seen.update[f"{path}.bias"]
        sound = torch.isfinite(weight).flatten(1).all(1) & torch.isfinite(bias).all(1)
        weight, bias = (torch.where(sound.view(-1, *[1] * (v.ndim - 1)), v, 0.0) for v in (weight, bias))
        targets = find_labels(self.labels, seen, belief, knowledge, key.child("labels"))
        assert targets is not None, "labels are given or read off the update"
        if examples == 1:
            flat = _ratio(weight, bias).unsqueeze(1)
            misfit = _size(weight - bias.unsqueeze(-1) * flat) / _size(weight)
        else:
            flat, misfit = _unmixed(weight, targets, path, seen.params, belief, knowledge)
        inputs = flat.view(victims, examples, *knowledge.shape)
        lower, upper = knowledge.lower.to(inputs), knowledge.upper.to(inputs)
        misfit = torch.where(sound, misfit, torch.inf)
        done = torch.zeros(victims, dtype=torch.long, device=inputs.device)
        if progress:
            progress(Progress(victims, 0, victims, victims, float(misfit.median())))
        return Reconstruction(
            inputs=torch.clamp(inputs.nan_to_num(0.0), lower, upper),
            targets=targets,
            objective=misfit,
            status=tuple("converged" if good else "diverged" for good in sound.tolist()),
            iterations=done + 1,
            seconds=time.perf_counter() - began,
            restart=done,
            objectives=misfit.unsqueeze(1),
            initial=torch.ones_like(misfit),
        )


def _linear_start(belief: Client, params: Tensors, shape: tuple[int, int, int]) -> tuple[str, list[Problem]]:
    """Return the path of the first layer, and why it does not show its input."""
    example = next(iter(params.values()))
    path = first_layer(belief.model, example.new_zeros((1, *shape)))
    layer = at(belief.model, path)
    remedy = "choose another attack, such as ig; this one is for models that begin with a linear layer"
    if not isinstance(layer, nn.Linear) or layer.in_features != prod(shape):
        what = f"begins with a {type(layer).__name__} '{path}', not with a linear layer of the {prod(shape)} pixels"
        return path, [Problem("model", what, remedy)]
    missing = [name for name in (f"{path}.weight", f"{path}.bias") if name not in belief.trained()]
    return path, [Problem("update", f"{' and '.join(missing)} are not sent", remedy)] if missing else []


def _ratio(weight: Tensor, bias: Tensor) -> Tensor:
    """Fit dW = db x^T in the least squares: rows count by the square of their bias gradient. Returns [V, pixels]."""
    size = bias.square().sum(1, keepdim=True)
    return (weight * bias.unsqueeze(-1)).sum(1) / torch.where(size > 0, size, torch.ones_like(size))


_ROUNDS, _DAMPING = 30, 0.5


def _unmixed(
    weight: Tensor, targets: Tensor, path: str, params: Tensors, belief: Client, knowledge: Knowledge
) -> tuple[Tensor, Tensor]:
    """Take a batch apart by label. Returns [V, B, pixels] and the misfit [V]; one label's examples all get their mean.

    J is the derivative of the outputs with respect to the first layer's, the mean over the images. Rows combined by
    pinv(J) show sum_b r_bc x_b / B with the errors r_bc = p_c - [c is b's label]. Both are computed at grey images,
    then at the images found, again and again, with p moving half of the way; the images that explain the weight's
    gradient best, sum_b J_b^T r_b x_b^T / B, are kept.
    """
    victims, examples = targets.shape
    hot = nn.functional.one_hot(targets, knowledge.classes).to(weight)
    lower, upper = knowledge.lower.to(weight), knowledge.upper.to(weight)
    fixed = {**params, **belief.objective.buffers()}

    def outputs(offset: Tensor, image: Tensor) -> Tensor:
        shifted = {**fixed, f"{path}.bias": params[f"{path}.bias"] + offset}
        return functional_call(belief.model, shifted, (image.unsqueeze(0),))[0]

    zero = torch.zeros_like(params[f"{path}.bias"])
    slopes = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))
    answers = torch.func.vmap(outputs, in_dims=(None, 0))
    images = ((lower + upper) / 2).expand(victims, examples, *knowledge.shape)
    best, kept = torch.full_like(weight[:, 0, 0], torch.inf), images.flatten(2)
    errors: Tensor | None = None
    for _ in range(_ROUNDS):
        flat = images.flatten(0, 1)
        slope = slopes(zero, flat).unflatten(0, (victims, examples))
        fresh = torch.softmax(answers(zero, flat), -1).view_as(hot) - hot
        passed = torch.einsum("vbcr,vbc->vbr", slope, fresh)
        rest = torch.einsum("vbr,vbp->vrp", passed, images.flatten(2)) / examples - weight
        misfit = _size(rest) / _size(weight)
        better = misfit < best
        best = torch.where(better, misfit, best)
        kept = torch.where(better.view(-1, 1, 1), images.flatten(2), kept)
        errors = fresh if errors is None else torch.lerp(errors, fresh, _DAMPING)
        mixed = torch.einsum("vrc,vrp->vcp", torch.linalg.pinv(slope.mean(1)), weight)
        solved = examples * (torch.linalg.pinv(errors.transpose(1, 2), rtol=_TOLERANCE) @ mixed)
        images = torch.clamp(solved.nan_to_num(0.0).view_as(images), lower, upper)
    return kept, best


_TOLERANCE = 1e-3
"""Directions of the errors that are this much weaker than the strongest are left out: they would only show noise."""


def _size(value: Tensor) -> Tensor:
    return value.flatten(1).norm(dim=1).clamp_min(torch.finfo(value.dtype).tiny)
