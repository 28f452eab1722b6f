"""Defences that change the model: stochastic layers whose randomness is a named argument of the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Generator, nn

from gradveil.core.settings import Checked, Choice, Count, Range, Share, Strength, TextValue
from gradveil.defences.entry import DefenceEntry
from gradveil.nn.keylock import ACTIVATIONS, with_keylock
from gradveil.nn.stochastic_layers import KL_VARIANTS, with_cvb, with_dropout, with_precode

Path = Annotated[str | None, TextValue('the path of a module in quotes, as "body.0"')]
Paths = Annotated[str | None, TextValue('the paths of modules in quotes, separated by spaces, as "body.0 body.3"')]


@dataclass(frozen=True)
class DropoutSurgery(Checked):
    """Insert dropout of rate p after the modules at `where`, those that the model declares, or its activations."""

    p: Annotated[Share, "Probability that an activation is dropped."] = 0.25
    where: Annotated[
        Paths, "Modules after which dropout is inserted; none for those that the model declares, or its activations."
    ] = None
    label: ClassVar[str] = "dropout"

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; dropout has no weights to draw."""
        return with_dropout(model, self.p, self.where.split() if self.where else None)


@dataclass(frozen=True)
class PrecodeSurgery(Checked):
    """Put PRECODE's variational bottleneck of k values before the last linear layer, or at `position`."""

    k: Annotated[Count, "Size of the bottleneck."] = 256
    beta: Annotated[Strength, "Weight of the divergence in the loss."] = 1e-3
    position: Annotated[
        Path, "Linear layer that the bottleneck precedes, or another module that it follows; none for the last layer."
    ] = None
    label: ClassVar[str] = "precode"

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the generator draws the bottleneck's weights."""
        return with_precode(model, generator, self.k, self.beta, self.position)


@dataclass(frozen=True)
class CvbSurgery(Checked):
    """Insert a convolutional variational bottleneck; settings left out are those that the model declares."""

    kernel: Annotated[
        int | None, Range(1, integer=True, odd=True, optional=True), "Size of the kernels; none for the model's own."
    ] = None
    beta: Annotated[
        float | None, Range(0, optional=True), "Weight of the divergence in the loss; none for the model's own."
    ] = None
    position: Annotated[
        Path, "Module that it follows; none for the one that the model declares, or its first activation of maps."
    ] = None
    kl: Annotated[str, Choice(KL_VARIANTS), "Divergence that is added to the loss."] = "exact"
    label: ClassVar[str] = "cvb"

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the generator draws the bottleneck's weights."""
        return with_cvb(model, generator, self.kernel, self.beta, self.position, self.kl)


@dataclass(frozen=True)
class KeyLockSurgery(Checked):
    """Put a key-lock of keys of `width` numbers after the first convolution, or after the one at `position`.

    The client's local steps train it; where one gradient is sent, it stays as it was drawn.
    """

    width: Annotated[Count, "Size of the secret key."] = 1024
    act: Annotated[str, Choice(tuple(ACTIVATIONS)), "Activation after the layers of the lock."] = "sigmoid"
    position: Annotated[Path, "Convolution that the lock follows; none for the first."] = None
    label: ClassVar[str] = "keylock"

    def __call__(self, model: nn.Module, generator: Generator) -> nn.Module:
        """Return the new model; the lock belongs to each client, so there is nothing to draw."""
        return with_keylock(model, self.width, self.act, self.position)


MODEL_DEFENCES = (
    DefenceEntry(
        name="dropout",
        factory=DropoutSurgery,
        description="Drop activations at random while the gradient is computed",
        changes=("model",),
        cost="a random number for every activation behind it; all bytes",
        citation="Scheliga, Mäder, Seeland 2023, Dropout is NOT All You Need to Prevent Gradient Leakage (AAAI)",
        traits=("drops units",),
        identity={"p": 0.0},
    ),
    DefenceEntry(
        name="precode",
        factory=PrecodeSurgery,
        description="PRECODE: a variational bottleneck before the last linear layer",
        changes=("model",),
        cost="two more linear layers; their bytes too: 1.7x the bytes of a small CNN",
        citation="Scheliga, Mäder, Seeland 2022, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage",
        traits=("draws features",),
    ),
    DefenceEntry(
        name="cvb",
        factory=CvbSurgery,
        description="CVB: a convolutional variational bottleneck after an early block",
        changes=("model",),
        cost="three more convolutions; their bytes too: 1.1x the bytes of a small CNN",
        citation="Scheliga, Mäder, Seeland 2024, Privacy Preserving Federated Learning with Convolutional Variational "
        "Bottlenecks",
        traits=("draws features",),
    ),
    DefenceEntry(
        name="keylock",
        factory=KeyLockSurgery,
        description="FedKL: normalise after the first convolution, with scale and shift that each client keeps secret",
        changes=("model",),
        cost="two linear layers more, which the client trains and keeps; all bytes",
        citation="Ren et al. 2023, Gradient Leakage Defense with Key-Lock Module for Federated Learning",
        traits=("locks",),
    ),
)
