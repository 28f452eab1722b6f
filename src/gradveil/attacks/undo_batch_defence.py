"""Undo a batch defence: from the images that a client trained on to its private images.

The transforms of a batch defence are public, only their draws are secret. If an image has few possible draws, each of
them is tried. With T the transforms under one draw and r the reconstruction, the private image is

    argmin_x  ||T(x) - r||^2 / (2 sigma^2) + sum_k (c_k(x) - c_k(mean))^2 / (2 var_k)

over the images x and the draws, c_k the cosine coefficients of x. Mean and variances are those of public images, or of
natural images in general (a spectrum of 1 / f^2) if there are none. The prior restores what T removed, and chooses
between draws that explain r equally well. ATS (Gao et al. 2021) is such a defence: its policy is public.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Annotated

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Infer, Knowledge
from gradveil.attacks.protocol import Reconstruction, Remark
from gradveil.client import BatchDefences, Client
from gradveil.core.distributions import OneOf, Signs
from gradveil.core.noise import Key, Noise
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.theory.reconstruction_bound import cosine, from_cosine, spectrum

DRAWS = 4096
"""Largest number of combined draws of one image."""
SIGMA = 0.03
"""Expected error of a reconstruction, in pixels of [0, 1]."""
Undo = Annotated[bool, "Undo the client's batch defence by its public transforms, after the attack."]
_STEPS, _RATE, _KEPT = 120, 0.1, 4
_VALUES = 2**21
"""Largest number of pixel values that are searched at once."""


def undoing(knowledge: Mapping[str, How]) -> dict[str, How]:
    """Add the knowledge that undoing takes: public images, if there are any, and no draw."""
    return {"public": Infer(), **knowledge, "batch.*": Infer()}


@dataclass(frozen=True)
class Policy:
    """The transforms of a batch defence for one image, under each of the distinct draws."""

    batches: BatchDefences
    knowledge: Knowledge
    draws: tuple[Tensors, ...]
    """Draws of one image, without a leading dimension."""

    def transformed(self, u: Tensor, places: Tensor) -> Tensor:
        """Transform pixels u [N, C, H, W] of [0, 1], each image by the draw with its number in `places` [N]."""
        lower, upper = self.knowledge.space.bounds(u)
        noise = {name: torch.stack([draw[name] for draw in self.draws]).to(u)[places] for name in self.draws[0]}
        labels = torch.zeros(len(u), dtype=torch.long, device=u.device)
        images = self.batches.apply(Batch(lower + (upper - lower) * u, labels), noise).inputs
        return (images - lower) / (upper - lower)


def policy_of(simulated_client: Client, knowledge: Knowledge) -> Policy | None:
    """List the distinct draws of the client's batch defences; None if the defences cannot be undone.

    They cannot be undone if they mix images, or if an image's draws are real numbers or too many to try. The list is
    empty if the images do not change, such as without a batch defence.
    """
    batches = BatchDefences(simulated_client.batch, simulated_client.domain)
    if not batches.transforms:
        return Policy(batches, knowledge, ())
    generator, like = Key(0, (Stream.PROBES,)).generator(), next(iter(simulated_client.params().values()))
    probes = torch.rand((_PROBES, *knowledge.space.shape), generator=generator, dtype=torch.float64)
    blank = Batch(probes[:1].to(like), torch.zeros(1, dtype=torch.long))
    spec = batches.spec(blank)
    values = {name: _values(noise) for name, noise in spec.items()}
    if not 0 < prod(len(possible) for possible in values.values()) <= DRAWS:
        return None
    draws = tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
    policy = Policy(batches, knowledge, draws)
    places = torch.arange(len(draws)).repeat_interleave(_PROBES)
    images = policy.transformed(probes.repeat(len(draws), *[1] * len(knowledge.space.shape)).to(like), places)
    alone = policy.transformed(probes[-1:].to(images), places[-1:])
    if not torch.allclose(alone, images[-1:], atol=1e-6):  # images of one batch are mixed
        return None
    images = images.unflatten(0, (len(draws), _PROBES)).flatten(1)
    distinct = {tuple((row * 1e4).round().int().tolist()): place for place, row in enumerate(images)}
    if torch.allclose(images, probes.flatten().to(images), atol=1e-6):
        return replace(policy, draws=())
    return replace(policy, draws=tuple(draws[place] for place in distinct.values()))


_PROBES = 4


def _values(noise: Noise) -> list[Tensor]:
    """List the values of one image's draw; none if they are too many, or if images share the draw."""
    if noise.shape[:1] != (1,) or len(noise.shape) != 2:
        return []
    if isinstance(noise.law, OneOf):
        return list(torch.eye(noise.shape[1]))
    if isinstance(noise.law, Signs) and 2 ** noise.shape[1] <= DRAWS:
        return [torch.tensor(signs) for signs in product((1.0, -1.0), repeat=noise.shape[1])]
    return []


