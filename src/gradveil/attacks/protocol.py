"""The interface of attacks: observations and a simulated client in, reconstructions out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Knowledge
from gradveil.client import Client, scheduled
from gradveil.core.errors import Problem
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors

Status = Literal["converged", "stalled", "budget", "diverged"]
"""How a row of an attack ended: reached the tolerance, stopped improving, used its budget, became non-finite."""


@dataclass(frozen=True)
class Observation:
    """What the server sees of one round: V clients that trained from the same global parameters."""

    params: Tensors
    """The global parameters the server sent (no leading V)."""
    update: Tensors
    """The decoded updates, leading V."""
    examples: int
    """How many examples each client's update is made from (clients report it for weighted averaging)."""
    target_clients: tuple[int, ...]
    """Stable numbers of the target clients: random draws are addressed by them, so chunks do not change results."""
    round: int = 0
    messages: Tensors = field(default_factory=dict[str, Tensor])
    """Public messages of the round (no leading V)."""
    since: int = 0
    """How many rounds of the training came before round 0."""

    def believed(self, client: Client) -> Client:
        """Return a simulated client as it was in this round: at its point of a schedule, with the same messages."""
        client = scheduled(client, self.since + self.round)
        return replace(client, messages=self.messages) if self.messages else client


@dataclass(frozen=True)
class Progress:
    """What an attack tells at its reporting points, and only there."""

    target_clients: int
    """Target clients whose rows are all finished."""
    active: int
    """Rows still being worked on."""
    row_iterations: int
    """Iterations x rows done so far."""
    row_budget: int
    """Upper limit of `row_iterations`."""
    objective: float
    """Median best objective of the rows under way."""


@dataclass(frozen=True)
class Remark:
    """What an attack says of its answers: words with {} where each target client has a number."""

    words: str
    numbers: tuple[float, ...]
    usual: int | None = None
    """The number of which nothing need be said."""


def in_words(remarks: Iterable[Remark]) -> list[str]:
    """Say each remark once for all target clients, with the numbers from the least to the largest.

    >>> in_words([Remark("{} of 9", (0.2, 4.0)), Remark("{} left", (1.0,), usual=1), Remark("{} of 9", (7.0,))])
    ['0 to 7 of 9']
    >>> in_words([Remark("{} of 9", (0.2,))])
    ['none of 9']
    """
    said: dict[tuple[str, int | None], list[int]] = {}
    for each in remarks:
        said.setdefault((each.words, each.usual), []).extend(round(number) for number in each.numbers)
    spans = {key: (min(numbers), max(numbers)) for key, numbers in said.items() if numbers}
    return [
        words.replace("{}", f"{least} to {most}" if most > least else str(least or "none"), 1)
        for (words, usual), (least, most) in spans.items()
        if not least == most == usual
    ]


@dataclass(frozen=True)
class Reconstruction:
    """What an attack gives back, target clients first.

    A target client's winning restart is the first to converge, or the one with the attacker's lowest objective if none
    does.
    """

    inputs: Tensor
    """[V, B, C, H, W], in the model's (normalised) space."""
    targets: Tensor
    """[V, B] class numbers."""
    objective: Tensor
    """[V] the attacker's own objective of the winning restart (infinite where every restart diverged)."""
    status: tuple[Status, ...]
    iterations: Tensor
    """[V] iterations of the winning restart."""
    seconds: float
    restart: Tensor
    """[V] which restart won."""
    objectives: Tensor
    """[V, R] final objective of every restart."""
    initial: Tensor
    """[V] the objective at the winning restart's random start: what "it moved" is measured against."""
    plan: tuple[int, ...] = ()
    """Rows worked on at once, chunk by chunk: the same plan gives bit-identical results."""
    trace: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    """What it would have answered [V, B, C, H, W] after so many iterations."""
    remarks: tuple[Remark, ...] = ()
    """What the attack says of its answers."""
    before_undoing: Tensor | None = None
    """[V, B, C, H, W] what the client trained on, where a batch defence was undone to get `inputs`."""
    match: Tensor | None = None
    """[V, 2 or more] the simulated update without priors: the objective's distance, 1 - cosine of the median layer, and
    how well it explains what was sent given the noise that the client adds, NaN where it adds none: the columns of
    `gradveil.attacks.noise_likelihood`."""


