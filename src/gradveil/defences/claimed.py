"""What a user's own additive noise says of itself, held against its draws.

A bound rests on `Additive.variance`, one over the information of an entry's place. No law has less than that of its
draws: for noise z of density f, every function p and every direction,

    1 / information <= E[p(z)^2] / E[p'(z)]^2,    and with p(z) = z at most the variance,

with equality for p = f' / f (Cauchy and Schwarz). So draws refute a claim, and never prove one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from scipy.stats import chi2  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch, Context
from gradveil.defences.noise import Additive
from gradveil.defences.trials import AskedError, ask, data_dependent, public_of, sent_by

_ENTRIES = 1 << 20
"""About how many entries are drawn."""
_DRAWS = (4, 64)
_CHANCE = 1e-9
"""How seldom draws may refute what is true."""
_MANY, _SLACK = 1 << 12, 1.15
"""Entries, and a factor, that other functions than p(z) = z take: their averages are less certain."""


def misstated(stage: Additive, client: Client, batch: Batch) -> str | None:
    """Say what draws refute of the claim that a stage adds independent noise of this variance to every entry."""
    claimed = stage.variance(len(batch.targets))
    if not claimed > 0:
        return None
    try:
        if data_dependent(stage, client, batch):
            return "adds what depends on the examples"
        rows = _added(stage, client, batch, 0.0)
        other = _added(stage, client, batch, claimed**0.5, draws=1)
    except AskedError:
        return "adds what depends on the examples"
    if any(not torch.allclose(value[:1], other[name], atol=1e-3 * claimed**0.5) for name, value in rows.items()):
        return "adds what depends on the update"
    for name, drawn in rows.items():
        most = min((bound for bound in _bounds(drawn.double()) if bound < claimed), default=None)
        if most is not None:
            what = f"its draws of '{name}' allow no more than {most:.3g}"
            return f"says variance({len(batch.targets)}) = {claimed:.3g}, and {what}"
    return None


def _added(stage: Additive, client: Client, batch: Batch, entry: float, draws: int = _DRAWS[1]) -> Tensors:
    """Return what is added to an update of equal entries: at most so many draws [K, *shape] of each parameter."""
    sent = sent_by(client)
    update = {name: torch.full_like(value, entry) for name, value in sent.items()}
    context = Context(sent, batch, gradient=ask, features=ask, sensitivity=ask, public=public_of(client, batch, update))
    spec = stage.noise(sent) | stage.directions(batch)
    count = min(draws, max(_DRAWS[0], _ENTRIES // sum(value.numel() for value in sent.values())))
    rows: list[Tensors] = []
    for draw in range(count):
        noise = spec.sample(Key(0, (Stream.CLAIM, draw)), batch.inputs.device)
        found = stage.apply(update, stage.init(sent), noise, context)[0]
        rows.append(tmap(torch.sub, {name: found[name] for name in update}, update))
    return {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0]}


def _bounds(drawn: Tensor) -> Iterator[float]:
    """Bound one over the information by draws [K, *shape]: of entries, and of what neighbours have in common."""
    yield _variance(drawn)
    for way in range(1, drawn.dim()):
        if drawn.shape[way] > 1:
            first, second = drawn.narrow(way, 0, drawn.shape[way] - 1), drawn.narrow(way, 1, drawn.shape[way] - 1)
            yield _variance((first - second) / 2**0.5)
            yield _variance((first + second) / 2**0.5)
    if drawn.numel() >= _MANY:
        for value, slope in map(_moments(drawn.flatten() - drawn.mean()), _FUNCTIONS):
            yield _SLACK * value / slope**2 if slope else float("inf")


def _variance(drawn: Tensor) -> float:
    """Return the largest variance that draws of these squares leave possible; neighbours may count twice."""
    count = max(2, drawn.numel() // 2)
    return float(drawn.var()) * count / float(chi2.ppf(_CHANCE, count - 1))  # pyright: ignore


Function = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Numbers in units of their median magnitude -> p of them, and its slope."""


def _power(k: int) -> Function:
    return lambda z: (z**k, k * z ** (k - 1))


def _step(width: float) -> Function:
    return lambda z: ((z / width).tanh(), (1 - (z / width).tanh().square()) / width)


_FUNCTIONS: tuple[Function, ...] = (*map(_power, (3, 5, 9, 17)), *map(_step, (0.1, 0.5, 2.0)))


def _moments(centred: Tensor) -> Callable[[Function], tuple[float, float]]:
    size = float(centred.abs().median()) or 1.0

    def of(function: Function) -> tuple[float, float]:
        value, slope = function(centred / size)
        return size**2 * float(value.square().mean()), float(slope.mean())

    return of
