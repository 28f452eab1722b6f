"""Whitened coordinates: entries to which much noise was added count for little, where an attacker can tell.

Noise of the same variance everywhere leaves the distance between two updates a log likelihood. Where the variances
s_i^2 differ, that is sum_i (g_i - sent_i)^2 / s_i^2. They may depend on the data (`optimal-noise`), so nobody is told
them: the attacker infers them at his candidate, now and then. On linear models that halves the error and more where
noise is moderate; where it is so strong that the candidate stays far from the truth, so do the variances.

What is rounded at random (`quantise`, `ternary`) has different variances, too: (s/L)^2 f (1 - f) for an entry whose
place between two levels is f. They are not weighed by: near a level a wrong candidate calls an entry free of noise. On
a CNN's digits that gains nothing, and mostly loses where levels are few (in five of six random streams).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.attacks.added import size, stages
from gradveil.client import Client
from gradveil.core.tree import Tensors, stack, tmap
from gradveil.core.types import Batch

REFRESH = 50
"""Iterations between two looks at what the candidate says of the noise."""
LEAST = 1.0
"""Added to every variance, in units of their mean, so that no entry that a wrong candidate calls free of noise counts
more than twice as much as all did before. With a hundredth of it an attack on a CNN lost 5 dB."""


def deviations(
    belief: Client, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
) -> tuple[Tensors, Tensors]:
    """Compute the standard deviation of every entry sent by clients with batches [N, B, ...], and their next state.

    The additive noise is what is normal or Laplacian and named and shaped like a parameter. It enters linearly, so one
    standard deviation of it moves an entry by that entry's; noise of several stages adds up in squares.
    """
    one = Batch(batch.inputs[0], batch.targets[0])
    spec = belief.noise_spec(params, one)
    each = [{n: torch.full_like(noise[n], size(spec[n])) for n in own} for own in stages(spec, params)]
    off = {**noise, **{name: torch.zeros_like(v) for own in each for name, v in own.items()}}
    plain, after = belief.updates(params, batch, off, state)
    total = tmap(torch.zeros_like, plain)
    for own in each:
        moved, _ = belief.updates(params, batch, {**off, **own}, state)
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
        found[name] = torch.where(m > 0, (1 + LEAST) * m / (value.square() + LEAST * m), 1.0).sqrt()
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
        belief: Client,
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
                spread, state = deviations(belief, params, still, own, state)
                found = weights(spread)
            self._found |= {key: {n: v[place] for n, v in found.items()} for place, key in enumerate(keys)}
        return stack([self._found[key] for key in keys]), state