def in_closed_form(
    inputs: Tensor,
    targets: Tensor,
    misfit: Tensor,
    sound: Tensor,
    began: float,
    progress: Callable[[Progress], None] | None,
) -> Reconstruction:
    """Give back images [V, B, ...] that were solved for and not searched: no iterations, no restarts.

    `sound` [V] tells whose updates were finite, `began` is `time.perf_counter()` at the start.
    """
    target_clients = len(sound)
    done = torch.zeros(target_clients, dtype=torch.long, device=inputs.device)
    misfit = torch.where(sound, misfit, torch.inf)
    if progress:
        progress(Progress(target_clients, 0, target_clients, target_clients, float(misfit.median())))
    return Reconstruction(
        inputs=inputs,
        targets=targets,
        objective=misfit,
        status=tuple("converged" if good else "diverged" for good in sound.tolist()),
        iterations=done + 1,
        seconds=time.perf_counter() - began,
        restart=done,
        objectives=misfit.unsqueeze(1),
        initial=torch.ones_like(misfit),
    )


class Attack(Protocol):
    """An attack is a callable with a name and a statement of what it believes and needs."""

    @property
    def name(self) -> str:
        """Preset name."""
        ...

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """`naive` ignores the update's defences, `full` simulates them."""
        ...

    @property
    def knowledge(self) -> Mapping[str, How]:
        """What it knows of each named tensor; `Known()` without a value must be granted by the audit."""
        ...

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every target client's batch."""
        ...


@runtime_checkable
class HasPlan(Protocol):
    """What an attack may offer besides: its plan, before it starts, so that the plan can be written down first."""

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once, chunk by chunk, on this machine."""
        ...


@runtime_checkable
class HasObjective(Protocol):
    """What an attack may offer besides: its own objective at given inputs.

    The audit asks for it at the true inputs, after the attack: an attack that ends well above has not got far enough,
    one that ends at or below has found other inputs that explain the update as well.
    """

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
        """Return the objective [V] at inputs [V, B, ...]; what is optimised besides takes its value in `noise`.

        The knowledge holds the true labels, whether the attack asks for them or not.
        """
        ...


@runtime_checkable
class Matcher(HasObjective, Protocol):
    """A judge that also computes how far an update is from what was observed, without the priors of its objective.

    Its reconstructions hold the same at the answer. An answer that priors alone put below the truth does not explain
    the update.
    """

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
        """Return `Reconstruction.match` at given inputs, as `evaluate` takes them."""
        ...


@runtime_checkable
class Active(Protocol):
    """What the attack of a malicious server offers besides: the model that it sends in the place of the honest one."""

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client as it is after it took the server's model; of the knowledge only what is public is there.

        The attack is then called with that client's updates, and believes in that client.
        """
        ...

    def planted(self) -> str:
        """Say in words what is put into the model."""
        ...


@runtime_checkable
class Persistent(Active, Protocol):
    """A malicious server that changes the model anew in every round; without it, later rounds move what was crafted."""

    def resend(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return the parameters that the server sends in a round after the first, given the client that it crafted."""
        ...


@dataclass(frozen=True)
class Prospect:
    """What is known of a trial before its first update: enough to say why an attack cannot work there."""

    simulated_client: Client
    shape: tuple[int, ...]
    examples: int
    classes: int
    public: int
    """How many public examples there are."""


@runtime_checkable
class CanRefuse(Protocol):
    """What an attack may offer besides: why it would fail, before anything is computed."""

    def problems(self, prospect: Prospect) -> Iterable[Problem]:
        """Say what stands in its way, each with what to do."""
        ...
