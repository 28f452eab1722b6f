"""CMA-ES for all targets at once, without a derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.inversion.optimisers import Project, flat, unflat
from gradveil.core.errors import fail
from gradveil.core.tree import Tensors

_MOST = 4096
"""Largest number of variables: their covariance is 128 MiB per target client, with an eigendecomposition each time."""


class _Law(NamedTuple):
    """The normal law of a generation and its evolution paths, target clients first."""

    mean: Tensor
    path: Tensor
    """Smoothed steps of the mean, in units of the step size."""
    sizes: Tensor
    """The same in coordinates where the law is isotropic; its length grows when steps share a direction."""
    size: Tensor
    """[V, 1] the step size."""
    covariance: Tensor
    axes: Tensor
    spread: Tensor
    """Standard deviations along the axes: covariance = axes diag(spread^2) axes'."""

    def root(self) -> Tensor:
        """Return the covariance's symmetric root [V, D, D]."""
        return (self.axes * self.spread.unsqueeze(1)) @ self.axes.mT


class _Rates:
    """Weights and rates for `size` numbers and a population (Hansen 2016, table 1, positive weights only)."""

    def __init__(self, size: int, population: int) -> None:
        parents = max(1, population // 2)
        # The small number gives a population of one a weight, too.
        raw = [log((population + 1) / 2 + 1e-9) - log(rank) for rank in range(1, parents + 1)]
        self.weights = [weight / sum(raw) for weight in raw]
        # In the paper's symbols: mu_eff, c_sigma, d_sigma, c_c, c_1, c_mu, and the expectation of |N(0, I)|.
        self.mass = 1 / sum(weight**2 for weight in self.weights)
        self.cs = (self.mass + 2) / (size + self.mass + 5)
        self.damping = 1 + 2 * max(0.0, sqrt((self.mass - 1) / (size + 1)) - 1) + self.cs
        self.cc = (4 + self.mass / size) / (size + 4 + 2 * self.mass / size)
        self.c1 = 2 / ((size + 1.3) ** 2 + self.mass)
        self.cm = min(1 - self.c1, 2 * (self.mass - 2 + 1 / self.mass) / ((size + 2) ** 2 + self.mass))
        self.usual = sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))
        """Mean length of a vector of `size` numbers from N(0, 1)."""


