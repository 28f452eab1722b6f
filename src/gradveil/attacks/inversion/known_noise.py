"""Additive noise: subtract known noise, and weight entries by the variance of unknown noise.

An attacker with the noise as side information could add it to the simulated update. But if the noise is as long as the
gradient, two updates that share it resemble each other for any images. Subtracting it from the observed update avoids
this.

If noise has the same variance everywhere, the squared distance between two updates is a log likelihood. If variances
s_i^2 differ, the log likelihood is sum_i (g_i - sent_i)^2 / s_i^2. The variances may depend on the data
(`optimal-noise`), so they are not granted: the attacker infers them at the reconstruction, now and then. On linear
models this at least halves the error under moderate noise. Under strong noise the reconstruction stays far from the
ground truth, and so do the variances.

Random rounding (`quantise`, `ternary`) has different variances, too: (s/L)^2 f (1 - f) for an entry at the fraction f
between two levels. They are not used as weights: near a level, a wrong reconstruction makes an entry look free of
noise. On a CNN's digits weighting gains nothing, and mostly loses if levels are few (in five of six random streams).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key, Laplace, Noise, Normal
from gradveil.core.tree import Tensors, stack, tmap
from gradveil.core.types import Batch

LEAST = 1e-3
"""Relative difference up to which a contribution counts as independent of the images."""
ROUNDING = 1e-6
"""The same relative to the length of the update, for float32's rounding of the difference of two updates."""


def size(described: Noise) -> float:
    """Return the standard deviation of normal or Laplace noise, and zero for other laws.

    >>> size(Noise((2,), Normal(3.0)))
    3.0
    """
    law = described.law
    return law.std if isinstance(law, Normal) else law.scale * 2**0.5 if isinstance(law, Laplace) else 0.0


def stages(spec: Mapping[str, Noise], params: Mapping[str, Tensor]) -> list[list[str]]:
    """List the names of the additive noise of each stage: normal or Laplace, with name and shape of a parameter."""
    names: dict[str, list[str]] = {}
    for name, described in spec.items():
        for parameter, value in params.items():
            if name.endswith(f".{parameter}") and described.shape == tuple(value.shape) and size(described):
                names.setdefault(name.removesuffix(parameter), []).append(name)
    return list(names.values())


def candidates(shape: tuple[int, ...], bounds: tuple[Tensor, Tensor], classes: int, key: Key) -> tuple[Batch, Batch]:
    """Draw two independent batches of images [V, B, ...], each of one class."""
    lower, upper = bounds

    def of_class(number: int) -> Batch:
        uniform = torch.rand(shape, dtype=lower.dtype, generator=key.child(number).generator())
        targets = torch.full(shape[:2], number % classes, device=lower.device)
        return Batch(lower + (upper - lower) * uniform.to(lower.device), targets)

    return of_class(0), of_class(1)


def added(
    rounds: Sequence[tuple[Client, Tensors]],
    batches: tuple[Batch, Batch],
    noise: Sequence[Mapping[str, Tensor]],
    names: Collection[str],
    state: Tensors,
) -> list[Tensors] | None:
    """Return the contribution of named noise to the update of every round; None if it depends on the images.

    `rounds` are the clients of the rounds and their parameters. The contribution depends on the images if noise enters
    the steps of local training, or if a non-linear stage follows.
    """
    # The noise that is not named stays the same in both runs, and cancels in their difference.
    off = [{n: torch.zeros_like(v) if n in names else v for n, v in drawn.items()} for drawn in noise]
    first, second = (_differences(rounds, batch, noise, off, state) for batch in batches)
    for (one, sent), (other, _) in zip(first, second, strict=True):
        difference = _length({name: one[name] - other[name] for name in one})
        if not bool((difference <= LEAST * _length(one) + ROUNDING * _length(sent)).all()):
            return None
    return [one for one, _ in first]


