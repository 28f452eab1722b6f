"""Read a run file: every problem at once, with key, reason and allowed values."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gradveil.attacks.attack_catalogue import ALL_ATTACKS, own_attack
from gradveil.audit.attack_selection import Aim, aim, canonical, make_own, stands_for_many, without_aim
from gradveil.audit.audit_config import ClientConfig, CostPlan, RunConfig, TrainPlan
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import listing, suggestion
from gradveil.data import DATASETS
from gradveil.data.registry import FORMS, is_known, kind_of, told_by_columns
from gradveil.defences import parse
from gradveil.defences.paper_presets import spelled_out
from gradveil.federated.training_config import UNSEEN, TrainConfig
from gradveil.nn.models import ALL_MODELS


def translate(error: ValidationError, raw: Mapping[str, Any], kind: type[BaseModel]) -> Iterator[Problem]:
    """Say each thing that is wrong in our words, with its place in the file and what to do."""
    single = isinstance(raw.get("client"), dict)
    for entry in error.errors(include_url=False):
        location = list(entry["loc"])
        if single and location[:2] == ["client", 0]:
            location = ["client", *location[2:]]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        fault, context = entry["type"], entry.get("ctx", {})
        if fault == "missing":
            yield Problem(where, "is missing", _example(where))
        elif fault == "extra_forbidden":
            allowed = list(_section(kind, entry["loc"][:-1]).model_fields)
            near = get_close_matches(str(location[-1]), allowed, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"allowed here: {', '.join(allowed)}"
            if other := _of_the_other(kind, where):
                yield Problem(where, other[0], f"{other[1]}; {hint}" if near else other[1])
            else:
                yield Problem(where, "is not a setting", hint)
        elif fault == "value_error":
            yield Problem(where or "run", str(context["error"]), "change one of the two")
        else:
            what = "is empty" if fault in ("too_short", "string_too_short") else f"is {_shown(entry['input'])}"
            why = _REASONS.get(where, "") if fault == "greater_than_equal" else ""
            yield Problem(where, what, _wanted(fault, context, entry["msg"]) + why)


def _of_the_other(kind: type[BaseModel], key: str) -> tuple[str, str] | None:
    """Tell a setting of trainings in the run file of an audit, and the other way round."""
    if kind is RunConfig and key in TrainConfig.model_fields:
        attacked = "[client], for the clients that are attacked, or " if key in ClientConfig.model_fields else ""
        return "is a setting of gradveil train", f"put it below {attacked}[cost], which trains for the accuracy"
    if kind is TrainConfig and key in RunConfig.model_fields:
        return "is a setting of gradveil audit", "leave it out"
    return None


def _section(kind: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """Find the table that a location of an error lies in."""
    found = kind
    for part in location:
        if isinstance(part, str) and part in found.model_fields:
            found = next(_models(found.model_fields[part].annotation), found)
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (list, Union, UnionType) or get_args(annotation):
        for inner in get_args(annotation):
            yield from _models(inner)


_EXAMPLES = {
    "data": 'name the data: [data] name = "faces"',
    "data.name": 'name the data: name = "faces"',
    "model": 'name the model: [model] name = "lenet-zhu"',
    "model.name": 'name the model: name = "lenet-zhu"',
    "client.local.lr": "give the step size: lr = 0.1",
    "train.local.lr": "give the step size: lr = 0.1",
    "local.lr": "give the step size: lr = 0.1",
    "rounds": "say how many: --rounds 20, or in the file: rounds = 20 of a training, [cost] rounds = 20 of an audit",
}


_REASONS = {"data.size": ": images are compared by SSIM, in windows of at least 7 pixels"}
"""Why a number may not be smaller, where nobody would guess it."""


def _example(where: str) -> str:
    return _EXAMPLES.get(where, "add it")


def _wanted(kind: str, context: Mapping[str, Any], message: str) -> str:
    told: dict[str, Callable[[], str]] = {
        "too_short": lambda: "give at least 1",
        "string_too_short": lambda: "give a name",
        "greater_than_equal": lambda: f"give at least {context['ge']:g}",
        "greater_than": lambda: f"give a number above {context['gt']:g}",
        "less_than_equal": lambda: f"give at most {context['le']:g}",
        "less_than": lambda: f"give a number below {context['lt']:g}",
        "literal_error": lambda: f"allowed: {context['expected']}",
        "string_pattern_mismatch": lambda: f"it has to match {context['pattern']}",
        "int_type": lambda: "give a whole number",
        "float_type": lambda: "give a number",
        "finite_number": lambda: "give a finite number",
        "bool_type": lambda: "give true or false",
        "string_type": lambda: "give a string in quotes",
        "list_type": lambda: "give a list: [...]",
        "dict_type": lambda: "give a table",
        "model_type": lambda: "give a table: [section] with its keys",
    }
    return told.get(kind, lambda: message)()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_RUNS = {RunConfig: files("gradveil.audit") / "runs", TrainConfig: files("gradveil.federated") / "runs"}
_PAPERS = files("gradveil") / "papers"
Config = TypeVar("Config", RunConfig, TrainConfig)


def bundled(kind: type[RunConfig] | type[TrainConfig] = RunConfig) -> dict[str, str]:
    """Return the bundled run files: name to text."""
    found = [entry for entry in _RUNS[kind].iterdir() if entry.name.endswith(".toml")]
    return {entry.name.removesuffix(".toml"): entry.read_text("utf-8") for entry in sorted(found, key=lambda e: e.name)}


def of_papers(kind: type[RunConfig] | type[TrainConfig] = RunConfig) -> dict[str, str]:
    """Return the run files of papers: PAPER/RUN to text. Those of trainings are called train-*."""
    runs = [(paper.name, entry) for paper in _PAPERS.iterdir() if paper.is_dir() for entry in paper.iterdir()]
    texts = {
        f"{paper}/{entry.name.removesuffix('.toml')}": entry.read_text("utf-8")
        for paper, entry in runs
        if entry.name.endswith(".toml") and entry.name.startswith("train-") == (kind is TrainConfig)
    }
    return dict(sorted(texts.items()))


def read(
    run: str, overrides: Mapping[str, Any] | None = None, settings: Sequence[str] = (), train: bool = False
) -> RunConfig:
    """Read the run file of an audit by its path, its bundled name or PAPER/RUN.

    `overrides` replaces top-level keys, `settings` (`"client.batch=4"`) any key; both win over the file. Its table
    `train` counts only where `train` asks for it, and may be missing then. Iterations or restarts that no attack would
    take are refused: they would be ignored.
    """
    file = _raw(run, RunConfig)
    raw = _with(file, overrides)
    if train:
        raw.setdefault("train", {})
    elif unused := [setting for setting in settings if setting.strip().startswith("train")]:
        raise fail(f"--set {unused[0]}", "is of a training, and none is asked for", "add --train, or leave it out")
    config = _assemble(RunConfig, raw, settings, file)
    refuse([*_without_effect(config, overrides or {}, settings)])
    return config if train else config.model_copy(update={"train": None})


def read_training(run: str, overrides: Mapping[str, Any] | None = None, settings: Sequence[str] = ()) -> TrainConfig:
    """Read the run file of a training, or that of an audit with its table `cost` or `train`; as `read` does."""
    return _assemble(TrainConfig, _with(_trained_in(_raw(run, TrainConfig)), overrides), settings)


def _trained_in(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a training takes from an audit's run file: its data, model and defences, and how `cost` trains."""
    audited = RunConfig.model_fields.keys() - TrainConfig.model_fields.keys()
    if not raw.keys() & audited:
        return raw
    plan = next((raw[key] for key in ("train", "cost") if isinstance(raw.get(key), dict)), None)
    rounds = {} if plan is None else {"rounds": CostPlan.model_fields["rounds"].default, **plan}
    shared = {key: value for key, value in raw.items() if key not in audited | {"rounds"}}
    only_audits = TrainPlan.model_fields.keys() - TrainConfig.model_fields.keys()
    return shared | {key: value for key, value in rounds.items() if key not in only_audits}


