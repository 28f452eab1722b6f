"""The likeliest image behind a first layer's equations that a defence has disturbed.

The equations dW = sum_t z_t x_t^T hold errors on both sides: noise was added to dW and to the z_t, or entries of both
were not sent. Three things make up for them. The z_t of one output resemble each other over the patches, so that those
that are sent tell of those that are not (a normal law over the patches, fitted to this update by expectation
maximisation). An equation whose z_t remain uncertain counts for less. And images are smooth: each cosine
coefficient has the variance that public images have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch
from gradveil.nn.first_layer_equations import InputEquations
from gradveil.theory.reconstruction_bound import cosine, spectrum


class Disturbance(NamedTuple):
    """What a defence does to the entries of a tensor, as mean squares."""

    sent: Tensor
    """What is added to an entry that is sent."""
    unsent: Tensor
    """What an entry that was sent as zero would have held, as a share of the sent entries' own mean square."""


def disturbances(
    client: Client, params: Tensors, batch: Batch, key: Key, parts: Sequence[Callable[[Tensors], Tensor]]
) -> list[Disturbance]:
    """Compare parts of what defended and undefended clients send for the same batches, with the model's noise the same.

    A factor that the parts share (a clip's) is no disturbance.
    """
    plain, one = client.undefended_update(), Batch(batch.inputs[0], batch.targets[0])
    spec, own = (believed.noise_spec(params, one) for believed in (client, plain))
    drawn = stack([spec.sample(key.child(row)) for row in range(batch.inputs.shape[0])])
    noise = {name: value.to(batch.inputs.device) for name, value in drawn.items()}
    defended = _sent(client, params, batch, noise)
    clean = _sent(plain, params, batch, {name: noise[name] for name in own if name in noise})
    pairs = [(part(defended).flatten(1).double(), part(clean).flatten(1).double()) for part in parts]
    whole, alone = (torch.cat(values, 1) for values in zip(*pairs, strict=True))
    alone = torch.where(whole != 0, alone, 0.0)
    tiny = torch.finfo(torch.float64).tiny
    scale = ((whole * alone).sum(1) / alone.square().sum(1).clamp_min(tiny)).unsqueeze(1)
    found = []
    for sent, was in pairs:
        kept = sent != 0
        count = kept.sum(1).clamp_min(1)
        size = sent.square().sum(1) / count
        missing = torch.where(kept, 0.0, scale * was).square().sum(1) / (~kept).sum(1).clamp_min(1)
        added = torch.where(kept, sent - scale * was, 0.0).square().sum(1) / count
        found.append(Disturbance(added.mean(), (missing / size.clamp_min(tiny)).mean()))
    return found


def _sent(client: Client, params: Tensors, batch: Batch, noise: Tensors) -> Tensors:
    count = batch.inputs.shape[0]
    state = {name: value.expand(count, *value.shape) for name, value in client.init(params).items()}
    sent, _ = client.updates(params, batch, noise, state)
    return {name: value.detach() for name, value in sent.items()}


LARGEST = 4096
"""Values of an image, at most: the unknowns of one dense system (a gigabyte at 4,096, while it is solved)."""
_ROUNDS = 15


def prior_problems(shape: tuple[int, ...], examples: int, public: bool) -> Iterator[Problem]:
    """Refuse what the prior of public images is not for."""
    remedy = "leave out the prior, or choose another attack, such as cdia"
    if not public:
        yield Problem("data", "there are no public images to take a prior from", remedy)
    if examples > 1:
        yield Problem("client.batch", f"a prior is for one image, and an update has {examples}", remedy)
    if prod(shape) > LARGEST:
        yield Problem("data", f"images of {prod(shape)} values are too large for a prior: {LARGEST} at most", remedy)


_PUBLIC, _REHEARSED = 4096, 32
"""Public images that the prior is made from, and that the defence is tried on, at most."""


@dataclass(frozen=True)
class Equations:
    """One target client's dW = sum_t z_t x_t^T, and what is uncertain of it."""

    z: Tensor
    """[T, D] as they most likely were before the defence."""
    noise: Tensor
    """[D, T, T] their covariances, output by output."""
    weight: Tensor
    """[D, P] dW as it was sent."""
    variances: Tensor
    """[D, P] of what the defence did to it."""

    def misfit(self, x: Tensor) -> Tensor:
        """Say what share of the entries of dW that were sent x [T, P] does not explain."""
        rest = torch.where(self.weight != 0, self.z.T @ x - self.weight, 0.0)
        return rest.norm() / self.weight.norm().clamp_min(torch.finfo(self.weight.dtype).tiny)


