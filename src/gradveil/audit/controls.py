"""Controls of a trial: scores that need no leak, as exact averages, and each image's chance under guessing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.guessing import EXACT, Gallery, Guessing, without_copies
from gradveil.audit.scene import Scene
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.metrics import ssim_pairs
from gradveil.metrics.image import finite

OTHERS = 64
"""A reconstruction is compared with at most so many images of other clients, and a target with so many guesses."""


def expected_of(guessing: Guessing | None, scene: Scene, places: Tensor) -> list[list[dict[str, float | int]]]:
    """Compute for each target image [V, B] its chance to be recovered and identified by a guess.

    `public` and `gallery` are the numbers of images behind the two chances: public images that the best guess was
    compared with, private images of the class that it could be taken for (not there where some of these are copies of
    each other, or the guesses of a batch do better elsewhere). `exact` is the chance to be recovered almost exactly.
    Without auxiliary data there is no chance of recovery, without a second private image none of identification.
    """
    targets = scene.victims.targets
    gallery = Gallery(scene.victims.pixels, targets) if len(targets) > 1 else None
    return [_expected(guessing, gallery, labels) for labels in targets[places].tolist()]


def _expected(
    guessing: Guessing | None, gallery: Gallery | None, labels: Sequence[int]
) -> list[dict[str, float | int]]:
    """Compute the chances of the images of one batch."""
    found: list[dict[str, float | int]] = [{} for _ in labels]
    named = gallery.of_batch(labels) if gallery else [None] * len(labels)
    chances = guessing.of_batch(labels) if guessing else [None] * len(labels)
    exactly = guessing.of_batch(labels, exact=True) if guessing and guessing.threshold < EXACT else []
    for record, name, chance in zip(found, named, chances, strict=True):
        record |= name.record() if name else {}
        if chance is None:
            continue
        # The image nearest to a guess is one of its gallery, and one at most of those that the guess passes for.
        nearest = name.share * (1 - (1 - chance.share) ** name.gallery) if name else 1.0
        record |= {"recovered": chance.share, "public": chance.images, "identifiable": min(chance.share, nearest)}
    for record, chance in zip(found, exactly, strict=False):
        record |= {"exact": chance.share, "public_exact": chance.images}
    return found


def best_guesses(guessing: Guessing | None, scene: Scene, places: Tensor) -> dict[str, dict[str, Any]]:
    """Return for each attacked class its best guess, the guess's chance, and the numbers of images that it rests on."""
    if guessing is None:
        return {}
    labels = sorted(set(scene.victims.targets[places].flatten().tolist()))
    chances = {label: guessing.chance(label) for label in labels}
    return {
        str(label): {"guess": chance.guess, "chance": chance.share, **guessing.sample(label)._asdict()}
        for label, chance in chances.items()
    }


def controls_of(guessing: Guessing | None, scene: Scene, matched: Tensor, places: Tensor) -> dict[str, Any]:
    """Score what proves nothing: the right answers for the wrong targets, and answers that need no update at all.

    Exact averages over pairs: of each reconstruction with private images of its class from other clients (of any class
    where there is none; exact copies are one image); of each target with the mean image, the mean of its class, and
    public images of its class.
    `OTHERS` images at most stand for all of a class.
    """
    gallery = scene.victims.pixels
    numbers = without_copies(gallery)
    wrong = list(_mismatched(scene, matched, places, gallery, numbers))
    controls = {"wrong_victim": _average(wrong)} if wrong else {}
    if guessing is None:
        return controls
    by_class: dict[int, list[int]] = {}
    for place in places.flatten().tolist():
        by_class.setdefault(int(scene.victims.targets[place]), []).append(place)
    kinds: dict[str, list[dict[str, Tensor]]] = {"mean_image": [], "class_mean": [], "class_image": []}
    for label, own in by_class.items():
        means = torch.stack([guessing.mean(), guessing.class_mean(label)])
        truth = torch.tensor(own)
        scores = _compared(scene, means, gallery[truth], numbers[truth], _nearest(means, gallery, numbers))
        for number, name in enumerate(("mean_image", "class_mean")):
            kinds[name].append({key: values[number : number + 1] for key, values in scores.items()})
        kinds["class_image"].append(_passing(scene, guessing.images(label)[:OTHERS], gallery[own]))
    return controls | {name: _average(scores) for name, scores in kinds.items()}


def _mismatched(
    scene: Scene, matched: Tensor, places: Tensor, gallery: Tensor, numbers: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Compare each reconstruction with private images that other clients hold; copies of its own client's are none."""
    targets = scene.victims.targets
    count = max(8, min(OTHERS, 20_000 // places.numel()))
    pointed = _nearest(matched.flatten(0, 1), gallery, numbers).view(places.shape)
    for v, own in enumerate(places):
        outside = ~torch.isin(numbers, numbers[own])
        for b, place in enumerate(own.tolist()):
            others = (outside & (targets == targets[place])).nonzero().flatten()
            others = others if len(others) else outside.nonzero().flatten()
            if not len(others):
                return
            key = Key(0, (Stream.CONTROL, Stream.MISMATCH, place))
            chosen = others[torch.randperm(len(others), generator=key.generator())[:count]]
            yield _compared(scene, matched[v, b : b + 1], gallery[chosen], numbers[chosen], pointed[v, b : b + 1])


def _compared(scene: Scene, guesses: Tensor, truth: Tensor, numbers: Tensor, nearest: Tensor) -> dict[str, Tensor]:
    """Score guesses against images of these numbers, and whether they point at them."""
    scores = _passing(scene, guesses, truth)
    identified = nearest[:, None] == numbers
    return scores | {"identified": identified, "identifiable": identified & scores["asr"]}


def _nearest(images: Tensor, gallery: Tensor, numbers: Tensor) -> Tensor:
    """Return the number of the gallery image nearest in L2 to each image [N, C, H, W]; -1 for one that is not finite.

    All copies of an image have its number.
    """
    flat = images.nan_to_num(0, 0, 0).float().flatten(1)
    nearest = torch.cat([torch.cdist(part, gallery.flatten(1)).argmin(1) for part in flat.split(256)])
    return torch.where(finite(images), numbers[nearest], -1)


def _passing(scene: Scene, guesses: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Score guesses against images: SSIM, and whether it is above the threshold; a guess that is not finite fails."""
    usable = finite(guesses)[:, None]
    similarity = torch.where(usable, ssim_pairs(guesses.nan_to_num(0, 0, 0), truth), -1.0)
    return {"asr": similarity > scene.config.threshold, "ssim_mean": similarity}


def _average(scores: list[dict[str, Tensor]]) -> dict[str, float]:
    """Average over targets, each of them over what it was compared with."""
    each = {name: torch.cat([one[name].double().mean(0) for one in scores]) for name in scores[0]}
    return {name: float(values.mean()) for name, values in each.items()}
