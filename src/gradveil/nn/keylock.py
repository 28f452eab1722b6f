"""A key-lock: a normalisation whose scale and shift belong to one client and never leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.core.noise import Noise
from gradveil.nn.norms import BatchStatistics
from gradveil.nn.paths import at, insert_after
from gradveil.nn.stochastic import Stochastic

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
"""What a lock's layers may end with."""
_BOXES: dict[str, tuple[float, float | None]] = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, None)}


@dataclass(frozen=True)
class Locked:
    """act(W k + b) for a key k ~ U[0, 1)^width and a linear layer as torch starts it: W, b ~ U(+-width^-1/2)."""

    width: int
    act: str

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Draw one tensor on the CPU: every row of the last dimension by a key and a layer of its own."""
        *leading, channels = shape
        bound = self.width**-0.5
        key = torch.rand(*leading, self.width, 1, dtype=torch.float64, generator=generator)
        drawn = torch.rand(*leading, channels, self.width + 1, dtype=torch.float64, generator=generator)
        layer = bound * (2 * drawn - 1)
        locked = (layer[..., :-1] @ key).squeeze(-1) + layer[..., -1]
        return ACTIVATIONS[self.act](locked).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: whoever optimises it keeps it in its box."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)


class KeyLock(Stochastic):
    """y = gamma * (x - mean) / sqrt(var + eps) + beta, gamma and beta [C] a client's own (Ren et al., FedKL).

    gamma = act(Linear(key)), and beta likewise, for a key that nobody else has. The linear layers stay with the client,
    so all that others could learn of them is gamma and beta, which are drawn once a client and kept. The layers are not
    trained further here. Which activation is used, the sources do not say.
    """

    gamma: Tensor
    beta: Tensor

    def __init__(self, channels: int, width: int = 1024, act: str = "sigmoid") -> None:
        """Lock so many channels by keys of so many numbers."""
        super().__init__()
        if act not in ACTIVATIONS:
            raise fail("keylock.act", f"unknown name '{act}'", f"choose one of: {', '.join(ACTIVATIONS)}")
        self.channels, self.width, self.act = channels, width, act
        self.norm = BatchStatistics(channels, affine=False)
        self.declare("gamma", "beta")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Draw nothing anew for each forward pass."""
        return {}

    def kept(self) -> Mapping[str, Noise]:
        """Describe gamma and beta; the neutral ones leave the normalisation as it is."""
        lower, upper = _BOXES[self.act]
        law, shape = Locked(self.width, self.act), (self.channels,)
        return {name: Noise(shape, law, off, lower=lower, upper=upper) for name, off in (("gamma", 1.0), ("beta", 0.0))}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift as the client's lock says; without one, only normalise."""
        y = self.norm(x)
        gamma, beta = self.supplied("gamma"), self.supplied("beta")
        if gamma is None or beta is None:
            return y
        wide = (*gamma.shape, *[1] * (x.dim() - 2))
        return gamma.view(wide) * y + beta.view(wide)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.channels}, width={self.width}, act={self.act!r}"


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
