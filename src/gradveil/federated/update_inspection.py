"""A client's inspection of its own update for examples that it reveals, before it is sent.

*Leak*: the share of the batch that can be read from the update. Small honest batches leak. *Malice*: the parameters
single out far more examples than the same batch shows at freshly initialised parameters, at the received ones without
biases, and at those of the round before. Both are decided on the update after all defences, so a defence that hides the
examples satisfies both.
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
from gradveil.federated.separated_examples import separated_from
from gradveil.nn.initial_weights import drawing_from, initialise
from gradveil.nn.stochastic import buffer_places, switched_off
from gradveil.nn.weight_files import is_statistic

ALLOWED = 0.25
"""Share of a batch that may be read from an update."""
JUDGED = 16
"""Largest batch without a judgement of malice: honest models single out nearly all of its examples."""
_FEW, _SOON, _MANY, _SDS, _LEAST = 0.15, 0.25, 0.5, 3.0, 5
"""Excesses that are malice, as shares of the batch: over fresh parameters and those without biases, over fresh ones and
the round before, over fresh ones alone. Each also has to exceed this number of standard deviations, and of examples,
since few examples have no reliable standard deviation."""
_LEARNING, _AGREES = 0.5, 0.2
"""Least share of examples that a fresh layer learns from, and least cos^2 of an update with its gradient, for malice by
a layer that learns from few examples."""
_AGAIN = tuple(f"fresh again, {number}" for number in range(7))
"""Further fresh parameters. All but the first are looked at before an alarm by less than half of the batch only."""
_WHOLE = 4096
"""Largest number of examples for a judgement of all local steps; larger clients are judged by the first gradient."""
_ALIKE, _GROUPS, _UNITS = 0.1, 13, 64
"""Share of units with the same examples as another one that is malice in large batches; the same times the number of
groups in smaller ones, where units agree by chance; and the smallest number of units."""


First = tuple[Batch, Tensors]
"""Examples and noise of the first gradient of a round (`gradveil.client.first_gradient`)."""


@dataclass(frozen=True)
class Exposure:
    """Examples that an update reveals of the batch that it was computed from."""

    layers: tuple[Isolated, ...]
    examples: int
    """Number of examples of the first gradient."""
    read: frozenset[int]
    """Those of them that can be read from the update."""
    share: float
    """Largest share of revealed examples, in units of the first gradient's examples: by that gradient, the sum of local
    steps, the difference from the last update, or a separation of the first layer's rows."""
    malice: tuple[Finding, ...] = ()
    summed: int = 0
    """Number of the client's examples that the sum of local steps reveals."""
    between: int = 0
    """Number of the client's examples that the difference from the last update reveals."""
    unmixed: int = 0
    """Number of the client's examples that a separation of the first layer's rows reveals."""
    first_layer: str = ""
    """The layer whose rows were separated."""
    unseen: tuple[str, ...] = ()
    """Matrices of the update that were not inspected."""

    @property
    def judged(self) -> bool:
        """Whether the batch is large enough to distinguish malice from honest isolation."""
        return self.examples > JUDGED

    def leak(self, allowed: float = ALLOWED) -> Finding | None:
        """Return a finding if more than the allowed share leaks."""
        if self.share <= allowed:
            return None
        worst = max(self.layers, key=lambda layer: len(layer.read), default=None)
        path = self.first_layer if self.unmixed > len(self.read) else "" if worst is None else worst.layer
        where = f"update.{path}" if path else "update"
        count = f"{len(self.read)} of {self.examples} examples"
        evidence = f"{count} of a gradient can be read in closed form ({self.share:.0%}; {allowed:.0%} allowed)"
        if self.unmixed:
            evidence += f"; unmixing the rows of its first layer shows {self.unmixed} examples"
        if self.summed:
            evidence += f"; the sum of local steps shows {self.summed} examples"
        if self.between:
            evidence += f"; the difference from the last update shows {self.between} examples"
        if not self.judged:
            evidence += (
                f"; batches of up to {JUDGED} examples leak at honest models too, so this says nothing of the server"
            )
        return Finding("leak", where, evidence)


