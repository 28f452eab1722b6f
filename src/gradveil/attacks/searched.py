"""The search over a chunk of rows: one descent, or two where a generator's own weights follow what it draws from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradveil.attacks.images import INPUTS, LATENT, Trained
from gradveil.attacks.knowledge import Optimise
from gradveil.attacks.optimise import Descent, descend
from gradveil.attacks.rows import Rows
from gradveil.attacks.solution import BUDGET, STALLED, Solution
from gradveil.attacks.steps import Adam
from gradveil.core.tree import Tensors, take

if TYPE_CHECKING:
    from gradveil.attacks.inversion import Inversion

Report = Callable[[int, Tensor], None]
"""(iterations done, best objectives of the rows under way)"""


def searched(attack: Inversion, scene: Rows, rows: range, solved: Tensor | None, report: Report | None) -> Solution:
    """Attack these rows as one batch; each victim's first restart starts from its `solved` images [V, B, ...]."""
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


def _parted(attack: Inversion) -> tuple[Descent, Descent | None]:
    """Part the budget: the second descent is over a generator's weights, for whoever goes on to them."""
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
    attack: Inversion,
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


def _with_solved(inputs: Tensor, solved: Tensor, rows: range, attack: Inversion) -> Tensor:
    """Put each victim's solved images in the place of its first restart's."""
    started = inputs.clone()
    for place, row in enumerate(rows):
        victim, restart = divmod(row, attack.restarts)
        if restart == 0:
            started[place] = solved[victim].to(inputs)
    return started
