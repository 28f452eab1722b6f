"""A client's look at its own update before it is sent: the examples that it shows, and whether the model is why.

Two questions have two answers. *Leak*: the share of the batch that can be read from what is about to be sent. Small
honest batches leak. *Malice*: far more examples are singled out than the same batch shows at freshly initialised
parameters, at the received ones without biases, and at those of the round before. Both are decided on the update that
really leaves: a defence that hides the examples satisfies both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.federated.guard import POLICY, Finding, Policy
from gradveil.federated.isolation import Isolated, Pass, read_from
from gradveil.nn.init import drawing_from, initialise
from gradveil.nn.stochastic import switched_off

ALLOWED = 0.25
"""The share of a batch that may be read from an update."""
JUDGED = 16
"""Malice is judged in batches of more examples: up to here honest models single out nearly all of them."""
_FEW, _MANY, _SDS = 0.15, 0.4, 3.0
"""Excesses that are malice, as shares of the batch: over all references, over fresh parameters alone; or deviations."""
_HEARD, _AGREES = 0.5, 0.2
_FRESH = 2


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
    """The share of the first gradient's examples, or of all of the client's, that can be read: the larger of both."""
    malice: tuple[Finding, ...] = ()

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
) -> Exposure:
    """Measure what an update `sent` in answer to `params` shows of a batch.

    `previous` are parameters (and buffers) that an earlier round began with. `first` is what the model was given for
    the first gradient; without it the batch's first examples, and model noise that is off.
    """
    first = _first(client, batch) if first is None else first
    inputs = first[0].inputs
    if not len(inputs):
        return Exposure((), 0, frozenset(), 0.0)
    layers = Pass(client, params, *first, sent).run()
    read = frozenset[int]().union(*(layer.read for layer in layers))
    share = len(read) / len(inputs)
    if client.local is not None:
        share = max(share, _of_all(client, batch, sent) / len(batch.inputs))
    suspects = [layer for layer in layers if _suspect(layer, len(inputs))]
    malice: tuple[Finding, ...] = ()
    if suspects:
        references = _References(client, params, first, previous)
        malice = tuple(finding for layer in suspects for finding in references.judge(layer))
    return Exposure(tuple(layers), len(inputs), read, share, malice)


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
    return layer.agreement > _AGREES or (examples > JUDGED and len(layer.visible) > _FEW * examples)


@dataclass
class _References:
    """The same batch at other parameters, each computed when it is asked for first."""

    client: Client
    params: Tensors
    first: First
    previous: Mapping[str, Tensor] | None

    def __post_init__(self) -> None:
        """Compute nothing yet."""
        self._made: list[dict[str, Isolated]] = []

    def judge(self, layer: Isolated) -> Iterator[Finding]:
        """Compare a layer with itself at fresh parameters, without biases, and in the round before."""
        *fresh, plain, before = self._all
        examples, there = len(self.first[0].inputs), f"update.{layer.layer}"
        fresh_count = max(_count(made, layer.layer) for made in fresh)
        excesses = [(fresh_count, _MANY), (max(fresh_count, _count(plain, layer.layer)), _FEW)]
        excesses += [(max(fresh_count, _count(before, layer.layer)), _FEW)] if before else []
        for baseline, least in excesses:
            if examples > JUDGED and len(layer.visible) - baseline > max(
                least * examples, _SDS * _deviation(baseline, examples)
            ):
                what = f"singles out {len(layer.visible)} of {examples} examples, at honest parameters {baseline}"
                yield Finding("malice", there, what)
                return
        others = [made[layer.layer].heard for made in fresh if layer.layer in made]
        if layer.agreement > _AGREES and min(others, default=0.0) >= _HEARD:
            what = f"learns from {layer.heard:.0%} of {examples} examples, at honest parameters from {min(others):.0%}"
            yield Finding("malice", there, what)

    @property
    def _all(self) -> list[dict[str, Isolated]]:
        if not self._made:
            model = self.client.model
            plain = {n: torch.zeros_like(v) if n.rpartition(".")[2] == "bias" else v for n, v in self.params.items()}
            for seed in range(_FRESH):
                self._made.append(self._at(freshened(model, self.params, Key(seed, ("reference",))), centred=True))
            self._made.append(self._at(plain, centred=True))
            before = {} if self.previous is None else dict(self.previous)
            fits = all(n in before and before[n].shape == self.params[n].shape for n in self.client.trained())
            like = next(iter(self.params.values()))
            before = {name: value.to(like.device) for name, value in before.items()}
            self._made.append(self._at({**self.params, **before}) if fits else {})
        return self._made

    def _at(self, params: Tensors, centred: bool = False) -> dict[str, Isolated]:
        layers = Pass(self.client, params, *self.first, centred=centred).run()
        return {layer.layer: layer for layer in layers}


def freshened(model: nn.Module, params: Tensors, key: Key) -> Tensors:
    """Return parameters as they are before any training: drawn by the library's law, or by the modules' own."""
    fresh = copy.deepcopy(model)
    try:
        initialise(fresh, key.generator())
    except GradveilError:
        with drawing_from(key.generator()):
            for module in fresh.modules():
                if callable(again := getattr(module, "reset_parameters", None)):
                    again()
    return {name: value.detach().to(params[name]) for name, value in fresh.named_parameters()}


def _count(made: Mapping[str, Isolated], layer: str) -> int:
    return len(made[layer].singled) if layer in made else 0


def _deviation(count: int, examples: int) -> float:
    """Return the standard deviation of a count, one success and one failure added."""
    rate = (count + 1) / (examples + 2)
    return sqrt(examples * rate * (1 - rate))