def exposure(
    client: Client,
    params: Tensors,
    batch: Batch,
    sent: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None = None,
    first: First | None = None,
    last: Mapping[str, Tensor] | None = None,
) -> Exposure:
    """Measure which examples of a batch an update `sent` in reply to `params` reveals.

    `previous` are the received parameters (and buffers) of an earlier round. `first` has the examples and noise of the
    first gradient; by default the batch's first examples, with model noise off. `last` is the previous update: a server
    can subtract what both have in common.
    """
    first = _first(client, batch) if first is None else first
    inputs = first[0].inputs
    if not len(inputs):
        return Exposure((), 0, frozenset(), 0.0)
    inspection = Pass(client, params, *first, sent)
    layers = inspection.run()
    read = frozenset[int]().union(*(layer.read for layer in layers))
    summed = _of_all(client, batch, sent) if client.local is not None else 0
    between = 0 if last is None else _of_all(client, batch, {n: sent[n] - v for n, v in last.items() if n in sent})
    path, unmixed = separated_from(client.model, batch.inputs, sent, params)
    share = max(len(read) / len(inputs), min(1.0, max(summed, between, len(unmixed)) / len(inputs)))
    suspects = [side for layer in layers for side in layer.sides if _suspect(side, len(inputs))]
    suspected = frozenset(layer.layer for layer in layers if not set(suspects).isdisjoint(layer.sides))
    compared = _Comparison(client, params, first, previous, suspected)
    malice = tuple(finding for layer in suspects if (finding := compared.judge(layer)) is not None)
    if not malice and summed > ALLOWED * len(inputs) and len(inputs) < len(batch.inputs) <= _WHOLE:
        malice = _over_all_steps(client, params, batch, sent, previous, len(inputs))
    counts = summed, between, len(unmixed)
    return Exposure(tuple(layers), len(inputs), read, share, malice, *counts, path, inspection.unseen)


def _over_all_steps(
    client: Client,
    params: Tensors,
    batch: Batch,
    sent: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None,
    step: int,
) -> tuple[Finding, ...]:
    """Judge what the first layer singles out among all examples of a client, by excesses in shares of one step."""
    whole = batch, switched_off(client.model, batch.inputs)
    first = Pass(client, params, *whole, sent).run()[:1]
    compared = _Comparison(client, params, whole, previous, frozenset(layer.layer for layer in first), step)
    return tuple(finding for layer in first if (finding := compared.excess(layer)) is not None)


def guarded_update(
    exposed: Exposure, guard: Policy, leak: Policy, report: Callable[[Finding], None], allowed: float = ALLOWED
) -> None:
    """Apply the policies to an exposure: raise an error, report every finding, or do nothing."""
    refuse([*POLICY.problems("guard", guard), *POLICY.problems("leak", leak)])
    leaks = [finding for finding in [exposed.leak(allowed)] if finding is not None]
    by_policy = [(policy, finding) for policy, group in ((guard, exposed.malice), (leak, leaks)) for finding in group]
    refuse([finding.problem("error") for policy, finding in by_policy if policy == "refuse"])
    for policy, finding in by_policy:
        if policy == "warn":
            report(finding)


def _first(client: Client, batch: Batch) -> First:
    count = len(batch.inputs) if client.local is None else min(client.local.batch, len(batch.inputs))
    some = Batch(batch.inputs[:count], batch.targets[:count])
    return some, switched_off(client.model, some.inputs)


def _of_all(client: Client, batch: Batch, sent: Mapping[str, Tensor]) -> int:
    """Count all examples that can be read from the first layer, if it takes them unchanged."""
    for path, module in client.model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight, bias = (sent.get(f"{path}.{name}") for name in ("weight", "bias"))
            inputs = batch.inputs.flatten(1)
            fits = isinstance(module, nn.Linear) and module.in_features == inputs.shape[1]
            return read_from(weight, bias, inputs) if fits and weight is not None and bias is not None else 0
    return 0


def _suspect(layer: Isolated, examples: int) -> bool:
    """Return whether a layer reveals enough to be worth the time of a comparison."""
    judged = examples > JUDGED and (len(layer.visible) > _FEW * examples or _alike(layer))
    return layer.agreement > _AGREES or judged


def _alike(layer: Isolated) -> bool:
    """Return whether more units share their examples with another unit than honest ones do by chance."""
    groups = layer.groups
    often = groups > JUDGED and layer.shared > max(_ALIKE, _GROUPS / groups) * layer.partial
    return often and layer.partial >= _UNITS


