"""Optimal noise and pruning against isotropic noise and magnitude pruning at equal utility, before any attack.

    python benchmarks/optimal_utility.py [--model NAME --size PIXELS --batch IMAGES --activation NAME] [--seed N]

Without options: the paper's network and batch (`mnist-conv`, 28 pixels, 16 images), then the target clients of
`optimal-defenses/pruning` (the small CNN, 32 pixels, 8 clients of one image). Untrained weights, seed 0; BatchNorm is
frozen. More: `--help`.

Pruning: the share of first-order utility sum g_i^2 that is kept, and the share of sum ||dg_i/dx||^2 that is told, of
magnitude pruning, of optimal pruning of the same ratio, and of optimal pruning that keeps as much. Noise: second-order
utility -sum g_i^2 s_i^2 and what is told, tr F = sum ||dg_i/dx||^2 / s_i^2, of both noises at the same mean variance,
and what is told at the same utility. d / tr F would bound the mean squared error of unbiased estimates of d pixels, if
the gradient did not jump and the variances did not depend on the image; both are otherwise here: no attacker is bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch
from gradveil.data import DATA_DIR, load
from gradveil.defences import OptimalPruning, parse
from gradveil.gradients.objective import mean_gradient
from gradveil.nn.models import build
from gradveil.nn.surgery import prepare
from gradveil.theory.first_order_utility import noise_utility
from gradveil.theory.input_jacobian import squared_row_norms
from gradveil.theory.reconstruction_bound import information_trace, trace_bound

RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STD = 0.01
MANY = 1536
"""Directions, times images of a batch, that stand for exact row norms."""
THOUSANDTH = 1000


@dataclass(frozen=True)
class Case:
    """A network, its batch, and how many clients are looked at."""

    model: str
    size: int
    batch: int
    target_clients: int
    activation: str | None = None
    seed: int = 0


CASES = (Case("mnist-conv", 28, 16, 1), Case("scheliga-cnn", 32, 1, 8))


@dataclass(frozen=True)
class Target:
    """A client's batch with its gradient, squared row norms, and the order of optimal pruning."""

    client: Client
    batch: Batch
    gradient: Tensors
    squares: Tensors
    worth: Tensors


def main() -> None:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path, help=f"folder of data files (or {DATA_DIR})")
    parser.add_argument("--model", help="one network instead of both cases")
    parser.add_argument("--size", type=int, help="side of the images")
    parser.add_argument("--batch", type=int, help="images of a client")
    parser.add_argument("--activation", help="activation of the network, instead of its own")
    parser.add_argument("--seed", type=int, help="of the weights")
    parser.add_argument("--target-clients", type=int, help="number of clients")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    given = {name: value for name, value in vars(options).items() if value is not None}
    given = {name: value for name, value in given.items() if name not in ("data", "data_dir")}
    cases = CASES if "model" not in given else (replace(CASES[0], **given),)
    for case in cases if "model" in given else [replace(case, **given) for case in cases]:
        report(case, targets(case, options.data, options.data_dir))