@dataclass(frozen=True)
class Prior:
    """A normal law of images in pixels of [0, 1] with independent cosine coefficients."""

    mean: Tensor
    spread: Tensor
    """[C, H, W] standard deviations of the coefficients."""

    def image(self, z: Tensor) -> Tensor:
        """Return the images of coefficients z [N, C, H, W] in units of their standard deviations."""
        return self.mean + from_cosine(self.spread * z)

    def coefficients(self, u: Tensor) -> Tensor:
        """Return z for images: the inverse of `image`."""
        return cosine(u - self.mean) / self.spread


def prior_of(knowledge: Knowledge, like: Tensor) -> Prior:
    """Fit the prior to public images, or return that of natural images if there are none.

    The coefficients of rows of a table are their inputs, which are taken as independent.
    """
    u = public_pixels(knowledge, like, _PUBLIC)
    if len(knowledge.space.shape) == 1:
        even = like.new_full(knowledge.space.shape, 0.5)
        return Prior(even, even / 2) if u is None else Prior(u.mean(0), u.std(0))
    if u is not None:
        return Prior(u.mean(0), spectrum(u).variances.sqrt().to(like))
    channels, height, width = knowledge.space.shape
    # Half a step off, so that the mean's coefficient is finite.
    rows, columns = (torch.arange(side, dtype=like.dtype, device=like.device) + 0.5 for side in (height, width))
    law = 1 / (rows[:, None].square() / height**2 + columns.square() / width**2)
    variances = _NATURAL**2 * height * width * law / law.sum()
    return Prior(like.new_full(knowledge.space.shape, 0.5), variances.sqrt().expand(channels, height, width))


def public_pixels(knowledge: Knowledge, like: Tensor, most: int = 256) -> Tensor | None:
    """Return the first public images in pixels of [0, 1]; None if they are too few for statistics."""
    public = knowledge.public
    if public is None or len(public.inputs) < _FEWEST:
        return None
    lower, upper = knowledge.space.bounds(like)
    return (public.inputs[:most].to(like) - lower) / (upper - lower)


_FEWEST, _PUBLIC = 32, 4096
_NATURAL = 0.25
"""Standard deviation of the pixels of natural images."""


