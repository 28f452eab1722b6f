"""Trainings that outlive a run: Flower gives a run that is started again another id, and a client's state follows.

    <folder>/<identity>/training-<name>     which runs it had, the last one at the end

The name is the client's own. A server that could say it would choose whose residuals it is sent.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from gradveil.core.errors import Problem, fail
from gradveil.core.files import DamagedError, read_json, write_json
from gradveil.federated.ledger import file_name

KIND, VERSION = "gradveil training", 1
"""What a training's file says of itself, and the version of its form."""
_RUN = re.compile(r"run-[0-9]+")


def named(training: str) -> str:
    """Check a training's name: it is part of a file's."""
    return file_name("training", training)


def continued(home: Path, training: str, run: str) -> Path | None:
    """Enter a run as the last of its training; return the state that the runs before have left, if any.

    A run that another one has followed is refused: it would go on with a state that is no longer the client's.
    """
    file = home / f"training-{named(training)}"
    runs = _runs(file) if file.exists() else []
    if run in runs[:-1]:
        what = f"is over: training '{training}' has gone on in {runs[-1]}"
        raise fail(run, what, "stop it, or give the other run's training another name")
    if run not in runs:
        runs.append(run)
        write_json(file, {"kind": KIND, "version": VERSION, "runs": runs})
    if states(home / run):
        return None
    for before in reversed(runs[:-1]):
        if not (home / before).is_dir():
            remedy = f"put it back, or remove {file}: the training then starts with an empty state"
            raise fail(str(home / before), f"is missing, where training '{training}' has its state", remedy)
        if left := states(home / before):
            return home / before / f"state-{max(left)}"
    return None


def states(folder: Path) -> list[int]:
    """List the rounds after which a run has left a state."""
    return [int(file.name.removeprefix("state-")) for file in folder.glob("state-*") if "." not in file.name]


def _runs(file: Path) -> list[str]:
    remedy = "put a copy back, or remove it: the training then starts with an empty state"
    said: Any = read_json(file, remedy)
    told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    runs: Any = told.get("runs")
    form = (told.get("kind"), told.get("version"))
    if form != (KIND, VERSION) or not isinstance(runs, list) or not runs:
        raise DamagedError(Problem(str(file), f"is no {KIND} of version {VERSION}", remedy))
    found = [str(run) for run in cast("list[Any]", runs)]
    # A name leads to a folder beside this file, and nowhere else.
    if not all(_RUN.fullmatch(run) for run in found) or len(set(found)) < len(found):
        raise DamagedError(Problem(str(file), "names no runs, or one twice", remedy))
    return found
