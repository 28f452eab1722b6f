"""What a client's guard reports of honest and of crafted models: false alarms, manipulations found, and what it costs.

    python -m benchmarks.guard_sweep [--data-dir FOLDER] [--starts 0 300] [--output FILE.csv]

Honest models (`tests/federated/honest_models.py`) answer batches of 8 to 256 bundled digits, crafted ones
(`tests/federated/malicious_models.py`) batches of 8 to 64. With MNIST's files a perceptron 784-1024-64-10 is looked at
too, fresh and trained, with quantile biases in all, half, a quarter and a tenth of its first units. One line is one
batch at one model, by the layer that shows most. `read` is what an attack in closed form recovers that knows nothing
of the guard.
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.audit.audit_run import machine
from gradveil.client import Client, ClientTask, Local, drawn_update, first_gradient
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.federated.model_inspection import inspect
from gradveil.federated.update_inspection import Exposure, exposure
from gradveil.nn.models import build
from tests.federated.honest_models import HONEST, convnet
from tests.federated.malicious_models import CRAFTED, PRIVATE, PUBLIC, Net, gradient, reconstructed

COLUMNS = (
    *("kind", "model", "batch", "start", "layer", "live", "alone", "owners", "singled", "effective", "heard", "snr"),
    *("read", "exposed", "share", "leak", "malice", "weights", "weights_and_previous", "seconds"),
    *("date", "machine", "torch", "seed"),
)
HONEST_SIZES = (8, 16, 32, 64, 128, 256)
CRAFTED_SIZES = (8, 16, 32, 64)
LOOSE = {"norm_bias": 0.1, "batch_norm_bias": 0.2}
SEED = 0


def facts() -> dict[str, Any]:
    """Say when and on what this was measured."""
    here = machine("cpu")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{here['cores']} cores, {here['cpu']}",
        "torch": torch.__version__,
        "seed": SEED,
    }


def measured(net: nn.Module, batch: Batch) -> tuple[Exposure, float]:
    """Look at the update of an undefended client, and take the time."""
    client, sent = Client(net), gradient(net, batch)
    began = time.process_time()
    exposed = exposure(client, client.params(), batch, sent)
    return exposed, time.process_time() - began


def line(exposed: Exposure, **more: Any) -> dict[str, Any]:
    """Describe a look by the layer that shows most."""
    most = max(exposed.layers, key=lambda layer: (len(layer.read), len(layer.singled), layer.alone))
    return {
        **{name: getattr(most, name) for name in ("layer", "live", "alone")},
        "owners": len(most.owners),
        "singled": len(most.singled),
        "effective": round(most.effective, 1),
        "heard": round(min(layer.learning_share for layer in exposed.layers), 2),
        "snr": "" if most.snr is None else round(most.snr, 2),
        "exposed": len(exposed.read),
        "share": round(exposed.share, 3),
        "leak": int(exposed.leak() is not None),
        "malice": int(bool(exposed.malice)),
        **more,
        **facts(),
    }


def weights(net: nn.Module, honest: nn.Module | None = None) -> str:
    """Name what the inspection of weights reports; with an honest model that came in the round before, jumps too."""
    before, own = None, None
    if honest is not None:
        before = {name: value.detach() for name, value in honest.named_parameters()}
        own = {name: 0.01 * value for name, value in before.items()}
    return " ".join(sorted({found.family for found in inspect(net, dict(net.state_dict()), before, own)}))


def honest(starts: list[int]) -> Iterator[dict[str, Any]]:
    """Look at the updates of honest models."""
    for name, make in HONEST.items():
        net = make()
        for size in HONEST_SIZES:
            for start in starts:
                batch = Batch(PRIVATE.inputs[start : start + size], PRIVATE.targets[start : start + size])
                exposed, seconds = measured(net, batch)
                more = {"kind": "honest", "model": name, "batch": size, "start": start, "weights": weights(net)}
                yield line(exposed, **more, seconds=round(seconds, 4))


def crafted(starts: list[int]) -> Iterator[dict[str, Any]]:
    """Look at the updates of crafted models."""
    for name, make in CRAFTED.items():
        for size in CRAFTED_SIZES:
            made = make(size)
            for start in starts:
                batch = Batch(PRIVATE.inputs[start : start + size], PRIVATE.targets[start : start + size])
                exposed, seconds = measured(made.model, batch)
                more = {"kind": "crafted", "model": name, "batch": size, "start": start}
                more["read"] = reconstructed(made, gradient(made.model, batch), batch, LOOSE.get(name, 0.05))
                more |= {"weights": weights(made.model), "weights_and_previous": weights(made.model, made.honest)}
                yield line(exposed, **more, seconds=round(seconds, 4))


def perceptron() -> Net:
    """Build the perceptron of the table: 784-1024-64-10."""
    layers = {"first": nn.Linear(784, 1024), "a": nn.ReLU(), "second": nn.Linear(1024, 64), "b": nn.ReLU()}
    return Net(SEED, flat=nn.Flatten(), **layers, head=nn.Linear(64, 10))


def quantiles(net: Net, images: Tensor, level: float, share: float) -> Net:
    """Move the biases of a share of the first units to a quantile of their outputs."""
    moved = copy.deepcopy(net)
    first = moved.get_submodule("first")
    assert isinstance(first, nn.Linear)
    count = round(share * len(first.weight))
    with torch.no_grad():
        first.bias[:count] = -(images.flatten(1) @ first.weight.T).quantile(level, dim=0)[:count]
    return moved


def closed_form(net: Net, batch: Batch) -> int:
    """Count the images that are a quotient dW_i / dc_i of the first layer."""
    update = gradient(net, batch)
    weight, bias = update["first.weight"], update["first.bias"]
    images = (weight / bias[:, None])[bias.abs() > 1e-9]
    truth = batch.inputs.flatten(1)
    errors = torch.cdist(images.double(), truth.double()).square().amin(0) / truth.shape[1]
    return int((errors < 1e-3 * (truth - truth.mean(0)).square().mean()).sum())


def mnist(folder: str) -> Iterator[dict[str, Any]]:
    """Look at a perceptron on MNIST: the first 64 training images are the client's, the others train and calibrate."""
    images = load("mnist", data_dir=folder, size=28, limit_public=6000, limit_private=32).public
    pixels, targets = images.views, images.targets
    fresh, trained = perceptron(), perceptron()
    how, generator = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9), Key(SEED).generator()
    for _ in range(300):
        places = 64 + torch.randint(len(targets) - 64, (64,), generator=generator)
        how.zero_grad()
        F.cross_entropy(trained(pixels[places]), targets[places]).backward()
        how.step()
    nets = {"fresh": fresh, "trained": trained}
    cases = [(name, net, size) for name, net in nets.items() for size in (8, 16, 64)]
    for name, net in nets.items():
        for level in (0.969, 0.984, 0.99):
            cases.append((f"quantile {level} {name}", quantiles(net, pixels[64:3000], level, 1), 64))
        for share in (0.5, 0.25, 0.1):
            cases.append((f"quantile 0.984 of {share:.0%} {name}", quantiles(net, pixels[64:3000], 0.984, share), 64))
    for name, net, size in cases:
        batch = Batch(pixels[:size], targets[:size])
        exposed, seconds = measured(net, batch)
        more = {"kind": "mnist", "model": name, "batch": size, "start": 0, "read": closed_form(net, batch)}
        yield line(exposed, **more, weights=weights(net), seconds=round(seconds, 4))


