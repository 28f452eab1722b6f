"""What a training wrote, read back: its settings, and what became of every cell, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

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


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=10**15)]


class _Run(_Held):
    config: dict[str, Any]
    cells: list[str]
    name: str = ""
    command: str = ""
    created: str = ""
    gradveil: str = ""
    growing: list[str] = []
    config_hash: str = ""
    weights: str | None = None
    images: dict[str, str | None] | None = None


class _Round(_Held):
    number: Count
    clients: list[Count] = []
    absent: list[Count] = []
    refused: list[Count] = []
    spoke: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    accuracy: Share
    loss: float | None
    validation_loss: float | None
    validation_accuracy: Share | None = None
    bytes_up: Count
    bytes_down: Count
    seconds: Amount
    client_seconds: Amount | None = None


class _Start(_Held):
    accuracy: Share
    loss: float | None = None


class _Summary(_Held):
    cell: str
    defence: str
    seed: int
    status: str
    rounds: Count
    best_round: Count | None
    accuracy: Share | None
    loss: float | None = None
    validation_loss: float | None
    bytes_up: Amount | None
    bytes_down: Amount | None
    seconds: Amount | None
    client_seconds: Amount | None = None
    tested: Annotated[int, Field(ge=1, le=10**15)] | None = None
    constant: Share | None = None
    guarantee: str | None = None
    epsilon: dict[str, Annotated[float, Field(ge=0)]] = {}
    delta: Share | None = None
    failed: str | None = None
    code: dict[str, str] = {}
    start: _Start | None
    curve: list[_Round]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Compare the numbers with each other."""
        numbers = [point.number for point in self.curve]
        if numbers != list(range(1, len(numbers) + 1)) or self.rounds != len(numbers):
            raise ValueError("its rounds are not those of its curve, counted from 1")
        if (self.best_round or 0) > self.rounds:
            raise ValueError("its best round is none of its rounds")
        if (self.status == "failed") != (not numbers) or (numbers and None in self._numbers()):
            raise ValueError("it has not the numbers of its status")
        if self.constant is not None and self.tested is None:
            raise ValueError("it compares with one class, and does not say on how many examples")
        return self

    def _numbers(self) -> tuple[float | None, ...]:
        return self.accuracy, self.bytes_up, self.bytes_down, self.seconds


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
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise DamagedError(Problem(str(file), f"{where}: {first['msg']}", RESTORE)) from None
