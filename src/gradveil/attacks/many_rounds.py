"""Attacks on many rounds of one model: one estimate of the gradient from all of them.

The server has to send the same parameters again and again, or nearly so, and clients to compute on the same examples.
Then the mean of what they send tells as much as a search that explains every round at once, for the price of one. A
sampler shows more: how often an entry was chosen says how large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion_presets import OWN_DRAWS, ig_scheliga
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch

_BATCHES = 16
"""Gradients of public images that magnitudes and signs are taken from, where a run has so many images."""
_ENOUGH, _OFTEN = 32, 3
"""Of fewer kept entries the smallest says too little of the threshold, of fewer rounds hits too little of the root."""

Estimate = Annotated[Literal["mean", "ranks", "thresholds"], "How one gradient is made of many rounds."]
Sampled = Annotated[Literal["ranks", "thresholds"], "How one gradient is made of many rounds of samples."]


@dataclass(frozen=True)
class Pooled(Inversion):
    """The search, and what it is done on.

    `mean`: of what was sent, whatever was done to it. The others know that MinMax sampling sent it: s = g + C / g of a
    few entries, each chosen with probability g^2 / (g^2 + C). `ranks` (GLAUS, Yang et al. 2023) looks at which entries
    were sent, and with which sign: the magnitude is that of the same rank among the attacker's own gradients, ranked by
    how often an entry was sent; the sign is the one seen, or else that of the attacker's mean gradient. `thresholds`
    looks at the values too: the smallest |s| of a layer is 2 sqrt(C), and how often an entry was sent tells which root
    is g.
    """

    estimate: Estimate = "mean"

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to rank without gradients of one's own."""
        yield from super().problems(prospect)
        if self.estimate != "mean" and prospect.public < prospect.examples:
            what = f"{prospect.public} public images make no gradient of {prospect.examples}"
            yield Problem("data.public", what, "choose data that has more, or lower client.batch")

    def pooled(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> Observation:
        """Return the rounds as one, of their mean parameters and the estimated update."""
        first = observations[0]
        params = {n: torch.stack([seen.params[n] for seen in observations]).mean(0) for n in first.params}
        whole = replace(first, params=params)
        if self.estimate == "mean":
            return replace(whole, update={n: _mean(observations, n) for n in first.update})
        sizes, mean = self._own(whole, simulated_client, knowledge, key)
        update = {n: _ranked(observations, n, sizes[n], mean[n]) for n in first.update}
        if self.estimate == "thresholds" and len(observations) >= _OFTEN:
            update = {n: _by_thresholds(observations, n, value) for n, value in update.items()}
        return replace(whole, update=update)

    def _own(
        self, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[Tensors, Tensors]:
        """Return the sorted magnitudes of each layer's gradient, and the mean gradient, over public images."""
        public, size = knowledge.public, seen.examples
        if public is None or len(public.inputs) < size:
            raise fail(f"attack {self.name}", "was given too few public images to know magnitudes by", "give more")
        count = min(_BATCHES, len(public.inputs) // size)
        order = torch.randperm(len(public.inputs), generator=key.child(Stream.AUXILIARY).generator())[: count * size]
        device = next(iter(seen.params.values())).device
        own = Batch(*(value[order.to(value.device)].unflatten(0, (count, size)).to(device) for value in public))
        simulated_client = simulated_client.undefended_update()
        spec = simulated_client.noise_spec(seen.params, Batch(own.inputs[0], own.targets[0]))
        drawn = [spec.sample(key.child(Stream.AUXILIARY, number)) for number in range(count)]
        noise = {n: torch.stack([each[n] for each in drawn]).to(own.inputs.device) for n in spec}
        state = tmap(lambda value: value.expand(count, *value.shape), simulated_client.init(seen.params))
        with torch.no_grad():
            sent, _ = simulated_client.updates(seen.params, own, noise, state)
        sizes = {n: value.flatten(1).abs().sort(1, descending=True).values.mean(0) for n, value in sent.items()}
        return sizes, {n: value.mean(0) for n, value in sent.items()}

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once."""
        pooled = self.pooled(observations, simulated_client, knowledge, key)
        return super().plan([pooled], simulated_client.undefended_update(), knowledge, key)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every target client's batch from all rounds together."""
        pooled = self.pooled(observations, simulated_client, knowledge, key)
        return super().__call__([pooled], simulated_client.undefended_update(), knowledge, key, progress, plan)

    def evaluate(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the objective [V] at inputs [V, B, ...]."""
        pooled = self.pooled(observations, simulated_client, knowledge, key)
        return super().evaluate([pooled], simulated_client.undefended_update(), knowledge, key, inputs, noise, plan)

    def match(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the distances without priors [V, ...] at inputs [V, B, ...]."""
        pooled = self.pooled(observations, simulated_client, knowledge, key)
        return super().match([pooled], simulated_client.undefended_update(), knowledge, key, inputs, noise, plan)


def _sent(observations: Sequence[Observation], name: str) -> Iterator[Tensor]:
    """Go through a parameter's updates [V, N], round after round: there may be too many to hold twice."""
    return (seen.update[name].flatten(1) for seen in observations)


def _mean(observations: Sequence[Observation], name: str) -> Tensor:
    shape = observations[0].update[name].shape
    return (sum(_sent(observations, name), torch.zeros(())) / len(observations)).reshape(shape)


def _ranked(observations: Sequence[Observation], name: str, sizes: Tensor, mean: Tensor) -> Tensor:
    """Give each entry the magnitude of its rank by hits, of equal hits the mean, and the sign that it was sent with."""
    like = observations[0].update[name]
    hits, signs = torch.zeros_like(like).flatten(1), torch.zeros_like(like).flatten(1)
    for sent in _sent(observations, name):
        hits += sent != 0
        signs += sent.sign()
    signs = torch.where(hits > 0, signs.sign(), mean.flatten().sign())
    found = torch.empty_like(hits)
    for target_client, row in enumerate(hits):
        order = row.argsort(descending=True, stable=True)
        _, group, counts = row[order].unique_consecutive(return_inverse=True, return_counts=True)
        total = torch.zeros(len(counts)).to(sizes).index_add_(0, group, sizes)
        found[target_client, order] = (total / counts)[group]
    return (signs * found).reshape(like.shape)


def _by_thresholds(observations: Sequence[Observation], name: str, otherwise: Tensor) -> Tensor:
    """Solve s = g + C / g for what was sent; where few entries of a target's layer were, take another estimate."""
    like = observations[0].update[name]
    hits, larger, smaller, odds = (torch.zeros_like(like).flatten(1) for _ in range(4))
    enough = torch.ones_like(hits[:, :1], dtype=torch.bool)
    for sent in _sent(observations, name):
        kept = sent != 0
        enough &= kept.sum(1, keepdim=True) >= _ENOUGH
        least = torch.where(kept, sent.abs(), torch.inf).amin(1, keepdim=True)
        root = (sent.square() - least.square()).clamp(min=0).sqrt()
        far, near = (sent.abs() + root) / 2, (sent.abs() - root) / 2
        hits += kept
        larger += torch.where(kept, sent.sign() * far, 0)
        smaller += torch.where(kept, sent.sign() * near, 0)
        odds += torch.where(kept, (far / near.clamp(min=torch.finfo(like.dtype).tiny)).log(), 0)
    seen = hits.clamp(min=1)
    # Of the larger root an entry is chosen with probability far / (far + near), of the smaller one with the rest.
    weight = torch.sigmoid((2 * hits - len(observations)) * odds / seen)
    found = weight * larger / seen + (1 - weight) * smaller / seen
    return torch.where(enough, found, otherwise.flatten(1)).reshape(like.shape)


def averaging() -> Pooled:
    """IG on the mean of what was sent in all rounds: noise of mean zero, sampling and rounding are averaged away."""
    own = {field.name: getattr(ig_scheliga(), field.name) for field in fields(Inversion)}
    return Pooled(**{**own, "name": "averaging", "rounds": "all"})


def glaus(estimate: Sampled = "ranks") -> Pooled:
    """GLAUS: magnitudes by how often an entry was sampled, signs by what was seen; then IG, where the paper has DLG."""
    knowledge = {**OWN_DRAWS, "public": Known()}
    return replace(averaging(), name="glaus", simulated_client="full", estimate=estimate, knowledge=knowledge)
