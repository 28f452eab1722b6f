"""The error that no attacker can stay below, for the targets of a run.

Images are taken to be normal with the public images' spectrum (`gradveil.theory.reconstruction_bound`), labels and
the model's noise to be known. Bounds are mean squared errors of pixels in [0, 1], as the scores are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.protocol import Observation
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import Truth, in_round, undefended
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, take
from gradveil.core.types import Batch
from gradveil.defences.fisher_information import UpdateInformation, information, obstacle, settled, sight
from gradveil.theory.gradient_pruning import taylor_bound
from gradveil.theory.input_jacobian import spectral_norms
from gradveil.theory.reconstruction_bound import block_bound, from_cosine, rate_bound, spectrum

_AT_ONCE = 2**22
"""How many numbers of gradients are computed at once for their Jacobian."""
PROBES = 2
"""Random directions in each group of cosine coefficients, for each target client."""


def leaked(
    experiment: Experiment, seed: int, client: Client, seen: Sequence[Observation], truth: Truth
) -> tuple[Tensors, str | None]:
    """Estimate what all rounds tell of every target client, or give the reason why no bound is known.

    `information` [V, G] are the traces tr F_g over groups of cosine coefficients: the mean of v^T F v for v with random
    signs in a group (Hutchinson 1989), not a number where the update jumps. `nats` [V] bound the mutual information.
    """
    first = Batch(truth.raw.inputs[0], truth.raw.targets[0])
    why = obstacle(client, first) if experiment.space.pictured else "there is no prior for other data than images"
    if why is None and (experiment.public is None or len(experiment.public) < 2):
        why = "there are no public images to learn a prior from"
    if why is not None or experiment.public is None:
        return {"information": torch.zeros(0, 0), "nats": torch.zeros(0)}, why
    groups, mean = spectrum(experiment.public.views).groups(), experiment.public.inputs.mean(0).to(first.inputs)
    cuts = [sight(watched.believed(client), first.inputs.shape[0]) for watched in seen]
    cuts = [settled(cut, watched.params, first) for cut, watched in zip(cuts, seen, strict=True)]
    rows: list[UpdateInformation] = []
    for v, number in enumerate(seen[0].target_clients):
        batch = Batch(truth.raw.inputs[v], truth.raw.targets[v])
        probes = _probes(experiment, groups, batch, Key(seed, (Stream.BOUND, number)))
        parts = []
        for r, watched in enumerate(seen):
            names = client.noise_spec(watched.params, batch)
            noise = {name: truth.noise[in_round(r, name)][v] for name in names}
            parts.append(information(cuts[r], watched.params, batch, noise, probes, mean))
        rows.append(reduce(add, parts))
    along = torch.stack([row.along for row in rows]).reshape(len(rows), len(groups), PROBES)
    return {"information": along.mean(2), "nats": torch.stack([row.nats for row in rows])}, None


def mse_bound(experiment: Experiment, told: Mapping[str, Tensor], examples: int) -> dict[str, Any]:
    """Bound the mean squared error by what the target clients' updates tell; `prior` is the error without any update.

    Expectations are averages over the target clients, who stand for draws from the prior. Of both bounds the higher one
    counts; where the update jumps there is only that of mutual information.
    """
    assert experiment.public is not None
    prior = spectrum(experiment.public.views)
    sizes = examples * prior.groups().flatten(1).sum(1).double()
    found = {"mutual information": float(rate_bound(prior.variances, told["nats"].mean() / examples))}
    fisher = told["information"].mean(0)
    if not bool(fisher.isnan().any()):
        found["Cramér-Rao"] = float(block_bound(fisher, examples * prior.information(), sizes))
    best = max(found, key=lambda name: found[name])
    return {"mse": found[best], "by": best, "prior": prior.variance}


def taylor_errors(
    experiment: Experiment, seed: int, client: Client, base: Client, seen: Observation, truth: Truth, left_out: Tensor
) -> Tensor:
    """Return the mean squared error [V] that Proposition 1 of Xue et al. 2024 gives for pruned gradients.

    `left_out` [V] is the distance of what was sent from the gradient. The result is of first order, and for attackers
    whose images have what was sent as their whole gradient: one who reads the mask off the zeros need not obey it. NaN
    where the gradient does not depend on the image.
    """
    plain, noise, state = undefended(client, base, seen.params, truth)
    lower, upper = experiment.space.bounds(truth.raw.inputs)
    pixels = (truth.raw.inputs - lower) / (upper - lower)
    size, found = max(1, _AT_ONCE // sum(value.numel() for value in seen.params.values())), list[Tensor]()
    for begin in range(0, len(left_out), size):
        rows = slice(begin, begin + size)
        targets, drawn, kept = truth.raw.targets[rows], take(noise, rows), take(state, rows)

        def gradients(some: Tensor, fixed: tuple[Tensor, Tensors, Tensors] = (targets, drawn, kept)) -> Tensors:
            batch = Batch(lower + some * (upper - lower), fixed[0])
            return plain.updates(seen.params, batch, fixed[1], fixed[2])[0]

        keys = [Key(seed, (Stream.BOUND, number, Stream.PROBE)) for number in seen.target_clients[rows]]
        start = torch.stack([torch.randn(pixels.shape[1:], generator=key.generator()) for key in keys])
        found.append(spectral_norms(gradients, pixels[rows], start.to(pixels)))
    norms = torch.cat(found)
    squares = taylor_bound(left_out, norms).double().square() / pixels[0].numel()
    return torch.where(norms > 0, squares, torch.nan)


def _probes(experiment: Experiment, groups: Tensor, batch: Batch, key: Key) -> Tensor:
    """Draw directions [G K, B, C, H, W] of the model's inputs, which are (pixel - mean) / std."""
    shape = (len(groups), PROBES, *batch.inputs.shape)
    signs = 2.0 * torch.randint(2, shape, generator=key.generator(), dtype=torch.float64) - 1
    pixels = from_cosine(signs * groups[:, None, None].double())
    lower, upper = experiment.space.bounds(torch.zeros(()))
    return (pixels * (upper - lower).double()).flatten(0, 1).to(batch.inputs)
