"""Stand-ins: send what an adaptive optimiser would step by, instead of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import Problem
from gradveil.core.settings import Checked, Positive, Share, unused
from gradveil.core.tree import Tensors, counter, plain, straight_through, tmap, under
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences.entry import DefenceEntry
from gradveil.gradients.fused import in_blocks


@dataclass(frozen=True)
class StandIn(Checked, Transform):
    """Send m / (sqrt(v) + eps), the step of an adaptive optimiser, for the gradient g (Hu et al. 2024, AdaDefense).

    The moments are the client's own state and never leave it: m <- b1 m + (1 - b1) g, and for each optimiser
    adam     v <- b2 v + (1 - b2) g^2                      (Kingma and Ba 2015), m and v divided by 1 - b^t,
    yogi     v <- v - (1 - b2) sign(v - g^2) g^2           (Zaheer et al. 2018), divided likewise, v = 0 at first,
    adagrad  v <- v + g^2, with g in place of m            (Duchi et al. 2011).

    The paper has Adam alone; Yogi and Adagrad are in the authors' program. The paper also has two places for eps:
    Algorithm 1 and Eq. 5 print m / sqrt(v + eps), `eps_in="root"`; Eqs. 12 to 15, and the program, sqrt(v) + eps.
    Of g = 1e-6 in the first round and eps = 1e-8 they send 0.010 and 0.990.

    `variant="published_code"` divides nothing and multiplies by 0.001 sqrt(1 - b2^n) / (1 - b1^n), n = 1, 1, 2, 3, ...,
    as the authors' program does (which also shares one pair of moments among all clients: not repeated here). There
    Adagrad's numerator is m, too.

    In the first round g / (|g| + eps) is the sign of g, and its derivative is zero but for entries as small as eps. An
    attacker who simulates the defence descends along the same formula with eps raised to the layer's mean sqrt(v): in
    the first round that is g / (|g| + mean |g|), in which an entry may turn. The update that they match remains exact.
    """

    optimiser: Annotated[Literal["adam", "adagrad", "yogi"], "Optimiser whose step is sent."] = "adam"
    beta1: Annotated[Share, "Decay of the mean gradient from round to round."] = 0.9
    beta2: Annotated[Share, "Decay of the mean squared gradient from round to round."] = 0.999
    eps: Annotated[Positive, "Number that is added to the denominator."] = 1e-8
    eps_in: Annotated[Literal["sum", "root"], "Where eps is added: sqrt(v) + eps, or sqrt(v + eps)."] = "sum"
    variant: Annotated[
        Literal["paper", "published_code"], "Adam's bias corrections, or the scale of the authors' program."
    ] = "paper"
    label: ClassVar[str] = "standin"
    stage: ClassVar[Stage] = Stage.STANDIN

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse averages for an optimiser that has none."""
        if not self._averages:
            yield from unused("standin", self, ("beta1", "beta2"), "Adagrad averages nothing over the rounds")
        if self.variant == "published_code":
            yield from unused("standin", self, ("eps_in",), "the authors' program adds eps to the root")

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start with zero moments and no round."""
        zero = tmap(torch.zeros_like, params)
        first = under("m", zero) if self._averages else {}
        return {"rounds": counter(params), **first, **under("v", zero)}

    @property
    def _averages(self) -> bool:
        """Whether it sends a quotient of the mean gradient: Adagrad itself takes the last."""
        return self.optimiser != "adagrad" or self.variant == "published_code"

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Move the moments and send their quotient."""
        rounds = state["rounds"] + 1
        scales = self._scales(rounds)

        def moved(*tensors: Tensor) -> tuple[Tensor, ...]:
            return self._moved(scales, *tensors)

        kinds = ("v", "m") if self._averages else ("v",)
        sent: Tensors = {}
        moments: Tensors = {}
        for name, g in update.items():
            names = [f"{kind}.{name}" for kind in kinds]
            sent[name], *after = in_blocks(moved, g, *(state[n] for n in names))
            moments |= zip(names, after, strict=True)
        return sent, {"rounds": rounds, **{n: moments[n] for n in state if n != "rounds"}}

    def _moved(self, scales: tuple[Tensor, Tensor, Tensor], g: Tensor, v: Tensor, *m: Tensor) -> tuple[Tensor, ...]:
        """Return what is sent for entries of the gradient, and their moments: v, and m where there is one."""
        scale, of_m, of_v = (each.to(g.dtype) for each in scales)
        v = self._second(v, g)
        after = [torch.add(self.beta1 * old, g, alpha=1 - self.beta1) for old in m]
        first = after[0] if after else g
        return scale * self._quotient(first / of_m, v / of_v), v, *after

    def _second(self, v: Tensor, g: Tensor) -> Tensor:
        if self.optimiser == "adam":
            return torch.addcmul(self.beta2 * v, g, g, value=1 - self.beta2)
        square = g.square()
        if self.optimiser == "yogi":
            return v - (1 - self.beta2) * torch.sign(v - square) * square
        return v + square

    def _scales(self, rounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factor of what is sent, and what m and v are divided by."""
        one = torch.ones_like(rounds)
        if self.variant == "paper" and self.optimiser == "adagrad":
            return one, one, one
        if self.variant == "paper":
            return one, _correction(self.beta1, rounds), _correction(self.beta2, rounds)
        n = (rounds - 1).clamp_min(1)
        return 1e-3 * _correction(self.beta2, n).sqrt() / _correction(self.beta1, n), one, one

    def _quotient(self, m: Tensor, v: Tensor) -> Tensor:
        """Divide m by sqrt(v) + eps, with the derivative of a larger eps; sqrt has none at zero, so it gets zero."""
        if self.eps_in == "root":
            root = (v + self.eps).sqrt()
            return straight_through(m / root, m / (root + root.detach().mean()))
        if plain(m, v):
            return m / (v.sqrt() + self.eps)
        there = v > 0
        # The inner choice keeps the slope of sqrt(0), which is infinite, out of the derivative; the outer one sets the
        # value.
        root = torch.where(there, torch.where(there, v, torch.ones_like(v)).sqrt(), torch.zeros_like(v))
        width = root.detach().mean() + self.eps
        return straight_through(m / (root + self.eps), m / (root + width))


def _correction(beta: float, n: Tensor) -> Tensor:
    """Return 1 - beta^n; by expm1, since 1 - 0.999 has four digits left in single precision."""
    return -torch.expm1(n * math.log(beta)) if beta else torch.ones_like(n)


STANDIN = (
    DefenceEntry(
        name="standin",
        factory=StandIn,
        stage="standin",
        description="AdaDefense: send the step of an adaptive optimiser, whose moments stay with the client",
        changes=("send",),
        cost="one pass, two copies of the update kept: 1.0 to 1.5 gradients; 44% of the bytes at first, later all",
        citation="Hu et al. 2024, Gradients Stand-in for Defending Deep Leakage in Federated Learning",
    ),
)
