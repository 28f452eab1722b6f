"""Privacy filters in the settings of federated-learning projects, and their epsilon a round and over the rounds.

NVFlare's `config_fed_client.json` (or `.conf`) lists filters of tasks; a Flower `pyproject.toml` has the settings of
mods below `tool.flwr.app.config`. Nothing is imported or run: files are read as data.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gradveil.core.errors import Problem, fail
from gradveil.defences.deployed_filters import local_dp_std, svt_budget
from gradveil.theory.accounting import Participation, epsilon

LARGEST = 1 << 20
"""Bytes of a settings file at most."""
USELESS = 10.0
"""An epsilon above this is no useful guarantee."""
_LARGEST_DELTA = 0.01
"""A delta above this is no useful guarantee, with fewer than a hundred clients at least."""


@dataclass(frozen=True)
class FilterSettings:
    """A privacy filter of a project, with its arguments."""

    where: str
    """Its place in the file."""
    kind: str
    """The class, without its module."""
    arguments: Mapping[str, Any]
    tasks: tuple[str, ...] = ()
    """The tasks that it filters; empty where the file names none."""
    named: str = ""
    """How the file names the class."""


@dataclass(frozen=True)
class FilterPrivacy:
    """What a filter really guarantees."""

    filter: FilterSettings
    defence: str
    """The defence that simulates it, as a text; empty where there is none."""
    epsilon: float | None
    """Epsilon of one round, of a client's whole update; None where there is no guarantee."""
    over: float | None
    """Epsilon of all rounds."""
    rounds: int
    problems: tuple[Problem, ...]

    @property
    def line(self) -> str:
        """Say what it guarantees."""
        name = f"{self.filter.where}: {self.filter.kind}"
        if self.epsilon is None or self.over is None:
            return f"{name}: no formal guarantee"
        spread = "" if self.rounds == 1 else f", {_number(self.over)} over {self.rounds:,} rounds"
        return f"{name}: epsilon {_number(self.epsilon)} a round{spread}"


