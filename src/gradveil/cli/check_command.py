"""`gradveil check`: validate a model, data set or run file without running attacks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.shared_options import (
    BudgetOption,
    DataDirOption,
    IterationsOption,
    RestartsOption,
    TargetClientsOption,
    completed,
    described,
    named_settings,
    own_code,
)
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.formatting import listing, plural

if TYPE_CHECKING:
    from torch import nn

    from gradveil.audit.audit_config import RunConfig

FOUND = 1
"""Exit code if there are problems."""
_EXAMPLES = 4
_FEW_PUBLIC = 64
_NAMED = 3
"""Layers of a group that are named."""
_HELP = {
    "run": "A run file (TOML), or the name of a bundled run; the options win over it. Or leave it out; with --model a "
    "CSV or Parquet file will do. It may name modules (pkg.module:name), which are imported.",
    "model": "A model of `gradveil list models`, hf:NAME, timm:NAME, torchvision:NAME, or pkg.module:factory.",
    "data": "Data of `gradveil list data`, FILE.csv, texts:FILE.csv, folder:PATH, parquet:PATH or hf:NAME.",
    "size": "Side of the images after resizing. Default: 32.",
    "channels": "1 for grey, 3 for colour. Default: the channels of the data.",
    "prepare": "Try it with what cannot be attacked replaced in a copy, as gradveil audit --prepare does.",
    "batch": f"Examples per client. Default: {_EXAMPLES}.",
    "attack": "Attack whose fit is checked, such as one of your own, instead of the file's. Repeatable.",
    "set": "Any setting of a run file: --set model.options.width=32 --set client.local.lr=0.1. Repeatable.",
    "filters": "Settings of an NVFlare client or a Flower pyproject.toml: print the epsilon of its privacy filters.",
    "parameters": "With --filters: number of the model's parameters, on which the epsilon of SVTPrivacy depends.",
    "rounds": "With --filters: rounds of the training. Default: 1.",
    "received": "Parameters and buffers from a server (safetensors), to inspect for manipulation.",
    "verbose": "Print equal problems one by one, and which attacks on the update are not tried, and why.",
    "previous": "Parameters of the previous round, to detect jumps.",
}
_RUN = typer.Argument(metavar="[RUN]", help=_HELP["run"], show_default=False, autocompletion=completed("runs"))
_ATTACK = typer.Option(help=_HELP["attack"], autocompletion=completed("attacks"))
_DEFENCE = typer.Option(help="Defence to try it with. Repeatable.", autocompletion=completed("defences"))


def check(
    run: Annotated[str | None, _RUN] = None,
    model: Annotated[str | None, typer.Option(help=_HELP["model"], autocompletion=completed("models"))] = None,
    data: Annotated[str | None, typer.Option(help=_HELP["data"], autocompletion=completed("data"))] = None,
    size: Annotated[int | None, typer.Option(min=1, help=_HELP["size"])] = None,
    channels: Annotated[int | None, typer.Option(help=_HELP["channels"])] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=_HELP["batch"])] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help=_HELP["prepare"])] = False,
    defence: Annotated[list[str] | None, _DEFENCE] = None,
    attack: Annotated[list[str] | None, _ATTACK] = None,
    target_clients: TargetClientsOption = None,
    iterations: IterationsOption = None,
    restarts: RestartsOption = None,
    budget: BudgetOption = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    data_dir: DataDirOption = None,
    received: Annotated[Path | None, typer.Option(metavar="FILE", help=_HELP["received"])] = None,
    previous: Annotated[Path | None, typer.Option(metavar="FILE", help=_HELP["previous"])] = None,
    filters: Annotated[Path | None, typer.Option(metavar="FILE", help=_HELP["filters"])] = None,
    parameters: Annotated[int | None, typer.Option(min=1, help=_HELP["parameters"], show_default=False)] = None,
    rounds: Annotated[int, typer.Option(min=1, help=_HELP["rounds"], show_default=False)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the problems as JSON.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print equal problems one by one, and which attacks do not apply, and why."),
    ] = False,
) -> int:
    """Validate a model, data set, run file or the privacy filters of a project, without running attacks.

    Every problem has a place and a fix. Warnings cover differential privacy that is void or whose epsilon is
    meaningless, and models whose gradient reveals an image without any search. Exit codes: 0 the audit can run
    (warnings may be shown); 1 problems; 2 wrong use: a bad run file or option, or missing data or model.
    """
    from gradveil.audit.attack_selection import ADAPTIVE
    from gradveil.audit.attackers.run_attackers import closed_forms, decide, untried

    if filters is not None:
        return _check_filters(filters, parameters, rounds, as_json)
    from gradveil.audit.preflight import model_problems, obstacles, open_experiment
    from gradveil.audit.run_file import read
    from gradveil.audit.run_warnings import metric_problems, privacy_problems

    own_code()
    run, data = described(run, model, data)
    flags = {
        "model.name": model,
        "data.name": data,
        "data.size": size,
        "data.channels": channels,
        "client.batch": batch,
    }
    given = {"target_clients": target_clients, "iterations": iterations, "restarts": restarts, "budget": budget}
    overrides = {key: value for key, value in given.items() if value is not None}

    def configured(defences: Sequence[str]) -> RunConfig:
        settings = [
            *named_settings(flags | {"defences": [*defences] or None, "attacks": attack or None}, prepare),
            *(setting or []),
        ]
        return _alone(flags, overrides, settings) if run is None else read(run, overrides, settings)

    try:
        config = configured(defence or ())
    except GradveilError as error:
        raise _with_those_read(error, defence or (), configured, data_dir) from None
    with redirect_stdout(sys.stderr):  # Output of a user's model must not mix with the result.
        experiment = open_experiment(config, data_dir, checked=False)
        net = experiment.model(config.seeds[0])  # Raises for a model that cannot be built, which is wrong use.
        problems, unfit = obstacles(experiment)
        problems += [] if _stopped(problems) else model_problems(experiment)
        decisions = [] if _stopped(problems) else decide(experiment)
        if not _stopped(problems):
            problems += [*privacy_problems(experiment), *closed_forms(experiment, decisions)]
            problems += metric_problems(experiment)
        traces = _manipulated(net, received, previous)
        problems += traces
    if as_json:
        keys = ("where", "what", "remedy", "severity")
        typer.echo(json.dumps([{key: getattr(p, key) for key in keys} for p in problems], indent=1))
    else:
        _show(problems, net, config, run is not None, verbose)
        if ADAPTIVE in config.attacks and not _stopped(problems):
            none = {attack for _, _, attack in unfit}
            all_of_it = (*experiment.attacks, *(each.attack for each in decisions if not each.reason))
            fit = dict.fromkeys(attack for attack in all_of_it if attack not in none)
            typer.echo(f"Attacks that apply ({ADAPTIVE}): {listing(fit)}.")
        idle = [each for each in decisions if each.reason or ADAPTIVE not in config.attacks]
        if verbose and (skipped := untried(idle)):
            typer.echo("\n  ".join(("Attacks on the update that this run does not try:", *skipped)))
        if received is not None and not traces:
            typer.echo(f"No trace of manipulation in {received}: that is no proof of an honest server.")
    return FOUND if _stopped(problems) else 0


def _with_those_read(
    error: GradveilError,
    defences: Sequence[str],
    configured: Callable[[Sequence[str]], RunConfig],
    data_dir: Path | None,
) -> GradveilError:
    """Add to defences that cannot be read what is wrong with the others, which are tried without them."""
    from gradveil.audit.preflight import obstacles, open_experiment
    from gradveil.defences.paper_presets import spelled_out

    unread = {problem.where for problem in error.problems}
    try:
        places = {f"defences[{i}]": text for i, text in enumerate(spelled_out(defences))}
        left = {place: text for place, text in places.items() if place not in unread}
        if not left or not unread <= places.keys():
            return error
        found = obstacles(open_experiment(configured([*left.values()]), data_dir, checked=False)).problems
    except GradveilError:
        return error
    kept = [*left]
    told = (replace(p, where=_DEFENCE_PLACE.sub(lambda place: kept[int(place[1])], p.where)) for p in found)
    return GradveilError([*error.problems, *(problem for problem in told if problem.severity == "error")])


_DEFENCE_PLACE = re.compile(r"^defences\[(\d+)\]")


def _check_filters(path: Path, parameters: int | None, rounds: int, as_json: bool) -> int:
    """Print what the privacy filters of a project really guarantee, and what is wrong with them."""
    from gradveil.integrations.filter_settings import judge, read_filters

    found = read_filters(path)
    if parameters is None and any(settings.kind == "SVTPrivacy" for settings in found):
        what = "is missing, and the epsilon of SVTPrivacy depends on it"
        refuse([Problem("--parameters", what, "give the number of the model's parameters: --parameters 1000000")])
    judged = [judge(settings, parameters or 1, rounds) for settings in found]
    problems = [problem for each in judged for problem in each.problems]
    if as_json:
        keys = ("where", "what", "remedy", "severity")
        told = [
            {
                "where": each.filter.where,
                "filter": each.filter.kind,
                "epsilon_round": each.epsilon,
                "epsilon_total": each.over,
                "rounds": rounds,
                "defence": each.defence,
                "problems": [{key: getattr(p, key) for key in keys} for p in each.problems],
            }
            for each in judged
        ]
        typer.echo(json.dumps(told, indent=1))
        return FOUND if _stopped(problems) else 0
    for each in judged:
        typer.echo(each.line)
        for problem in each.problems:
            typer.echo(f"  {problem.severity}: {problem.where}: {problem.what}\n    -> {problem.remedy}")
        if each.defence:
            typer.echo(f'  Audit it: --defence "{each.defence}"')
    return FOUND if _stopped(problems) else 0


def _manipulated(net: nn.Module, received: Path | None, previous: Path | None) -> list[Problem]:
    """Inspect parameters, buffers and running statistics from a server for manipulation."""
    from gradveil.federated.model_inspection import inspect
    from gradveil.nn.weight_files import read_received

    if received is None:
        refuse([Problem("--previous", "has nothing to be compared with", "add --received")] if previous else [])
        return []
    now, statistics = read_received(received, net)
    before = None if previous is None else read_received(previous, net)[0]  # running statistics may jump between rounds
    return [finding.problem("error") for finding in inspect(net, now | statistics, before)]


def _alone(flags: dict[str, Any], overrides: dict[str, Any], settings: Sequence[str]) -> RunConfig:
    """Make the smallest run of this model and these data."""
    from gradveil.audit.audit_config import CHECKED_ATTACK
    from gradveil.audit.run_file import assemble
    from gradveil.data.registry import kind_of

    options = {"--model": flags["model.name"], "--data": flags["data.name"]}
    remedy = "give --model and --data, or a run file: gradveil check study.toml"
    refuse([Problem(option, "is missing", remedy) for option, value in options.items() if value is None])
    raw = {
        "name": "check",
        "data": {"public": _FEW_PUBLIC, "gallery": 1},
        "model": {},
        "attacks": [CHECKED_ATTACK[kind_of(str(flags["data.name"]))]],
        "target_clients": 1,
    }
    return assemble({**raw, "client": {"batch": _EXAMPLES}, **overrides}, settings)


def _stopped(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _of_one_kind(problems: Sequence[Problem], net: nn.Module) -> list[Problem]:
    """Put equal problems of several layers of one type, or of several other places, into one each."""
    from gradveil.core.errors import grouped
    from gradveil.nn.module_paths import called

    layers = {path: type(module).__name__ for path, module in net.named_modules() if path}
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    rest = list[Problem]()
    for problem in problems:
        key = problem.what, problem.remedy, problem.severity, layers.get(problem.where, "")
        if problem.where in layers:
            kinds.setdefault(key, []).append(problem.where)
        else:
            rest.append(replace(problem, where=called(net, problem.where)))
    several = [
        Problem(called(net, places[0]) if len(places) == 1 else _layers(kind, places), what, remedy, severity)
        for (what, remedy, severity, kind), places in kinds.items()
    ]
    return [*several, *grouped(rest)]


def _layers(kind: str, places: Sequence[str]) -> str:
    more = ", …" if len(places) > _NAMED else ""
    return f"{len(places)} {kind} layers ({', '.join(places[:_NAMED])}{more})"


def _show(problems: Sequence[Problem], net: nn.Module, config: RunConfig, whole: bool, verbose: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from gradveil.nn.module_paths import called

    console = Console(soft_wrap=True, markup=False)
    shown = [replace(problem, where=called(net, problem.where)) for problem in problems]
    grouped = shown if verbose else _of_one_kind(problems, net)
    for problem in grouped:
        style = "red" if problem.severity == "error" else "yellow"
        console.print(Text.assemble((problem.severity, style), f": {problem.where}: {problem.what}"))
        console.print(Text(f"    -> {problem.remedy}", style="green"))
    if len(grouped) < len(problems):
        console.print(Text(f"Grouped: {len(problems)} problems. Each place: --verbose.", style="dim"))
    if not _stopped(problems):
        parts = (("client", config.client), ("defence", config.defences), ("attack", config.attacks))
        counts = ", ".join(plural(len(values), name) for name, values in parts)
        ways = f", in the run '{config.name}': {counts}, {config.target_clients} target clients" if whole else ""
        outcome = "No errors" if problems else "No problems"
        console.print(Text(f"{outcome}: {config.model.name} can be audited with {config.data.name}{ways}."))
