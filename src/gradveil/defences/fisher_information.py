"""Fisher information of a noisy client's update about its examples, for error bounds.

The client sends a function of (g(x) + noise), where g is the update before its noise; stages after the noise can only
lose information. If local training adds noise in each step, every noisy step is counted as if the attacker saw it.

Pruning with public masks (`optimal-prune(form=global)`) shows only the kept entries. For a mixed defence, whose coin
prunes entry i with probability p_i, expectations over the coin count, (1 - p_i) ||dg_i/dx||^2 / s^2: by Jensen's
inequality the bounds hold with them (Chen, Gürsoy and Lei 2024, Eq. 2 and Lemma A.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.client.local_training import train
from gradveil.core.chain import Chain
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, squared_norm, tmap, wide
from gradveil.core.types import Batch, Context, Stage, Transform
from gradveil.core.user_code import users
from gradveil.defences.additive_noise import Additive, Gaussian, Laplacian, clamped
from gradveil.defences.dp import Clip, FadingClip, FadingNoise
from gradveil.defences.guarantees import known, stages
from gradveil.defences.optimal import OptimalNoise, OptimalPruning
from gradveil.defences.stage_probes import data_dependent, noise_is_shared
from gradveil.defences.user_defence import misstated
from gradveil.theory.input_jacobian import squared_products

Stages = tuple[tuple[str, Transform], ...]
"""Transforms with their names, in the order in which they act."""
KINKED: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Threshold, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
"""Layers with a discontinuous derivative."""


@dataclass(frozen=True)
class Sight:
    """The most that an attacker can see: the update of `clean`, plus noise of equal variance in every entry."""

    clean: Client
    """The client up to its noise."""
    variance: float
    """One over the Fisher information of an entry's location; for a sum of noises at most their sum (Stam 1959)."""
    normal: float
    """Variance of the normal noise alone, 0 without any."""
    smooth: bool
    """Whether no layer has a discontinuous derivative, as far as known."""
    every_step: bool
    """Whether the noise is added in each step of local training, not to the update."""
    noisy: Client
    """The client with the noise of its local training."""
    laplace: float = 0.0
    """Scale of Laplace noise alone; 0 without any, or for a sum of several clients."""
    fitted: OptimalNoise | OptimalPruning | None = None
    """Noise whose variances are fitted to public images: it has variance 1 on the update divided by their roots. Or
    pruning with masks that are fitted to them: the noise is on the update times the roots of the kept shares."""


def obstacle(client: Client, batch: Batch) -> str | None:
    """Return why no bound is known for this client; None if one is."""
    step, send = stages(client.step), stages(client.send)
    if _first(step) is None and _first(send) is None:
        return "no noise is added with a known law that does not depend on the data"
    inner, before, noise, after = _split(client)
    for stage in noise:
        if users(stage) and (problem := misstated(stage, client, batch)):
            return f"{type(stage).__name__} {problem}"
    for name, stage in (*inner, *before):
        if not known(stage, Clip, FadingClip):
            return f"'{name}' comes before the noise, and its effect is not known"
    for name, stage in after:
        if data_dependent(stage, client, batch):
            return f"'{name}' uses the data again, after the noise"
    if any(noise_is_shared(stage, client, batch) for _, stage in (*step, *send)):
        return "the noise is the same for every client"
    for transform in client.batch:
        if not transform.smooth:
            claim = "and does not declare (smooth = True) a" if users(transform) else "and has no"
            return f"{type(transform).__name__} changes the batch {claim} derivative in the images"
    if client.local and _first(step) is not None and any(transform.noise(batch) for transform in client.batch):
        return "the batch is mixed at random between noisy steps of local training"
    if client.local and client.local.sampling == "poisson" and _first(step) is not None:
        return "the examples of a noisy step of local training are drawn at random"
    if client.pipeline.trains_private_layers and _first(step) is not None:
        return "private layers are trained between noisy steps"
    first = _first(step)
    if first is not None and isinstance(step[first][1], OptimalNoise | OptimalPruning):
        return "noise or masks that are fitted to public images are in the steps of local training"
    fitted = _fitted(client)
    if client.members > 1 and isinstance(fitted, OptimalNoise):
        return "updates with noise fitted to public images are summed"
    if client.members > 1 and isinstance(fitted, OptimalPruning) and fitted.mixed:
        return "updates with masks of several coins are summed"
    if client.members > 1 and client.local and _first(step) is not None:
        return "updates with noise in each step of local training are summed"
    return None


