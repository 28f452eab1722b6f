"""The images that clients trained on: a second ground truth where a batch defence changes the private images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.cell import Address
from gradveil.audit.guessing import Gallery, Guessing
from gradveil.audit.scene import Scene
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.types import Batch
from gradveil.data import Dataset
from gradveil.metrics import identification, match_batch, psnr, ssim

GALLERY = 2048
"""Private images of no target client that join the gallery, at most."""
PUBLIC = 4096
"""Public images that the chance of a guess is computed from, at most."""


@dataclass(frozen=True)
class TrainedOn:
    """Scores [V, B] of reconstructions against the images trained on, and yes-or-no answers and chances of each."""

    scores: dict[str, Tensor]
    recovered: Tensor
    identified: Tensor | None
    """None where there is one image only."""
    expected: Sequence[Sequence[dict[str, float | int]]]
    """The chances of an attacker that only guesses, see `audit.controls.expected_of`."""

    def of(self, v: int, b: int) -> dict[str, Any]:
        """Return the record of one image, without its scores."""
        identified = {} if self.identified is None else {"identified_transformed": bool(self.identified[v, b])}
        chances = {"expected_transformed": self.expected[v][b]} if self.expected[v][b] else {}
        return {"success_transformed": int(self.recovered[v, b]), **identified, **chances}


def trained_on(scene: Scene, cell: Address, tensors: Mapping[str, Tensor], places: Tensor) -> TrainedOn:
    """Score reconstructions [V, B, C, H, W] against the images that the target clients trained on.

    Each batch is matched one to one by least MSE to the images trained on, whatever its match among the private images.
    An image is recovered where its SSIM is above the run's threshold. It is identified where the own image is nearest
    in L2 among all images that the target clients trained on, and up to 2,048 other private images after the same
    transforms (one draw). Where an attack undid the transforms, its reconstruction before that is scored.
    """
    view = scene.pixels(tensors["transformed"])
    matched = match_batch(scene.pixels(tensors.get("before_undoing", tensors["inputs"])), view)[1]
    similarity = ssim(matched, view)
    client = scene.client(cell.client, cell.defence, cell.seed).member
    others = _others(scene, cell, places)
    inputs = scene.batch(others).inputs
    gallery = torch.cat([view.flatten(0, 1), scene.pixels(_made(client, inputs, _batch(scene, cell), cell.seed))])
    own = torch.arange(places.numel()).view(places.shape)
    return TrainedOn(
        {"psnr_transformed": psnr(matched, view), "ssim_transformed": similarity},
        similarity > scene.config.threshold,
        identification(matched, own, gallery).bool() if len(gallery) > 1 else None,
        _expected(scene, cell, client, places, others, gallery),
    )


def _batch(scene: Scene, cell: Address) -> int:
    return scene.config.client[cell.client].batch


def _others(scene: Scene, cell: Address, places: Tensor) -> Tensor:
    """List the places of private images that no target client holds, in whole batches."""
    own, size = set(places.flatten().tolist()), _batch(scene, cell)
    others = [place for place in range(len(scene.victims)) if place not in own][:GALLERY]
    return torch.tensor(others[: len(others) // size * size], dtype=torch.long)


def _made(client: Client, inputs: Tensor, size: int, seed: int) -> Tensor:
    """Pass images [N, C, H, W] through the client's batch transforms, batch by batch."""
    key, made = Key(seed, (Stream.GALLERY,)), [inputs[:0]]
    for number, some in enumerate(inputs.split(size) if len(inputs) else ()):  # no images are one empty part
        batch = Batch(some, torch.zeros(len(some), dtype=torch.long, device=some.device))
        noise = client.batch_spec(batch).sample(key.child(number), some.device)
        made.append(client.transformed(batch, noise).inputs)
    return torch.cat(made)


def _expected(
    scene: Scene, cell: Address, client: Client, places: Tensor, others: Tensor, gallery: Tensor
) -> list[list[dict[str, float | int]]]:
    """Compute the chances of a guess for each image trained on.

    Guesses are public images after the same transforms, and their means. Where images are mixed they have no class:
    an image of any class may then be guessed, and is one of all in the gallery.
    """
    mixes, targets = _mixes(client, scene.batch(places[0]).inputs), scene.victims.targets
    targets = torch.zeros_like(targets) if mixes else targets
    guessing = _guessing(scene, cell, client, mixes)
    images = Gallery(gallery, targets[torch.cat([places.flatten(), others])])
    found: list[list[dict[str, float | int]]] = []
    for labels in targets[places].tolist():
        each = [{"identified": one.share} if mixes else one.record() for one in images.of_batch(labels)]
        if guessing is not None:
            for record, chance in zip(each, guessing.of_batch(labels), strict=True):
                record |= {"recovered": chance.share, "public": chance.images}
        found.append(each)
    return found


def _mixes(client: Client, inputs: Tensor) -> bool:
    """Report whether what becomes of an image depends on the others of its batch."""
    batch = Batch(inputs, torch.zeros(len(inputs), dtype=torch.long, device=inputs.device))
    noise = client.batch_spec(batch).sample(Key(0, (Stream.MIXING,)), inputs.device)
    changed = torch.cat([inputs[:1], 1 - inputs[1:]])
    each = (client.transformed(Batch(some, batch.targets), noise).inputs[0] for some in (inputs, changed))
    return not torch.equal(*each)


def _guessing(scene: Scene, cell: Address, client: Client, mixes: bool) -> Guessing | None:
    """Return what guesses reach on images after the transforms: computed once per client and defence."""
    known, plain = scene.guessing_trained, scene.guessing
    if plain is None:
        return None
    where = cell.client, cell.defence
    if where not in known:
        public: Dataset = plain.public.subset(range(min(PUBLIC, len(plain.public))))
        made = _made(client, public.inputs.to(scene.config.device, scene.dtype), _batch(scene, cell), 0)
        targets = torch.zeros_like(public.targets) if mixes else public.targets
        images = replace(public, inputs=made.to("cpu", public.inputs.dtype), targets=targets)
        known[where] = Guessing(images, plain.threshold, plain.classes)
    return known[where]
