"""The only inversion loop: all rows (target x restart) of a batch descend at once.

The host reads nothing between reporting points: the best iterate, the step size and the patience of each row live on
the device. At a reporting point, finished rows leave the batch with a status, and stay in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.optimisers import LBFGS, Adam, Project, RMSprop
from gradveil.attacks.protocol import Status
from gradveil.core.errors import Problem, refuse
from gradveil.core.settings import Checked, Count, Range, Strength
from gradveil.core.tree import Tensors, select, take


def rungs(groups: Tensor, iterations: int) -> frozenset[int]:
    """List the iterations after which each group loses its worse half: at 1/2, 1/4, … of the budget.

    >>> sorted(rungs(torch.zeros(8), 800))
    [100, 200, 400]
    """
    largest = int(groups.unique(return_counts=True)[1].max())
    return frozenset(max(iterations >> rung, 1) for rung in range(1, (largest - 1).bit_length() + 1))


def worse_half(objective: Tensor, groups: Tensor, gone: Tensor) -> Tensor:
    """Mark the worse half of each group's remaining rows; of an odd number the middle one stays."""
    marked = torch.zeros_like(gone)
    for group in groups[~gone].unique():
        rows = ((groups == group) & ~gone).nonzero().flatten()
        order = objective[rows].argsort(stable=True)
        marked[rows[order[(len(rows) + 1) // 2 :]]] = True
    return marked


CONVERGED, STALLED, BUDGET, DIVERGED = range(4)
"""Codes of the statuses in tensors on the device."""
STATUSES: tuple[Status, ...] = ("converged", "stalled", "budget", "diverged")
"""The statuses of these codes in results."""


@dataclass(eq=False)
class Solution:
    """The result of every row."""

    variables: Tensors
    """The results of the best iterate: its variables, or values computed from them."""
    objective: Tensor
    initial: Tensor
    iterations: Tensor
    status: Tensor
    trace: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Iterations -> the first result of every row's best iterate by then, and its objective."""

    @classmethod
    def empty(cls, results: Tensors) -> Solution:
        """Allocate the results of every row."""
        first = next(iter(results.values()))
        rows = first.shape[0]
        return cls(
            variables={name: value.detach().clone() for name, value in results.items()},
            objective=first.new_full((rows,), torch.inf),
            initial=first.new_full((rows,), torch.inf),
            iterations=torch.zeros(rows, dtype=torch.long, device=first.device),
            status=torch.full((rows,), BUDGET, dtype=torch.long, device=first.device),
        )

    def record(self, iterations: int, rows: Tensor, results: Tensors, objective: Tensor) -> None:
        """Add the best results so far of rows under way, and the results of ended rows, to the trace."""
        name = next(iter(self.variables))
        values, objectives = self.variables[name].clone(), self.objective.clone()
        values[rows], objectives[rows] = results[name], objective
        self.trace[iterations] = (values, objectives)

    def fill_trace(self, points: Iterable[int]) -> None:
        """Add the final results to the trace at the points that came after every row had ended."""
        first = next(iter(self.variables.values()))
        for point in points:
            self.trace.setdefault(point, (first.clone(), self.objective.clone()))

    def continue_with(self, rows: Tensor, later: Solution, after: int, keep: str) -> None:
        """Merge the results of a second descent of some rows, which began after these iterations."""

        def replaces(new: Tensor, old: Tensor) -> Tensor:
            return new < old if keep == "best" else torch.isfinite(new)

        better = replaces(later.objective, self.objective[rows])
        name = next(iter(self.variables))
        for count, (results, objective) in later.trace.items():
            values, objectives = self.variables[name].clone(), self.objective.clone()
            improved = replaces(objective, objectives[rows])
            values[rows] = _where(improved, results, values[rows])
            objectives[rows] = torch.where(improved, objective, objectives[rows])
            self.trace[after + count] = (values, objectives)
        for other in self.variables.keys() & later.variables.keys():
            self.variables[other][rows] = _where(better, later.variables[other], self.variables[other][rows])
        self.objective[rows] = torch.where(better, later.objective, self.objective[rows])
        self.iterations[rows] += later.iterations
        self.status[rows] = later.status


def joined(parts: Sequence[Solution]) -> Solution:
    """Concatenate the solutions of chunks."""
    joined = replace(parts[0], trace={})
    joined.variables = {n: torch.cat([part.variables[n] for part in parts]) for n in parts[0].variables}
    for name in ("objective", "initial", "iterations", "status"):
        setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    counts = {count for part in parts for count in part.trace}
    ended = {part: (next(iter(part.variables.values())), part.objective) for part in parts}
    for count in counts:
        # A part that had ended by then is represented by its result.
        traces = [part.trace.get(count, ended[part]) for part in parts]
        joined.trace[count] = (torch.cat([value for value, _ in traces]), torch.cat([score for _, score in traces]))
    return joined


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (one.ndim - 1)), one, other)


Loss = Callable[[Tensors, Tensors, Tensor, int], Tensor]
"""(variables [n, ...], constants [n, ...], row numbers [n], iteration) -> objective [n]."""

Stepper = Adam | RMSprop | LBFGS | CMAES
"""The optimisers of a descent."""
Results = Callable[[Tensors, Tensors], Tensors]
"""(variables [n, ...], constants [n, ...]) -> the results of rows: their images first."""


@dataclass(frozen=True)
class StepSchedule:
    """Multiply the step size by `factor` at each of these shares of the budget."""

    at: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8)
    factor: float = 0.1


