"""The search over a chunk of rows, its restarts, and its best answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from gradveil.attacks.inversion.descent import BUDGET, STALLED, Descent, Solution, descend
from gradveil.attacks.inversion.image_sources import INPUTS, LATENT, Trained
from gradveil.attacks.inversion.inversion_settings import InversionSettings
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.problem import Rows
from gradveil.attacks.knowledge import Optimise
from gradveil.core.tree import Tensors, take

CACHE_BUDGET = 600 * 2**20
"""Bytes that one iteration of a batch may write on a CPU."""
MOST_ROWS = 64
"""Rows of one batch on a CPU: beyond these a batch is no faster."""


def rows_at_once(bytes_per_row: int, rows: int, device: torch.device | str) -> int:
    """Choose the rows of one batch from what an iteration of one row writes; the batches come out about equal.

    On a CPU a call costs as much as the arithmetic of a few rows of a small network, and more rows write more than
    caches and freed blocks hold. Target-iterations a second on one EPYC core (32 MiB of last-level cache; the large
    networks with `keep_freed_memory`):

    | rows | LeNetZhu, 1.2 MiB a row | Scheliga CNN, 1.3 MiB | ViT, 50 MiB | ResNet-18, its gradients made, 136 MiB |
    |---|---|---|---|---|
    | 1 | 316 | 213 | 22.7 | 7.8 |
    | 4 | 870 | 656 | 23.5 | 12.1 |
    | 8 | 1240 | 987 | 24.4 | 12.2 (6 rows) |
    | 32 | 2006 | 1755 | | |
    | 64 | 2273 | 2011 | | |
    | 128 | 2055 | 1725 | | |

    So: at most 64 rows, which write at most 600 MiB. Other devices take what fits half of their free memory.

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


def searched(
    attack: InversionSettings, scene: Rows, rows: range, solved: Tensor | None, report: Report | None
) -> Solution:
    """Attack these rows as one batch; each target's first restart starts from its `solved` images [V, B, ...]."""
    drawn, constants = scene.start(list(rows))
    variables = drawn if solved is None else {**drawn, INPUTS: _with_solved(drawn[INPUTS], solved, rows, attack)}
    numbers = torch.arange(rows.start, rows.stop, device=scene.device)
    early, late = _parted(attack)
    points = frozenset(attack.points())
    found = _descend(attack, scene, numbers, variables, constants, early, points, report)
    if solved is not None:
        # Health asks how far an objective fell from that of random images.
        with torch.no_grad():
            found.initial = scene.loss(drawn, constants, numbers, scene.draws.streams(rows))
    if late is not None:
        # Halving let a row go, or another restart was there first, if it has budget left; who stalled goes on.
        over = (found.status == BUDGET) & (found.iterations == early.iterations)
        places = (over | (found.status == STALLED)).nonzero().flatten()
        if len(places):
            found.stood(point for point in points if point <= early.iterations)
            kept = take({name: found.variables[name] for name in variables}, places)
            fixed = take(constants, places) | {LATENT: kept.pop(LATENT)}
            left = scene.drawing.tuned(len(places)) | kept
            after = frozenset(point - early.iterations for point in points)
            told = _later(report, early.iterations)
            later = _descend(attack, scene, numbers[places], left, fixed, late, after, told)
            found.go_on(places, later, early.iterations, late.keep)
    return found


def _parted(attack: InversionSettings) -> tuple[Descent, Descent | None]:
    """Split the budget: the second descent, if there is one, is over a generator's weights."""
    whole, images = attack.coupled, attack.images
    if not isinstance(images, Trained) or not images.tuned:
        return whole, None
    late = round(images.tuned * whole.iterations)
    if not 0 < late < whole.iterations:
        return whole, None
    steps = Adam(lr=images.tuning)
    first = replace(whole, iterations=whole.iterations - late)
    return first, replace(whole, iterations=late, stepper=steps, halving=False)  # the first part halved them already


def _later(report: Report | None, done: int) -> Report | None:
    return None if report is None else lambda iteration, objectives: report(done + iteration, objectives)


def _descend(
    attack: InversionSettings,
    scene: Rows,
    everyone: Tensor,
    variables: Tensors,
    constants: Tensors,
    descent: Descent,
    points: frozenset[int],
    report: Report | None,
) -> Solution:
    """Descend from these variables; `everyone` numbers the rows among all."""
    streams = scene.draws.streams(everyone.tolist())

    def loss(v: Tensors, c: Tensors, numbers: Tensor, iteration: int) -> Tensor:
        return scene.loss(v, c, everyone[numbers], streams, iteration)

    def jitter(v: Tensors, numbers: Tensor, size: Tensor) -> Tensors:
        wide = (attack.langevin * size).view(-1, *[1] * (v[INPUTS].ndim - 1))
        moved = v[INPUTS] + wide * scene.draws.normal(everyone[numbers], streams, v[INPUTS].shape[1:], v[INPUTS].dtype)
        return {**v, INPUTS: scene.project(INPUTS, moved)}

    def normal(numbers: Tensor, count: int) -> Tensor:
        return scene.draws.normal(everyone[numbers], streams, (count,))

    signed = {n for n, how in scene.how.items() if isinstance(how, Optimise) and how.signed}
    return descend(
        loss,
        variables,
        constants,
        descent,
        scene.project,
        unsigned=frozenset(set(variables) - {INPUTS} - signed),
        report=report,
        groups=everyone // attack.restarts,
        jitter=jitter if attack.langevin else None,
        points=points,
        show=scene.shown,
        normal=normal,
    )


def _with_solved(inputs: Tensor, solved: Tensor, rows: range, attack: InversionSettings) -> Tensor:
    """Put each target client's solved images in the place of its first restart's."""
    started = inputs.clone()
    for place, row in enumerate(rows):
        target_client, restart = divmod(row, attack.restarts)
        if restart == 0:
            started[place] = solved[target_client].to(inputs)
    return started