def equations(
    layer: InputEquations, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> list[Equations]:
    """Write down every target client's, with what the simulated client does to them, as it shows on public images."""
    public = knowledge.public
    assert public is not None, "it was looked for"
    weight, errors = seen.update[layer.weight].flatten(2), layer.read(seen.update[layer.errors])
    inputs, targets = (value[:_REHEARSED].unsqueeze(1) for value in public)
    tried = Batch(inputs.to(weight), targets.to(weight.device))
    parts = (lambda sent: layer.read(sent[layer.errors]), lambda sent: sent[layer.weight])
    found = disturbances(seen.believed(simulated_client), seen.params, tried, key.child(Stream.DISTURBANCE), parts)
    return [uncertain(z, w, *found) for z, w in zip(errors.double(), weight.double(), strict=True)]


def uncertain(errors: Tensor, weight: Tensor, of_errors: Disturbance, of_weight: Disturbance) -> Equations:
    """Say what is known of equations with z_t [T, D] and dW [D, P] that were disturbed so."""
    sent, unsent = _variances(weight, of_weight)
    z, noise = _completed(errors, *_variances(errors, of_errors))
    return Equations(z, noise, weight, torch.where(weight != 0, sent, unsent))


def weighed(
    layer: InputEquations, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> tuple[Tensor, Tensor]:
    """Find every target client's likeliest image [V, pixels], and the misfits [V]."""
    public = knowledge.public
    assert public is not None, "it was looked for"
    like = seen.update[layer.weight]
    images, pixels = images_like(public.inputs[:_PUBLIC].to(like)), layer.pixels.to(like.device)
    each = equations(layer, seen, simulated_client, knowledge, key)
    found = [likeliest(one, pixels, images) for one in each]
    misfits = [one.misfit(x[pixels]) for one, x in zip(each, found, strict=True)]
    return torch.stack(found).to(like), torch.stack(misfits).to(like)


@dataclass(frozen=True)
class Images:
    """A normal law of images: mean [N], covariance and precision [N, N]."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor


def images_like(public: Tensor) -> Images:
    """Fit independent normal cosine coefficients to public images [M, C, H, W]."""
    channels, height, width = public.shape[1:]
    known = spectrum(public)
    units = torch.eye(height * width, dtype=torch.float64, device=public.device)
    basis = cosine(units.view(-1, height, width)).flatten(1).T
    variances = [known.variances[channel].flatten().to(basis) for channel in range(channels)]
    return Images(
        public.double().mean(0).flatten(),
        torch.block_diag(*(basis.T @ (v.unsqueeze(1) * basis) for v in variances)),
        torch.block_diag(*(basis.T @ (basis / v.unsqueeze(1)) for v in variances)),
    )


def likeliest(known: Equations, pixels: Tensor, images: Images) -> Tensor:
    """Return the likeliest image [N]; `pixels` [T, P] says which pixel each value of x_t is."""
    precision, wanted = images.precision.clone(), images.precision @ images.mean
    for place, own in enumerate(pixels.T):
        moments = images.covariance[own][:, own] + torch.outer(images.mean[own], images.mean[own])
        variance = (known.noise * moments).sum((1, 2)) + known.variances[:, place]
        shares = known.z / variance
        precision[own.unsqueeze(1), own] += shares @ known.z.T
        wanted[own] += shares @ known.weight[:, place]
    # Not by Cholesky's factors: exact equations outweigh the prior so far that rounding may make it indefinite.
    return torch.linalg.solve(precision, wanted)


def _variances(value: Tensor, of: Disturbance) -> tuple[Tensor, Tensor]:
    """Return the variance of an entry that was sent, and of one that was not; never less than rounding's."""
    sent = value[value != 0]
    size = sent.square().mean() if len(sent) else value.new_zeros(())
    least = (torch.finfo(torch.float32).eps ** 2 * size).clamp_min(torch.finfo(value.dtype).tiny ** 0.5)
    return torch.maximum(of.sent, least), torch.maximum(of.unsent * size, least)


def _completed(errors: Tensor, of_sent: Tensor, of_unsent: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the true z_t [T, D] of every output, and their covariances [D, T, T], by expectation maximisation.

    Where all were sent they stay as they are: smoothing the noise would take more of the z_t than of it.
    """
    tokens, outputs = errors.shape
    known = torch.where(errors != 0, 1 / of_sent, 1 / of_unsent).T
    if bool(errors.all()):
        return errors, torch.diag_embed(1 / known)
    law = (errors @ errors.T) / outputs + torch.diag((1 / known).mean(0))
    units = torch.eye(tokens, dtype=errors.dtype, device=errors.device)
    z, covariances = errors, known.new_zeros(outputs, tokens, tokens)
    for _ in range(_ROUNDS):
        # (law^-1 + known)^-1 without inverting the law, which is nearly singular: patches' errors look alike.
        gain = torch.linalg.solve(law + torch.diag_embed(1 / known), law.expand(outputs, -1, -1)).mT
        z = (gain @ errors.T.unsqueeze(2)).squeeze(2).T
        rest = units - gain
        covariances = rest @ law @ rest.mT + (gain / known.unsqueeze(1)) @ gain.mT
        law = (z @ z.T + covariances.sum(0)) / outputs
    return z, covariances