@dataclass
class _Comparison:
    """The suspected layers with the same batch at other parameters, computed once and on demand."""

    client: Client
    params: Tensors
    first: First
    previous: Mapping[str, Tensor] | None
    layers: frozenset[str]
    step: int = 0
    """Number of examples that excesses are shares of; 0 for all."""

    def __post_init__(self) -> None:
        """Prepare the cache of passes."""
        self._made: dict[str, dict[str, Isolated]] = {}

    def judge(self, layer: Isolated) -> Finding | None:
        """Compare a layer with other parameters, the fresh ones first: they clear most honest models."""
        examples, fresh = len(self.first[0].inputs), self._at("fresh", layer)
        if (
            layer.agreement > _AGREES
            and fresh.learning_share >= _LEARNING
            and self._at("even", layer).learning_share < SILENT
        ):
            evidence = f"learns from {layer.learning_share:.0%} of {examples} examples, at fresh parameters from "
            evidence += f"{fresh.learning_share:.0%}"
            return Finding("malice", f"update.{layer.layer}", evidence)
        if _alike(layer) and layer.shared * max(fresh.partial, 1) > 2 * fresh.shared * layer.partial:
            evidence = f"{layer.shared} of {layer.partial} units have an error of just the same examples as another "
            evidence += f"unit, at fresh parameters {fresh.shared} of {fresh.partial}: their rows can be solved for "
            evidence += "single ones"
            return Finding("malice", f"update.{layer.layer}", evidence)
        return self.excess(layer)

    def excess(self, layer: Isolated) -> Finding | None:
        """Return a finding for a layer that reveals more examples than at the parameters of comparison."""
        examples, fresh = len(self.first[0].inputs), self._at("fresh", layer)
        if not self._exceeds(layer, len(fresh.singled), _FEW):
            return None
        count = max(len(fresh.singled), len(self._at(_AGAIN[0], layer).singled))
        if not self._exceeds(layer, count, _MANY):
            limits = {"without biases": _FEW} if self._before() is None else {"without biases": _FEW, "before": _SOON}
            counts = {which: max(count, len(self._at(which, layer).singled)) for which in limits}
            exceeded = [counts[which] for which, least in limits.items() if self._exceeds(layer, counts[which], least)]
            if not exceeded:
                return None
            count = min(exceeded)
            # How many a fresh model singles out depends on its draw, and two draws may both be low.
            draws = (len(self._at(which, layer).singled) for which in _AGAIN[1:])
            if not all(self._exceeds(layer, draw, _FEW) for draw in draws):
                return None
        evidence = f"singles out {len(layer.visible)} of {examples} examples, where parameters to compare with (fresh, "
        evidence += f"without biases, of the round before) do with {count}"
        return Finding("malice", f"update.{layer.layer}", evidence)

    def _exceeds(self, layer: Isolated, baseline: int, least: float) -> bool:
        """Return whether more examples are visible than a baseline explains: by a share of the batch, and by chance."""
        examples = len(self.first[0].inputs)
        # Laplace's estimate of the rate, which is positive even for a baseline of 0, and its binomial deviation.
        rate = (baseline + 1) / (examples + 2)
        chance = max(_LEAST, _SDS * sqrt(examples * rate * (1 - rate)))
        return examples > JUDGED and len(layer.visible) - baseline > max(least * (self.step or examples), chance)

    def _at(self, which: str, layer: Isolated) -> Isolated:
        """Return a layer at fresh parameters, at the received ones without biases, or at those of the round before.

        "even" are the received ones, with errors of size 1 for every example. Otherwise a norm of the batch would pass
        errors on to examples of which the model is sure, and the layer would seem to learn from those.
        """
        if which not in self._made:
            params = self._before() if which == "before" else None
            if which == "without biases":  # honest layers open about as many units without biases
                params = {n: torch.zeros_like(v) if _is_bias(n) else v for n, v in self.params.items()}
            if which == "even":
                params = self.params
            if params is None:
                params = freshened(self.client.model, self.params, Key(0, (which,)))
            # Fresh running statistics are 0 and 1. The other fresh parameters get the batch's means.
            centred, even = which in (*_AGAIN, "without biases"), which == "even"
            layers = Pass(self.client, params, *self.first, centred=centred, even=even, only=self.layers).run()
            self._made[which] = {side.layer: side for inspected in layers for side in inspected.sides}
        return self._made[which].get(layer.layer, Isolated(layer.layer))

    def _before(self) -> Tensors | None:
        """Return the parameters and buffers of the round before, if they fit this model."""
        before = dict(self.previous or {})
        if not all(n in before and before[n].shape == self.params[n].shape for n in self.client.trained()):
            return None
        like = next(iter(self.params.values()))
        return {**self.params, **{name: value.to(like.device) for name, value in before.items()}}


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def freshened(model: nn.Module, params: Tensors, key: Key) -> Tensors:
    """Return parameters and running statistics as before any training.

    They follow the library's initial distribution, or the modules' own if it has none. Biases that are all zero stay
    zero: without biases a blank image has no error at any unit, whatever the weights.
    """
    fresh = copy.deepcopy(model)
    try:
        initialise(fresh, key.generator())
    except GradveilError:
        with drawing_from(key.generator()):
            for module in fresh.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
    drawn = {name: value.detach().to(params[name]) for name, value in fresh.named_parameters()}
    drawn |= {n: torch.zeros_like(v) for n, v in params.items() if n in drawn and _is_bias(n) and not bool(v.any())}
    buffers = {name: getattr(module, local) for name, module, local in buffer_places(fresh)}
    return drawn | {name: value for name, value in buffers.items() if is_statistic(name)}
