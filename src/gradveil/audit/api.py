"""From Python: an audit of any module with one batch of private examples, and one attack on one update."""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.attacks.protocol import Attack
from gradveil.audit.argument_checks import (
    class_names,
    model_problems,
    prepared,
    wrong_arguments,
    wrong_objects,
)
from gradveil.audit.attack_selection import (
    aim,
    attacks_against,
    auto_budget,
    make_own,
    nothing_to_try,
    stands_for_many,
    without_aim,
)
from gradveil.audit.attackers.run_attackers import Decision, choice_of_texts, decide, widened
from gradveil.audit.audit_config import FIRST_SEARCH, RunConfig
from gradveil.audit.audit_run import opened_run
from gradveil.audit.defence_costs import Costs, DefenceCost, costs_of
from gradveil.audit.experiment import Experiment
from gradveil.audit.findings import Findings, findings, print_outcome, undone
from gradveil.audit.preflight import others, unobstructed
from gradveil.audit.recommendation import Recommendation
from gradveil.audit.run_directory import Trial, load_run
from gradveil.audit.run_file import resolve, unmet, with_defaults
from gradveil.audit.sources import training_config
from gradveil.audit.verdict import Verdict
from gradveil.client import Local, usual_loss
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.given_objects import named
from gradveil.core.space import Space
from gradveil.core.types import Loss
from gradveil.data import Dataset, Splits
from gradveil.data.given_examples import Examples, column_names, tensors_of
from gradveil.data.given_rows import are_vectors, space_of_vectors
from gradveil.data.pixel_range import Bounds, pixel_statistics
from gradveil.data.text_arguments import text_arguments
from gradveil.defences import Defence, parse
from gradveil.federated.training_api import local_settings
from gradveil.federated.training_setup import TrainingSetting, device_problems, setting_problems
from gradveil.nn.token_layout import TokenModel

_ARGUMENTS = {
    "client[0]": "client_batch",
    "client[0].batch": "client_batch",
    "client[0].members": "members",
    "client[0].local": "local",
    "seeds[0]": "seed",
    "model.prepare": "prepare",
}


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of an audit. `print(result)` shows the verdict and one row per defence, a notebook pictures too."""

    trials: list[Trial]
    path: Path
    """The run directory; a temporary one is removed together with the result."""
    write_report: Callable[[Path, Path], Path]
    draw_figure: Callable[..., Any]
    config: Mapping[str, Any]
    """Every setting of the run."""
    warnings: tuple[str, ...] = ()
    """What the attacks of this run leave out: an image that comes back in closed form."""
    as_html: Callable[[Result], str] | None = None
    costs: Costs = field(default_factory=dict[str, DefenceCost])
    """What the trainings of the run say that each defence costs."""
    command: str = "gradveil.audit(...)"
    undone: int = 0
    """The number of trials that are not done."""

    @cached_property
    def findings(self) -> Findings:
        """Everything that the surfaces show: verdicts, settings and trials as plain objects, the control."""
        return findings(self.trials, self.costs, self.command, self.undone)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdict on every defence in every setting."""
        return self.findings.verdicts

    @property
    def verdict(self) -> str:
        """The verdict on the whole run in a sentence."""
        return self.findings.sentence

    @property
    def recommendation(self) -> Recommendation | None:
        """The defence to use with its cost, or what to try next; None for a run without a defence."""
        return self.findings.recommendation

    def summary(self) -> list[dict[str, Any]]:
        """Return one flat object per trial."""
        return self.findings.trials

    def report(self, path: Path | str | None = None) -> Path:
        """Write the report as one HTML file, by default into the run directory; return its path."""
        return self.write_report(self.path, Path(path) if path else self.path / "report.html")

    def plot(self, kind: str = "grid", **choices: Any) -> Any:
        """Draw a figure for a paper and return it as a matplotlib Figure, which a notebook shows.

        `kind` is grid, pareto, curve or layers; the choices are those of `gradveil.report.figures.draw_figure`: `ax`,
        `out`, `metric`, `against`, `defences`, `attacks`, `targets`, `order`, `labels`, `headers`, `title`, `size`,
        `font`, `dpi`. It needs the extra `plot`.
        """
        return self.draw_figure([self.path], kind, **choices)

    def __str__(self) -> str:
        """Render the verdict, its table and what limits it, as wide as the terminal, or 120 columns without one."""
        width = min(120, get_terminal_size().columns) if sys.stdout.isatty() else 120
        # In a notebook, a captured console would still show an empty output.
        console = Console(width=width, force_terminal=True, force_jupyter=False, color_system=None)
        with console.capture() as capture:
            print_outcome(console, self.findings, self.config, warnings=self.warnings, more=_MORE)
        return capture.get().rstrip()

    def __repr__(self) -> str:
        """Name the verdict and the run directory in a line."""
        return f"Result({self.verdict!r}, trials={len(self.trials)}, path={str(self.path)!r})"

    def _repr_html_(self) -> str | None:
        return None if self.as_html is None else self.as_html(self)


