"""An audit from Python: any module, any loss, one batch of private examples."""

from __future__ import annotations

import copy
import hashlib
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.presets import make_attack
from gradveil.audit.config import RunConfig
from gradveil.audit.display import Screen, result_table
from gradveil.audit.reader import resolve, with_defaults
from gradveil.audit.run import describe, in_process, run
from gradveil.audit.scene import Scene, scene_problems
from gradveil.audit.store import Cell, Store, load_run, summarise
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.types import Batch, Loss
from gradveil.data import Dataset
from gradveil.defences import Defence, parse
from gradveil.nn import surgery
from gradveil.nn.check import check

_ARGUMENTS = {"client[0].batch": "client_batch", "seeds[0]": "seed"}
Bounds = Literal["unit"] | tuple[float, float] | None


@dataclass(frozen=True)
class Result:
    """What an audit found. `print(result)` shows a table."""

    cells: list[Cell]
    path: Path
    """The run directory; a temporary one is removed together with the result."""
    write_report: Callable[[Path, Path], Path]

    def summary(self) -> list[dict[str, Any]]:
        """Return one flat object a cell."""
        return [summarise(cell) for cell in self.cells]

    def report(self, path: Path | str | None = None) -> Path:
        """Write the report as one HTML file, by default into the run directory; return its path."""
        return self.write_report(self.path, Path(path) if path else self.path / "report.html")

    def __str__(self) -> str:
        """Render the table."""
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(result_table(self.cells))
        return capture.get()


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
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    **settings: Any,
) -> Result:
    """Attack a model of the caller on a batch of the caller's. `gradveil.audit` says what the arguments mean."""
    refuse(list(_wrong_arguments(batch, client_batch, bounds, mean, std, settings)))
    (inputs, targets), kind = batch, type(model).__name__
    model, done = surgery.prepare(model) if prepare else (model, [])
    problems = [_with_remedy(p, prepare) for p in check(model, Batch(inputs, targets), loss)]
    named_defences = _named("defences", defences, parse, problems)
    tuning = settings.get("iterations"), settings.get("restarts")
    named_attacks = _named("attacks", attacks, lambda text: make_attack(with_defaults(text, *tuning)), problems)
    refuse(problems)
    data, facts = _dataset(model, inputs, targets, bounds, mean, std)
    weights = _fingerprint(model, inputs, targets)
    config = _resolve(
        {
            "name": kind,
            "data": {"name": "batch", "size": None, "public": None, "gallery": None},
            "model": {"name": kind, "options": {"weights_and_batch": weights}, "prepare": prepare},
            "client": [{"batch": client_batch}],
            "defences": list(named_defences),
            "attacks": list(named_attacks),
            "seeds": [seed],
            "victims": max(len(data) // client_batch, 1),
            **settings,
        }
    )
    scene = Scene(config, data, None, _copies(model), named_defences, named_attacks, loss, facts, tuple(done))
    refuse(list(scene_problems(scene)))
    return _run(scene, out, write_report)


def _copies(model: nn.Module) -> Callable[[int], nn.Module]:
    """Give every seed its own copy of the model."""
    return lambda _: copy.deepcopy(model)


def _run(scene: Scene, out: Path | str | None, write_report: Callable[[Path, Path], Path]) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-") if out is None else out)
    info = describe(scene.config, scene.config.victims, "gradveil.audit(...)")
    with ExitStack() as undo:
        if out is None:  # whatever stops the run, an interrupt too: the temporary folder holds private images
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        with (
            _one_thread(scene.config.device),
            Screen(Console(stderr=True, quiet=not sys.stderr.isatty())) as screen,
            Store(folder).open(info) as store,
        ):
            run(scene, store, screen, in_process(scene), scene.config.victims)
        result = Result(load_run(folder).cells, folder, write_report)
        undo.pop_all()
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def _with_remedy(problem: Problem, prepared: bool) -> Problem:
    surgical = surgery.__name__ in problem.remedy and not prepared
    return replace(problem, remedy=f"{problem.remedy}; or let it be done: prepare=True") if surgical else problem


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Attack with one thread on a CPU, as the command line's workers do: more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wrong_arguments(
    batch: Any, client_batch: Any, bounds: Any, mean: Any, std: Any, settings: Mapping[str, Any]
) -> Iterator[Problem]:
    """Find arguments of the wrong kind, which the settings of a run file have no name for."""
    if not (_is_list_of(batch, Tensor) and len(batch) == 2):
        yield Problem("batch", f"is {type(batch).__name__}", "give (inputs [N, C, H, W], targets [N]), two tensors")
    if not isinstance(client_batch, int) or client_batch < 1:
        yield Problem("client_batch", f"is {client_batch!r}", "give a whole number of at least 1")
    if bounds not in (None, "unit") and not (_is_list_of(bounds, float | int) and len(bounds) == 2):
        yield Problem("bounds", f"is {bounds!r}", "give 'unit' for [0, 1], a pair (low, high), or None")
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and not _is_list_of(value, float | int):
            yield Problem(name, f"is {value!r}", "give a list with one number, or one for each channel")
    if "data" in settings:
        yield Problem("data", "is no setting here: the batch is the data", "leave it out")


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


