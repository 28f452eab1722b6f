"""Properties of a stage found by running it on trial data: data dependence, mixing, shared noise.

The trial uses made-up examples and parameters with the client's shapes. The client's own data would not do: a blank
image hides the effect of a stage, and a refusal must not depend on private data.
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
    """Return whether a stage uses the examples in addition to the update.

    The stage runs on one random update with batches that differ in every entry. It is data-dependent if its results
    differ, or if it asks for gradients or features of other than public examples.
    """
    if stage.directions(batch) and not stage.needs_public:
        return True

    sent = sent_by(client)
    noise = (stage.noise(sent) | stage.directions(batch)).sample(Key(0, (Stream.STAGE,)), batch.inputs.device)
    update = {name: _normal(value, name) for name, value in sent.items()}
    results: list[Tensors] = []
    for other in _different(batch):
        context = asking(sent, other, public_of(client, batch, update))
        try:
            results.append(stage.apply(update, stage.init(sent), noise, context)[0])
        except AskedError:
            return True
    return any(not torch.equal(value, other[name]) for other in results[1:] for name, value in results[0].items())


def _different(batch: Batch) -> list[Batch]:
    """Make up batches of this shape that differ in every entry and in their classes."""
    rows = torch.arange(len(batch.inputs), device=batch.inputs.device) % _COPIES  # a few examples, again and again
    few = {name: pair(value[:_COPIES], name) for name, value in batch._asdict().items()}
    (one, other), targets = ([value[rows] for value in few[name]] for name in ("inputs", "targets"))
    if not batch.targets.dtype.is_floating_point:
        targets = [torch.zeros_like(batch.targets), torch.ones_like(batch.targets), targets[0]]
    return [Batch(one, targets[0]), *(Batch(other, labels) for labels in targets[1:])]


def mixes(transform: BatchTransform, client: Client, batch: Batch) -> bool:
    """Return whether a batch transform lets one example influence the results of others.

    One of many copies of an example is changed, under several draws of the noise.
    """
    inputs, targets = (pair(value[:1], name) for name, value in batch._asdict().items())
    copies = Batch(*(torch.cat([one] * _COPIES) for one, _ in (inputs, targets)))
    changed = [
        Batch(torch.cat([inputs[1], copies.inputs[1:]]), labels)
        for labels in (copies.targets, torch.cat([targets[1], copies.targets[1:]]))
    ]
    spec = transform.noise(copies)
    for number in range(_COPIES):
        noise = spec.sample(Key(0, (Stream.COPIES, number)), batch.inputs.device)
        before, *after = (transform.apply(each, noise, client.domain) for each in (copies, *changed))
        if any(not torch.equal(a[1:], b[1:]) for each in after for a, b in zip(before, each, strict=True)):
            return True
    return False


def noise_is_shared(stage: Transform, client: Client, batch: Batch) -> bool:
    """Return whether two clients with different keys add the same noise.

    Such noise cancels in the difference of their updates, and anyone who knows the seed can subtract it.
    """
    if stage.stage != Stage.NOISE or stage.directions(batch):
        return False

    sent = sent_by(client)
    public, nothing = public_of(client, batch, sent), tmap(torch.zeros_like, sent)
    context = asking(sent, _different(batch)[0], public)
    try:
        keys, device = [Key(0, (Stream.CLIENT, number)) for number in range(2)], batch.inputs.device
        added = [
            stage.apply(nothing, stage.init(sent), stage.noise(sent).sample(key, device), context)[0] for key in keys
        ]
    except AskedError:
        return False  # The stage computes its noise from the examples.
    same = all(torch.equal(value, added[1][name]) for name, value in added[0].items())
    return same and any(bool(value.any()) for value in added[0].values())


def public_of(client: Client, batch: Batch, like: Mapping[str, Tensor]) -> Public | None:
    """Make up public gradients that depend on the examples they are computed from."""

    def gradient(examples: Batch) -> Tensors:
        return {name: value * examples.inputs.square().sum() for name, value in like.items()}

    return Public(client.domain, gradient, len(batch.inputs)) if client.domain else None


class AskedError(Exception):
    """A stage asks for gradients or features of the examples."""


def ask(*asked: object) -> NoReturn:
    """Stand in for gradients and features of private examples."""
    raise AskedError


def asking(sent: Mapping[str, Tensor], batch: Batch, public: Public | None) -> Context:
    """Return a context that raises `AskedError` if a stage computes with the examples."""
    return Context(sent, batch, gradient=ask, features=ask, sensitivity=ask, loss=ask, predict=ask, public=public)


def sent_by(client: Client) -> Mapping[str, Tensor]:
    """Make up the parameters that a client trains and sends, in the dtype that transforms get."""
    params = client.params()
    return wide(parameters({name: params[name] for name in client.trained()}))


def _normal(value: Tensor, name: str) -> Tensor:
    return torch.randn(value.shape, dtype=value.dtype, generator=Key(0, (name,)).generator()).to(value.device)
