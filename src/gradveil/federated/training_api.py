"""A federated training from Python: any module, a data set or tensors, clients, rounds and defences."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gradveil.client import Local
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import percent, size
from gradveil.core.given_objects import named
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Loss
from gradveil.data import Dataset, Splits
from gradveil.data.pixel_range import Bounds, pixel_statistics
from gradveil.defences import Defence, parse
from gradveil.federated.training_config import LocalConfig, TrainConfig
from gradveil.federated.training_run import FAILED, TRAINING_RUN, describe, load_training, run, trial_file
from gradveil.federated.training_setup import TrainingSetting, TrainingTrial, device_problems, setting_problems
from gradveil.federated.training_state import RoundResult, Status
from gradveil.nn.model_outputs import adopted
from gradveil.nn.module_paths import called, count_classes
from gradveil.nn.surgery import prepare as prepared
from gradveil.nn.weight_files import fingerprint, read_weights

Examples = Dataset | tuple[Tensor, Tensor]
"""Examples of the caller: a data set, or (inputs [N, C, H, W], targets [N] class numbers)."""


@dataclass(frozen=True, repr=False)
class TrainResult:
    """What a training with one or several defences came to. `print(result)`, or a notebook, shows a row for each."""

    summaries: Mapping[str, Mapping[str, Any]]
    """All that is known of each defence's training, as `gradveil train --json` prints it; `central` is one of them."""
    path: Path
    """The run directory; a temporary one is removed together with the result."""
    files: Mapping[str, Path]
    write_report: Callable[[Path, Path], Path]
    draw_figure: Callable[..., Any]

    @property
    def accuracy(self) -> dict[str, float | None]:
        """The share of test examples that the trained model names rightly; None where the training failed."""
        return {name: told["accuracy"] for name, told in self.summaries.items()}

    @property
    def bytes(self) -> dict[str, float | None]:
        """The bytes that all clients together send in a round, on the average."""
        return {name: told["bytes_up"] for name, told in self.summaries.items()}

    @property
    def curve(self) -> dict[str, list[dict[str, Any]]]:
        """What happened in each round: accuracy, loss, bytes and seconds by name."""
        return {name: told["curve"] for name, told in self.summaries.items()}

    def weights(self, defence: str = "none") -> Tensors:
        """Return the parameters that the training with this defence ended with."""
        if defence not in self.files:
            raise fail("defence", f"'{defence}' was not trained", f"choose from: {', '.join(self.files)}")
        return read_weights(self.files[defence])

    def report(self, path: Path | str | None = None) -> Path:
        """Write curves and costs as one HTML file, by default into the run directory; return its path."""
        return self.write_report(self.path, Path(path) if path else self.path / "report.html")

    def plot(self, kind: str = "curve", **choices: Any) -> Any:
        """Draw accuracy or loss over the rounds and return it as a matplotlib Figure, which a notebook shows.

        The choices are those of `plot` of an audit's result. It needs the extra `plot`.
        """
        return self.draw_figure([self.path], kind, **choices)

    def __str__(self) -> str:
        """Render a row for each defence."""
        titles, *rows = self._cells()
        table = Table(*titles)
        for row in rows:
            table.add_row(*row)
        console = Console(width=120, color_system=None, markup=False)
        with console.capture() as capture:
            console.print(table)
            for name, told in self.summaries.items():
                if told["status"] == FAILED:
                    console.print(f"{name}: failed: {told['failed']}")
        return capture.get()

    def __repr__(self) -> str:
        """Name the accuracies and the run directory in a line."""
        accuracies = ", ".join(f"{name} {percent(value)}" for name, value in self.accuracy.items())
        return f"TrainResult(accuracy: {accuracies}; path={str(self.path)!r})"

    def _repr_html_(self) -> str:
        titles, *rows = self._cells()
        head = "".join(f"<th>{title}</th>" for title in titles)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the titles, then a row for each defence."""
        yield "defence", "status", "accuracy", "rounds", "sent per round", "received per round"
        for name, told in self.summaries.items():
            sent, got = (size(told[key]) for key in ("bytes_up", "bytes_down"))
            yield name, told["status"], percent(told["accuracy"]), str(told["rounds"]), sent, got


def train_model(
    model: nn.Module,
    data: Splits | Examples,
    test: Examples | None,
    rounds: int,
    clients: int,
    defences: Sequence[str | Defence],
    loss: Loss,
    local: Local | Mapping[str, Any] | None,
    *,
    write_report: Callable[[Path, Path], Path],
    draw_figure: Callable[..., Any],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    bounds: Bounds = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a model of the caller on data of the caller's. `gradveil.train` says what the arguments mean."""
    problems = list(_wrong_objects(model, data, test, settings))
    against = named("defences", defences, partial(parse, own=True), problems)
    refuse(problems)
    splits = _splits(model, data, test, bounds, mean, std)
    model = adopted(model, splits.public.inputs[:1])
    if prepare:
        few = splits.public.subset(range(min(4, len(splits.public))))
        try:
            model, _ = prepared(model, batch=Batch(few.inputs, few.targets), loss=loss)
        except GradveilError as error:
            raise GradveilError(replace(p, where=called(model, p.where)) for p in error.problems) from None
    kind = type(model).__name__
    config = _config(
        {
            "name": re.sub(r"[^A-Za-z0-9]+", "-", kind).strip("-") or "model",
            "data": {"name": splits.public.name, "size": None},
            "model": {"name": kind, "options": {"weights_and_data": _fingerprint(model, splits)}},
            "rounds": rounds,
            "clients": clients,
            "local": _local(local),
            "defences": list(against),
            "seeds": [seed],
            **settings,
        }
    )
    setting = TrainingSetting(config, splits, model=model, defences=against, loss=loss)
    refuse(list(device_problems(config.device, config.precision)))
    refuse([_as_argument(problem, prepare) for problem in setting_problems(setting)])
    return _run(setting, out, partial(TrainResult, write_report=write_report, draw_figure=draw_figure), progress)


