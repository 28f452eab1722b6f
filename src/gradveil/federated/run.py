"""A training as a run file says it: every defence with every seed, written each round, taken up after any kill."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.files import LOCK, locked, write_json, write_private
from gradveil.core.growth import refuse_others
from gradveil.federated.checkpoint import load_standing, pack_standing
from gradveil.federated.config import FREE, TrainConfig, digest
from gradveil.federated.reading import RUN, load_training, read_info
from gradveil.federated.recorded import Recorder
from gradveil.federated.setting import Cell, Setting, cells
from gradveil.federated.standing import Round, Status
from gradveil.federated.work import begun, facts, failure, going_on, identity, summarise, working
from gradveil.nn.weights import fingerprint
from gradveil.schedule.work import Job, Parcel, Schedule, in_process

FORMAT = 1
"""Version of a training's files; another is refused."""
_round = TypeAdapter(Round)
_REPORT = "report.html"


@contextlib.contextmanager
def opened(folder: Path, info: Mapping[str, Any], fresh: bool = False) -> Iterator[None]:
    """Make or take up the directory of a training, for this process alone.

    What `info` says is `growing` in the configuration may have more in it than there: there are then more cells.
    """
    try:
        _made(folder)
    except OSError as error:
        raise fail(str(folder), f"cannot be made or read: {error.strerror}", "choose another --out") from error
    with locked(folder):
        if fresh:
            shutil.rmtree(folder / "cells", ignore_errors=True)
            (folder / RUN).unlink(missing_ok=True)
            (folder / _REPORT).unlink(missing_ok=True)
        if (folder / RUN).is_file():
            there = read_info(folder)
            refuse_others(folder, there, info, FREE)
            info = {**info, "created": there.get("created", info.get("created"))}
        (folder / "cells").mkdir(mode=0o700, exist_ok=True)
        for left in (*folder.glob("*.tmp-*"), *(folder / "cells").glob("*.tmp-*")):  # by a process that was killed
            left.unlink()
        write_json(folder / RUN, info)
        yield


def _made(folder: Path) -> None:
    """Make the directory, if it is not there; refuse one that holds other things."""
    if folder.exists() and not folder.is_dir():
        raise fail(str(folder), "is a file", "choose another --out")
    ours = {RUN, "cells", LOCK, _REPORT}
    others = {child.name for child in folder.iterdir()} - ours if folder.is_dir() else set[str]()
    if others and not (folder / RUN).is_file():
        raise fail(str(folder), "holds other files and is no training", "choose another --out")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def run(
    setting: Setting,
    folder: Path,
    tell: Callable[[Cell, Round, Status], None],
    schedule: Schedule = in_process,
    recorder: Recorder | None = None,
    at: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Train every cell as far as the run asks for; write each after every round. Returns a summary of each.

    `recorder` keeps what leaves the clients of every cell, as the cell's own run. Where a cell stood after the rounds
    `at` (0: before the first) is kept beside where it stands: see `cell_file`.
    """
    config = setting.config

    def file(cell: Cell) -> Path:
        return cell_file(folder, cell)

    def order(cell: Cell) -> Parcel:
        return Parcel({"cell": cell.id}, file(cell).read_bytes() if file(cell).is_file() else b"")

    def heard(cell: Cell, news: Parcel) -> None:
        record = _round.validate_python(news.facts["record"])
        # What is to be kept comes first: a kill in between is then made up for.
        if record.number in at:
            write_private(cell_file(folder, cell, record.number), news.data)
        write_private(file(cell), news.data)
        tell(cell, record, news.facts["status"])

    def write(cell: Cell, summary: Mapping[str, Any]) -> None:
        write_json(folder / "cells" / f"{cell.id}.json", summary)

    waiting: list[Cell] = []
    problems: list[Problem] = []
    for cell in cells(config):
        try:
            _rewind(setting, folder, cell, at)
            standing = going_on(load_standing(file(cell), identity(setting, cell)), config.rounds)
        except GradveilError as error:
            problems += error.problems
            continue
        if standing is None or standing.status == "running":
            waiting.append(cell)
        else:
            write(cell, summarise(cell, standing, facts(setting.federation(cell), config, standing)))
    refuse(problems)
    with schedule(Job(working(setting, recorder), order, heard), waiting) as done:
        for cell, found in done:
            write(cell, failure(cell, found) if isinstance(found, str) else found.facts)
    return load_summaries(folder)


def cell_file(folder: Path, cell: Cell, number: int | None = None) -> Path:
    """Say where it is written where a training stands, or where it stood after a chosen round."""
    return folder / "cells" / (cell.id + ("" if number is None else f".round-{number}") + ".safetensors")


def _rewind(setting: Setting, folder: Path, cell: Cell, at: Collection[int]) -> None:
    """Go back to before the first standing that should be kept and is gone; keep the one before the first round."""
    files = {number: cell_file(folder, cell, number) for number in sorted(at)}
    gone = [number for number, kept in files.items() if not kept.is_file()]
    own, file = identity(setting, cell), cell_file(folder, cell)
    if 0 in gone:
        write_private(files[0], pack_standing(begun(setting, cell, setting.federation(cell)), own))
    standing = load_standing(file, own) if gone else None
    late = [number for number in gone if 0 < number <= (len(standing.records) if standing else 0)]
    if late:
        before = max((number for number in files if number < late[0]), default=None)
        if before is None:
            file.unlink()
        else:
            write_private(file, files[before].read_bytes())


def describe(
    config: TrainConfig,
    command: str,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
    images: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Say what `train.json` holds; a start from other weights, or on other `images`, is another training."""
    settings = config.digest()
    return {
        "format": FORMAT,
        "name": config.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "gradveil": version("gradveil"),
        "config": config.resolved(),
        "growing": config.growing,
        "config_hash": digest([settings, fingerprint(weights)]) if weights else settings,
        "weights": fingerprint(weights) if weights else None,
        "images": dict(images) if images else None,
        "command": command,
        "cells": [cell.id for cell in cells(config)],
    }


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """Read what the finished trainings of a run came to, with their curves."""
    return [dict(told) for _, told in load_training(folder).cells if told is not None]
