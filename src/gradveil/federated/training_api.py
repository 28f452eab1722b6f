"""A federated training from Python: any module, a data set or tensors, clients, rounds and defences."""

from __future__ import annotations

import dataclasses
import re
import shutil
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

from gradveil.client import Local, usual_loss
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import percent, size
from gradveil.core.given_objects import named
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Loss
from gradveil.data import Dataset, Splits
from gradveil.data.given_examples import column_names, tensors_of
from gradveil.data.given_rows import are_vectors, space_of_vectors
from gradveil.data.pixel_range import Bounds, pixel_statistics
from gradveil.data.text_arguments import text_arguments
from gradveil.defences import Defence, parse
from gradveil.federated.training_config import LocalConfig, TrainConfig
from gradveil.federated.training_run import FAILED, TRAINING_RUN, describe, load_training, run, trial_file
from gradveil.federated.training_setup import TrainingSetting, TrainingTrial, device_problems, setting_problems
from gradveil.federated.training_state import RoundResult, Status
from gradveil.nn.model_outputs import adopted
from gradveil.nn.module_paths import called, count_classes
from gradveil.nn.surgery import prepare as prepared
from gradveil.nn.weight_files import fingerprint, read_weights


@dataclass(frozen=True, repr=False)
class TrainResult:
    """Result of a training with one or several defences. `print(result)`, or a notebook, shows a row for each."""

    summaries: Mapping[str, Mapping[str, Any]]
    """The training of each defence as `gradveil train --json` prints it, including `central`."""
    path: Path
    """The run directory; a temporary one is removed together with the result."""
    files: Mapping[str, Path]
    write_report: Callable[[Path, Path], Path]
    draw_figure: Callable[..., Any]

    @property
    def accuracy(self) -> dict[str, float | None]:
        """The share of test examples that the trained model classifies correctly; None if the training failed."""
        return {name: summary["accuracy"] for name, summary in self.summaries.items()}

    @property
    def bytes(self) -> dict[str, float | None]:
        """Mean number of bytes that all clients together send in a round."""
        return {name: summary["bytes_up"] for name, summary in self.summaries.items()}

    @property
    def curve(self) -> dict[str, list[dict[str, Any]]]:
        """Accuracy, loss, bytes and seconds of each round, by name."""
        return {name: summary["curve"] for name, summary in self.summaries.items()}

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
        # In a notebook, a captured console would still show an empty output.
        console = Console(width=120, force_jupyter=False, color_system=None, markup=False)
        with console.capture() as capture:
            console.print(table)
            for name, summary in self.summaries.items():
                if summary["status"] == FAILED:
                    console.print(f"{name}: failed: {summary['failed']}")
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
        for name, summary in self.summaries.items():
            sent, got = (size(summary[key]) for key in ("bytes_up", "bytes_down"))
            yield name, summary["status"], percent(summary["accuracy"]), str(summary["rounds"]), sent, got


def opened_training(folder: Path, **surfaces: Any) -> TrainResult:
    """Return the result of a training on disk, as far as it is done; `surfaces` write its report and figures."""
    done = [(trial, summary) for trial, summary in load_training(folder).trials if summary is not None]
    summaries = {trial.title: summary for trial, summary in done}
    files = {trial.title: trial_file(folder, trial) for trial, summary in done if summary["status"] != FAILED}
    return TrainResult(summaries, folder, files, **surfaces)


