"""Defences that change the model: stochastic layers whose randomness is a named argument of the client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.core.errors import refuse
from gradveil.core.settings import COUNT, SHARE, STRENGTH, Choice, Range, TextValue, collect
from gradveil.nn.keylock import ACTIVATIONS, with_keylock
from gradveil.nn.stochastic_layers import KL_VARIANTS, with_cvb, with_dropout, with_precode

PATH = TextValue('the path of a module in quotes, as "body.0"')
"""One module's path."""
PATHS = TextValue('the paths of modules in quotes, separated by spaces, as "body.0 body.3"')
"""Several modules' paths."""
KL = Choice(KL_VARIANTS)
"""Which divergence a bottleneck adds to the loss."""
KERNEL = Range(1, integer=True, odd=True, optional=True)
"""Size of a convolution that keeps its input's size."""
ACT = Choice(tuple(ACTIVATIONS))
"""What a key-lock's layers end with."""
WEIGHT = Range(0, optional=True)
"""Weight of a term of the loss."""


@dataclass(frozen=True)
class DropoutSurgery:
    """Insert dropout of rate p after the modules at `where`, or at the positions that the model declares."""

    p: float = 0.25
    where: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        refuse(collect("dropout", (("p", SHARE, self.p), ("where", PATHS, self.where))))

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; dropout has no weights to draw."""
        return with_dropout(model, self.p, self.where.split() if self.where else None)


@dataclass(frozen=True)
class PrecodeSurgery:
    """Put PRECODE's variational bottleneck of k values before the last linear layer, or the one at `position`."""

    k: int = 256
    beta: float = 1e-3
    position: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        checks = (("k", COUNT, self.k), ("beta", STRENGTH, self.beta), ("position", PATH, self.position))
        refuse(collect("precode", checks))

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the generator draws the bottleneck's weights."""
        return with_precode(model, generator, self.k, self.beta, self.position)


@dataclass(frozen=True)
class CvbSurgery:
    """Insert a convolutional variational bottleneck; settings left out are those that the model declares."""

    kernel: int | None = None
    beta: float | None = None
    position: str | None = None
    kl: str = "exact"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        checks = (("kernel", KERNEL, self.kernel), ("beta", WEIGHT, self.beta), ("position", PATH, self.position))
        refuse(collect("cvb", (*checks, ("kl", KL, self.kl))))

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the generator draws the bottleneck's weights."""
        return with_cvb(model, generator, self.kernel, self.beta, self.position, self.kl)


@dataclass(frozen=True)
class KeyLockSurgery:
    """Put a key-lock of keys of `width` numbers after the first convolution, or after the one at `position`.

    The client's local steps train it; where one gradient is sent, it stays as it was drawn.
    """

    width: int = 1024
    act: str = "sigmoid"
    position: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        checks = (("width", COUNT, self.width), ("act", ACT, self.act), ("position", PATH, self.position))
        refuse(collect("keylock", checks))

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the lock belongs to each client, so there is nothing to draw."""
        return with_keylock(model, self.width, self.act, self.position)
