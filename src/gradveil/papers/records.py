"""Recorded measurements of the papers' cells: the scores of every image, and what each measurement took.

`KEY/RUN.csv` holds one line per image (or per training), `KEY/measurements.csv` one line per measurement. Rates are
computed from the images' lines; the index repeats them, and records whose two numbers differ are refused. The records
lie in the repository, in `benchmarks/results/papers`, and not in the installed package.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from gradveil.audit.attack_selection import stands_for_many, trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import machine as describe_machine
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import AUDIT, Trial, load_run
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.private_files import write_private
from gradveil.federated.training_run import is_training, load_training
from gradveil.papers.study import SCALES

RECORDS = Path("benchmarks") / "results" / "papers"
"""Where the records lie in the repository."""
INDEX = "measurements.csv"
_SUMMED = ("recovered", "ssim", "accuracy")
"""Scores whose mean the index repeats."""
_POINTS = 200
"""Most points of a curve over rounds."""
_SCORES = ("recovered", "ssim", "psnr", "mse", "lpips", "identified", "ssim_transformed")


@dataclass(frozen=True)
class Record:
    """One measurement: a defence and an attack (or none: a training) in a run, with its scores."""

    run: str
    defence: str
    attack: str
    scale: str
    status: str
    """`complete`, or why there is no result."""
    iterations: int | None
    """Largest number of iterations of a target; of a training, its rounds."""
    seconds: float | None
    """Working time, summed over processes."""
    baseline: float | None
    """Rate of images that the best guess recovers without the update; of a training, the share of the largest class."""
    seed: str
    """The seeds, separated by spaces."""
    date: str
    machine: str
    torch: str
    code: str
    """Version of Gradveil, and the commit where it ran from its repository."""
    command: str
    """The command that measures it again."""
    scores: tuple[Mapping[str, Any], ...] = field(compare=False)
    """One line per image or training."""

    @property
    def count(self) -> int:
        """Number of images, or of trainings."""
        return len(self.scores)

    @property
    def result(self) -> str:
        """The mean of each score, as it stands in the index: the rate of recovered images, the mean SSIM, ..."""
        means = ((name, [float(f"{value:.5g}") for value in self.values(name)]) for name in _SUMMED)  # as written
        return " ".join(f"{name}={fmean(values):.4f}" for name, values in means if values)

    @property
    def place(self) -> tuple[str, str, str]:
        """What is measured."""
        return self.run, self.defence, self.attack

    def values(self, name: str) -> list[float]:
        """Return the scores of a name, those that are missing left out."""
        return [float(line[name]) for line in self.scores if line.get(name) not in (None, "")]


_FACTS = (*(entry.name for entry in fields(Record) if entry.name != "scores"), "count", "result")


def read_run(folder: Path, run: str, scale: str, defence: str) -> Iterator[Record]:
    """Read the measurements of a run directory that `gradveil paper run` wrote."""
    if is_training(folder):
        yield from _trainings(folder, run, scale, defence)
    elif AUDIT.exists(folder):
        yield from _audits(folder, run, scale, defence)


def _audits(folder: Path, run: str, scale: str, defence: str) -> Iterator[Record]:
    opened = load_run(folder)
    config = RunConfig.model_validate(opened.info["config"])
    many = next((f"{text}: " for text in config.attacks if stands_for_many(text)), "")
    attacks = {address.id: f"{many}{address.attack}" for address in trials(config)}
    found: dict[str, list[tuple[int, Trial]]] = {}
    for number, trial in enumerate(opened.trials):
        found.setdefault(attacks[trial.info["trial"]], []).append((number, trial))
    left = set(opened.info["trials"]) - {trial.info["trial"] for trial in opened.trials}
    waiting = {attacks[name] for name in left}
    for attack in sorted(waiting):
        yield Record(run, defence, attack, scale, "unfinished", None, None, None, "", *_facts(opened.info), ())
    for attack, each in found.items():
        if attack in waiting:
            continue
        seeds = " ".join(dict.fromkeys(str(trial.info["seed"]) for _, trial in each))
        facts = (seeds, *_facts(opened.info))
        if failed := next((trial.failed for _, trial in each if trial.failed is not None), None):
            yield Record(run, defence, attack, scale, failed, None, None, None, *facts, ())
            continue
        lines = [line for _, trial in each for line in _image_lines(trial)]
        iterations = max((record.get("iterations") or 0 for _, trial in each for record in trial.records), default=0)
        seconds = sum(trial.info.get("seconds") or 0.0 for _, trial in each)
        baselines = [value for number, trial in each if (value := Row(number, trial).baseline) is not None]
        baseline = fmean(baselines) if baselines else None
        yield Record(
            run, defence, attack, scale, "complete", iterations or None, seconds, baseline, *facts, tuple(lines)
        )


def _image_lines(trial: Trial) -> Iterator[dict[str, Any]]:
    """Yield the scores of every image of a trial."""
    for record in trial.records:
        for index, (image, label) in enumerate(zip(record["per_image"], _right_labels(record), strict=True)):
            yield {
                "seed": trial.info["seed"],
                "target": record["target_client"],
                "image": index,
                "status": record["status"],
                "recovered": image["success"],
                "label": label,
                **{name: image[name] for name in _SCORES if image.get(name) is not None},
                **{name: image.get(name) for name in trial.info.get("metrics", ())},
            }


def _right_labels(record: Mapping[str, Any]) -> list[int]:
    """Mark the images of a target whose label the attack recovered; reconstructions are in the images' order."""
    return [int(own == predicted) for own, predicted in zip(record["label"], record["predicted"], strict=True)]


