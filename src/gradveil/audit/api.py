"""An audit from Python: any module, any loss, one batch of private examples."""

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.protocol import Attack
from gradveil.audit.argument_checks import class_names, model_problems, named, prepared, wrong_arguments
from gradveil.audit.attack_selection import attacks_against, is_adaptive, stands_for_many
from gradveil.audit.audit_run import describe, run
from gradveil.audit.display import Screen
from gradveil.audit.experiment import Experiment
from gradveil.audit.findings import Findings, findings, print_outcome
from gradveil.audit.preflight import others, unobstructed
from gradveil.audit.run_directory import Store, Trial, load_run
from gradveil.audit.run_file import resolve, with_defaults
from gradveil.audit.run_warnings import closed_forms, widened
from gradveil.audit.trial import sharing
from gradveil.audit.verdict import Verdict
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.types import Loss
from gradveil.data import Dataset
from gradveil.defences import Defence, parse

_ARGUMENTS = {"client[0].batch": "client_batch", "seeds[0]": "seed", "model.prepare": "prepare"}
Bounds = Literal["unit"] | tuple[float, float] | None
"""The range of inputs: [0, 1], a pair, or what the batch and public examples span."""


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of an audit. `print(result)`, or a notebook, shows the verdict and one row per defence."""

    trials: list[Trial]
    path: Path
    """The run directory; a temporary one is removed together with the result."""
    write_report: Callable[[Path, Path], Path]
    config: Mapping[str, Any]
    """Every setting of the run."""
    warnings: tuple[str, ...] = ()
    """What the attacks of this run leave out: an image that comes back in closed form."""

    @property
    def findings(self) -> Findings:
        """Everything that the surfaces show: verdicts, settings and trials as plain objects, the control."""
        return findings(self.trials)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdict on every defence in every setting."""
        return self.findings.verdicts

    @property
    def verdict(self) -> str:
        """The verdict on the whole run in a sentence."""
        return self.findings.sentence

    def summary(self) -> list[dict[str, Any]]:
        """Return one flat object per trial."""
        return self.findings.trials

    def report(self, path: Path | str | None = None) -> Path:
        """Write the report as one HTML file, by default into the run directory; return its path."""
        return self.write_report(self.path, Path(path) if path else self.path / "report.html")

    def __str__(self) -> str:
        """Render the verdict, its table, the remarks and the warnings."""
        console = Console(width=120, color_system=None, markup=False)
        with console.capture() as capture:
            print_outcome(console, self.findings, self.config)
            for warning in self.warnings:
                console.print(f"Warning: {warning}", markup=False)
        return capture.get()

    def __repr__(self) -> str:
        """Show the same where a notebook shows a value."""
        return str(self)


