"""How many labels of a batch are read off its update: the share that is right, as a multiset, before any optimisation.

    python benchmarks/labels.py [--data-dir FOLDER] [--scenes scheliga-cnn/mnist ...] [--output FILE]

Compared are `restore` (without and with public images), `unique` and, for one image, `idlg`, on untrained weights and
after some steps of SGD on the public images. Batches are drawn at random from other training images, so that labels
repeat, and with distinct labels where there are enough classes. Two baselines see no update of the batch: labels
spread evenly over the classes, and what `restore` said of another batch. Without data files the bundled digits take the
place of each data set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.labels import Labels, find_labels
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.data import DATA_DIR, Dataset, Splits, load
from gradveil.defences import parse
from gradveil.metrics.label_scores import label_accuracy
from gradveil.nn.models import build

DEFENCES = ("none", "dp(clip=20, sigma=1e-3)", "prune(0.99)")
PUBLIC = 2000
"""Public images that an attacker has who has any."""
TARGETS = 4000
"""Training images that batches are drawn from, at most half of them; attackers have the others, models learn those."""


@dataclass(frozen=True)
class Experiment:
    """A model on a data set, how it is trained, and how much of it is affordable."""

    model: str
    data: str
    lr: float = 0.05
    share: float = 1.0
    """Share of the batches that are drawn."""
    each: int = 64
    """Largest batch whose examples' gradients are taken one by one (DP-SGD): more do not fit into memory."""


EXPERIMENTS = {
    f"{experiment.model}/{experiment.data}": experiment
    for experiment in (
        Experiment("scheliga-cnn", "mnist"),
        Experiment("scheliga-cnn", "cifar10"),
        Experiment("scheliga-cnn", "cifar100"),
        Experiment("lenet-zhu", "cifar100"),
        Experiment("resnet18", "cifar10", lr=0.005, share=0.25, each=16),
    )
}
COLUMNS = ((1, False), (4, False), (4, True), (16, False), (16, True), (64, False), (64, True))
"""(examples, labels are distinct)"""


def named(examples: int, distinct: bool) -> str:
    """Name a column."""
    return f"{examples} distinct" if distinct else str(examples)


