"""Options that commands share: workers, processes or a Ray cluster; and the command to run again."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import click
import typer

from gradveil.cli.index import read_index
from gradveil.core.errors import Problem, refuse

if TYPE_CHECKING:
    from gradveil.runs.task import Scheduler, Site

_FRESH = "--fresh"
_FEW, _REASON = 3, 80
"""How many differences from another run are printed, and how many characters of each."""


def again() -> str:
    """Return the current command without --fresh, which would remove finished work."""
    return shlex.join(["gradveil", *kept(sys.argv[1:])])


def kept(words: Iterable[str]) -> list[str]:
    """Drop options that remove results.

    >>> kept(["gradveil", "train", "digits", "--fresh"])
    ['gradveil', 'train', 'digits']
    """
    return [word for word in words if word != _FRESH]


def run_directory(
    out: Path | None,
    name: str,
    problems: Callable[[Path], Sequence[Problem]],
    found: Callable[[Path], bool],
    fresh: bool,
) -> Path:
    """Choose the directory of a run: --out, or `runs/NAME`, or `runs/NAME-2` and so on where other runs are.

    Prints on standard error that a run goes on, or that it goes elsewhere and why. `problems` says why a run cannot be
    in a directory, `found` whether one is there.
    """
    from gradveil.runs.run_folder import numbered

    base = Path("runs") / name
    folder, taken = (out, ()) if out is not None else numbered(base, problems)
    goes_on = not fresh and found(folder) and not problems(folder)
    if taken:
        reasons = [_reason(problem, base) for problem in taken]
        few = "; ".join(reason if len(reason) <= _REASON else f"{reason[:_REASON]}..." for reason in reasons[:_FEW])
        more = f"; and {len(reasons) - _FEW} more" if len(reasons) > _FEW else ""
        typer.echo(f"{base} holds another run: {few}{more}.", err=True)
    if taken or goes_on:
        typer.echo(f"{'Resuming the run in' if goes_on else 'This run is in'} {folder}.", err=True)
    return folder


def _reason(problem: Problem, base: Path) -> str:
    """Shorten a problem with a run's directory to what differs there, or in the trainings in it."""
    part, _, difference = problem.where.removeprefix(str(base)).partition(", ")
    return ": ".join(filter(None, (part.strip("/"), difference or problem.what)))


def named_settings(given: Mapping[str, object], prepare: bool) -> list[str]:
    """Write options that name settings of a run file as --set takes them.

    >>> named_settings({"model.name": "lenet-zhu", "data.name": None}, prepare=True)
    ['model.name="lenet-zhu"', 'model.prepare=true']
    """
    settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None]
    return [*settings, *(["model.prepare=true"] if prepare else [])]


def described(name: str | None, model: str | None, data: str | None) -> tuple[str | None, str | None]:
    """Return the run and the data that a command names: beside a model, a table in the place of a run is the data."""
    from gradveil.data.registry import told_by_columns
    from gradveil.data.tables import is_table

    if name is not None and model is not None and data is None and is_table(name):
        name, data = None, name
    return name, None if data is None else told_by_columns(data)


def unnamed(command: str, settings: Sequence[str], aside: str = "") -> dict[str, Any]:
    """Begin a run without a file, which `--model` and `--data` describe; it is named after them."""
    from gradveil.data.tables import without_suffix

    texts = {key: text.strip("\"' ") for key, _, text in (setting.partition("=") for setting in settings)}
    if missing := [key for key in ("model", "data") if f"{key}.name" not in texts]:
        remedy = f"name a run file or a bundled run: gradveil {command} digits; or both: --model NAME --data NAME"
        refuse([Problem("RUN" if len(missing) == 2 else f"--{missing[0]}", "is missing", remedy + aside)])
    last = (re.split(r"[:/\\]", without_suffix(texts[f"{key}.name"]))[-1] for key in ("model", "data"))
    words = [*(["train"] if command == "train" else []), *last]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-._").lower()
    return {"name": name or command, "data": {"name": texts["data.name"]}, "model": {"name": texts["model.name"]}}


