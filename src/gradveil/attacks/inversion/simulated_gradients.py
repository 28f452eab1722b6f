"""Pairs of what simulated clients send and of their gradients, and what these say of a defence that nobody describes.

A search compares updates by an angle or a distance. Where a defence adds the same to every update, or makes a few
directions many times as large as the others, these decide alone, and the rest of the gradient counts for nothing.
Whoever can simulate the client sees that, and takes it back before updates are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.chain import Chain
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, norm, stack, tmap
from gradveil.core.types import Batch, Transform
from gradveil.core.user_code import users

_CLIENTS = 16
"""Simulated clients: half as many directions of a parameter can be found to be loud."""
_SAME, _DIFFERENT = 0.1, 0.3
"""Updates have most in common if they differ from their mean by the first share of it at most, and the gradients from
theirs by the second at least."""
_LOUD = 30.0
"""How many times as far a direction stands out of the median one, compared with the gradients, if it is loud."""


def simulated_pairs(client: Client, params: Tensors, examples: int, count: int, key: Key) -> tuple[Tensors, Tensors]:
    """Return what simulated clients send [N, *shape], and what they would without the defence of the update.

    Their images are random; the first are faint, and their gradients short.
    """
    assert client.domain is not None
    space, classes = client.domain.space, client.domain.classes
    like = next(iter(params.values()))
    lower, upper = space.bounds(like)
    generator = key.child(Stream.CANDIDATES).generator()
    drawn = torch.rand((count, examples, *space.shape), dtype=like.dtype, generator=generator).to(like.device)
    contrast = torch.linspace(0.1, 1.0, count, dtype=like.dtype, device=like.device)
    drawn = 0.5 + (drawn - 0.5) * contrast.view(-1, 1, *[1] * len(space.shape))
    labels = torch.randint(classes, (count, examples), generator=generator).to(like.device)
    batch = Batch(lower + (upper - lower) * drawn, labels)
    first = Batch(batch.inputs[0], labels[0])
    spec, bare = client.noise_spec(params, first), client.undefended_update()
    noise = stack([spec.sample(key.child(Stream.CANDIDATES, number), like.device) for number in range(count)])
    state = tmap(lambda value: value.expand(count, *value.shape), client.init(params))
    with torch.no_grad():
        sent, _ = client.updates(params, batch, noise, state)
        gradients, _ = bare.updates(params, batch, {name: noise[name] for name in bare.noise_spec(params, first)}, {})
    return sent, gradients


@dataclass(frozen=True)
class Loudness:
    """What outweighs the gradient in the updates of a client: a part that all have, and directions of parameters."""

    common: Tensors
    """Empty where updates have little in common."""
    directions: dict[str, tuple[Tensor, Tensor]]
    """Parameter -> orthonormal directions [K, N], and the factor [K] that makes each as loud as the others."""

    def quiet(self, update: Tensors) -> Tensors:
        """Take it out of updates [V, *shape]."""
        quiet: Tensors = {}
        for name, value in update.items():
            rest = value - self.common[name] if name in self.common else value
            if name in self.directions:
                directions, factors = self.directions[name]
                flat = rest.flatten(1)
                rest = (flat - ((flat @ directions.T) * (1 - factors)) @ directions).view_as(value)
            quiet[name] = rest
        return quiet


def loudness(client: Client, params: Tensors, examples: int, key: Key) -> Loudness | None:
    """Find out what outweighs the gradient in what this client sends; None where nothing does.

    Only defences of a user's own are asked: in no other does anything (`tests/attacks/test_simulated_gradients.py`).
    """
    if client.domain is None or not any(map(_is_own, (client.step, client.send))):
        return None
    return found_loud(client, params, examples, key)


def _is_own(transform: Transform | None) -> bool:
    """Return whether a stage of a defence is a user's own, or what a stage holds."""
    stages = [stage for _, stage in transform] if isinstance(transform, Chain) else [transform]
    return any(users(getattr(stage, "inner", stage)) for stage in stages if stage is not None)


def found_loud(client: Client, params: Tensors, examples: int, key: Key) -> Loudness | None:
    """Find out what outweighs the gradient in what any client with a domain sends."""
    sent, gradients = simulated_pairs(client, params, examples, _CLIENTS, key)
    middle, usual = (tmap(lambda value: value.mean(0), each) for each in (sent, gradients))
    apart, as_usual = (tmap(torch.sub, each, mean) for each, mean in ((sent, middle), (gradients, usual)))
    close = norm(apart) <= _SAME * _CLIENTS**0.5 * norm(middle)
    varied = norm(as_usual) >= _DIFFERENT * _CLIENTS**0.5 * norm(usual)
    loud = {name: found for name, value in apart.items() if (found := _loud(value, as_usual[name])) is not None}
    common = middle if bool(close & varied) else {}
    return Loudness(common, loud) if common or loud else None


def _loud(apart: Tensor, as_usual: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the directions in which updates [N, *shape] differ far more than gradients do, with their factors."""
    flat, gradients = (each.flatten(1).double() for each in (apart, as_usual))
    half = min(len(flat) - 1, flat.shape[1]) // 2
    if half == 0 or not bool(flat.isfinite().all() and gradients.isfinite().all()):
        return None
    _, spread, directions = torch.linalg.svd(flat, full_matrices=False)
    usual = torch.linalg.svdvals(gradients)
    # How far each direction stands out of the median one, here and in the gradients.
    wanted = usual[:half] / usual[half].clamp_min(1e-30) * spread[half]
    loud = spread[:half] > _LOUD * wanted
    if not bool(loud.any()):
        return None
    directions, factors = directions[:half][loud], (wanted / spread[:half])[loud]
    quiet = flat - ((flat @ directions.T) * (1 - factors)) @ directions
    # Where most updates are equal, as their signs may be, no direction is loud, and nothing would be left of them.
    if _alike(quiet, gradients) <= _alike(flat, gradients):
        return None
    return directions.to(apart), factors.to(apart)


def _alike(first: Tensor, second: Tensor) -> float:
    """Return how alike the rows of two matrices lie to each other: the cosine of their inner products."""
    return float(torch.cosine_similarity((first @ first.T).flatten(), (second @ second.T).flatten(), 0))