def undone(reconstruction: Reconstruction, simulated_client: Client, knowledge: Knowledge) -> Reconstruction:
    """Replace the images that a client trained on by the most likely private images behind them.

    `before_undoing` holds the images before. Nothing changes if no batch defence can be undone.
    """
    began = time.perf_counter()
    policy = policy_of(simulated_client, knowledge)
    if policy is None:
        remark = Remark("the batch defence is not undone: it mixes images, or its draws are too many to try", (1.0,))
        return replace(reconstruction, remarks=(*reconstruction.remarks, remark))
    if not policy.draws:
        return reconstruction
    before = reconstruction.inputs
    lower, upper = knowledge.space.bounds(before)
    r = ((before - lower) / (upper - lower)).flatten(0, 1).clamp(0, 1)
    search = Search(policy, prior_of(knowledge, r), public_pixels(knowledge, r))
    size = max(1, _VALUES // (2 * search.tried * r[0].numel()))
    u = torch.cat([search.likeliest(part) for part in r.split(size)])
    inputs = lower + (upper - lower) * u.view(before.shape)
    seconds = reconstruction.seconds + time.perf_counter() - began
    return replace(reconstruction, inputs=inputs, before_undoing=before, seconds=seconds, trace={})


@dataclass(frozen=True)
class Search:
    """The search for the private images behind reconstructions."""

    policy: Policy
    prior: Prior
    public: Tensor | None
    """[M, C, H, W] public images in pixels of [0, 1]; None if they are too few."""

    @property
    def tried(self) -> int:
        """Number of draws of an image that are tried by descent."""
        return len(self.policy.draws) if self.public is None else min(_KEPT, len(self.policy.draws))

    @cached_property
    def laws(self) -> tuple[Tensor, Tensor]:
        """Means and variances [K, C, H, W] of the public images' cosine coefficients after each draw."""
        images = self.public
        assert images is not None
        draws = (torch.full((len(images),), draw) for draw in range(len(self.policy.draws)))
        coefficients = torch.stack([cosine(self.policy.transformed(images, draw)) for draw in draws])
        # r is a transformed image with an error of its own.
        return coefficients.mean(1), coefficients.var(1) + SIGMA**2

    def candidates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the draws [N, tried] to try. Returns minus the log density of r under each draw, and the draws.

        Without public images every draw is tried with the density zero.
        """
        if self.public is None:
            every = torch.arange(self.tried, device=r.device).expand(len(r), -1)
            return torch.zeros_like(every, dtype=r.dtype), every
        means, variances = self.laws
        rest = (cosine(r).unsqueeze(1) - means).square() / variances + variances.log()
        unlikely, draws = (rest.flatten(2).sum(2) / 2).topk(self.tried, largest=False)
        return unlikely, draws

    def likeliest(self, r: Tensor) -> Tensor:
        """Find the likeliest private images behind images r [N, C, H, W] of pixels in [0, 1].

        Each draw is tried by descent from two starts: the mean image, and r itself, since a transform of the levels may
        have more than one inverse. The chosen draw explains r best: by the fit of r and its likelihood among public
        images after the draw, or without public images by the fit and the likelihood of the image. If that draw does
        not change r, and r is as likely as images are, r is returned: equalised levels do not change when equalised
        again, but the likeliest of all images that become r is nearly grey.
        """
        many, kept = torch.arange(len(r), device=r.device), self.tried
        unlikely, draws = self.candidates(r)
        rows = 2 * kept
        target, places = r.repeat_interleave(rows, 0), draws.flatten().repeat_interleave(2)
        z = self.prior.coefficients(target)
        # Rows alternate: of each draw, first the start at the mean image, then the one at r.
        z[::2] = 0
        z = self.descended(z, target, places)
        with torch.no_grad():
            misfit, size = (value.view(len(r), kept, 2) for value in self.parts(z, target, places))
            start = (misfit + size).argmin(2)
            fit = misfit + size if self.public is None else misfit
            best = (fit.gather(2, start.unsqueeze(2)).squeeze(2) + unlikely).argmin(1)
            chosen = many * rows + 2 * best + start[many, best]
            misfit, size = self.parts(self.prior.coefficients(r), r, places[chosen])
            # Half the number of values is the expected misfit of errors of size SIGMA.
            stays = (misfit < r[0].numel() / 2) & (size < 2 * r[0].numel())
            return torch.where(stays.view(-1, 1, 1, 1), r, self.prior.image(z[chosen]).clamp(0, 1))

    def descended(self, z: Tensor, r: Tensor, places: Tensor) -> Tensor:
        """Minimise misfit and size by Adam."""
        first, second = torch.zeros_like(z), torch.zeros_like(z)
        for step in range(1, _STEPS + 1):
            z = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.stack(self.parts(z, r, places)).sum(), z)
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope.square()
            # Full steps in the first half, which then fall to zero.
            rate = _RATE * min(1.0, 2 * (1 - step / (_STEPS + 1)))
            change = first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
            z = z.detach() - rate * change
        return z

    def parts(self, z: Tensor, r: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms [N] of the minimum: the misfit of T(x) to r, and minus the log density of x."""
        u = self.prior.image(z)
        # Transforms are made for valid pixels: they get the nearest ones, and the distance to these is added.
        outside = (u - u.clamp(0, 1)).square()
        misfit = (self.policy.transformed(u.clamp(0, 1), places) - r).square() + outside
        return misfit.flatten(1).sum(1) / (2 * SIGMA**2), z.square().flatten(1).sum(1) / 2