def opened(experiment: Experiment, folder: str | None, examples: int) -> Splits:
    """Load the data set, or the bundled digits where no folder is named."""
    if folder is None:
        return load("digits")
    public = max(examples, PUBLIC)
    data, _ = load(experiment.data, data_dir=folder, limit_public=public + TARGETS, limit_private=1)
    cut = max(len(data) - TARGETS, len(data) // 2)
    return Splits(data.subset(range(cut)), data.subset(range(cut, len(data))))


def trained(net: nn.Module, data: Dataset, steps: int, lr: float, key: Key) -> None:
    """Train by plain SGD with momentum: as one client would, so that every draw is named."""
    client = Client(net, local=Local(batch=64, lr=lr, steps=steps, momentum=0.9))
    params, batch = client.params(), Batch(data.inputs, data.targets)
    update, _ = client.update(params, batch, client.noise_spec(params, batch).sample(key), {})
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.sub_(update[name])


def right(net: nn.Module, data: Dataset) -> float:
    """Share of 500 of the other images that the model names rightly."""
    with torch.no_grad():
        return float((net(data.inputs[:500]).argmax(1) == data.targets[:500]).float().mean())


def batches(data: Dataset, count: int, examples: int, distinct: bool, key: Key) -> Batch:
    """Draw so many batches, each without repeated images, and without repeated labels if they are to be distinct."""
    generator = key.generator()
    rows: list[Tensor] = []
    for _ in range(count):
        order = torch.randperm(len(data.targets), generator=generator)
        if distinct:
            seen: dict[int, int] = {}
            for place in order.tolist():
                seen.setdefault(int(data.targets[place]), place)
            order = torch.tensor(list(seen.values()))
        rows.append(order[:examples])
    chosen = torch.stack(rows)
    return Batch(data.inputs[chosen], data.targets[chosen])


def observed(client: Client, batch: Batch, last: str, key: Key) -> Observation:
    """Let one client after the other send; keep what is looked at, the last layer's update."""
    params, state = client.params(), client.init(client.params())
    spec = client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
    rows = []
    for target_client, own in enumerate(zip(*batch, strict=True)):
        noise = {name: value.unsqueeze(0) for name, value in spec.sample(key.child(target_client)).items()}
        first = {name: value.unsqueeze(0) for name, value in state.items()}
        sent, _ = client.updates(params, Batch(*(value.unsqueeze(0) for value in own)), noise, first)
        rows.append({name: value[0] for name, value in sent.items() if name.rpartition(".")[0] == last})
    return Observation(params, stack(rows), batch.targets.shape[1], tuple(range(len(rows))))


def percent(found: Tensor, truth: Tensor) -> float:
    """Mean share of right labels in percent."""
    return round(100 * float(label_accuracy(found, truth).mean()), 1)


def baselines(data: Dataset, draws: dict[str, Batch]) -> dict[str, float]:
    """Spread the labels evenly over the classes: what everybody can say who sees nothing."""
    classes, found = len(data.classes), {}
    for column, batch in draws.items():
        examples = batch.targets.shape[1]
        even = torch.arange(examples) * classes // examples if examples < classes else torch.arange(examples) % classes
        found[column] = percent(even.expand_as(batch.targets), batch.targets)
    return found


def measured(
    net: nn.Module, data: Splits, draws: dict[str, Batch], text: str, experiment: Experiment, key: Key
) -> dict[str, dict[str, float]]:
    """Read labels off the updates of one defence: way -> column -> percent."""
    last = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    client, simulated_client = parse(text)(Client(net), key), Client(net)
    blind = Knowledge(data.private.space, len(data.private.classes))
    told = replace(blind, public=Batch(data.public.inputs[:PUBLIC], data.public.targets[:PUBLIC]))
    found: dict[str, dict[str, float]] = {}
    for column, batch in draws.items():
        target_clients, examples = batch.targets.shape
        if text.startswith("dp") and examples > experiment.each:
            continue
        seen = observed(client, batch, last, key.child("noise", column))
        ways: dict[str, tuple[Labels, Knowledge]] = {"restore": ("restore", blind), "public": ("restore", told)}
        if examples <= blind.classes:
            ways["unique"] = ("unique", blind)
        if examples == 1:
            ways["idlg"] = ("idlg", blind)
        for name, (way, facts) in ways.items():
            labels = find_labels(way, seen, simulated_client, facts, key.child("attacker"))
            assert labels is not None
            found.setdefault(name, {})[column] = percent(labels, batch.targets)
            if name == "restore" and target_clients > 1:
                found.setdefault("wrong batch", {})[column] = percent(labels.roll(1, 0), batch.targets)
    return found


def trials(found: dict[str, dict[str, float]], ways: tuple[str, ...]) -> str:
    """Write one row's trials: the ways of each column with a slash between them."""
    shown = []
    for column in COLUMNS:
        values = [found.get(way, {}).get(named(*column)) for way in ways]
        if all(value is None for value in values):
            shown.append("")
        else:
            shown.append(" / ".join("–" if value is None else f"{value:.0f}" for value in values))
    single = found.get("idlg", {}).get("1")
    return " | ".join([*shown, "" if single is None else f"{single:.0f}"])


def table(results: list[dict]) -> str:
    """Write the results as a Markdown table."""
    head = ["model", "data", "weights", "defence", *(named(*column) for column in COLUMNS), "idlg"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    ways = ("restore", "public", "unique")
    for result in results:
        start = f"| {result['model']} | {result['data']} |"
        if "even" in result:
            lines.append(f"{start} | spread evenly | {trials({'even': result['even']}, ('even',))} |")
            continue
        weights = "untrained" if not result["steps"] else f"{result['steps']} steps, {100 * result['right']:.0f}% right"
        lines.append(f"{start} {weights} | {result['defence']} | {trials(result['found'], ways)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get(DATA_DIR), help=f"data files; default: {DATA_DIR}")
    parser.add_argument("--scenes", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--batches", type=int, default=32, help="batches a trial; a quarter of them for resnet18")
    parser.add_argument("--steps", type=int, default=200, help="steps of 64 images that the trained weights come from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, results = time.process_time(), []
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "seed": options.seed,
        "batches": options.batches,
    }
    for name in options.scenes:
        experiment, key = EXPERIMENTS[name], Key(options.seed, (name,))
        data = opened(experiment, options.data_dir, 64 * options.steps)
        kinds, count = len(data.private.classes), max(2, round(options.batches * experiment.share))
        draws = {
            named(*column): batches(data.private, count, *column, key.child("draw", *column))
            for column in COLUMNS
            if not column[1] or column[0] <= kinds
        }
        shape = data.private.inputs.shape
        net = build(
            experiment.model, channels=shape[1], size=shape[2], classes=kinds, generator=key.child("model").generator()
        ).eval()
        source = {"model": experiment.model, "data": data.private.name.partition("/")[0], "count": count}
        results.append(source | {"even": baselines(data.private, draws)})
        for steps in (0, options.steps):
            if steps:
                trained(net, data.public, steps, experiment.lr, key.child("training"))
            weights = source | {"steps": steps, "right": round(right(net, data.private), 3)}
            for text in DEFENCES:
                results.append(weights | {"defence": text, "found": measured(net, data, draws, text, experiment, key)})
    facts["processor_seconds"] = round(time.process_time() - began)
    wrong = [mean(r["found"]["wrong batch"].values()) for r in results if "found" in r]
    print(f"{table(results)}\n\nanother batch's answers, mean over the columns: {min(wrong):.0f} to {max(wrong):.0f}%")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
