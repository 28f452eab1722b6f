"""The search over a chunk of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from gradveil.attacks.inversion.descent import BUDGET, STALLED, Descent, Solution, descend
from gradveil.attacks.inversion.distances import LIKELIHOOD
from gradveil.attacks.inversion.image_sources import INPUTS, LATENT, Trained
from gradveil.attacks.inversion.inversion_settings import InversionSettings
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.knowledge import Optimise
from gradveil.core.tree import Tensors, take

CACHE_BUDGET = 600 * 2**20
"""Largest number of bytes that one iteration of a batch writes on a CPU."""
MOST_ROWS = 64
"""Largest number of rows of one batch on a CPU: larger batches are no faster."""


def rows_at_once(bytes_per_row: int, rows: int, device: torch.device | str) -> int:
    """Choose the rows of one batch from the bytes that an iteration of one row writes, for batches of about equal size.

    On a CPU a call costs as much as the arithmetic of a few rows of a small network, and many rows write more than
    caches and freed blocks hold. Target-iterations per second on one EPYC core (32 MiB of last-level cache; the large
    networks with `keep_freed_memory`):

    | rows | LeNetZhu, 1.2 MiB per row | Scheliga CNN, 1.3 MiB | ViT, 50 MiB | ResNet-18 with full gradients, 136 MiB |
    |---|---|---|---|---|
    | 1 | 316 | 213 | 22.7 | 7.8 |
    | 4 | 870 | 656 | 23.5 | 12.1 |
    | 8 | 1240 | 987 | 24.4 | 12.2 (6 rows) |
    | 32 | 2006 | 1755 | | |
    | 64 | 2273 | 2011 | | |
    | 128 | 2055 | 1725 | | |

    So a CPU batch has at most 64 rows, which write at most 600 MiB. On a GPU a batch fills half of the free memory.

    >>> rows_at_once(2**20, 100, "cpu"), rows_at_once(50 * 2**20, 100, "cpu"), rows_at_once(2**30, 100, "cpu")
    (50, 12, 1)
    """
    device = torch.device(device)
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[0] // 2 // max(1, bytes_per_row)
    else:
        most = min(MOST_ROWS, CACHE_BUDGET // max(1, bytes_per_row))
    batches = ceil(rows / max(1, most))
    return ceil(rows / max(1, batches))


Report = Callable[[int, Tensor], None]
"""(iterations done, best objectives of the rows under way)"""


def search_rows(
    attack: InversionSettings, problem: InversionProblem, rows: range, solved: Tensor | None, report: Report | None
) -> Solution:
    """Attack these rows as one batch; each target's first restart starts from its `solved` images [V, B, ...]."""
    drawn, constants = problem.start(list(rows))
    variables = dict(drawn)
    if solved is not None:
        variables[INPUTS] = drawn[INPUTS].clone()
        for place, row in enumerate(rows):
            target_client, restart = divmod(row, attack.restarts)
            if restart == 0:
                variables[INPUTS][place] = solved[target_client].to(drawn[INPUTS])
    numbers = torch.arange(rows.start, rows.stop, device=problem.device)
    early, late = _split_budget(attack)
    points = frozenset(attack.points())
    solution = _descend(attack, problem, numbers, variables, constants, early, points, report)
    if solved is not None or attack.tv_end is not None or attack.objective == LIKELIHOOD:
        # The attack check compares the final objective with that of random images, by the same weights.
        with torch.no_grad():
            solution.initial = problem.loss(drawn, constants, numbers, problem.draws.streams(rows))
    if late is not None:
        # Rows that used up their first budget or stalled go on. Others were dropped by halving, or are solved.
        used_up = (solution.status == BUDGET) & (solution.iterations == early.iterations)
        places = (used_up | (solution.status == STALLED)).nonzero().flatten()
        if len(places):
            solution.fill_trace(point for point in points if point <= early.iterations)
            best = take({name: solution.variables[name] for name in variables}, places)
            fixed = take(constants, places) | {LATENT: best.pop(LATENT)}
            weights = problem.drawing.tuned(len(places)) | best
            after = frozenset(point - early.iterations for point in points)

            def later_report(iteration: int, objectives: Tensor) -> None:
                if report is not None:
                    report(early.iterations + iteration, objectives)

            later = _descend(attack, problem, numbers[places], weights, fixed, late, after, later_report)
            solution.continue_with(places, later, early.iterations, late.keep)
    return solution


def _split_budget(attack: InversionSettings) -> tuple[Descent, Descent | None]:
    """Split the budget: the second descent, if any, is over a generator's weights."""
    descent, images = attack.coupled, attack.images
    if not isinstance(images, Trained) or not images.tuned:
        return descent, None
    late = round(images.tuned * descent.iterations)
    if not 0 < late < descent.iterations:
        return descent, None
    first = replace(descent, iterations=descent.iterations - late)
    # No halving: the first descent has halved the restarts already.
    return first, replace(descent, iterations=late, stepper=Adam(lr=images.tuning), halving=False)


def _descend(
    attack: InversionSettings,
    problem: InversionProblem,
    row_numbers: Tensor,
    variables: Tensors,
    constants: Tensors,
    descent: Descent,
    points: frozenset[int],
    report: Report | None,
) -> Solution:
    """Descend from these variables; `row_numbers` are the rows' numbers in the whole problem."""
    streams = problem.draws.streams(row_numbers.tolist())

    def loss(v: Tensors, c: Tensors, numbers: Tensor, iteration: int) -> Tensor:
        return problem.loss(v, c, row_numbers[numbers], streams, iteration)

    def jitter(v: Tensors, numbers: Tensor, size: Tensor) -> Tensors:
        wide = (attack.langevin * size).view(-1, *[1] * (v[INPUTS].ndim - 1))
        moved = v[INPUTS] + wide * problem.draws.normal(
            row_numbers[numbers], streams, v[INPUTS].shape[1:], v[INPUTS].dtype
        )
        return {**v, INPUTS: problem.project(INPUTS, moved)}

    def normal(numbers: Tensor, count: int) -> Tensor:
        return problem.draws.normal(row_numbers[numbers], streams, (count,))

    signed = {n for n, how in problem.how.items() if isinstance(how, Optimise) and how.signed}
    return descend(
        loss,
        variables,
        constants,
        descent,
        problem.project,
        unsigned=frozenset(set(variables) - {INPUTS} - signed),
        report=report,
        groups=row_numbers // attack.restarts,
        jitter=jitter if attack.langevin else None,
        points=points,
        results=problem.results,
        normal=normal,
    )
