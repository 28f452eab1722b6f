"""Attacks on many rounds of one model: one estimate of the gradient from all of them.

The server must send nearly the same parameters every time, and clients must compute on the same examples. Then a search
on the mean update recovers as much as a search that explains every round, at the cost of one round. Sampling defences
reveal more: the frequency with which an entry is sent grows with its magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion_presets import OWN_DRAWS, dlg, ig_scheliga, portfolio
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch

_BATCHES = 16
"""Largest number of gradients of public images from which magnitudes and signs are taken."""
_ENOUGH, _OFTEN = 32, 3
"""Fewest sent entries from which the threshold is estimated, and fewest rounds from which the root is."""

Estimate = Annotated[Literal["mean", "ranks", "thresholds", "angles"], "How one gradient is made of many rounds."]
Sampled = Annotated[Literal["ranks", "thresholds"], "How one gradient is made of many rounds of samples."]
Search = Annotated[
    Literal["ig", "dlg"], "Search on the estimated gradient: by angle, or DLG, which finds the label too."
]
Magnitudes = Annotated[
    Literal["mean", "client"], "Magnitudes of auxiliary gradients: their mean by rank, or those of one other client."
]


@dataclass(frozen=True)
class Pooled(Inversion):
    """The search on one estimate of the gradient from all observed rounds.

    - `mean` averages the updates, whatever the defence is.
    - `ranks` (GLAUS, Yang et al. 2023) assumes MinMax sampling, which sends s = g + C / g of an entry with probability
      g^2 / (g^2 + C). Entries are ranked by how often they were sent. An entry gets the magnitude of its rank among
      gradients of auxiliary data, and the observed sign, or else the sign of the mean of those gradients. The paper's
      attacker is a client itself and takes its own gradient for the magnitudes (`magnitudes="client"`: one of the
      auxiliary gradients) and the mean of all clients, which it hears from the server, for the signs.
    - `thresholds` uses the values too: the smallest |s| of a layer is 2 sqrt(C), and the frequency with which an entry
      was sent decides which root of s = g + C / g is g.
    - `angles` keeps an orthonormal basis of what was sent, as long as the gradients: what a client sends at a right
      angle to its gradient, as CENSOR does, shows the gradient's own line after as many rounds as it has entries, and
      in fewer rounds how far a simulated gradient is from that line.
    """

    estimate: Estimate = "mean"
    magnitudes: Magnitudes = "mean"

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to rank entries without enough auxiliary data."""
        yield from super().problems(prospect)
        if self.estimate in ("ranks", "thresholds") and prospect.public < prospect.examples:
            problem = f"{prospect.public} public images are too few for a gradient of {prospect.examples}"
            yield Problem("data.public", problem, "choose data that has more, or lower client.batch")

    def pooled(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> Observation:
        """Combine the rounds into one observation with their mean parameters and the estimated update."""
        first = observations[0]
        params = {n: torch.stack([seen.params[n] for seen in observations]).mean(0) for n in first.params}
        pooled = replace(first, params=params)
        if self.estimate == "angles":
            return replace(pooled, update={n: _basis(observations, n) for n in first.update})
        if self.estimate == "mean":
            mean = {n: sum(_sent(observations, n), torch.zeros(())) / len(observations) for n in first.update}
            return replace(pooled, update={n: mean[n].reshape(value.shape) for n, value in first.update.items()})
        sizes, mean = self._public_gradients(pooled, simulated_client, knowledge, key)
        update = {n: _ranked(observations, n, sizes[n], mean[n]) for n in first.update}
        if self.estimate == "thresholds" and len(observations) >= _OFTEN:
            update = {n: _by_thresholds(observations, n, value) for n, value in update.items()}
        return replace(pooled, update=update)

    def _public_gradients(
        self, seen: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[Tensors, Tensors]:
        """Return the sorted magnitudes of each layer, and the mean, of gradients of public images."""
        public, size = knowledge.public, seen.examples
        if public is None or len(public.inputs) < size:
            raise fail(f"attack {self.name}", "has too few public images to estimate magnitudes", "give more")
        count = min(_BATCHES, len(public.inputs) // size)
        order = torch.randperm(len(public.inputs), generator=key.child(Stream.AUXILIARY).generator())[: count * size]
        device = next(iter(seen.params.values())).device
        batch = Batch(*(value[order.to(value.device)].unflatten(0, (count, size)).to(device) for value in public))
        simulated_client = simulated_client.undefended_update()
        spec = simulated_client.noise_spec(seen.params, Batch(batch.inputs[0], batch.targets[0]))
        drawn = [spec.sample(key.child(Stream.AUXILIARY, number)) for number in range(count)]
        noise = {n: torch.stack([each[n] for each in drawn]).to(batch.inputs.device) for n in spec}
        state = tmap(lambda value: value.expand(count, *value.shape), simulated_client.init(seen.params))
        with torch.no_grad():
            sent, _ = simulated_client.updates(seen.params, batch, noise, state)
        owners = slice(None, 1) if self.magnitudes == "client" else slice(None)
        sizes = {n: v[owners].flatten(1).abs().sort(1, descending=True).values.mean(0) for n, v in sent.items()}
        return sizes, {n: value.mean(0) for n, value in sent.items()}

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose the rows of each chunk."""
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
    """Yield a parameter's updates [V, N] round by round: there may be too many to hold twice."""
    return (seen.update[name].flatten(1) for seen in observations)


def _basis(observations: Sequence[Observation], name: str) -> Tensor:
    """Return an orthonormal basis [V, R, *shape] of the span of a parameter's updates, as long as these are on average.

    The span of right angles has a dimension less than the parameter has entries: the direction that is seen least, the
    gradient's own, is left out where the rounds would fill the space.
    """
    shape = observations[0].update[name].shape[1:]
    sent = torch.stack([values.double() for values in _sent(observations, name)], 1)
    size = sent.square().sum(2).sqrt().mean(1)
    most = max(1, min(sent.shape[1], sent.shape[2] - 1))
    directions = torch.linalg.svd(sent.nan_to_num(0, 0, 0), full_matrices=False).Vh[:, :most]
    return (size.view(-1, 1, 1) * directions).to(observations[0].update[name]).unflatten(2, shape)


def _ranked(observations: Sequence[Observation], name: str, sizes: Tensor, mean: Tensor) -> Tensor:
    """Give each entry the magnitude of its rank by hits, averaged over equal hits, and the sign that was sent."""
    like = observations[0].update[name]
    hits, signs = torch.zeros_like(like).flatten(1), torch.zeros_like(like).flatten(1)
    for sent in _sent(observations, name):
        hits += sent != 0
        signs += sent.sign()
    signs = torch.where(hits > 0, signs.sign(), mean.flatten().sign())
    magnitudes = torch.empty_like(hits)
    for target_client, row in enumerate(hits):
        order = row.argsort(descending=True, stable=True)
        _, group, counts = row[order].unique_consecutive(return_inverse=True, return_counts=True)
        total = torch.zeros(len(counts)).to(sizes).index_add_(0, group, sizes)
        magnitudes[target_client, order] = (total / counts)[group]
    return (signs * magnitudes).reshape(like.shape)


def _by_thresholds(observations: Sequence[Observation], name: str, otherwise: Tensor) -> Tensor:
    """Solve s = g + C / g for g; for layers of which few entries were sent, return another estimate."""
    like = observations[0].update[name]
    hits, larger, smaller, odds = (torch.zeros_like(like).flatten(1) for _ in range(4))
    enough = torch.ones_like(hits[:, :1], dtype=torch.bool)
    for sent in _sent(observations, name):
        hit = sent != 0
        enough &= hit.sum(1, keepdim=True) >= _ENOUGH
        least = torch.where(hit, sent.abs(), torch.inf).amin(1, keepdim=True)
        # g^2 - s g + C = 0 has the roots (|s| +- sqrt(s^2 - 4 C)) / 2, and the smallest |s| of a layer is 2 sqrt(C).
        root = (sent.square() - least.square()).clamp(min=0).sqrt()
        far, near = (sent.abs() + root) / 2, (sent.abs() - root) / 2
        hits += hit
        larger += torch.where(hit, sent.sign() * far, 0)
        smaller += torch.where(hit, sent.sign() * near, 0)
        odds += torch.where(hit, (far / near.clamp(min=torch.finfo(like.dtype).tiny)).log(), 0)
    count = hits.clamp(min=1)
    # An entry is sent with probability far / (far + near) if g is the larger root, else with near / (far + near).
    # Log-likelihood ratio of the two roots: (hits - misses) log(far / near).
    weight = torch.sigmoid((2 * hits - len(observations)) * odds / count)
    estimate = weight * larger / count + (1 - weight) * smaller / count
    return torch.where(enough, estimate, otherwise.flatten(1)).reshape(like.shape)


def averaging() -> Pooled:
    """IG on the mean update of all rounds, which averages zero-mean noise, sampling and rounding away."""
    return _pooled(ig_scheliga(), "averaging")


def _pooled(search: Inversion, name: str) -> Pooled:
    settings = {field.name: getattr(search, field.name) for field in fields(Inversion)}
    return Pooled(**{**settings, "name": name, "rounds": "all"})


def right_angles() -> Pooled:
    """Search for a gradient at a right angle to what every round of one model sent, and as long."""
    base = replace(_pooled(portfolio(), "right-angles"), simulated_client="naive", knowledge=OWN_DRAWS, variants=())
    return replace(base, objective="right-angles", features=0.0, estimate="angles")


def glaus(estimate: Sampled = "ranks", search: Search = "ig", magnitudes: Magnitudes = "mean") -> Pooled:
    """GLAUS: magnitudes from how often an entry was sampled, and the observed signs; then IG, or the paper's DLG."""
    base = _pooled(dlg() if search == "dlg" else ig_scheliga(), "glaus")
    knowledge = {**OWN_DRAWS, "public": Known()}
    return replace(base, simulated_client="full", estimate=estimate, magnitudes=magnitudes, knowledge=knowledge)
