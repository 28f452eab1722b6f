"""Loss steering: a last layer trained such that one class keeps nearly all of a batch's loss; a search follows.

Only the last layer changes, by ordinary training on public images. With each example's share l of the loss of a batch
and its share p of the similarity to what the server looks for, it minimises the mean of (1 - p) l (Shan et al. 2025,
"Geminio: Language-Guided Gradient Inversion Attacks in Federated Learning"). The similarity here is that of the class:
one for examples of the target class, zero for others. No weight is out of scale, and examples of other classes move the
model little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion_presets import OWN_DRAWS, SHOWN, ig
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.malicious.caught_examples import Catch
from gradveil.attacks.malicious.fishing import Fishing
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.settings import Count
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, qualified, take
from gradveil.nn.module_paths import evaluating, features, last_layer

_BATCH, _LR, _SHARP = 64, 0.05, 100.0
"""Images per step, step size of Adam, and sharpness of the similarities' softmax."""
_LEAST = 1e-6
"""Smallest sum of losses that shares are computed of."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Steering(Fishing):
    """A search for the examples of one class, on which a trained last layer lets the loss remain.

    Every further round looks for the next class.
    """

    lessons: Annotated[Count, "Epochs over the public images in which the last layer is trained."] = 100

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Require public images, besides a suitable last layer."""
        yield from super().problems(prospect)
        if not prospect.public:
            yield Problem(
                "data.public",
                "no public images to train the last layer on",
                "choose data with public images, or fishing",
            )

    def planted(self) -> str:
        """Describe the change to the model."""
        return "a last layer trained to leave the loss to one class"

    def _head(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return the last layer, trained from the received one."""
        last = last_layer(client.model, _blank(client, knowledge))
        weight, bias = (client.params()[f"{last}.{kind}"].clone().requires_grad_() for kind in ("weight", "bias"))
        target, public = self._target(number, len(bias)), knowledge.public
        if public is None or not bool((public.targets == target).any()):
            problem = f"has no public images of class {target}"
            raise fail(f"attack {self.name}", problem, "choose data with such images, or fishing")
        with torch.no_grad(), evaluating(client.model):
            values = torch.cat(
                [features(client.model, part, last).flatten(1) for part in public.inputs.split(_AT_ONCE)]
            )
        generator = Key(number, (Stream.FISHING,)).generator()
        optimiser = torch.optim.Adam([weight, bias], lr=_LR)
        with torch.enable_grad():
            for _ in range(self.lessons):
                for places in torch.randperm(len(values), generator=generator).to(values.device).split(_BATCH):
                    labels = public.targets[places]
                    losses = F.cross_entropy(F.linear(values[places], weight, bias), labels, reduction="none")
                    wanted = (_SHARP * (labels == target).to(losses)).softmax(0)
                    steered = ((1 - wanted) * losses).mean() / losses.sum().clamp_min(_LEAST)
                    optimiser.zero_grad()
                    steered.backward()
                    optimiser.step()
        return {qualified(last, "weight"): weight.detach(), qualified(last, "bias"): bias.detach()}

    def _caught(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge
    ) -> tuple[list[Catch], list[Tensor]]:
        """Count the examples of each round's class: each has a gradient of nearly -1 at the target's bias."""
        last = last_layer(simulated_client.model, _blank(simulated_client, knowledge))
        groups: list[Catch] = []
        counted: list[Tensor] = []
        for seen in observations[: len(observations[0].params[qualified(last, "bias")])]:
            bias = seen.update[qualified(last, "bias")].double()
            target, local = self._target(seen.round, bias.shape[1]), simulated_client.local
            finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
            usual = 1.0 if local is None else local.lr * max(1, local.count(seen.examples // simulated_client.members))
            numbers = (-seen.examples * bias[:, target] / usual).round().clamp(0, seen.examples)
            numbers = torch.where(finite, numbers.nan_to_num(0.0), 0.0).long()
            counted = counted or [F.one_hot(n.new_tensor(target), bias.shape[1]) * n for n in numbers]
            for number in numbers.unique().tolist():
                if number < 1:
                    continue
                places = (numbers == number).nonzero().flatten()
                scale = seen.examples / number / usual
                update = {n: v * scale for n, v in take(seen.update, places).items()}
                clients = tuple(seen.target_clients[place] for place in places.tolist())
                alone = replace(seen, update=update, examples=number, target_clients=clients)
                groups.append(Catch(places, target, alone))
        return groups, counted


def _blank(client: Client, knowledge: Knowledge) -> Tensor:
    return next(iter(client.params().values())).new_zeros((1, *knowledge.space.shape))


def steering() -> Steering:
    """Loss steering to one class by a trained last layer, then IG; each observed round takes another class."""
    settings = {field.name: getattr(ig(), field.name) for field in fields(Inversion)}
    knowledge = {"public": Known(), **SHOWN, **OWN_DRAWS}
    return Steering(**{**settings, "name": "steering", "labels": "restore", "rounds": "all", "knowledge": knowledge})
