"""The interface of attacks: observations and a simulated client in, reconstructions out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Knowledge
from gradveil.client import Client, scheduled
from gradveil.core.errors import Problem
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch

Status = Literal["converged", "stalled", "budget", "diverged"]
"""How a row of an attack ended: reached the tolerance, stopped improving, used its budget, became non-finite."""
_UNSET = torch.empty(0)
"""Marks the tensors that an attack leaves to the defaults of its `Reconstruction`."""


@dataclass(frozen=True)
class Observation:
    """One round as the server sees it: V clients that trained from the same global parameters."""

    params: Tensors
    """The global parameters the server sent (no leading V)."""
    update: Tensors
    """The decoded updates, leading V."""
    examples: int
    """Examples behind each client's update (clients report the number for weighted averaging)."""
    target_clients: tuple[int, ...]
    """Stable numbers of the target clients. They address random draws, so chunks do not change results."""
    round: int = 0
    messages: Tensors = field(default_factory=dict[str, Tensor])
    """Public messages of the round (no leading V)."""
    since: int = 0
    """Rounds of the training before round 0."""

    def __repr__(self) -> str:
        """Name the round, the clients and the sizes of what was seen."""
        count, numbers = len(self.update), sum(value.numel() for value in self.params.values())
        heard = f", {len(self.messages)} messages" if self.messages else ""
        whose = f"{len(self.target_clients)} target clients of {self.examples} examples"
        return f"Observation(round {self.round}, {whose}, {count} tensors of {numbers:,} parameters{heard})"

    def believed(self, client: Client) -> Client:
        """Return the simulated client of this round: at its point of a schedule, with the round's messages."""
        client = scheduled(client, self.since + self.round)
        return replace(client, messages=self.messages) if self.messages else client

    def simulate(self, simulated_client: Client, inputs: Tensor, targets: Tensor) -> Tensors:
        """Return the simulated client's updates, leading V, for inputs [V, B, ...] and targets [V, B]; noise is off."""
        client = self.believed(simulated_client)
        noise, state = (
            {name: value.to(inputs.device).expand(len(inputs), *value.shape) for name, value in tensors.items()}
            for tensors in (
                client.noise_spec(self.params, Batch(inputs[0], targets[0])).neutral(),
                client.init(self.params),
            )
        )
        return client.updates(self.params, Batch(inputs, targets), noise, state)[0]


@dataclass(frozen=True)
class Progress:
    """The progress of an attack at one of its reporting points."""

    target_clients: int
    """Target clients whose rows are all finished."""
    active: int
    """Rows under way."""
    row_iterations: int
    """Iterations x rows done so far."""
    row_budget: int
    """Upper limit of `row_iterations`."""
    objective: float
    """Median best objective of the rows under way."""


@dataclass(frozen=True)
class Remark:
    """A remark on reconstructions: a text with {} for the number of each target client."""

    words: str
    numbers: tuple[float, ...]
    usual: int | None = None
    """The number that needs no remark."""


def in_words(remarks: Iterable[Remark]) -> list[str]:
    """Merge equal remarks into one sentence each, with the range of the target clients' numbers.

    >>> in_words([Remark("{} of 9", (0.2, 4.0)), Remark("{} left", (1.0,), usual=1), Remark("{} of 9", (7.0,))])
    ['0 to 7 of 9']
    >>> in_words([Remark("{} of 9", (0.2,))])
    ['none of 9']
    """
    merged: dict[tuple[str, int | None], list[int]] = {}
    for remark in remarks:
        merged.setdefault((remark.words, remark.usual), []).extend(map(round, remark.numbers))
    sentences: list[str] = []
    for (words, usual), numbers in merged.items():
        if set(numbers) - {usual}:
            least, most = min(numbers), max(numbers)
            sentences.append(words.replace("{}", f"{least} to {most}" if most > least else str(least or "none"), 1))
    return sentences


@dataclass(frozen=True)
class Reconstruction:
    """The result of an attack, target clients first.

    The first restart to converge wins. If none converges, the restart with the attacker's lowest objective wins. An
    attack needs to return only inputs, targets and objective; the defaults describe one iteration of one restart.
    """

    inputs: Tensor
    """[V, B, C, H, W], in the model's (normalised) space."""
    targets: Tensor
    """[V, B] class numbers."""
    objective: Tensor
    """[V] the attacker's own objective of the winning restart (infinite where every restart diverged)."""
    status: tuple[Status, ...] = ()
    """Of each target client; by default "converged" where the objective is finite, else "diverged"."""
    iterations: Tensor = _UNSET
    """[V] iterations of the winning restart."""
    seconds: float = 0.0
    """Working time of the attack; an audit measures it where none is given."""
    restart: Tensor = _UNSET
    """[V] number of the winning restart."""
    objectives: Tensor = _UNSET
    """[V, R] final objective of every restart."""
    initial: Tensor = _UNSET
    """[V] the objective at the winning restart's random start, from which progress is measured; infinite if unknown."""
    plan: tuple[int, ...] = ()
    """Rows of each chunk. The same plan gives bit-identical results."""
    trace: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Iterations -> the images [V, B, C, H, W] that the attack would have returned then."""
    remarks: tuple[Remark, ...] = ()
    """The attack's remarks on its images."""
    before_undoing: Tensor | None = None
    """[V, B, C, H, W] the images that the client trained on, if a batch defence was undone to get `inputs`."""
    certainty: Tensor | None = None
    """[V, B, ...] how sure the attack is of each part of a view, from 0 to 1: how far its restarts agree."""
    match: Tensor | None = None
    """[V, 2 or more] the fit of the simulated update, without priors.

    The columns are the objective's distance, 1 - cosine of the median layer, and those of
    `gradveil.attacks.noise_likelihood`, which are NaN if the client adds no noise."""

    def __post_init__(self) -> None:
        """Fill in the defaults of tensors and statuses."""
        unset = [name for name in ("iterations", "restart", "objectives", "initial") if getattr(self, name) is _UNSET]
        if unset:
            zeros = torch.zeros_like(self.objective, dtype=torch.long)
            defaults = {"iterations": zeros + 1, "restart": zeros, "objectives": self.objective[:, None]}
            defaults["initial"] = torch.full_like(self.objective, torch.inf)
            for name in unset:
                object.__setattr__(self, name, defaults[name])
        if not self.status:
            finite = torch.isfinite(self.objective).tolist()
            object.__setattr__(self, "status", tuple("converged" if good else "diverged" for good in finite))