def audit_model(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss: Loss,
    defences: Sequence[str | Defence],
    attacks: Sequence[str | Attack],
    *,
    write_report: Callable[[Path, Path], Path],
    client_batch: int = 1,
    bounds: Bounds = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    public: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Attack a model of the caller on a batch of the caller's. `gradveil.audit` says what the arguments mean."""
    given = {"model": model, "batch": batch, "loss": loss, "client_batch": client_batch, "bounds": bounds}
    given |= {
        "mean": mean,
        "std": std,
        "public": public,
        "out": out,
        "prepare": prepare,
        "progress": progress,
        "settings": settings,
    }
    problems = list(wrong_arguments(given))
    sound, kind, done = not problems, type(model).__name__, []
    tried = named("attacks", _spelled_out(attacks, defences, public is not None), partial(_attack, settings), problems)
    against = named("defences", defences, partial(parse, own=True), problems)
    raw: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9]+", "-", kind).strip("-") or "model",
        "data": {"name": "batch", "size": None, "public": None, "gallery": None},
        "model": {"name": kind, "prepare": prepare},
        "client": [{"batch": client_batch}],
        "defences": list(against) or ["none"],
        "attacks": list(tried) or ["none"],
        "seeds": [seed],
        "target_clients": 1,
        **settings,
    }
    problems += list(_wrong_settings(raw, {problem.where for problem in problems}))
    if sound:
        model, done, changed = prepared(model, batch, loss, prepare)
        problems += changed or model_problems(model, batch, loss, client_batch, prepare)
    refuse(problems)
    names = class_names(model, batch[0][:client_batch])
    data, known, facts = _datasets(names, batch, public, bounds, mean, std)
    raw["model"]["options"] = {"weights_and_batch": _fingerprint(model, *batch, *(public or ()))}
    target_clients = settings.get("target_clients", max(len(data) // client_batch - others(against.values()), 1))
    config = resolve({**raw, "target_clients": target_clients}, names=False)
    experiment = Experiment(config, data, known, _copies(model), against, tried, loss, facts, tuple(done))
    experiment = unobstructed(experiment)
    if any(isinstance(attack, str) and is_adaptive(attack) for attack in attacks):
        experiment, _ = widened(experiment)
    return _run(experiment, out, write_report, progress)


def _spelled_out(
    attacks: Sequence[str | Attack], defences: Sequence[str | Defence], public: bool
) -> Sequence[str | Attack]:
    """Put the attackers of all these defences in the place of `adaptive` and `malicious`."""
    if not isinstance(attacks, list | tuple) or not isinstance(defences, list | tuple):
        return attacks
    names = [defence if isinstance(defence, str) else str(getattr(defence, "name", "")) for defence in defences]
    spelled: list[str | Attack] = []
    for attack in attacks:
        if isinstance(attack, str) and stands_for_many(attack):
            others = [text for text in attacks if isinstance(text, str) and not stands_for_many(text)]
            aimed = [t for name in names for t in attacks_against([*others, attack], name, public=public)]
            spelled += [text for text in dict.fromkeys(aimed) if text not in others]
        else:
            spelled.append(attack)
    return spelled


def _attack(settings: Mapping[str, Any], text: str) -> Attack:
    """Read an attack; iterations or restarts of the wrong kind are told as settings."""
    tuning = (settings.get(name) for name in ("iterations", "restarts"))
    whole = with_defaults(text, *(value if isinstance(value, int) else None for value in tuning))
    return make_attack(whole, own=True)


def _wrong_settings(raw: Mapping[str, Any], told: Collection[str]) -> Iterator[Problem]:
    """Check the settings, and name what is wrong as the caller named it; what was told is not told again."""
    try:
        resolve(raw, names=False)
    except GradveilError as error:
        found = (replace(p, where=_ARGUMENTS.get(p.where, p.where)) for p in error.problems)
        yield from (problem for problem in found if problem.where not in told)


def _copies(model: nn.Module) -> Callable[[int], nn.Module]:
    """Give every seed its own copy of the model."""
    return lambda _: copy.deepcopy(model)


def _run(
    experiment: Experiment, out: Path | str | None, write_report: Callable[[Path, Path], Path], progress: bool | None
) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-") if out is None else out)
    warnings = tuple(str(problem) for problem in closed_forms(experiment, called=True))
    shared = sharing(experiment)
    info = describe(
        experiment.config, experiment.config.target_clients, "gradveil.audit(...)", sharing=shared, warnings=warnings
    )
    shown = sys.stderr.isatty() if progress is None else progress
    with ExitStack() as undo:
        if out is None:  # whatever stops the run, an interrupt too: the temporary folder holds private images
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        with (
            _one_thread(experiment.config.device),
            Screen(Console(stderr=True, quiet=not shown, markup=False)) as screen,
            Store(folder).open(info) as store,
        ):
            run(experiment, store, screen, experiment.config.target_clients)
        done = load_run(folder)
        result = Result(done.trials, folder, write_report, done.info["config"], warnings)
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
) -> tuple[Dataset, Dataset | None, tuple[str, ...]]:
    """Wrap batch and public examples as data sets, with the bounds that an attacker may use; say what is a grant.

    The data sets refuse inputs outside their bounds.
    """
    facts: tuple[str, ...] = ()
    centre, scale = tuple(mean or (0.0,)), tuple(std or (1.0,))
    if mean is None and std is None and bounds != "unit":
        if bounds is None:
            images = [pair[0].detach().float().nan_to_num(0, 0, 0).flatten() for pair in (batch, public) if pair]
            low, high = (float(value) for value in torch.aminmax(torch.cat([value.cpu() for value in images])))
            inside = low >= 0 and high <= 1
            low, high = (0.0, 1.0) if inside else (low, high)
            facts = () if inside else ("bounds: the least and greatest value of the batch",)
        else:
            low, high = bounds
        if not low < high:
            remedy = "give bounds=(low, high), or mean and std"
            raise GradveilError(Problem("bounds", f"every input is {low:g}, which is no range", remedy))
        centre, scale = (-low / (high - low),), (1 / (high - low),)

    def wrapped(name: str, pair: tuple[Tensor, Tensor]) -> Dataset:
        return Dataset(name, pair[0].detach().cpu().float(), pair[1].cpu(), names, centre, scale)

    return wrapped("batch", batch), None if public is None else wrapped("public", public), facts
