"""The learned attack: a network that maps updates to images, trained for the attack.

The attacker has auxiliary data. The simulated client computes an update for each example, with fresh noise every time,
and a network learns to invert this map (Wu et al. 2023, "Learning to Invert: Simple Adaptive Attacks for Gradient
Inversion in Federated Learning"). The defence thus acts on the network's training data as on the observed update, also
in later rounds, where it depends on the client's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction
from gradveil.attacks.simulated_updates import Simulated
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Count, Positive
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.initial_weights import initialise

_AT_ONCE = 64
"""Updates per training step of the network."""


@dataclass(frozen=True)
class Learned(Checked):
    """Train on public examples for `epochs`, then invert every target client's update once."""

    name: str = "learned"
    needs: ClassVar[str] = "pictures"
    epochs: Annotated[Count, "Passes over the public images."] = 30
    updates: Annotated[Count | None, "Updates simulated in a pass; all that the public images make if left out."] = None
    width: Annotated[Count, "Units of the network's hidden layers."] = 1000
    features: Annotated[Count, "Random sums of entries that stand for a larger update."] = 4096
    lr: Annotated[Positive, "Step size of the training."] = 1e-3
    labels: FoundLabels = "given"
    simulated_client: Literal["naive", "full"] = "full"
    knowledge: Mapping[str, How] = field(default_factory=lambda: {"public": Known()})

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse too few public images, and labels that cannot be read off."""
        yield from _public_problems(prospect.public, prospect.examples)
        yield from label_problems(self.labels, prospect)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Train the network, then invert the last round's update."""
        began = time.perf_counter()
        seen, public = observations[-1], knowledge.public
        images = 0 if public is None else len(public.inputs)
        refuse([replace(p, where=f"attack {self.name}") for p in _public_problems(images, seen.examples)])
        assert public is not None
        targets = find_labels(self.labels, seen, seen.believed(simulated_client), knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        client = Simulated(simulated_client, observations)
        student = _Student(self, client, knowledge, public, key)
        student.learn(progress, len(seen.target_clients))
        inputs = student.invert(seen.update, targets)
        match = client.match(inputs, targets, key)
        objective = match[:, 0]
        zero = torch.zeros(len(seen.target_clients), dtype=torch.long, device=inputs.device)
        return Reconstruction(
            inputs=inputs,
            targets=targets,
            objective=objective,
            status=tuple("diverged" if bad else "budget" for bad in torch.isinf(objective).tolist()),
            iterations=zero + self.epochs,
            seconds=time.perf_counter() - began,
            restart=zero,
            objectives=objective.unsqueeze(1),
            initial=client.distance(student.average(targets), targets, key)[:, 0],
            match=match,
        )

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
        """Return 1 - cosine [V] between the updates of inputs [V, B, ...], with other noise, and the observed ones."""
        assert knowledge.targets is not None, "evaluation knows the true labels"
        client = Simulated(simulated_client, observations)
        return client.distance(inputs, knowledge.targets.to(inputs.device), key)[:, 0]

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
        """Return `Reconstruction.match`: first the distance of `evaluate`, which has no priors."""
        assert knowledge.targets is not None, "evaluation knows the true labels"
        return Simulated(simulated_client, observations).match(inputs, knowledge.targets.to(inputs.device), key)


def _public_problems(images: int, examples: int) -> Iterator[Problem]:
    """Refuse public images for fewer than two updates, from which no difference between updates can be learnt."""
    if not images:
        remedy = "audit data with a public split, give public= from Python, or choose another attack"
        yield Problem("data", "there are no public images to learn from", remedy)
    elif images < 2 * examples:
        problem = f"there are too few public images to learn from: {images}, and an update is made from {examples}"
        yield Problem("data", problem, f"give at least {2 * examples} (data.public), or choose another attack")


class _Student:
    """The network, its input features and its training."""

    def __init__(self, attack: Learned, client: Simulated, knowledge: Knowledge, public: Batch, key: Key) -> None:
        self.attack, self.client, self.key = attack, client, key
        seen = client.seen
        self.examples, self.classes = seen.examples, knowledge.classes
        example = next(iter(seen.params.values()))
        self.lower, self.upper = knowledge.space.bounds(example)
        self.public = Batch(public.inputs.to(example), public.targets.to(example.device))
        self.shape = (self.examples, *knowledge.space.shape)
        entries = sum(value[0].numel() for value in seen.update.values())
        self.size = min(entries, attack.features)
        draw = key.child(Stream.HASH).generator()
        self.order = torch.randperm(entries, generator=draw).to(example.device)
        self.sign = (2.0 * torch.randint(2, (entries,), generator=draw) - 1).to(example)
        network = nn.Sequential(
            nn.Linear(self.size + self.examples * self.classes, attack.width),
            nn.ReLU(),
            nn.Linear(attack.width, attack.width),
            nn.ReLU(),
            nn.Linear(attack.width, prod(self.shape)),
            nn.Sigmoid(),
        )
        self.network = initialise(network, key.child(Stream.NETWORK).generator()).to(example)
        # Normalise features by the lessons of the first epoch, which are kept for it: simulated updates cost most.
        self.first = list(self._lessons(0))
        values = torch.cat([features for _, features in self.first])
        spread = values.std(0)
        self.centre = values.mean(0)
        # Features that hardly vary on public examples must not be blown up.
        self.scale = spread + 1e-3 * spread.mean() + torch.finfo(spread.dtype).tiny

    def features(self, update: Tensors) -> Tensor:
        """Return the entries of updates [N, ...], or random sums of them if there are too many."""
        flat = torch.cat([value.flatten(1) for value in update.values()], 1)
        if flat.shape[1] == self.size:
            return flat
        # Feature hashing: each entry goes with a random sign to one of `size` random sums, which keeps inner products
        # on average.
        shuffled = (flat * self.sign)[:, self.order]
        return nn.functional.pad(shuffled, (0, -shuffled.shape[1] % self.size)).unflatten(1, (-1, self.size)).sum(1)

    def network_input(self, features: Tensor, targets: Tensor) -> Tensor:
        """Combine normalised features and labels [N, B]."""
        labels = nn.functional.one_hot(targets, self.classes).flatten(1).to(features)
        return torch.cat([(features - self.centre) / self.scale, labels], 1)

    def _lessons(self, epoch: int) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the public examples of an epoch, in random order: batches and the features of their updates."""
        key = self.key.child(Stream.EPOCH, epoch)
        order = torch.randperm(len(self.public.inputs), generator=key.child(Stream.ORDER).generator())
        count = len(order) // self.examples
        count = count if self.attack.updates is None else min(count, max(2, self.attack.updates))
        groups = order[: count * self.examples].view(count, self.examples)
        for start in range(0, count, _AT_ONCE):
            places = groups[start : start + _AT_ONCE]
            # Sorted by label, so that the order of the images does not have to be guessed.
            places = places.gather(1, self.public.targets.cpu()[places].argsort(dim=1, stable=True))
            batch = Batch(self.public.inputs[places], self.public.targets[places])
            sent = self.client.send(batch, key.child(Stream.NOISE, start))
            yield batch, torch.cat([self.features(update) for update in sent])

    def learn(self, progress: Callable[[Progress], None] | None, target_clients: int) -> None:
        """Minimise the squared error in pixels, and report its mean after every epoch."""
        weights = {name: value.detach().requires_grad_() for name, value in self.network.named_parameters()}
        optimiser = torch.optim.Adam(list(weights.values()), lr=self.attack.lr)
        for epoch in range(self.attack.epochs):
            for group in optimiser.param_groups:
                group["lr"] = self.attack.lr * (0.1 if epoch >= 0.8 * self.attack.epochs else 1.0)
            total, count = 0.0, 0
            for batch, features in self._lessons(epoch) if epoch else self.first:
                images = functional_call(self.network, weights, (self.network_input(features, batch.targets),))
                truth = ((batch.inputs - self.lower) / (self.upper - self.lower)).flatten(1)
                loss = (images - truth).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total, count = total + float(loss.detach()) * len(truth), count + len(truth)
            self.first = []
            if progress:
                done, budget = (epoch + 1) * target_clients, self.attack.epochs * target_clients
                progress(Progress(0, target_clients, done, budget, total / count))
        with torch.no_grad():
            for name, value in self.network.named_parameters():
                value.copy_(weights[name])

    def invert(self, update: Tensors, targets: Tensor) -> Tensor:
        """Return the images [V, B, C, H, W] of updates [V, ...], in the order of their labels."""
        order = targets.argsort(dim=1, stable=True)
        with torch.no_grad():
            pixels = self.network(self.network_input(self.features(update), targets.gather(1, order)))
        images = self.lower + (self.upper - self.lower) * pixels.nan_to_num(0.5).view(-1, *self.shape)
        # argsort of an order is its inverse.
        return torch.stack([image[place.argsort()] for image, place in zip(images, order, strict=True)])

    def average(self, targets: Tensor) -> Tensor:
        """Return the mean public image for every target client: an estimate that ignores the update."""
        return self.public.inputs.mean(0).expand(*targets.shape, *self.shape[1:]).contiguous()
