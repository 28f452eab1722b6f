"""What optimal noise costs a client, and what cheaper estimates of its scale lose: processor time against privacy.

    python benchmarks/optimal_cost.py [--data mnist] [--data-dir FOLDER] [--turns 5] [--output FILE]

The small CNN, batches of 64 images. *Cost* is that of ten rounds in units of ten undefended gradients, noise drawn
included: all settings take turns in one process with one thread, a ratio is taken within a turn, shown is the median.
*Loss* is `theory.first_order_utility.privacy_loss`: by how much the noise tells more of the images than the optimal
noise of the same second-order utility, whose row norms are known (2,560 directions); the mean over ten rounds of SGD
on fresh batches, from untrained weights and after 100 and 600 steps of Adam. All settings have a round's weights and
batches. Last, ten directions of a batch at once are compared with ten forward-mode passes, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import torch
from defence_cost import step
from torch.func import jvp

from gradveil.client import Client
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch
from gradveil.data import DATA_DIR, Dataset, load
from gradveil.defences import parse
from gradveil.gradients.input_sensitivity import example_squared_row_norms
from gradveil.gradients.objective import mean_gradient
from gradveil.nn.models import build
from gradveil.theory.first_order_utility import privacy_loss
from gradveil.theory.input_jacobian import squared_row_norms

MODEL, EXAMPLES, ROUNDS = "scheliga-cnn", 64, 10
TRAINED = (0, 100, 600)
"""Steps of Adam before the ten rounds."""
EXACT, AT_ONCE = 2560, 512
SETTINGS = (
    *(f"probes={count}" for count in (3, 10, 20)),
    "probes=10, layerwise=true",
    *(f"probes=10, every={rounds}" for rounds in (2, 10)),
    *(f"probes={count}, of=example" for count in (16, 24, 32, 64)),
    *(f"probes={count}, of=example, memory=0.5" for count in (16, 24, 32)),
    *(f"probes=64, of=example, every={rounds}" for rounds in (2, 10)),
    *(f"probes=64, of=example, every={rounds}, memory=0.5" for rounds in (2, 3)),
)


def text(settings: str) -> str:
    """Write the defence with these settings."""
    return f"optimal-noise(std=0.01, {settings})"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", help="any data set of the library: digits needs no file")
    parser.add_argument("--data-dir", type=Path, help=f"folder of data files (or {DATA_DIR})")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    public = load(options.data, data_dir=options.data_dir, size=32).public
    forward = passes(options.turns)
    print(f"ten directions at once: {forward:.2f} of ten forward-mode passes", flush=True)
    costs, losses = cost(options.turns), loss(public)
    rows = [{"settings": name, "cost": costs[name], "loss": losses[name]} for name in losses]
    print(f"{'settings':45} {'cost':>18}   loss after {', '.join(map(str, TRAINED))} steps")
    for row in rows:
        middle, low, high = row["cost"] or (1.0, 1.0, 1.0)
        shown = "  ".join(f"{value:7.1%}" for value in row["loss"].values())
        print(f"{row['settings']:45} {middle:6.2f} ({low:.2f} to {high:.2f})  {shown}")
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "data": options.data,
        "ten_directions_of_ten_passes": forward,
    }
    if options.output:
        options.output.write_text(json.dumps(facts | {"results": rows}, indent=1) + "\n", encoding="utf-8")


def passes(turns: int) -> float:
    """Compare ten directions in one batch with ten passes of forward mode, one after the other."""
    client = network()
    params, key = client.params(), Key(0, ("passes",))
    images = torch.randn(EXAMPLES, 1, 32, 32, generator=key.generator())
    batch = Batch(images, torch.randint(10, (EXAMPLES,), generator=key.child("labels").generator()))
    probe = torch.randn(10, *images.shape, generator=key.child("probe").generator())

    def gradient(own: Batch) -> Tensors:
        return mean_gradient(client.objective, params, {}, own, {})

    def apart() -> None:
        for direction in probe:
            jvp(lambda x: gradient(Batch(x, batch.targets)), (images,), (direction,))

    ways: tuple[Callable[[], object], ...] = (lambda: squared_row_norms(gradient, batch, probe), apart)
    with torch.no_grad():
        return median(spent(ways[0]) / spent(ways[1]) for _ in range(turns + 1))


def cost(turns: int) -> dict[str, tuple[float, float, float] | None]:
    """Let all settings take turns of ten rounds: median and quartiles of their time in units of plain gradients."""
    steps = {"none": step(MODEL, "none"), **{name: step(MODEL, text(name)) for name in SETTINGS}}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, once in steps.items():
            seconds = spent(lambda once=once: [once() for _ in range(ROUNDS)])
            if turn:  # in the first, each shape is computed in two ways
                times[name].append(seconds)
    found: dict[str, tuple[float, float, float] | None] = {"isotropic": None}
    for name in SETTINGS:
        ratios = [a / b for a, b in zip(times[name], times["none"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        found[name] = (middle, low, high)
    return found


def loss(public: Dataset) -> dict[str, dict[str, float]]:
    """Compute the mean loss over ten rounds of every setting, for each number of steps before."""
    found: dict[str, dict[str, float]] = {name: {} for name in ("isotropic", *SETTINGS)}
    for steps in TRAINED:
        clients = {name: parse(text(name)) for name in SETTINGS}
        states: dict[str, Tensors] = {}
        rows: dict[str, list[float]] = {name: [] for name in found}
        for number, (client, batch) in enumerate(rounds(public, steps)):
            params, key = client.params(), Key(0, ("round", number))
            gradient, _ = client.update(params, batch, {}, {})
            squares = exact(client, batch, key)
            rows["isotropic"].append(float(privacy_loss(squares, gradient, tmap(torch.ones_like, gradient))))
            for name, defence in clients.items():
                own = defence(client)
                noise = own.noise_spec(params, batch).sample(key.child(name))
                ones = {n: torch.ones_like(v) if ".normal." in n else v for n, v in noise.items()}
                sent, states[name] = own.update(params, batch, ones, states.get(name) or own.init(params))
                # Single precision would lose small scales beside large gradients.
                variances = tmap(lambda there, before: (there.double() - before.double()).square(), sent, gradient)
                rows[name].append(float(privacy_loss(squares, gradient, variances)))
        for name, values in rows.items():
            found[name][str(steps)] = sum(values) / len(values)
    return found


def rounds(public: Dataset, steps: int) -> Iterator[tuple[Client, Batch]]:
    """Yield the client and the fresh batch of each of ten rounds, which train on."""
    client, generator = network(), Key(0, ("batches", steps)).generator()
    model = client.model
    adam, sgd = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.SGD(model.parameters(), 0.05)
    for number in range(steps + ROUNDS):
        rows = torch.randint(len(public.inputs), (EXAMPLES,), generator=generator)
        batch = Batch(public.inputs[rows], public.targets[rows])
        if number >= steps:
            yield client, batch
        optimiser = adam if number < steps else sgd
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimiser.step()


def exact(client: Client, batch: Batch, key: Key) -> Tensors:
    """Compute the squared row norms from so many directions that their own error is below a tenth of a per cent."""
    total: Tensors = {}
    parts = EXACT // AT_ONCE
    for number in range(parts):
        generator = key.child("exact", number).generator()
        probe = torch.randn(AT_ONCE, *batch.inputs.shape[1:], generator=generator)
        offset = torch.rand((), generator=generator)
        some = example_squared_row_norms(client.objective, client.params(), {}, batch, {}, probe, offset)
        total = {name: value / parts + total.get(name, 0.0) for name, value in some.items()}
    return total


def network() -> Client:
    """Build the small CNN, untrained."""
    return Client(build(MODEL, channels=1, size=32, classes=10, generator=Key(0).child("model").generator()))


def spent(work: Callable[[], object]) -> float:
    """Measure processor seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
