"""The key-lock: a normalisation whose scale and shift stay private to one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.core.noise import Noise, Source, uniform
from gradveil.core.tree import Tensors
from gradveil.nn.insertion_places import blank_input, forward_pass
from gradveil.nn.module_paths import at, insert_after
from gradveil.nn.normalisation import BatchStatistics
from gradveil.nn.stochastic import Stochastic

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
"""Activations of a lock's layers."""
_OFF = {"sigmoid": (100.0, -100.0), "tanh": (100.0, 0.0), "relu": (1.0, 0.0)}
"""Outputs of the layers before the activation that give a scale of 1 and a shift of 0."""


@dataclass(frozen=True)
class Locked:
    """(W k + b, V k + c, k): the outputs of two linear layers with torch's initial law for a key k ~ U[0, 1)^width.

    W, V, b and c are U(-width^-1/2, width^-1/2).
    """

    width: int

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU: each row of the last dimension from an independent key and layers."""
        *leading, entries = shape
        bound = self.width**-0.5
        key = uniform((*leading, self.width, 1), torch.float64, source)
        drawn = uniform((*leading, entries - self.width, self.width + 1), torch.float64, source)
        layers = bound * (2 * drawn - 1)
        outputs = layers[..., :-1] @ key + layers[..., -1:]
        return torch.cat((outputs, key), -2).squeeze(-1).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: a trained lock may have any value."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)


class KeyLock(Stochastic):
    """y = gamma * (x - mean) / sqrt(var + eps) + beta, with private gamma and beta [C] (Ren et al., FedKL).

    gamma = act(W k + b) and beta = act(V k + c) for the client's private key k. Instead of the layers the client stores
    the `secret` [2 C + width]: the layers' outputs before the activation, and the key. This suffices, as W enters
    nowhere else: a gradient step on W and b moves W k + b by 1 + |k|^2 times a step on W k + b. Adam steps equally far
    for each entry of a row of W, and so moves it by 1 + sum |k_j| times such a step (up to Adam's epsilon). Adam's
    weight decay, which would need W, hardly affects a lock. The paper does not name the activation; the authors'
    program attacks networks with the sigmoid, and trains them with ReLU.
    """

    secret: Tensor

    def __init__(self, channels: int, width: int = 1024, act: str = "sigmoid") -> None:
        """Lock `channels` channels by keys of `width` numbers."""
        super().__init__()
        if act not in ACTIVATIONS:
            raise fail("keylock.act", f"unknown name '{act}'", f"choose one of: {', '.join(ACTIVATIONS)}")
        self.channels, self.width, self.act = channels, width, act
        self.norm = BatchStatistics(channels, affine=False)
        self.declare("secret")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Declare nothing: a forward pass draws no random numbers."""
        return {}

    def kept(self) -> Mapping[str, Noise]:
        """Describe the secret; its neutral value keeps the plain normalisation."""
        off = torch.tensor(_OFF[self.act]).repeat_interleave(self.channels)
        neutral = torch.cat((off, torch.zeros(self.width)))
        return {"secret": Noise((2 * self.channels + self.width,), Locked(self.width), neutral)}

    def free(self, kept: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return the layers' outputs, scaled so that a step on them equals steps on the layers."""
        return {"secret": kept["secret"][: 2 * self.channels] / self._pace(kept["secret"], adaptive)}

    def moved(self, kept: Mapping[str, Tensor], free: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return the secret with the outputs of `free`."""
        secret = kept["secret"]
        outputs = free["secret"] * self._pace(secret, adaptive)
        return {"secret": torch.cat((outputs, secret[2 * self.channels :]))}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift by the client's lock, if one is supplied."""
        y = self.norm(x)
        secret = self.supplied("secret")
        if secret is None:
            return y
        lock = ACTIVATIONS[self.act](secret[:, : 2 * self.channels])
        gamma, beta = lock.reshape(len(lock), 2, self.channels, *[1] * (x.dim() - 2)).unbind(1)
        return gamma * y + beta

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.channels}, width={self.width}, act={self.act!r}"

    def _pace(self, secret: Tensor, adaptive: bool) -> Tensor:
        """Return c such that steps on z / c move the layers' output z as steps on the layers do."""
        key = secret[2 * self.channels :]
        # A gradient step on z / c moves z by c^2 times a gradient step on z, a step of Adam, whose length does not
        # depend on the slope, by c times: c^2 = 1 + |k|^2, or c = 1 + sum |k_j|.
        return 1 + key.abs().sum() if adaptive else (1 + key.square().sum()).sqrt()


def with_keylock(model: nn.Module, width: int = 1024, act: str = "sigmoid", position: str | None = None) -> nn.Module:
    """Copy a model and put a `KeyLock` after its first convolution, or at `position`.

    The order is that of a forward pass, or that of definition where the model does not know the shape of its inputs.
    The convolution becomes the child `inner` of its old path.
    """
    copy, path, inputs = deepcopy(model), position, blank_input(model)
    if path is None:
        ran = None if inputs is None else forward_pass(model, inputs)
        paths = [name for name, _ in copy.named_modules()] if ran is None else [name for name, _ in ran.visits]
        path = next((name for name in paths if isinstance(at(copy, name), nn.Conv2d)), None)
    if path is None:
        raise fail("keylock.position", "this model has no convolution", "choose another defence")
    layer = at(copy, path)
    if not isinstance(layer, nn.Conv2d):
        raise fail(f"keylock.position {path}", f"is a {type(layer).__name__}", "choose an nn.Conv2d")
    return insert_after(copy, path, "lock", KeyLock(layer.out_channels, width, act))
