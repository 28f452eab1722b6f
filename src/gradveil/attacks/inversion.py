"""The optimisation attack: one loop, of which the papers' attacks are settings.

The attacker simulates the client he believes in on dummy inputs, compares with what was sent, and descends on
everything he does not know. Victims x restarts are the rows of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.base import Observation, Progress, Prospect, Reconstruction, Remark
from gradveil.attacks.evolve import CMAES
from gradveil.attacks.images import INPUTS, TARGETS, Images, Pixels
from gradveil.attacks.infer import Labels, label_problems
from gradveil.attacks.knowledge import How, Knowledge
from gradveil.attacks.optimise import Descent
from gradveil.attacks.plan import rows_at_once
from gradveil.attacks.prior import statistics_wanted
from gradveil.attacks.rows import Rows
from gradveil.attacks.searched import searched
from gradveil.attacks.solution import CONVERGED, STATUSES, Solution, joined
from gradveil.attacks.undo import undone
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import take
from gradveil.core.written import written_bytes
from gradveil.nn.paths import downstream

_VALUES = 2**26
"""Numbers of updates that are compared at once."""


@dataclass(frozen=True)
class Inversion:
    """Settings of the one optimisation attack. `name` is what reports call it."""

    name: str
    objective: str = "cosine"
    tv: float = 0.0
    l2: float = 0.0
    descent: Descent = field(default_factory=Descent)
    restarts: int = 1
    start: Literal["normal", "uniform", "solved"] = "normal"
    """What images look like at first; `solved`: the first restart starts from the first layer's equations, solved."""
    box: bool = True
    labels: Labels = "given"
    belief: Literal["naive", "full"] = "naive"
    knowledge: Mapping[str, How] = field(default_factory=dict)
    images: Images = field(default_factory=Pixels)
    """What is searched: pixels, the weights of a generator, or what a generator draws from."""
    rounds: Literal["first", "last", "all"] = "last"
    """Which of the observed rounds are attacked; all of them share the victim's examples."""
    ignore: Literal["nothing", "stochastic"] = "nothing"
    """Leave the layers out of the distance that a bottleneck's noise reaches."""
    batchnorm: float = 0.0
    """Weight of the BatchNorm prior: statistics of the inputs against the running ones, or the true ones if granted."""
    group: float = 0.0
    """Weight of the pull to the mean of a victim's restarts."""
    register: bool = False
    """Shift the restarts onto each other before their mean is taken."""
    langevin: float = 0.0
    """Standard deviation of the noise added to the inputs after each step, in units of the step size."""
    whiten: bool = False
    """Compare in units of the additive noise that the believed client would have added to each entry."""
    subtract: bool = False
    """Take additive noise that is known off what was sent, where the images make no difference to what it adds."""
    undo: bool = False
    """Search what the client trained on, without its batch defence, and then undo that by its public transforms."""
    step_size: float | None = None
    """The local step size that the attacker believes in; None for the client's own, which servers usually set."""

    @property
    def together(self) -> bool:
        """Whether the restarts of a victim look at each other, so that they must be worked on at once."""
        return self.restarts > 1 and (self.group > 0 or self.descent.halving or self.evolves)

    @property
    def evolves(self) -> bool:
        """Whether the restarts of a victim are the candidates of one population."""
        return isinstance(self.descent.stepper, CMAES)

    @property
    def coupled(self) -> Descent:
        """The descent, with the restarts as its population if it has one."""
        stepper = self.descent.stepper
        if not isinstance(stepper, CMAES):
            return self.descent
        return replace(self.descent, stepper=replace(stepper, population=self.restarts))

    def __post_init__(self) -> None:
        """Refuse what has no meaning together."""
        problems: list[Problem] = []
        if not isinstance(self.images, Pixels):
            what = "is for attacks that search pixels, this one has a generator draw them"
            given = (("start", self.start != "normal"), ("langevin", self.langevin > 0))
            problems += [Problem(f"{self.name}.{setting}", what, "leave it out") for setting, wrong in given if wrong]
        if self.evolves and self.descent.halving:
            what = "lets restarts go, and these are one population: its generations would have no size"
            problems.append(Problem(f"{self.name}.halving", what, "leave it out"))
        if self.evolves and self.restarts == 1:
            what = "is 1, and restarts are the candidates of a population here"
            problems.append(Problem(f"{self.name}.restarts", what, "give at least 2, better 50"))
        if self.undo and self.belief == "naive":
            what = "undoes a batch defence, and this attacker ignores the defence"
            problems.append(Problem(f"{self.name}.undo", what, "set belief=full"))
        refuse(problems)

    @property
    def solver(self) -> Analytic | None:
        """The closed form that the first restart starts from, if it does; who knows the defence weighs it by that."""
        if self.start != "solved":
            return None
        prior = "public" if self.belief == "full" and "public" in self.knowledge else "none"
        return Analytic(labels="restore" if self.labels == "joint" else self.labels, prior=prior)

    def believed(self, client: Client) -> Client:
        """Return the client with what the attacker guesses of its local training; without a defence that is undone."""
        client = replace(client, batch=()) if self.undo else client
        if self.step_size is None or client.local is None:
            return client
        return replace(client, local=replace(client.local, lr=self.step_size))

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and a distance with nothing left to compare."""
        yield from label_problems(self.labels, prospect)
        yield from self.images.problems(prospect.shape, prospect.public)
        if self.subtract and self.belief == "naive":
            what = "takes additive noise off what was sent, and this attacker ignores the defence that adds it"
            yield Problem("additive=subtracted", what, "set belief=full, or choose an attack that does: wiig, cdia")
        if self.solver is not None:
            remedy = "leave start=solved out: it is for models whose first layer shows its input"
            found = self.solver.problems(prospect)
            yield from (replace(p, where=f"start=solved: {p.where}", remedy=remedy) for p in found)
        if self.ignore == "stochastic":
            example = next(iter(prospect.belief.params().values()))
            reached = downstream(prospect.belief.model, example.new_zeros((1, *prospect.shape)))
            if not set(prospect.belief.trained()) - reached:
                what = "leaves out what a bottleneck's noise reaches, and that is every trained layer"
                yield Problem("ignore", what, "choose an attack that optimises the noise: vbia, cdia")

    def points(self) -> list[int]:
        """List the iterations after which the best images so far are noted: 1/2, 1/4, … of the budget, seven times."""
        return sorted({self.descent.iterations >> halving for halving in range(1, 8)} - {0})

    def __call__(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every victim's batch from the observed updates."""
        began = time.perf_counter()
        scene = Rows(self, observations, belief, knowledge, key)
        scene.learn()
        rows = len(scene)
        chunks = tuple(plan) or _plan(self, scene)
        if sum(chunks) != rows:
            raise fail("attack.plan", f"covers {sum(chunks)} rows of {rows}", "give the plan of the same attack")
        done, parts = 0, []
        solver, seen = self.solver, observations[:1] if self.rounds == "first" else observations
        solved = solver(seen, belief, knowledge, key.child(Stream.SOLVED)).inputs if solver else None
        for size in chunks:
            report = _reporter(progress, self, rows, done, size) if progress else None
            parts.append(searched(self, scene, range(done, done + size), solved, report))
            done += size
        found = _reconstruction(self, scene, joined(parts), time.perf_counter() - began, chunks)
        return undone(found, belief, knowledge) if self.undo else found

    def plan(
        self, observations: Sequence[Observation], belief: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once on this machine: what a call without a plan would take."""
        return _plan(self, Rows(self, observations, belief, knowledge, key))

    def evaluate(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the objective [V] at inputs [V, B, ...]; what is optimised besides takes its value in `noise`."""
        scene = Rows(self, observations, belief, knowledge, key)
        return torch.cat([scene.at(some, inputs, noise) for some in _chunks(range(scene.victims), plan)])

    def match(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return `Reconstruction.match` [V, 3] at inputs [V, B, ...], as `evaluate` takes them."""
        scene = Rows(self, observations, belief, knowledge, key)
        rows = _chunks(range(scene.victims), [min(_at_once(scene), max(plan, default=1))])
        return torch.cat([scene.match_at(some, inputs, noise) for some in rows])


def _chunks(rows: Sequence[int], plan: Sequence[int]) -> list[list[int]]:
    """Part rows, so that no more of them are worked on at once than the plan has it."""
    return [some.tolist() for some in torch.tensor(list(rows)).split(max(1, max(plan, default=1)))]


def _at_once(scene: Rows) -> int:
    """Count the rows whose updates are compared at once: a search need not make them, and makes do with less memory."""
    return max(1, _VALUES // sum(value[0].numel() for r in scene.rounds for value in r.observed.values()))


def _plan(attack: Inversion, scene: Rows) -> tuple[int, ...]:
    """Choose how many rows to work on at once from what one row keeps for its derivative."""
    variables, constants = scene.start([0])
    streams = scene.draws.streams([0])
    live = {n: v.requires_grad_(not attack.evolves) for n, v in variables.items()}
    live |= scene.drawing.tuned(1)
    number = torch.zeros(1, dtype=torch.long)
    scene.loss(live, constants, number, streams)  # the first call of a shape also runs the reference
    stepper = replace(attack.coupled.stepper, population=1) if attack.evolves else attack.coupled.stepper
    kept = sum(v.numel() * v.element_size() for v in stepper.init(live).values())
    written = written_bytes(lambda: scene.loss(live, constants, number, streams))
    size = rows_at_once(written + kept, len(scene), scene.device)
    if attack.together:  # a victim's restarts look at each other
        size = max(size // attack.restarts, 1) * attack.restarts
    full, rest = divmod(len(scene), size)
    return (size,) * full + ((rest,) if rest else ())


def _reconstruction(
    attack: Inversion, scene: Rows, solution: Solution, seconds: float, plan: tuple[int, ...]
) -> Reconstruction:
    """Choose each victim's restart by the attacker's own objective."""
    shape = (scene.victims, attack.restarts)
    objectives = solution.objective.view(shape)
    # The first restart to reach the tolerance ends the others of its chunk: what those of another chunk would still
    # have found must not count, or the plan would choose.
    solved = (solution.status == CONVERGED).view(shape)
    first = torch.where(solved, solution.iterations.view(shape), torch.iinfo(torch.long).max)
    best = solved & (first == first.min(1, keepdim=True).values) | ~solved.any(1, keepdim=True)
    chosen = torch.where(best, objectives, torch.inf).argmin(1)
    rows = torch.arange(scene.victims, device=chosen.device) * attack.restarts + chosen
    joint = solution.variables.get(TARGETS)
    targets = scene.labels if joint is None else joint[rows].argmax(-1)
    assert targets is not None
    final = solution.variables[INPUTS][rows]
    compared = _chunks(rows.tolist(), [min(_at_once(scene), max(plan))])
    # After the last row had ended, nothing changed any more.
    trace = {n: _best_of(*solution.trace[n], shape) if n in solution.trace else final for n in attack.points()}
    return Reconstruction(
        inputs=final,
        targets=targets,
        objective=solution.objective[rows],
        status=tuple(STATUSES[code] for code in solution.status[rows].tolist()),
        iterations=solution.iterations[rows],
        seconds=seconds,
        restart=chosen,
        objectives=objectives,
        initial=solution.initial[rows],
        plan=plan,
        trace=trace,
        remarks=_remarks(attack, scene),
        match=torch.cat([scene.match(some, take(solution.variables, some)) for some in compared]),
    )


def _remarks(attack: Inversion, scene: Rows) -> tuple[Remark, ...]:
    """Say what an attack was to do and could not."""
    first = torch.zeros(1, dtype=torch.long, device=scene.device)
    if not attack.batchnorm or statistics_wanted(scene.knowledge, scene.belief, first, scene.example):
        return ()
    return (Remark("its BatchNorm prior is left out: the model carries no running statistics", (0,)),)


def _best_of(values: Tensor, objectives: Tensor, shape: tuple[int, int]) -> Tensor:
    """Choose each victim's restart as it would have been chosen then."""
    chosen = objectives.view(shape).argmin(1)
    return values.unflatten(0, shape)[torch.arange(shape[0], device=chosen.device), chosen]


def _reporter(
    progress: Callable[[Progress], None], attack: Inversion, rows: int, done: int, size: int
) -> Callable[[int, Tensor], None]:
    """Translate a chunk's report into the attack's."""
    budget = attack.descent.iterations

    def report(iteration: int, objectives: Tensor) -> None:
        active = len(objectives)
        value = float(objectives.median()) if active else float("nan")
        victims = (done + size - active) // attack.restarts
        progress(Progress(victims, active, done * budget + size * iteration, rows * budget, value))

    return report
