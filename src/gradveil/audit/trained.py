"""The images that clients trained on: a second ground truth where a batch defence changes the private images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.audit.cell import Address
from gradveil.audit.scene import Scene
from gradveil.core.noise import Key
from gradveil.metrics import identification, match_batch, psnr, ssim

GALLERY = 2048
"""Private images of no target client that join the gallery, at most."""


@dataclass(frozen=True)
class TrainedOn:
    """Scores [V, B] of reconstructions against the images trained on, and yes-or-no answers [V, B] about each."""

    scores: dict[str, Tensor]
    flags: dict[str, Tensor]


def trained_on(scene: Scene, cell: Address, tensors: Mapping[str, Tensor], places: Tensor) -> TrainedOn:
    """Score reconstructions [V, B, C, H, W] against the images that the target clients trained on.

    Each batch is matched one to one by least MSE to the images trained on, whatever its match among the private images.
    `success_transformed`: SSIM above the run's threshold. `identified_transformed`: of all images trained on by the
    target clients, and of up to 2,048 other private images after the same transforms (one draw), the own one is
    nearest in L2. Where an attack undid the transforms, its reconstruction before that is scored.
    """
    view = scene.pixels(tensors["transformed"])
    matched = match_batch(scene.pixels(tensors.get("before_undoing", tensors["inputs"])), view)[1]
    similarity = ssim(matched, view)
    scores = {"psnr_transformed": psnr(matched, view), "ssim_transformed": similarity}
    flags = {"success_transformed": (similarity > scene.config.threshold).long()}
    images = torch.cat([view.flatten(0, 1), _others(scene, cell, places)])
    if len(images) > 1:
        own = torch.arange(places.numel()).view(places.shape)
        flags["identified_transformed"] = identification(matched, own, images).bool()
    return TrainedOn(scores, flags)


def _others(scene: Scene, cell: Address, places: Tensor) -> Tensor:
    """Pass other private images through the client's batch transforms, batch by batch: pixels [N, C, H, W]."""
    client = scene.client(cell.client, cell.defence, cell.seed).member
    size = scene.config.client[cell.client].batch
    own = set(places.flatten().tolist())
    others = [place for place in range(len(scene.victims)) if place not in own]
    batches = torch.tensor(others[: min(len(others), GALLERY) // size * size], dtype=torch.long).view(-1, size)
    key = Key(cell.seed, ("gallery",))
    made: list[Tensor] = []
    for number, batch in enumerate(map(scene.batch, batches)):
        noise = client.batch_spec(batch).sample(key.child(number), batch.inputs.device)
        made.append(client.transformed(batch, noise).inputs)
    return scene.pixels(torch.cat(made)) if made else scene.victims.pixels[:0].double()