def _trainings(folder: Path, run: str, scale: str, defence: str) -> Iterator[Record]:
    training = load_training(folder)
    summaries = [summary for _, summary in training.trials if summary is not None]
    if not summaries:
        return
    lines = [
        {
            **{name: row[name] for name in ("seed", "status", "accuracy", "loss", "rounds")},
            "best_accuracy": max(record["accuracy"] for record in row["curve"]),
            "curve": _curve(row["curve"]),
        }
        for row in summaries
        if row["accuracy"] is not None
    ]
    status = "complete" if len(lines) == len(training.trials) else "unfinished"
    seconds = sum(row["seconds"] * row["rounds"] for row in summaries if row["seconds"] is not None)
    rounds = max(row["rounds"] for row in summaries)
    facts = (" ".join(str(row["seed"]) for row in summaries), *_facts(training.info))
    yield Record(run, defence, "", scale, status, rounds, seconds, summaries[0]["constant"], *facts, tuple(lines))


def _curve(points: Sequence[Mapping[str, Any]]) -> str:
    """Write the accuracy over the rounds as `round:accuracy`, evenly thinned, the last round included."""
    step = -(-len(points) // _POINTS)
    kept = [point for point in points if (len(points) - point["number"]) % step == 0] if points else []
    return " ".join(f"{point['number']}:{point['accuracy']:.4f}" for point in kept)


def _facts(info: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    machine = info.get("machine") or describe_machine("cpu")
    where = machine.get("device", "cpu")
    name = machine.get("cpu", "") if where == "cpu" else where
    cores = f"{machine['cores']} cores, " if where == "cpu" and "cores" in machine else ""
    torch = info.get("packages", {}).get("torch") or version("torch")
    code = info.get("code") or info.get("gradveil", "")
    return info["created"][:10], f"{cores}{name}", torch, code, info.get("command", "")


def records_folder(given: Path | None = None) -> Path | None:
    """Find the records: the given folder, that of the working directory, or that of the checkout; None without one."""
    if given is not None:
        return given
    checkout = Path(__file__).parents[3]
    return next((root / RECORDS for root in (Path.cwd(), checkout) if (root / RECORDS).is_dir()), None)


def folder_to_write(given: Path | None = None) -> Path:
    """Return the folder in which measurements are recorded; refuse if there is none."""
    folder = records_folder(given)
    if folder is None:
        remedy = "run the command in a checkout of Gradveil, or name a folder: --records DIR"
        raise fail("--records", f"there is no folder {RECORDS} to write to", remedy)
    return folder


def write(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write measurements into the folder of a paper's records; return the files.

    Each replaces what was recorded in its place, unless that is complete and of a larger scale. Processes that write at
    the same time wait for each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        known = {record.place: record for record in _read(folder)}
        changed = [
            record for record in records if record.place not in known or _rank(record) >= _rank(known[record.place])
        ]
        known |= {record.place: record for record in changed}
        ordered = sorted(known.values(), key=lambda record: record.place)
        written = []
        for run in sorted({record.run for record in changed}):
            written.append(folder / f"{run}.csv")
            lines = [line for record in ordered if record.run == run for line in _named(record)]
            _write_lines(
                written[-1], dict.fromkeys(["defence", "attack", *(name for line in lines for name in line)]), lines
            )
        if changed:  # last: a measurement is listed once its scores are written
            written.append(folder / INDEX)
            _write_lines(written[-1], _FACTS, [{name: getattr(record, name) for name in _FACTS} for record in ordered])
        return written


def _named(record: Record) -> list[Mapping[str, Any]]:
    return [{**line, "defence": record.defence, "attack": record.attack} for line in record.scores]


@contextmanager
def _alone(folder: Path, way: int = fcntl.LOCK_EX) -> Generator[None]:
    """Hold a folder for this process, waiting for others; the folder itself is locked, so no file is left behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, way)
        yield
    finally:
        os.close(handle)


def _write_lines(file: Path, names: Iterable[str], lines: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _short(value) for name, value in line.items()} for line in lines)
    write_private(file, text.getvalue().encode())
    file.chmod(0o644)


def _short(value: Any) -> Any:
    """Write scores with five digits: far more than their noise."""
    if isinstance(value, bool):
        return int(value)
    return f"{value:.5g}" if isinstance(value, float) else value


def read(folder: Path) -> list[Record]:
    """Read the measurements in the folder of a paper's records; refuse results that their scores do not give."""
    if not (folder / INDEX).is_file():
        return []
    with _alone(folder, fcntl.LOCK_SH):  # not while somebody writes them
        return _read(folder)


def _read(folder: Path) -> list[Record]:
    index = folder / INDEX
    if not index.is_file():
        return []
    scores: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    facts = _read_lines(index)
    for run in {line["run"] for line in facts}:
        for line in _read_lines(folder / f"{run}.csv"):
            scores.setdefault((run, line["defence"], line["attack"]), []).append(line)
    records = [_recorded(line, scores.get((line["run"], line["defence"], line["attack"]), [])) for line in facts]
    refuse([problem for line, record in zip(facts, records, strict=True) for problem in _contradictions(line, record)])
    return records


def _contradictions(line: Mapping[str, str], record: Record) -> Iterator[Problem]:
    """Compare a line of the index with its images; records from before these columns have none."""
    for name, value in (("count", str(record.count)), ("result", record.result)):
        if line.get(name, value) != value:
            where = f"{record.run}: {record.defence}, {record.attack or 'training'}"
            problem = f"{name} is '{line[name]}' in {INDEX}, but the lines of {record.run}.csv give '{value}'"
            yield Problem(where, problem, "restore both files, or measure it again")


def _read_lines(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text("utf-8"))))


def _recorded(line: Mapping[str, str], scores: Sequence[Mapping[str, Any]]) -> Record:
    return Record(
        run=line["run"],
        defence=line["defence"],
        attack=line["attack"],
        scale=line["scale"],
        status=line["status"],
        iterations=int(line["iterations"]) if line["iterations"] else None,
        seconds=float(line["seconds"]) if line["seconds"] else None,
        baseline=float(line["baseline"]) if line["baseline"] else None,
        **{name: line[name] for name in ("seed", "date", "machine", "torch", "code", "command")},
        scores=tuple(scores),
    )


def best(records: Iterable[Record]) -> dict[tuple[str, str, str], Record]:
    """Choose for each place the complete measurement of the largest scale, the latest among equals."""
    return {record.place: record for record in sorted(records, key=_rank)}


def _rank(record: Record) -> tuple[bool, int, int, str]:
    return record.status == "complete", SCALES.index(record.scale), record.count, record.date
