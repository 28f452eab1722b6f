"""Malicious servers against a client's guard: what is recovered and what is reported, and 200 honest rounds.

    python -m benchmarks.hidden_servers --data-dir FOLDER [--data mnist] [--parts attack] [--output FILE.csv]

Each attack of a server that changes the model crafts it for an undefended client of the first images of CIFAR-10's and
MNIST's test sets, fresh and trained. A line has what the attack recovers with the guard off (SSIM above 0.5), what the
received weights, the weights with those of the round before, and the client's own update show, and what is recovered
where the guard refuses malice, or leaks too. `honest` lines are federations of four clients, of which `guards` inspect
every round: the number of alarms, and of updates that leak. Lines are appended to the file as they come.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.guard_sweep import facts
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client, ClientTask, Local, drawn_update, first_gradient
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.data.dataset import Dataset
from gradveil.federated import exposure
from gradveil.federated.model_inspection import inspect
from gradveil.metrics import ssim_pairs
from gradveil.nn.models import build
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, LayerNorm

COLUMNS = (
    *("kind", "data", "model", "state", "attack", "batch", "wanted", "recovered", "refusing_malice", "refusing_leaks"),
    *(
        "weights",
        "weights_and_previous",
        "malice",
        "leak",
        "alarms",
        "rounds",
        "guards",
        "date",
        "machine",
        "torch",
        "seed",
    ),
)
SEED, CLIENTS = 0, 4
_LEAKS = 0.25


def perceptron(pixels: int, norm: Callable[[int], nn.Module] | None = None) -> nn.Module:
    """Build a perceptron with 512 and 64 units, and a normalisation behind the first layer if one is given."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        behind = [] if norm is None else [norm(512)]
        rest = [nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 512), *behind, *rest)


def convolutional(channels: int, size: int) -> nn.Module:
    """Build a convolution of stride 2, one more, and 256 hidden units."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        convolutions = [nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        units = 16 * ((size + 1) // 2) ** 2
        return nn.Sequential(
            *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(units, 256), nn.ReLU(), nn.Linear(256, 10)
        )


def small_cnn(channels: int, size: int) -> nn.Module:
    """Build the small network of the studies: three convolutions, the last of which has one position."""
    return build("scheliga-cnn", channels=channels, size=size, classes=10, generator=Key(SEED).generator())


HIDDEN = ("quantile", "quantile(part=0.25)", "quantile(part=0.1)", "conv-imprint")
BLOCKS = ("rob(bins=512)", "curious(rows=1024, share=0.03)")


def models(shape: tuple[int, ...]) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield networks with the attacks that are tried on them."""
    channels, size, pixels = shape[0], shape[-1], shape[0] * shape[1] * shape[2]
    searches = ("fishing(iterations=600)", "steering(iterations=600)", "steering(iterations=600, lessons=20)")
    yield "mlp", perceptron(pixels), ("unmix", *HIDDEN, *BLOCKS)
    yield "mlp, layer norm", perceptron(pixels, LayerNorm), ("quantile(place=norm)",)
    yield "mlp, batch norm", perceptron(pixels, BatchStatistics), ("quantile(place=norm)",)
    frozen = ("quantile(place=norm)", "quantile(place=statistics)")
    yield "mlp, frozen norm", perceptron(pixels, FrozenNorm), frozen
    yield "conv and 256 units", convolutional(channels, size), HIDDEN
    yield "small cnn", small_cnn(channels, size), ("quantile", "conv-imprint", *BLOCKS, *searches)


