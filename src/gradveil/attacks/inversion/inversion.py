"""The optimisation attack: one loop, of which the papers' attacks are settings.

The attacker runs the simulated client on dummy inputs, compares the result with the observed update, and descends on
all unknown tensors. Target clients x restarts are the rows of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradveil.attacks.inversion.denoiser import FEWEST, denoiser_problems
from gradveil.attacks.inversion.descent import CONVERGED, STATUSES, Solution, joined
from gradveil.attacks.inversion.distances import LIKELIHOOD, statistics_wanted
from gradveil.attacks.inversion.image_sources import INPUTS, TARGETS, Relaxed
from gradveil.attacks.inversion.inversion_settings import InversionSettings
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.inversion.rehearsal import adds_noise, choose, effort, further, prepare, rehearse, shifted
from gradveil.attacks.inversion.solve import rows_at_once, search_rows
from gradveil.attacks.inversion.undone_entries import is_map_of_entries
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.labels import label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark
from gradveil.attacks.undo_batch_defence import undone
from gradveil.client import Client
from gradveil.core.chain import last_stage
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import take
from gradveil.core.types import DrawsEntries
from gradveil.core.working_time import working_time
from gradveil.gradients.fused import written_bytes
from gradveil.nn.module_paths import downstream

_VALUES = 2**26
"""Largest number of update entries that are compared at once."""


@dataclass(frozen=True)
class EndedSearch:
    """The descent of an attack on all rows."""

    problem: InversionProblem
    solution: Solution
    plan: tuple[int, ...]
    seconds: float
    """Time of the descent alone, without what is set up and learned before it."""


@dataclass(frozen=True)
class Inversion(InversionSettings):
    """The one optimisation attack: its settings, run on observations."""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and a distance that compares no layer."""
        yield from label_problems(self.labels, prospect)
        yield from self.images.problems(prospect.shape, prospect.public)
        if self.denoiser is not None:
            yield from denoiser_problems(self.denoiser, self.denoise, prospect.shape)
        elif self.denoise and not self.variants and (prospect.public or 0) < FEWEST:
            problem = f"trains a denoiser on {prospect.public or 'no'} public images, and {FEWEST} are few"
            yield Problem("denoise", problem, "give more public images, or leave denoise out")
        if self.subtract and self.simulated_client == "naive":
            problem = "subtracts additive noise, and this attacker ignores the defence that adds it"
            fix = "set simulated_client=full, or choose an attack that does: wiig, cdia"
            yield Problem("additive=subtracted", problem, fix)
        if self.undo_entries and not is_map_of_entries(prospect.simulated_client, prospect.examples, Key(0)):
            problem = "finds that what is sent is no map of the gradient's single entries, or hides too much of them"
            yield Problem("undo_entries", problem, "leave it out")
        client = prospect.simulated_client
        draws = isinstance(last_stage(client.send), DrawsEntries) and client.members == 1
        if self.objective == LIKELIHOOD and not draws:
            problem = "is the likelihood of a defence that draws what one client sends entry by entry, and here is none"
            yield Problem("objective", problem, "choose another objective, such as cosine")
        if self.solver is not None:
            fix = "leave start=solved out: it is for models whose first layer reveals its input"
            for problem in self.solver.problems(prospect):
                yield replace(problem, where=f"start=solved: {problem.where}", remedy=fix)
        if self.ignore == "stochastic":
            example = next(iter(prospect.simulated_client.params().values()))
            reached = downstream(prospect.simulated_client.model, example.new_zeros((1, *prospect.shape)))
            if not set(prospect.simulated_client.trained()) - reached:
                problem = "leaves out the layers that a bottleneck's noise reaches, and that is every trained layer"
                yield Problem("ignore", problem, "choose an attack that optimises the noise: vbia, cdia")

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
        if self.variants:
            scores = self.rehearse(observations, simulated_client, knowledge, key, progress)
            chosen, remark = self.chosen(scores)
            report = progress and shifted(progress, self.rehearsed(observations, scores))
            found = chosen(observations, simulated_client, knowledge, key, report, plan)
            return replace(found, remarks=(*found.remarks, remark))
        device = next(iter(observations[0].params.values())).device
        began = working_time(device)
        done = self.search(observations, simulated_client, knowledge, key, progress, plan)
        seconds = working_time(device) - began
        result = _reconstruction(self, done.problem, done.solution, seconds, done.plan)
        return undone(result, simulated_client, knowledge) if self.undo else result

    def search(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> EndedSearch:
        """Descend on all rows, without comparing the answers with the observed updates; variants are left out."""
        problem = InversionProblem(self, observations, simulated_client, knowledge, key)
        problem.learn()
        rows = len(problem)
        chunks = tuple(plan) or _plan(self, problem)
        if sum(chunks) != rows:
            raise fail("attack.plan", f"covers {sum(chunks)} rows of {rows}", "give the plan of the same attack")
        done, parts = 0, list[Solution]()
        solver, rounds = self.solver, observations[:1] if self.rounds == "first" else observations
        solved = solver(rounds, simulated_client, knowledge, key.child(Stream.SOLVED)).inputs if solver else None
        began = working_time(problem.device)
        for size in chunks:
            report = _reporter(progress, self, rows, done, size) if progress else None
            parts.append(search_rows(self, problem, range(done, done + size), solved, report))
            done += size
        return EndedSearch(problem, joined(parts), chunks, working_time(problem.device) - began)

    def rehearse(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
    ) -> tuple[int, ...]:
        """Return what `rehearsal.rehearse` does on simulated clients; nothing where none can be simulated."""
        key = key.child(Stream.REHEARSAL)

        def run(
            attack: InversionSettings,
            seen: Sequence[Observation],
            told: Knowledge,
            report: Callable[[Progress], None] | None,
        ) -> Reconstruction:
            return cast("Inversion", attack)(seen, simulated_client, told, key, report)

        known = observations, simulated_client, knowledge, key
        targets = len(observations[-1].target_clients)
        count, iterations = effort(self.descent.iterations, targets, len(self.variants))
        noisy = adds_noise(simulated_client, observations[-1], knowledge)
        fewer, finals = further(self.descent.iterations, targets, len(self.variants), noisy)
        first = prepare(*known, fewer) if finals else None
        more = None if first is None else (first, finals)
        report = progress and shifted(progress, 0, after=targets * self.restarts * self.descent.iterations)
        return rehearse(self, prepare(*known, count), iterations, run, more, report)

    def rehearsed(self, observations: Sequence[Observation], scores: Sequence[int]) -> int:
        """Return the row-iterations of the rehearsals with these scores."""
        targets, variants = len(observations[-1].target_clients), len(self.variants)
        count, iterations = effort(self.descent.iterations, targets, variants)
        rows = variants * count * iterations if scores else 0
        if len(scores) > variants:
            clients, *finals = scores[variants:]
            rows += clients * sum(finals[4::3])  # the first of them was tried before
        return self.restarts * rows

    def chosen(self, scores: Sequence[int]) -> tuple[Inversion, Remark]:
        """Return the attack with the variant of the best score, and a remark that says which."""
        attack, remark = choose(self, scores)
        return cast("Inversion", attack), remark

    def plan(
        self, observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose the rows of each chunk for this machine, as a call without a plan does."""
        return _plan(self, InversionProblem(self, observations, simulated_client, knowledge, key))

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
        """Return the objective [V] at inputs [V, B, ...]; other optimised tensors take their values from `noise`."""
        problem = InversionProblem(self, observations, simulated_client, knowledge, key, judges=True)
        chunks = _chunks(range(problem.target_clients), plan)
        return torch.cat([problem.objective_at(chunk, inputs, noise) for chunk in chunks])

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
        """Return `Reconstruction.match` at inputs [V, B, ...], with the arguments of `evaluate`."""
        problem = InversionProblem(self, observations, simulated_client, knowledge, key, judges=True)
        chunks = _chunks(range(problem.target_clients), [min(_most_compared(problem), max(plan, default=1))])
        return torch.cat([problem.match_at(chunk, inputs, noise) for chunk in chunks])


def _chunks(rows: Sequence[int], plan: Sequence[int]) -> list[list[int]]:
    """Split rows into chunks of at most the plan's largest size."""
    return [chunk.tolist() for chunk in torch.tensor(list(rows)).split(max(1, max(plan, default=1)))]


def _most_compared(problem: InversionProblem) -> int:
    """Return how many rows' updates fit into memory. A search needs less memory, as it need not form the updates."""
    return max(1, _VALUES // sum(value[0].numel() for r in problem.rounds for value in r.observed.values()))


def _plan(attack: InversionSettings, problem: InversionProblem) -> tuple[int, ...]:
    """Choose the rows of each chunk from the memory that one row writes for its derivative."""
    variables, constants = problem.start([0])
    streams = problem.draws.streams([0])
    live = {n: v.requires_grad_(not attack.evolves) for n, v in variables.items()}
    live |= problem.drawing.tuned(1)
    number = torch.zeros(1, dtype=torch.long)
    # The one row that is measured is a population of its own.
    stepper = replace(attack.coupled.stepper, population=1) if attack.evolves else attack.coupled.stepper
    state = sum(v.numel() * v.element_size() for v in stepper.init(live).values())
    # The first call of a shape also runs the reference, so the second one is counted.
    written = [written_bytes(lambda: problem.loss(live, constants, number, streams)) for _ in range(2)][-1]
    size = rows_at_once(written + state, len(problem), problem.device)
    if attack.together:  # the restarts of a target client depend on each other
        size = max(size // attack.restarts, 1) * attack.restarts
    full, rest = divmod(len(problem), size)
    return (size,) * full + ((rest,) if rest else ())


def _reconstruction(
    attack: InversionSettings, problem: InversionProblem, solution: Solution, seconds: float, plan: tuple[int, ...]
) -> Reconstruction:
    """Choose each target client's restart by the attacker's own objective."""
    shape = (problem.target_clients, attack.restarts)
    objectives = solution.objective.view(shape)
    # The first restart to reach the tolerance ends the others of its chunk. Later results of another chunk must not
    # count, or the choice would depend on the plan.
    solved = (solution.status == CONVERGED).view(shape)
    first = torch.where(solved, solution.iterations.view(shape), torch.iinfo(torch.long).max)
    best = solved & (first == first.min(1, keepdim=True).values) | ~solved.any(1, keepdim=True)
    chosen = torch.where(best, objectives, torch.inf).argmin(1)
    rows = torch.arange(problem.target_clients, device=chosen.device) * attack.restarts + chosen
    joint = solution.variables.get(TARGETS)
    targets = problem.labels if joint is None else joint[rows].argmax(-1)
    assert targets is not None
    final = solution.variables[INPUTS][rows]
    compared = _chunks(rows.tolist(), [min(_most_compared(problem), max(plan))])
    trace = dict[int, Tensor]()
    for point in attack.points():
        if point in solution.trace:  # choose the restart with the best objective at that point
            images, values = solution.trace[point]
            best_then = values.view(shape).argmin(1)
            trace[point] = images.unflatten(0, shape)[torch.arange(shape[0], device=best_then.device), best_then]
        else:  # every row had ended
            trace[point] = final
    remarks: tuple[Remark, ...] = ()
    first = torch.zeros(1, dtype=torch.long, device=problem.device)
    if attack.batchnorm and not statistics_wanted(problem.knowledge, problem.simulated_client, first, problem.example):
        remarks = (Remark("its BatchNorm prior is left out: the model has no running statistics", (0,)),)
    final, certainty = _finished(attack, problem, solution.variables[INPUTS].unflatten(0, shape), final)
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
        remarks=remarks,
        certainty=certainty,
        match=torch.cat([problem.match(chunk, take(solution.variables, chunk)) for chunk in compared]),
    )


def _finished(
    attack: InversionSettings, problem: InversionProblem, every: Tensor, final: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the answer [V, B, ...] of the best restart, or of all [V, R, B, ...] together, and how far they agree."""
    space, certainty = problem.knowledge.space, None
    if attack.median:
        return _median(final), None
    if attack.pool and attack.restarts > 1:
        best, matched = space.view(final.cpu().double()), list[Tensor]()
        for restart in every.unbind(1):
            order = space.match(space.view(restart.cpu().double()), best)[0].to(restart.device)
            own = torch.stack([rows[places] for rows, places in zip(restart, order, strict=True)])
            # Numbers of a restart that diverged are replaced by those of the best one.
            matched.append(torch.where(own.isfinite(), own, final))
        final, certainty = space.pooled(torch.stack(matched)), space.agreement(torch.stack(matched))
    return space.projected(final) if isinstance(attack.images, Relaxed) else final, certainty


def _median(images: Tensor) -> Tensor:
    """Replace each pixel of images [V, B, C, H, W] by the median of its 3x3 neighbourhood; borders are mirrored."""
    padded = pad(images.flatten(0, 1), (1, 1, 1, 1), mode="reflect")
    windows = padded.unfold(-2, 3, 1).unfold(-2, 3, 1).flatten(-2)
    return windows.median(-1).values.view_as(images)


def _reporter(
    progress: Callable[[Progress], None], attack: InversionSettings, rows: int, done: int, size: int
) -> Callable[[int, Tensor], None]:
    """Convert the report of a chunk to that of the attack."""
    budget = attack.descent.iterations

    def report(iteration: int, objectives: Tensor) -> None:
        active = len(objectives)
        value = float(objectives.median()) if active else float("nan")
        target_clients = (done + size - active) // attack.restarts
        progress(Progress(target_clients, active, done * budget + size * iteration, rows * budget, value))

    return report
