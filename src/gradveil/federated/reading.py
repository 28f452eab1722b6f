"""What a training wrote, read back: its settings, and what became of every cell, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.files import DamagedError, read_json
from gradveil.federated.config import TrainConfig
from gradveil.federated.setting import Cell, cells

RUN = "train.json"
"""The file that describes a training."""
RESTORE = "put a copy of the file back, or train anew with --fresh, which removes the results"
"""What to do about a damaged file."""


class _Held(BaseModel):
    """What has to be there, of the right kind; whatever else is there may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Run(_Held):
    config: dict[str, Any]
    cells: list[str]
    name: str = ""
    command: str = ""
    created: str = ""


class _Round(_Held):
    number: int
    accuracy: float
    loss: float | None
    validation_loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float


class _Start(_Held):
    accuracy: float


class _Summary(_Held):
    cell: str
    defence: str
    seed: int
    status: str
    rounds: int
    best_round: int | None
    accuracy: float | None
    validation_loss: float | None
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    client_seconds: float | None = None
    tested: int | None = None
    constant: float | None = None
    guarantee: str | None = None
    epsilon: dict[str, float] = {}
    start: _Start | None
    curve: list[_Round]


_RUN, _SUMMARY = TypeAdapter(_Run), TypeAdapter(_Summary)
_UNTOLD = {
    "guarantee": None,
    "epsilon": {},
    "delta": None,
    "client_seconds": None,
    "tested": None,
    "constant": None,
}
"""What an earlier version did not tell of a training: nobody asked."""


@dataclass(frozen=True)
class Training:
    """A training as it lies on disk."""

    path: Path
    info: Mapping[str, Any]
    config: TrainConfig
    cells: Sequence[tuple[Cell, Mapping[str, Any] | None]]
    """Every cell with its summary, in the run file's order; None where it is not finished."""


def is_training(folder: Path) -> bool:
    """Say whether `gradveil train` wrote this folder."""
    return (folder / RUN).is_file()


def read_info(folder: Path) -> dict[str, Any]:
    """Read what a training's own file says; refuse a damaged one."""
    return _read(_RUN, folder / RUN)


def load_training(folder: Path) -> Training:
    """Read a training, finished or not; refuse with every damaged file at once."""
    if not is_training(folder):
        raise fail(str(folder), "is no training (it has no train.json)", "give what `gradveil train` wrote")
    info = read_info(folder)
    try:
        config = TrainConfig.model_validate(info["config"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedError(Problem(str(folder / RUN), f"config.{where}: {first['msg']}", RESTORE)) from None
    found: list[tuple[Cell, Mapping[str, Any] | None]] = []
    problems: list[Problem] = []
    for cell in cells(config):
        file = folder / "cells" / f"{cell.id}.json"
        try:
            told = _UNTOLD | _read(_SUMMARY, file) if file.is_file() else None
            found.append((cell, None if told and _longer(config, told) else told))
        except GradveilError as error:
            problems += error.problems
    refuse(problems)
    return Training(folder, info, config, found)


def _longer(config: TrainConfig, told: Mapping[str, Any]) -> bool:
    """Say whether more rounds were asked for since a training was summed up, and it has not got there yet."""
    return told["status"] == "finished" and told["rounds"] < config.rounds


def _read(held: TypeAdapter[Any], file: Path) -> dict[str, Any]:
    value = read_json(file, RESTORE)
    try:
        held.validate_python(value)
        return value
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedError(Problem(str(file), f"{where}: {first['msg']}", RESTORE)) from None
