"""Fishing: the last layer lets one class alone move the rest of the model; a search follows.

All classes but the target have no weights and the same large bias: every example is taken for one of them, and what
goes back through the last layer is p_c - y_c times the target's row. That is -1 for examples of the target class and
nothing for all others, whose gradient stays in the last layer. So a batch's gradient is that of its few examples of the
class (Wen et al. 2022, "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification").
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.malicious.caught_examples import Catch, catches, together
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.nn.module_paths import at, call_on, evaluating, features, last_layer

SEARCHED = ("iterations", "restarts", "lr", "sign", "tv", "l2", "objective", "tolerance", "patience", "keep", "report")
"""Settings of the one search that mean something here."""
_WEIGHT, _BIAS = 0.5, 1000.0
"""The target's weights, and how far the other classes are ahead: the paper's published program has these."""
_LOOKS, _MARGIN = 8, 4.0
"""Images of noise that say how large the model's features are, and how much larger they may be of others."""
_RIDGE = 1e-2
"""How much of the features' mean variance is added to each when the gate is fitted."""
_SHARP = 1000.0
"""How many nats a gate's logit moves along one standard deviation of what it looks at."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Fishing(Inversion):
    """The search for what is caught, and how it is caught.

    Where a batch has several examples of the target class, all of them are caught, and searched for together. With a
    `share` a gate lets this share of the class's public images pass alone: the least typical, by a measure of the
    features that tells the class from the others. In every further round the next class is fished for.
    """

    target: int = 0
    """The class that is fished for in the first round."""
    share: float | None = None
    """The share of the class that is caught; None for all of it."""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models without a last layer to fish with, and gates without public images to fit them to."""
        simulated_client = prospect.simulated_client
        try:
            last = _last(simulated_client, prospect.shape)
        except GradveilError as error:
            yield from error.problems
            return
        layer = at(simulated_client.model, last)
        if getattr(layer, "bias", None) is None or f"{last}.bias" not in simulated_client.trained():
            what = f"has no bias that is trained in its last layer '{last}': what was caught cannot be told"
            yield Problem("model", what, "give it one, or choose another attack: rob, curious")
        elif (classes := len(simulated_client.params()[f"{last}.bias"])) < 2:
            yield Problem("model", "has one output", "choose a model with an output a class")
        elif self.target >= classes:
            yield Problem("target", f"is {self.target}, and the model tells {classes} classes", "count them from 0")
        if self.share is not None and not prospect.public:
            yield Problem("data.public", "no public images to fit the gate to", "choose data that has, or leave share")

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client as it is after it took the model that the server sends."""
        made = replace(client, model=copy.deepcopy(client.model))
        with torch.no_grad():
            for name, value in self._head(client, knowledge, 0).items():
                made.model.get_parameter(name).copy_(value)
        return made

    def resend(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return what the server sends in a later round: the same, with a last layer for the next class."""
        return {**client.params(), **self._head(client, knowledge, number)}

    def planted(self) -> str:
        """Say what was changed."""
        part = "" if self.share is None else f", the least typical {self.share:.0%} of it"
        return f"a last layer that lets one class alone move the rest{part}"

    def _head(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Make the last layer's parameters."""
        last = _last(client, knowledge.space.shape)
        params = client.params()
        weight, bias = (torch.zeros_like(params[f"{last}.{kind}"]) for kind in ("weight", "bias"))
        target = self._target(number, len(bias))
        if self.share is None:
            weight[target] = _WEIGHT
            bias += self._ahead(client, last, knowledge)
            bias[target] = 0
        else:
            weight[target], bias[target] = self._gate(client, last, knowledge, target, self.share)
        return {f"{last}.weight": weight, f"{last}.bias": bias}

    def _ahead(self, client: Client, last: str, knowledge: Knowledge) -> float:
        """Say how far the other classes must be ahead: further than the paper says where features are large."""
        like = next(iter(client.params().values()))
        lower, upper = knowledge.space.bounds(like)
        drawn = torch.rand((_LOOKS, *knowledge.space.shape), generator=Key(0, (Stream.FISHING,)).generator()).to(like)
        with torch.no_grad(), evaluating(client.model):
            seen = features(client.model, lower + (upper - lower) * drawn, last)
        return max(_BIAS, _MARGIN * _WEIGHT * float(seen.flatten(1).abs().sum(1).max()))

    def _target(self, number: int, classes: int) -> int:
        return (self.target + number) % classes

    def _gate(
        self, client: Client, last: str, knowledge: Knowledge, target: int, share: float
    ) -> tuple[Tensor, Tensor]:
        """Fit a measure of the features that is large for the class, and shut the gate above its quantile.

        Nothing comes of an example of the class above it, nor of others below: a last layer sees the features, not the
        labels, so that of the others those above are caught too.
        """
        public = knowledge.public
        own = None if public is None else public.targets == target
        if public is None or own is None or not bool(own.any()) or bool(own.all()):
            what = f"was given no public images of class {target} and of others to fit its gate to"
            raise fail(f"attack {self.name}", what, "leave share out, or choose data that has")
        with torch.no_grad(), evaluating(client.model):
            parts = [features(client.model, some, last) for some in public.inputs.split(_AT_ONCE)]
        seen = torch.cat(parts).flatten(1).double()
        centred = seen - seen.mean(0)
        spread = centred.T @ centred / len(seen)
        wanted = own.to(seen) - own.double().mean()
        ridge = _RIDGE * spread.diagonal().mean() * torch.eye(len(spread)).to(seen)
        measure = torch.linalg.solve(spread + ridge, centred.T @ wanted / len(seen))
        scores = seen[own] @ measure
        sharp = _SHARP / float((seen @ measure).std())
        cut = torch.quantile(scores, share)
        return sharp * measure, -sharp * cut

    def _caught(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge
    ) -> tuple[list[Catch], list[Tensor]]:
        """Look at each round of another class; of the first one, count every target client's examples of each class."""
        first = observations[0]
        last = _last(simulated_client, knowledge.space.shape)
        weight, bias = (f"{last}.{kind}" for kind in ("weight", "bias"))
        target = self._target(first.round, len(first.params[bias]))
        rows = first.params[weight].flatten(1).norm(dim=1)
        if bias not in first.update or int(rows.argmax()) != target or int((rows > 0).sum()) != 1:
            remedy = "let the server send the client that `craft` returns"
            raise fail(f"attack {self.name}", "its last layer was not in the model that the client trained", remedy)
        found: list[Catch] = []
        counted: list[Tensor] = []
        for seen in observations[: len(first.params[bias])]:
            fished = self._target(seen.round, len(seen.params[bias]))
            own, counts = catches(
                seen, last, fished, self.share is not None, _of_steps(simulated_client, seen.examples)
            )
            found += own
            counted = counted or counts
        return found, counted

    @property
    def search(self) -> Inversion:
        """The search for the caught examples, by the updates that they alone would have sent."""
        own = {field.name: getattr(self, field.name) for field in fields(Inversion)}
        return Inversion(**{**own, "labels": "given", "rounds": "last"})

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once, catch by catch."""
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
        """Search for what was caught of every target client."""
        began = time.perf_counter()
        found, counted = self._caught(observations, simulated_client, knowledge)
        rows = sum(len(catch.places) for catch in found) * self.restarts
        sizes, done, used = list(plan), 0, list[int]()
        parts: list[Reconstruction] = []
        for catch in found:
            own = len(catch.places) * self.restarts
            part = self.search(
                [catch.observation],
                _alone(simulated_client),
                _labelled(knowledge, catch),
                key.child(Stream.ROUND, catch.observation.round),
                _onwards(progress, done, rows, self.descent.iterations) if progress else None,
                _taken(sizes, own),
            )
            parts.append(part)
            used += part.plan
            done += own
        lower, upper = knowledge.space.bounds(next(iter(observations[0].params.values())))
        blank = ((lower + upper) / 2).expand(knowledge.space.shape)
        whole = together(found, parts, counted, observations[0], blank, self.restarts, self.points())
        return replace(whole, seconds=time.perf_counter() - began, plan=tuple(used))

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
        """Return the mean objective [V] at the true examples of what was caught; NaN where they are fewer."""
        assert knowledge.targets is not None, "the audit tells the labels"
        values: list[list[Tensor]] = [[] for _ in observations[0].target_clients]
        nothing = inputs.new_tensor(torch.nan)
        for catch in self._caught(observations, simulated_client, knowledge)[0]:
            child = key.child(Stream.ROUND, catch.observation.round)
            for row, place in enumerate(catch.places.tolist()):
                one, own = catch.only(row), inputs[place][knowledge.targets[place] == catch.target]
                told, known = one.observation, _labelled(knowledge, one)
                if len(own) > told.examples:  # those count that pass the gate: whose logit is the smallest
                    logits = call_on(simulated_client.model, told.params, own)[:, catch.target]
                    own = own[logits.argsort()[: told.examples]]
                if len(own) < told.examples:
                    values[place].append(nothing)
                    continue
                found = self.search.evaluate([told], _alone(simulated_client), known, child, own.unsqueeze(0), {})
                values[place].append(found[0])
        return torch.stack([torch.stack(each).mean() if each else nothing for each in values])


def _last(client: Client, shape: tuple[int, ...]) -> str:
    return last_layer(client.model, next(iter(client.params().values())).new_zeros((1, *shape)))


def _alone(simulated_client: Client) -> Client:
    """Return the client as one that sends the gradient of what was caught: several steps are taken for one."""
    return replace(simulated_client, local=None, members=1)


def _of_steps(simulated_client: Client, examples: int) -> float:
    """Say how much larger than a mean gradient an update of several small steps is."""
    local = simulated_client.local
    return 1.0 if local is None else local.lr * max(1, local.count(examples // simulated_client.members))


def _labelled(knowledge: Knowledge, catch: Catch) -> Knowledge:
    shape = len(catch.places), catch.observation.examples
    return replace(knowledge, targets=torch.full(shape, catch.target), public=None)


def _taken(sizes: list[int], rows: int) -> tuple[int, ...]:
    """Take the next chunks of a plan, as many as are needed for so many rows."""
    taken: list[int] = []
    while sizes and sum(taken) < rows:
        taken.append(sizes.pop(0))
    return tuple(taken)


def _onwards(progress: Callable[[Progress], None], done: int, rows: int, budget: int) -> Callable[[Progress], None]:
    """Count on from the rows that are done."""

    def report(step: Progress) -> None:
        progress(replace(step, row_iterations=done * budget + step.row_iterations, row_budget=rows * budget))

    return report