_CALL = Result.command
"""The command that a run from Python records."""
_MORE = "More: result.report() writes a page with pictures, reasons and definitions; result.summary() has each trial."


_TARGET_CLIENTS = 8
"""Target clients of a data set or loader, if the caller does not say how many."""
_SPEAKERS = 1
"""Clients besides the target clients for whom a data set or loader is read: a defence may let one speak."""


def opened(folder: Path, **surfaces: Any) -> Result:
    """Return the result of an audit on disk, finished or not; `surfaces` write its report, figures and pictures."""
    run = load_run(folder)
    facts = {"costs": costs_of(run), "command": str(run.info.get("command", "")), "undone": undone(run)}
    warnings = tuple(run.info.get("warnings", ()))
    return Result(run.trials, folder, config=run.info["config"], warnings=warnings, **facts, **surfaces)


def audit_model(
    model: nn.Module,
    examples: Examples,
    loss: Loss | None,
    defences: Sequence[str | Defence],
    attacks: Sequence[str | Attack] | None,
    *,
    write_report: Callable[[Path, Path], Path],
    as_html: Callable[[Result], str] | None = None,
    draw_figure: Callable[..., Any],
    client_batch: int = 1,
    local: Local | Mapping[str, Any] | None = None,
    members: int = 1,
    tokenizer: Any = None,
    length: int | None = None,
    bounds: Bounds = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    public: Any = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Attack a model of the caller on a batch of the caller's. `gradveil.audit` says what the arguments mean."""
    space = examples.example if isinstance(examples, Dataset) else None
    if isinstance(examples, Dataset) and space is None and mean is None and std is None and bounds is None:
        mean, std = examples.mean, examples.std
    wanted = settings.get("target_clients", _TARGET_CLIENTS)
    summed = max(members, 1) if isinstance(members, int) else 1
    countable = isinstance(client_batch, int) and isinstance(wanted, int)
    most = client_batch * summed * (wanted + _SPEAKERS) if countable else None
    problems = list(wrong_objects(model, loss))
    texts = None if problems else text_arguments(model, examples, public, tokenizer, length, most)
    if texts is not None:
        model, space, public = texts.model, texts.space, texts.public
        assert texts.examples is not None
        examples = texts.examples
    loss = loss or usual_loss(model)
    batch: tuple[Tensor, Tensor] = tensors_of(examples, "batch", most, mean, std)
    public = None if public is None else tensors_of(public, "public", None, mean, std)
    vectors = space is None and are_vectors(batch[0])
    given = {"model": model, "batch": batch, "loss": loss, "client_batch": client_batch, "bounds": bounds}
    given |= {
        "mean": mean,
        "std": std,
        "public": public,
        "out": out,
        "prepare": prepare,
        "progress": progress,
        "settings": settings,
        "pictured": space is None and not vectors,
    }
    problems += wrong_arguments(given)
    if vectors and not problems:
        known = batch[0] if public is None else public[0]
        space = space_of_vectors(known, column_names(examples), bounds, mean, std)
    if space is not None:
        settings = {"threshold": space.threshold, **settings}
    sound, title_of_model, done = not problems, type(model).__name__, []
    kind = "images" if space is None else space.words.kind
    searches_first = attacks is None
    unknown = isinstance(model, TokenModel) and not model.layout.attention
    if attacks is None:
        attacks = ["embedding-search" if unknown else FIRST_SEARCH[kind]]
    whole = _spelled_out(attacks, defences, public is not None, kind)
    if unknown and "adaptive" in attacks:
        spans = ("span", "span-rank")  # they solve for the inputs of attention
        whole = [attack for attack in whole if attack not in spans] or ["embedding-search"]
    if attacks and not whole:
        refuse([*problems, nothing_to_try(attacks, kind)])
    tried = named("attacks", _without_aim(whole), partial(_attack, settings), problems)
    against = named("defences", defences, partial(parse, own=True), problems)
    problems += _unmet(whole, list(against))
    raw: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9]+", "-", title_of_model).strip("-") or "model",
        "data": {"name": "batch", "size": None, "public": None, "gallery": None},
        "model": {"name": title_of_model, "prepare": prepare},
        "client": [{"batch": client_batch, "members": members, "local": local_settings(local)}],
        "defences": list(against) or ["none"],
        "attacks": _labels(whole, tried) or ["none"],
        "seeds": [seed],
        "target_clients": 1,
        **settings,
    }
    if "budget" not in settings:
        iterations = settings.get("iterations")
        raw["budget"] = auto_budget(tried, iterations if isinstance(iterations, int) else None)
    problems += list(_wrong_settings(raw, {problem.where for problem in problems}))
    if sound:
        model, done, changed = prepared(model, batch, loss, prepare)
        done = [*(texts.changes if texts else ()), *done]
        problems += changed or model_problems(model, batch, loss, client_batch, prepare)
    refuse(problems)
    names = class_names(model, batch[0][:client_batch])
    data, known, facts = _datasets(names, batch, public, bounds, mean, std, space)
    data = replace(data, persons=examples.persons[: len(data)] if isinstance(examples, Dataset) else ())
    facts += ("bounds: the least and greatest value of each column of the batch",) if vectors and known is None else ()
    raw["model"]["options"] = {"weights_and_batch": _fingerprint(model, *batch, *(public or ()))}
    target_clients = settings.get(
        "target_clients", max(len(data) // (client_batch * summed) - others(against.values()), 1)
    )
    config = resolve({**raw, "target_clients": target_clients}, names=False)
    experiment = Experiment(config, data, known, _copies(model), against, tried, loss, facts, tuple(done))
    words = {text for text in whole if isinstance(text, str)} - {text for text in attacks if isinstance(text, str)}
    experiment = unobstructed(replace(experiment, expanded=frozenset(without_aim(words))))
    in_words = [attack for attack in attacks if isinstance(attack, str)]
    decisions, joins = decide(experiment, in_words), choice_of_texts(in_words, searches_first)
    if joins is not None:
        experiment, decisions, _ = widened(experiment, decisions, joins)
    experiment = replace(experiment, cost=_trainings(config, model, data, known, against, loss))
    make = partial(opened, write_report=write_report, draw_figure=draw_figure, as_html=as_html)
    return _run(experiment, decisions, out, make, progress)


def _trainings(
    config: RunConfig,
    model: nn.Module,
    data: Dataset,
    public: Dataset | None,
    defences: Mapping[str, Defence],
    loss: Loss,
) -> TrainingSetting | None:
    """Set up the trainings that measure accuracy, on the public examples; None where none are asked for."""
    if config.cost is None:
        return None
    if public is None:
        refuse(
            [Problem("cost", "has no examples to train on", "give some that no client holds: public=(inputs, labels)")]
        )
    assert public is not None
    setting = TrainingSetting(training_config(config), Splits(public, data), model=model, defences=defences, loss=loss)
    setting = setting.within_data()
    refuse([replace(problem, where=f"cost.{problem.where}") for problem in setting_problems(setting)])
    return setting


def _spelled_out(
    attacks: Sequence[str | Attack], defences: Sequence[str | Defence], public: bool, kind: str
) -> Sequence[str | Attack]:
    """Put the attackers of all these defences in the place of `adaptive` and `malicious`."""
    if not isinstance(attacks, list | tuple) or not isinstance(defences, list | tuple):
        return attacks
    names = [defence if isinstance(defence, str) else str(getattr(defence, "name", "")) for defence in defences]
    spelled: list[str | Attack] = []
    for attack in attacks:
        if isinstance(attack, str) and stands_for_many(attack):
            others = [text for text in attacks if isinstance(text, str) and not stands_for_many(text)]
            against = (attacks_against([*others, attack], name, public=public, kind=kind) for name in names)
            aimed = [text for some in against for text in some]
            at = aim(attack).defence
            new = (text for text in dict.fromkeys(aimed) if text not in without_aim(others))
            spelled += [text if at is None else f"{text} on {at}" for text in new]
        else:
            spelled.append(attack)
    return spelled


def _without_aim(attacks: Sequence[str | Attack]) -> Sequence[str | Attack]:
    """Leave out the defences that attacks are aimed at; an attack that is aimed at several comes once."""
    if not isinstance(attacks, list | tuple):
        return attacks
    aimed = [text for text in attacks if isinstance(text, str) and aim(text).defence is not None]
    plain = [attack for attack in attacks if not (isinstance(attack, str) and attack in aimed)]
    return [*plain, *(text for text in without_aim(aimed) if text not in plain)]


def _labels(attacks: Sequence[str | Attack], tried: Mapping[str, Attack]) -> list[str]:
    """Name the attacks as a run file would, with the defences that they are aimed at."""
    labels = (attack if isinstance(attack, str) else str(getattr(attack, "name", "")) for attack in attacks)
    return [label for label in labels if label in tried or aim(label).attack in tried]


def _unmet(attacks: Any, defences: Sequence[str]) -> Iterator[Problem]:
    """Find attacks that are aimed at defences which are not given."""
    for i, attack in enumerate(attacks if isinstance(attacks, list | tuple) else ()):
        if isinstance(attack, str) and aim(attack).defence is not None:
            yield from unmet(f"attacks[{i}]", aim(attack), defences)


def _attack(settings: Mapping[str, Any], text: str) -> Attack:
    """Read an attack; iterations or restarts of the wrong kind are told as settings."""
    tuning = (settings.get(name) for name in ("iterations", "restarts"))
    whole = with_defaults(text, *(value if isinstance(value, int) else None for value in tuning))
    return make_own(whole)


def _wrong_settings(raw: Mapping[str, Any], told: Collection[str]) -> Iterator[Problem]:
    """Check the settings, and name what is wrong as the caller named it; what was told is not told again."""
    try:
        config = resolve(raw, names=False)
        yield from device_problems(config.device, config.precision)
    except GradveilError as error:
        found = (replace(p, where=_argument(p.where)) for p in error.problems)
        yield from (problem for problem in found if problem.where not in told)


def _argument(where: str) -> str:
    """Return what the caller named a setting.

    >>> _argument("client[0].local.lr"), _argument("threshold")
    ('local.lr', 'threshold')
    """
    inner = where.removeprefix("client[0].")
    return _ARGUMENTS.get(where, inner if inner.startswith("local.") else where)


def _copies(model: nn.Module) -> Callable[[int], nn.Module]:
    """Give every seed its own copy of the model."""
    return lambda _: copy.deepcopy(model)


def _run(
    experiment: Experiment,
    decisions: Sequence[Decision],
    out: Path | str | None,
    make: Callable[[Path], Result],
    progress: bool,
) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-") if out is None else out)
    opened = opened_run(experiment, decisions, experiment.config.target_clients, _CALL, called=True)
    # A quiet console would still leave an empty output in a notebook.
    console = Console(stderr=True, quiet=not progress, markup=False, force_jupyter=None if progress else False)
    with ExitStack() as undo:
        if out is None:  # whatever stops the run, an interrupt too: the temporary folder holds private images
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        with _one_thread(experiment.config.device):
            opened.finish(folder, console)
        result = make(folder)
        undo.pop_all()
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Attack with one thread on a CPU, as the command line's workers do: more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fingerprint(model: nn.Module, *data: Tensor) -> str:
    """Hash weights and data: a run directory of another model, batch or public examples is not resumed."""
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = {name: value.detach().cpu().contiguous() for name, value in held.items()}
    names = ("inputs", "targets", "public.inputs", "public.targets")
    given = {name: value.detach().cpu().contiguous() for name, value in zip(names, data, strict=False)}
    parts = (hashlib.sha256(save({name: value.clone() for name, value in part.items()})) for part in (state, given))
    return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()[:16]


def _datasets(
    names: tuple[str, ...],
    batch: tuple[Tensor, Tensor],
    public: tuple[Tensor, Tensor] | None,
    bounds: Bounds,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    space: Space | None,
) -> tuple[Dataset, Dataset | None, tuple[str, ...]]:
    """Wrap batch and public examples as data sets, with the bounds that an attacker may use; say what is a grant.

    The data sets refuse inputs outside their bounds.
    """
    if space is not None:
        pairs = [
            pair and Dataset("batch", _usual_numbers(pair[0]), pair[1].cpu(), names, example=space)
            for pair in (batch, public)
        ]
        assert pairs[0] is not None
        return pairs[0], pairs[1], ()
    images = [pair[0] for pair in (batch, public) if pair]
    (centre, scale), taken = pixel_statistics(bounds, mean, std, images)
    facts = ("bounds: the least and greatest value of the batch",) if taken else ()

    def wrapped(name: str, pair: tuple[Tensor, Tensor]) -> Dataset:
        return Dataset(name, _usual_numbers(pair[0]), pair[1].cpu(), names, centre, scale)

    return wrapped("batch", batch), None if public is None else wrapped("public", public), facts


def _usual_numbers(inputs: Tensor) -> Tensor:
    """Return inputs on the CPU, fractions in single precision."""
    inputs = inputs.detach().cpu()
    return inputs.float() if inputs.is_floating_point() else inputs
