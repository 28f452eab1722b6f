"""Distances between simulated and observed updates, and image priors: one value per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.client import Client
from gradveil.core.tree import Tensors, root
from gradveil.gradients.fused import cosine_distance, squared_distance, total_variation
from gradveil.nn.normalisation import running_statistics

Distance = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(simulated [N, ...], observed [N, ...]) -> [N]"""


def l2(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences (Zhu et al. 2019, "Deep Leakage from Gradients", eq. 4)."""
    return squared_distance([simulated[name] for name in observed], list(observed.values()))


def l2_and_norm(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences plus its root: d^2 + d, whose slope does not vanish near the minimum.

    GRNN (Ren et al. 2022) calls the second term a Wasserstein distance; its program computes a Euclidean norm.
    """
    square = l2(simulated, observed)
    return square + root(square)


def l1(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of absolute differences."""
    return _total((simulated[name] - value).flatten(1).abs().sum(1) for name, value in observed.items())


def cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """1 - cosine over all layers concatenated (Geiping et al. 2020, eq. 4)."""
    return cosine_distance([simulated[name] for name in observed], list(observed.values()))


def layerwise_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of 1 - cosine."""
    return _total(cosine({n: simulated[n]}, {n: observed[n]}) for n in observed) / len(observed)


def median_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Median over the layers of 1 - cosine, in which no layer dominates by its length."""
    return torch.stack([cosine({n: simulated[n]}, {n: observed[n]}) for n in observed], 1).median(1).values


def tokenwise_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of 1 - cosine; the rows of an embedding [1, T, D] are compared separately and averaged.

    In a transformer the gradient of a class token is tens of times as long as those of patches, and would hide them.
    """
    return _total(_by_token(simulated[n], observed[n]) for n in observed) / len(observed)


def _by_token(simulated: Tensor, observed: Tensor) -> Tensor:
    if observed.dim() != _EMBEDDING or observed.shape[1] != 1:
        return cosine({"": simulated}, {"": observed})
    rows, tokens, width = len(observed), *observed.shape[2:]
    separate = (value.reshape(rows * tokens, width) for value in (simulated, observed))
    return cosine_distance(*([value] for value in separate)).view(rows, tokens).mean(1)


_EMBEDDING = 4
"""Dimensions of an embedding [1, T, D], with the rows in front."""


def sapag(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Adaptive Gaussian kernel (SAPAG): sum_l Q_l (1 - exp(-mean(d_l^2) / (2 var(g_l)))), Q_l = 1 / (l + 1)."""
    parts: list[Tensor] = []
    for layer, (name, value) in enumerate(observed.items()):
        difference = (simulated[name] - value).flatten(1).square().mean(1)
        variance = value.flatten(1).var(1, unbiased=False).clamp_min(1e-20)
        parts.append((1 - torch.exp(-difference / (2 * variance))) / (layer + 1))
    return _total(parts)


def right_angles(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of (1 - ratio of lengths)^2 and the squared sine of the angle to the client's gradient.

    It compares gradients with what a client sends at a right angle to its own and as long, one or several of them
    ([N, R, ...]). Random directions at a right angle to a vector of n entries see 1 / (n - 1) of the squared sine:
    their mean squared cosine is multiplied by n - 1.
    """
    parts: list[Tensor] = []
    for name, value in observed.items():
        own = simulated[name].flatten(1)
        sent = value.flatten(1).unflatten(1, (-1, own.shape[1]))
        size, length = root(own.square().sum(1)), sent[:, 0].square().sum(1).sqrt().clamp_min(1e-20)
        cosines = (sent @ own.unsqueeze(2)).squeeze(2) / (size * length).unsqueeze(1)
        parts.append((1 - size / length).square())
        parts.append(max(1, own.shape[1] - 1) * cosines.square().mean(1))
    return _total(parts) / len(observed)


def signs(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of 1 - the agreement of signs, over the entries that were sent.

    Noise that multiplies entries, or is loud for some of them, hides their sizes and not all of their signs. A
    simulated entry has the sign s / (|s| + r), whose slope is not zero; r is a tenth of the layer's root mean square.
    """
    return _total(_disagreement(simulated[n].flatten(1), observed[n].flatten(1)) for n in observed) / len(observed)


def _disagreement(simulated: Tensor, observed: Tensor) -> Tensor:
    soft = _SOFT * root(simulated.square().mean(1, keepdim=True)) + 1e-20  # where nothing is simulated
    sent = torch.where(observed.isnan(), observed, observed.sign())  # no number has no sign, and must not pass for 0
    agreed = (sent * simulated / (simulated.abs() + soft)).sum(1)
    return 1 - agreed / (observed != 0).sum(1).clamp_min(1)


_SOFT = 0.1
"""Size at which a simulated entry has half of its sign, as a share of its layer's root mean square."""


OBJECTIVES: dict[str, Distance] = {
    "l2": l2,
    "l2-and-norm": l2_and_norm,
    "l1": l1,
    "cosine": cosine,
    "layerwise-cosine": layerwise_cosine,
    "tokenwise-cosine": tokenwise_cosine,
    "sapag": sapag,
    "signs": signs,
    "right-angles": right_angles,
}
"""The distances by their names in presets and run files."""
LIKELIHOOD = "likelihood"
"""The objective that asks the defence how likely it sends what was sent: no distance between two updates."""


_POWERS = {"l2": 2, "l2-and-norm": 2, "l1": 1}
"""Degree of homogeneity of these distances; the others do not depend on the length of updates."""


def of_gradients(distance: Tensor, name: str, client: Client, examples: int) -> Tensor:
    """Convert a distance between updates to one between gradients: local updates are divided by lr T.

    Priors, tolerances and optimisers are tuned for gradients. Without this, the squared distance of one step of size
    0.001 is a million times smaller than that of the same gradient.
    """
    if client.local is None or name not in _POWERS:
        return distance
    length = client.local.lr * max(1, client.local.count(examples // client.members))
    if name == "l2-and-norm":  # its terms scale differently: solve d^2 + d for d, without cancellation
        norm = 2 * distance / (1 + (1 + 4 * distance).sqrt()) / length
        return norm.square() + norm
    return distance / length ** _POWERS[name]


def _total(parts) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None, "an update has at least one tensor"
    return total


_REFRESH = 50
"""Iterations between two updates of the mean of restarts."""


def energy(x: Tensor) -> Tensor:
    """Mean over the images of the Euclidean norm (the l2 prior of Yin et al. 2021)."""
    # The slope of a root is infinite at zero; clamped, it is zero there.
    return x.flatten(2).square().sum(2).clamp_min(1e-24).sqrt().mean(1)


def variation(images: Tensor, over: str) -> Tensor:
    """Total variation, with `over="colours"` also that of the differences between the three colour channels."""
    if over == "colours" and images.shape[-3] == _COLOURS:
        red, green, blue = images.unbind(-3)
        images = torch.cat([images, torch.stack([red - green, red - blue, green - blue], -3)], -3)
    return total_variation(images)


_COLOURS = 3


def feature_distance(own: Tensor, wanted: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return the squared distance [N] of features [N, B, F] in units of their spread; zero where none are wanted.

    Given labels [N, B], examples of one label may have changed places: each is compared with the nearest.
    """
    known = wanted.isfinite().flatten(1).all(1)
    wanted = torch.where(known.view(-1, 1, 1), wanted, 0.0)
    spread = (wanted - wanted.mean(1, keepdim=True)).square().sum((1, 2))
    distances = (own - wanted).square().sum(2)
    if labels is not None:
        distances = (own.unsqueeze(2) - wanted.unsqueeze(1)).square().sum(3)
        same = labels.unsqueeze(2) == labels.unsqueeze(1)
        distances = torch.where(same, distances, torch.inf).amin(2)
    return torch.where(known, distances.sum(1) / spread.clamp_min(torch.finfo(spread.dtype).tiny), 0.0)


def statistics_distance(simulated: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Tensor:
    """Sum the distances of means and of variances over the layers, the first layer ten times (Yin et al. 2021).

    Names are `<layer>.mean` and `<layer>.var`; tensors are [N, channels]. `simulated` holds layers in execution order.
    """
    names = [name for name in simulated if name in wanted]
    first = names[0].rpartition(".")[0]
    total: Tensor | None = None
    for name in names:
        size = (simulated[name] - wanted[name]).square().sum(1).clamp_min(1e-24).sqrt()
        size = 10 * size if name.rpartition(".")[0] == first else size
        total = size if total is None else total + size
    assert total is not None, "a model with a BatchNorm prior has a BatchNorm layer"
    return total


def statistics_wanted(knowledge: Knowledge, simulated_client: Client, target_clients: Tensor, like: Tensor) -> Tensors:
    """Return the target of a BatchNorm prior: the true batch statistics if granted, else the running ones.

    The result is empty for a model without BatchNorm layers.
    """
    granted = {n[11:]: how for n, how in knowledge.tensors.items() if n.startswith("statistics.")}
    known = {n: how.value for n, how in granted.items() if isinstance(how, Known) and how.value is not None}
    if known:
        return {n: value.to(like)[target_clients] for n, value in known.items()}
    return {
        n: v.to(like).expand(len(target_clients), *v.shape)
        for n, v in running_statistics(simulated_client.model).items()
    }


class Consensus:
    """Distance from the mean of a target's restarts, updated now and then (group consistency, Yin et al. 2021).

    The distance is the mean square over the pixels. Ended restarts do not count.
    """

    def __init__(self, restarts: int, register: bool) -> None:
        """Start without means."""
        self.restarts, self.register = restarts, register
        self._means: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, rows: Tensor, iteration: int) -> Tensor:
        """Return the distance [N] of each row from its target client's mean."""
        target_clients = (rows // self.restarts).tolist()
        if iteration % _REFRESH == 0:
            self._means = {
                target_client: self._mean(x.detach(), target_clients, target_client)
                for target_client in set(target_clients)
            }
        centre = torch.stack([self._means[target_client] for target_client in target_clients])
        return (x - centre).square().flatten(1).mean(1)

    def _mean(self, x: Tensor, target_clients: list[int], target_client: int) -> Tensor:
        restarts = x[[place for place, other in enumerate(target_clients) if other == target_client]]
        return (shifted_onto(restarts, restarts.mean(0)) if self.register else restarts).mean(0)


def shifted_onto(images: Tensor, reference: Tensor) -> Tensor:
    """Shift each image [N, B, C, H, W] cyclically by whole pixels, to where it matches the reference best.

    The best shift is the peak of the circular cross-correlation over all channels.
    """
    # The inverse transform at s is sum_i image[i] reference[i + s].
    spectrum = torch.fft.rfft2(images).conj() * torch.fft.rfft2(reference)
    height, width = images.shape[-2:]
    peak = torch.fft.irfft2(spectrum, s=(height, width)).sum(2).flatten(-2).argmax(-1)
    # shifted[i] = image[i - s], with the indices cyclic.
    rows = (torch.arange(height, device=images.device) - (peak // width).unsqueeze(-1)) % height
    columns = (torch.arange(width, device=images.device) - (peak % width).unsqueeze(-1)) % width
    place = rows.unsqueeze(-1) * width + columns.unsqueeze(-2)
    flat = place.flatten(-2).unsqueeze(2).expand(*images.shape[:3], -1)
    return images.flatten(-2).gather(-1, flat).view_as(images)
