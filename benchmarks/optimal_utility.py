"""Optimal noise and pruning against isotropic noise and magnitude pruning at equal utility, before any attack.

    python benchmarks/optimal_utility.py [--data mnist] [--data-dir FOLDER] [--target-clients 8]

Untrained weights of the small CNN, one image a client, seed 0: the target clients of `optimal-defenses/pruning`.
Pruning: the ratio of optimal pruning that keeps as much first-order utility (the mean share of sum g_i^2 that is kept)
as magnitude pruning, and the share of sum ||dg_i/dx||^2 that what is kept tells. Noise: second-order utility -sum g_i^2
s_i^2 and what is told, tr F = sum ||dg_i/dx||^2 / s_i^2, of both noises at the same mean variance, and what is told at
the same utility. d / tr F would bound the mean squared error of unbiased estimates of d pixels, if the gradient did not
jump and the variances did not depend on the image; both are otherwise here, so no attacker is bound by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch
from gradveil.data import DATA_DIR, load
from gradveil.defences import OptimalPruning, parse
from gradveil.gradients.input_sensitivity import example_squared_row_norms
from gradveil.gradients.objective import mean_gradient
from gradveil.nn.models import build
from gradveil.theory.first_order_utility import noise_utility
from gradveil.theory.input_jacobian import squared_row_norms
from gradveil.theory.reconstruction_bound import information_trace, trace_bound

RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STD = 0.01
EXACT = 512
"""Directions that stand for exact row norms."""


def main() -> None:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path, help=f"folder of data files (or {DATA_DIR})")
    parser.add_argument("--target-clients", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    data = load(options.data, data_dir=options.data_dir, size=32).private
    shape = data.inputs.shape[1:]
    generator = Key(0).child("model").generator()
    net = build("scheliga-cnn", channels=shape[0], size=32, classes=len(data.classes), generator=generator)
    client = Client(net)
    target_clients = [Batch(data.inputs[i : i + 1], data.targets[i : i + 1]) for i in range(options.target_clients)]
    gradients = [client.update(client.params(), batch, {}, {})[0] for batch in target_clients]
    squares = [exact(client, batch, Key(0, ("exact", i))) for i, batch in enumerate(target_clients)]
    print("magnitude pruning  first-order utility  optimal pruning that keeps as much  told: magnitude  optimal")
    worths = [worth(client, *given) for given in zip(target_clients, gradients, strict=True)]
    for ratio in RATIOS:
        kept, told = kept_by(gradients, squares, gradients, ratio)
        low, high = 0.0, 1.0
        for _ in range(14):
            middle = (low + high) / 2
            low, high = (middle, high) if kept_by(worths, squares, gradients, middle)[0] > kept else (low, middle)
        own, told_by_optimal = kept_by(worths, squares, gradients, round(low, 4))
        print(f"{ratio:17}  {kept:19.2%}  {round(low, 4):18} ({own:.2%})  {told:25.2%}  {told_by_optimal:7.2%}")
    rows = [noises(client, *given) for given in zip(target_clients, gradients, squares, strict=True)]
    middle = torch.tensor(rows, dtype=torch.float64).quantile(torch.tensor([0.0, 0.5, 1.0]).double(), dim=0)
    names = ("second-order cost, optimal / isotropic", "told at the same mean variance, optimal / isotropic")
    names = (*names, "told at the same utility, optimal / isotropic", "d / tr F, isotropic", "d / tr F, optimal")
    print(f"\nnoise of mean variance {STD}^2, over {len(rows)} target clients: least, median, most")
    for name, column in zip(names, middle.t().tolist(), strict=True):
        print(f"{name:52} {column[0]:9.3g} {column[1]:9.3g} {column[2]:9.3g}")


def exact(client: Client, batch: Batch, key: Key) -> Tensors:
    """Compute the squared row norms."""
    probe = torch.randn(EXACT, *batch.inputs.shape[1:], generator=key.generator())
    given = client.objective, client.params(), {}, batch, {}, probe, torch.zeros(())
    return example_squared_row_norms(*given)


def worth(client: Client, batch: Batch, gradient: Tensors) -> Tensors:
    """Return by what optimal pruning orders the entries, from its own ten directions."""
    transform = OptimalPruning(0.5)
    probe = transform.directions(batch).sample(Key(0, ("pruned",)))["probe"]
    params = client.params()
    squares = squared_row_norms(lambda own: mean_gradient(client.objective, params, {}, own, {}), batch, probe)
    return transform.worth(gradient, squares)


def kept_by(
    orders: list[Tensors], squares: list[Tensors], gradients: list[Tensors], ratio: float
) -> tuple[float, float]:
    """Return the mean shares of first-order utility, and of what is told, that the largest entries of all have."""
    shares: list[Tensor] = []
    for order, own, gradient in zip(orders, squares, gradients, strict=True):
        by, n, g = (torch.cat([value.flatten() for value in part.values()]) for part in (order, own, gradient))
        kept = by.abs().argsort(stable=True)[int(ratio * len(by) + 1e-9) :]
        shares.append(torch.stack([g[kept].square().sum() / g.square().sum(), n[kept].sum() / n.sum()]))
    return tuple(torch.stack(shares).mean(0).tolist())


def noises(client: Client, batch: Batch, gradient: Tensors, squares: Tensors) -> list[float]:
    """Compare both noises for one target client."""
    defended = parse(f"optimal-noise({STD})")(client)
    noise = defended.noise_spec(client.params(), batch).sample(Key(0, ("noise",)))
    ones = {name: torch.ones_like(value) if ".normal." in name else value for name, value in noise.items()}
    sent, _ = defended.update(client.params(), batch, ones, {})
    scale = tmap(lambda there, before: (there.double() - before.double()).square(), sent, gradient)
    flat = tmap(lambda value: torch.full_like(value, STD**2, dtype=torch.float64), gradient)
    cost = [float(-noise_utility(gradient, variances)) for variances in (flat, scale)]
    told = [information_trace(squares, variances) for variances in (flat, scale)]
    bounds = [float(trace_bound(trace, torch.zeros(()), batch.inputs.numel())) for trace in told]
    more = float(told[1] / told[0])
    return [cost[1] / cost[0], more, more * cost[1] / cost[0], *bounds]


if __name__ == "__main__":
    main()
