"""Small audits and trainings whose numbers must not change while the code is rearranged.

python -m tests.golden.commands before.json          # every number in full, before a change
python -m tests.golden.commands after.json           # and after it, on the same machine: the files are equal
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from gradveil.audit.run_directory import load_run
from gradveil.cli.app import app

_ONE = ("--workers", "1")
_LOCAL = ("--set", "client.batch=4", "--set", "client.local.lr=0.05", "--set", "client.local.steps=2")
_SMALL = ("--set", "data.size=16", "--set", "model.name=lenet-zhu")
_AUDIT = ("audit", "digits", "--target-clients", "2", *_SMALL, *_ONE)
_TRAIN = ("train", "digits", "--rounds", "2", "--set", "clients=4", *_SMALL, *_ONE)


def _attacks(*texts: str) -> tuple[str, ...]:
    return tuple(part for text in texts for part in ("--attack", text))


def _defences(*texts: str) -> tuple[str, ...]:
    return tuple(part for text in texts for part in ("--defence", text))


COMMANDS: dict[str, tuple[str, ...]] = {
    "naive": (
        *_AUDIT,
        "--iterations",
        "30",
        *_attacks("ig", "dlg(iterations=4)"),
        *_defences("none", "prune(0.9)", "gaussian(0.01)"),
    ),
    "adaptive": (
        *(*_AUDIT, "--iterations", "20", *_attacks("cdia", "pig")),
        *_defences("none", "dgp(top=0.05, bottom=0.5)", "dp(clip=20, sigma=1e-3)", "precode(k=8)"),
    ),
    "local": (*_AUDIT, *_LOCAL, "--iterations", "10", *_attacks("ig", "cdia"), *_defences("none", "topk(0.3)")),
    "closed": (*_AUDIT, *_attacks("r-gap"), *_defences("none", "prune(0.5)")),
    "malicious": (
        *(*_AUDIT, "--set", "client.batch=4", "--iterations", "10", *_attacks("rob", "curious", "fishing")),
        *_defences("none", "dgp"),
    ),
    "learned": (
        *_AUDIT,
        *_attacks("learned(epochs=2, width=64, features=256)", "grnn(iterations=5)"),
        *_defences("none", "gaussian(0.01)"),
    ),
    "trained": (
        *(*_AUDIT, "--train", "--set", "train.rounds=2", "--set", "train.clients=4", "--iterations", "10"),
        *(*_attacks("cdia"), *_defences("none", "standin")),
    ),
    "train": (*_TRAIN, *_defences("none", "dgp", "dp(clip=1, sigma=0.1)", "adgp(keep=0.2)")),
    "record": (
        *(*_TRAIN, "--set", "clients=40", *_defences("topk(0.5)")),
        *("--record", "seen", "--record-client", "1", "--record-truth"),
    ),
    "recorded": (
        *("audit", "--observed", "seen", *_SMALL, "--set", "data.channels=1"),
        *("--set", "data.classes=10", "--iterations", "10", *_ONE),
        *("--set", "data.mean=[0.3063]", "--set", "data.std=[0.3183]"),
        *_attacks("ig(labels=restore)"),
    ),
}
"""Command lines; `recorded` attacks what `record` left."""


def numbers(folder: Path, names: Iterable[str] = tuple(COMMANDS)) -> dict[str, dict[str, Any]]:
    """Run these commands in a folder, and read the numbers of each trial: no times, no texts."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        command, out = COMMANDS[name], folder / name
        text = [str(folder / "seen") if part == "seen" else part for part in command]
        result = CliRunner().invoke(app, [*text, "--out", str(out)], catch_exceptions=False)
        assert result.exit_code == 0, f"{name}: {result.output}"
        found[name] = dict(_trained(out) if command[0] == "train" else _audited(out))
    return found


def _audited(out: Path) -> Iterator[tuple[str, Any]]:
    kinds = ("status", "iterations", "objective", "mse", "ssim", "label_accuracy", "distance", "cosine")
    for trial in load_run(out).trials:
        info = trial.info
        name = f"{info['defence']} | {info['attack']} | round {info.get('trained')}"
        values = [{kind: record.get(kind) for kind in kinds} for record in trial.records]
        yield name, {"failed": trial.failed, "bytes": info.get("bytes_sent"), "targets": values}


def _trained(out: Path) -> Iterator[tuple[str, Any]]:
    kinds = ("accuracy", "loss", "validation_loss", "bytes_up", "bytes_down")
    for file in sorted((out / "trials").glob("*.json")):
        held = json.loads(file.read_text())
        rounds = [{kind: passed[kind] for kind in kinds} for passed in held["curve"]]
        yield held["defence"], {"rounds": rounds, "epsilon": held["epsilon"]}


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        Path(sys.argv[1]).write_text(json.dumps(numbers(Path(place)), indent=1) + "\n")
