"""A client's inspection of its own update before it is sent: examples that it reveals.

Two questions have two answers. *Leak*: the share of the batch that can be read from what is about to be sent. Small
honest batches leak. *Malice*: far more examples are singled out than the same batch shows at freshly initialised
parameters, at the received ones without biases, and at those of the round before. Both are decided on the update that
really leaves: a defence that hides the examples satisfies both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.federated.isolated_examples import SILENT, Isolated, Pass, read_from
from gradveil.federated.model_inspection import POLICY, Finding, Policy
from gradveil.nn.initial_weights import drawing_from, initialise
from gradveil.nn.stochastic import buffer_places, switched_off
from gradveil.nn.weight_files import is_statistic

ALLOWED = 0.25
"""The share of a batch that may be read from an update."""
JUDGED = 16
"""Malice is judged in batches of more examples: up to here honest models single out nearly all of them."""
_FEW, _SOON, _MANY, _SDS, _LEAST = 0.15, 0.25, 0.5, 3.0, 5
"""Excesses that are malice, as shares of the batch: over fresh parameters and those without biases, over fresh ones and
the round before, over fresh ones alone. And the standard deviations and examples that each of them has to exceed: of
few examples no standard deviation says what is chance."""
_HEARD, _AGREES = 0.5, 0.2
_WHOLE = 4096
"""A client with more examples is judged by the first gradient alone."""
_ALIKE, _GROUPS, _UNITS = 0.1, 13, 64
"""The share of units with the same examples as another one that is malice, in large batches; the least share times the
groups of examples in smaller ones, where units are alike by chance; and the least number of units."""


First = tuple[Batch, Tensors]
"""Examples and noise that the model was given for the first gradient of a round (`gradveil.client.first_gradient`)."""


@dataclass(frozen=True)
class Exposure:
    """What an update shows of the batch that it was computed from."""

    layers: tuple[Isolated, ...]
    examples: int
    """Examples of the first gradient."""
    read: frozenset[int]
    """Those of them that can be read from what is sent."""
    share: float
    """The share of the first gradient's examples that can be read, or of that many all that the sum of local steps or
    the difference from the last update shows: the largest of them."""
    malice: tuple[Finding, ...] = ()
    summed: int = 0
    """Examples that the sum of local steps shows, of all that the client has."""
    between: int = 0
    """Examples that the difference from the last update shows, of all that the client has."""
    unseen: tuple[str, ...] = ()
    """Matrices of the update whose gradients nothing was counted in: of what they show this says nothing."""

    @property
    def judged(self) -> bool:
        """Whether the batch is large enough to tell malice from honest isolation."""
        return self.examples > JUDGED

    def leak(self, allowed: float = ALLOWED) -> Finding | None:
        """Report a leak of more than the allowed share."""
        if self.share <= allowed:
            return None
        worst = max(self.layers, key=lambda layer: len(layer.read), default=None)
        where = "update" if worst is None else f"update.{worst.layer}"
        count = f"{len(self.read)} of {self.examples} examples"
        what = f"{count} of a gradient can be read in closed form ({self.share:.0%}; {allowed:.0%} allowed)"
        if self.summed:
            what += f"; the sum of local steps shows {self.summed} examples"
        if self.between:
            what += f"; the difference from the last update shows {self.between} examples"
        if not self.judged:
            what += (
                f"; batches of up to {JUDGED} examples leak at honest models too, so this says nothing of the server"
            )
        return Finding("leak", where, what)


def exposure(
    client: Client,
    params: Tensors,
    batch: Batch,
    sent: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None = None,
    first: First | None = None,
    last: Mapping[str, Tensor] | None = None,
) -> Exposure:
    """Measure what an update `sent` in answer to `params` shows of a batch.

    `previous` are parameters (and buffers) that an earlier round began with. `first` is what the model was given for
    the first gradient; without it the batch's first examples, and model noise that is off. `last` is the update that
    was sent before this one: a server subtracts what examples show in both.
    """
    first = _first(client, batch) if first is None else first
    inputs = first[0].inputs
    if not len(inputs):
        return Exposure((), 0, frozenset(), 0.0)
    look = Pass(client, params, *first, sent)
    layers = look.run()
    read = frozenset[int]().union(*(layer.read for layer in layers))
    summed = _of_all(client, batch, sent) if client.local is not None else 0
    between = 0 if last is None else _of_all(client, batch, {n: sent[n] - v for n, v in last.items() if n in sent})
    share = max(len(read) / len(inputs), min(1.0, max(summed, between) / len(inputs)))
    suspects = [side for layer in layers for side in layer.sides if _suspect(side, len(inputs))]
    looked = frozenset(layer.layer for layer in layers if not set(suspects).isdisjoint(layer.sides))
    compared = _Comparison(client, params, first, previous, looked)
    malice = tuple(finding for layer in suspects if (finding := compared.judge(layer)) is not None)
    if not malice and summed > ALLOWED * len(inputs) and len(inputs) < len(batch.inputs) <= _WHOLE:
        malice = _over_all_steps(client, params, batch, sent, previous, len(inputs))
    return Exposure(tuple(layers), len(inputs), read, share, malice, summed, between, look.unseen)


def _over_all_steps(
    client: Client,
    params: Tensors,
    batch: Batch,
    sent: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None,
    step: int,
) -> tuple[Finding, ...]:
    """Judge whom the first layer singles out among all of a client's examples, by excesses in shares of one step's."""
    whole = batch, switched_off(client.model, batch.inputs)
    first = Pass(client, params, *whole, sent).run()[:1]
    compared = _Comparison(client, params, whole, previous, frozenset(layer.layer for layer in first), step)
    return tuple(finding for layer in first if (finding := compared.excess(layer)) is not None)


def guarded_update(
    exposed: Exposure, guard: Policy, leak: Policy, tell: Callable[[Finding], None], allowed: float = ALLOWED
) -> None:
    """Act on what an update shows as the policies say: refuse by raising, tell every finding, or do nothing."""
    refuse([*POLICY.problems("guard", guard), *POLICY.problems("leak", leak)])
    found = exposed.leak(allowed)
    leaks = [] if found is None else [found]
    refused = [
        finding for policy, own in ((guard, exposed.malice), (leak, leaks)) if policy == "refuse" for finding in own
    ]
    if refused:
        raise GradveilError(finding.problem("error") for finding in refused)
    for policy, own in ((guard, exposed.malice), (leak, leaks)):
        for finding in own if policy == "warn" else ():
            tell(finding)


def _first(client: Client, batch: Batch) -> First:
    count = len(batch.inputs) if client.local is None else min(client.local.batch, len(batch.inputs))
    some = Batch(batch.inputs[:count], batch.targets[:count])
    return some, switched_off(client.model, some.inputs)


def _of_all(client: Client, batch: Batch, sent: Mapping[str, Tensor]) -> int:
    """Count all examples that can be read from a first layer that takes them as they are."""
    for path, module in client.model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight, bias = (sent.get(f"{path}.{name}") for name in ("weight", "bias"))
            inputs = batch.inputs.flatten(1)
            fits = isinstance(module, nn.Linear) and module.in_features == inputs.shape[1]
            return read_from(weight, bias, inputs) if fits and weight is not None and bias is not None else 0
    return 0


def _suspect(layer: Isolated, examples: int) -> bool:
    """Whether a layer shows so much that a comparison is worth its time."""
    judged = examples > JUDGED and (len(layer.visible) > _FEW * examples or _alike(layer))
    return layer.agreement > _AGREES or judged


def _alike(layer: Isolated) -> bool:
    """Whether more units share their examples with another unit than honest ones do by chance."""
    groups = layer.told_apart
    often = groups > JUDGED and layer.shared > max(_ALIKE, _GROUPS / groups) * layer.partial
    return often and layer.partial >= _UNITS


@dataclass
class _Comparison:
    """The same batch at other parameters, each looked at once for all layers that show much, and when asked for."""

    client: Client
    params: Tensors
    first: First
    previous: Mapping[str, Tensor] | None
    layers: frozenset[str]
    step: int = 0
    """Examples that excesses are shares of; all if 0."""

    def __post_init__(self) -> None:
        """Look at nothing yet."""
        self._made: dict[str, dict[str, Isolated]] = {}

    def judge(self, layer: Isolated) -> Finding | None:
        """Compare a layer with itself at fresh parameters first: most honest models end there."""
        examples, fresh = len(self.first[0].inputs), self._at("fresh", layer)
        if layer.agreement > _AGREES and fresh.heard >= _HEARD and self._at("even", layer).heard < SILENT:
            what = f"learns from {layer.heard:.0%} of {examples} examples, at fresh parameters from {fresh.heard:.0%}"
            return Finding("malice", f"update.{layer.layer}", what)
        if _alike(layer) and layer.shared * max(fresh.partial, 1) > 2 * fresh.shared * layer.partial:
            what = f"{layer.shared} of {layer.partial} units have an error of just the same examples as another unit, "
            what += f"at fresh parameters {fresh.shared} of {fresh.partial}: their rows can be solved for single ones"
            return Finding("malice", f"update.{layer.layer}", what)
        return self.excess(layer)

    def excess(self, layer: Isolated) -> Finding | None:
        """Report a layer that shows more examples than it does at parameters to compare with."""
        examples, fresh = len(self.first[0].inputs), self._at("fresh", layer)
        if not self._exceeds(layer, len(fresh.singled), _FEW):
            return None
        count = max(len(fresh.singled), len(self._at("fresh again", layer).singled))
        if not self._exceeds(layer, count, _MANY):
            others = {"without biases": _FEW} if self._before() is None else {"without biases": _FEW, "before": _SOON}
            counts = {other: max(count, len(self._at(other, layer).singled)) for other in others}
            found = [counts[other] for other, least in others.items() if self._exceeds(layer, counts[other], least)]
            if not found:
                return None
            count = min(found)
        what = f"singles out {len(layer.visible)} of {examples} examples, where parameters to compare with (fresh, "
        what += f"without biases, of the round before) do with {count}"
        return Finding("malice", f"update.{layer.layer}", what)

    def _exceeds(self, layer: Isolated, baseline: int, least: float) -> bool:
        """Whether more examples are visible than a baseline explains: by a share of the batch, and by chance."""
        examples = len(self.first[0].inputs)
        rate = (baseline + 1) / (examples + 2)
        chance = max(_LEAST, _SDS * sqrt(examples * rate * (1 - rate)))
        return examples > JUDGED and len(layer.visible) - baseline > max(least * (self.step or examples), chance)

    def _at(self, which: str, layer: Isolated) -> Isolated:
        """Return a layer at fresh parameters, at those received without biases, or at those of the round before.

        "even" are the received ones, with every example as unsure as the others: a norm of the batch hands errors on to
        examples of which the model is sure, and those would count as all that a layer learns from.
        """
        if which not in self._made:
            params = self._before() if which == "before" else None
            if which == "without biases":  # honest layers open about as many units so
                params = {n: torch.zeros_like(v) if _is_bias(n) else v for n, v in self.params.items()}
            if which == "even":
                params = self.params
            if params is None:
                params = freshened(self.client.model, self.params, Key(0, (which,)))
            # Fresh running statistics are 0 and 1. The other fresh parameters get the batch's means.
            centred, even = which in ("fresh again", "without biases"), which == "even"
            found = Pass(self.client, params, *self.first, centred=centred, even=even, only=self.layers).run()
            self._made[which] = {side.layer: side for other in found for side in other.sides}
        return self._made[which].get(layer.layer, Isolated(layer.layer))

    def _before(self) -> Tensors | None:
        """Return the parameters and buffers of the round before, if they are those of this model."""
        before = dict(self.previous or {})
        if not all(n in before and before[n].shape == self.params[n].shape for n in self.client.trained()):
            return None
        like = next(iter(self.params.values()))
        return {**self.params, **{name: value.to(like.device) for name, value in before.items()}}


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def freshened(model: nn.Module, params: Tensors, key: Key) -> Tensors:
    """Return parameters and running statistics as they are before any training.

    They are drawn by the library's law, or by the modules' own where it has none. Biases that are zero as a whole stay
    zero: without biases a blank image has no error at any unit, whatever the weights are.
    """
    fresh = copy.deepcopy(model)
    try:
        initialise(fresh, key.generator())
    except GradveilError:
        with drawing_from(key.generator()):
            for module in fresh.modules():
                if callable(again := getattr(module, "reset_parameters", None)):
                    again()
    drawn = {name: value.detach().to(params[name]) for name, value in fresh.named_parameters()}
    drawn |= {n: torch.zeros_like(v) for n, v in params.items() if n in drawn and _is_bias(n) and not bool(v.any())}
    places = {name: getattr(module, local) for name, module, local in buffer_places(fresh)}
    return drawn | {name: value for name, value in places.items() if is_statistic(name)}