def _raw(run: str, kind: type[RunConfig] | type[TrainConfig]) -> dict[str, Any]:
    where, text = _find(run, kind)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise fail(where, f"is not valid TOML: {error}", "correct that place; strings need quotes") from error
    raw.setdefault("name", Path(where).stem)
    return raw


def _with(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**raw, **{key: value for key, value in (overrides or {}).items() if value is not None}}


def _still_aimed(whole: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the file's attacks on those of its defences that options replaced."""
    attacks, before, after = (whole.get("attacks"), *(some.get("defences", ["none"]) for some in (file, whole)))
    if not all(isinstance(each, list) for each in (attacks, before, after)) or before == after:
        return whole
    texts, others = ([text for text in some if isinstance(text, str)] for some in (before, after))

    def goes(entry: Any) -> bool:
        if not isinstance(entry, str) or aim(entry).defence is None or entry not in file.get("attacks", ()):
            return False
        return any(map(aim(entry).meets, texts)) and not any(map(aim(entry).meets, others))

    return {**whole, "attacks": [entry for entry in attacks or () if not goes(entry)]}


def assemble(raw: Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    """Set keys (`"client.batch=4"`) among plain settings, and check the whole."""
    return _assemble(RunConfig, raw, settings)


def assemble_training(raw: Mapping[str, Any], settings: Sequence[str]) -> TrainConfig:
    """Set keys among the plain settings of a training, and check the whole."""
    return _assemble(TrainConfig, raw, settings)


def _assemble(
    kind: type[Config], raw: Mapping[str, Any], settings: Sequence[str], file: Mapping[str, Any] | None = None
) -> Config:
    """Set keys and check the whole; `file` is the run file without the options."""
    whole = _without_old_model(copy.deepcopy(dict(raw)), settings)
    for setting in settings:
        _set(whole, setting)
    if isinstance(texts := whole.get("defences"), list) and all(isinstance(text, str) for text in texts):
        whole["defences"] = spelled_out(texts)
    return _resolve(kind, whole if file is None else _still_aimed(whole, file), names=True)


def _without_old_model(whole: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Leave out the options and weights of the file's model where settings name another: they are of that model."""
    model, pairs = whole.get("model"), (setting.partition("=") for setting in settings)
    names = [text.strip().strip("\"'") for key, _, text in pairs if key.strip() == "model.name"]
    if isinstance(model, dict) and names and names[-1] not in ("", model.get("name")):
        whole["model"] = {key: value for key, value in model.items() if key not in ("options", "weights")}
    return whole


def resolve(raw: Mapping[str, Any], names: bool = True) -> RunConfig:
    """Check plain settings and return them as a configuration; refuse with every problem at once.

    `names=False` leaves the names of data, model, defences and attacks alone: the caller has the objects.

    >>> resolve({"name": "a", "data": {"name": "faces"}, "model": {"name": "lenet-zhu"}, "attacks": [],
    ...         "target_client": 3})
    Traceback (most recent call last):
    ...
    gradveil.core.errors.GradveilError: attacks: is empty -> give at least 1
    target_client: is not a setting -> did you mean 'target_clients'?
    """
    return _resolve(RunConfig, raw, names)


def _resolve(kind: type[Config], raw: Mapping[str, Any], names: bool) -> Config:
    problems: list[Problem] = []
    config = None
    try:
        config = kind.model_validate(dict(raw))
    except ValidationError as error:
        problems += translate(error, raw, kind)
    if names:
        problems += _unknown_names(raw)
    refuse(problems)
    assert config is not None
    return config


def with_defaults(
    attack: str, iterations: int | None = None, restarts: int | None = None, *, labels: str | None = None
) -> str:
    """Add the run's settings to an attack's text, where it takes them and does not set its own.

    >>> with_defaults("ig(restarts=2)", 500, 8)
    'ig(restarts=2, iterations=500)'
    >>> with_defaults("analytic", 500, 8)
    'analytic'
    """
    name, bracket, rest = attack.strip().partition("(")
    inner = rest.rstrip().removesuffix(")").strip() if bracket else ""
    for key, value in (("iterations", iterations), ("restarts", restarts), ("labels", labels)):
        said = any(part.split("=")[0].strip() == key for part in inner.split(","))
        if value is not None and _takes(name, key) and not said:
            inner = f"{inner}, {key}={value}" if inner else f"{key}={value}"
    return f"{name.strip()}({inner})" if inner else name.strip()


def _without_effect(config: RunConfig, overrides: Mapping[str, Any], settings: Sequence[str]) -> Iterator[Problem]:
    """Find iterations and restarts that were asked for where every attack says its own, or takes none."""
    said = {setting.partition("=")[0].strip(): f"--set {setting}" for setting in settings}
    said |= {key: f"--{key.replace('_', '-')} {value}" for key, value in overrides.items() if value is not None}
    for key, one in (("iterations", (1, None)), ("restarts", (None, 1))):
        if key not in said or any(
            stands_for_many(text) or with_defaults(text, *one) != with_defaults(text)
            for text in without_aim(config.attacks)
        ):
            continue
        takers = [text for text in without_aim(config.attacks) if _takes(text, key)]
        if not takers:
            yield Problem(said[key], f"changes nothing: no attack takes {key}", "leave it out, or name other attacks")
            continue
        what = f"changes nothing: every attack sets its own {key}, such as '{takers[0]}'"
        yield Problem(said[key], what, f"leave it out, or take {key} out of an attack")


def _takes(attack: str, key: str) -> bool:
    name = attack.partition("(")[0].strip()
    try:
        entry = own_attack(name) if ":" in name else ALL_ATTACKS.get(name)
    except GradveilError:
        return False  # told where the attack itself is read
    return entry is not None and any(argument.name == key for argument in entry.arguments)


_TABLE = (
    "name a model for it: gradveil {command} {name} --model {model}; or in a run file (TOML): "
    '[data] name = "{name}"; texts with labels: name = "texts:{name}"'
)
"""What to do with a table."""
_TABLE_MODELS = {"rows": "tabular-mlp --set data.label_column=COLUMN", "texts": "small-encoder"}
"""A model that fits a table, by the kind of its examples."""
_NOT_RUNS = {
    ".csv": _TABLE,
    ".parquet": _TABLE,
    ".py": 'name its model in a run file (TOML): [model] name = "{module}:NAME", a class or a function that makes it; '
    "or on the command line: gradveil audit faces --set model.name={module}:NAME",
}
"""What to do with a file that holds data or a model, by its suffix."""


def _find(run: str, kind: type[RunConfig] | type[TrainConfig]) -> tuple[str, str]:
    path = Path(run)
    if path.is_file():
        if path.suffix in _NOT_RUNS:
            facts = {"name": run, "module": path.stem, "command": "audit" if kind is RunConfig else "train"}
            try:
                kind_of_table = kind_of(told_by_columns(run))
            except GradveilError:  # told where the table is read as data
                kind_of_table = "rows"
            facts["model"] = _TABLE_MODELS.get(kind_of_table, "")
            raise fail(run, "is no run file", _NOT_RUNS[path.suffix].format(**facts))
        try:
            return run, path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise fail(run, f"cannot be read: {error}", "give a TOML file in UTF-8") from error
    named = bundled(kind)
    texts = named | of_papers(kind)
    if run in texts:
        return run, texts[run]
    other, command = (RunConfig, "audit") if kind is TrainConfig else (TrainConfig, "train")
    if "/" in run and run in of_papers(other):
        raise fail(run, f"is a run file of gradveil {command}", f"gradveil {command} {run}")
    near = get_close_matches(run, texts, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    remedy = f"{hint}bundled runs: {', '.join(named)}, and those of papers: gradveil list papers; or give a TOML file"
    raise fail(run, "is neither a file nor a bundled run", remedy)


_POINTED = re.compile(r"[-+]?(\d+\.|\.\d+)([eE][-+]?\d+)?")
"""Numbers such as .1 and 1., which TOML does not know and everybody else does."""


def _set(raw: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise fail(f"--set {setting}", "is not key=value", "write --set target_clients=4 or --set client.batch=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = float(text) if _POINTED.fullmatch(text.strip()) else text
    *parents, last = [part.strip() for part in key.split(".")]
    table = raw
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise fail(f"--set {setting}", f"'{part}' is not a table here", "set the whole key instead")
    if text.strip():
        table[last] = value
    elif table.pop(last, None) is None:
        raise fail(f"--set {setting}", f"leaves '{last}' out, and it is not set here", "leave the option out")


def _unknown_names(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Check names against their tables, entry by entry, whatever else is wrong with the file."""
    tuning = (_count(raw, "iterations"), _count(raw, "restarts"))
    for key, build in (("attacks", make_own), ("defences", partial(parse, own=True))):
        given = raw.get(key)
        entries = given if isinstance(given, list) else []
        seen: dict[tuple[str, str | None], int] = {}
        for i, entry in enumerate(entries):
            if not isinstance(entry, str) or not entry:
                continue
            attack, target = aim(entry) if key == "attacks" else Aim(entry)
            if target is not None:
                yield from unmet(f"{key}[{i}]", Aim(attack, target), raw.get("defences", ["none"]))
            if key == "attacks" and stands_for_many(attack):
                continue
            try:
                name = build(attack).name
            except GradveilError as error:
                yield from (_placed(f"{key}[{i}]", problem) for problem in error.problems)
                continue
            if key == "attacks":
                name = build(with_defaults(attack, *tuning)).name
            aims = (name, None), (name, target and canonical(target))
            if (first := next((seen[each] for each in aims if each in seen), None)) is not None:
                what = f"'{entry}' is the same as {key}[{first}] '{entries[first]}'"
                yield Problem(f"{key}[{i}]", what, "remove one of them")
            seen.setdefault(aims[-1], i)
    yield from _unknown_model(_text(raw, "model"))
    yield from _decided_elsewhere(raw)
    yield from _unknown_data(_text(raw, "data"), "observed" in raw)
    seeds = raw.get("seeds")
    if isinstance(seeds, list) and len({str(seed) for seed in seeds}) < len(seeds):
        yield Problem("seeds", f"{seeds} holds a seed twice", "give each once: more seeds are more independent runs")


def unmet(where: str, target: Aim, defences: Any) -> Iterator[Problem]:
    """Find an attack that is aimed at a defence which the run does not have."""
    texts = [text for text in defences if isinstance(text, str)] if isinstance(defences, list) else []
    if not any(map(target.meets, texts)):
        what = f"'{target.attack}' is aimed at '{target.defence}', and the run has no such defence"
        yield Problem(where, what, f"name one of its defences: {listing(texts)}" if texts else "name its defences")


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _placed(where: str, problem: Problem) -> Problem:
    return Problem(where, f"{problem.where}: {problem.what}", problem.remedy)


def _text(raw: Mapping[str, Any], section: str) -> str | None:
    table = raw.get(section)
    name = table.get("name") if isinstance(table, Mapping) else None
    return name if isinstance(name, str) and name else None


def _unknown_model(name: str | None) -> Iterator[Problem]:
    if name and ":" not in name and name not in ALL_MODELS:
        package, dot, last = name.rpartition(".")
        known = [*ALL_MODELS, *([f"{package}:{last}"] if dot else [])]
        remedy = f"{suggestion(name, known, 'gradveil list models')}; or your own as 'pkg.module:factory'"
        yield Problem("model.name", f"no model is called '{name}'", remedy)


_DECIDED = {
    "classes": "the data say how many classes there are",
    "channels": "the data say it: set data.channels",
    "size": "the data say it: set data.size",
    "generator": "initial weights are drawn from the run's seeds: set seeds",
    "name": "it is a setting of its own: set model.name",
}
"""What a model is built with that its options cannot say."""


def _decided_elsewhere(raw: Mapping[str, Any]) -> Iterator[Problem]:
    model = raw.get("model")
    options = model.get("options") if isinstance(model, Mapping) else None
    for key in options if isinstance(options, Mapping) else ():
        if key in _DECIDED:
            yield Problem(f"model.options.{key}", f"is no option: {_DECIDED[key]}", "leave it out of the options")


def _unknown_data(name: str | None, observed: bool) -> Iterator[Problem]:
    if name == UNSEEN and not observed:
        yield Problem(
            "data.name", f"'{UNSEEN}' are no data: recorded updates only are attacked without any", "name some"
        )
    if name and name != UNSEEN and not is_known(name):
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        hint = f"of your own: 'folder:{name}'; " if Path(name).exists() else hint
        yield Problem("data.name", f"no data set is called '{name}'", f"{hint}known: {', '.join((*DATASETS, *FORMS))}")
