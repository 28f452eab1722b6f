"""Optimal defences in their global form: fitted to public images, the same for every client, known to the server."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradveil.core.allowed import Choice, unused
from gradveil.core.errors import Problem, fail
from gradveil.core.laws import Agreed
from gradveil.core.noise import Key, Noise, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch, Context
from gradveil.defences.probed import Probing
from gradveil.theory.sensitivity import squared_row_norms

FORM = Choice(("local", "global"))
"""Whether a defence is fitted to the client's own batch, or to public ones."""
_KEY = Key(0, (Stream.PUBLIC, Stream.PROBE))
_DRAWN: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
"""The directions of a few shapes: inside of `vmap` nothing may be drawn."""
_SHAPES = 8


class Fitted(Probing):
    """Base of transforms that may be fitted to public batches (`form="global"`) in place of the client's own.

    These are the first `batches` of the client's public images, as large as its own batch, at the parameters of the
    round, in directions on which everybody has agreed. Labels are those of the public images, or all classes in turn
    where none are known. What follows tells nothing of the client's batch.
    """

    form: Literal["local", "global"]
    batches: int

    @property
    def needs_public(self) -> bool:
        """Whether it is fitted to public images."""
        return self.form == "global"

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the directions: those of the global form are of public batches, and the same for everybody."""
        if not self.needs_public:
            return super().directions(batch)
        shape, dtype = (self.probes, *batch.inputs.shape), batch.inputs.dtype
        drawn = _agreed(shape, dtype)
        return NoiseSpec({"probe": Noise(shape, Agreed(_KEY, shape), neutral=drawn, dtype=dtype, discrete=True)})

    def on_public(self, context: Context, probe: Tensor) -> tuple[list[Tensors], list[Tensors]]:
        """Compute the squared row norms and the gradients of the public batches: of nothing that is private.

        In a batch of clients each has directions of its own, the same for all: with those all would be computed as
        often as there are clients. So the ones that were declared are taken where they are at hand.
        """
        if context.public is None:
            what = "is fitted to public images, and there are none"
            raise fail(f"{type(self).__name__}.form", what, "give Client(domain=Domain(..., public=images))")
        gradient, domain = context.public.gradient, context.public.domain
        probe = _DRAWN.get((tuple(probe.shape), probe.dtype), probe).to(probe.device)
        squares: list[Tensors] = []
        found: list[Tensors] = []
        for batch in domain.batches(context.public.size, self.batches):
            squares.append(tmap(torch.detach, squared_row_norms(gradient, batch, probe)))
            found.append(tmap(torch.detach, gradient(batch)))
        return squares, found

    def form_problems(self, owner: str, *local: str) -> list[Problem]:
        """Refuse settings of the local form, whose defaults the class holds, in the global one, and the other way."""
        if self.form == "local":
            return unused(owner, self, ("batches",), "the local form is fitted to no public batch")
        given = [name for name in local if getattr(self, name) != getattr(type(self), name)]
        what = "is for the client's own batch, of which the global form knows nothing"
        remedy = "leave it out; fewer batches are cheaper"
        return [Problem(f"{owner}.{name}", what, remedy) for name in given if self.needs_public]


def _agreed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if (shape, dtype) not in _DRAWN:
        for old in [*_DRAWN][: len(_DRAWN) - _SHAPES + 1]:
            del _DRAWN[old]
        _DRAWN[shape, dtype] = Agreed(_KEY, shape).sample(shape, dtype, _KEY.generator())
    return _DRAWN[shape, dtype]
