"""What batch defences make of a client's examples: once for one gradient, else anew in every epoch or local step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.client.local import Local
from gradveil.core.errors import refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Anew, Batch, BatchTransform, Domain

Drawn = Callable[[int], Mapping[str, Tensor]]
"""Number of an epoch or step -> the noise that was drawn for it."""


@dataclass(frozen=True)
class Batching:
    """The batch transforms of a client. `batch.<i>` is before the names of the i-th one's noise.

    In local training those that act on all examples, at the start of every epoch, come before those that act on each
    step's batch. Under Poisson sampling, too, as many steps are an epoch as batches make the examples up.
    """

    transforms: tuple[BatchTransform, ...]
    domain: Domain | None
    local: Local | None

    def spec(self, batch: Batch, anew: Anew | None = None) -> NoiseSpec:
        """Declare what all transforms draw for a batch, or those that draw anew in every epoch (or step)."""
        refuse([problem for each in self.transforms for problem in each.problems(self.domain)])
        spec = NoiseSpec()
        for i, transform in self._those(anew):
            spec = spec | transform.noise(batch).under(f"batch.{i}")
        return spec

    def changed(self, batch: Batch, noise: Mapping[str, Tensor], anew: Anew | None = None) -> Batch:
        """Apply all transforms, or those that draw anew in every epoch (or step)."""
        for i, transform in self._those(anew):
            batch = transform.apply(batch, select(noise, f"batch.{i}"), self.domain)
        return batch

    def epochs(self, examples: int) -> int:
        """Count the epochs of local training that are begun."""
        assert self.local is not None
        return -(-self.local.count(examples) // self._pace(examples))

    def steps(self, batch: Batch, drawn: Tensor, of_epoch: Drawn) -> Callable[[int, Mapping[str, Tensor]], Batch]:
        """Return (step, its noise) -> the batch of the step, for steps one after the other.

        `drawn` [T, B] says who is in which step; under Poisson sampling everybody is there, and weighted elsewhere.
        """
        assert self.local is not None
        pace, poisson = self._pace(len(batch.inputs)), self.local.sampling == "poisson"
        whole = batch

        def at(t: int, noise: Mapping[str, Tensor]) -> Batch:
            nonlocal whole
            if t % pace == 0 and self.transforms:
                whole = self.changed(batch, of_epoch(t // pace), "epoch")
            own = whole if poisson else Batch(whole.inputs[drawn[t]], whole.targets[drawn[t]])
            return self.changed(own, noise, "step")

        return at

    def by_number(self, noise: Mapping[str, Tensor], kept: Container[str] = ()) -> tuple[Drawn, Drawn]:
        """Part what all local steps draw by steps, and what all epochs draw by epochs; what is `kept` is neither."""
        starts = {
            anew: tuple(f"batch.{i}." for i, each in enumerate(self.transforms) if each.anew == anew)
            for anew in ("step", "epoch")
        }
        each = [n for n in noise if n.startswith(("model.", "step.", *starts["step"])) and n not in kept]
        epoch = [n for n in noise if n.startswith(starts["epoch"])]
        return lambda t: {n: noise[n][t] for n in each}, lambda e: {n: noise[n][e] for n in epoch}

    def first_seen(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Return every example as it was when local training first computed with it; as it is, if it never did."""
        assert self.local is not None
        drawn, (of_step, of_epoch) = noise[self.local.order], self.by_number(of_batch(noise))
        at = self.steps(batch, drawn, of_epoch)
        made: Batch | None = None
        left = torch.ones(len(batch.inputs), dtype=torch.bool, device=batch.inputs.device)
        for t in range(len(drawn)):
            own = at(t, of_step(t))
            made = _alike(batch, own) if made is None else made
            if self.local.sampling == "poisson":
                new = left & (drawn[t] > 0)
                made = Batch(*(torch.where(_wide(new, a), b, a) for a, b in zip(made, own, strict=True)))
                left = left & ~new
            else:
                new = left[drawn[t]]
                old = Batch(*(value[drawn[t]] for value in made))
                now = Batch(*(torch.where(_wide(new, a), b, a) for a, b in zip(old, own, strict=True)))
                made = Batch(*(a.index_copy(0, drawn[t], b) for a, b in zip(made, now, strict=True)))
                left = left.index_fill(0, drawn[t], False)
        return batch if made is None else made

    def _pace(self, examples: int) -> int:
        """Count the steps of an epoch."""
        assert self.local is not None
        return max(1, examples // self.local.batch)

    def _those(self, anew: Anew | None) -> list[tuple[int, BatchTransform]]:
        return [(i, each) for i, each in enumerate(self.transforms) if anew is None or each.anew == anew]


def of_batch(noise: Mapping[str, Tensor]) -> Tensors:
    """Take what says which examples are computed with: the batch transforms' draws, and who is in which step."""
    return {n: value for n, value in noise.items() if n.startswith("batch.") or n in ("schedule", "inclusion")}


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (like.dim() - 1))


def _alike(batch: Batch, own: Batch) -> Batch:
    """Give the targets as probabilities where those of `own` are."""
    if batch.targets.dtype == own.targets.dtype:
        return batch
    classes = torch.arange(own.targets.shape[-1], device=batch.targets.device)
    return Batch(batch.inputs, (batch.targets.unsqueeze(-1) == classes).to(own.targets.dtype))
