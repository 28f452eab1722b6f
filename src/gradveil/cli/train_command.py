"""`gradveil train`: federated training with every defence; its cost in accuracy, bytes and time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.shared_options import (
    AddressOption,
    DataDirOption,
    DataOption,
    DefenceOption,
    DeviceOption,
    Engine,
    EngineOption,
    FreshOption,
    ModelOption,
    Place,
    SeedOption,
    again,
    completed,
    described,
    named_settings,
    own_code,
    run_directory,
    unnamed,
)
from gradveil.core.errors import Problem, refuse

if TYPE_CHECKING:
    from gradveil.federated.training_config import TrainConfig
    from gradveil.federated.update_records import UpdateRecorder

_HELP = {
    "run": "A run file (TOML), or the name of a bundled training: digits. Not needed with --model and --data; with "
    "--model a CSV or Parquet file will do.",
    "prepare": "Replace in a copy what per-client gradients do not know: BatchNorm, hidden dropout, in-place changes.",
    "rounds": "Number of rounds. A higher number continues a finished training.",
    "out": "The run directory. Default: runs/NAME, or runs/NAME-2 and so on for other settings.",
    "set": "Any setting of the run file: --set clients=20 --set partition.kind=column; KEY= leaves it out. Repeatable.",
    "record": "Record what the clients send in this folder: encoded updates, the round, the global model.",
    "record_round": "Round to record. Default: the first. Repeatable.",
    "record_client": "Number of a client to record. Default: all. Repeatable.",
    "record_truth": "Record the private images too, so that the audit can score what it recovers.",
    "threads": "Threads per process. Default: half the cores for one process, one for several. The same number "
    "gives bit-identical results.",
    "workers": "Worker processes, each with one training at a time. Default: one per CPU core and at most one per "
    "training; one on a GPU or with --threads.",
}


_RUN = typer.Argument(metavar="[RUN]", help=_HELP["run"], show_default=False, autocompletion=completed("runs"))


def train(
    name: Annotated[str | None, _RUN] = None,
    model: ModelOption = None,
    data: DataOption = None,
    prepare: Annotated[bool, typer.Option("--prepare", help=_HELP["prepare"])] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help=_HELP["rounds"])] = None,
    defence: DefenceOption = None,
    seed: SeedOption = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: FreshOption = False,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
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
    """Train a model among many clients with every defence, and report its cost in accuracy, bytes and time.

    Without a run file, clients train for 20 rounds of one epoch with batches of 8 and the step size 0.1.
    Every round is stored. The same command continues where it stopped, with bit-identical results. Other settings get a
    run directory of their own.
    """
    import torch
    from rich.console import Console

    from gradveil.audit.run_file import assemble_training, read_training
    from gradveil.cli import training_output
    from gradveil.core.user_code import outdated
    from gradveil.federated.training_config import UNNAMED
    from gradveil.federated.training_run import TRAINING_RUN, describe, load_training, run, site
    from gradveil.federated.training_setup import open_setting, trials
    from gradveil.runs.pool import cores

    own_code()
    name, data = described(name, model, data)
    overrides: dict[str, Any] = {"rounds": rounds, "device": device, "defences": defence or None, "seeds": seed or None}
    settings = [
        *named_settings({"model.name": model, "data.name": data}, prepare),
        *(setting or ()),
    ]
    if name is not None:
        config = read_training(name, overrides, settings)
    else:
        given = {key: value for key, value in overrides.items() if value is not None}
        config = assemble_training(unnamed("train", settings) | UNNAMED | given, settings)
    place = Place(engine, address, config.device)
    place.check(workers, record is not None)
    count = workers or (min(cores(), len(trials(config))) if config.device == "cpu" and threads is None else 1)
    # More threads than cores would wait for each other.
    threads = threads or (max(1, cores() // 2) if count == 1 and engine is Engine.processes else 1)
    torch.set_num_threads(threads)
    console = Console(stderr=True, soft_wrap=True, markup=False)
    recorder = _recorder(config, record, record_round, record_client, record_truth)
    opened_setting = open_setting(config, data_dir)
    config = opened_setting.config
    if opened_setting.note:
        console.print(opened_setting.note, highlight=False)
    info = describe(config, again(), opened_setting.weights, opened_setting.data.identities())
    problems = partial(TRAINING_RUN.problems, info=info)
    folder = run_directory(out, config.name, problems, TRAINING_RUN.exists, fresh)
    try:
        with TRAINING_RUN.opened(folder, info, fresh):
            schedule = place.schedule(count, threads)(site(opened_setting, data_dir, recorder))
            run(opened_setting, folder, partial(training_output.show_round, console, config.rounds), schedule, recorder)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Every finished round is kept in {folder}. To go on:\n  {again()}", err=True)
        raise
    if recorder is not None:
        console.print(training_output.recorded(recorder.folder), highlight=False)
    finished = load_training(folder).trials
    summaries = [summary for _, summary in finished if summary is not None]
    code = training_output.show_trainings(finished, summaries, as_json, console)
    training_output.warn(outdated([row.get("code", {}) for row in summaries], (config.model.name, *config.defences)))
    console.print(f"Curves and costs as a page: gradveil report {shlex.quote(str(folder))}", highlight=False)
    return code


def _recorder(
    config: TrainConfig,
    folder: Path | None,
    rounds: Sequence[int] | None,
    clients: Sequence[int] | None,
    truth: bool,
) -> UpdateRecorder | None:
    """Make the recorder that the options request, after a check of its folder."""
    if folder is None:
        options = {"--record-round": rounds, "--record-client": clients, "--record-truth": truth}
        refuse(
            [Problem(name, "has nowhere to record to", "add --record DIR") for name, value in options.items() if value]
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
    from gradveil.federated.update_records import UpdateRecorder

    recorded = None if not clients else tuple(str(client) for client in clients)
    recorder = UpdateRecorder(folder, truth=truth, rounds=tuple(rounds or (1,)), clients=recorded)
    recorder.ready()
    return recorder
