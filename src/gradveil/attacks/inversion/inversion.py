"""The optimisation attack: one loop, of which the papers' attacks are settings.

The attacker runs the simulated client on dummy inputs, compares with what was sent, and descends on everything unknown.
Target clients x restarts are the rows of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.inversion.descent import CONVERGED, STATUSES, Solution, joined
from gradveil.attacks.inversion.distances import statistics_wanted
from gradveil.attacks.inversion.image_sources import INPUTS, TARGETS
from gradveil.attacks.inversion.inversion_settings import InversionSettings
from gradveil.attacks.inversion.problem import Rows
from gradveil.attacks.inversion.solve import rows_at_once, searched
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.labels import label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark
from gradveil.attacks.undo import undone
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import take
from gradveil.gradients.fused import written_bytes
from gradveil.nn.module_paths import downstream

_VALUES = 2**26
"""Numbers of updates that are compared at once."""


@dataclass(frozen=True)
class Inversion(InversionSettings):
    """The one optimisation attack: its settings, run on observations."""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and a distance with nothing left to compare."""
        yield from label_problems(self.labels, prospect)
        yield from self.images.problems(prospect.shape, prospect.public)
        if self.subtract and self.simulated_client == "naive":
            what = "takes additive noise off what was sent, and this attacker ignores the defence that adds it"
            yield Problem(
                "additive=subtracted", what, "set simulated_client=full, or choose an attack that does: wiig, cdia"
            )
        if self.solver is not None:
            remedy = "leave start=solved out: it is for models whose first layer shows its input"
            found = self.solver.problems(prospect)
            yield from (replace(p, where=f"start=solved: {p.where}", remedy=remedy) for p in found)
        if self.ignore == "stochastic":
            example = next(iter(prospect.simulated_client.params().values()))
            reached = downstream(prospect.simulated_client.model, example.new_zeros((1, *prospect.shape)))
            if not set(prospect.simulated_client.trained()) - reached:
                what = "leaves out what a bottleneck's noise reaches, and that is every trained layer"
                yield Problem("ignore", what, "choose an attack that optimises the noise: vbia, cdia")

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every target client's batch from the observed updates."""
        began = time.perf_counter()
        scene = Rows(self, observations, simulated_client, knowledge, key)
        scene.learn()
        rows = len(scene)
        chunks = tuple(plan) or _plan(self, scene)
        if sum(chunks) != rows:
            raise fail("attack.plan", f"covers {sum(chunks)} rows of {rows}", "give the plan of the same attack")
        done, parts = 0, []
        solver, seen = self.solver, observations[:1] if self.rounds == "first" else observations
        solved = solver(seen, simulated_client, knowledge, key.child(Stream.SOLVED)).inputs if solver else None
        for size in chunks:
            report = _reporter(progress, self, rows, done, size) if progress else None
            parts.append(searched(self, scene, range(done, done + size), solved, report))
            done += size
        found = _reconstruction(self, scene, joined(parts), time.perf_counter() - began, chunks)
        return undone(found, simulated_client, knowledge) if self.undo else found

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once on this machine: what a call without a plan would take."""
        return _plan(self, Rows(self, observations, simulated_client, knowledge, key))

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
        """Return the objective [V] at inputs [V, B, ...]; what is optimised besides takes its value in `noise`."""
        scene = Rows(self, observations, simulated_client, knowledge, key)
        return torch.cat([scene.at(some, inputs, noise) for some in _chunks(range(scene.target_clients), plan)])

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
        """Return `Reconstruction.match` at inputs [V, B, ...], as `evaluate` takes them."""
        scene = Rows(self, observations, simulated_client, knowledge, key)
        rows = _chunks(range(scene.target_clients), [min(_at_once(scene), max(plan, default=1))])
        return torch.cat([scene.match_at(some, inputs, noise) for some in rows])


def _chunks(rows: Sequence[int], plan: Sequence[int]) -> list[list[int]]:
    """Part rows, so that no more of them are worked on at once than the plan has it."""
    return [some.tolist() for some in torch.tensor(list(rows)).split(max(1, max(plan, default=1)))]


def _at_once(scene: Rows) -> int:
    """Count the rows whose updates are compared at once: a search need not make them, and makes do with less memory."""
    return max(1, _VALUES // sum(value[0].numel() for r in scene.rounds for value in r.observed.values()))


def _plan(attack: InversionSettings, scene: Rows) -> tuple[int, ...]:
    """Choose how many rows to work on at once from what one row keeps for its derivative."""
    variables, constants = scene.start([0])
    streams = scene.draws.streams([0])
    live = {n: v.requires_grad_(not attack.evolves) for n, v in variables.items()}
    live |= scene.drawing.tuned(1)
    number = torch.zeros(1, dtype=torch.long)
    stepper = replace(attack.coupled.stepper, population=1) if attack.evolves else attack.coupled.stepper
    kept = sum(v.numel() * v.element_size() for v in stepper.init(live).values())
    # The first call of a shape also runs the reference, so the second one is counted.
    written = [written_bytes(lambda: scene.loss(live, constants, number, streams)) for _ in range(2)][-1]
    size = rows_at_once(written + kept, len(scene), scene.device)
    if attack.together:  # a target client's restarts look at each other
        size = max(size // attack.restarts, 1) * attack.restarts
    full, rest = divmod(len(scene), size)
    return (size,) * full + ((rest,) if rest else ())


def _reconstruction(
    attack: InversionSettings, scene: Rows, solution: Solution, seconds: float, plan: tuple[int, ...]
) -> Reconstruction:
    """Choose each target client's restart by the attacker's own objective."""
    shape = (scene.target_clients, attack.restarts)
    objectives = solution.objective.view(shape)
    # The first restart to reach the tolerance ends the others of its chunk: what those of another chunk would still
    # have found must not count, or the plan would choose.
    solved = (solution.status == CONVERGED).view(shape)
    first = torch.where(solved, solution.iterations.view(shape), torch.iinfo(torch.long).max)
    best = solved & (first == first.min(1, keepdim=True).values) | ~solved.any(1, keepdim=True)
    chosen = torch.where(best, objectives, torch.inf).argmin(1)
    rows = torch.arange(scene.target_clients, device=chosen.device) * attack.restarts + chosen
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


def _remarks(attack: InversionSettings, scene: Rows) -> tuple[Remark, ...]:
    """Return remarks on what an attack was to do and could not."""
    first = torch.zeros(1, dtype=torch.long, device=scene.device)
    if not attack.batchnorm or statistics_wanted(scene.knowledge, scene.simulated_client, first, scene.example):
        return ()
    return (Remark("its BatchNorm prior is left out: the model carries no running statistics", (0,)),)


def _best_of(values: Tensor, objectives: Tensor, shape: tuple[int, int]) -> Tensor:
    """Choose each target client's restart as it would have been chosen then."""
    chosen = objectives.view(shape).argmin(1)
    return values.unflatten(0, shape)[torch.arange(shape[0], device=chosen.device), chosen]


def _reporter(
    progress: Callable[[Progress], None], attack: InversionSettings, rows: int, done: int, size: int
) -> Callable[[int, Tensor], None]:
    """Translate a chunk's report into the attack's."""
    budget = attack.descent.iterations

    def report(iteration: int, objectives: Tensor) -> None:
        active = len(objectives)
        value = float(objectives.median()) if active else float("nan")
        target_clients = (done + size - active) // attack.restarts
        progress(Progress(target_clients, active, done * budget + size * iteration, rows * budget, value))

    return report
