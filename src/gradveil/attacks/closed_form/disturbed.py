"""The likeliest image, given a first layer's equations that a defence has disturbed.

The equations dW = sum_t z_t x_t^T have errors on both sides: noise on dW and on the z_t, or pruned entries of both.
Three assumptions compensate. The z_t of one output are correlated over the patches, so that sent ones predict pruned
ones (a normal law over the patches, fitted to this update by expectation maximisation). Equations with uncertain z_t
have less weight. Images are smooth: each cosine coefficient has its variance over public images.
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
    """Mean square errors that a defence causes in the entries of a tensor."""

    sent: Tensor
    """Mean square error of a sent entry."""
    unsent: Tensor
    """Mean square of entries that were sent as zero, as a share of the mean square of sent entries."""


def disturbances(
    client: Client, params: Tensors, batch: Batch, key: Key, parts: Sequence[Callable[[Tensors], Tensor]]
) -> list[Disturbance]:
    """Compare parts of defended and undefended updates of the same batches, with the same noise of the model.

    A factor that the parts share, such as a clip's, is not a disturbance.
    """
    plain, one = client.undefended_update(), Batch(batch.inputs[0], batch.targets[0])
    spec, plain_spec = (variant.noise_spec(params, one) for variant in (client, plain))
    drawn = stack([spec.sample(key.child(row)) for row in range(batch.inputs.shape[0])])
    noise = {name: value.to(batch.inputs.device) for name, value in drawn.items()}
    defended = _sent(client, params, batch, noise)
    clean = _sent(plain, params, batch, {name: noise[name] for name in plain_spec if name in noise})
    pairs = [(part(defended).flatten(1).double(), part(clean).flatten(1).double()) for part in parts]
    all_sent, all_clean = (torch.cat(values, 1) for values in zip(*pairs, strict=True))
    # The common factor a of sent = a clean + error, by least squares over the entries that were sent.
    all_clean = torch.where(all_sent != 0, all_clean, 0.0)
    tiny = torch.finfo(torch.float64).tiny
    scale = ((all_sent * all_clean).sum(1) / all_clean.square().sum(1).clamp_min(tiny)).unsqueeze(1)
    results: list[Disturbance] = []
    for sent, undefended in pairs:
        kept = sent != 0
        count = kept.sum(1).clamp_min(1)
        size = sent.square().sum(1) / count
        missing = torch.where(kept, 0.0, scale * undefended).square().sum(1) / (~kept).sum(1).clamp_min(1)
        added = torch.where(kept, sent - scale * undefended, 0.0).square().sum(1) / count
        # The error of sent entries is absolute, as noise has a size of its own; pruned ones are relative to those sent.
        results.append(Disturbance(added.mean(), (missing / size.clamp_min(tiny)).mean()))
    return results


def _sent(client: Client, params: Tensors, batch: Batch, noise: Tensors) -> Tensors:
    count = batch.inputs.shape[0]
    state = {name: value.expand(count, *value.shape) for name, value in client.init(params).items()}
    sent, _ = client.updates(params, batch, noise, state)
    return {name: value.detach() for name, value in sent.items()}


LARGEST = 4096
"""Largest number of values of an image, the unknowns of one dense system (1 GB at 4,096 while it is solved)."""
_ROUNDS = 15


def prior_problems(shape: tuple[int, ...], examples: int, public: bool) -> Iterator[Problem]:
    """Refuse data for which there is no prior."""
    remedy = "leave out the prior, or choose another attack, such as cdia"
    if not public:
        yield Problem("data", "there are no public images to take a prior from", remedy)
    if examples > 1:
        yield Problem("client.batch", f"a prior is for one image, and an update has {examples}", remedy)
    if prod(shape) > LARGEST:
        yield Problem("data", f"images of {prod(shape)} values are too large for a prior: {LARGEST} at most", remedy)


_PUBLIC, _REHEARSED = 4096, 32
"""Largest number of public images for the prior, and for the simulation of the defence."""


@dataclass(frozen=True)
class Equations:
    """One target client's equations dW = sum_t z_t x_t^T and their uncertainty."""

    z: Tensor
    """[T, D] estimates of the z_t before the defence."""
    noise: Tensor
    """[D, T, T] their covariances for each output."""
    weight: Tensor
    """[D, P] dW as sent."""
    variances: Tensor
    """[D, P] variances of the errors of dW."""

    def misfit(self, x: Tensor) -> Tensor:
        """Return the relative error of the sent entries of dW at x [T, P]."""
        rest = torch.where(self.weight != 0, self.z.T @ x - self.weight, 0.0)
        return rest.norm() / self.weight.norm().clamp_min(torch.finfo(self.weight.dtype).tiny)