def _resolve(raw: Mapping[str, Any]) -> RunConfig:
    """Check the settings, and name what is wrong as the caller named it."""
    try:
        return resolve(raw, names=False)
    except GradveilError as error:
        raise GradveilError(replace(p, where=_ARGUMENTS.get(p.where, p.where)) for p in error.problems) from None


def _fingerprint(model: nn.Module, inputs: Tensor, targets: Tensor) -> str:
    """Hash weights and data: a run directory of another model or batch is not resumed."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    batch = {"inputs": inputs.detach().cpu().contiguous(), "targets": targets.cpu().contiguous()}
    parts = (hashlib.sha256(save({name: value.clone() for name, value in part.items()})) for part in (state, batch))
    return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()[:16]


def _named(where: str, given: Sequence[Any], build: Callable[[str], Any], problems: list[Problem]) -> Mapping[str, Any]:
    """Build what is given as text, keep what is given as an object, and collect what is wrong with either."""
    found: dict[str, Any] = {}
    entries: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    for i, entry in enumerate(entries):
        if not isinstance(entry, str) and not (callable(entry) and isinstance(getattr(entry, "name", None), str)):
            remedy = f"give a text as `gradveil list {where}` shows, or an object with a name"
            problems.append(Problem(f"{where}[{i}]", f"is {entry!r}", remedy))
            continue
        label = entry if isinstance(entry, str) else entry.name
        if label in found:
            problems.append(Problem(f"{where}[{i}]", f"'{label}' is there already", "name each differently"))
        try:
            found[label] = build(entry) if isinstance(entry, str) else entry
        except GradveilError as error:
            problems += [Problem(f"{where}[{i}]", f"{p.where}: {p.what}", p.remedy) for p in error.problems]
    if not given:
        problems.append(Problem(where, "are empty", "give at least one"))
    return found


def _dataset(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    bounds: Bounds,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> tuple[Dataset, tuple[str, ...]]:
    """Wrap the batch as a data set, with the bounds that an attacker may use; say which of them are a grant.

    The data set refuses inputs outside their bounds. The model has been checked: it runs on these inputs.
    """
    facts: tuple[str, ...] = ()
    centre, scale = tuple(mean or (0.0,)), tuple(std or (1.0,))
    if mean is None and std is None and bounds != "unit":
        if bounds is None:
            low, high = (float(value) for value in torch.aminmax(inputs.detach().float().nan_to_num(0, 0, 0)))
            inside = low >= 0 and high <= 1
            low, high = (0.0, 1.0) if inside else (low, high)
            facts = () if inside else ("bounds: the least and greatest value of the batch",)
        else:
            low, high = bounds
        if not low < high:
            remedy = "give bounds=(low, high), or mean and std"
            raise GradveilError(Problem("bounds", f"({low:g}, {high:g}) are not a range", remedy))
        centre, scale = (-low / (high - low),), (1 / (high - low),)
    with torch.no_grad():
        classes = int(copy.deepcopy(model)(inputs[:1]).shape[-1])
    names = tuple(str(number) for number in range(max(classes, 2)))
    labels = targets if targets.dtype != torch.int32 else targets.long()
    return Dataset("batch", inputs.detach().cpu().float(), labels.cpu(), names, centre, scale), facts
