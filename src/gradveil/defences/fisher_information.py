"""Fisher information of a noisy client's update about its examples, for error bounds.

What is sent is a function of (g(x) + noise), with g the update before its noise; whatever comes after the noise can
only lose information. Of local training that adds noise in each step, every noisy step is counted as if it were seen.
"""

from __future__ import annotations

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
from gradveil.defences.additive_noise import Additive, Gaussian, Laplacian
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
"""Layers whose derivative jumps."""


@dataclass(frozen=True)
class Sight:
    """What an attacker sees at best: the update of `clean`, plus noise of one variance in every entry."""

    clean: Client
    """The client up to its noise."""
    variance: float
    """One over the information of an entry's place; of added noises the sum, which is no more (Stam 1959)."""
    normal: float
    """The variance of the normal noise alone, 0 where there is none."""
    smooth: bool
    """Whether no layer is known for a derivative that jumps."""
    every_step: bool
    """The noise is added to each step of local training, not to what is sent."""
    noisy: Client
    """The client that trains locally with its noise."""
    laplace: float = 0.0
    """The scale of Laplace noise alone, 0 where there is none, or a sum of several clients'."""
    fitted: OptimalNoise | None = None
    """Noise whose variances are fitted to public images: then of variance 1, on the update divided by their roots."""


def obstacle(client: Client, batch: Batch) -> str | None:
    """Say why no bound is known for this client, None if there is one."""
    step, send = stages(client.step), stages(client.send)
    if _first(step) is None and _first(send) is None:
        return "no noise is added whose law is known and does not depend on the data"
    inner, before, noise, after = _split(client)
    for stage in noise:
        if users(stage) and (what := misstated(stage, client, batch)):
            return f"{type(stage).__name__} {what}"
    for name, stage in (*inner, *before):
        if not known(stage, Clip, FadingClip):
            return f"'{name}' comes before the noise, and nothing is known of it"
    for name, stage in after:
        if data_dependent(stage, client, batch):
            return f"'{name}' looks at the data again, behind the noise"
    if any(noise_is_shared(stage, client, batch) for _, stage in (*step, *send)):
        return "the noise is the same for every client"
    for transform in client.batch:
        if not transform.smooth:
            claim = "and does not say (smooth = True) that it has a" if users(transform) else "to what has no"
            return f"{type(transform).__name__} changes the batch {claim} derivative in the images"
    if client.local and _first(step) is not None and any(transform.noise(batch) for transform in client.batch):
        return "the batch is mixed at random between noisy steps of local training"
    if client.local and client.local.sampling == "poisson" and _first(step) is not None:
        return "who is in a noisy step of local training is drawn at random"
    if client.pipeline.trains_private_layers and _first(step) is not None:
        return "what a client keeps to itself is trained between noisy steps"
    if client.members > 1 and _fitted(send) is not None:
        return "clients that fit their noise to public images are summed"
    if client.members > 1 and client.local and _first(step) is not None:
        return "clients that add noise in each step of local training are summed"
    return None


def sight(client: Client, examples: int) -> Sight:
    """Cut a client off at its noise; `examples` are those of the whole batch. Only where there is no `obstacle`."""
    each = examples // client.members
    _, before, noise, _ = _split(client)
    smooth = not any(isinstance(module, KINKED) for module in client.model.modules())
    fitted = _fitted(stages(client.send))
    if fitted is not None and not noise:
        clean = replace(client, send=Chain((*before, ("clamp", _Divided(fitted)))))
        return Sight(clean, 1.0, 1.0, smooth, False, replace(client, send=None), fitted=fitted)
    in_step = _first(stages(client.step)) is not None
    size = client.local.batch if client.local and in_step else each
    variance = sum(stage.variance(size) for stage in noise) / client.members
    normal = sum(stage.variance(size) for stage in noise if known(stage, Gaussian, FadingNoise)) / client.members
    scales = (
        [stage.scale for stage in noise if isinstance(stage, Laplacian) and known(stage, Laplacian)]
        if client.members == 1
        else []
    )
    kept = Chain(before) if before else None
    clean = replace(client, step=kept, send=None) if in_step else replace(client, send=kept)
    every_step = in_step and client.local is not None
    return Sight(clean, variance, normal, smooth, every_step, replace(client, send=None), max(scales, default=0.0))


@dataclass(frozen=True)
class Told:
    """What one update tells of the inputs x, at most."""

    along: Tensor
    """v^T F v = sum_i (J v)_i^2 / s^2 [N] for N directions v; not a number where the update jumps."""
    nats: Tensor
    """Nats [] by which the noise around g(x) differs from that around g(mean), on average at least the mutual
    information: ||d||^2 / (2 s^2) for normal noise and d = g(x) - g(mean), sum_i (t_i + exp(-t_i) - 1) with t_i = |d_i|
    / b for Laplace noise of scale b. Of both the smaller number; infinite without either."""

    def __add__(self, other: Told) -> Told:
        """Add what another noisy vector tells, given the first."""
        return Told(self.along + other.along, self.nats + other.nats)