@dataclass(frozen=True)
class CMAES:
    """Covariance matrix adaptation (Hansen 2016, "The CMA Evolution Strategy: A Tutorial", figure 6, default settings).

    The rows of a target client are one generation of its population. The first generation is the rows' start: its mean
    is the first mean, and `lr` the first step size.
    """

    lr: float = 1.0
    population: int = 50
    """Rows of one generation; an inversion replaces this by its number of restarts."""

    def init(self, variables: Tensors) -> Tensors:
        """Return the state of each target client's distribution, split over its rows (leading N)."""
        x = self._populations(variables)
        if x.shape[2] > _MOST:
            problem = f"would estimate the covariance of {x.shape[2]} variables; at most {_MOST} are possible"
            fix = "search fewer variables, such as the latent numbers of a generator, and optimise no noise"
            raise fail("attack.descent", problem, fix)
        one = torch.eye(x.shape[2], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        still = torch.zeros_like(x[:, 0])
        return self._deal(_Law(x.mean(1), still, still, torch.full_like(x[:, 0, :1], self.lr), one, one, still + 1))

    def step(
        self,
        variables: Tensors,
        loss: Tensor,
        state: Tensors,
        normal: Callable[[Tensor, int], Tensor],
        rows: Tensor,
        count: int,
        project: Project,
    ) -> tuple[Tensors, Tensors]:
        """Update the law by a generation, and draw the next one from `normal(rows, numbers per row)`, N(0, 1)."""
        x = self._populations(variables)
        law = self._learn(self._gather(state, x.shape[2]), x, loss.view(len(x), -1).to(x.dtype), count)
        z = normal(rows, x.shape[2]).to(x).view_as(x)
        # The symmetric root does not depend on the choice of axes for equal spreads, which rounding decides.
        moved = law.mean.unsqueeze(1) + law.size.unsqueeze(1) * (z @ law.root())
        first = next(iter(variables.values()))
        return unflat(moved.flatten(0, 1).to(first.dtype), variables, project), self._deal(law)

    def _learn(self, law: _Law, x: Tensor, loss: Tensor, count: int) -> _Law:
        """Update mean, paths, covariance and step size from candidates [V, P, D] and their objectives [V, P].

        Candidates without an objective have no weight; a generation without any changes nothing.
        """
        rates = _Rates(x.shape[2], x.shape[1])
        loss = torch.where(loss.isfinite(), loss, torch.inf)
        order = loss.argsort(dim=1, stable=True)[:, : len(rates.weights)]
        counts = loss.gather(1, order).isfinite()
        weights = x.new_tensor(rates.weights) * counts
        total = weights.sum(1, keepdim=True)
        weights = weights / total.clamp_min(1e-300)
        chosen = x.gather(1, order.unsqueeze(2).expand(-1, -1, x.shape[2]))
        y = (chosen - law.mean.unsqueeze(1)) / law.size.unsqueeze(1)
        step = (weights.unsqueeze(2) * y).sum(1)
        # C^-1/2 step = axes diag(1 / spread) axes' step.
        round_step = ((step.unsqueeze(1) @ law.axes / law.spread.unsqueeze(1)) @ law.axes.mT).squeeze(1)
        sizes = (1 - rates.cs) * law.sizes + sqrt(rates.cs * (2 - rates.cs) * rates.mass) * round_step
        length = sizes.norm(dim=1, keepdim=True) / rates.usual
        # The paper's h_sigma: the path of the covariance waits while the step size is still growing fast.
        calm = length / sqrt(1 - (1 - rates.cs) ** (2 * (count + 1))) < 1.4 + 2 / (x.shape[2] + 1)
        path = (1 - rates.cc) * law.path + calm * sqrt(rates.cc * (2 - rates.cc) * rates.mass) * step
        # The last term makes up for the variance that a waiting path does not add.
        decay = 1 - rates.c1 - rates.cm + ~calm * rates.c1 * rates.cc * (2 - rates.cc)
        covariance = (
            decay.unsqueeze(2) * law.covariance
            + rates.c1 * path.unsqueeze(2) * path.unsqueeze(1)
            + rates.cm * (weights.unsqueeze(2) * y).mT @ y
        )
        # eigh reads one triangle only: rounding must not make the two differ.
        covariance = (covariance + covariance.mT) / 2
        values, axes = torch.linalg.eigh(covariance)
        # At most e times as large in one generation.
        size = law.size * torch.exp((rates.cs / rates.damping * (length - 1)).clamp_max(1.0))
        new = _Law(law.mean + law.size * step, path, sizes, size, covariance, axes, values.clamp_min(1e-20).sqrt())
        updated = total > 0
        return _Law(*(torch.where(updated.view(-1, *[1] * (n.ndim - 1)), n, o) for n, o in zip(new, law, strict=True)))

    def _populations(self, variables: Tensors) -> Tensor:
        return flat(variables).double().unflatten(0, (-1, self.population))

    def _deal(self, law: _Law) -> Tensors:
        """Split each target client's law over its rows, so that the state has one entry per row."""
        whole = torch.cat([value.flatten(1) for value in law], 1)
        room = -whole.shape[1] % self.population
        dealt = torch.nn.functional.pad(whole, (0, room)).unflatten(1, (self.population, -1))
        return {"law": dealt.flatten(0, 1)}

    def _gather(self, state: Tensors, size: int) -> _Law:
        """Join each target client's law again."""
        whole = state["law"].unflatten(0, (-1, self.population)).flatten(1)
        sizes = (size, size, size, 1, size * size, size * size, size)
        parts = whole[:, : sum(sizes)].split(sizes, 1)
        return _Law(*(v.unflatten(1, (size, size)) if place in (4, 5) else v for place, v in enumerate(parts)))