def read_filters(path: Path) -> list[FilterSettings]:
    """Read the privacy filters of a project's settings; refuse a file without any."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise fail(str(path), f"cannot be read: {error.strerror}", "name a file of settings") from error
    if len(content) > LARGEST:
        raise fail(str(path), f"is larger than {LARGEST:,} bytes", "name the file with the filters only")
    try:
        text = content.decode("utf-8")
        raw: Any = tomllib.loads(text) if path.suffix == ".toml" else _loaded(text)
    except (ValueError, RecursionError) as error:
        raise fail(str(path), f"cannot be read: {error}", "give valid JSON, or TOML in a file named *.toml") from error
    filters = list(_flower(raw) if path.suffix == ".toml" else _found(raw, ""))
    if not filters:
        known = ", ".join(_JUDGES)
        raise fail(str(path), f"has no privacy filter that is known here ({known})", "name the file with the filters")
    return filters


def judge(settings: FilterSettings, parameters: int, rounds: int) -> FilterPrivacy:
    """Compute the epsilon of a filter for a model of so many parameters, with what is wrong and what to do."""
    found = _JUDGES[settings.kind](settings, parameters, rounds)
    if "." in settings.named and settings.named.partition(".")[0] not in ("nvflare", "flwr"):
        what = f"{settings.named} is a class of the project: nothing is known of its noise"
        problem = _warning(settings, what, "audit it as a defence of your own (docs: write a defence)")
        return replace(found, defence="", epsilon=None, over=None, problems=(problem,))
    if re.search(r"(^|\.)task_data_filters\b", settings.where):
        what = "filters what the client receives: its updates leave unfiltered"
        problem = _warning(settings, what, "list it below task_result_filters")
        return replace(found, epsilon=None, over=None, problems=(problem, *found.problems))
    if settings.tasks and not {"train", "*"} & {*settings.tasks}:
        what = f"filters the tasks {', '.join(settings.tasks)} only: the results of others, such as train, leave as is"
        found = replace(found, problems=(_warning(settings, what, 'add "train" to its tasks'), *found.problems))
    return found


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_as_json(text))


_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")|(//[^\n]*|#[^\n]*)|([{}\[\],:=\n])|([^\s{}\[\],:="#]+)|([ \t\r]+)')


def _as_json(text: str) -> str:
    r"""Turn the simple part of HOCON (comments, bare words, `=`, line ends for commas) into JSON.

    >>> json.loads(_as_json("a { b = 1 # one\n c = x.Y }"))
    {'a': {'b': 1, 'c': 'x.Y'}}
    """
    out = list[str]()
    for quoted, _, sign, word, _ in _TOKEN.findall(f"{{{text}\n}}" if not text.lstrip().startswith("{") else text):
        ends = bool(out) and out[-1] not in "{[,:"
        if sign == "\n":
            out += [","] * ends
        elif sign in ("=", ":"):
            out.append(":")
        elif sign in ("}", "]"):
            while out and out[-1] == ",":
                out.pop()
            out.append(sign)
        elif sign == ",":
            out += [","] * ends
        elif sign:
            out += [":"] * (sign == "{" and ends and out[-1] not in "}]")
            out.append(sign)
        elif quoted or word:
            out.append(quoted or (word if _is_json(word) else json.dumps(word)))
    while out and out[-1] == ",":
        out.pop()
    return "".join(out)


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def _found(raw: Any, where: str, tasks: tuple[str, ...] = ()) -> Iterator[FilterSettings]:
    """Find filters anywhere below: an object whose `path` or `name` is a class that is known."""
    if isinstance(raw, dict):
        held = cast("dict[str, Any]", raw)
        listed = held.get("tasks")
        tasks = tuple(map(str, listed)) if isinstance(listed, list) else tasks
        named = held.get("path") or held.get("class_path") or held.get("name")
        kind = named.rpartition(".")[2] if isinstance(named, str) else ""
        if kind in _JUDGES:
            arguments = held.get("args") or {}
            yield FilterSettings(where, kind, arguments if isinstance(arguments, dict) else {}, tasks, str(named))
        for key, value in held.items():
            yield from _found(value, f"{where}.{key}" if where else key, tasks)
    elif isinstance(raw, list):
        for index, value in enumerate(cast("list[Any]", raw)):
            yield from _found(value, f"{where}[{index}]", tasks)


_LOCAL_DP = ("clipping_norm", "sensitivity", "epsilon", "delta")


def _flower(raw: Mapping[str, Any]) -> Iterator[FilterSettings]:
    """Find the settings of a LocalDpMod: its four arguments in one table, under their names, with any beginning."""
    place = "tool.flwr.app.config"
    config: Any = raw
    for part in place.split("."):
        config = config.get(part, {}) if isinstance(config, dict) else {}
    yield from _local_dp_of(config, place)


def _local_dp_of(config: Any, where: str) -> Iterator[FilterSettings]:
    if not isinstance(config, dict):
        return
    table = cast("dict[str, Any]", config)
    groups: dict[str, dict[str, str]] = {}
    for key, value in table.items():
        plain = key.replace("-", "_").lower()
        for name in _LOCAL_DP:
            if plain.endswith(name) and not isinstance(value, dict):
                groups.setdefault(plain.removesuffix(name), {})[name] = key
        yield from _local_dp_of(value, f"{where}.{key}")
    # Four keys with one beginning are a mod; other keys, such as an optimiser's epsilon, may end alike.
    complete = [group for group in groups.values() if len(group) == len(_LOCAL_DP)]
    for keys in complete or [_joined([*groups.values()], where)]:
        if "epsilon" in keys and len(keys) > 1:
            yield FilterSettings(where, "LocalDpMod", {name: table[key] for name, key in keys.items()})


def _joined(groups: Sequence[Mapping[str, str]], where: str) -> dict[str, str]:
    """Join keys with several beginnings, where each setting has one."""
    keys = {name: [group[name] for group in groups if name in group] for name in _LOCAL_DP}
    if keys["epsilon"] and sum(map(bool, keys.values())) > 1:
        for name, found in keys.items():
            if len(found) > 1:
                problem = f"{' and '.join(found)} may both be the {name} of a LocalDpMod"
                raise fail(where, problem, "begin the names of its four settings alike: dp-clipping-norm, dp-epsilon")
    return {name: found[0] for name, found in keys.items() if found}


def _svt(settings: FilterSettings, parameters: int, rounds: int) -> FilterPrivacy:
    """Count the selection and the values; a release budget of its own replaces noise_var."""
    values, problems = _numbers(
        settings, {"fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1, "gamma": 1e-5, "tau": 1e-6}
    )
    own = {f"epsilon_{part}": math.nan for part in ("threshold", "query", "release")}
    own = {name: value for name, value in own.items() if settings.arguments.get(name) is not None}
    budgets, wrong = _numbers(settings, own)
    if problems or wrong:
        return FilterPrivacy(settings, "", None, None, rounds, (*problems, *wrong))
    budget = svt_budget(parameters, values["fraction"], values["epsilon"], values["noise_var"])
    budget = budget._replace(**{name.removeprefix("epsilon_"): value for name, value in budgets.items()})
    selection = budget.threshold + budget.query
    if budget.total > USELESS:
        what = (
            f"epsilon = {_number(selection)} counts the selection only; the {budget.sent:,} values sent "
            f"cost {_number(budget.release)} more, so a round has epsilon {_number(budget.total)}"
        )
        fix = "set epsilon_release, or lower noise_var: the noise then drowns gamma, so add noise in training (DP-SGD)"
        problems.append(_warning(settings, what, fix))
    what = "entries that do not pass are asked again with new noise, for which no budget is counted"
    problems.append(_warning(settings, what, "read the epsilon as a lower bound of what the filter spends"))
    if not {"epsilon_threshold", "epsilon_query"} & budgets.keys():
        older = values["epsilon"] * (1 + (2 * budget.sent) ** (2 / 3)) / 2
        what = f"before NVFlare 2.8 its selection has epsilon {_number(older)}, not {_number(selection)}"
        problems.append(_warning(settings, what, "install NVFlare 2.8 or later"))
    replace = "" if settings.arguments.get("replace", True) else ", replace=false"
    values["noise_var"] = budget.release / budget.sent  # what an epsilon_release is in the simulated filter
    text = "svt(" + ", ".join(f"{name}={value:g}" for name, value in values.items()) + f"{replace})"
    return FilterPrivacy(settings, text, budget.total, budget.total * rounds, rounds, tuple(problems))


def _percentile(settings: FilterSettings, parameters: int, rounds: int) -> FilterPrivacy:
    values, problems = _numbers(settings, {"percentile": 10.0, "gamma": 0.01})
    if problems:
        return FilterPrivacy(settings, "", None, None, rounds, tuple(problems))
    share = 1 - values.get("percentile", 10.0) / 100
    what = (
        f"sends the largest {share:.0%} of the entries without noise: no epsilon, and the zeros show which are missing"
    )
    problems.append(_warning(settings, what, "add noise in training (DP-SGD), or audit it: --defence percentile"))
    text = "percentile(" + ", ".join(f"{name}={value:g}" for name, value in values.items()) + ")"
    return FilterPrivacy(settings, text, None, None, rounds, tuple(problems))


def _local_dp(settings: FilterSettings, parameters: int, rounds: int) -> FilterPrivacy:
    """Account for the noise against the change of a clipped update, 2 C where it is replaced by another one."""
    given = {"clipping_norm": math.nan, "sensitivity": math.nan, "epsilon": math.nan, "delta": math.nan}
    values, problems = _numbers(settings, given)
    if problems:
        return FilterPrivacy(settings, "", None, None, rounds, tuple(problems))
    clip, sensitivity, wanted, delta = (values[name] for name in given)
    std = local_dp_std(sensitivity, wanted, delta)
    one, every = (
        epsilon(std / clip, Participation(steps=n, rate=1, sampling="shuffled", at_most=n, delta=delta))
        for n in (1, rounds)
    )
    if sensitivity < 2 * clip:
        what = (
            f"sensitivity = {sensitivity:g} is less than 2 clipping_norm = {2 * clip:g}, the most by which one clipped "
            f"update differs from another: epsilon is {_number(one)} a round, not {wanted:g}"
        )
        problems.append(_warning(settings, what, f"set sensitivity = {2 * clip:g}"))
    if wanted >= 1:
        what = f"epsilon = {wanted:g}: the formula of the noise is proven for epsilon below 1"
        problems.append(_warning(settings, what, "set epsilon below 1, or trust the epsilon that is printed here"))
    if delta > _LARGEST_DELTA:
        what = f"delta = {delta:g}: with that probability the update may be sent as it is, whatever epsilon is"
        problems.append(_warning(settings, what, "set delta well below one over the number of clients"))
    if every > USELESS:
        what = f"over {rounds:,} rounds epsilon is {_number(every)}: no useful guarantee"
        problems.append(_warning(settings, what, "lower epsilon or the rounds: gradveil account computes the noise"))
    text = f"local-dp(clip={clip:g}, sensitivity={sensitivity:g}, epsilon={wanted:g}, delta={delta:g})"
    return FilterPrivacy(settings, text, one, every, rounds, tuple(problems))


_JUDGES: Mapping[str, Callable[[FilterSettings, int, int], FilterPrivacy]] = {
    "SVTPrivacy": _svt,
    "PercentilePrivacy": _percentile,
    "LocalDpMod": _local_dp,
}


def _numbers(settings: FilterSettings, defaults: Mapping[str, float]) -> tuple[dict[str, float], list[Problem]]:
    """Read the arguments, all of which have to be positive numbers (thresholds and percentiles may be zero)."""
    values, problems = dict[str, float](), list[Problem]()
    for name, default in defaults.items():
        value = settings.arguments.get(name, default)
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        values[name] = number
        if not math.isfinite(number) or number < 0 or (number == 0 and name not in ("tau", "percentile")):
            said = "is missing" if name not in settings.arguments else f"is {value!r}, not a positive number"
            problems.append(Problem(f"{settings.where}.{name}", said, "give a positive number", "error"))
    ends = {"fraction": 1.0, "percentile": 100.0, "delta": 1.0}
    for name, most in ends.items():
        if values.get(name, 0.0) > most or (name == "delta" and values.get(name) == most):
            problems.append(
                Problem(f"{settings.where}.{name}", f"is above {most:g}", f"give at most {most:g}", "error")
            )
    return values, problems


def _warning(settings: FilterSettings, what: str, remedy: str) -> Problem:
    return Problem(settings.where, what, remedy, severity="warning")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
