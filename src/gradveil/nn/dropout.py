"""Dropout whose mask is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from torch import Tensor, nn

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Bernoulli, Noise
from gradveil.nn.paths import insert_after
from gradveil.nn.stochastic import Stochastic


class Dropout(Stochastic):
    """y = x * mask / (1 - p), mask ~ Bernoulli(1 - p) of the shape of x (Srivastava et al. 2014, scaled in training).

    The mask is continuous for an attacker who optimises it: its box is [0, 1], and the neutral mask 1 - p lets x pass
    unchanged. `channelwise` draws one entry for each example and channel, as `nn.Dropout2d` does.
    """

    mask: Tensor

    def __init__(self, p: float = 0.25, *, channelwise: bool = False) -> None:
        """Drop with probability p, 0 <= p < 1."""
        super().__init__()
        if not 0 <= p < 1:
            raise fail("dropout.p", f"is {p}", "give a probability in [0, 1)")
        self.p = p
        self.channelwise = channelwise
        self.declare("mask")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Describe the mask."""
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channelwise else tuple(x.shape)
        keep = 1 - self.p
        return {"mask": Noise(shape, Bernoulli(keep), neutral=keep, dtype=x.dtype, lower=0.0, upper=1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mask; without one, pass x on."""
        mask = self.supplied("mask")
        return x if mask is None else x * mask / (1 - self.p)

    def extra_repr(self) -> str:
        """Show the probability."""
        return f"p={self.p}" + (", channelwise" if self.channelwise else "")


def with_dropout(model: nn.Module, p: float = 0.25, where: Sequence[str] | None = None) -> nn.Module:
    """Copy a model and insert `Dropout(p)` after the modules at the given paths.

    By default after the positions that the model declares in `dropout_positions`: here, every convolutional block
    (after its activation, before pooling), every stage of a ResNet, every block of the vision transformer. In an
    `nn.Sequential` the dropout is appended, so that no parameter changes its name.
    """
    positions = getattr(model, "dropout_positions", ()) if where is None else where
    if not positions:
        raise fail("dropout.where", "this model declares no dropout_positions", "give the module paths to put it after")
    known = dict(model.named_modules())
    remedy = f"its modules: {', '.join(path for path in known if path)}"
    refuse([Problem(f"dropout.where {p}", "no such module", remedy) for p in positions if p not in known])
    copy = deepcopy(model)
    for path in sorted(positions, reverse=True):
        copy = insert_after(copy, path, "dropout", Dropout(p))
    return copy
