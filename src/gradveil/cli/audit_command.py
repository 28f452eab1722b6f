"""`gradveil audit`: run, show, report, gate."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.audit.attack_selection import ATTACKERS, is_adaptive, trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import describe, run, site
from gradveil.audit.display import Screen
from gradveil.audit.experiment import Experiment
from gradveil.audit.findings import Findings, findings, print_outcome
from gradveil.audit.gate import Accepted, CountedSetting, Gate, called, gate, images_needed
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recorded_attack import NO_SCORE
from gradveil.audit.recorded_updates import open_observed, settled
from gradveil.audit.run_directory import TRAINING, Store, Trial, load_run
from gradveil.audit.run_file import assemble, read
from gradveil.audit.run_warnings import closed_forms, widened
from gradveil.audit.sources import TrainingSource
from gradveil.audit.trial import sharing
from gradveil.audit.verdict import LEVELS
from gradveil.cli.shared_options import AddressOption, Engine, EngineOption, Place, again
from gradveil.cli.train_command import table, tell, warn, wide
from gradveil.core.errors import fail
from gradveil.core.formatting import DASH, interval, listing, percent, plural
from gradveil.core.user_code import outdated
from gradveil.federated.training_config import UNSEEN
from gradveil.federated.training_run import describe as describe_training
from gradveil.federated.training_run import is_training, load_summaries, load_training, opened
from gradveil.federated.training_run import run as train
from gradveil.federated.training_run import site as train_site
from gradveil.report import write_report
from gradveil.report.pareto import as_object
from gradveil.report.training_groups import kinds
from gradveil.runs.pool import cores
from gradveil.runs.task import Scheduler, Site


def show_gate(found: Gate, page: Path) -> None:
    """Print the outcome of the gate on standard error; `page` is the report."""
    console = Console(stderr=True, markup=False, highlight=False, width=None if sys.stderr.isatty() else 120)
    limit = f"--fail-above {percent(found.limit)}"
    weakened = f"Weakened by {listing(f'--accept {each} ({each.meaning})' for each in found.accepted)}."
    if found.above:
        settings = plural(len(found.counted), "setting")
        verb = "is" if len(found.above) == 1 else "are"
        console.print(f"{limit}: failed. {len(found.above)} of {settings} {verb} above it.", style="bold red")
        console.print(above_table(found.above))
        console.print(
            f"To go on: see in {page} what was recovered, and try other defences (gradveil list defences); or raise "
            "the limit if you accept this.",
            soft_wrap=True,
        )
    if found.obstacles:
        console.print(f"{limit}: not shown. The run does not show that every rate is within it.", style="bold red")
        for obstacle in found.obstacles:
            console.print(f"  {obstacle}", soft_wrap=True)
        console.print(
            "To go on: correct these points and give the command again. Finished trials are kept, and failed ones "
            "run again.",
            soft_wrap=True,
        )
    if found.passed:
        top = max(found.counted, key=lambda one: one.upper)
        count = (
            f"{top.hits} of {plural(top.row.images, 'image')} {top.criterion}, 95% interval up to {percent(top.upper)}"
        )
        console.print(f"{limit}: passed. Of {plural(len(found.counted), 'setting')} the least sure is", soft_wrap=True)
        console.print(f"  {called(top.row)}: {count}.", soft_wrap=True)
    if (needed := images_needed(found.limit)) and not found.above:
        console.print(
            f"To show {percent(found.limit)} takes {plural(needed, 'image')} per setting with none recovered.",
            soft_wrap=True,
        )
    told = "Recovered images count, identifiable or not; where identification alone is a leak, identified ones do."
    console.print(told, soft_wrap=True)
    if found.accepted:
        console.print(weakened, style="bold yellow", soft_wrap=True)


def above_table(above: Sequence[CountedSetting]) -> Table:
    """Lay out the settings above a limit, each at the trial with its highest rate."""
    rows = [one.row for one in above]
    settings = len({(row.seed, row.setting.client) for row in rows}) > 1
    trained = any(row.setting.trained is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("defence", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for title in ("attack", *(("seed", "client") if settings else ()), *(("round",) if trained else ())):
        table.add_column(title, overflow="fold")
    table.add_column("attacker", no_wrap=True)
    for title in ("images", "95% CI", "baseline"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in above:
        row = one.row
        where = [str(row.seed), row.setting.client] if settings else []
        where += [str(row.setting.trained)] if trained else []
        count = f"{one.hits}/{row.images} {percent(one.rate)} {one.criterion}"
        ends = interval(*one.ends)
        label = LEVELS[one.verdict.level][0].upper()
        guess = DASH if one.baseline is None else f"{percent(one.baseline)} {one.criterion}"
        if leak := one.leak:  # a count below its own baseline is not why it leaks
            count += f"\nleak: {leak.observed}/{leak.images} {percent(leak.observed / leak.images)} {leak.criterion}"
            guess += f"\n{percent(leak.baseline)} {leak.criterion}"
        table.add_row(row.defence, label, row.attack, *where, ATTACKERS[row.attacker][0], count, ends, guess)
    return table


FAILED_TRIAL, ABOVE = 1, 3
"""Exit codes for a run with a failed trial (or a gate that nobody can judge), and for one above `--fail-above`."""
_HELP = {
    "run": "A run file (TOML), or the name of a bundled run: faces, digits, patches. Needed without --observed. "
    "It may name modules (pkg.module:name), which are imported.",
    "observed": "Attack recorded updates (of gradveil train --record, a Recorder, the Flower mod) instead of simulated "
    "ones: model, client and defences are what attackers believe; what is not said is taken from the records.",
    "iterations": "Iterations of every attack whose own text does not say it.",
    "restarts": "Restarts of every attack whose own text does not say it.",
    "budget": "What all attacks on one defence may spend together: target-iterations (64000) or time (90s, 10m, 2h).",
    "out": "The run directory; by default runs/NAME.",
    "set": "Any setting of the run file: --set client.batch=4 --set 'data.size=64'; KEY= leaves it out. Repeatable.",
    "fail": "A gate for CI: exit with code 3 if more than this share of images is recovered behind a defence (0 to 1), "
    "with 1 if the run does not show that all shares are within it.",
    "accept": "Weaken --fail-above: few-images compares rates instead of the ends of their intervals; inconclusive and "
    "not-tested let such settings pass by their rate. Repeatable.",
    "control": "Leave out the short undefended control, which shows that the attacks work. It runs where the defences "
    "hold no undefended client.",
    "train": "Train with every defence first, as the table \\[train] says, and attack its clients at chosen rounds.",
    "data": "Folder where data files lie (or set GRADVEIL_DATA).",
    "workers": "Workers of one thread each; by default one a core on a CPU, one on a GPU.",
}
EveryOption = Annotated[bool, typer.Option("--all", help="Show every trial too, not only the strongest of each.")]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Define the words and columns of the tables.")]


class Detail(NamedTuple):
    """How much of the results is printed."""

    every: bool = False
    explain: bool = False


def audit(
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help=_HELP["run"], show_default=False)] = None,
    target_clients: Annotated[
        int | None, typer.Option("--target-clients", "--victims", help="Number of clients to attack.")
    ] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Attack, instead of the file's. Repeatable.")] = None,
    defence: Annotated[list[str] | None, typer.Option(help="Defence, instead of the file's. Repeatable.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help=_HELP["iterations"])] = None,
    restarts: Annotated[int | None, typer.Option(min=1, help=_HELP["restarts"])] = None,
    budget: Annotated[str | None, typer.Option(metavar="AMOUNT", help=_HELP["budget"])] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed, instead of the file's. Repeatable.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    observed: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP["observed"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier results and start again.")] = False,
    no_control: Annotated[bool, typer.Option("--no-control", help=_HELP["control"])] = False,
    no_images: Annotated[bool, typer.Option("--no-images", help="Keep scores only, no private images.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    fail_above: Annotated[float | None, typer.Option(metavar="RATE", min=0, max=1, help=_HELP["fail"])] = None,
    accept: Annotated[list[Accepted] | None, typer.Option(metavar="WHAT", help=_HELP["accept"])] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_HELP["data"])] = None,
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
    """Attack a client's updates, with every defence, and say what comes back.

    The updates are simulated with the run's data, or were recorded when they left real clients (--observed).

    Options win over the run file. The same command again goes on where it stopped; finished trials are not run twice.
    """
    lists = {"attacks": attack or None, "defences": defence or None, "seeds": seed or None}
    overrides: dict[str, Any] = {"target_clients": target_clients, "device": device, **lists}
    overrides |= {"iterations": iterations, "restarts": restarts, "budget": budget}
    settings = [*([f"observed.folder={json.dumps(str(observed))}"] if observed else []), *(setting or [])]
    switched = {key: False for key, off in (("images", no_images), ("control", no_control)) if off}
    config = _read(name, observed, overrides | switched, settings, trained)
    if config.observed is not None:
        config = settled(config, data_dir)
    _check_gate(config, data_dir, fail_above, accept or ())
    folder = out or Path("runs") / config.name
    switches = ("--train", trained), ("--no-control", no_control), ("--no-images", no_images)
    flags = [flag for flag, on in switches if on]
    command = _command(name, overrides, settings, flags)
    with redirect_stdout(sys.stderr):  # What a user's model prints must not mix with the results.
        place = Place(engine, address, config.device)
        place.check(workers)
        experiment, warnings = _opened(config, folder, data_dir)
        trials = _run(experiment, warnings, folder, fresh, data_dir, workers, place, command)
    _show(trials, experiment.config, as_json, folder, Detail(every, explain))
    _warn_of_code(trials, config, folder / TRAINING if trained else None)
    return _judge(trials, folder, as_json, fail_above, accept or ())


def _check_gate(config: RunConfig, data_dir: Path | None, fail_above: float | None, accept: Sequence[Accepted]) -> None:
    """Refuse a gate that has nothing to judge, and a weakened one that is not there."""
    if accept and fail_above is None:
        raise fail("--accept", "weakens a gate, and there is none", "add --fail-above RATE, or leave it out")
    if config.observed is not None and fail_above is not None and not open_observed(config, data_dir).scored:
        raise fail("--fail-above", f"has nothing to compare: {NO_SCORE}", "record the truth, or leave it out")


def _warn_of_code(trials: Sequence[Trial], config: RunConfig, training: Path | None) -> None:
    """Warn of results that were made with other versions of the user's code."""
    made = [trial.info.get("code", {}) for trial in trials]
    made += [summary.get("code", {}) for summary in load_summaries(training)] if training else []
    warn(outdated(made, (config.model.name, *config.defences, *config.attacks)))


