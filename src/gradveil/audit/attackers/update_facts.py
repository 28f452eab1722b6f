"""Facts of a client's update that decide what attacks it, each with the reason in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from gradveil.attacks.closed_form.disturbed import prior_problems
from gradveil.attacks.closed_form.unmix import Unmix
from gradveil.attacks.malicious.hidden_units import CopiedRows, QuantileBiases
from gradveil.attacks.protocol import Prospect
from gradveil.attacks.sequences.embedding_rows import EmbeddingRows
from gradveil.audit.attackers.attacker_table import FACTS, Fact, Rule
from gradveil.audit.experiment import Experiment
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.formatting import plural
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.layer_chain import Link, chained, settles
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.weight_files import put_weights


class SeenFact(NamedTuple):
    """Whether a fact holds, and what was seen."""

    holds: bool
    seen: str


class UpdateFacts:
    """The facts of what one of a run's clients sends; each is looked up when it is asked for."""

    def __init__(self, experiment: Experiment, index: int) -> None:
        """Take a run and the number of one of its clients."""
        self.experiment, self.index = experiment, index
        self.settings = experiment.config.client[index]
        self._known = dict[Fact, SeenFact]()

    def __getitem__(self, fact: Fact) -> SeenFact:
        """Look a fact up."""
        if fact not in self._known:
            self._known[fact] = self._look(fact)
        return self._known[fact]

    def lacks(self, rule: Rule) -> str:
        """Say why a row does not apply: the first fact that is missing, or one that makes it needless; else empty."""
        for fact in rule.update:
            if not self[fact].holds:
                return self[fact].seen
        return next((f"{self[fact].seen}, which takes less" for fact in rule.excludes if self[fact].holds), "")

    def prospect(self, client: Client) -> Prospect:
        """Return what an attack may know of the update of this client before it is sent."""
        experiment = self.experiment
        public = len(experiment.public or ())
        return Prospect(client, experiment.space.shape, self.settings.examples, experiment.classes, public)

    @cached_property
    def client(self) -> Client:
        """The client without its defence."""
        return self.experiment.undefended(self.index, self.experiment.config.seeds[0])

    @cached_property
    def equations(self) -> tuple[InputEquations | None, list[Problem]]:
        """The equations of the first layer, or the reasons why there are none."""
        client = self.client
        return shown(client.model, client.params(), self.experiment.space.shape, client.trained())

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], list[Problem]]:
        """The layers of a plain chain, or the reasons why the model is none."""
        client = self.client
        return chained(client.model, client.params(), self.experiment.space.shape, client.trained())

    def _look(self, fact: Fact) -> SeenFact:
        holds, lacks = FACTS[fact]
        if fact == "one example":
            alone = self.settings.examples == 1 and self.settings.local is None
            return SeenFact(alone, holds if alone else lacks)
        if fact == "several examples":
            several = self.settings.examples > 1
            return SeenFact(several, holds if several else lacks)
        if fact == "local steps":
            local = self.client.local
            steps = 1 if local is None else local.count(self.settings.examples // self.client.members)
            return SeenFact(steps > 1, holds if steps > 1 else lacks)
        if fact == "changed update":
            slots = ((getattr(d, "step", None), getattr(d, "send", None)) for d in self.experiment.defences.values())
            changed = any(slot is not None for both in slots for slot in both)
            return SeenFact(changed, holds if changed else lacks)
        if fact == "public examples":
            given = self.experiment.public is not None
            return _unless(list(prior_problems(self.experiment.space.shape, 1, public=given)), holds)
        if fact == "running statistics":
            carried = self._carries()
            return SeenFact(carried, holds if carried else lacks)
        if fact == "trained embeddings":
            return _unless(list(EmbeddingRows().problems(self.prospect(self.client))), holds)
        return self._structure(fact)

    def _structure(self, fact: Fact) -> SeenFact:
        """Look up what the model's layers say."""
        holds, lacks = FACTS[fact]
        if fact == "wide first layer":
            prospect = self.prospect(self.client)
            several = replace(prospect, examples=max(2, prospect.examples))
            return _unless(list(Unmix().problems(several)), holds)
        if fact == "hidden layer":
            prospect = self.prospect(self.client)
            return _unless([*QuantileBiases().problems(prospect), *CopiedRows().problems(prospect)], holds)
        if fact in ("chain", "solvable chain"):
            links, problems = self.links
            many = f"the model is a plain chain of {plural(len(links), 'layer')}"
            if problems or fact == "chain":
                return _unless(problems, many)
            many += ", whose equations can be solved from the last to the first"
            return SeenFact(settles(links), many if settles(links) else lacks)
        layer, problems = self.equations
        if layer is None:
            return _unless(problems, holds)
        if fact == "patches":
            return SeenFact(len(layer.pixels) > 1, holds if len(layer.pixels) > 1 else lacks)
        return SeenFact(True, f"the gradient of '{layer.errors}' says what went into '{layer.path}'")

    def _carries(self) -> bool:
        """Return whether the model that the client receives carries running statistics."""
        experiment = self.experiment
        client = experiment.client(self.index, next(iter(experiment.defences)), experiment.config.seeds[0])
        put_weights(client.model, experiment.source.received(client))
        return bool(running_statistics(client.model))


def _unless(problems: list[Problem], holds: str) -> SeenFact:
    """Return what was found, or that nothing stands in the way."""
    if not problems:
        return SeenFact(True, holds)
    where, what = problems[0].where, problems[0].what
    return SeenFact(False, f"the model {what}" if where == "model" else what)