def own_code() -> None:
    """Let a user's modules be imported from the working directory, as with `python -m`.

    A command calls this after its own imports: earlier, a user's `queue.py` would replace Python's.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


class Engine(StrEnum):
    """The engine that runs trials."""

    processes = "processes"
    ray = "ray"


EngineOption = Annotated[
    Engine,
    typer.Option(help='Engine for the trials: processes of this machine, or Ray (pip install "gradveil\\[ray]").'),
]
"""`--engine`."""
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray cluster for --engine ray; this machine must be part of it; auto finds it. Default: a temporary "
        "Ray on this machine.",
    ),
]
"""`--address`."""
EveryOption = Annotated[bool, typer.Option("--all", help="Show every trial too, not only the strongest of each.")]
"""`--all`."""
ExplainOption = Annotated[bool, typer.Option("--explain", help="Define the words and columns of the tables.")]
"""`--explain`."""

OrderOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Defence or attack that comes next in order. Repeatable.")
]
"""`--order`."""
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TEXT", help="Text for a defence or attack, such as 'dgp=DGP'; $...$ is math. Repeatable."
    ),
]
"""`--label`."""


def numbers_of(option: str, text: str, problems: list[Problem]) -> list[int]:
    """Read numbers and ranges; add a problem for each part that is neither.

    >>> numbers_of("targets", "0,2,5-7", [])
    [0, 2, 5, 6, 7]
    """
    result: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            result += range(int(first), int(last or first) + 1)
        else:
            problems.append(Problem(option, f"'{part}' is no number and no range", "write for example 0,2,5-7"))
    return result


_FAIL = (
    "A gate for CI: exit with code 3 if more than this share of images is recovered behind a defence (0 to 1), or with "
    "1 if the run does not show that all shares are within the limit."
)
_ACCEPT = (
    "Weaken --fail-above: few-images compares rates instead of the ends of their intervals; inconclusive and "
    "not-tested let such settings pass by their rate. Repeatable."
)
FailAboveOption = Annotated[float | None, typer.Option(metavar="RATE", min=0, max=1, help=_FAIL)]
"""`--fail-above`."""
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(metavar="WHAT", click_type=click.Choice(read_index()["options"]["accept"]), help=_ACCEPT),
]
"""`--accept`."""
SarifOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write SARIF 2.1.0 for code scanning: a result per failed defence.")
]
"""`--sarif`."""
JunitOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write JUnit XML: a test case per defence, which fails as the gate.")
]
"""`--junit`."""


def completed(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return what completes the values of an option: the names of a kind in the index, with their descriptions."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        rows = read_index()["listed"][kind]
        names = [(row["name"], row["description"]) for row in rows]
        if kind == "attacks":
            names += [("adaptive", "the attacks on each defence"), ("malicious", "servers that change the model")]
        if kind == "runs":
            names += [
                (str(path), "run file") for path in sorted(Path().glob("*.toml")) if path.name != "pyproject.toml"
            ]
        return [(name, about) for name, about in names if name.startswith(incomplete)]

    return complete


AttackOption = Annotated[
    list[str] | None,
    typer.Option(help="Attack, instead of the file's. Repeatable.", autocompletion=completed("attacks")),
]
"""`--attack`."""
DefenceOption = Annotated[
    list[str] | None,
    typer.Option(help="Defence, instead of the file's. Repeatable.", autocompletion=completed("defences")),
]
"""`--defence`."""
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Model, instead of the file's and its options: of gradveil list models, hf:NAME, timm:NAME, "
        "torchvision:NAME, or pkg.module:factory.",
        autocompletion=completed("models"),
    ),
]
"""`--model`, in the place of a run file's."""
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Data, instead of the file's: of gradveil list data, FILE.csv, texts:FILE.csv, folder:PATH, parquet:PATH "
        "or hf:NAME.",
        autocompletion=completed("data"),
    ),
]
"""`--data`, in the place of a run file's."""
DataDirOption = Annotated[Path | None, typer.Option(help="Folder where data files lie (or set GRADVEIL_DATA).")]
"""`--data-dir`."""
TargetClientsOption = Annotated[
    int | None, typer.Option("--target-clients", "--victims", help="Number of clients to attack.")
]
"""`--target-clients`, in the place of a run file's."""
IterationsOption = Annotated[
    int | None, typer.Option(min=1, help="Iterations of every attack that does not set its own.")
]
"""`--iterations`, in the place of a run file's."""
RestartsOption = Annotated[int | None, typer.Option(min=1, help="Restarts of every attack that does not set its own.")]
"""`--restarts`, in the place of a run file's."""
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="Budget per defence, shared by all attacks on it: target-iterations (64000) or time (90s, 10m, 2h). Or "
        "auto, a few minutes for the whole run; or none. Default: auto for a custom model, otherwise none.",
    ),
]
"""`--budget`, in the place of a run file's."""
SeedOption = Annotated[list[int] | None, typer.Option(help="Seed, instead of the file's. Repeatable.")]
"""`--seed`, in the place of a run file's."""
FreshOption = Annotated[bool, typer.Option(_FRESH, help="Remove earlier results and start again.")]
"""`--fresh`."""
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
"""`--device`."""


class Detail(NamedTuple):
    """The amount of detail in printed results."""

    every: bool = False
    explain: bool = False


@dataclass(frozen=True)
class Place:
    """A chosen engine."""

    engine: Engine
    address: str | None
    device: str

    def check(self, workers: int | None, recording: bool = False) -> None:
        """Reject options that contradict each other, all in one error."""
        problems: list[Problem] = []
        if self.address is not None:
            if self.engine is not Engine.ray:
                problems.append(Problem("--address", "is of a Ray cluster", "add --engine ray, or leave it out"))
            if "://" in self.address:
                problem = f"{self.address!r} is of Ray's client, which passes on no news of the work"
                problems.append(
                    Problem("--address", problem, "start on a machine of the cluster, with HOST:PORT or auto")
                )
            if workers is None:
                problems.append(Problem("--workers", "is missing", "set the number of workers on the cluster"))
            if recording:
                problem = "is written where clients are trained, which may be another machine"
                problems.append(Problem("--record", problem, "leave out --address"))
        if self.engine is Engine.ray and ":" in self.device:
            problems.append(Problem("--device", "Ray chooses the GPU", f"say {self.device.partition(':')[0]}"))
        refuse(problems)

    def schedule(self, workers: int, threads: int = 1) -> Callable[[Site], Scheduler]:
        """Return a scheduler for the tasks of a site."""
        from gradveil.runs.pool import Processes
        from gradveil.runs.ray_pool import Cluster
        from gradveil.runs.task import in_process

        def at(site: Site) -> Scheduler:
            if self.engine is Engine.ray:
                return Cluster(site, workers, threads, self.address, gpus=int(self.device == "cuda"))
            return Processes(site, workers, threads) if workers > 1 else in_process

        return at