def _judge(
    trials: Sequence[Trial], folder: Path, as_json: bool, fail_above: float | None, accepted: Sequence[Accepted]
) -> int:
    """Write the report; say what the gate comes to, and return the exit code."""
    page = write_report(folder)
    Console(stderr=as_json, soft_wrap=True, markup=False).print(f"Report: {page}")
    if fail_above is not None:
        found = gate(load_run(folder), fail_above, accepted)
        show_gate(found, page)
        return 0 if found.passed else ABOVE if found.above else FAILED_TRIAL
    return FAILED_TRIAL if any(trial.broken for trial in trials) else 0


def _read(
    name: str | None, observed: Path | None, overrides: dict[str, Any], settings: Sequence[str], trained: bool
) -> RunConfig:
    """Read the run file; recorded updates need none: what is not an option is as the records say."""
    if observed is not None and trained:
        raise fail("--train", "does not go with --observed: those updates were made elsewhere", "leave out one of them")
    if name is not None:
        config = read(name, overrides, settings, trained)
        if config.observed is not None and config.train is not None:
            raise fail(
                "observed", "does not go with a training: those updates were made elsewhere", "leave out --train"
            )
        return config
    if observed is None:
        remedy = "name a run file or a bundled run: gradveil audit faces; or say --observed DIR"
        raise fail("RUN", "is missing", remedy)
    raw = {"name": "observed", "data": {"name": UNSEEN}, "model": {}, "attacks": ["ig(labels=restore)"]}
    return assemble(raw | {key: value for key, value in overrides.items() if value is not None}, settings)


