"""Known noise: subtract what side information reveals, and weigh entries by the noise added to them.

An attacker who is told the noise may put the same noise into the simulated update. But once it is as long as the
gradient, two updates that share it look alike whatever the images; taken off the sent update, nothing of it is left.

Noise of the same variance everywhere leaves the distance between two updates a log likelihood. Where the variances
s_i^2 differ, that is sum_i (g_i - sent_i)^2 / s_i^2. They may depend on the data (`optimal-noise`), so they are not
granted: the attacker infers them at the reconstruction, now and then. On linear models that halves the error and more
where noise is moderate; where it is so strong that the candidate stays far from the truth, so do the variances.

What is rounded at random (`quantise`, `ternary`) has different variances, too: (s/L)^2 f (1 - f) for an entry whose
place between two levels is f. They are not weighed by: near a level a wrong candidate calls an entry free of noise. On
a CNN's digits that gains nothing, and mostly loses where levels are few (in five of six random streams).
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
"""Share of its length by which what is added may seem to depend on the images."""
ROUNDING = 1e-6
"""The same, of the length of the update: in float32 the difference of two updates is known no better."""


def size(described: Noise) -> float:
    """Return the standard deviation of normal or Laplacian noise, zero of all other.

    >>> size(Noise((2,), Normal(3.0)))
    3.0
    """
    law = described.law
    return law.std if isinstance(law, Normal) else law.scale * 2**0.5 if isinstance(law, Laplace) else 0.0


def stages(spec: Mapping[str, Noise], params: Mapping[str, Tensor]) -> list[list[str]]:
    """List the names of the additive noise of each stage: normal or Laplacian, named and shaped like a parameter."""
    found: dict[str, list[str]] = {}
    for name, described in spec.items():
        for parameter, value in params.items():
            if name.endswith(f".{parameter}") and described.shape == tuple(value.shape) and size(described):
                found.setdefault(name.removesuffix(parameter), []).append(name)
    return list(found.values())


def candidates(shape: tuple[int, ...], bounds: tuple[Tensor, Tensor], classes: int, key: Key) -> tuple[Batch, Batch]:
    """Draw two batches of images [V, B, ...] that have nothing in common, each of one class."""
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
    """Return what the noise of these names adds to the update of every round; None if that depends on the images.

    `rounds` are the clients of the rounds and their parameters. What noise adds depends on the images where it enters
    the steps of local training, or where what is not linear follows it.
    """
    off = [{n: torch.zeros_like(v) if n in names else v for n, v in drawn.items()} for drawn in noise]
    first, second = (_differences(rounds, batch, noise, off, state) for batch in batches)
    for (one, sent), (other, _) in zip(first, second, strict=True):
        apart = _length({name: one[name] - other[name] for name in one})
        if not bool((apart <= LEAST * _length(one) + ROUNDING * _length(sent)).all()):
            return None
    return [one for one, _ in first]


def _differences(
    rounds: Sequence[tuple[Client, Tensors]],
    batch: Batch,
    noise: Sequence[Mapping[str, Tensor]],
    off: Sequence[Mapping[str, Tensor]],
    state: Tensors,
) -> list[tuple[Tensors, Tensors]]:
    """Return what is sent with minus without the noise, and without it, by the same clients round by round."""
    found: list[tuple[Tensors, Tensors]] = []
    noisy = quiet = state
    for (client, params), drawn, silent in zip(rounds, noise, off, strict=True):
        sent, noisy = client.updates(params, batch, drawn, noisy)
        without, quiet = client.updates(params, batch, silent, quiet)
        found.append(({name: sent[name] - without[name] for name in without}, without))
    return found


def _length(update: Mapping[str, Tensor]) -> Tensor:
    """Return the length of every target client's update."""
    return torch.stack([value.flatten(1).square().sum(1) for value in update.values()]).sum(0).sqrt()


REFRESH = 50
"""Iterations between two looks at what the candidate says of the noise."""
LEAST_WEIGHT = 1.0
"""Added to every variance, in units of their mean, so that no entry that a wrong candidate calls free of noise counts
more than twice as much as all did before. With a hundredth of it an attack on a CNN lost 5 dB."""


def deviations(
    simulated_client: Client, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
) -> tuple[Tensors, Tensors]:
    """Compute the standard deviation of every entry sent by clients with batches [N, B, ...], and their next state.

    The additive noise is what is normal or Laplacian and named and shaped like a parameter. It enters linearly, so one
    standard deviation of it moves an entry by that entry's; noise of several stages adds up in squares.
    """
    one = Batch(batch.inputs[0], batch.targets[0])
    spec = simulated_client.noise_spec(params, one)
    each = [{n: torch.full_like(noise[n], size(spec[n])) for n in own} for own in stages(spec, params)]
    off = {**noise, **{name: torch.zeros_like(v) for own in each for name, v in own.items()}}
    plain, after = simulated_client.updates(params, batch, off, state)
    total = tmap(torch.zeros_like, plain)
    for own in each:
        moved, _ = simulated_client.updates(params, batch, {**off, **own}, state)
        total = {name: value + (moved[name] - plain[name]).square() for name, value in total.items()}
    return tmap(torch.sqrt, total), after


def weights(spread: Mapping[str, Tensor]) -> Tensors:
    """Return sqrt((1 + a) m / (s_i^2 + a m)) of each row's deviations s_i [N, ...], m their mean square, a = `LEAST`.

    One everywhere where the noise is the same everywhere, or where there is none.

    >>> weights({"w": torch.tensor([[0.2, 0.2]])})["w"]
    tensor([[1., 1.]])
    """
    rows, count = len(next(iter(spread.values()))), sum(value[0].numel() for value in spread.values())
    mean = torch.stack([value.square().reshape(rows, -1).sum(1) for value in spread.values()]).sum(0) / count
    found: Tensors = {}
    for name, value in spread.items():
        m = mean.view(-1, *[1] * (value.dim() - 1))
        found[name] = torch.where(m > 0, (1 + LEAST_WEIGHT) * m / (value.square() + LEAST_WEIGHT * m), 1.0).sqrt()
    return found


class Whitening:
    """The weights of every row and round, looked at afresh now and then.

    A scale may come from earlier rounds, through the client's state. Since an attack's own simulation switches scales
    off, the state is followed here whenever the rounds are looked at, one after the other.
    """

    def __init__(self) -> None:
        """Start without having looked."""
        self._found: dict[tuple[int, int], Tensors] = {}

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
        """Return the weights [N, ...] of these rows at their candidates, and the state for a look at the next round."""
        keys = [(round_number, row) for row in rows.tolist()]
        if iteration % REFRESH == 0:
            with torch.no_grad():
                still = Batch(*(value.detach() for value in batch))
                own, state = tmap(torch.detach, noise), tmap(torch.detach, state)
                spread, state = deviations(simulated_client, params, still, own, state)
                found = weights(spread)
            self._found |= {key: {n: v[place] for n, v in found.items()} for place, key in enumerate(keys)}
        return stack([self._found[key] for key in keys]), state
