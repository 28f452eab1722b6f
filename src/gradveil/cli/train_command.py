"""`gradveil train`: federated training with every defence; its cost in accuracy, bytes and time."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.audit.run_file import read_training
from gradveil.cli.shared_options import AddressOption, Engine, EngineOption, Place, again
from gradveil.core.errors import Problem, refuse
from gradveil.core.formatting import DASH, percent, plural, size
from gradveil.core.user_code import outdated
from gradveil.defences.aligned import OUTVOTING
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import FAILED, describe, load_training, opened, run, site
from gradveil.federated.training_setup import TrainingTrial, open_setting, trials
from gradveil.federated.training_state import RoundResult, Status
from gradveil.federated.update_records import UpdateRecorder
from gradveil.report.training_groups import Told, TrainingGroup, Trials, idle, kinds
from gradveil.report.training_page import accuracy, fewer, gap, rounds
from gradveil.runs.pool import cores

DIVERGED = 1
"""Exit code of a training that diverged or failed."""
_COLUMNS = ("defence", "accuracy", "to none", "rounds", "sent a round", "received a round", "s a round")
_WORDS = ("status", "proven")
_LEAST = 100
"""Columns that a table of trainings takes, its words folded."""
_HELP = {
    "run": "A run file (TOML), or the name of a bundled training: digits.",
    "rounds": "How many rounds. A finished training goes on where it ended if this is raised.",
    "out": "Where results go; by default runs/NAME.",
    "set": "Any setting of the run file: --set clients=20 --set partition.kind=column; KEY= leaves it out. Repeatable.",
    "data": "Folder where data files lie (or set GRADVEIL_DATA).",
    "record": "Keep what leaves the clients in this folder: the update as encoded, the round, the global model.",
    "record_round": "Round to record; the first if left out. Repeatable.",
    "record_client": "Number of a client to record; all if left out. Repeatable.",
    "record_truth": "Record the private images too, so that the audit can score what it recovers.",
    "threads": "Threads of each process; by default one for two cores where one process works, one where several do. "
    "The same number gives the same bits.",
    "workers": "Workers, each with a training at a time; by default one a core on a CPU (at most one a training), "
    "one on a GPU or where --threads is given.",
}


def train(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_HELP["run"])],
    rounds: Annotated[int | None, typer.Option(min=1, help=_HELP["rounds"])] = None,
    defence: Annotated[list[str] | None, typer.Option(help="Defence, instead of the file's. Repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed, instead of the file's. Repeatable.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier results and start again.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_HELP["data"])] = None,
    threads: Annotated[int | None, typer.Option(min=1, help=_HELP["threads"])] = None,
    record: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP["record"])] = None,
    record_round: Annotated[list[int] | None, typer.Option(min=1, help=_HELP["record_round"])] = None,
    record_client: Annotated[list[int] | None, typer.Option(min=0, help=_HELP["record_client"])] = None,
    record_truth: Annotated[bool, typer.Option("--record-truth", help=_HELP["record_truth"])] = False,
    workers: Annotated[int | None, typer.Option(min=1, help=_HELP["workers"])] = None,
    engine: EngineOption = Engine.processes,
    address: AddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON; progress goes to stderr.")
    ] = False,
) -> int:
    """Train a model among many clients with every defence, and say what each costs in accuracy, bytes and time.

    Every round is written down. The same command again goes on where it stopped, and ends with the same bits.
    """
    overrides: dict[str, Any] = {"rounds": rounds, "device": device, "defences": defence or None, "seeds": seed or None}
    config = read_training(name, overrides, setting or ())
    place = Place(engine, address, config.device)
    place.check(workers, record is not None)
    count = workers or (min(cores(), len(trials(config))) if config.device == "cpu" and threads is None else 1)
    # Threads that have to share a core wait for each other.
    threads = threads or (max(1, cores() // 2) if count == 1 and engine is Engine.processes else 1)
    torch.set_num_threads(threads)
    folder = out or Path("runs") / config.name
    console = Console(stderr=True, soft_wrap=True, markup=False)
    recorder = _recorder(config, record, record_round, record_client, record_truth)
    told = open_setting(config, data_dir)
    try:
        info = describe(config, again(), told.weights, told.data.identities())
        with opened(folder, info, fresh):
            schedule = place.schedule(count, threads)(site(told, data_dir, recorder))
            run(told, folder, partial(tell, console, config.rounds), schedule, recorder)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Every finished round is kept in {folder}. To go on:\n  {again()}", err=True)
        raise
    if recorder is not None:
        console.print(_recorded(recorder.folder), highlight=False)
    found = load_training(folder).trials
    summaries = [told for _, told in found if told is not None]
    code = _show(found, summaries, as_json, console)
    warn(outdated([row.get("code", {}) for row in summaries], (config.model.name, *config.defences)))
    console.print(f"Curves and costs as a page: gradveil report {shlex.quote(str(folder))}", highlight=False)
    return code


def _show(trials: Trials, summaries: Sequence[Told], as_json: bool, console: Console) -> int:
    """Print the results, say which trainings failed, and return the exit code."""
    if as_json:
        typer.echo(json.dumps(summaries, indent=1))
    else:
        wide().print(table(kinds(trials)))
    for row in summaries:
        if row["status"] == FAILED:
            told = f"{row['defence']}, seed {row['seed']}: failed: {row['failed']}"
            console.print(Text(told, style="red"))
        for doubt in _doubts(row.get("curve") or ()):
            console.print(Text(f"{row['defence']}, seed {row['seed']}: {doubt}", style="yellow"))
    return DIVERGED if any(row["status"] in ("diverged", FAILED) for row in summaries) else 0


def _doubts(curve: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say in how many rounds something was missing that the result counts on."""
    among = f"of {plural(len(curve), 'round')}"
    silent = sum(not record["clients"] and not record.get("refused") for record in curve)
    if silent:
        yield f"in {silent} {among} nobody answered"
    left = sum(bool(record.get("refused")) for record in curve)
    if left:
        yield f"in {left} {among} updates were left out that were not finite"
    spoken = [record["spoke"] for record in curve if record.get("spoke")]
    short = [said for said, wanted in spoken if said < wanted]
    if short:
        few = f", at least once {min(short)}: too few to outvote a liar" if min(short) < OUTVOTING else ""
        yield f"in {len(short)} {among} fewer clients spoke than planned{few}"


