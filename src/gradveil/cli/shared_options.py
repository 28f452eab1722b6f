"""Options that commands share: workers, processes or a Ray cluster; and the command to run again."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gradveil.core.errors import Problem, refuse

if TYPE_CHECKING:
    from gradveil.runs.task import Scheduler, Site

_FRESH = "--fresh"


def again() -> str:
    """Write the command that was given; --fresh would throw away what it finished."""
    return shlex.join(["gradveil", *kept(sys.argv[1:])])


def kept(words: Iterable[str]) -> list[str]:
    """Leave out what removes results.

    >>> kept(["gradveil", "train", "digits", "--fresh"])
    ['gradveil', 'train', 'digits']
    """
    return [word for word in words if word != _FRESH]


def own_code() -> None:
    """Let a user's modules be imported from where the user stands, as with `python -m`.

    A command says so when what it needs itself is loaded: before, a user's `queue.py` would stand in for Python's.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


class Engine(StrEnum):
    """What runs the trials of a run."""

    processes = "processes"
    ray = "ray"


EngineOption = Annotated[
    Engine,
    typer.Option(help="What works on the trials: processes of this machine, or Ray (pip install 'gradveil\\[ray]')."),
]
"""`--engine`."""
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The Ray cluster that --engine ray works on, of which this machine is a part; auto finds it. Without it, "
        "Ray is started here for the time being.",
    ),
]
"""`--address`."""
EveryOption = Annotated[bool, typer.Option("--all", help="Show every trial too, not only the strongest of each.")]
"""`--all`."""
ExplainOption = Annotated[bool, typer.Option("--explain", help="Define the words and columns of the tables.")]
"""`--explain`."""


class Detail(NamedTuple):
    """How much of the results is printed."""

    every: bool = False
    explain: bool = False


@dataclass(frozen=True)
class Place:
    """A chosen engine."""

    engine: Engine
    address: str | None
    device: str

    def check(self, workers: int | None, recording: bool = False) -> None:
        """Refuse options that do not go together, all at once."""
        problems: list[Problem] = []
        if self.address is not None:
            if self.engine is not Engine.ray:
                problems.append(Problem("--address", "is of a Ray cluster", "add --engine ray, or leave it out"))
            if "://" in self.address:
                what = f"{self.address!r} is of Ray's client, which passes on no news of the work"
                problems.append(Problem("--address", what, "start on a machine of the cluster, with HOST:PORT or auto"))
            if workers is None:
                problems.append(Problem("--workers", "is missing", "say how many workers the cluster is to have"))
            if recording:
                what = "is written where clients are trained, which may be another machine"
                problems.append(Problem("--record", what, "leave out --address"))
        if self.engine is Engine.ray and ":" in self.device:
            problems.append(Problem("--device", "Ray chooses the GPU", f"say {self.device.partition(':')[0]}"))
        refuse(problems)

    def schedule(self, workers: int, threads: int = 1) -> Callable[[Site], Scheduler]:
        """Say how tasks of a site are done by so many workers."""
        from gradveil.runs.pool import Processes
        from gradveil.runs.ray_pool import Cluster
        from gradveil.runs.task import in_process

        def at(site: Site) -> Scheduler:
            if self.engine is Engine.ray:
                return Cluster(site, workers, threads, self.address, gpus=int(self.device == "cuda"))
            return Processes(site, workers, threads) if workers > 1 else in_process

        return at
