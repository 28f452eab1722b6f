"""Inputs that a defence adds to a batch: how many an update mixes, and which of the separated ones they are.

To a layer, the proxies of DCS (Wu et al. 2024) are examples like any other: they are separated together with the
client's own. Three marks of a proxy need no ground truth. Its search leaves the valid values; it is rougher than an
image; and its label is a mixture of two classes, which the last layer's gradient states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.closed_form.independent_images import differences
from gradveil.client import Client


def mixed_inputs(client: Client, examples: int) -> int:
    """Count the inputs whose gradients an update of so many examples mixes."""
    added = 0 if client.step is None else client.step.added_inputs
    own, local = examples // client.members, client.local
    gradients = own if local is None else local.count(own) * local.at_once(own)
    return examples + client.members * added * gradients


def read_targets(answers: Tensor, errors: Tensor) -> Tensor:
    """Read class probabilities y [..., K] off the errors c (p - y) of the outputs z, p = softmax(z), c > 0 unknown.

    Every error over its probability is c, but for classes of the label, where it is lower. An input has one, its proxy
    two: c is the median of the rest.

    >>> p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    >>> y = torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.0, 0.3]])
    >>> read_targets(p.log(), 0.25 * (p - y)).round(decimals=3).abs()
    tensor([[0.0000, 1.0000, 0.0000],
            [0.7000, 0.0000, 0.3000]])
    """
    shares = torch.softmax(answers, -1).to(errors)
    classes = shares.shape[-1]
    scale = torch.quantile((errors / shares.clamp_min(1e-300)).flatten(-2), 0.5 + 0.75 / classes, dim=-1)
    return shares - errors / scale.clamp_min(1e-300).unsqueeze(-1).unsqueeze(-1)


def strangeness(images: Tensor, lower: Tensor, upper: Tensor, shape: tuple[int, ...], targets: Tensor | None) -> Tensor:
    """Score [k] how little separated inputs [k, n] look like a client's: 0 for a smooth valid image of one class.

    It is the mean distance from the valid values and the mean difference of neighbours, both as shares of the range,
    and the label's share [k, K] that is not of its first class.
    """
    width = upper - lower
    score = ((images - torch.clamp(images, lower, upper)) / width).abs().mean(1)
    if len(shape) == 3:
        score = score + differences(images / width, shape).abs().mean(1)
    return score if targets is None else score + (1 - targets.amax(1)).clamp(0, 1)