def sight(client: Client, examples: int) -> Sight:
    """Split a client at its noise, if it has no `obstacle`; `examples` counts the whole batch."""
    each = examples // client.members
    _, before, noise, _ = _split(client)
    smooth = not any(isinstance(module, KINKED) for module in client.model.modules())
    fitted = _fitted(client)
    clamp = next(
        (stage.clamp for stage in (fitted, *noise[:1]) if isinstance(stage, OptimalNoise | Gaussian)), math.inf
    )
    if fitted is not None or math.isfinite(clamp):
        before = (*before, ("shown", _Shown(clamp)))
    if isinstance(fitted, OptimalNoise):
        clean = replace(client, send=Chain(before))
        return Sight(clean, 1.0, 1.0, smooth, False, replace(client, send=None), fitted=fitted)
    in_step = _first(stages(client.step)) is not None
    size = client.local.batch if client.local and in_step else each
    # The server sees the mean over the members, whose noises are independent.
    variance = sum(stage.variance(size) for stage in noise) / client.members
    normal = sum(stage.variance(size) for stage in noise if known(stage, Gaussian, FadingNoise)) / client.members
    scales = (
        [stage.scale for stage in noise if isinstance(stage, Laplacian) and known(stage, Laplacian)]
        if client.members == 1
        else []
    )
    chain = Chain(before) if before else None
    clean = replace(client, step=chain, send=None) if in_step else replace(client, send=chain)
    every_step = in_step and client.local is not None
    laplace = max(scales, default=0.0)
    return Sight(clean, variance, normal, smooth, every_step, replace(client, send=None), laplace, fitted)


@dataclass(frozen=True)
class UpdateInformation:
    """Upper bounds on the information of one update about the inputs x."""

    along: Tensor
    """v^T F v = sum_i (J v)_i^2 / s^2 [N] for N directions v; NaN where the update is not differentiable."""
    nats: Tensor
    """Nats [] by which the noise around g(x) differs from that around g(mean), on average at least the mutual
    information: ||d||^2 / (2 s^2) for normal noise and d = g(x) - g(mean), sum_i (t_i + exp(-t_i) - 1) with t_i = |d_i|
    / b for Laplace noise of scale b. Of both the smaller number; infinite without either."""

    def __add__(self, other: UpdateInformation) -> UpdateInformation:
        """Add the information of another noisy vector, given the first."""
        return UpdateInformation(self.along + other.along, self.nats + other.nats)


def settled(seen: Sight, params: Tensors, batch: Batch, noise: Mapping[str, Tensor] | None = None) -> Sight:
    """Weigh the entries as what is fitted shows them here; without `noise` only if the model draws none."""
    if seen.fitted is None:
        return seen
    client = replace(seen.clean, send=Chain((("weights", _Weights(seen.fitted)),)))
    spec = client.noise_spec(params, batch)
    if noise is None and any(name != "send.weights.probe" for name in spec):
        return seen
    drawn = {n: (noise or {}).get(n, each.off().to(batch.inputs.device)) for n, each in spec.items()}
    weights = tmap(torch.detach, client.update(params, batch, drawn, client.init(params))[0])
    assert isinstance(seen.clean.send, Chain)
    *before, (name, shown) = seen.clean.send.stages
    assert isinstance(shown, _Shown)
    weighed = Chain((*before, (name, replace(shown, weights=weights))))
    return replace(seen, clean=replace(seen.clean, send=weighed), fitted=None)


def information(
    seen: Sight, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], directions: Tensor, mean: Tensor
) -> UpdateInformation:
    """Compute the information of a batch's update along directions [N, B, C, H, W] in the space of the inputs.

    `noise` is the client's, `mean` [C, H, W] a public input.
    """
    seen = settled(seen, params, batch, noise)
    if not seen.every_step:
        drawn = {name: noise[name] for name in seen.clean.noise_spec(params, batch)}
        return _of_vector(seen, seen.clean, params, batch, drawn, directions, mean)
    parts: list[UpdateInformation] = []
    local, schedule = seen.noisy.local, noise["schedule"]
    assert local is not None
    clean, noisy = replace(seen.clean, local=None), replace(seen.noisy, local=None)
    state, parts_of_noise = noisy.init(params), seen.noisy.noise_parts(params, batch)
    once = {name: noise[name] for name in parts_of_noise.once if name.startswith("model.")}

    def noisy_gradient(t: int, now: Tensors) -> Tensors:
        nonlocal state
        rows = schedule[t]
        chosen = Batch(batch.inputs[rows], batch.targets[rows])
        drawn = {name: noise[name][t] for name in parts_of_noise.step} | once
        needed = {name: drawn[name] for name in clean.noise_spec(now, chosen)}
        parts.append(_of_vector(seen, clean, now, chosen, needed, directions[:, rows], mean))
        gradient, state = noisy.update(now, chosen, drawn, state)
        return gradient

    train(local, params, schedule.shape[0], noisy_gradient)
    return reduce(add, parts)


