"""A training as a run file says it: every defence with every seed, written each round, taken up after any kill."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.files import locked, plain, read_json, write_json
from gradveil.federated.checkpoint import load_standing, save_standing
from gradveil.federated.config import TrainConfig, digest
from gradveil.federated.engine import Standing, train
from gradveil.federated.setting import Cell, Setting, cells
from gradveil.nn.weights import fingerprint

FORMAT = 1
"""Version of a training's files; another is refused."""
RUN = "train.json"
"""The file that describes a training."""
_RESTORE = "put a copy of the file back, or train anew with --fresh, which removes the results"


@contextlib.contextmanager
def opened(folder: Path, info: Mapping[str, Any], fresh: bool = False) -> Iterator[None]:
    """Make or take up the directory of a training, for this process alone."""
    if folder.exists() and not folder.is_dir():
        refuse([Problem(str(folder), "is a file", "choose another --out")])
    others = {child.name for child in folder.iterdir()} - {RUN, "cells", ".lock"} if folder.is_dir() else set[str]()
    if others and not (folder / RUN).is_file():
        refuse([Problem(str(folder), "holds other files and is no training", "choose another --out")])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with locked(folder):
        if fresh:
            shutil.rmtree(folder / "cells", ignore_errors=True)
            (folder / RUN).unlink(missing_ok=True)
        if (folder / RUN).is_file():
            there = read_json(folder / RUN, _RESTORE)
            if there.get("config_hash") != info["config_hash"]:
                remedy = "go on with the old settings, start again with --fresh, or choose another --out"
                refuse([Problem(str(folder), "holds a training with other settings", remedy)])
        (folder / "cells").mkdir(mode=0o700, exist_ok=True)
        for left in (*folder.glob("*.tmp-*"), *(folder / "cells").glob("*.tmp-*")):  # by a process that was killed
            left.unlink()
        write_json(folder / RUN, info)
        yield


def run(
    setting: Setting, folder: Path, tell: Callable[[Cell, Standing], None], only: Sequence[Cell] | None = None
) -> list[dict[str, Any]]:
    """Train every cell as far as the run asks for; write each after every round. Returns a summary of each."""
    out: list[dict[str, Any]] = []
    for cell in cells(setting.config) if only is None else only:
        file = folder / "cells" / f"{cell.id}.safetensors"
        own = identity(setting.config, cell)
        standing = load_standing(file, own, setting.config.device)
        if standing is not None and standing.status == "finished" and len(standing.records) < setting.config.rounds:
            standing = replace(standing, status="running")
        federation = setting.federation(cell)

        def keep(now: Standing, cell: Cell = cell, file: Path = file, own: str = own) -> None:
            save_standing(file, now, own)
            tell(cell, now)

        standing = train(federation, setting.config.rounds, standing, keep)
        summary = summarise(cell, standing)
        write_json(folder / "cells" / f"{cell.id}.json", summary | {"curve": [asdict(r) for r in standing.records]})
        out.append(summary)
    return out


def identity(config: TrainConfig, cell: Cell) -> str:
    """Hash what a training's standing depends on."""
    return digest([config.digest(), cell.title, cell.seed])


def summarise(cell: Cell, standing: Standing) -> dict[str, Any]:
    """Sum one training up in one flat object: the accuracy is that of the parameters it ends with."""
    records = standing.records
    last = records[standing.best_round - 1] if standing.best_round else records[-1]
    rounds = len(records)
    return plain(
        {
            "cell": cell.id,
            "defence": cell.title,
            "seed": cell.seed,
            "status": standing.status,
            "rounds": rounds,
            "best_round": standing.best_round,
            "accuracy": last.accuracy,
            "loss": last.loss,
            "validation_loss": last.validation_loss,
            "bytes_up": sum(record.bytes_up for record in records) / rounds,
            "bytes_down": sum(record.bytes_down for record in records) / rounds,
            "seconds": sum(record.seconds for record in records) / rounds,
        }
    )


def spread(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the seeds of each defence together: mean and standard deviation of the accuracy, means of the rest."""
    out: list[dict[str, Any]] = []
    for defence in dict.fromkeys(row["defence"] for row in summaries):
        rows = [row for row in summaries if row["defence"] == defence]
        shares = [row["accuracy"] for row in rows]
        out.append(
            {
                "defence": defence,
                "seeds": len(rows),
                "accuracy": fmean(shares),
                "accuracy_std": stdev(shares) if len(shares) > 1 else None,
                **{key: fmean(row[key] for row in rows) for key in ("rounds", "bytes_up", "bytes_down", "seconds")},
                "statuses": sorted({row["status"] for row in rows}),
            }
        )
    return out


def describe(config: TrainConfig, command: str, weights: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Any]:
    """Say what `train.json` holds; a start from other weights is another training."""
    settings = config.digest()
    return {
        "format": FORMAT,
        "name": config.name,
        "config": config.resolved(),
        "config_hash": digest([settings, fingerprint(weights)]) if weights else settings,
        "command": command,
        "cells": [cell.id for cell in cells(config)],
    }


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """Read what the finished trainings of a run came to, with their curves."""
    if not (folder / RUN).is_file():
        refuse([Problem(str(folder), "is no training (it has no train.json)", "give what `gradveil train` wrote")])
    names = json.loads((folder / RUN).read_bytes())["cells"]
    files = [folder / "cells" / f"{name}.json" for name in names]
    return [read_json(file, _RESTORE) for file in files if file.is_file()]
