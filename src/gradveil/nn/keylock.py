"""A key-lock: a normalisation whose scale and shift belong to one client and never leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.core.noise import Noise, Source, uniform
from gradveil.core.tree import Tensors
from gradveil.nn.module_paths import at, insert_after
from gradveil.nn.normalisation import BatchStatistics
from gradveil.nn.stochastic import Stochastic

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
"""What a lock's layers may end with."""
_OFF = {"sigmoid": (100.0, -100.0), "tanh": (100.0, 0.0), "relu": (1.0, 0.0)}
"""What the layers have to give before their activation, for a scale of 1 and a shift of 0."""


@dataclass(frozen=True)
class Locked:
    """(W k + b, V k + c, k): what two linear layers as torch starts them give for a key k ~ U[0, 1)^width.

    All of W, V, b and c are U(+-width^-1/2).
    """

    width: int

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU: every row of the last dimension by a key and layers of its own."""
        *leading, entries = shape
        bound = self.width**-0.5
        key = uniform((*leading, self.width, 1), torch.float64, source)
        drawn = uniform((*leading, entries - self.width, self.width + 1), torch.float64, source)
        layers = bound * (2 * drawn - 1)
        given = layers[..., :-1] @ key + layers[..., -1:]
        return torch.cat((given, key), -2).squeeze(-1).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: a lock that was trained for a while may be anything."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)


class KeyLock(Stochastic):
    """y = gamma * (x - mean) / sqrt(var + eps) + beta, gamma and beta [C] a client's own (Ren et al., FedKL).

    gamma = act(W k + b) and beta = act(V k + c) for a key k that nobody else has. The layers stay with the client. Of
    them it keeps the `secret` [2 C + width]: what they give before the activation, and the key. That is all it takes:
    gradient steps on W and b move W k + b by 1 + |k|^2 times a step on it, and W enters nowhere else. Adam's steps are
    as long for each entry of a row of W, and move it by 1 + sum |k_j| times such a step (up to Adam's epsilon); Adam's
    weight decay, for which all of W would be needed, hardly acts on a lock. The paper does not say which activation is
    used; the authors' program attacks networks with the sigmoid, and trains them with ReLU.
    """

    secret: Tensor

    def __init__(self, channels: int, width: int = 1024, act: str = "sigmoid") -> None:
        """Lock so many channels by keys of so many numbers."""
        super().__init__()
        if act not in ACTIVATIONS:
            raise fail("keylock.act", f"unknown name '{act}'", f"choose one of: {', '.join(ACTIVATIONS)}")
        self.channels, self.width, self.act = channels, width, act
        self.norm = BatchStatistics(channels, affine=False)
        self.declare("secret")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Draw nothing anew for each forward pass."""
        return {}

    def kept(self) -> Mapping[str, Noise]:
        """Describe the secret; the neutral one leaves the normalisation as it is."""
        off = torch.tensor(_OFF[self.act]).repeat_interleave(self.channels)
        neutral = torch.cat((off, torch.zeros(self.width)))
        return {"secret": Noise((2 * self.channels + self.width,), Locked(self.width), neutral)}

    def free(self, kept: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return what the layers give, in units in which a step on it is what steps on the layers come to."""
        return {"secret": kept["secret"][: 2 * self.channels] / self._pace(kept["secret"], adaptive)}

    def moved(self, kept: Mapping[str, Tensor], free: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return the secret after such steps."""
        secret = kept["secret"]
        given = free["secret"] * self._pace(secret, adaptive)
        return {"secret": torch.cat((given, secret[2 * self.channels :]))}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift as the client's lock says; without one, only normalise."""
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
        """Return c: steps on z / c move z as steps on the layers do, whose output z is."""
        key = secret[2 * self.channels :]
        return 1 + key.abs().sum() if adaptive else (1 + key.square().sum()).sqrt()


def with_keylock(model: nn.Module, width: int = 1024, act: str = "sigmoid", position: str | None = None) -> nn.Module:
    """Copy a model and put a `KeyLock` after its first convolution (in the order of definition), or at `position`.

    The convolution becomes the child `inner` of its old path.
    """
    copy = deepcopy(model)
    found = (path for path, module in copy.named_modules() if isinstance(module, nn.Conv2d))
    path = position or next(found, None)
    if path is None:
        raise fail("keylock.position", "this model has no convolution", "choose another defence")
    layer = at(copy, path)
    if not isinstance(layer, nn.Conv2d):
        raise fail(f"keylock.position {path}", f"is a {type(layer).__name__}", "choose an nn.Conv2d")
    return insert_after(copy, path, "lock", KeyLock(layer.out_channels, width, act))
