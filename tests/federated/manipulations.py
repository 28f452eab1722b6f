"""Models, and what servers do to them to see more than they should: each changes the parameters where they lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.core.noise import Key
from gradveil.nn.models import build

GENERATOR = Key(0).generator()
SIZES = {"scheliga-cnn": 32}


def model(name: str = "lenet-zhu") -> nn.Module:
    return build(name, channels=1, size=SIZES.get(name, 16), classes=10, generator=Key(0).generator())


class Perceptron(nn.Module):
    """Two hidden layers: the kind of first layer that imprints and traps need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(256, 64), nn.Linear(64, 32), nn.Linear(32, 10)
        for parameter in self.parameters():
            nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5, generator=GENERATOR)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x.flatten(1)))))
        return self.head(hidden)


def params(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def imprint(p: dict[str, Tensor]) -> None:
    """Robbing the fed: one measurement in every row, biases at the quantiles of its distribution."""
    measure, gain = torch.randn(256, generator=GENERATOR) / 16, 3.0
    p["first.weight"] = gain * measure.expand(64, 256).clone()
    p["first.bias"] = -gain * torch.erfinv(2 * torch.arange(1, 65) / 65 - 1) * 2**0.5


def imprint_in_noise(p: dict[str, Tensor]) -> None:
    """The same in three quarters of the rows, the others left as they were."""
    keep = p["first.weight"][48:].clone()
    imprint(p)
    p["first.weight"][48:] = keep


def imprint_in_a_few_rows(p: dict[str, Tensor]) -> None:
    """Eight bins in a layer of 64 rows, the others left as they were."""
    keep = p["first.weight"][8:].clone()
    imprint(p)
    p["first.weight"][8:] = keep


def imprint_with_jitter(p: dict[str, Tensor]) -> None:
    """A quarter of the rows, each weight of which is off by a twentieth or so."""
    keep = p["first.weight"][16:].clone()
    imprint(p)
    p["first.weight"] *= 1 + 0.05 * torch.randn(64, 256, generator=GENERATOR)
    p["first.weight"][16:] = keep


def trap(p: dict[str, Tensor]) -> None:
    """Curious: a random half of each row negative, the other half the same magnitudes times 0.95."""
    rows = torch.empty(64, 256)
    for row in rows:
        size = torch.randn(128, generator=GENERATOR).abs() * 0.5
        order = torch.randperm(256, generator=GENERATOR)
        row[order[:128]], row[order[128:]] = -size, 0.95 * size
    p["first.weight"], p["first.bias"] = rows, torch.zeros(64)


def trap_with_jitter(p: dict[str, Tensor]) -> None:
    """The same in a quarter of the rows."""
    keep = p["first.weight"][16:].clone()
    trap(p)
    p["first.weight"] *= 1 + 0.05 * torch.randn(64, 256, generator=GENERATOR)
    p["first.weight"][16:] = keep


def dead(p: dict[str, Tensor]) -> None:
    p["second.weight"] = p["second.weight"].clone()
    p["second.weight"][2:] = 0


def nearly_dead(p: dict[str, Tensor]) -> None:
    """No row is zero, and nothing passes."""
    p["second.weight"] = p["second.weight"].clone()
    p["second.weight"][2:] *= 1e-9


def dead_by_biases(p: dict[str, Tensor]) -> None:
    """Every unit is off for whatever input."""
    p["second.bias"] = torch.full((32,), -15.0)


def huge(p: dict[str, Tensor]) -> None:
    p["first.weight"] = 1e4 * p["first.weight"]


def tiny(p: dict[str, Tensor]) -> None:
    p["second.weight"] = 1e-5 * p["second.weight"]


def class_fishing(p: dict[str, Tensor]) -> None:
    """Wen et al.: the last layer is zero but for the wanted class; the other biases are large."""
    p["head.weight"], p["head.bias"] = torch.zeros(10, 32), torch.full((10,), 1000.0)
    p["head.weight"][3], p["head.bias"][3] = 0.5, 0.0


def class_fishing_by_biases(p: dict[str, Tensor]) -> None:
    p["head.bias"] = torch.full((10,), 25.0)
    p["head.bias"][3] = 0.0


def feature_fishing(p: dict[str, Tensor]) -> None:
    """One feature is thresholded until one example is left above."""
    p["head.weight"], p["head.bias"] = torch.zeros(10, 32), torch.zeros(10)
    p["head.weight"][:, 7] = torch.linspace(-1, 1, 10)


def class_fishing_in_noise(p: dict[str, Tensor]) -> None:
    """The same without large biases, and with weights that are not quite zero."""
    p["head.weight"] = p["head.weight"].clone()
    p["head.weight"][torch.arange(10) != 3] *= 1e-6


def feature_fishing_in_noise(p: dict[str, Tensor]) -> None:
    feature_fishing(p)
    p["head.weight"] += 1e-6 * torch.randn(10, 32, generator=GENERATOR)


def jump(p: dict[str, Tensor]) -> None:
    p["second.weight"] = p["second.weight"].flip(0)


def broken(p: dict[str, Tensor]) -> None:
    p["second.bias"] = p["second.bias"].clone()
    p["second.bias"][0] = float("nan")
