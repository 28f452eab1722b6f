"""What a stage does with a client's data and noise, found out by trying it: nothing here goes by a defence's name."""

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

_COPIES = 8


def data_dependent(stage: Transform, client: Client, batch: Batch) -> bool:
    """Find out whether a stage looks at the examples again, beyond the update it is handed.

    It is run on one random update and two batches, and may neither differ nor ask for gradients or features, but for
    those at public examples.
    """
    if stage.directions(batch) and not stage.needs_public:
        return True

    sent = sent_by(client)
    noise = (stage.noise(sent) | stage.directions(batch)).sample(Key(0, (Stream.STAGE,)), batch.inputs.device)
    update = {name: _normal(value, name) for name, value in sent.items()}
    results: list[Tensors] = []
    for own in (batch, Batch(batch.inputs.flip(-1) + 1, torch.zeros_like(batch.targets))):
        context = Context(
            sent, own, gradient=ask, features=ask, sensitivity=ask, public=public_of(client, batch, update)
        )
        try:
            results.append(stage.apply(update, stage.init(sent), noise, context)[0])
        except AskedError:
            return True
    return any(not torch.equal(value, results[1][name]) for name, value in results[0].items())


def mixes(transform: BatchTransform, client: Client, batch: Batch) -> bool:
    """Find out whether an example gets into what a batch transform makes of the others.

    One of many copies of an example is changed, under several draws of the noise.
    """
    rows = torch.zeros(_COPIES, dtype=torch.long, device=batch.inputs.device)
    copies = Batch(batch.inputs[rows], batch.targets[rows])
    changed = Batch(copies.inputs.clone(), copies.targets)
    changed.inputs[0] = copies.inputs[0].flip(-1)
    spec = transform.noise(copies)
    for number in range(_COPIES):
        noise = spec.sample(Key(0, (Stream.COPIES, number)), batch.inputs.device)
        before, after = (transform.apply(own, noise, client.domain) for own in (copies, changed))
        if any(not torch.equal(a[1:], b[1:]) for a, b in zip(before, after, strict=True)):
            return True
    return False


def noise_is_shared(stage: Transform, client: Client, batch: Batch) -> bool:
    """Find out whether two clients, whose noise is drawn with different keys, add the same noise all the same.

    Then it cancels in the difference of their updates, and who knows the seed subtracts it.
    """
    if stage.stage != Stage.NOISE or stage.directions(batch):
        return False

    sent = sent_by(client)
    public, nothing = public_of(client, batch, sent), tmap(torch.zeros_like, sent)
    context = Context(sent, batch, gradient=ask, features=ask, sensitivity=ask, public=public)
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
    """Return the parameters that a client trains and sends, as transforms see them."""
    params = client.params()
    return wide({name: params[name] for name in client.trained()})


def _normal(value: Tensor, name: str) -> Tensor:
    return torch.randn(value.shape, dtype=value.dtype, generator=Key(0, (name,)).generator()).to(value.device)
