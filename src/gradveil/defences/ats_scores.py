"""Scores of ATS policies: how little a transformed image reveals, and how well it can still be learned from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.errors import fail
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, BatchTransform, Domain
from gradveil.defences.ats import TRANSFORMS, Ats
from gradveil.defences.batch_defences import bounds

POINTS = 21
"""Images on the way from noise to the transformed image, both ends included."""
BATCH = 64
"""About how many images the authors' batches for the utility hold: 100 of CIFAR-100, of each class only the first."""
LEAST_UTILITY = -85.0
"""Policies below this are hard to learn from, say the authors (of networks and batches like theirs)."""
JITTER = 1e-5
"""What is added to the eigenvalues of the utility score."""
_ROWS, _ENTRIES = 192, 1 << 25
"""Gradients, and entries of them, that are computed at once."""


class Unchanged(BatchTransform):
    """Leave the images as they are: what every policy is compared with."""

    def noise(self, batch: Batch) -> NoiseSpec:
        """Draw nothing."""
        return NoiseSpec()

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Return the batch."""
        return batch


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
    params = sum(value.numel() for value in plain.params().values())
    most = max(1, min(_ROWS, _ENTRIES // params))
    # Results do not depend on the other images of a group; a large network's gradients would not fit in memory at once.
    group = max(1, most // POINTS)
    some = max(1, most // group)
    shares = torch.linspace(0, 1, POINTS, dtype=goal.dtype, device=goal.device)
    areas: list[Tensor] = []
    for i in range(0, len(goal), group):
        first, last, targets = (value[i : i + group] for value in (start, goal, batch.targets))
        wanted = _gradients(plain, Batch(last.unsqueeze(1), targets.unsqueeze(1)))
        parts = (_between(first, last, targets, shares[j : j + some]) for j in range(0, POINTS, some))
        similar = torch.cat([_similarity(_gradients(plain, part), wanted) for part in parts])
        areas.append(torch.trapezoid(similar, dx=1 / (POINTS - 1), dim=0))
    return torch.cat(areas)


def _between(first: Tensor, last: Tensor, targets: Tensor, shares: Tensor) -> Batch:
    """Return the images at these shares of the way, each a batch of its own: all of the first share, then the next."""
    images = torch.lerp(first, last, shares.view(-1, 1, 1, 1, 1))
    return Batch(images.flatten(0, 1).unsqueeze(1), torch.cat([targets] * len(shares)).unsqueeze(1))


def utility_score(client: Client, defence: BatchTransform, batch: Batch, key: Key) -> float:
    """Compute S_acc = -sum_i (ln(v_i + k) + 1 / (v_i + k)), k = 1e-5 (Mellor et al. 2020, as ATS uses it).

    v are the eigenvalues of the correlation matrix of the rows d(sum of outputs)/dx_b over the transformed batch: where
    examples are told apart, the rows are not correlated and the score is high. They add up to the number of images N,
    so the score is at most -N; it is -inf where there is no correlation to speak of (a row that does not vary). The
    authors compute it on an untrained network, over batches of 100 of which each class counts once.
    """
    plain, _, goal = _ends(client, defence, batch, key)
    params, noise = plain.params(), plain.noise_spec(plain.params(), batch).neutral()
    inner = {name.removeprefix("model."): value.to(goal.device) for name, value in noise.items()}
    live = goal.detach().requires_grad_()
    (slope,) = torch.autograd.grad(plain.objective.outputs(params, live, inner).sum(), live)
    rows = slope.flatten(1)
    correlations = torch.corrcoef(rows.cpu().double())
    if not correlations.isfinite().all():
        return -math.inf
    shifted = _eigenvalues(correlations).clamp_min(0) + JITTER
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
    """Draw policies of so many of the 50 transforms, no two of which do the same; the authors judge 1600 of three.

    The first ones are the same however many are asked for.

    >>> list(random_policies(2, Key(0))) == list(random_policies(3, Key(0)))[:2]
    True
    """
    possible = distinct_policies(length)
    if count > possible:
        raise fail("count", f"is {count}, and {possible} policies of {length} transforms differ", "ask for fewer")
    generator, seen = key.generator(), set[tuple[object, ...]]()
    while len(seen) < count:
        drawn = [int(number) for number in torch.randint(len(TRANSFORMS), (length,), generator=generator)]
        does = tuple(_does(number) for number in drawn)
        if does not in seen:
            seen.add(does)
            yield "-".join(map(str, drawn))


def distinct_policies(length: int) -> int:
    """Count the policies of this length that differ in what they do: several of the 50 transforms do the same.

    >>> distinct_policies(1)
    29
    """
    return len({_does(number) for number in range(len(TRANSFORMS))}) ** length


def _does(number: int) -> object:
    kind, level = TRANSFORMS[number]
    return kind, kind.at(level)


def _ends(client: Client, defence: BatchTransform, batch: Batch, key: Key) -> tuple[Client, Tensor, Tensor]:
    """Return the client without its defences, uniform noise, and the transformed images."""
    lower, upper = bounds(batch, client.domain, "search")
    like = batch.inputs
    drawn = {name: value.to(like) for name, value in defence.noise(batch).sample(key.child(Stream.POLICY)).items()}
    u = torch.rand(like.shape, generator=key.child(Stream.START).generator(), dtype=like.dtype).to(like.device)
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
    """Return the mean over the parameters of the cosine [shares, images] of rows that go through the images in turn."""
    images = len(next(iter(second.values())))
    pairs = ((first[name].reshape(-1, images, second[name][0].numel()), second[name].flatten(1)) for name in second)
    return torch.stack([torch.cosine_similarity(a, b, dim=-1) for a, b in pairs]).mean(0)
