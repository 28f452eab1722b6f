"""What `gradveil audit` does: reads, opens, runs, judges."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from gradveil.audit.attack_selection import ADAPTIVE, auto_budget, trials, without_aim
from gradveil.audit.attackers.run_attackers import Decision, choice_of, decide, widened
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import OpenedRun, RoundReport, opened_run
from gradveil.audit.experiment import Experiment
from gradveil.audit.findings import findings_of
from gradveil.audit.gate import Accepted, gate
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recorded.recorded_attack import NO_SCORE
from gradveil.audit.recorded.recorded_updates import open_observed
from gradveil.audit.run_directory import AUDIT, load_run
from gradveil.audit.run_file import assemble, read
from gradveil.cli.audit_output import show_gate, show_outcome
from gradveil.cli.exports import Exports, check_accepted
from gradveil.cli.shared_options import Detail, again, run_directory, unnamed
from gradveil.cli.training_output import show_round, warn
from gradveil.core.errors import fail
from gradveil.core.formatting import plural
from gradveil.core.user_code import outdated
from gradveil.data.registry import kind_of
from gradveil.federated.training_config import UNSEEN
from gradveil.federated.training_run import load_summaries
from gradveil.report import write_report
from gradveil.report.outcomes import outcome_of
from gradveil.report.pareto import as_object


def check_gate(config: RunConfig, data_dir: Path | None, fail_above: float | None, accept: Sequence[Accepted]) -> None:
    """Reject --accept without a gate, and a gate on updates without ground truth."""
    check_accepted(fail_above, accept)
    if config.observed is not None and fail_above is not None and not open_observed(config, data_dir).scored:
        raise fail("--fail-above", f"has nothing to compare: {NO_SCORE}", "do one of the two, or leave it out")


def warn_of_code(folder: Path, config: RunConfig, training: Path | None) -> None:
    """Warn of results computed with other versions of custom code."""
    versions = [trial.info.get("code", {}) for trial in load_run(folder).trials]
    versions += [summary.get("code", {}) for summary in load_summaries(training)] if training else []
    warn(outdated(versions, (config.model.name, *config.defences, *without_aim(config.attacks))))


def judge(folder: Path, as_json: bool, fail_above: float | None, accepted: Sequence[Accepted], exports: Exports) -> int:
    """Write the report and the files for CI, print the outcome of the gate, and return the exit code."""
    page = write_report(folder)
    Console(stderr=as_json, soft_wrap=True, markup=False).print(f"Report: {page}")
    run = load_run(folder)
    held = None if fail_above is None else gate(run, fail_above, accepted)
    if held is not None:
        show_gate(held, page)
    outcome = outcome_of(run, held)
    exports.write([outcome])
    return outcome.exit_code


def read_config(
    name: str | None, observed: Path | None, overrides: dict[str, Any], settings: Sequence[str], trained: bool
) -> RunConfig:
    """Read the run file. Recorded updates need none: missing settings come from the records."""
    if observed is not None and trained:
        raise fail("--train", "does not go with --observed: those updates were made elsewhere", "leave out one of them")
    if name is not None:
        config = read(name, overrides, settings, trained)
        if config.observed is not None:  # where they were trained, their accuracy was measured
            config = config.model_copy(update={"cost": None})
        if config.observed is not None and config.train is not None:
            raise fail(
                "observed", "does not go with a training: those updates were made elsewhere", "leave out --train"
            )
        return _within_minutes(config)
    raw: dict[str, Any] = {"name": "observed", "data": {"name": UNSEEN}, "model": {}}
    if observed is not None:
        raw["attacks"] = ["ig(labels=restore)"]
    else:
        raw = unnamed("audit", settings, "; or add --observed DIR")
        # Nothing says where a text model of the user has the attention that the usual search solves for.
        if ":" in raw["model"]["name"] and kind_of(raw["data"]["name"]) == "texts":
            raw["attacks"] = [ADAPTIVE]
    config = assemble(raw | {key: value for key, value in overrides.items() if value is not None}, settings)
    return config if observed is not None else _within_minutes(config)


def _within_minutes(config: RunConfig) -> RunConfig:
    """Give a custom model, whose cost nobody knows, the budget of a few minutes, if none is set."""
    if ":" in config.model.name and "budget" not in config.model_fields_set:
        return config.model_copy(update={"budget": auto_budget(config.attacks, config.iterations)})
    return config


def open_run(config: RunConfig, data_dir: Path | None) -> tuple[Experiment, list[Decision]]:
    """Open the experiment, print the attacks added to it, and return what the table of attackers decides of it."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    experiment = open_experiment(config, data_dir)
    if (fewer := experiment.config.target_clients) < config.target_clients:
        some = experiment.space.words.plural
        console.print(
            f"{plural(fewer, 'target client')} instead of {config.target_clients}: "
            f"'{config.data.name}' has no more {some} for them (--target-clients asks for fewer)"
        )
    decisions = decide(experiment)
    if (joins := choice_of(config)) is not None:
        experiment, decisions, added = widened(experiment, decisions, joins)
        for line in added:
            console.print(Text(line))
    return experiment, decisions


def describe_run(experiment: Experiment, decisions: Sequence[Decision], workers: int, command: str) -> OpenedRun:
    """Describe a run as its files do."""
    config = experiment.config
    if config.device == "cpu":
        # One thread, as in a worker, adds in the same order.
        torch.set_num_threads(1)
    share = config.target_clients if len(trials(config)) >= workers else -(-config.target_clients // workers)
    return opened_run(experiment, decisions, share, command)


def choose_folder(opened: OpenedRun, out: Path | None, fresh: bool) -> Path:
    """Choose the run directory, see `run_directory`."""
    return run_directory(out, opened.experiment.config.name, opened.problems, AUDIT.exists, fresh)


def heard_rounds(config: RunConfig) -> RoundReport | None:
    """Print each round of a training under attack; of others a line at the end is enough."""
    if config.train is None:
        return None
    return partial(show_round, Console(stderr=True, soft_wrap=True, markup=False), config.train.rounds)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Say how to go on, if the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        finished = f"Finished trials are kept in {folder}." if (folder / "run.json").is_file() else "Nothing was lost."
        # Not by the console, which would repeat the output that was interrupted.
        typer.echo(f"\nStopped. {finished} To go on, run the same command again:\n  {again()}", err=True)
        raise


def command_of(name: str | None, overrides: dict[str, Any], settings: Sequence[str], flags: Sequence[str]) -> str:
    """Return the command that reproduces this run, without paths of this machine."""
    words = ["gradveil", "audit", *([] if name is None else [Path(name).name if Path(name).is_file() else name])]
    names = {"attacks": "--attack", "defences": "--defence", "seeds": "--seed"}
    for key, value in overrides.items():
        for each in value if isinstance(value, list) else [value] if value is not None else []:
            words += [names.get(key, f"--{key.replace('_', '-')}"), str(each)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join([*words, *flags])


def show_trials(opened: OpenedRun, as_json: bool, folder: Path, shown: Detail) -> None:
    """Print the results of a run directory as text or JSON."""
    run = load_run(folder)
    if not run.trials:
        raise fail("audit", "has no results", "run it again")
    warnings = opened.info["warnings"]
    if as_json:
        typer.echo(json.dumps(as_object([findings_of(run)]), indent=1))
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)
    else:
        info = {"config": opened.experiment.config.resolved(), "warnings": warnings}
        show_outcome(findings_of(run), info, folder, shown, ran=True)