def _recorder(
    config: TrainConfig,
    folder: Path | None,
    rounds: Sequence[int] | None,
    clients: Sequence[int] | None,
    truth: bool,
) -> UpdateRecorder | None:
    """Make the recorder that the options ask for, once its folder has been looked at."""
    if folder is None:
        options = {"--record-round": rounds, "--record-client": clients, "--record-truth": truth}
        refuse(
            [Problem(name, "has nowhere to record to", "add --record DIR") for name, given in options.items() if given]
        )
        return None
    most = (("--record-round", rounds, config.rounds), ("--record-client", clients, config.clients - 1))
    refuse(
        [
            Problem(f"{option} {number}", "is not there", f"give at most {last}")
            for option, numbers, last in most
            for number in numbers or ()
            if number > last
        ]
    )
    who = None if not clients else tuple(str(client) for client in clients)
    recorder = UpdateRecorder(folder, truth=truth, rounds=tuple(rounds or (1,)), clients=who)
    recorder.ready()
    return recorder


def _recorded(folder: Path) -> str:
    """Say what lies in a record: a training that was finished before sends nothing again."""
    count = sum(1 for _ in folder.glob("round-*.safetensors"))
    if not count:
        why = "these rounds were trained before, or who is to be recorded did not answer in them"
        return f"Nothing was recorded in {folder}: {why}. Train again with --fresh, or record others."
    return f"{plural(count, 'recorded update')} in {folder}. To attack: gradveil audit RUN --observed {folder}"


def tell(console: Console, rounds: int, trial: TrainingTrial, last: RoundResult, status: Status) -> None:
    """Say in a line how a training got on."""
    parts = [f"{trial.title}, seed {trial.seed}: round {last.number} of {rounds}", f"accuracy {percent(last.accuracy)}"]
    if last.validation_loss is not None:
        parts.append(f"validation loss {last.validation_loss:.4f}")
    if not last.clients and not last.refused:
        parts.append("nobody answered")
    if last.refused:
        parts.append(f"{plural(len(last.refused), 'update')} left out: not finite")
    if last.spoke is not None and last.spoke[0] < last.spoke[1]:
        parts.append(f"only {last.spoke[0]} of {last.spoke[1]} clients spoke before it")
    ended = "" if status == "running" else f" ({status})"
    console.print(f"{', '.join(parts)}, {last.seconds:.1f} s{ended}", highlight=False)


def warn(problems: Iterable[Problem]) -> None:
    """Print what should be known and stops nothing."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    for problem in problems:
        console.print(Text(f"{problem.severity}: {problem}", style="yellow"))


def table(found: Sequence[TrainingGroup]) -> Table:
    """Lay the defences side by side; the accuracy is that after the round with the lowest validation loss."""
    out = Table(box=None, pad_edge=False)
    for title in (*_COLUMNS, *_WORDS):
        if title in ("defence", *_WORDS):
            # Folded, never cut off: two defences may differ in their last setting.
            out.add_column(title, overflow="fold")
        else:
            out.add_column(title.replace(" a ", "\na "), justify="right", no_wrap=True)
    told = "\n".join(filter(None, [idle(found), *_proofs(found)]))
    out.caption, out.caption_justify = Text(told, style="dim not italic"), "left"
    for kind in found:
        sent, received, seconds = (kind.mean(key) for key in ("bytes_up", "bytes_down", "seconds"))
        numbers = (size(sent), size(received), DASH if seconds is None else f"{seconds:.1f}")
        statuses = ", ".join(f"{count} {how}".strip() for _, count, how in kind.statuses)
        told = accuracy(kind), gap(kind) + fewer(kind), rounds(kind) or DASH
        out.add_row(kind.name, *told, *numbers, statuses, kind.proof)
    return out


def wide() -> Console:
    """Print as wide as the terminal, never narrower than the numbers: one that is folded reads as another."""
    return Console(width=max(_LEAST, Console().width) if sys.stdout.isatty() else 120, markup=False)


def _proofs(found: Sequence[TrainingGroup]) -> Iterator[str]:
    """Write out what is proven, and of what, where something is."""
    for kind in found:
        if kind.worst and kind.worst["epsilon"]:
            doubt = f". Above {MEANINGLESS:g}: no guarantee to rely on" if kind.hollow else ""
            yield f"Proven of {kind.name}: {kind.worst['guarantee']}{doubt}."