def cost() -> Iterator[dict[str, Any]]:
    """Time the look against one local step of the same batch, in seconds of the processor, comparisons included."""
    resnet = build("resnet18", channels=3, size=32, classes=10, generator=Key(SEED).generator())
    small = Batch(PUBLIC.inputs[:64], PUBLIC.targets[:64])
    large = Batch(torch.randn(32, 3, 32, 32, generator=Key(1).generator()), torch.arange(32) % 10)
    wide = HONEST["wide mlp, 5 epochs"]()
    for name, net, batch in (("small cnn", convnet(), small), ("wide mlp", wide, small), ("resnet18", resnet, large)):
        client = Client(net, local=Local(batch=len(batch.targets), lr=0.1, steps=1))
        params = client.params()
        task = ClientTask(batch, Key(2), client.init(params))
        step, look = [], []
        for _ in range(5):
            began = time.process_time()
            with torch.no_grad():
                sent, _ = drawn_update(client, params, *task)
            step.append(time.process_time() - began)
            began = time.process_time()
            exposed = exposure(client, params, batch, sent, first=first_gradient(client, params, task))
            look.append(time.process_time() - began)
        share = sorted(look)[2] / sorted(step)[2]
        more = {
            "kind": "cost",
            "model": name,
            "batch": len(batch.targets),
            "start": 0,
            "seconds": round(sorted(look)[2], 4),
        }
        yield line(exposed, **more, weights=f"{share:.2f} of a local step of {sorted(step)[2]:.4f} s")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="MNIST's files; without them its part is left out")
    parser.add_argument("--starts", nargs="+", type=int, default=[0, 300], help="first images of the batches")
    parser.add_argument("--output", type=Path, help="a CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [honest(options.starts), crafted(options.starts), cost()]
    parts += [mnist(options.data_dir)] if options.data_dir else []
    lines: list[dict[str, Any]] = []
    for part in parts:
        for found in part:
            lines.append(found)
            if found["kind"] != "honest" or found["malice"] or found["weights"]:
                print(*(found.get(name, "") for name in COLUMNS[:20]), sep="\t", flush=True)
    false = [found for found in lines if found["kind"] == "honest"]
    print(f"honest: {len(false)} batches, {sum(f['malice'] for f in false)} alarms of malice")
    if options.output:
        with options.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