def targets(case: Case, name: str, data_dir: Path | None) -> list[Target]:
    """Compute the gradient and the row norms of each client's batch."""
    data = load(name, data_dir=data_dir, size=case.size).private
    options = {"activation": case.activation} if case.activation else {}
    net = build(
        case.model,
        channels=data.channels,
        size=case.size,
        classes=len(data.classes),
        generator=Key(case.seed, (Stream.MODEL,)).generator(),
        **options,
    )
    net, _ = prepare(net, batchnorm="frozen", batch=Batch(data.inputs[:2], data.targets[:2]))
    client, made = Client(net), []
    transform, params = OptimalPruning(0.5), client.params()
    for i in range(case.target_clients):
        rows = slice(i * case.batch, (i + 1) * case.batch)
        batch = Batch(data.inputs[rows], data.targets[rows])
        probe = torch.randn(
            max(96, MANY // case.batch), *batch.inputs.shape, generator=Key(0, ("exact", i)).generator()
        )
        few = transform.directions(batch).sample(Key(0, ("pruned",)))["probe"]

        def gradient(examples: Batch) -> Tensors:
            return mean_gradient(client.objective, params, {}, examples, {})

        g = tmap(torch.detach, gradient(batch))
        squares, rough = (tmap(torch.detach, squared_row_norms(gradient, batch, each)) for each in (probe, few))
        made.append(Target(client, batch, g, squares, transform.worth(g, rough)))
    return made


def report(case: Case, each: Sequence[Target]) -> None:
    """Print a case."""
    activation = f", {case.activation}" if case.activation else ""
    print(f"\n{case.model}{activation}, {case.size} pixels: {case.target_clients} clients of {case.batch} images")
    gradients, worths = [target.gradient for target in each], [target.worth for target in each]
    print(f"{'':8}{'magnitude':>19}{'optimal':>19}{'optimal of as much utility':>30}")
    print(f"{'ratio':8}{'utility':>11}{'told':>8}{'utility':>11}{'told':>8}{'ratio':>13}{'utility':>9}{'told':>8}")
    for ratio in RATIOS:
        kept, told = kept_by(gradients, each, ratio)
        low, high = 0.0, 1.0
        for _ in range(14):
            middle = (low + high) / 2
            low, high = (middle, high) if kept_by(worths, each, middle)[0] > kept else (low, middle)
        equal = round(low, 4)
        shares = [kept, told, *kept_by(worths, each, ratio)]
        print(f"{ratio:<8}" + "".join(f"{share:{11 - 3 * (i % 2)}.2%}" for i, share in enumerate(shares)), end="")
        print(f"{equal:13}" + "".join(f"{share:{9 - i}.2%}" for i, share in enumerate(kept_by(worths, each, equal))))
    rows = [noises(target) for target in each]
    names = ("second-order cost, optimal / isotropic", "told at the same mean variance, optimal / isotropic")
    names = (*names, "told at the same utility, optimal / isotropic", "the least possible at the same utility")
    names = (*names, "d / tr F, isotropic", "d / tr F, optimal", "share of the variance on a thousandth of the entries")
    middle = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    middle = middle.quantile(torch.tensor([0.0, 0.5, 1.0]).double(), dim=0)
    print(f"\nnoise of mean variance {STD}^2, over {len(rows)} target clients: least, median, most")
    for name, column in zip(names, middle.t().tolist(), strict=True):
        print(f"{name:52} {column[0]:9.3g} {column[1]:9.3g} {column[2]:9.3g}")
    print("root mean variance of each parameter, in units of the noise scale; the first client:")
    print("  ".join(f"{name} {value:.2f}" for name, value in rows[0][1].items()))


def kept_by(orders: Sequence[Tensors], each: Sequence[Target], ratio: float) -> tuple[float, float]:
    """Return the mean shares of first-order utility, and of what is told, that the largest entries of all have."""
    shares: list[Tensor] = []
    for order, target in zip(orders, each, strict=True):
        parts = order, target.squares, target.gradient
        by, n, g = (torch.cat([value.flatten() for value in part.values()]).double() for part in parts)
        kept = by.abs().argsort(stable=True)[int(ratio * len(by) + 1e-9) :]
        shares.append(torch.stack([g[kept].square().sum() / g.square().sum(), n[kept].sum() / n.sum()]))
    return tuple(torch.stack(shares).mean(0).tolist())


def noises(target: Target) -> tuple[list[float], dict[str, float]]:
    """Compare both noises for one target client; return also the optimal one's size in each parameter."""
    client, batch, gradient = target.client, target.batch, target.gradient
    defended = parse(f"optimal-noise({STD})")(client)
    noise = defended.noise_spec(client.params(), batch).sample(Key(0, ("noise",)))
    ones = {name: torch.ones_like(value) if ".normal." in name else value for name, value in noise.items()}
    sent, _ = defended.update(client.params(), batch, ones, {})
    scale = tmap(lambda there, before: (there.double() - before.double()).square(), sent, gradient)
    flat = tmap(lambda value: torch.full_like(value, STD**2, dtype=torch.float64), gradient)
    cost = [float(-noise_utility(tmap(torch.Tensor.double, gradient), variances)) for variances in (flat, scale)]
    told = [information_trace(tmap(torch.Tensor.double, target.squares), variances) for variances in (flat, scale)]
    bounds = [float(trace_bound(trace, torch.zeros(()), batch.inputs.numel())) for trace in told]
    more = float(told[1] / told[0])
    cross = sum(float((n.double().sqrt() * gradient[name].abs()).sum()) for name, n in target.squares.items())
    least = cross**2 / (cost[0] * float(told[0]))
    variances = torch.cat([value.flatten() for value in scale.values()]).sort(descending=True).values
    loudest = float(variances[: len(variances) // THOUSANDTH].sum() / variances.sum())
    sizes = {name: float(value.mean().sqrt()) / STD for name, value in scale.items()}
    return [cost[1] / cost[0], more, more * cost[1] / cost[0], least, *bounds, loudest], sizes


if __name__ == "__main__":
    main()