def _differences(
    rounds: Sequence[tuple[Client, Tensors]],
    batch: Batch,
    noise: Sequence[Mapping[str, Tensor]],
    off: Sequence[Mapping[str, Tensor]],
    state: Tensors,
) -> list[tuple[Tensors, Tensors]]:
    """Return the difference that noise makes to the update of each round, and the update without noise."""
    differences: list[tuple[Tensors, Tensors]] = []
    noisy = quiet = state
    for (client, params), drawn, silent in zip(rounds, noise, off, strict=True):
        sent, noisy = client.updates(params, batch, drawn, noisy)
        without, quiet = client.updates(params, batch, silent, quiet)
        differences.append(({name: sent[name] - without[name] for name in without}, without))
    return differences


def _length(update: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of every target client's update."""
    return torch.stack([value.flatten(1).square().sum(1) for value in update.values()]).sum(0).sqrt()


REFRESH = 50
"""Iterations between two estimates of the noise at the reconstruction."""
LEAST_WEIGHT = 1.0
"""Added to every variance, in units of their mean. It bounds squared weights by two, as a wrong reconstruction makes
some entries look free of noise. With a hundredth of it an attack on a CNN lost 5 dB."""


def deviations(
    simulated_client: Client, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
) -> tuple[Tensors, Tensors]:
    """Compute the standard deviation of every entry of updates of batches [N, B, ...], and the clients' next state.

    Additive noise is normal or Laplace, with the name and the shape of a parameter. It enters linearly, so that one
    standard deviation of it changes an entry by the entry's. The squares of several stages add up.
    """
    one = Batch(batch.inputs[0], batch.targets[0])
    spec = simulated_client.noise_spec(params, one)
    each = [{n: torch.full_like(noise[n], size(spec[n])) for n in stage} for stage in stages(spec, params)]
    off = {**noise, **{name: torch.zeros_like(v) for stage in each for name, v in stage.items()}}
    plain, after = simulated_client.updates(params, batch, off, state)
    total = tmap(torch.zeros_like, plain)
    for stage in each:
        moved, _ = simulated_client.updates(params, batch, {**off, **stage}, state)
        total = {name: value + (moved[name] - plain[name]).square() for name, value in total.items()}
    return tmap(torch.sqrt, total), after


def weights(spread: Mapping[str, Tensor]) -> Tensors:
    """Return sqrt((1 + a) m / (s_i^2 + a m)) of each row's deviations s_i [N, ...], m their mean square, a = `LEAST`.

    They are one if the noise is the same everywhere, or if there is none.

    >>> weights({"w": torch.tensor([[0.2, 0.2]])})["w"]
    tensor([[1., 1.]])
    """
    rows, count = len(next(iter(spread.values()))), sum(value[0].numel() for value in spread.values())
    mean = torch.stack([value.square().reshape(rows, -1).sum(1) for value in spread.values()]).sum(0) / count
    result: Tensors = {}
    for name, value in spread.items():
        m = mean.view(-1, *[1] * (value.dim() - 1))
        result[name] = torch.where(m > 0, (1 + LEAST_WEIGHT) * m / (value.square() + LEAST_WEIGHT * m), 1.0).sqrt()
    return result


class Whitening:
    """The weights of every row and round, estimated again now and then.

    The scale of noise may depend on earlier rounds, through the client's state. An attack's simulation switches scales
    off, so that this class passes the state from round to round itself.
    """

    def __init__(self) -> None:
        """Start without weights."""
        self._weights: dict[tuple[int, int], Tensors] = {}

    def __call__(
        self,
        round_number: int,
        simulated_client: Client,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        state: Tensors,
        rows: Tensor,
        iteration: int,
    ) -> tuple[Tensors, Tensors]:
        """Return the weights [N, ...] of these rows at their reconstructions, and the state for the next round."""
        keys = [(round_number, row) for row in rows.tolist()]
        if iteration % REFRESH == 0:
            with torch.no_grad():
                batch = Batch(*(value.detach() for value in batch))
                noise, state = tmap(torch.detach, noise), tmap(torch.detach, state)
                spread, state = deviations(simulated_client, params, batch, noise, state)
                estimated = weights(spread)
            self._weights |= {key: {n: v[place] for n, v in estimated.items()} for place, key in enumerate(keys)}
        return stack([self._weights[key] for key in keys]), state