def equations(
    layer: InputEquations, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> list[Equations]:
    """Set up every target client's equations, with the errors that the simulated client causes on public images."""
    public = knowledge.public
    assert public is not None, "prior_problems refuses this"
    weight, errors = seen.update[layer.weight].flatten(2), layer.read(seen.update[layer.errors])
    inputs, targets = (value[:_REHEARSED].unsqueeze(1) for value in public)
    batch = Batch(inputs.to(weight), targets.to(weight.device))
    parts = (lambda sent: layer.read(sent[layer.errors]), lambda sent: sent[layer.weight])
    errors_of = disturbances(seen.believed(simulated_client), seen.params, batch, key.child(Stream.DISTURBANCE), parts)
    return [uncertain(z, w, *errors_of) for z, w in zip(errors.double(), weight.double(), strict=True)]


def uncertain(errors: Tensor, weight: Tensor, of_errors: Disturbance, of_weight: Disturbance) -> Equations:
    """Return equations with z_t [T, D] and dW [D, P] and these disturbances."""
    sent, unsent = _variances(weight, of_weight)
    z, noise = _completed(errors, *_variances(errors, of_errors))
    return Equations(z, noise, weight, torch.where(weight != 0, sent, unsent))


def weighed(
    layer: InputEquations, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> tuple[Tensor, Tensor]:
    """Return every target client's likeliest image [V, pixels] and its misfit [V]."""
    public = knowledge.public
    assert public is not None, "prior_problems refuses this"
    like = seen.update[layer.weight]
    images, pixels = images_like(public.inputs[:_PUBLIC].to(like)), layer.pixels.to(like.device)
    clients = equations(layer, seen, simulated_client, knowledge, key)
    solutions = [likeliest(client, pixels, images) for client in clients]
    misfits = [client.misfit(x[pixels]) for client, x in zip(clients, solutions, strict=True)]
    return torch.stack(solutions).to(like), torch.stack(misfits).to(like)


@dataclass(frozen=True)
class Images:
    """A normal law of images: mean [N], covariance and precision [N, N]."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor


def images_like(public: Tensor) -> Images:
    """Fit independent normal cosine coefficients to public images [M, C, H, W]."""
    channels, height, width = public.shape[1:]
    by_coefficient = spectrum(public).variances
    units = torch.eye(height * width, dtype=torch.float64, device=public.device)
    # Column p is the spectrum of pixel p: an orthonormal matrix C, so that the covariance of pixels is C^T diag(v) C.
    basis = cosine(units.view(-1, height, width)).flatten(1).T
    variances = [by_coefficient[channel].flatten().to(basis) for channel in range(channels)]
    return Images(
        public.double().mean(0).flatten(),
        torch.block_diag(*(basis.T @ (v.unsqueeze(1) * basis) for v in variances)),
        torch.block_diag(*(basis.T @ (basis / v.unsqueeze(1)) for v in variances)),
    )


def likeliest(known: Equations, pixels: Tensor, images: Images) -> Tensor:
    """Return the likeliest image [N]; `pixels` [T, P] holds the pixel of each value of x_t."""
    precision, wanted = images.precision.clone(), images.precision @ images.mean
    for place, at in enumerate(pixels.T):
        moments = images.covariance[at][:, at] + torch.outer(images.mean[at], images.mean[at])
        # Of dW_p - sum_t z_t x_tp, with cov(z) for each output: E[(dz . x)^2] = sum_ts cov(z)_ts E[x_tp x_sp], plus
        # that of dW_p.
        variance = (known.noise * moments).sum((1, 2)) + known.variances[:, place]
        shares = known.z / variance
        # Normal equations of weighted least squares: Z V^-1 Z^T and Z V^-1 dW_p are added to the prior's.
        precision[at.unsqueeze(1), at] += shares @ known.z.T
        wanted[at] += shares @ known.weight[:, place]
    # No Cholesky factor: exact equations outweigh the prior so far that rounding may make the matrix indefinite.
    return torch.linalg.solve(precision, wanted)


def _variances(value: Tensor, of: Disturbance) -> tuple[Tensor, Tensor]:
    """Return the variances of a sent and of a pruned entry, at least that of rounding."""
    sent = value[value != 0]
    size = sent.square().mean() if len(sent) else value.new_zeros(())
    # The root of the smallest number is the last resort for an update of zeros: its inverse does not overflow.
    least = (torch.finfo(torch.float32).eps ** 2 * size).clamp_min(torch.finfo(value.dtype).tiny ** 0.5)
    return torch.maximum(of.sent, least), torch.maximum(of.unsent * size, least)


def _completed(errors: Tensor, of_sent: Tensor, of_unsent: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the true z_t [T, D] of every output, and their covariances [D, T, T], by expectation maximisation.

    If all were sent, nothing changes: smoothing would remove more of the z_t than of their noise.
    """
    tokens, outputs = errors.shape
    # A pruned entry is an observation of zero, with the mean square of pruned entries as its variance.
    known = torch.where(errors != 0, 1 / of_sent, 1 / of_unsent).T
    if bool(errors.all()):
        return errors, torch.diag_embed(1 / known)
    law = (errors @ errors.T) / outputs + torch.diag((1 / known).mean(0))
    units = torch.eye(tokens, dtype=errors.dtype, device=errors.device)
    z, covariances = errors, known.new_zeros(outputs, tokens, tokens)
    for _ in range(_ROUNDS):
        # (law^-1 + known)^-1 without inverting the law, which is nearly singular: the errors of patches are similar.
        # E-step, with R = diag(1 / known): gain = law (law + R)^-1.
        gain = torch.linalg.solve(law + torch.diag_embed(1 / known), law.expand(outputs, -1, -1)).mT
        z = (gain @ errors.T.unsqueeze(2)).squeeze(2).T
        rest = units - gain
        # Joseph's form (I - gain) law (I - gain)^T + gain R gain^T stays positive semi-definite under rounding.
        covariances = rest @ law @ rest.mT + (gain / known.unsqueeze(1)) @ gain.mT
        # M-step: the second moment of z, uncertainty included. The law has the mean zero.
        law = (z @ z.T + covariances.sum(0)) / outputs
    return z, covariances
