"""Error feedback against the assumptions of the papers on dual pruning: what is left out, round by round.

    python benchmarks/feedback_residual.py [--rounds 600] [--output FILE]

Ten clients learn the bundled digits (8 by 8 pixels) with an MLP 64-24-10, one gradient of 16 examples a round from
each, step 0.5, with `dgp` and with `adgp`. Each round gives gamma, the share of the energy of P = G + e that was not
sent, the squared norm of the mean residual (Lemma 1, left side), and the largest squared norm of a client's gradient so
far (G^2). Beside them stand Lemma 1's right sides, with the gamma of the first round and with that of the round itself;
and for Theorem 2 the squared norm of the gradient over all training images, averaged so far, and its right side.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, norm, squared_norm, tmap
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation
from gradveil.nn.initial_weights import initialise
from gradveil.theory.gradient_pruning import aligned_residual_bound, convergence_bound, residual_bound

CLIENTS, BATCH, STEP, ROUNDS = 10, 16, 0.5, 600
SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 400, 600)
DEFENCES = ("dgp", "adgp")
CURVATURE_EVERY, CURVATURE_STEPS = 20, 12
"""The curvature along the path is measured in every so many rounds, with so many products."""


def federation(defence: str, seed: int = 0) -> Federation:
    """Deal the digits to ten clients of the MLP."""
    splits = load("digits", size=8)
    assert splits.public is not None
    data = splits.public
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    client = parse(defence)(Client(initialise(model, Key(seed).generator())))
    share = len(data) // CLIENTS
    parts = [slice(i * share, (i + 1) * share) for i in range(CLIENTS)]
    shares = [ClientShare(Batch(data.inputs[part], data.targets[part])) for part in parts]
    test = Batch(splits.private.inputs, splits.private.targets)
    return Federation(client, shares, test, Server(lr=STEP), Key(seed), batch=BATCH)


def whole(of: Federation) -> Batch:
    """Return the training images of all clients."""
    return Batch(
        torch.cat([share.train.inputs for share in of.shares]), torch.cat([s.train.targets for s in of.shares])
    )


def curvature(of: Federation, params: Tensors, batch: Batch) -> float:
    """Estimate the largest eigenvalue of the Hessian in absolute value, by power iteration."""
    model = of.client.model

    def loss(weights: Tensors) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (batch.inputs,)), batch.targets)

    draw = Key(0, ("curvature",)).generator()
    direction = {name: torch.randn(value.shape, generator=draw) for name, value in params.items()}
    size = 0.0
    for _ in range(CURVATURE_STEPS):
        length = norm(direction)
        direction = tmap(lambda value, by=length: value / by, direction)
        direction = jvp(grad(loss), (params,), (direction,))[1]
        size = float(norm(direction))
    return size


def rounds(defence: str, count: int = ROUNDS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Train, and yield a line per round."""
    of = federation(defence, seed)
    standing, images, aligned = of.start(), whole(of), defence.startswith("adgp")
    assert standing.start is not None
    begin, largest, full, variance, first, squares, bend = standing.start[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    start_loss, _ = of.evaluate(standing.params, images)
    assert begin is not None
    for number in range(1, count + 1):
        gradient, _ = of.client.undefended_update().update(standing.params, images, {}, {})
        squares += float(squared_norm(gradient))
        if number % CURVATURE_EVERY == 1:
            bend = max(bend, curvature(of, standing.params, images))
        standing = of.round(standing)
        held = standing.records[-1].held_back
        assert held is not None
        largest, full, variance = max(largest, held.largest), max(full, held.full), max(variance, held.variance)
        first = first or held.gamma

        def lemma(gamma: float) -> float:
            return aligned_residual_bound(gamma, full, variance) if aligned else residual_bound(gamma, largest)  # noqa: B023

        noise = full + variance / CLIENTS if aligned else largest + variance
        theorem = convergence_bound(start_loss, STEP, number, bend, noise, lemma(held.gamma))
        yield {
            "defence": defence,
            "round": number,
            "gamma": held.gamma,
            "residual_squared": held.residual,
            "largest_gradient_squared": largest,
            "mean_gradient_squared": full,
            "variance": variance,
            "lemma_1_with_first_gamma": lemma(first),
            "lemma_1_with_this_gamma": lemma(held.gamma),
            "curvature": bend,
            "theorem_2_left": squares / number,
            "theorem_2_right": theorem,
            "accuracy": standing.records[-1].accuracy,
        }


def main() -> None:
    """Print the table, and write every tenth round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [line for defence in DEFENCES for line in rounds(defence, given.rounds, given.seed)]
    keys = [name for name in lines[0] if name not in ("defence", "round")]
    for line in lines:
        if line["round"] in SHOWN:
            print(line["defence"], line["round"], *(f"{name}={line[name]:.5g}" for name in keys))
    for defence in DEFENCES:
        of = [line for line in lines if line["defence"] == defence]
        passed = next(
            (line["round"] for line in of if line["residual_squared"] > line["lemma_1_with_first_gamma"]), None
        )
        print(f"{defence}: the residual passes Lemma 1 with the first round's gamma in round {passed}")
    if given.output:
        with given.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            for line in (each for each in lines if each["round"] in SHOWN or each["round"] % 10 == 0):
                rounded = {name: float(f"{v:.6g}") for name, v in line.items() if isinstance(v, float)}
                writer.writerow(line | {n: v if math.isfinite(v) else "inf" for n, v in rounded.items()})


if __name__ == "__main__":
    main()
