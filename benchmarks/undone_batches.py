"""How many private images come back behind ATS, once its public policy is undone; and which transforms can be undone.

    python benchmarks/undone_batches.py attacks --data-dir FOLDER [--data mnist ...] [--output FILE]
    python benchmarks/undone_batches.py transforms --data-dir FOLDER [--data mnist ...] [--output FILE]

`attacks` audits the first test images: an imprint block on batches of eight, and a closed form on single images, each
with and without `undo=true`. A row counts private images, images trained on, and what a guess reaches of both.
`transforms` undoes each transform alone, from the images trained on as they are: no error of an attack is part of it.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import in_closed_form
from gradveil.attacks.undo_batch_defence import undone
from gradveil.audit.attack_selection import trials
from gradveil.audit.baselines import baseline, expected_of
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.run_file import resolve
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import recover
from gradveil.client import BatchDefences, Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import DATA_DIR, load
from gradveil.defences import parse
from gradveil.defences.ats import KINDS, TRANSFORMS
from gradveil.metrics import ssim

SEED, PUBLIC, IMAGES = 0, 2000, 32
POLICIES = ("ats", 'ats(policy="3-1-7")', 'ats(policy="43-18-18")')
SETTINGS = (
    ("lenet-zhu", 8, 4, ("rob(bins=512)", "rob(bins=512, undo=true)")),
    ("vit", 1, 32, ("analytic", "analytic(undo=true)")),
)
"""(model, images of a client, clients, attacks)"""


def attacked(data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Audit a data set; yield a row per trial."""
    for model, batch, clients, attacks in SETTINGS:
        wanted = {
            "name": "undone-batches",
            "data": {"name": data, "size": 32, "public": PUBLIC, "gallery": IMAGES * 8},
            "model": {"name": model},
            "client": [{"batch": batch}],
            "target_clients": clients,
            "defences": ["none", *POLICIES],
            "attacks": list(attacks),
            "seeds": [SEED],
            "images": False,
        }
        experiment = open_experiment(resolve(wanted), folder)
        for trial in trials(experiment.config):
            found = recover(experiment, trial, range(clients), lambda step: None)
            row = Row(0, score(experiment, trial, found, TrialNames(trial.defence, trial.attack)))
            trained = row.trained_on
            guessed = expected_of(row, "recovered as trained on")
            yield {
                "data": data,
                "model": model,
                "batch": batch,
                "images": row.images,
                "defence": trial.defence,
                "attack": trial.attack,
                "recovered": row.recovered,
                "identifiable": row.identifiable,
                "ssim": _rounded(row.mean("ssim")),
                "expected_recovered": _rounded(expected_of(row, "recovered")),
                "baseline_identifiable": _rounded(baseline(row)),
                "trained_on_recovered": trained.recovered if trained else "",
                "trained_on_identifiable": trained.identifiable if trained else "",
                "trained_on_expected_recovered": _rounded(guessed),
                "seconds": _rounded(row.info["seconds"]),
            }


def transformed(data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Undo each transform of the 50 alone that differs from those before; yield a row per transform."""
    splits = load(data, data_dir=folder, limit_public=PUBLIC, limit_private=IMAGES)
    private, names, seen = splits.private, {kind: name for name, kind in KINDS.items()}, set[tuple[str, int]]()
    knowledge = Knowledge(private.space, 10, public=Batch(*_tensors(splits.public)))
    net = nn.Sequential(nn.Flatten(), nn.Linear(private.inputs[0].numel(), 10))
    plain = Client(net, domain=Domain(private.space, 10))
    batch, truth = Batch(*_tensors(private)), private.views.double()
    one = torch.ones(1)
    for number, (kind, level) in enumerate(TRANSFORMS):
        what = names[kind], level if kind.levelled else 0
        if what in seen:
            continue
        seen.add(what)
        client = parse(f'ats(policy="{number}")')(plain, Key(SEED))
        batches = BatchDefences(client.batch, client.domain)
        made = batches.apply(batch, batches.spec(batch).sample(Key(SEED, ("benchmark",)))).inputs
        found = undone(
            in_closed_form(made.unsqueeze(0), batch.targets.unsqueeze(0), one, one > 0, 0.0, None), client, knowledge
        )
        before, after = (ssim(private.space.view(x.double()), truth) for x in (made, found.inputs[0]))
        yield {
            "data": data,
            "number": number,
            "transform": what[0],
            "level": what[1],
            "images": len(truth),
            "recovered_before": int((before > 0.5).sum()),
            "recovered_after": int((after > 0.5).sum()),
            "ssim_before": _rounded(float(before.mean())),
            "ssim_after": _rounded(float(after.mean())),
        }


def _tensors(images: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return images.inputs, images.targets


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def main() -> None:
    """Measure, and write a CSV file whose every line names its command, date and machine."""
    parser = argparse.ArgumentParser(description="Undo ATS after a reconstruction.")
    parser.add_argument("what", choices=("attacks", "transforms"))
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--machine", default=f"{platform.machine()}, torch {torch.__version__}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure = attacked if given.what == "attacks" else transformed
    told = shlex.join(["python", "benchmarks/undone_batches.py", given.what, "--data", *given.data])
    facts = {"seed": SEED, "date": datetime.now(UTC).date().isoformat(), "machine": given.machine, "command": told}
    out = given.output.open("w", newline="") if given.output else sys.stdout
    writer: csv.DictWriter[str] | None = None
    for row in (row for data in given.data for row in measure(data, given.data_dir)):
        if writer is None:
            writer = csv.DictWriter(out, [*row, *facts])
            writer.writeheader()
        writer.writerow(row | facts)
        out.flush()


if __name__ == "__main__":
    main()
