"""Server aggregation: client weights, the mean update and an optimiser's step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import Problem
from gradveil.core.settings import Checked, Positive, Share
from gradveil.core.tree import Tensors, norm, select, tmap, under

Weights = Literal["examples", "uniform", "angles"]
"""Weighting of the clients in the mean."""
Optimiser = Literal["sgd", "adam", "yogi", "adagrad"]
"""Optimiser of the server."""
_STEEP = 5.0
"""FedAdp's alpha."""


@dataclass(frozen=True)
class Server(Checked):
    """Server optimiser: moves the global parameters by the weighted mean D of the received updates.

    `sgd`: v <- momentum v + D, p <- p - lr v; with lr = 1 and no momentum this is FedAvg. `adam`, `yogi`, `adagrad`
    (Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2): m <- b1 m + (1 - b1) D and p <- p - lr m /
    (sqrt(v) + tau), where v starts at tau^2 and becomes b2 v + (1 - b2) D^2, or v - (1 - b2) D^2 sign(v - D^2), or
    v + D^2. With `corrected`, Adam has the bias corrections of Kingma and Ba 2015: v starts at zero, and m and v are
    divided by 1 - b^t in round t. Without them the first rounds move several times as far.

    `weights="angles"` gives more weight to clients whose updates point in the direction of the mean (Wu and Wang 2021,
    Fast-Convergent Federated Learning with Adaptive Weighting).
    """

    optimiser: Annotated[Optimiser, "Optimiser that moves the parameters by the mean update."] = "sgd"
    lr: Annotated[Positive, "Step size."] = 1.0
    momentum: Annotated[Share, "Momentum of SGD."] = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    tau: Annotated[Positive, "Number that is added to the root of the second moments."] = 1e-3
    weights: Annotated[Weights, "Weights of the clients in the mean."] = "examples"
    corrected: Annotated[bool, "Correct Adam's moments for their start at zero."] = False
    label: ClassVar[str] = "server"

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse betas outside [0, 1), and momentum for other optimisers than SGD."""
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Problem("server.betas", f"is {self.betas}", "give two numbers in [0, 1)")
        if self.momentum and self.optimiser != "sgd":
            remedy = f"leave it out: beta1, the first of betas, is the momentum of {self.optimiser}"
            yield Problem("server.momentum", f"has no effect with '{self.optimiser}'", remedy)
        if self.corrected and self.optimiser != "adam":
            yield Problem("server.corrected", f"has no effect with '{self.optimiser}'", "leave it out: it is Adam's")

    def init(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the state before the first round, for parameters of these shapes."""
        if self.optimiser == "sgd":
            return under("m", tmap(torch.zeros_like, sent)) if self.momentum else {}
        zero = tmap(torch.zeros_like, sent)
        if self.corrected:
            return {**under("m", zero), **under("v", zero), "rounds": torch.zeros((), dtype=torch.float64)}
        return under("m", zero) | under("v", tmap(lambda p: torch.full_like(p, self.tau**2), sent))

    def mean(
        self, updates: Mapping[int, Tensors], examples: Mapping[int, int], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Average the updates of these clients; return the mean with the next state."""
        counts = {client: float(examples[client]) if self.weights != "uniform" else 1.0 for client in updates}
        mean = _weighted(updates, counts)
        if self.weights != "angles":
            return mean, state
        after, gains = dict(state), dict[int, float]()
        for client, update in updates.items():
            angle, count = _angle(update, mean), float(state.get(f"seen.{client}", torch.zeros(()))) + 1
            smooth = angle if count == 1 else ((count - 1) * float(state[f"angle.{client}"]) + angle) / count
            after[f"angle.{client}"] = torch.tensor(smooth, dtype=torch.float64)
            after[f"seen.{client}"] = torch.tensor(count, dtype=torch.float64)
            # FedAdp: the weight e^f of the angle theta with f = alpha (1 - e^(-e^(-alpha (theta - 1)))), a Gompertz
            # function that falls from alpha to 0.
            gains[client] = math.exp(_STEEP * (1 - math.exp(-math.exp(-_STEEP * (smooth - 1)))))
        return _weighted(updates, {client: counts[client] * gains[client] for client in updates}), after

    def step(self, params: Tensors, mean: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Move the parameters by one step; return them with the next state."""
        first, second = select(state, "m"), select(state, "v")
        if self.optimiser == "sgd":
            first = tmap(lambda v, d: self.momentum * v + d, first, mean) if self.momentum else {}
            move = first or mean
        else:
            b1, b2 = self.betas
            first = tmap(lambda m, d: b1 * m + (1 - b1) * d, first, mean)
            if self.optimiser == "adam":
                second = tmap(lambda v, d: b2 * v + (1 - b2) * d * d, second, mean)
            elif self.optimiser == "yogi":
                second = tmap(lambda v, d: v - (1 - b2) * d * d * torch.sign(v - d * d), second, mean)
            else:
                second = tmap(lambda v, d: v + d * d, second, mean)
            of_m = of_v = 1.0
            if self.corrected:
                state = {**state, "rounds": state["rounds"] + 1}
                of_m, of_v = (1 - beta ** float(state["rounds"]) for beta in self.betas)
            move = tmap(lambda m, v: m / of_m / ((v / of_v).sqrt() + self.tau), first, second)
        moved = {name: value - self.lr * move[name] if name in move else value for name, value in params.items()}
        return moved, state | under("m", first) | under("v", second)


def _weighted(updates: Mapping[int, Tensors], weights: Mapping[int, float]) -> Tensors:
    total = sum(weights.values())
    out: Tensors = {}
    for client, update in updates.items():
        share = weights[client] / total
        out = {name: value * share + out[name] if out else value * share for name, value in update.items()}
    return out


def _angle(update: Tensors, mean: Tensors) -> float:
    """Return the angle between an update and the mean; a right angle if one of them is zero."""
    lengths = float(norm(update) * norm(mean))
    product = float(sum((value * mean[name]).sum() for name, value in update.items()))
    return math.acos(max(-1.0, min(1.0, product / lengths))) if lengths else math.pi / 2
