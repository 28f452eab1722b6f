"""`gradveil audit`: its options and steps in order. Its help loads no torch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradveil.cli.shared_options import (
    AcceptOption,
    AddressOption,
    AttackOption,
    BudgetOption,
    DataDirOption,
    DataOption,
    DefenceOption,
    Detail,
    DeviceOption,
    Engine,
    EngineOption,
    EveryOption,
    ExplainOption,
    FailAboveOption,
    FreshOption,
    IterationsOption,
    JunitOption,
    ModelOption,
    Place,
    RestartsOption,
    SarifOption,
    SeedOption,
    TargetClientsOption,
    completed,
    described,
    named_settings,
    own_code,
)

_HELP = {
    "run": "A run file (TOML), or the name of a bundled run: faces, digits, patches, census, reviews. Needed "
    "without --observed or --model and --data; with --model a CSV or Parquet file will do. It may name modules "
    "(pkg.module:name), which are imported.",
    "observed": "Attack recorded updates (of gradveil train --record, a Recorder, the Flower mod) instead of simulated "
    "ones: the attacks assume this model, client and defences; missing settings come from the records.",
    "prepare": "Replace in a copy what cannot be attacked: BatchNorm, hidden dropout, in-place operations.",
    "out": "The run directory. Default: runs/NAME, or runs/NAME-2 and so on for other settings.",
    "set": "Any setting of the run file: --set client.batch=4 --set 'data.size=64'; KEY= removes it. Repeatable.",
    "control": "Skip the short undefended control, which shows that the attacks work. It runs if no defence is none.",
    "train": "Train with every defence first, with the settings of \\[train], and attack its clients at chosen rounds.",
    "workers": "Single-threaded worker processes. Default: one per CPU core, or one on a GPU.",
}

_RUN = typer.Argument(metavar="[RUN]", help=_HELP["run"], show_default=False, autocompletion=completed("runs"))


def audit(
    name: Annotated[str | None, _RUN] = None,
    target_clients: TargetClientsOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    prepare: Annotated[bool, typer.Option("--prepare", help=_HELP["prepare"])] = False,
    attack: AttackOption = None,
    defence: DefenceOption = None,
    iterations: IterationsOption = None,
    restarts: RestartsOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    observed: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP["observed"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: FreshOption = False,
    no_control: Annotated[bool, typer.Option("--no-control", help=_HELP["control"])] = False,
    no_images: Annotated[bool, typer.Option("--no-images", help="Keep scores only, no private images.")] = False,
    device: DeviceOption = None,
    fail_above: FailAboveOption = None,
    accept: AcceptOption = None,
    sarif: SarifOption = None,
    junit: JunitOption = None,
    data_dir: DataDirOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help=_HELP["workers"])] = None,
    engine: EngineOption = Engine.processes,
    address: AddressOption = None,
    trained: Annotated[bool, typer.Option("--train", help=_HELP["train"])] = False,
    every: EveryOption = False,
    explain: ExplainOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print verdict, settings and trials as JSON; progress goes to stderr.")
    ] = False,
) -> int:
    """Attack the updates of clients with every defence, and report what attackers recover.

    The updates are simulated with the run's data, or recorded from real clients (--observed).

    Options override the run file. The same command continues where it stopped and repeats no finished trial. Other
    settings get a run directory of their own.
    """
    from gradveil.audit.gate import Accepted
    from gradveil.audit.recorded.recorded_updates import settled
    from gradveil.audit.run_directory import TRAINING
    from gradveil.cli import audit_steps
    from gradveil.cli.exports import Exports
    from gradveil.runs.pool import cores

    own_code()
    name, data = described(name, model, data)
    accepted = [Accepted(each) for each in accept or ()]
    lists = {"attacks": attack or None, "defences": defence or None, "seeds": seed or None}
    overrides: dict[str, Any] = {"target_clients": target_clients, "device": device, **lists}
    overrides |= {"iterations": iterations, "restarts": restarts, "budget": budget}
    named = {"observed.folder": None if observed is None else str(observed), "model.name": model, "data.name": data}
    settings = [*named_settings(named, prepare), *(setting or [])]
    switched = {key: False for key, off in (("images", no_images), ("control", no_control)) if off}
    config = audit_steps.read_config(name, observed, overrides | switched, settings, trained)
    if config.observed is not None:
        config = settled(config, data_dir)
    audit_steps.check_gate(config, data_dir, fail_above, accepted)
    exports = Exports(sarif, junit, Path(name) if name and Path(name).is_file() else None)
    exports.check()
    switches = ("--train", trained), ("--no-control", no_control), ("--no-images", no_images)
    flags = [flag for flag, on in switches if on]
    command = audit_steps.command_of(name, overrides, settings, flags)
    with redirect_stdout(sys.stderr):  # Output of a user's model must not mix with the results.
        place = Place(engine, address, config.device)
        place.check(workers)
        experiment, decisions = audit_steps.open_run(config, data_dir)
        count = workers or (cores() if config.device == "cpu" else 1)
        opened = audit_steps.describe_run(experiment, decisions, count, command)
        folder = audit_steps.choose_folder(opened, out, fresh)
        with audit_steps.resumable(folder):
            console, at = Console(stderr=True, markup=False), place.schedule(count)
            opened.finish(folder, console, fresh, at, data_dir, audit_steps.heard_rounds(config))
    audit_steps.show_trials(opened, as_json, folder, Detail(every, explain))
    audit_steps.warn_of_code(folder, config, folder / TRAINING if trained else None)
    return audit_steps.judge(folder, as_json, fail_above, accepted, exports)
