"""Canaries: examples made so that a client's update shows whether they were in it.

A canary is chosen among noise images, small and large, of every class, or among texts of random words: the one that
moves the client's noiseless update furthest, and of those the one with the longest gradient. A clip makes most of them
equally far; without a working clip the longest gradient wins. Nothing here depends on private data but the update of
the other examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.chain import Chain
from gradveil.core.errors import fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Transform
from gradveil.core.user_code import users
from gradveil.defences.guarantees import stages
from gradveil.nn.token_layout import TokenModel
from gradveil.theory.accounting import Unit

CANDIDATES = 24
"""Noise images that are compared, at each of `SCALES`."""
SCALES = (1.0, 30.0)
"""Scales of noise images: the second makes gradients longer than any clip norm."""
_SUFFICIENT = 0.98
"""A candidate that moves the update at least this share of the furthest is as good as the furthest."""


@dataclass(frozen=True)
class World:
    """One side of a test: a client's data, and what of its noise is fixed."""

    batch: Batch
    scale: float = 1.0
    """Factor from what is sent to the sum over examples."""
    left_out: int | None = None
    """Place of an example that Poisson sampling never draws."""

    def fix(self, noise: Tensors) -> Tensors:
        """Return the noise with the left-out example never drawn."""
        if self.left_out is None:
            return noise
        inclusion = noise["inclusion"].clone()
        inclusion[..., self.left_out] = 0
        return noise | {"inclusion": inclusion}

    def clean(self, client: Client) -> Tensor:
        """Compute what the client sends without noise, flat and scaled."""
        return self.scale * flat(self.sent(client))

    def sent(self, client: Client) -> Tensors:
        """Compute what the client sends without noise."""
        params = client.params()
        noise = self.fix(client.noise_spec(params, self.batch).neutral())
        return client.update(params, self.batch, noise, client.init(params))[0]


@dataclass(frozen=True)
class Canary:
    """The two worlds of a test, and the direction in which their updates differ."""

    present: World
    absent: World
    direction: Tensor
    """Difference of the noiseless updates; scores are inner products with it, divided by its squared length."""

    def tensors(self, client: Client) -> Sequence[Tensor]:
        """Return the direction's parts, one for each tensor that is sent."""
        return self.direction.split([value.numel() for value in self.present.sent(client).values()])


def overrides(client: Client) -> bool:
    """Return whether the client's class computes updates by code of its own."""
    return type(client).update is not Client.update or type(client).updates is not Client.updates


def noiseless(client: Client, batch: Batch) -> Client:
    """Return a client that repeats its update where its noise is neutral: this one, or one without its hidden draws.

    Code of the user's own may draw noise that it does not declare. Without its stages, what is left moves in the same
    direction; with them, the difference of two updates would be noise.
    """
    plain = client
    if overrides(client):
        plain = Client(**{each.name: getattr(client, each.name) for each in fields(Client)})
    if _repeats(plain, batch):
        return plain
    kept = tuple(part for part in plain.batch if not users(part))
    plain = replace(plain, batch=kept, step=_declared(plain.step), send=_declared(plain.send))
    if not _repeats(plain, batch):
        remedy = "declare what it draws as named noise (noise_spec), or switch it off"
        raise fail("client", "sends another update each time, without its noise and your own stages", remedy)
    return plain


def _repeats(client: Client, batch: Batch) -> bool:
    one, two = (World(batch).clean(client) for _ in range(2))
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def _declared(slot: Transform | None) -> Transform | None:
    kept = tuple((name, stage) for name, stage in stages(slot) if not users(stage))
    return (Chain(kept) if isinstance(slot, Chain) else kept[0][1]) if kept else None


def flat(update: Mapping[str, Tensor]) -> Tensor:
    """Join the tensors of one update to a vector of doubles."""
    return torch.cat([value.detach().double().flatten() for value in update.values()])


def craft(client: Client, others: Batch, unit: Unit, classes: int, key: Key, *, replaced: bool | None = None) -> Canary:
    """Choose a canary for one unit next to other examples.

    An example is added to the others, or `replaced` by its negative; under Poisson sampling it is there in both worlds,
    and never drawn in one. A client is replaced: all of its examples are one noise image, or another.
    """
    replaced = unit == "client" if replaced is None else replaced
    drawn = candidates(client, others, classes, key)
    found = [_pair(client, others, unit, image, label, replaced) for image, label in drawn]
    directions = [present.clean(client) - absent.clean(client) for present, absent in found]
    lengths = [float(direction.norm()) if direction.isfinite().all() else 0.0 for direction in directions]
    if not max(lengths) > 0:
        raise fail("client", "sends the same update with and without any canary", "check its data and its clip")
    bare = client.undefended_update()
    good = [place for place, length in enumerate(lengths) if length >= _SUFFICIENT * max(lengths)]
    raw = {place: _length(found[place], bare) for place in good}
    best = max(good, key=lambda place: raw[place])
    return Canary(*found[best], directions[best])


def _length(pair: tuple[World, World], bare: Client) -> float:
    length = float((pair[0].clean(bare) - pair[1].clean(bare)).norm())
    return length if length < torch.inf else 0.0


def candidates(client: Client, others: Batch, classes: int, key: Key) -> list[tuple[Tensor, int]]:
    """Draw noise images, or texts of random words, with labels."""
    drawn = noise_inputs(client, others, CANDIDATES, key)
    scales = SCALES if drawn.is_floating_point() else SCALES[:1]
    like = others.inputs
    return [((scale * image).to(like), place % classes) for scale in scales for place, image in enumerate(drawn)]


def noise_inputs(client: Client, others: Batch, count: int, key: Key) -> Tensor:
    """Draw inputs of the others' shape: standard normal numbers, or random words where a model reads token numbers."""
    generator, shape = key.child(Stream.CANDIDATES).generator(), (count, *others.inputs.shape[1:])
    if others.inputs.is_floating_point():
        return torch.randn(shape, generator=generator)
    if not isinstance(client.model, TokenModel):
        what = (
            f"takes {others.inputs.dtype} inputs, and {type(client.model).__name__} names no words to make canaries of"
        )
        raise fail("client", what, "wrap the model in a TokenModel, or audit one that takes floating-point inputs")
    words = len(client.model.layout.word_table(client.params()))
    return torch.randint(words, shape, generator=generator)


def _pair(client: Client, others: Batch, unit: Unit, image: Tensor, label: int, replaced: bool) -> tuple[World, World]:
    targets, count = others.targets, len(others.targets)
    opposite = -image if image.is_floating_point() else image.flip(0)
    if unit == "client":
        one = Batch(image.expand_as(others.inputs).contiguous(), torch.full_like(targets, label))
        other = Batch(opposite.expand_as(others.inputs).contiguous(), torch.full_like(targets, (label + 1) % 2))
        return World(one), World(other)
    more, instead = (
        Batch(torch.cat([others.inputs, one[None]]), torch.cat([targets, targets.new_tensor([of])]))
        for one, of in ((image, label), (opposite, (label + 1) % 2))
    )
    if client.local is not None:
        return World(more), World(more, left_out=count)
    if replaced:
        return World(more, count + 1.0), World(instead, count + 1.0)
    return World(more, count + 1.0), World(others, float(count))


def unsupported(client: Client, unit: Unit) -> Sequence[str]:
    """List what keeps a client from being tested."""
    reasons = list[str]()
    if client.members > 1:
        reasons.append("is a group of clients")
    if unit == "example" and client.local is not None and client.local.sampling != "poisson":
        reasons.append("takes fixed batches, from which no example can be left out")
    return reasons
