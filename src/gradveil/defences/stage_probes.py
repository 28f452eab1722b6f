"""Facts of a stage found by running it on trial data: data-dependent noise, mixing, shared noise.

It is tried on made-up examples and parameters. Of the client's own only the shapes count: a blank image hides what is
done to it, and what is refused for what was found must not tell of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap, wide
from gradveil.core.types import Batch, BatchTransform, Context, Public, Stage, Transform
from gradveil.gradients.made_up import pair, parameters

_COPIES = 8


def data_dependent(stage: Transform, client: Client, batch: Batch) -> bool:
    """Find out whether a stage looks at the examples again, beyond the update it is handed.

    It is run on one random update and on batches that have nothing in common, and may neither differ nor ask for
    gradients or features, but for those at public examples.
    """
    if stage.directions(batch) and not stage.needs_public:
        return True

    sent = sent_by(client)
    noise = (stage.noise(sent) | stage.directions(batch)).sample(Key(0, (Stream.STAGE,)), batch.inputs.device)
    update = {name: _normal(value, name) for name, value in sent.items()}
    results: list[Tensors] = []
    for own in _apart(batch):
        context = Context(
            sent, own, gradient=ask, features=ask, sensitivity=ask, public=public_of(client, batch, update)
        )
        try:
            results.append(stage.apply(update, stage.init(sent), noise, context)[0])
        except AskedError:
            return True
    return any(not torch.equal(value, other[name]) for other in results[1:] for name, value in results[0].items())


def _apart(batch: Batch) -> list[Batch]:
    """Make up batches of this shape that differ in every entry, and in the classes that there are."""
    rows = torch.arange(len(batch.inputs), device=batch.inputs.device) % _COPIES  # a few examples, again and again
    few = {name: pair(value[:_COPIES], name) for name, value in batch._asdict().items()}
    (one, other), targets = ([value[rows] for value in few[name]] for name in ("inputs", "targets"))
    if not batch.targets.dtype.is_floating_point:
        targets = [torch.zeros_like(batch.targets), torch.ones_like(batch.targets), targets[0]]
    return [Batch(one, targets[0]), *(Batch(other, own) for own in targets[1:])]


def mixes(transform: BatchTransform, client: Client, batch: Batch) -> bool:
    """Find out whether an example gets into what a batch transform makes of the others.

    One of many copies of an example is changed, under several draws of the noise.
    """
    inputs, targets = (pair(value[:1], name) for name, value in batch._asdict().items())
    copies = Batch(*(torch.cat([one] * _COPIES) for one, _ in (inputs, targets)))
    changed = [
        Batch(_first(copies.inputs, inputs[1]), own) for own in (copies.targets, _first(copies.targets, targets[1]))
    ]
    spec = transform.noise(copies)
    for number in range(_COPIES):
        noise = spec.sample(Key(0, (Stream.COPIES, number)), batch.inputs.device)
        before, *after = (transform.apply(own, noise, client.domain) for own in (copies, *changed))
        if any(not torch.equal(a[1:], b[1:]) for own in after for a, b in zip(before, own, strict=True)):
            return True
    return False


def _first(copies: Tensor, other: Tensor) -> Tensor:
    """Put another one in the place of the first of many copies."""
    return torch.cat([other, copies[1:]])


def noise_is_shared(stage: Transform, client: Client, batch: Batch) -> bool:
    """Find out whether two clients, whose noise is drawn with different keys, add the same noise all the same.

    Then it cancels in the difference of their updates, and who knows the seed subtracts it.
    """
    if stage.stage != Stage.NOISE or stage.directions(batch):
        return False

    sent = sent_by(client)
    public, nothing = public_of(client, batch, sent), tmap(torch.zeros_like, sent)
    own = _apart(batch)[0]
    context = Context(sent, own, gradient=ask, features=ask, sensitivity=ask, public=public)
    try:
        keys, device = [Key(0, (Stream.CLIENT, number)) for number in range(2)], batch.inputs.device
        added = [
            stage.apply(nothing, stage.init(sent), stage.noise(sent).sample(key, device), context)[0] for key in keys
        ]
    except AskedError:
        return False  # It adds what it makes of the examples.
    same = all(torch.equal(value, added[1][name]) for name, value in added[0].items())
    return same and any(bool(value.any()) for value in added[0].values())


def public_of(client: Client, batch: Batch, like: Mapping[str, Tensor]) -> Public | None:
    """Stand in for what everybody can compute: gradients that depend on the examples they are asked for."""

    def gradient(examples: Batch) -> Tensors:
        return {name: value * examples.inputs.square().sum() for name, value in like.items()}

    return Public(client.domain, gradient, len(batch.inputs)) if client.domain else None


class AskedError(Exception):
    """A stage asks for gradients or features of the examples."""


def ask(*asked: object) -> NoReturn:
    """Stand in for the gradients and features that only a client has."""
    raise AskedError


def sent_by(client: Client) -> Mapping[str, Tensor]:
    """Make up the parameters that a client trains and sends, as transforms see them."""
    params = client.params()
    return wide(parameters({name: params[name] for name in client.trained()}))


def _normal(value: Tensor, name: str) -> Tensor:
    return torch.randn(value.shape, dtype=value.dtype, generator=Key(0, (name,)).generator()).to(value.device)