@dataclass(frozen=True)
class _Weights(Transform):
    """A stage that sends the weights of the entries instead of the update: what the noise after it makes of them."""

    fitted: OptimalNoise | OptimalPruning
    stage = Stage.NOISE

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the public directions."""
        return self.fitted.directions(batch)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Invert the deviations of the noise, or take the roots of the kept shares, in the order of the update."""
        if isinstance(self.fitted, OptimalPruning):
            return {n: share.sqrt() for n, share in self.fitted.public_shares(context, noise["probe"]).items()}, state
        scales = self.fitted.public_scales(context, noise["probe"])
        return {name: 1 / scales[name] for name in update}, state


@dataclass(frozen=True)
class _Shown(Transform):
    """A stage that shows the update as the noise after it does: clamped, and each entry times its weight."""

    clamp: float
    weights: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Empty until they are known at the parameters of a round."""
    stage = Stage.NOISE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Clamp and weigh."""
        cut = clamped(update, self.clamp)
        return {name: value * self.weights[name] for name, value in cut.items()} if self.weights else cut, state


def _of_vector(
    seen: Sight, client: Client, params: Tensors, batch: Batch, noise: Tensors, directions: Tensor, mean: Tensor
) -> UpdateInformation:
    """Compute the information of one noisy vector: an update, or the gradient of a step."""
    state = client.init(params)

    def update(inputs: Tensor) -> Tensors:
        return wide(client.update(params, Batch(inputs, batch.targets), noise, state)[0])

    squares = squared_products(update, batch.inputs, directions) if seen.smooth else None
    along = torch.full((len(directions),), torch.nan) if squares is None else squares / seen.variance
    away = tmap(torch.sub, update(batch.inputs), update(mean.expand_as(batch.inputs)))
    return UpdateInformation(along.double().cpu(), _nats(seen, away))


def _nats(seen: Sight, away: Tensors) -> Tensor:
    """Compute the Kullback-Leibler divergence between the noise and the noise shifted by `away`."""
    normal = squared_norm(away).double().cpu() / (2 * seen.normal) if seen.normal else torch.tensor(torch.inf).double()
    if not seen.laplace:
        return normal
    steps = [value.double().abs().cpu() / seen.laplace for value in away.values()]
    # expm1: for small t, exp(-t) - 1 would cancel, and t^2 / 2 is what is left of the sum.
    return torch.minimum(normal, torch.stack([(t + torch.expm1(-t)).sum() for t in steps]).sum())


def _split(client: Client) -> tuple[Stages, Stages, list[Additive], Stages]:
    """Split at the first noise: stages of the earlier slot, those before the noise in its slot, noise, later stages."""
    step, send = stages(client.step), stages(client.send)
    inner, slot, later = ((), step, send) if _first(step) is not None else (step, send, ())
    first = _first(slot)
    assert first is not None
    noise: list[Additive] = []
    for _, stage in slot[first:]:
        if not isinstance(stage, Additive) or (noise and isinstance(stage, Gaussian) and math.isfinite(stage.clamp)):
            break
        noise.append(stage)
    pruning = slot[first][1]
    if isinstance(pruning, OptimalPruning):
        noise.append(Gaussian(pruning.std))
    # Noise after noise that is fitted to public images is ignored: it can only hide more.
    return inner, slot[:first], noise, (*slot[first + max(1, len(noise)) :], *later)


def _fitted(client: Client) -> OptimalNoise | OptimalPruning | None:
    """Return what is fitted to public images and has the first noise, or prunes right after it."""
    send = stages(client.send)
    if (first := _first(send)) is None or _first(stages(client.step)) is not None:
        return None
    _, _, _, after = _split(client)
    candidates = [send[first][1], *(stage for _, stage in after[:1] if isinstance(stage, OptimalPruning))]
    return next(
        (stage for stage in candidates if isinstance(stage, OptimalNoise | OptimalPruning) and stage.needs_public), None
    )


def _first(chain: Stages) -> int | None:
    """Find the first stage that adds noise of positive variance that does not depend on the data."""

    def adds(stage: Transform) -> bool:
        if isinstance(stage, OptimalNoise | OptimalPruning):
            return stage.needs_public and stage.std > 0
        return isinstance(stage, Additive) and stage.variance(1) > 0

    return next((i for i, (_, stage) in enumerate(chain) if adds(stage)), None)
