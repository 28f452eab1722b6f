"""The only inversion loop: every row (target x restart) of a batch descends at once.

Nothing is read by the host between reporting points: the best iterate of each row, its step size and its patience
live on the device. At a reporting point, finished rows leave the batch with a status; they are never dropped from the
result.
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
    """List the iterations after which each group loses its worse half: at 1/2, 1/4, … of the budget, the last first.

    >>> sorted(rungs(torch.zeros(8), 800))
    [100, 200, 400]
    """
    largest = int(groups.unique(return_counts=True)[1].max())
    return frozenset(max(iterations >> rung, 1) for rung in range(1, (largest - 1).bit_length() + 1))


def worse_half(objective: Tensor, groups: Tensor, gone: Tensor) -> Tensor:
    """Mark the worse half of each group's rows that are still there; of an odd number the middle one stays."""
    marked = torch.zeros_like(gone)
    for group in groups[~gone].unique():
        own = ((groups == group) & ~gone).nonzero().flatten()
        order = objective[own].argsort(stable=True)
        marked[own[order[(len(own) + 1) // 2 :]]] = True
    return marked


def with_one_of(groups: Tensor, marked: Tensor) -> Tensor:
    """Mark the rows of every group in which a row is marked."""
    return torch.isin(groups, groups[marked])


CONVERGED, STALLED, BUDGET, DIVERGED = range(4)
"""Codes of the statuses, as tensors on the device hold them."""
STATUSES: tuple[Status, ...] = ("converged", "stalled", "budget", "diverged")
"""The words that results use for these codes."""


@dataclass(eq=False)
class Solution:
    """What became of every row."""

    variables: Tensors
    """What the best iterate shows: its variables, or what was made of them."""
    objective: Tensor
    initial: Tensor
    iterations: Tensor
    status: Tensor
    trace: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Best answer (what is shown first) and its objective, for every row, after so many iterations."""

    @classmethod
    def empty(cls, shown: Tensors) -> Solution:
        """Make room for every row."""
        first = next(iter(shown.values()))
        rows = first.shape[0]
        return cls(
            variables={name: value.detach().clone() for name, value in shown.items()},
            objective=first.new_full((rows,), torch.inf),
            initial=first.new_full((rows,), torch.inf),
            iterations=torch.zeros(rows, dtype=torch.long, device=first.device),
            status=torch.full((rows,), BUDGET, dtype=torch.long, device=first.device),
        )

    def note(self, iterations: int, rows: Tensor, shown: Tensors, objective: Tensor) -> None:
        """Remember the best answers so far: of rows that have left, their last; of those under way, their best."""
        name = next(iter(self.variables))
        values, objectives = self.variables[name].clone(), self.objective.clone()
        values[rows], objectives[rows] = shown[name], objective
        self.trace[iterations] = (values, objectives)

    def stood(self, counts: Iterable[int]) -> None:
        """Note the answers at these iterations too, where every row had ended before them: their last."""
        first = next(iter(self.variables.values()))
        for count in counts:
            self.trace.setdefault(count, (first.clone(), self.objective.clone()))

    def go_on(self, rows: Tensor, later: Solution, after: int, keep: str) -> None:
        """Put in what became of some rows in a second descent, after this many iterations: of the best, or the last."""

        def ahead(new: Tensor, old: Tensor) -> Tensor:
            return new < old if keep == "best" else torch.isfinite(new)

        better = ahead(later.objective, self.objective[rows])
        name = next(iter(self.variables))
        for count, (found, objective) in later.trace.items():
            values, objectives = self.variables[name].clone(), self.objective.clone()
            taken = ahead(objective, objectives[rows])
            values[rows] = _where(taken, found, values[rows])
            objectives[rows] = torch.where(taken, objective, objectives[rows])
            self.trace[after + count] = (values, objectives)
        for other in self.variables.keys() & later.variables.keys():
            self.variables[other][rows] = _where(better, later.variables[other], self.variables[other][rows])
        self.objective[rows] = torch.where(better, later.objective, self.objective[rows])
        self.iterations[rows] += later.iterations
        self.status[rows] = later.status


def joined(parts: Sequence[Solution]) -> Solution:
    """Put the chunks' solutions in a row."""
    joined = replace(parts[0], trace={})
    joined.variables = {n: torch.cat([part.variables[n] for part in parts]) for n in parts[0].variables}
    for name in ("objective", "initial", "iterations", "status"):
        setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    counts = {count for part in parts for count in part.trace}
    ended = {part: (next(iter(part.variables.values())), part.objective) for part in parts}
    for count in counts:
        found = [part.trace.get(count, ended[part]) for part in parts]
        joined.trace[count] = (torch.cat([value for value, _ in found]), torch.cat([score for _, score in found]))
    return joined


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (one.ndim - 1)), one, other)


Loss = Callable[[Tensors, Tensors, Tensor, int], Tensor]
"""(variables [n, ...], constants [n, ...], row numbers [n], iteration) -> objective [n]."""

Stepper = Adam | RMSprop | LBFGS | CMAES
"""What can take the steps of a descent."""
Show = Callable[[Tensors, Tensors], Tensors]
"""(variables [n, ...], constants [n, ...]) -> what is kept of rows that have ended: first of all, their answer."""


_NO_SLOPE = "is searched for by its derivative, and the simulated update has none with respect to it"
_SLOPE = (
    "let the client's model or defence compute with it in a way that can be differentiated (no detach, rounding or "
    "comparison); or attack with one that draws it instead: ig(simulated_client=full)"
)


@dataclass(frozen=True)
class StepSchedule:
    """Multiply the step size by `factor` at these shares of the budget."""

    at: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8)
    factor: float = 0.1