def in_closed_form(
    inputs: Tensor,
    targets: Tensor,
    misfit: Tensor,
    finite: Tensor,
    began: float,
    progress: Callable[[Progress], None] | None,
) -> Reconstruction:
    """Return solved images [V, B, ...] as a `Reconstruction` of one iteration and one restart.

    `finite` [V] marks the target clients with finite updates, `began` is `time.perf_counter()` at the start.
    """
    target_clients = len(finite)
    done = torch.zeros(target_clients, dtype=torch.long, device=inputs.device)
    misfit = torch.where(finite, misfit, torch.inf)
    if progress:
        progress(Progress(target_clients, 0, target_clients, target_clients, float(misfit.median())))
    return Reconstruction(
        inputs=inputs,
        targets=targets,
        objective=misfit,
        status=tuple("converged" if good else "diverged" for good in finite.tolist()),
        iterations=done + 1,
        seconds=time.perf_counter() - began,
        restart=done,
        objectives=misfit.unsqueeze(1),
        initial=torch.ones_like(misfit),
    )


class Attack(Protocol):
    """A callable with a name, a simulated client and the knowledge that it needs."""

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
        """Knowledge of each named tensor; the audit must grant a `Known()` without a value."""
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


@dataclass(frozen=True)
class Traits:
    """What an attack may declare in attributes of these names. The defaults hold for attributes that it lacks."""

    labels: str | None = None
    """Source of the labels: `given` by the audit, or the way in which the attack finds them."""
    rounds: Literal["first", "last", "all"] | None = None
    """Observed rounds that the attack uses. Attacks of this library without the attribute use the last one."""
    needs: str = "numbers"
    """What the examples have to offer, see `Space.offers`: `pictures`, `columns`, `tokens` or plain `numbers`."""
    ignore: Literal["nothing", "stochastic"] = "nothing"
    """Layers that are left out of the distance: none, or those behind a bottleneck's noise."""
    batchnorm: float = 0.0
    """Weight of the difference to the model's running statistics."""
    undo: bool = False
    """Whether a batch defence is undone after the search, so that the answer is the client's own batch."""
    undo_entries: bool = False
    """Whether a defence that maps each entry to another number is undone first."""
    objective: object = None
    """The distance of simulated and observed updates."""
    prior: object = None
    """What is held likely before the update is seen."""
    start: object = None
    """The first answer of a search."""


def traits(attack: object) -> Traits:
    """Read what an attack declares of itself.

    >>> class Mine:
    ...     rounds = "all"
    >>> traits(Mine()).rounds, traits(Mine()).needs
    ('all', 'numbers')
    """
    return Traits(**{each.name: getattr(attack, each.name) for each in fields(Traits) if hasattr(attack, each.name)})


@runtime_checkable
class HasPlan(Protocol):
    """An attack that can compute its plan before it starts, so that the plan can be recorded first."""

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose the rows of each chunk for this machine."""
        ...


@runtime_checkable
class HasObjective(Protocol):
    """An attack that can compute its objective at any inputs.

    After the attack, the audit evaluates the objective at the ground truth. An attack that ended well above that value
    is under-optimised. One that ended at or below it found other inputs that explain the update as well.
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
        """Return the objective [V] at inputs [V, B, ...]; other optimised tensors take their values from `noise`.

        The knowledge holds the true labels even if the attack does not use them.
        """
        ...


@runtime_checkable
class Matcher(Protocol):
    """An attack that can compute the distance of any inputs from the observed update, without priors.

    Its reconstructions hold this distance too. Images that only priors place below the ground truth do not explain the
    update.
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
        """Return `Reconstruction.match` at inputs, with the arguments of `HasObjective.evaluate`."""
        ...


@runtime_checkable
class Active(Protocol):
    """An attack of a malicious server, which sends a crafted model instead of the honest one."""

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client with the server's model; the knowledge holds public facts only.

        The attack is then called with this client's updates, and simulates this client.
        """
        ...

    def planted(self) -> str:
        """Describe the change to the model."""
        ...


@runtime_checkable
class Persistent(Active, Protocol):
    """A malicious server that crafts the model again in every round; else training changes it in later rounds."""

    def resend(self, client: Client, knowledge: Knowledge, number: int) -> Tensors:
        """Return the parameters that the server sends to the crafted client in a round after the first."""
        ...


@dataclass(frozen=True)
class Prospect:
    """The facts of a trial before its first update, from which an attack reports why it would fail."""

    simulated_client: Client
    shape: tuple[int, ...]
    examples: int
    classes: int
    public: int
    """Number of public examples."""


@runtime_checkable
class CanRefuse(Protocol):
    """An attack that can report why it would fail before anything is computed."""

    def problems(self, prospect: Prospect) -> Iterable[Problem]:
        """Yield the obstacles, each with a fix."""
        ...
