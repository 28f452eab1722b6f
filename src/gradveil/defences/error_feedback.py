"""Error feedback: what a compressor leaves out this round is added in the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.core.chain import Chain
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, select, tmap, under
from gradveil.core.types import Batch, Context, HasMessages, Stage, Transform


@dataclass(frozen=True)
class Feedback(Transform, HasMessages):
    """P = g + e; sent = inner(P); e <- P - sent, with e = 0 in the first round (Karimireddy et al. 2019, Alg. 1).

    Only compressors may stand inside: a residual would add back in the next round exactly the noise that was added, or
    the length that was clipped, in this one.
    """

    inner: Transform

    def __post_init__(self) -> None:
        """Refuse an inner transform whose protection the residual would cancel, with every problem."""
        problems: list[Problem] = []
        for name, transform in _parts(self.inner):
            where = f"feedback.{name}"
            if transform.noise({"probe": torch.zeros(2, 2)}):
                what = "draws noise, and the residual would cancel it: e <- P - sent holds minus the noise"
                problems.append(Problem(where, what, "put the noise before the feedback: chain(noise=…, prune=…)"))
            elif transform.stage < Stage.PRUNE:
                what = "is no compressor, and the residual would undo it over the rounds"
                problems.append(Problem(where, what, "put it before the feedback: chain(clip=…, prune=…)"))
            elif transform.per_example:
                what = "acts on each example, while a residual belongs to one update"
                problems.append(Problem(where, what, "use a transform of the mean"))
        refuse(problems)

    @property
    def stage(self) -> Stage:  # pyright: ignore[reportIncompatibleVariableOverride] - it stands where its inner stands
        """The stage of the inner transform."""
        return self.inner.stage

    @property
    def guarantee(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner transform's guarantee."""
        return self.inner.guarantee

    @property
    def needs_public(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner transform takes public images."""
        return self.inner.needs_public

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start with a zero residual."""
        return {**under("residual", tmap(torch.zeros_like, params)), **under("inner", self.inner.init(params))}

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the inner transform's directions: they choose what is sent, and add nothing to it."""
        return self.inner.directions(batch)

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the inner transform's intermediates."""
        return self.inner.intermediates(params)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Compress the update plus the residual; keep what was left out."""
        accumulated = tmap(torch.add, update, select(state, "residual"))
        sent, inner = self.inner.apply(accumulated, select(state, "inner"), noise, context)
        return sent, {**under("residual", tmap(torch.sub, accumulated, sent)), **under("inner", inner)}

    def speakers(self) -> int:
        """Count the users whom the inner transform asks."""
        return self.inner.speakers() if isinstance(self.inner, HasMessages) else 0

    def takes_turns(self) -> bool:
        """Return whether the inner transform lets clients speak in turn."""
        return isinstance(self.inner, HasMessages) and self.inner.takes_turns()

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Propose what the inner transform does of the update plus the residual."""
        if not isinstance(self.inner, HasMessages):
            return {}
        accumulated = tmap(torch.add, update, select(state, "residual"))
        return self.inner.proposal(accumulated, select(state, "inner"), noise, context)

    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Return the inner transform's messages."""
        return self.inner.announce(proposals, previous, number) if isinstance(self.inner, HasMessages) else {}

    def in_round(self, number: int) -> Feedback:
        """Return it around what the inner transform is in a round."""
        now = self.inner.in_round(number)
        return self if now is self.inner else replace(self, inner=now)

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return the inner transform's evidence."""
        return self.inner.evidence(sent, exact)

    @property
    def identity_settings(self) -> Mapping[str, Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Around the identity the residual stays zero."""
        settings = self.inner.identity_settings
        return None if settings is None else {"inner": replace(self.inner, **settings)}  # pyright: ignore


def residual_of(send: Transform | None, state: Mapping[str, Tensor]) -> Tensors | None:
    """Return the residual in a client's state; None unless error feedback is the last stage before sending.

    There P = sent + residual is what was compressed, since the residual is what was left out of it.
    """
    name, last = send.stages[-1] if isinstance(send, Chain) and send.stages else ("transform", send)
    if not isinstance(last, Feedback):
        return None
    return select(state, f"send.{name}.residual" if isinstance(send, Chain) else "send.residual")


def _parts(transform: Transform) -> list[tuple[str, Transform]]:
    """List the transforms inside, chains taken apart."""
    if not isinstance(transform, Chain):
        return [("inner", transform)]
    return [(name if path == "inner" else f"{name}.{path}", t) for name, part in transform for path, t in _parts(part)]