@dataclass(frozen=True)
class Plateau:
    """Multiply a row's step size by `factor` whenever it has not improved for `patience` iterations."""

    patience: int = 400
    factor: float = 0.1


@dataclass(frozen=True)
class Cosine:
    """Rise linearly over the first `warmup` iterations, then fall to zero along half a cosine."""

    warmup: int = 50


@dataclass(frozen=True)
class Descent(Checked):
    """How rows descend and when they stop."""

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
    """The relative fall of the objective that counts as progress."""
    keep: Annotated[Literal["best", "last"], "Iterate that is returned: with the lowest objective, or the last."] = (
        "best"
    )
    report: Annotated[Count, "Iterations from one reporting point to the next."] = 50
    halving: Annotated[bool, "Drop the worse half of each target's restarts again and again."] = False
    """The last restart has half of the budget."""
    label: ClassVar[str] = "attack"

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse a schedule for a population."""
        if isinstance(self.stepper, CMAES) and self.schedule is not None:
            what = "is of step sizes, and a population adapts its own"
            yield Problem("attack.schedule", what, "leave it out")


def _themselves(variables: Tensors, constants: Tensors) -> Tensors:
    return variables


def _none(rows: Tensor, count: int) -> Tensor:
    raise AssertionError("a population takes numbers from somewhere")


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
    show: Show = _themselves,
    normal: Callable[[Tensor, int], Tensor] = _none,
) -> Solution:
    """Minimise the objective of every row. `report(iterations done, best objectives of the rows under way)`.

    Rows of one group are restarts of one target client: once one of them has converged, the others have nothing left to
    win. `jitter(variables, row numbers, step sizes)` disturbs every row after its step. After each of the iterations in
    `points` the best iterates are noted in the trace. What `show` makes of the best variables is what is kept of a row.
    A population takes new numbers from `normal(row numbers, how many a row)`, and none of its rows leaves alone.

    The first step leaves from the start as it was drawn, N(0, 1) say, like the published programs. But a start that
    `project` would move is no answer: it is never the best iterate, nor an end if the objective is no number there.
    """
    halts = rungs(groups, descent.iterations) if groups is not None and descent.halving else frozenset[int]()
    solution = Solution.empty(show(variables, constants))
    rows = torch.arange(len(solution.objective), device=solution.objective.device)
    state = _start(variables, descent.stepper, len(rows), project)
    for iteration in range(descent.iterations):
        variables, value, grads = _evaluate(loss, variables, constants, rows, iteration, descent.stepper)
        state = _judge(state, variables, value, descent, iteration, project)
        if iteration + 1 in points:
            solution.note(iteration + 1, rows, show(select(state, "best"), constants), state["control.objective"])
        done = _done(state, descent.stepper)
        last = iteration + 1 == descent.iterations
        if last or (iteration + 1) % descent.report == 0 or iteration + 1 in halts:
            converged = state["control.status"] == CONVERGED
            solved = with_one_of(groups[rows], converged) if groups is not None else torch.zeros_like(done)
            finished = torch.ones_like(done) if last else done | solved
            if groups is not None and iteration + 1 in halts:
                finished = finished | worse_half(state["control.objective"], groups[rows], finished)
            if bool(finished.any()):
                _retire(solution, rows[finished], take(state, finished), show, take(constants, finished))
                left = ~finished
                rows, value, variables = rows[left], value[left], take(variables, left)
                constants, state, grads = take(constants, left), take(state, left), take(grads, left)
            if report:
                report(iteration + 1, state["control.objective"])
            if not len(rows):
                break
        scale, inner = _scale(state, descent, iteration), select(state, "step")
        if isinstance(descent.stepper, CMAES):
            variables, inner = descent.stepper.step(variables, value, inner, normal, rows, iteration, project)
        else:
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
    total = value.sum() if len(value) > 1 else value.view(())
    every = [None] * len(live)
    found = torch.autograd.grad(total, list(live.values()), allow_unused=True) if total.requires_grad else every
    grads = {name: slope for name, slope in zip(live, found, strict=True) if slope is not None}
    refuse([Problem(f"knowledge.{name}", _NO_SLOPE, _SLOPE) for name in live if name not in grads])
    return {name: v.detach() for name, v in live.items()}, value.detach(), grads


def _done(state: Tensors, stepper: Stepper) -> Tensor:
    """Mark the rows that have ended; those of a population end together, the last of them."""
    done = state["control.status"] != BUDGET
    if not isinstance(stepper, CMAES):
        return done
    return done.view(-1, stepper.population).all(1).repeat_interleave(stepper.population)


def _start(variables: Tensors, stepper: Stepper, rows: int, project: Project) -> Tensors:
    """Everything that is kept a row, with leading n, so that rows can leave."""
    first = next(iter(variables.values()))
    state = {f"step.{name}": v for name, v in stepper.init(variables).items()}
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
    if isinstance(descent.stepper, CMAES):  # the next candidate in the place of one that was no number is another
        running = running | (state["control.status"] == DIVERGED)
    finite = torch.isfinite(value)
    best = state["control.objective"]
    better = running & (value < best if descent.keep == "best" else finite)  # NaN is below nothing
    solved = value <= descent.tolerance
    alive = finite
    if iteration == 0:  # the stepper projects every later iterate: Adam goes on where a model can take roots of pixels
        inside = _inside(variables, project)
        better, solved, alive = better & inside, solved & inside, finite | ~inside
    new["control.objective"] = torch.where(better, value, best)
    for name, current in variables.items():
        wide = better.view(-1, *[1] * (current.ndim - 1))
        new[f"best.{name}"] = torch.where(wide, current, state[f"best.{name}"])
    if iteration == 0:
        new["control.initial"] = value
    elif iteration == 1:
        unknown = running & ~torch.isfinite(state["control.initial"])
        new["control.initial"] = torch.where(unknown, value, state["control.initial"])
    if descent.patience is not None or isinstance(descent.schedule, Plateau):
        shared = _of_populations(value, descent.stepper)
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


def _inside(variables: Tensors, project: Project) -> Tensor:
    """Mark the rows that projecting leaves as they are."""
    same = [(project(name, value) == value).reshape(len(value), -1).all(1) for name, value in variables.items()]
    return torch.stack(same).all(0)


def _of_populations(value: Tensor, stepper: Stepper) -> Tensor:
    """Give every candidate the least objective of its generation: a population makes progress as a whole."""
    if not isinstance(stepper, CMAES):
        return value
    whole = torch.where(torch.isfinite(value), value, torch.inf).view(-1, stepper.population)
    return whole.amin(1).repeat_interleave(stepper.population)


def _patience(state: Tensors, value: Tensor, finite: Tensor, descent: Descent) -> Tensors:
    """Count each row's iterations without progress, and shrink its step where they are too many."""
    new: Tensors = {}
    anchor = state["control.anchor"]
    ahead = finite & (torch.isinf(anchor) | (value < anchor - descent.progress * anchor.abs()))
    new["control.anchor"] = torch.where(ahead, value, anchor)
    zero = torch.zeros_like(state["control.since"])
    new["control.since"] = torch.where(ahead, zero, state["control.since"] + 1)
    new["control.since_scale"] = torch.where(ahead, zero, state["control.since_scale"] + 1)
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
        warm, count = descent.schedule.warmup, iteration + 1
        if count <= warm:
            return scale * (count / warm)
        return scale * (0.5 * (1 + cos(pi * (count - warm) / max(1, descent.iterations - warm))))
    return scale


def _retire(solution: Solution, rows: Tensor, state: Tensors, show: Show, constants: Tensors) -> None:
    """Write finished rows into the solution."""
    shown = show(select(state, "best"), constants)
    for name in solution.variables:
        solution.variables[name][rows] = shown[name]
    for name in ("objective", "initial", "iterations", "status"):
        getattr(solution, name)[rows] = state[f"control.{name}"]