def settled(seen: Sight, params: Tensors, batch: Batch, noise: Mapping[str, Tensor] | None = None) -> Sight:
    """Divide by the deviations of fitted noise at these parameters; without `noise` only if the model draws nothing."""
    if seen.fitted is None:
        return seen
    asked = replace(seen.clean, send=Chain((("scales", _Scales(seen.fitted)),)))
    spec = asked.noise_spec(params, batch)
    if noise is None and any(name != "send.scales.probe" for name in spec):
        return seen
    own = {n: (noise or {}).get(n, each.off().to(batch.inputs.device)) for n, each in spec.items()}
    scales = tmap(torch.detach, asked.update(params, batch, own, asked.init(params))[0])
    assert isinstance(seen.clean.send, Chain)
    divided = Chain((*seen.clean.send.stages[:-1], ("divided", _Divided(seen.fitted, scales))))
    return replace(seen, clean=replace(seen.clean, send=divided), fitted=None)


def information(
    seen: Sight, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], directions: Tensor, mean: Tensor
) -> Told:
    """Compute what the update of a batch tells, along directions [N, B, C, H, W] in the space of the inputs.

    `noise` is what the client drew, `mean` [C, H, W] an input that everybody knows.
    """
    seen = settled(seen, params, batch, noise)
    if not seen.every_step:
        own = {name: noise[name] for name in seen.clean.noise_spec(params, batch)}
        return _told(seen, seen.clean, params, batch, own, directions, mean)
    parts: list[Told] = []
    local, schedule = seen.noisy.local, noise["schedule"]
    assert local is not None
    clean, noisy = replace(seen.clean, local=None), replace(seen.noisy, local=None)
    state, parts_of_noise = noisy.init(params), seen.noisy.noise_parts(params, batch)
    once = {name: noise[name] for name in parts_of_noise.once if name.startswith("model.")}

    def gradient(t: int, now: Tensors) -> Tensors:
        nonlocal state
        rows = schedule[t]
        chosen = Batch(batch.inputs[rows], batch.targets[rows])
        own = {name: noise[name][t] for name in parts_of_noise.step} | once
        kept = {name: own[name] for name in clean.noise_spec(now, chosen)}
        parts.append(_told(seen, clean, now, chosen, kept, directions[:, rows], mean))
        found, state = noisy.update(now, chosen, own, state)
        return found

    train(local, params, schedule.shape[0], gradient)
    return reduce(add, parts)


@dataclass(frozen=True)
class _Scales(Transform):
    """Sends the standard deviations of fitted noise in place of the update."""

    fitted: OptimalNoise
    stage = Stage.NOISE

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the directions on which everybody has agreed."""
        return self.fitted.directions(batch)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Compute them, in the order of the update."""
        found = self.fitted.public_scales(context, noise["probe"])
        return {name: found[name] for name in update}, state


@dataclass(frozen=True)
class _Divided(Transform):
    """Cuts the update as fitted noise does, and divides it by the noise's standard deviations."""

    fitted: OptimalNoise
    scales: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    stage = Stage.NOISE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Divide."""
        return {name: value / self.scales[name] for name, value in self.fitted.cut(update).items()}, state


def _told(
    seen: Sight, client: Client, params: Tensors, batch: Batch, noise: Tensors, directions: Tensor, mean: Tensor
) -> Told:
    state = client.init(params)

    def update(inputs: Tensor) -> Tensors:
        return wide(client.update(params, Batch(inputs, batch.targets), noise, state)[0])

    squares = squared_products(update, batch.inputs, directions) if seen.smooth else None
    along = torch.full((len(directions),), torch.nan) if squares is None else squares / seen.variance
    away = tmap(torch.sub, update(batch.inputs), update(mean.expand_as(batch.inputs)))
    return Told(along.double().cpu(), _nats(seen, away))


def _nats(seen: Sight, away: Tensors) -> Tensor:
    """Compute the divergence of the noise moved by `away` from the noise where it is (Kullback and Leibler)."""
    normal = squared_norm(away).double().cpu() / (2 * seen.normal) if seen.normal else torch.tensor(torch.inf).double()
    if not seen.laplace:
        return normal
    steps = [value.double().abs().cpu() / seen.laplace for value in away.values()]
    return torch.minimum(normal, torch.stack([(t + torch.expm1(-t)).sum() for t in steps]).sum())


def _split(client: Client) -> tuple[Stages, Stages, list[Additive], Stages]:
    """Split the slot that adds the first noise at its noise: what slots before it do, before, noise, and all after."""
    step, send = stages(client.step), stages(client.send)
    inner, own, later = ((), step, send) if _first(step) is not None else (step, send, ())
    first = _first(own)
    assert first is not None
    noise: list[Additive] = []
    for _, stage in own[first:]:
        if not isinstance(stage, Additive):
            break
        noise.append(stage)
    pruning = own[first][1]
    if isinstance(pruning, OptimalPruning):
        # It keeps what everybody knows that it keeps, of an update to which this much noise might be added everywhere.
        noise.append(Gaussian(pruning.std))
    # What is added behind noise that is fitted to public images is left out: it can only hide more.
    return inner, own[:first], noise, (*own[first + max(1, len(noise)) :], *later)


def _fitted(chain: Stages) -> OptimalNoise | None:
    """Return the noise that is fitted to public images, if it is the first that is added."""
    first = _first(chain)
    stage = None if first is None else chain[first][1]
    return stage if isinstance(stage, OptimalNoise) else None


def _first(chain: Stages) -> int | None:
    """Find the first stage that adds noise indeed, which does not depend on the data."""

    def adds(stage: Transform) -> bool:
        if isinstance(stage, OptimalNoise | OptimalPruning):
            return stage.needs_public and stage.std > 0
        return isinstance(stage, Additive) and stage.variance(1) > 0

    return next((i for i, (_, stage) in enumerate(chain) if adds(stage)), None)