def _opened(config: RunConfig, folder: Path, data_dir: Path | None) -> tuple[Experiment, list[str]]:
    """Open what the run needs; say what was added to its attacks, and return what should have been."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    experiment = open_experiment(config, data_dir, trained=folder / TRAINING)
    if any(is_adaptive(text) for text in config.attacks):
        experiment, added = widened(experiment)
        for told in added:
            console.print(Text(told))
    warnings = [str(problem) for problem in closed_forms(experiment)]
    for told in warnings:
        console.print(Text(f"warning: {told}", style="yellow"))
    return experiment, warnings


def _run(
    experiment: Experiment,
    warnings: Sequence[str],
    folder: Path,
    fresh: bool,
    data_dir: Path | None,
    workers: int | None,
    place: Place,
    command: str,
) -> list[Trial]:
    """Run what is not there yet; return every trial of the run."""
    config = experiment.config
    on_cpu = config.device == "cpu"
    count = workers or (cores() if on_cpu else 1)
    if on_cpu:
        # One thread here as in a worker: the same sums in the same order.
        torch.set_num_threads(1)
    share = config.target_clients if len(trials(config)) >= count else -(-config.target_clients // count)
    try:
        info = describe(config, share, command, experiment.held, sharing(experiment), warnings, experiment.images)
        with Store(folder).open(info, fresh) as store:
            share = store.info()["share"]
            at = place.schedule(count)
            _train(experiment, folder / TRAINING, data_dir, at, command)
            with Screen(Console(stderr=True, markup=False)) as screen:
                run(experiment, store, screen, share, at(site(experiment, data_dir)))
    except KeyboardInterrupt:
        finished = f"Finished trials are kept in {folder}." if (folder / "run.json").is_file() else "Nothing was lost."
        # Not by the console: what it was printing when it was interrupted, it would print once more.
        typer.echo(f"\nStopped. {finished} To go on, run the same command again:\n  {again()}", err=True)
        raise
    return load_run(folder).trials


def _train(
    experiment: Experiment, folder: Path, data_dir: Path | None, at: Callable[[Site], Scheduler], command: str
) -> None:
    """Train what is not trained yet of what the audit looks at, and keep where it stood."""
    plan, console = experiment.config.train, Console(stderr=True, soft_wrap=True, markup=False)
    if plan is None or not isinstance(experiment.source, TrainingSource):
        return
    setting = experiment.source.setting
    schedule = at(train_site(setting, data_dir))
    with opened(folder, describe_training(setting.config, command, setting.weights, setting.data.identities())):
        train(setting, folder, partial(tell, console, plan.rounds), schedule, at=plan.stages)


def _command(name: str | None, overrides: dict[str, Any], settings: Sequence[str], flags: Sequence[str]) -> str:
    """Write the command that makes this run, without the folders of this machine."""
    words = ["gradveil", "audit", *([] if name is None else [Path(name).name if Path(name).is_file() else name])]
    names = {"attacks": "--attack", "defences": "--defence", "seeds": "--seed"}
    for key, value in overrides.items():
        for one in value if isinstance(value, list) else [value] if value is not None else []:
            words += [names.get(key, f"--{key.replace('_', '-')}"), str(one)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join([*words, *flags])


def _show(trials: Sequence[Trial], config: RunConfig, as_json: bool, folder: Path, shown: Detail) -> None:
    if not trials:
        raise fail("audit", "has no results", "run it again")
    if as_json:
        typer.echo(json.dumps(as_object([findings(trials)]), indent=1))
    else:
        show_outcome(findings(trials), config.resolved(), folder, shown)


def show_outcome(found: Findings, config: Mapping[str, Any], folder: Path | None, shown: Detail) -> None:
    """Print the results of a run with this resolved configuration; where there is no terminal, 120 columns wide."""
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    print_outcome(console, found, config, every=shown.every, explain=shown.explain)
    if config.get("train") and folder is not None and is_training(folder / TRAINING):
        console.print("Training", style="bold")
        wide().print(table(kinds(load_training(folder / TRAINING).trials)))
