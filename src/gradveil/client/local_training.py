"""Local training.

T optimiser steps from the global parameters, an unrolled loop, with the batch defences of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Schedule
from gradveil.core.settings import Checked, Count, Positive, Range, Share, Strength
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Batch, BatchTransform, Domain, Redraw

_Length = Annotated[int | None, Range(1, integer=True, optional=True)]


@dataclass(frozen=True)
class Local(Checked):
    """How a client trains between two messages. Give `steps` or `epochs`.

    The update it sends is parameters in minus parameters out: with one step of plain SGD that is lr times the gradient.
    """

    batch: Annotated[Count, "Examples of a step."]
    lr: Annotated[Positive, "Step size."]
    steps: Annotated[_Length, "Number of steps; none if `epochs` is given."] = None
    epochs: Annotated[_Length, "Passes over the examples; none if `steps` is given."] = None
    optimiser: Annotated[Literal["sgd", "adam"], "Optimiser of the steps."] = "sgd"
    momentum: Annotated[Share, "Momentum of SGD."] = 0.0
    nesterov: Annotated[bool, "Look ahead with the momentum."] = False
    weight_decay: Annotated[Strength, "Weight of the parameters in the gradient."] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    sampling: Annotated[Literal["batches", "poisson"], "How the examples of a step are chosen."] = "batches"
    """`batches`: of fixed size, each epoch in a fresh order. `poisson`: each of N examples is in each step with
    probability batch / N, and sums are divided by `batch`, the expected number (Abadi et al. 2016)."""
    label: ClassVar[str] = "local"

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse momentum where it means nothing, and two lengths or none."""
        if self.optimiser == "adam" and (self.momentum or self.nesterov):
            remedy = "leave them out: Adam has moments of its own (betas), or take the optimiser sgd"
            yield Problem("local.momentum", "and nesterov mean nothing to 'adam'", remedy)
        elif self.nesterov and not self.momentum:
            yield Problem("local.nesterov", "has no momentum to look ahead with", "give momentum, say 0.9")
        if (self.steps is None) == (self.epochs is None):
            yield Problem("local", "needs exactly one of steps and epochs", "remove or add one")

    @property
    def order(self) -> str:
        """Name the tensor that says who is in which step."""
        return "inclusion" if self.sampling == "poisson" else "schedule"

    def count(self, examples: int) -> int:
        """Return T, the number of optimiser steps for this many examples; the last incomplete batch is left out."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * (examples // self.batch)

    def at_once(self, examples: int) -> int:
        """Count the examples that clients in lockstep compute a step with: under Poisson sampling all of them."""
        return examples if self.sampling == "poisson" else self.batch

    def drawn(self, examples: int) -> NoiseSpec:
        """Declare who is in which step: `schedule` [T, B], or `inclusion` [T, N] of Poisson sampling.

        The neutral schedule takes the examples in order; the neutral inclusion is its mean, batch / N of every example.
        """
        if examples < self.batch:
            raise fail(
                "local.batch", f"is {self.batch}, the client has {examples} examples", f"make it at most {examples}"
            )
        if self.sampling == "batches":
            return NoiseSpec({"schedule": self._schedule(examples)})
        rate = self.batch / examples
        shape = (self.count(examples), examples)
        return NoiseSpec({"inclusion": Noise(shape, Bernoulli(rate), neutral=rate, lower=0, upper=1, discrete=True)})

    def _schedule(self, examples: int) -> Noise:
        shape = (self.count(examples), self.batch)
        per_epoch = examples // self.batch * self.batch
        order = (torch.arange(shape[0] * shape[1]) % per_epoch).reshape(shape)
        return Noise(shape, Schedule(examples), neutral=order, dtype=torch.int64, discrete=True)


def train(local: Local, params: Tensors, steps: int, gradient: Callable[[int, Tensors], Tensors]) -> Tensors:
    """Run T steps. `gradient(t, params)` gives the (already defended) gradient of step t. Returns the parameters.

    SGD: v <- m v + g, p <- p - lr v (Nesterov: lr (g + m v)). Adam: p <- p - lr m / (sqrt(v) + eps), bias-corrected.
    """
    first: Tensors = {}
    second: Tensors = {}
    for t in range(steps):
        # Where nothing will be differentiated, what the first step made may be overwritten by the next ones.
        mine = t > 0 and not torch.is_grad_enabled()
        g = gradient(t, params)
        # Before the moments, as in torch's SGD and Adam: an L2 penalty, not AdamW's decoupled decay.
        if local.weight_decay:
            g = {name: torch.add(value, params[name], alpha=local.weight_decay) for name, value in g.items()}
        if local.optimiser == "adam":
            (b1, b2), zero = local.betas, not first
            # m <- b1 m + (1 - b1) g, which `lerp` computes, and v <- b2 v + (1 - b2) g^2; both start at 0.
            first = {name: v * (1 - b1) if zero else torch.lerp(first[name], v, 1 - b1) for name, v in g.items()}
            second = {
                name: v * v * (1 - b2) if zero else torch.addcmul(second[name] * b2, v, v, value=1 - b2)
                for name, v in g.items()
            }
            # lr m / (1 - b1^T) and sqrt(v / (1 - b2^T)) with T = t + 1: the corrections are numbers, taken out of the
            # tensors.
            size, spread = local.lr / (1 - b1 ** (t + 1)), (1 - b2 ** (t + 1)) ** -0.5
            below = {name: _root(v) * spread + local.eps for name, v in second.items()}
            moved = {name: torch.addcdiv(params[name], first[name], below[name], value=-size) for name in g}
        else:
            if local.momentum and mine:
                first = {n: first[n].mul_(local.momentum).add_(v) for n, v in g.items()}
            elif local.momentum:
                # Cloned, because later steps write into it, and g may belong to whoever computed it.
                first = {n: torch.add(v, first[n], alpha=local.momentum) if first else v.clone() for n, v in g.items()}
            move = {n: torch.add(v, first[n], alpha=local.momentum) for n, v in g.items()} if local.nesterov else first
            subtract = Tensor.sub_ if mine else torch.sub
            moved = {n: subtract(params[n], v, alpha=local.lr) for n, v in (move or g).items()}
        params = {**params, **moved}
    return params


def _root(square: Tensor) -> Tensor:
    """Square root whose derivative at zero is zero instead of infinite: untouched parameters stay differentiable."""
    if not torch.is_grad_enabled():
        return square.sqrt()
    # Both sides of a `where` are differentiated, and 0 times the infinite slope at 0 is NaN: so the root gets a 1
    # there.
    safe = torch.where(square > 0, square, torch.ones_like(square))
    return torch.where(square > 0, safe.sqrt(), torch.zeros_like(square))


class LazyNoise(NamedTuple):
    """The noise of one round. Thousands of local steps' would fill memory: a step's is drawn when the step comes."""

    once: Mapping[str, Tensor]
    """Without local training all of it."""
    step: Callable[[int], Mapping[str, Tensor]]
    epoch: Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class BatchDefences:
    """The batch transforms of a client. `batch.<i>` is before the names of the i-th one's noise.

    In local training those that act on all examples, at the start of every epoch, come before those that act on each
    step's batch. Under Poisson sampling, too, as many steps are an epoch as batches make the examples up.
    """

    transforms: tuple[BatchTransform, ...]
    domain: Domain | None
    local: Local | None = None

    def spec(self, batch: Batch, when: Redraw | None = None) -> NoiseSpec:
        """Declare what all transforms draw for a batch, or those that are drawn again in every epoch (or step)."""
        refuse([problem for each in self.transforms for problem in each.problems(self.domain)])
        spec = NoiseSpec()
        for i, transform in self._those(when):
            spec = spec | transform.noise(batch).under(f"batch.{i}")
        return spec

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], when: Redraw | None = None) -> Batch:
        """Apply all transforms, or those that are drawn again in every epoch (or step)."""
        for i, transform in self._those(when):
            batch = transform.apply(batch, select(noise, f"batch.{i}"), self.domain)
        return batch

    def epochs(self, examples: int) -> int:
        """Count the epochs of local training that are begun."""
        assert self.local is not None
        return -(-self.local.count(examples) // self._pace(examples))

    def steps(
        self, batch: Batch, drawn: Tensor, of_epoch: Callable[[int], Mapping[str, Tensor]]
    ) -> Callable[[int, Mapping[str, Tensor]], Batch]:
        """Return (step, its noise) -> the batch of the step, for steps one after the other.

        `drawn` [T, B] says who is in which step; under Poisson sampling everybody is there, and weighted elsewhere.
        """
        assert self.local is not None
        pace, poisson = self._pace(len(batch.inputs)), self.local.sampling == "poisson"
        whole = batch

        def at(t: int, noise: Mapping[str, Tensor]) -> Batch:
            nonlocal whole
            if t % pace == 0 and self.transforms:
                whole = self.apply(batch, of_epoch(t // pace), "epoch")
            own = whole if poisson else Batch(whole.inputs[drawn[t]], whole.targets[drawn[t]])
            return self.apply(own, noise, "step")

        return at

    def lazily(self, noise: Mapping[str, Tensor], kept: Container[str] = ()) -> LazyNoise:
        """Part noise that is all at hand by local steps and epochs; what is `kept` belongs to neither."""
        starts = {
            when: tuple(f"batch.{i}." for i, each in enumerate(self.transforms) if each.redraw == when)
            for when in ("step", "epoch")
        }
        each = [n for n in noise if n.startswith(("model.", "step.", *starts["step"])) and n not in kept]
        epoch = [n for n in noise if n.startswith(starts["epoch"])]

        def of_step(t: int) -> Tensors:
            return {n: noise[n][t] for n in each}

        def of_epoch(e: int) -> Tensors:
            return {n: noise[n][e] for n in epoch}

        return LazyNoise(noise, of_step, of_epoch)

    def of_many(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Apply the transforms of many clients, everything with a leading V."""
        return vmap(self.computed_with)(batch, of_batch(noise)) if self.transforms else batch

    def computed_with(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Return the examples that the client computes with, in local training as they were the first time."""
        if not self.transforms:
            return batch
        return self.apply(batch, noise) if self.local is None else self._first_seen(batch, noise)

    def _first_seen(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Return every example as it was when local training first computed with it; as it is, if it never did."""
        assert self.local is not None
        drawn, lazy = noise[self.local.order], self.lazily(of_batch(noise))
        at = self.steps(batch, drawn, lazy.epoch)
        made: Batch | None = None
        left = torch.ones(len(batch.inputs), dtype=torch.bool, device=batch.inputs.device)
        for t in range(len(drawn)):
            own = at(t, lazy.step(t))
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

    def _those(self, when: Redraw | None) -> list[tuple[int, BatchTransform]]:
        return [(i, each) for i, each in enumerate(self.transforms) if when is None or each.redraw == when]


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