def _wrong_objects(model: Any, data: Any, test: Any, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Find arguments of the wrong kind, before anything is done with one of them."""
    if not isinstance(model, nn.Module):
        what = f"is the class {model.__name__}" if isinstance(model, type) else f"is {type(model).__name__}"
        yield Problem("model", what, "give a torch.nn.Module, made and with its weights")
    both = isinstance(data, Splits)
    if both and test is not None:
        yield Problem("test", "is given beside two splits", "leave it out: the private split is what is tested with")
    if not both and test is None:
        yield Problem("test", "is missing", "give the examples that say how good the trained model is")
    for name, given in (("data", data), ("test", test)):
        pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given)
        if not (isinstance(given, Dataset) or pair or (both and name == "data") or given is None):
            remedy = "give a gradveil.data.Dataset, or (inputs [N, C, H, W], targets [N])"
            yield Problem(name, f"is {type(given).__name__}", remedy)
        elif pair and cast("tuple[Tensor, Tensor]", given)[0].dim() != 4:
            shape = tuple(cast("tuple[Tensor, Tensor]", given)[0].shape)
            yield Problem(name, f"holds inputs of shape {shape}", "give inputs [N, C, H, W]: add sides of length 1")
    for name in {"data", "model", "seeds", "name"} & set(settings):
        yield Problem(name, "is no setting here: it is what you give as an argument", "leave it out")


def _splits(
    model: nn.Module,
    data: Splits | Examples,
    test: Examples | None,
    bounds: Bounds,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Splits:
    """Wrap what is given as data sets: what clients train on, and what the result is tested with."""
    if isinstance(data, Splits):
        return data
    given = (data, cast("Examples", test))
    tensors = [part[0] for part in given if not isinstance(part, Dataset)]
    (centre, scale), _ = pixel_statistics(bounds, mean, std, tensors)
    names = next((part.classes for part in given if isinstance(part, Dataset)), None)
    if names is None:
        names = tuple(str(number) for number in range(count_classes(model, tensors[0][:1])))

    def wrapped(name: str, part: Examples) -> Dataset:
        if isinstance(part, Dataset):
            return part
        return Dataset(name, part[0].detach().cpu().float(), part[1].cpu(), names, centre, scale)

    return Splits(wrapped("data", given[0]), wrapped("test", given[1]))


def _local(local: Local | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Say local training as a run file does."""
    if not isinstance(local, Local):
        return local
    said = dataclasses.asdict(local)
    if kept := [name for name in ("betas", "eps") if said[name] != getattr(Local(batch=1, lr=1.0, steps=1), name)]:
        raise fail(f"local.{kept[0]}", f"is {said[kept[0]]}", "leave it out: a training has Adam's usual ones")
    return {name: value for name, value in said.items() if name in LocalConfig.model_fields}


def _config(raw: Mapping[str, Any]) -> TrainConfig:
    """Check the settings, and name what is wrong as the caller named it."""
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        places = {"seeds.0": "seed"}
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise GradveilError(
            Problem(places.get(where, where) or "settings", what, "correct it, or leave it out")
            for where, what in found
        ) from None


def _as_argument(problem: Problem, prepare: bool) -> Problem:
    """Say how to mend a model from Python."""
    hint = "" if prepare else "prepare=True"
    return replace(problem, remedy=problem.remedy.replace("--set model.prepare=true", hint))


def _fingerprint(model: nn.Module, splits: Splits) -> str:
    """Hash weights and data: a run directory of another model or other data is not taken up."""
    held = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, part in zip(("train", "test"), splits, strict=True):
        held |= {f"{name}.inputs": part.inputs, f"{name}.targets": part.targets}
    return fingerprint({name: value.detach().cpu().contiguous() for name, value in held.items()})[:16]


def _run(
    setting: TrainingSetting,
    out: Path | str | None,
    make: Callable[..., TrainResult],
    progress: bool | None,
) -> TrainResult:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-") if out is None else out)
    shown = sys.stderr.isatty() if progress is None else progress
    console = Console(stderr=True, quiet=not shown, markup=False)

    def tell(trial: TrainingTrial, record: RoundResult, _: Status) -> None:
        after = f"{trial.title}: round {record.number} of {setting.config.rounds}"
        console.print(f"{after}, accuracy {percent(record.accuracy)}", highlight=False)

    with ExitStack() as undo:
        if out is None:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        info = describe(setting.config, "gradveil.train(...)", images=setting.data.identities())
        with TRAINING_RUN.opened(folder, info):
            run(setting, folder, tell)
        done = [(trial, told) for trial, told in load_training(folder).trials if told is not None]
        result = make(
            {trial.title: told for trial, told in done},
            folder,
            {trial.title: trial_file(folder, trial) for trial, told in done if told["status"] != FAILED},
        )
        undo.pop_all()
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result