def trained(net: nn.Module, public: Dataset, steps: int = 300) -> nn.Module:
    """Train a network on batches of 64 public images."""
    optimiser, generator = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), Key(SEED).generator()
    for _ in range(steps):
        places = torch.randint(len(public), (64,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(net(public.inputs[places]), public.targets[places]).backward()
        optimiser.step()
    return net


def recovered(images: Tensor, truth: Tensor, view: Callable[[Tensor], Tensor]) -> int:
    """Count the true images to which a reconstruction has an SSIM above 0.5."""
    pixels = view(images)
    scores = [ssim_pairs(view(image[None]).expand_as(pixels), pixels).max() for image in truth]
    return sum(float(score) > 0.5 for score in scores)


def attacked(net: nn.Module, text: str, batch: Batch, public: Dataset) -> dict[str, Any] | None:
    """Craft, answer, reconstruct and inspect. None if the attack does not apply."""
    space, size = public.space, len(batch.targets)
    target = int(batch.targets.bincount().argmax())
    searches = text.startswith(("fishing", "steering"))
    attack = make_attack(text.replace("(", f"(target={target}, ", 1) if searches else text)
    client = Client(net)
    known = Knowledge(space, 10, public=Batch(public.inputs, public.targets), targets=batch.targets[None])
    prospect = Prospect(client, tuple(batch.inputs.shape[1:]), size, 10, len(public))
    if list(attack.problems(prospect)):
        return None
    sent = attack.craft(client, known, Key(SEED)) if hasattr(attack, "craft") else client
    params = sent.params()
    update, _ = sent.update(params, batch, {}, sent.init(params))
    seen = Observation(params, {name: value[None] for name, value in update.items()}, size, (0,))
    images = attack([seen], sent, known, Key(SEED)).inputs[0]
    wanted = batch.targets == target if searches else torch.ones(size, dtype=torch.bool)
    off = recovered(images, batch.inputs[wanted], space.view)
    received = {**params, **dict(sent.model.named_buffers())}
    honest = {**client.params(), **dict(net.named_buffers())}
    own, _ = client.update(client.params(), batch, {}, {})
    weights = {finding.family for finding in inspect(sent.model, received)}
    both = {finding.family for finding in inspect(sent.model, received, honest, own)}
    exposed = exposure(sent, params, batch, update)
    malice, leak = bool(exposed.malice), exposed.leak(_LEAKS) is not None
    return {
        "attack": text,
        "batch": size,
        "wanted": int(wanted.sum()),
        "recovered": off,
        "refusing_malice": 0 if weights or malice else off,
        "refusing_leaks": 0 if weights or malice or leak else off,
        "weights": " ".join(sorted(weights)),
        "weights_and_previous": " ".join(sorted(both)),
        "malice": int(malice),
        "leak": int(leak),
    }


def honest_rounds(net: nn.Module, public: Dataset, rounds: int, guards: int, local: Local | None) -> dict[str, Any]:
    """Train four clients with guards that inspect every round, and count the alarms."""
    client = Client(net, local=local)
    params = {**client.params(), **dict(net.named_buffers())}
    examples = 64 if local else 32
    own = len(public) // CLIENTS
    previous: dict[str, Tensor] | None = None
    last: dict[int, dict[str, Tensor]] = {}
    alarms = leaks = 0
    generator = Key(SEED, ("honest",)).generator()
    for number in range(rounds):
        updates: list[dict[str, Tensor]] = []
        for place in range(CLIENTS):
            rows = place * own + torch.randperm(own, generator=generator)[:examples]
            batch = Batch(public.inputs[rows], public.targets[rows])
            task = ClientTask(batch, Key(SEED, (f"{number}-{place}",)), client.init(params))
            with torch.no_grad():
                update, _ = drawn_update(client, params, *task)
            if place < guards:
                findings = inspect(net, params, previous, last.get(place), 1)
                first = first_gradient(client, params, task)
                exposed = exposure(client, params, batch, update, previous, first, last.get(place))
                alarms += bool(findings) + bool(exposed.malice)
                leaks += exposed.leak(_LEAKS) is not None
            updates.append(update)
            last[place] = update
        previous = params
        step = 1.0 if local else 0.1
        mean = {name: torch.stack([update[name] for update in updates]).mean(0) for name in updates[0]}
        params = {name: value - step * mean[name] if name in mean else value for name, value in params.items()}
    size = local.batch if local else examples
    return {"batch": size, "alarms": alarms, "leak": leaks, "rounds": rounds, "guards": guards}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the lines of all attacks, then of honest federations."""
    for name in options.data:
        splits = load(name, data_dir=options.data_dir, limit_public=2000, limit_private=32)
        public, shape = splits.public, tuple(splits.private.inputs.shape[1:])
        for state in ("fresh", "trained") if "attack" in options.parts else ():
            for model, net, attacks in models(shape):
                made = trained(net, public) if state == "trained" else net
                for size in options.batches:
                    batch = Batch(splits.private.inputs[:size], splits.private.targets[:size])
                    for text in attacks:
                        found = attacked(made, text, batch, public)
                        if found is not None:
                            yield {"kind": "attack", "data": name, "model": model, "state": state, **found}
        for model, net, _ in models(shape) if "honest" in options.parts else ():
            for local in (None, Local(batch=32, lr=0.1, epochs=2)):
                found = honest_rounds(net, public, options.rounds, options.guards, local)
                state = "2 local epochs" if local else "one gradient"
                yield {"kind": "honest", "data": name, "model": model, "state": state, **found}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the files of MNIST and CIFAR-10")
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of each honest federation")
    parser.add_argument("--parts", nargs="+", default=["attack", "honest"], choices=["attack", "honest"])
    parser.add_argument("--guards", type=int, default=1, help="clients whose guards inspect an honest federation")
    parser.add_argument("--output", type=Path, help="a CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    new = options.output is not None and not options.output.exists()
    for line in measured(options):
        print(*(line.get(name, "") for name in COLUMNS[:17]), sep="\t", flush=True)
        if options.output:
            with options.output.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow({**line, **facts()})
            new = False


if __name__ == "__main__":
    main()
