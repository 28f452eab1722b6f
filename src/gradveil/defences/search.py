"""The search for policies of ATS: how little a transformed image gives away, and how well it can still be learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, BatchTransform
from gradveil.defences.ats import TRANSFORMS, Ats
from gradveil.defences.batch import bounds

POINTS = 21
"""Images on the way from noise to the transformed image, both ends included."""
LEAST_UTILITY = -85.0
"""Policies below this are hard to learn from, say the authors (of networks and batches like theirs)."""
_JITTER = 1e-5


class Judged(NamedTuple):
    """A policy and its scores: lower `privacy` and higher `utility` are better."""

    policy: str
    privacy: float
    utility: float


def privacy_score(client: Client, defence: BatchTransform, batch: Batch, key: Key) -> Tensor:
    """Compute S_pri of each example: how early an attacker's gradient resembles the one to match (Gao et al. 2021).

    S = integral over t in [0, 1] of sim(g((1 - t) z + t T(x)), g(T(x))), by the trapezoid rule over 21 points: z is
    uniform noise within the bounds, T the transform, g the client's gradient of one example, and sim the mean over the
    parameters of the cosine. An attacker who has far to go before the gradients agree finds no way. The authors compute
    it on a network trained for a few epochs.
    """
    plain, start, goal = _ends(client, defence, batch, key)
    targets = batch.targets.unsqueeze(1)
    wanted = _gradients(plain, Batch(goal.unsqueeze(1), targets))
    similar: list[Tensor] = []
    for step in range(POINTS):
        share = step / (POINTS - 1)
        found = _gradients(plain, Batch(torch.lerp(start, goal, share).unsqueeze(1), targets))
        similar.append(_similarity(found, wanted))
    return torch.trapezoid(torch.stack(similar), dx=1 / (POINTS - 1), dim=0)


def utility_score(client: Client, defence: BatchTransform, batch: Batch, key: Key) -> float:
    """Compute S_acc = -sum_i (ln(v_i + k) + 1 / (v_i + k)), k = 1e-5 (Mellor et al. 2020, as ATS uses it).

    v are the eigenvalues of the correlation matrix of the rows d(sum of outputs)/dx_b over the transformed batch: where
    examples are told apart, the rows are not correlated and the score is high. The authors compute it on an untrained
    network, over batches of 100.
    """
    plain, _, goal = _ends(client, defence, batch, key)
    params, noise = plain.params(), plain.noise_spec(plain.params(), batch).neutral()
    inner = {name.removeprefix("model."): value.to(goal.device) for name, value in noise.items()}
    live = goal.detach().requires_grad_()
    (slope,) = torch.autograd.grad(plain.objective.outputs(params, live, inner).sum(), live)
    rows = slope.flatten(1)
    shifted = _eigenvalues(torch.corrcoef(rows.double())).clamp_min(0) + _JITTER
    return -float((shifted.log() + 1 / shifted).sum())


def judge(
    trained: Client, untrained: Client, policies: Iterable[str], batch: Batch, key: Key, least: float = LEAST_UTILITY
) -> list[Judged]:
    """Score policies on public examples and return those with a utility of at least `least`, the best first.

    `trained` is a client whose model has seen a little training, `untrained` one with initial weights; neither has to
    be defended, and both say what their examples are (`Client.domain`). All policies meet the same draws.
    """
    found: list[Judged] = []
    for policy in policies:
        utility = utility_score(untrained, Ats(policy), batch, key)
        if utility >= least:
            found.append(Judged(policy, float(privacy_score(trained, Ats(policy), batch, key).mean()), utility))
    return sorted(found, key=lambda each: each.privacy)


def random_policies(count: int, key: Key, length: int = 3) -> Iterator[str]:
    """Draw policies of so many of the 50 transforms; the authors judge 1600 of three.

    >>> list(random_policies(2, Key(0))) == list(random_policies(2, Key(0)))
    True
    """
    drawn = torch.randint(len(TRANSFORMS), (count, length), generator=key.generator())
    return ("-".join(str(int(number)) for number in row) for row in drawn)


def _ends(client: Client, defence: BatchTransform, batch: Batch, key: Key) -> tuple[Client, Tensor, Tensor]:
    """Return the client without its defences, uniform noise, and the transformed images."""
    lower, upper = bounds(batch, client.domain, "search")
    like = batch.inputs
    drawn = {name: value.to(like) for name, value in defence.noise(batch).sample(key.child("policy")).items()}
    u = torch.rand(like.shape, generator=key.child("start").generator(), dtype=like.dtype).to(like.device)
    goal = defence.apply(batch, drawn, client.domain).inputs
    return client.undefended_update(), lower + (upper - lower) * u, goal


def _gradients(plain: Client, batch: Batch) -> Tensors:
    """Compute the gradient of each example [N, ...], the model's own noise switched off."""
    params = plain.params()
    off = plain.noise_spec(params, Batch(batch.inputs[0], batch.targets[0])).neutral()
    count, device = len(batch.inputs), batch.inputs.device
    noise = {name: value.to(device).expand(count, *value.shape) for name, value in off.items()}
    with torch.no_grad():
        return plain.updates(params, batch, noise, {})[0]


def _eigenvalues(symmetric: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(symmetric)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _similarity(first: Tensors, second: Tensors) -> Tensor:
    """Return the mean over the parameters of the cosine, for each row."""
    pairs = ((first[name].flatten(1), second[name].flatten(1)) for name in first)
    return torch.stack([torch.cosine_similarity(a, b) for a, b in pairs]).mean(0)