def train_model(
    model: nn.Module,
    data: Any,
    test: Any,
    rounds: int,
    clients: int | None,
    defences: Sequence[str | Defence],
    loss: Loss | None,
    local: Local | Mapping[str, Any] | None,
    *,
    write_report: Callable[[Path, Path], Path],
    draw_figure: Callable[..., Any],
    tokenizer: Any = None,
    length: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    bounds: Bounds = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool = True,
    **settings: Any,
) -> TrainResult:
    """Train a custom model on custom data. `gradveil.train` documents the arguments."""
    model, data, test = _of_texts(model, data, test, tokenizer, length)
    columns = column_names(data)
    data, test = (
        examples
        if isinstance(examples, Dataset | Splits) or examples is None
        else tensors_of(examples, name, None, mean, std)
        for name, examples in (("data", data), ("test", test))
    )
    problems = list(_wrong_objects(model, data, test, settings))
    if not isinstance(progress, bool):
        problems.append(Problem("progress", f"is {progress!r}", "give True or False"))
    against = named("defences", defences, partial(parse, own=True), problems)
    refuse(problems)
    splits = _splits(model, data, test, columns, bounds, mean, std)
    model = adopted(model, splits.public.inputs[:1])
    if prepare:
        few = splits.public.subset(range(min(4, len(splits.public))))
        try:
            model, _ = prepared(model, batch=Batch(few.inputs, few.targets), loss=loss or usual_loss(model))
        except GradveilError as error:
            raise GradveilError(replace(p, where=called(model, p.where)) for p in error.problems) from None
    kind = type(model).__name__
    config = _config(
        {
            "name": re.sub(r"[^A-Za-z0-9]+", "-", kind).strip("-") or "model",
            "data": {"name": splits.public.name, "size": None},
            "model": {"name": kind, "options": {"weights_and_data": _fingerprint(model, splits)}},
            "rounds": rounds,
            **({} if clients is None else {"clients": clients}),
            "local": local_settings(local),
            "defences": list(against),
            "seeds": [seed],
            **settings,
        }
    )
    setting = TrainingSetting(config, splits, model=model, defences=against, loss=loss).within_data()
    refuse(list(device_problems(config.device, config.precision)))
    refuse([_as_argument(problem, prepare) for problem in setting_problems(setting)])
    return _run(setting, out, partial(opened_training, write_report=write_report, draw_figure=draw_figure), progress)


def _of_texts(model: Any, data: Any, test: Any, tokenizer: Any, length: int | None) -> tuple[Any, Any, Any]:
    """Encode texts, and wrap a model of transformers that reads them; other arguments stay as they are."""
    if not isinstance(model, nn.Module) or isinstance(data, Splits):
        texts = text_arguments(model, data.public) if isinstance(model, nn.Module) else None
        return (model if texts is None else texts.model), data, test
    texts = text_arguments(model, data, test, tokenizer, length, where="data")
    if texts is None or texts.examples is None or texts.public is None:
        return model, data, test
    names = tuple(str(number) for number in range(count_classes(texts.model, texts.examples[0][:1])))
    share, measure = (Dataset("texts", *pair, classes=names, example=texts.space)
                      for pair in (texts.examples, texts.public))  # fmt: skip
    return texts.model, share, measure


