"""Does the reconstruction point at the right image? What a privacy officer asks, answered without any weights."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.errors import fail
from gradveil.metrics.image import finite, precise


def identification(candidate: Tensor, truth_index: Tensor, gallery: Tensor) -> Tensor:
    """Say whether the nearest image of the client's whole data set is the victim: 1 or 0, shape [...].

    `candidate` is [..., C, H, W], `truth_index` [...] is the victim's place in `gallery` [G, C, H, W]. Nearest in l2;
    an exact copy of the victim in the gallery counts as the victim. One guess succeeds with probability 1 / G at a
    gallery without copies, and with the share of the image that has the most copies otherwise.
    """
    return (rank(candidate, truth_index, gallery) == 0).to(torch.get_default_dtype())


def rank(candidate: Tensor, truth_index: Tensor, gallery: Tensor) -> Tensor:
    """Count the gallery images that are nearer to the candidate than the victim: 0 identifies it, int64 [...].

    A candidate that is not finite is ranked last, G - 1 (and never identifies, not even in a gallery of one: then 1).
    """
    if candidate.shape[-3:] != gallery.shape[1:] or candidate.shape[:-3] != truth_index.shape:
        shapes = [tuple(part.shape) for part in (candidate, truth_index, gallery)]
        what = f"candidate, truth_index and gallery are {shapes}"
        raise fail("identification", what, "give [..., C, H, W], [...] and [G, C, H, W]")
    if truth_index.numel() and not (int(truth_index.min()) >= 0 and int(truth_index.max()) < len(gallery)):
        raise fail("truth_index", f"is outside 0 to {len(gallery) - 1}", "give the victim's place in the gallery")
    usable = finite(candidate)
    images, all_images = precise(candidate).flatten(-3).reshape(-1, gallery[0].numel()), precise(gallery).flatten(1)
    # The exact form, not the product form: rounding must not decide between near copies.
    distance = torch.cdist(images.nan_to_num(0, 0, 0), all_images, compute_mode="donot_use_mm_for_euclid_dist")
    own = distance.gather(1, truth_index.reshape(-1, 1))
    ranks = (distance < own).sum(1).reshape(truth_index.shape)
    return torch.where(usable, ranks, max(len(gallery) - 1, 1))
