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
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.formatting import plural
from gradveil.core.types import Domain
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.layer_chain import Link, chained, settles


class SeenFact(NamedTuple):
    """Whether a fact holds, and what was seen."""

    holds: bool
    seen: str


class UpdateFacts:
    """The facts of what a client sends; each is looked up when it is asked for."""

    def __init__(
        self, client: Client, examples: int, domain: Domain, *, public: int | None, changed: bool, statistics: bool
    ) -> None:
        """Take a client without its defence, the examples of an update, and how many public ones are given, if any.

        `changed` says whether a defence changes the update, and `statistics` whether the model that the client receives
        carries running statistics.
        """
        self.client, self.examples, self.domain, self.public = client, examples, domain, public
        self.changed, self.statistics = changed, statistics
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
        return Prospect(client, self.domain.space.shape, self.examples, self.domain.classes, self.public or 0)

    @cached_property
    def equations(self) -> tuple[InputEquations | None, list[Problem]]:
        """The equations of the first layer, or the reasons why there are none."""
        client = self.client
        return shown(client.model, client.params(), self.domain.space.shape, client.trained())

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], list[Problem]]:
        """The layers of a plain chain, or the reasons why the model is none."""
        client = self.client
        return chained(client.model, client.params(), self.domain.space.shape, client.trained())

    def _look(self, fact: Fact) -> SeenFact:
        holds, lacks = FACTS[fact]
        if fact == "public examples":
            return _unless(list(prior_problems(self.domain.space.shape, 1, public=self.public is not None)), holds)
        if fact == "trained embeddings":
            return _unless(list(EmbeddingRows().problems(self.prospect(self.client))), holds)
        local = self.client.local
        steps = 1 if local is None else local.count(self.examples // self.client.members)
        gradient = local is None or (steps == 1 and local.optimiser == "sgd" and not local.weight_decay)
        simple = {
            "one example": self.examples == 1 and gradient,
            "several examples": self.examples > 1,
            "local steps": steps > 1,
            "changed update": self.changed,
            "running statistics": self.statistics,
        }
        if fact in simple:
            return SeenFact(simple[fact], holds if simple[fact] else lacks)
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


def _unless(problems: list[Problem], holds: str) -> SeenFact:
    """Return what was found, or that nothing stands in the way."""
    if not problems:
        return SeenFact(True, holds)
    where, what = problems[0].where, problems[0].what
    return SeenFact(False, f"the model {what}" if where == "model" else what)
