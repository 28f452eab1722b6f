"""Aligned dual gradient pruning: all clients send within one public mask, so that the server's answer is sparse too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import Problem
from gradveil.core.settings import Checked, Kept, Range, Share, unused
from gradveil.core.tree import Tensors, select, tmap, under
from gradveil.core.types import Context, HasMessages
from gradveil.defences.entry import DUAL, DefenceEntry
from gradveil.defences.pruning import Pruning, as_written, ends_mask, share, smallest_mask, within

OUTVOTING = 3
"""Fewer voters cannot outvote a single liar."""


@dataclass(frozen=True)
class Aligned(Checked, Pruning, HasMessages):
    """Aligned DGP: of g without its own largest entries, send the k largest that lie in the public mask I.

    Per tensor of P entries, with the rate k = `keep`: floor(top P) entries of largest magnitude are dropped, and of
    the others the ceil(k P) largest in I are sent (fewer if I holds fewer). I has ceil(2 k P) positions. The preprint
    leaves the rounding open. Without a message I holds every position, and this is DGP.

    `selection` is the source of I:
    broadcast  one client publishes the positions of its ceil(2 k P) largest entries. The preprint's way: whatever
               controls that client chooses what is learned.
    vote       `voters` clients do, and the positions with most votes win; equals are taken by turns, round by round.
               A position that every honest voter names wins over one that only a minority of liars names.
    previous   the ceil(k P) largest entries of last round's mean update, which is public, and as many others by turns,
               so that every position comes back after 1 / k rounds. No client speaks. Without the others the mask could
               only shrink: what is outside is not sent, and what is not sent is not in the mean.
    The last two are ours. A client that speaks also reveals the positions of its largest entries.

    In each round of a training the speakers are drawn at random among the clients that answer, as in the preprint;
    `speaker=turns` lets all clients speak in turn.
    """

    keep: Annotated[Kept, "Share of entries that are sent."] = 0.2
    top: Annotated[Share, "Share of the largest entries that are not sent."] = 0.05
    selection: Annotated[
        Literal["broadcast", "vote", "previous"],
        "Source of the public mask: one client, several clients, or the mean update of the round before.",
    ] = "broadcast"
    voters: Annotated[int, Range(OUTVOTING, integer=True), "Number of clients that vote."] = 5
    speaker: Annotated[
        Literal["random", "turns"], "Choice of the clients that speak: drawn at random in each round, or in turn."
    ] = "random"
    label: ClassVar[str] = "adgp"
    ordered: ClassVar[bool] = True
    identity_settings: ClassVar = {"keep": 1.0, "top": 0.0}

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse shares that leave too little to send, and voters without a vote."""
        if sound and (total := as_written(self.keep) + as_written(self.top)) > 1:
            what = f"top + keep is {total}: too little is left to send"
            yield Problem("adgp", what, "give shares whose sum is at most 1")
        if self.selection in ("broadcast", "previous"):
            yield from unused("adgp", self, ("voters",), "there is no vote but with selection=vote")
        if self.selection == "previous":
            yield from unused("adgp", self, ("speaker",), "no client speaks with selection=previous")

    def removed(self) -> float:
        """Return the share of entries set to zero."""
        return 1 - self.keep

    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Keep what is kept where every position is public."""
        return {name: self._within(value, None) for name, value in update.items()}

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply by the masks; those that are not pinned are computed from the update and the public mask."""
        pinned, public = select(noise, self.prefix), select(context.messages, self.prefix)
        masks = {n: self._within(v.detach(), public[n]) for n, v in update.items() if n in public and n not in pinned}
        return super().apply(update, state, {**noise, **under(self.prefix, masks)}, context)

    def bounded(self, name: str, mask: Tensor, context: Context) -> Tensor:
        """Mark what was pruned within the public mask; outside of it any magnitude may be."""
        public = context.messages.get(f"{self.prefix}.{name}")
        hidden = super().bounded(name, mask, context)
        return hidden if public is None else hidden * public.to(hidden.dtype)

    def beyond(self, magnitude: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
        """Return the way to the nearer of the two ends: what is cut from the top exceeds all that is sent."""
        return within(magnitude, smallest, largest)

    def _within(self, value: Tensor, public: Tensor | None) -> Tensor:
        flat = value.abs().flatten()
        open_to = ~ends_mask(flat, 0, share(self.top, flat.numel()))
        if public is not None:
            open_to = open_to & public.flatten().bool()
        left = torch.where(open_to, flat, 0.0)
        return (open_to & largest(left, self._count(flat))).reshape(value.shape)

    def speakers(self) -> int:
        """Count the clients that publish a mask before a round."""
        return {"broadcast": 1, "vote": self.voters, "previous": 0}[self.selection]

    def takes_turns(self) -> bool:
        """Return whether clients speak in turn."""
        return self.speaker == "turns"

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Name the positions of the 2 k P largest entries, the dropped ones among them: `mask.<parameter>`."""
        if self.selection == "previous":
            return {}
        return under(self.prefix, tmap(self._largest, tmap(torch.detach, update)))

    def _largest(self, value: Tensor) -> Tensor:
        flat = value.abs().flatten()
        return largest(flat, self._count(flat, 2)).to(value.dtype).reshape(value.shape)

    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Make the public mask I, `mask.<parameter>`; none in the first round of `previous`."""
        if self.selection == "previous":
            return under(self.prefix, {name: self._again(value, number) for name, value in previous.items()})
        return {name: self._elected(votes[: self.speakers()], number) for name, votes in proposals.items()}

    def _elected(self, votes: Tensor, number: int) -> Tensor:
        """Mark the positions with most votes [U, ...]."""
        counts = (votes > 0.5).sum(0)
        # One vote outweighs every turn, as turns are below the number of positions; `largest` takes magnitudes.
        ranked = counts.flatten() * counts.numel() - self._turn(counts, number)
        return largest(ranked - ranked.min(), self._count(counts, 2)).reshape(counts.shape)

    def _again(self, mean: Tensor, number: int) -> Tensor:
        """Mark the largest entries of the mean update, and those whose turn it is of the others."""
        half = self._count(mean)
        return (largest(mean.abs().flatten(), half) | (self._turn(mean, number) < half)).reshape(mean.shape)

    def _turn(self, like: Tensor, number: int) -> Tensor:
        """Return the distance of each position from its turn: every round begins where the last one ended."""
        begin = number * self._count(like) % like.numel()
        return (torch.arange(like.numel(), device=like.device) - begin) % like.numel()

    def _count(self, like: Tensor, times: int = 1) -> int:
        """Count ceil(times k P), at most all."""
        # ceil(t k P) = P - floor((1 - t k) P), with the decimal share that was written, not its binary neighbour.
        return like.numel() - int(max(0, 1 - times * as_written(self.keep)) * like.numel())


def largest(magnitude: Tensor, count: int) -> Tensor:
    """Mark the `count` largest entries: of equal ones the last."""
    return ~smallest_mask(magnitude, magnitude.shape[-1] - count)


ALIGNED = (
    DefenceEntry(
        name="adgp",
        factory=Aligned,
        stage="prune",
        feedback=True,
        description="Aligned dual gradient pruning: within a public mask, send the largest entries but the very top",
        changes=("send",),
        cost="a few passes over the update; 22% of the bytes, and a mask from who chooses it",
        citation="Aligned Dual Gradient Pruning (anonymous preprint), after Xue et al. 2024; two selections are ours",
        traits=DUAL,
        identity={"keep": 1.0, "top": 0.0},
    ),
)
