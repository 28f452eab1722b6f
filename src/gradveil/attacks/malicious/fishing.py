"""Fishing: a crafted last layer passes the gradient of one class only; a search follows.

All classes except the target have zero weights and the same large bias, so that the model predicts one of them for
every example. The gradient behind the last layer is p_c - y_c times the target's row, with p_c - y_c = -1 for examples
of the target class and 0 for others. The gradient of a batch is thus that of its few examples of the class (Wen et al.
2022, "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification").
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion_presets import OWN_DRAWS, SHOWN, ig
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.malicious.caught_examples import Catch, catches, combined
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.noise import Key
from gradveil.core.settings import Range
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, qualified
from gradveil.nn.module_paths import at, call_on, evaluating, features, last_layer

SEARCHED = ("iterations", "restarts", "lr", "sign", "tv", "l2", "objective", "tolerance", "patience", "keep", "report")
"""Settings of the search that apply here."""
_WEIGHT, _BIAS = 0.5, 1000.0
"""The target's weights and the bias of the other classes in the paper's published program."""
_LOOKS, _MARGIN = 8, 4.0
"""Images of noise on which the size of the model's features is measured, and a margin for other images."""
_RIDGE = 1e-2
"""Ridge of the gate's fit, in units of the features' mean variance."""
_SHARP = 1000.0
"""Change of a gate's logit, in nats, per standard deviation of its measure."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Fishing(Inversion):
    """A search for the caught examples of one class.

    All examples of the target class in a batch are caught and searched together. With a `share`, a gate passes only
    this share of the class's public images: the least typical ones, by a measure of the features that separates the
    class from the others. Every further round fishes for the next class.
    """

    target: Annotated[int, Range(0, integer=True), "Target class of the first round."] = 0
    share: Annotated[
        float | None,
        Range(0, 1, low_open=True, high_open=True, optional=True),
        "Share of the class that is caught; none for all of it.",
    ] = None

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models without a suitable last layer, and gates without public images to fit them to."""
        simulated_client = prospect.simulated_client
        try:
            last = _last(simulated_client, prospect.shape)
        except GradveilError as error:
            yield from error.problems
            return
        layer = at(simulated_client.model, last)
        if getattr(layer, "bias", None) is None or qualified(last, "bias") not in simulated_client.trained():
            problem = f"has no trained bias in its last layer '{last}', from which the caught examples are counted"
            yield Problem("model", problem, "add one, or choose another attack: rob, curious")
        elif (classes := len(simulated_client.params()[qualified(last, "bias")])) < 2:
            yield Problem("model", "has one output", "choose a model with one output per class")
        elif self.target >= classes:
            yield Problem("target", f"is {self.target}, and the model has {classes} classes", "count them from 0")
        if self.share is not None and not prospect.public:
            yield Problem(
                "data.public",
                "no public images to fit the gate to",
                "choose data with public images, or leave share out",
            )

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client with the crafted model."""
        crafted = replace(client, model=copy.deepcopy(client.model))
        with torch.no_grad():
            for name, value in self._head(client, knowledge, 0).items():
                crafted.model.get_parameter(name).copy_(value)
        return crafted

    def resend(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return the parameters of a later round: the client's, with a last layer for the next class."""
        return {**client.params(), **self._head(client, knowledge, number)}

    def planted(self) -> str:
        """Describe the change to the model."""
        part = "" if self.share is None else f", the least typical {self.share:.0%} of it"
        return f"a last layer that passes the gradient of one class only{part}"

    def _head(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return the crafted parameters of the last layer."""
        last = _last(client, knowledge.space.shape)
        params = client.params()
        weight, bias = (torch.zeros_like(params[f"{last}.{kind}"]) for kind in ("weight", "bias"))
        target = self._target(number, len(bias))
        if self.share is None:
            weight[target] = _WEIGHT
            bias += self._bias_of_others(client, last, knowledge)
            bias[target] = 0
        else:
            weight[target], bias[target] = self._gate(client, last, knowledge, target, self.share)
        return {qualified(last, "weight"): weight, qualified(last, "bias"): bias}

    def _bias_of_others(self, client: Client, last: str, knowledge: Knowledge) -> float:
        """Return the bias of the other classes, which exceeds the paper's if features are large."""
        like = next(iter(client.params().values()))
        lower, upper = knowledge.space.bounds(like)
        drawn = torch.rand((_LOOKS, *knowledge.space.shape), generator=Key(0, (Stream.FISHING,)).generator()).to(like)
        with torch.no_grad(), evaluating(client.model):
            of_noise = features(client.model, lower + (upper - lower) * drawn, last)
        # The target's logit is at most _WEIGHT |features|_1.
        return max(_BIAS, _MARGIN * _WEIGHT * float(of_noise.flatten(1).abs().sum(1).max()))

    def _target(self, number: int, classes: int) -> int:
        return (self.target + number) % classes

    def _gate(
        self, client: Client, last: str, knowledge: Knowledge, target: int, share: float
    ) -> tuple[Tensor, Tensor]:
        """Fit a measure of the features that is large for the class, and close the gate above its quantile.

        Examples of the class above the quantile contribute nothing, nor do others below. The last layer does not know
        the labels, so that examples of other classes above the quantile are caught too.
        """
        public = knowledge.public
        of_class = None if public is None else public.targets == target
        if public is None or of_class is None or not bool(of_class.any()) or bool(of_class.all()):
            problem = f"has no public images of class {target} and of others to fit its gate to"
            raise fail(f"attack {self.name}", problem, "leave share out, or choose data with such images")
        with torch.no_grad(), evaluating(client.model):
            parts = [features(client.model, chunk, last) for chunk in public.inputs.split(_AT_ONCE)]
        values = torch.cat(parts).flatten(1).double()
        centred = values - values.mean(0)
        spread = centred.T @ centred / len(values)
        wanted = of_class.to(values) - of_class.double().mean()
        ridge = _RIDGE * spread.diagonal().mean() * torch.eye(len(spread)).to(values)
        # Ridge regression of membership in the class on the features.
        measure = torch.linalg.solve(spread + ridge, centred.T @ wanted / len(values))
        scores = values[of_class] @ measure
        sharp = _SHARP / float((values @ measure).std())
        cut = torch.quantile(scores, share)
        # The other logits are 0: above the cut the model predicts the target, so that the error of an example of it is
        # 0; below the cut it is -1.
        return sharp * measure, -sharp * cut

    def _caught(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge
    ) -> tuple[list[Catch], list[Tensor]]:
        """Return the caught examples of each round with a new class, and the first round's counts of all classes."""
        first = observations[0]
        last = _last(simulated_client, knowledge.space.shape)
        weight, bias = (f"{last}.{kind}" for kind in ("weight", "bias"))
        target = self._target(first.round, len(first.params[bias]))
        rows = first.params[weight].flatten(1).norm(dim=1)
        if bias not in first.update or int(rows.argmax()) != target or int((rows > 0).sum()) != 1:
            fix = "let the server send the client that `craft` returns"
            raise fail(f"attack {self.name}", "its last layer was not in the model that the client trained", fix)
        groups: list[Catch] = []
        counted: list[Tensor] = []
        for seen in observations[: len(first.params[bias])]:
            target = self._target(seen.round, len(seen.params[bias]))
            local, usual = simulated_client.local, 1.0
            if local is not None:  # the scale of an update of several small steps, relative to a mean gradient
                usual = local.lr * max(1, local.count(seen.examples // simulated_client.members))
            of_round, counts = catches(seen, last, target, self.share is not None, usual)
            groups += of_round
            counted = counted or counts
        return groups, counted

    @property
    def search(self) -> Inversion:
        """The search for the caught examples by their part of the updates."""
        settings = {field.name: getattr(self, field.name) for field in fields(Inversion)}
        return Inversion(**{**settings, "labels": "given", "rounds": "last"})

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose the rows of each chunk, for one group of target clients after another."""
        plans = [
            self.search.plan([catch.observation], _alone(simulated_client), _labelled(knowledge, catch), key)
            for catch in self._caught(observations, simulated_client, knowledge)[0]
        ]
        return tuple(size for plan in plans for size in plan)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Search for the caught examples of every target client."""
        began = time.perf_counter()
        groups, counted = self._caught(observations, simulated_client, knowledge)
        rows = sum(len(catch.places) for catch in groups) * self.restarts
        sizes, done, used = list(plan), 0, list[int]()
        parts: list[Reconstruction] = []

        def report(step: Progress) -> None:
            if progress:
                budget = self.descent.iterations
                total = done * budget + step.row_iterations
                progress(replace(step, row_iterations=total, row_budget=rows * budget))

        for catch in groups:
            of_catch = len(catch.places) * self.restarts
            chunks: list[int] = []
            while sizes and sum(chunks) < of_catch:
                chunks.append(sizes.pop(0))
            part = self.search(
                [catch.observation],
                _alone(simulated_client),
                _labelled(knowledge, catch),
                key.child(Stream.ROUND, catch.observation.round),
                report,
                chunks,
            )
            parts.append(part)
            used += part.plan
            done += of_catch
        lower, upper = knowledge.space.bounds(next(iter(observations[0].params.values())))
        blank = ((lower + upper) / 2).expand(knowledge.space.shape)
        result = combined(groups, parts, counted, observations[0], blank, self.restarts, self.points())
        return replace(result, seconds=time.perf_counter() - began, plan=tuple(used))

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
        """Return the mean objective [V] at the true caught examples; NaN if there are fewer than assumed."""
        assert knowledge.targets is not None, "evaluation knows the true labels"
        values: list[list[Tensor]] = [[] for _ in observations[0].target_clients]
        nothing = inputs.new_tensor(torch.nan)
        for catch in self._caught(observations, simulated_client, knowledge)[0]:
            child = key.child(Stream.ROUND, catch.observation.round)
            for row, place in enumerate(catch.places.tolist()):
                part, truth = catch.only(row), inputs[place][knowledge.targets[place] == catch.target]
                seen, known = part.observation, _labelled(knowledge, part)
                if len(truth) > seen.examples:  # the examples with the smallest logits pass the gate
                    logits = call_on(simulated_client.model, seen.params, truth)[:, catch.target]
                    truth = truth[logits.argsort()[: seen.examples]]
                if len(truth) < seen.examples:
                    values[place].append(nothing)
                    continue
                client = _alone(simulated_client)
                values[place].append(self.search.evaluate([seen], client, known, child, truth.unsqueeze(0), {})[0])
        return torch.stack([torch.stack(of_client).mean() if of_client else nothing for of_client in values])


def _last(client: Client, shape: tuple[int, ...]) -> str:
    return last_layer(client.model, next(iter(client.params().values())).new_zeros((1, *shape)))


def _alone(simulated_client: Client) -> Client:
    """Return the client that sends the gradient of the caught examples: several steps count as one."""
    return replace(simulated_client, local=None, members=1)


def _labelled(knowledge: Knowledge, catch: Catch) -> Knowledge:
    shape = len(catch.places), catch.observation.examples
    return replace(knowledge, targets=torch.full(shape, catch.target), public=None)


def fishing() -> Fishing:
    """Fishing for one class by the last layer, then IG; each observed round fishes for another class."""
    settings = {field.name: getattr(ig(), field.name) for field in fields(Inversion)}
    knowledge = {**SHOWN, **OWN_DRAWS}  # used with simulated_client=full
    return Fishing(**{**settings, "name": "fishing", "labels": "restore", "rounds": "all", "knowledge": knowledge})