def _wrong_objects(model: Any, data: Any, test: Any, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield arguments of the wrong type, before any is used."""
    if not isinstance(model, nn.Module):
        problem = f"is the class {model.__name__}" if isinstance(model, type) else f"is {type(model).__name__}"
        yield Problem("model", problem, "pass an instance of torch.nn.Module, with its weights")
    both = isinstance(data, Splits)
    if both and test is not None:
        yield Problem("test", "is given together with two splits", "remove it: the private split is the test set")
    if not both and test is None:
        yield Problem("test", "is missing", "pass the examples on which to measure accuracy")
    for name, examples in (("data", data), ("test", test)):
        pair = isinstance(examples, tuple) and len(examples) == 2 and all(isinstance(part, Tensor) for part in examples)
        if not (isinstance(examples, Dataset) or pair or (both and name == "data") or examples is None):
            remedy = "pass (inputs, targets [N]), a dict of both, a data set or a DataLoader"
            yield Problem(name, f"is {type(examples).__name__}", remedy)
        elif pair and not (are_vectors(inputs := cast("tuple[Tensor, Tensor]", examples)[0]) or inputs.dim() == 4):
            what = f"holds inputs of {inputs.dtype} {tuple(inputs.shape)}"
            yield Problem(name, what, "give images [N, C, H, W], or rows of numbers [N, D] in floating point")
    for name in {"data", "model", "seeds", "name"} & set(settings):
        yield Problem(name, "is no setting here: it is an argument of gradveil.train", "remove it")


def _splits(
    model: nn.Module,
    data: Splits | Dataset | tuple[Tensor, Tensor],
    test: Dataset | tuple[Tensor, Tensor] | None,
    columns: Sequence[str],
    bounds: Bounds,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Splits:
    """Wrap the caller's examples as data sets: those that clients train on, and the test set."""
    if isinstance(data, Splits):
        return data
    parts = (data, cast("Dataset | tuple[Tensor, Tensor]", test))
    tensors = [part[0] for part in parts if not isinstance(part, Dataset)]
    space = next((part.example for part in parts if isinstance(part, Dataset)), None)
    if space is None and tensors and are_vectors(tensors[0]):
        space = space_of_vectors(tensors[0], columns, bounds, mean, std)
    (centre, scale), _ = pixel_statistics(bounds, mean, std, tensors) if space is None else (((0.0,), (1.0,)), False)
    names = next((part.classes for part in parts if isinstance(part, Dataset)), None)
    if names is None:
        some = tensors[0][:1]
        names = tuple(str(number) for number in range(count_classes(adopted(model, some), some)))

    def wrapped(name: str, part: Dataset | tuple[Tensor, Tensor]) -> Dataset:
        if isinstance(part, Dataset):
            return part
        return Dataset(name, part[0].detach().cpu().float(), part[1].cpu(), names, centre, scale, example=space)

    return Splits(wrapped("data", parts[0]), wrapped("test", parts[1]))


def local_settings(local: Local | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert local training to the settings of a run file."""
    if not isinstance(local, Local):
        return local
    values, usual = dataclasses.asdict(local), Local(batch=1, lr=1.0, steps=1)
    if unusual := [name for name in ("betas", "eps") if values[name] != getattr(usual, name)]:
        raise fail(f"local.{unusual[0]}", f"is {values[unusual[0]]}", "remove it: a training has Adam's defaults")
    return {name: value for name, value in values.items() if name in LocalConfig.model_fields}


def _config(raw: Mapping[str, Any]) -> TrainConfig:
    """Check the settings; errors have the names of the caller's arguments."""
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        arguments = {"seeds.0": "seed"}
        entries = [(".".join(map(str, entry["loc"])), entry["msg"]) for entry in error.errors(include_url=False)]
        raise GradveilError(
            Problem(arguments.get(key, key) or "settings", message, "correct it, or remove it")
            for key, message in entries
        ) from None


def _as_argument(problem: Problem, prepare: bool) -> Problem:
    """Return a problem with the fix for Python."""
    hint = "" if prepare else "prepare=True"
    return replace(problem, remedy=problem.remedy.replace("--set model.prepare=true", hint))


def _fingerprint(model: nn.Module, splits: Splits) -> str:
    """Hash weights and data: a run directory of another model or other data is not resumed."""
    held = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, part in zip(("train", "test"), splits, strict=True):
        held |= {f"{name}.inputs": part.inputs, f"{name}.targets": part.targets}
    return fingerprint({name: value.detach().cpu().contiguous() for name, value in held.items()})[:16]


def _run(
    setting: TrainingSetting,
    out: Path | str | None,
    make: Callable[[Path], TrainResult],
    progress: bool,
) -> TrainResult:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-") if out is None else out)
    console = Console(stderr=True, quiet=not progress, markup=False, force_jupyter=None if progress else False)

    def report(trial: TrainingTrial, record: RoundResult, _: Status) -> None:
        after = f"{trial.title}: round {record.number} of {setting.config.rounds}"
        console.print(f"{after}, accuracy {percent(record.accuracy)}", highlight=False)

    if setting.note:
        console.print(setting.note, highlight=False, soft_wrap=True)
    with ExitStack() as undo:
        if out is None:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        info = describe(setting.config, "gradveil.train(...)", images=setting.data.identities())
        with TRAINING_RUN.opened(folder, info):
            run(setting, folder, report)
        result = make(folder)
        undo.pop_all()
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result