@dataclass(frozen=True)
class Plateau:
    """Multiply a row's step size by `factor` whenever the row has not improved for `patience` iterations."""

    patience: int = 400
    factor: float = 0.1


@dataclass(frozen=True)
class Cosine:
    """Raise the step size linearly over `warmup` iterations, then lower it to zero along half a cosine.

    The warm-up takes at most a tenth of the iterations.
    """

    warmup: int = 50


@dataclass(frozen=True)
class Descent(Checked):
    """Optimiser, schedule and stopping rules of the rows."""

    stepper: Stepper = field(default_factory=Adam)
    schedule: StepSchedule | Plateau | Cosine | None = None
    iterations: Annotated[Count, "Largest number of iterations."] = 1000
    tolerance: Annotated[Strength, "Objective at or below which a search has converged."] = 0.0
    patience: Annotated[
        int | None,
        Range(1, integer=True, optional=True),
        "Iterations without progress after which a search has stalled.",
    ] = None
    progress: float = 1e-4
    """Relative decrease of the objective that counts as progress."""
    keep: Annotated[Literal["best", "last"], "Returned iterate: the one with the lowest objective, or the last."] = (
        "best"
    )
    report: Annotated[Count, "Iterations from one reporting point to the next."] = 50
    halving: Annotated[bool, "Drop the worse half of each target's restarts at fixed points."] = False
    """One restart is left in the second half of the budget."""
    label: ClassVar[str] = "attack"

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse a schedule for a population."""
        if isinstance(self.stepper, CMAES) and self.schedule is not None:
            yield Problem("attack.schedule", "sets step sizes, but a population adapts its own", "leave it out")


def descend(
    loss: Loss,
    variables: Tensors,
    constants: Tensors,
    descent: Descent,
    project: Project,
    unsigned: frozenset[str] = frozenset(),
    report: Callable[[int, Tensor], None] | None = None,
    groups: Tensor | None = None,
    jitter: Callable[[Tensors, Tensor, Tensor], Tensors] | None = None,
    points: frozenset[int] = frozenset(),
    results: Results = lambda variables, constants: variables,
    normal: Callable[[Tensor, int], Tensor] | None = None,
) -> Solution:
    """Minimise the objective of every row. `report(iterations done, best objectives of the rows under way)`.

    Rows of one group are restarts of one target client: all of them end when one has converged. `jitter(variables, row
    numbers, step sizes)` adds noise to every row after its step. The trace records the best iterates after each of the
    iterations in `points`. `results` converts the best variables of a row to its results. A population draws new
    numbers from `normal(row numbers, numbers per row)`, and its rows end together.

    The first step begins at the start as drawn, such as from N(0, 1), like the published programs. A start that
    `project` would change is not a valid result: it is never the best iterate, and a NaN there does not end the row.
    """
    halvings = rungs(groups, descent.iterations) if groups is not None and descent.halving else frozenset[int]()
    solution = Solution.empty(results(variables, constants))
    rows = torch.arange(len(solution.objective), device=solution.objective.device)
    state = _start(variables, descent.stepper, len(rows), project)
    for iteration in range(descent.iterations):
        variables, value, grads = _evaluate(loss, variables, constants, rows, iteration, descent.stepper)
        state = _judge(state, variables, value, descent, iteration, project)
        if iteration + 1 in points:
            best = results(select(state, "best"), constants)
            solution.record(iteration + 1, rows, best, state["control.objective"])
        done = state["control.status"] != BUDGET
        if isinstance(descent.stepper, CMAES):  # the rows of a population end together
            population = descent.stepper.population
            done = done.view(-1, population).all(1).repeat_interleave(population)
        last = iteration + 1 == descent.iterations
        if last or (iteration + 1) % descent.report == 0 or iteration + 1 in halvings:
            converged = state["control.status"] == CONVERGED
            finished = torch.ones_like(done) if last else done
            if groups is not None:
                own_group = groups[rows]
                finished = finished | torch.isin(own_group, own_group[converged])
                if iteration + 1 in halvings:
                    finished = finished | worse_half(state["control.objective"], own_group, finished)
            if bool(finished.any()):
                ended, part = rows[finished], take(state, finished)
                best = results(select(part, "best"), take(constants, finished))
                for name in solution.variables:
                    solution.variables[name][ended] = best[name]
                for name in ("objective", "initial", "iterations", "status"):
                    getattr(solution, name)[ended] = part[f"control.{name}"]
                left = ~finished
                rows, value, variables = rows[left], value[left], take(variables, left)
                constants, state, grads = take(constants, left), take(state, left), take(grads, left)
            if report:
                report(iteration + 1, state["control.objective"])
            if not len(rows):
                break
        scale, inner = _scale(state, descent, iteration), select(state, "step")
        if isinstance(descent.stepper, CMAES):
            assert normal is not None, "a population needs random numbers"
            variables, inner = descent.stepper.step(variables, value, inner, normal, rows, iteration, project)
        else:
            # NaN slopes count as zero: neither a start outside of the box nor a trial of a line search ends a row.
            safe = {name: torch.nan_to_num(g, posinf=0.0, neginf=0.0) for name, g in grads.items()}
            variables, inner = descent.stepper.step(variables, safe, value, inner, scale, iteration, project, unsigned)
        state |= {f"step.{name}": v for name, v in inner.items()}
        if jitter is not None:
            variables = jitter(variables, rows, scale * descent.stepper.lr)
    return solution


def _evaluate(
    loss: Loss, variables: Tensors, constants: Tensors, rows: Tensor, iteration: int, stepper: Stepper
) -> tuple[Tensors, Tensor, Tensors]:
    """Return variables, objectives and gradients; without gradients for steppers that need none."""
    if isinstance(stepper, CMAES):
        with torch.no_grad():
            return variables, loss(variables, constants, rows, iteration), {}
    live = {name: value.detach().requires_grad_() for name, value in variables.items()}
    value = loss(live, constants, rows, iteration)
    # No row depends on another one: the gradient of the sum holds the gradient of each.
    total = value.sum() if len(value) > 1 else value.view(())
    slopes = [None] * len(live)
    if total.requires_grad:
        slopes = torch.autograd.grad(total, list(live.values()), allow_unused=True)
    grads = {name: slope for name, slope in zip(live, slopes, strict=True) if slope is not None}
    problem = "cannot be optimised: the simulated update has no derivative with respect to it"
    fix = (
        "let the client's model or defence compute with it in a differentiable way (no detach, rounding or comparison) "
        "or choose an attack that draws it instead: ig(simulated_client=full)"
    )
    refuse([Problem(f"knowledge.{name}", problem, fix) for name in live if name not in grads])
    return {name: v.detach() for name, v in live.items()}, value.detach(), grads


def _start(variables: Tensors, stepper: Stepper, rows: int, project: Project) -> Tensors:
    """Return the state of the rows, with leading n, so that rows can leave."""
    first = next(iter(variables.values()))
    state = {f"step.{name}": v for name, v in stepper.init(variables).items()}
    # A valid result even if no iterate is ever taken.
    state |= {f"best.{name}": project(name, v).clone() for name, v in variables.items()}
    for name, fill in (("objective", torch.inf), ("initial", torch.inf), ("anchor", torch.inf), ("scale", 1.0)):
        state[f"control.{name}"] = first.new_full((rows,), fill)
    for name, fill in (("since", 0), ("since_scale", 0), ("iterations", 0), ("status", BUDGET)):
        state[f"control.{name}"] = torch.full((rows,), fill, dtype=torch.long, device=first.device)
    return state


def _judge(
    state: Tensors, variables: Tensors, value: Tensor, descent: Descent, iteration: int, project: Project
) -> Tensors:
    """Keep the best iterate of each row, count its patience, and set its status. Finished rows stay as they are."""
    new = dict(state)
    running = state["control.status"] == BUDGET
    if isinstance(descent.stepper, CMAES):  # after a non-finite objective, the row gets a new candidate
        running = running | (state["control.status"] == DIVERGED)
    finite = torch.isfinite(value)
    best = state["control.objective"]
    better = running & (value < best if descent.keep == "best" else finite)  # NaN is below nothing
    solved = value <= descent.tolerance
    alive = finite
    if iteration == 0:  # a start may lie outside the box, where a model may return NaN; later iterates are projected
        same = [(project(name, v) == v).reshape(len(v), -1).all(1) for name, v in variables.items()]
        inside = torch.stack(same).all(0)
        better, solved, alive = better & inside, solved & inside, finite | ~inside
    new["control.objective"] = torch.where(better, value, best)
    for name, current in variables.items():
        wide = better.view(-1, *[1] * (current.ndim - 1))
        new[f"best.{name}"] = torch.where(wide, current, state[f"best.{name}"])
    if iteration == 0:
        new["control.initial"] = value
    elif iteration == 1:
        # A start outside of the box may have no objective: the first projected iterate's counts then.
        unknown = running & ~torch.isfinite(state["control.initial"])
        new["control.initial"] = torch.where(unknown, value, state["control.initial"])
    if descent.patience is not None or isinstance(descent.schedule, Plateau):
        shared = value
        if isinstance(descent.stepper, CMAES):  # a population makes progress as a whole
            whole = torch.where(finite, value, torch.inf).view(-1, descent.stepper.population)
            shared = whole.amin(1).repeat_interleave(descent.stepper.population)
        new |= _patience(state, shared, torch.isfinite(shared), descent)
    new["control.iterations"] = state["control.iterations"] + running
    status = torch.where(alive, BUDGET, DIVERGED)
    if isinstance(descent.stepper, LBFGS):  # a line search may try a non-finite point and step back from it
        status = torch.where(torch.isfinite(new["control.initial"]), BUDGET, DIVERGED)
    elif isinstance(descent.stepper, CMAES):
        status = torch.where(torch.isfinite(new["control.objective"]), BUDGET, DIVERGED)
    if descent.patience is not None:
        status = torch.where((status == BUDGET) & (new["control.since"] >= descent.patience), STALLED, status)
    status = torch.where(solved, CONVERGED, status)
    new["control.status"] = torch.where(running, status, state["control.status"])
    return new


def _patience(state: Tensors, value: Tensor, finite: Tensor, descent: Descent) -> Tensors:
    """Count each row's iterations without progress, and lower its step size on a plateau."""
    new: Tensors = {}
    anchor = state["control.anchor"]
    # Relative to the value at the last progress, so that many small decreases add up.
    progressed = finite & (torch.isinf(anchor) | (value < anchor - descent.progress * anchor.abs()))
    new["control.anchor"] = torch.where(progressed, value, anchor)
    zero = torch.zeros_like(state["control.since"])
    new["control.since"] = torch.where(progressed, zero, state["control.since"] + 1)
    new["control.since_scale"] = torch.where(progressed, zero, state["control.since_scale"] + 1)
    if isinstance(descent.schedule, Plateau):
        drop = new["control.since_scale"] > descent.schedule.patience
        new["control.scale"] = torch.where(
            drop, state["control.scale"] * descent.schedule.factor, state["control.scale"]
        )
        new["control.since_scale"] = torch.where(drop, zero, new["control.since_scale"])
    return new


def _scale(state: Tensors, descent: Descent, iteration: int) -> Tensor:
    """Step-size factor of each row."""
    scale = state["control.scale"]
    if isinstance(descent.schedule, StepSchedule):
        passed = sum(iteration + 1 >= share * descent.iterations for share in descent.schedule.at)
        return scale * descent.schedule.factor**passed
    if isinstance(descent.schedule, Cosine):
        warm, count = min(descent.schedule.warmup, descent.iterations // 10), iteration + 1
        if count <= warm:
            return scale * (count / warm)
        return scale * (0.5 * (1 + cos(pi * (count - warm) / max(1, descent.iterations - warm))))
    return scale
