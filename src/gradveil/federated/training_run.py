"""The training of a run file: every defence with every seed, stored after each round, and resumable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_low
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.private_files import DamagedError, plain, read_json, write_json, write_private
from gradveil.core.user_code import code_of
from gradveil.federated.engine import Federation, train
from gradveil.federated.privacy_ledger import guarantee
from gradveil.federated.training_config import FREE, TrainConfig
from gradveil.federated.training_setup import TrainingSetting, TrainingTrial, open_setting, refuse_other_images, trials
from gradveil.federated.training_state import (
    RoundResult,
    Standing,
    Status,
    load_standing,
    pack_standing,
    unpack_standing,
)
from gradveil.federated.update_records import UpdateRecorder
from gradveil.nn.weight_files import fingerprint
from gradveil.runs.run_folder import (
    TRIALS,
    Amount,
    Count,
    RunKind,
    Share,
    StoredPart,
    StoredRun,
    checked,
    described,
    digest,
    noting,
)
from gradveil.runs.task import Job, Parcel, Report, Scheduler, Site, Work, in_process

RUN = "train.json"
"""The file that describes a training."""


class _TrainingInfo(StoredRun):
    config: dict[str, Any]


TRAINING_RUN = RunKind(
    file=RUN,
    noun="training",
    form=TypeAdapter(_TrainingInfo),
    restore="put a copy of the file back, or train again with --fresh, which removes the results",
    free=FREE,
)
"""The folder of a training."""


class _Round(StoredPart):
    number: Count
    clients: list[Count] = Field(default=[])
    absent: list[Count] = Field(default=[])
    refused: list[Count] = Field(default=[])
    spoke: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    accuracy: Share
    loss: float | None
    validation_loss: float | None
    validation_accuracy: Share | None = None
    bytes_up: Count
    bytes_down: Count
    seconds: Amount
    client_seconds: Amount | None = None
    held_back: dict[str, float] | None = None


class _Start(StoredPart):
    accuracy: Share
    loss: float | None = None


class _Summary(StoredPart):
    trial: str
    defence: str
    seed: int
    status: str
    rounds: Count
    best_round: Count | None
    accuracy: Share | None
    loss: float | None = None
    validation_loss: float | None
    bytes_up: Amount | None
    bytes_down: Amount | None
    seconds: Amount | None
    client_seconds: Amount | None
    tested: Annotated[int, Field(ge=1, le=10**15)] | None
    constant: Share | None
    guarantee: str | None
    epsilon: dict[str, Annotated[float, Field(ge=0)]]
    delta: Share | None
    failed: str | None = None
    code: dict[str, str] = Field(default={})
    start: _Start | None
    curve: list[_Round]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that the numbers agree with each other."""
        numbers = [point.number for point in self.curve]
        if numbers != list(range(1, len(numbers) + 1)) or self.rounds != len(numbers):
            raise ValueError("its rounds are not those of its curve, counted from 1")
        if (self.best_round or 0) > self.rounds:
            raise ValueError("its best round is none of its rounds")
        if (self.status == "failed") != (not numbers) or (numbers and None in self._numbers()):
            raise ValueError("it has not the numbers of its status")
        if self.constant is not None and self.tested is None:
            raise ValueError("it compares with one class, and does not say on how many examples")
        return self

    def _numbers(self) -> tuple[float | None, ...]:
        return self.accuracy, self.bytes_up, self.bytes_down, self.seconds


_SUMMARY = TypeAdapter(_Summary)


@dataclass(frozen=True)
class StoredTraining:
    """A training on disk."""

    path: Path
    info: Mapping[str, Any]
    config: TrainConfig
    trials: Sequence[tuple[TrainingTrial, Mapping[str, Any] | None]]
    """Every trial with its summary, in the run file's order; None if it is not finished."""


def is_training(folder: Path) -> bool:
    """Return whether `gradveil train` wrote this folder."""
    return TRAINING_RUN.exists(folder)


def load_training(folder: Path) -> StoredTraining:
    """Read a training, finished or not; raise for all damaged files at once."""
    if not is_training(folder):
        raise fail(str(folder), "is no training (it has no train.json)", "give what `gradveil train` wrote")
    info = TRAINING_RUN.read(folder)
    try:
        config = TrainConfig.model_validate(info["config"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = Problem(str(folder / RUN), f"config.{where}: {first['msg']}", TRAINING_RUN.restore)
        raise DamagedError(problem) from None
    summaries: list[tuple[TrainingTrial, Mapping[str, Any] | None]] = []
    problems: list[Problem] = []
    for trial in trials(config):
        file = folder / TRIALS / f"{trial.id}.json"
        with noting(problems):
            summary = _summary(file) if file.is_file() else None
            summaries.append((trial, None if summary and _longer(config, summary) else summary))
    refuse(problems)
    return StoredTraining(folder, info, config, summaries)


def _longer(config: TrainConfig, summary: Mapping[str, Any]) -> bool:
    """Return whether the run now has more rounds than the summary of a finished training."""
    return summary["status"] == "finished" and summary["rounds"] < config.rounds


def _summary(file: Path) -> dict[str, Any]:
    return checked(_SUMMARY, file, read_json(file, TRAINING_RUN.restore), TRAINING_RUN.restore)


FAILED = "failed"
"""Status of a training that ended in an error; the next call resumes it."""


def site(opened: TrainingSetting, data_dir: Path | None, recorder: UpdateRecorder | None = None) -> Site:
    """Return the site that workers elsewhere open to train the trials of this run."""
    record = None
    if recorder is not None:
        record = {"truth": recorder.truth, "rounds": recorder.rounds, "clients": recorder.clients}
        record["folder"] = str(recorder.folder.resolve())
    setting = {"config": opened.config.resolved(), "record": record}
    setting["data_dir"] = str(data_dir.resolve()) if data_dir else None
    return Site(f"{__name__}:{open_work.__name__}", {**setting, "images": opened.data.identities()})


def open_work(setting: Mapping[str, Any]) -> Work:
    """Open the setting of a run in a worker; it has been checked before."""
    data_dir = Path(setting["data_dir"]) if setting["data_dir"] else None
    opened = open_setting(TrainConfig.model_validate(setting["config"]), data_dir, checked=False)
    refuse_other_images(setting["images"], opened.data.identities())
    record = setting["record"]
    return working(opened, UpdateRecorder(**{**record, "folder": Path(record["folder"])}) if record else None)


def working(setting: TrainingSetting, recorder: UpdateRecorder | None = None) -> Work:
    """Return the work of an open run: it reports each round, with the bytes to resume from."""
    config = setting.config
    every = {trial.id: trial for trial in trials(config)}

    def work(order: Parcel, report: Report) -> Parcel:
        trial = every[order.facts["trial"]]
        settings = identity(setting, trial)
        standing = unpack_standing(order.data, settings, device=config.device) if order.data else None

        def keep(standing: Standing) -> None:
            result = {"record": asdict(standing.records[-1]), "status": standing.status}
            report(Parcel(result, pack_standing(standing, settings)))

        federation = setting.federation(trial)
        if recorder is not None:
            federation = replace(federation, recorder=_configured(recorder, trial, config, federation))
        standing = going_on(standing, config.rounds) or begun(setting, trial, federation)
        standing = replace(standing, planned=max(standing.planned, config.rounds))
        facts(federation, config, standing)  # a missing accountant, say, must not fail after the last round
        standing = train(federation, config.rounds, standing, keep)
        return Parcel(summarise(trial, standing, facts(federation, config, standing)))

    return work


def _configured(
    recorder: UpdateRecorder, trial: TrainingTrial, config: TrainConfig, federation: Federation
) -> UpdateRecorder:
    """Return the recorder with the client configuration of this trial."""
    local = federation.client.local
    if config.local is None or local is None:
        return replace(recorder, run=trial.id, defence=trial.defence, local=None, sends="gradient")
    spelled = config.local.model_copy(update={"batch": local.batch})
    return replace(recorder, run=trial.id, defence=trial.defence, local=spelled, sends="difference")


def begun(setting: TrainingSetting, trial: TrainingTrial, federation: Federation) -> Standing:
    """Return the state before the first round, with digests of custom code."""
    return replace(federation.start(), code=code_of((setting.config.model.name, trial.defence)))


def going_on(standing: Standing | None, rounds: int) -> Standing | None:
    """Set a finished training to running if the run now has more rounds."""
    if standing is not None and standing.status == "finished" and len(standing.records) < rounds:
        return replace(standing, status="running")
    return standing


def facts(federation: Federation, config: TrainConfig, standing: Standing) -> dict[str, Any]:
    """Return the guarantee of a training, its number of test examples, and the share of their largest class.

    The guarantee counts the largest number of rounds that were ever planned or run.
    """
    counts = federation.test.targets.bincount()
    rounds = max(config.rounds, standing.planned, len(standing.records))
    judged = {"tested": int(counts.sum()), "constant": int(counts.max()) / int(counts.sum())}
    return guarantee(federation, rounds, config.delta) | judged


def identity(setting: TrainingSetting, trial: TrainingTrial) -> str:
    """Hash the settings that a training's state depends on, and initial weights from a file."""
    start = [fingerprint(setting.weights)] if setting.weights else []
    return digest([setting.config.digest(), trial.title, trial.seed, *start])


def summarise(trial: TrainingTrial, standing: Standing, further: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise one training, with every round's record; the accuracy is that of the final parameters.

    `further` has the values of `facts`. Bytes are means over the rounds, seconds are medians: the first round in a
    process is slow, whatever the defence.
    """
    records = standing.records
    last = records[standing.best_round - 1] if standing.best_round else records[-1]
    rounds = len(records)
    worked = [record.client_seconds for record in records if record.client_seconds is not None]
    return plain(
        {
            "trial": trial.id,
            "defence": trial.title,
            "seed": trial.seed,
            "status": standing.status,
            "rounds": rounds,
            "best_round": standing.best_round,
            "accuracy": last.accuracy,
            "loss": last.loss,
            "validation_loss": last.validation_loss,
            "bytes_up": sum(record.bytes_up for record in records) / rounds,
            "bytes_down": sum(record.bytes_down for record in records) / rounds,
            "seconds": median_low(record.seconds for record in records),
            "client_seconds": median_low(worked) if worked else None,
            **further,
            "code": dict(standing.code),
            "start": None if standing.start is None else dict(zip(("loss", "accuracy"), standing.start, strict=True)),
            "curve": [asdict(record) for record in records],
        }
    )


def failure(trial: TrainingTrial, why: str) -> dict[str, Any]:
    """Summarise a training that failed: it has no numbers."""
    numbers = (
        "best_round",
        "accuracy",
        "loss",
        "validation_loss",
        "bytes_up",
        "bytes_down",
        "seconds",
        "client_seconds",
    )
    named = {"trial": trial.id, "defence": trial.title, "seed": trial.seed, "status": FAILED, "failed": why}
    nothing = {"tested": None, "constant": None, "guarantee": None, "epsilon": {}, "delta": None}
    return {**named, "rounds": 0, **dict.fromkeys(numbers), **nothing, "start": None, "curve": []}


_round = TypeAdapter(RoundResult)


def run(
    setting: TrainingSetting,
    folder: Path,
    report: Callable[[TrainingTrial, RoundResult, Status], None],
    schedule: Scheduler = in_process,
    recorder: UpdateRecorder | None = None,
    at: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Train every trial for the rounds of the run, and store it after each round; return the summaries.

    `recorder` records the updates of all clients, with the trial as the name of the run. The states after the rounds
    `at` (0: before the first) are stored next to the current one: see `trial_file`.
    """
    config = setting.config

    def file(trial: TrainingTrial) -> Path:
        return trial_file(folder, trial)

    def order(trial: TrainingTrial) -> Parcel:
        return Parcel({"trial": trial.id}, file(trial).read_bytes() if file(trial).is_file() else b"")

    def store(trial: TrainingTrial, progress: Parcel) -> None:
        record = _round.validate_python(progress.facts["record"])
        # The chosen state first: after a kill between the two writes, the round is repeated and both are written.
        if record.number in at:
            write_private(trial_file(folder, trial, record.number), progress.data)
        write_private(file(trial), progress.data)
        report(trial, record, progress.facts["status"])

    def write(trial: TrainingTrial, summary: Mapping[str, Any]) -> None:
        write_json(folder / TRIALS / f"{trial.id}.json", summary)

    waiting: list[TrainingTrial] = []
    problems: list[Problem] = []
    for trial in trials(config):
        try:
            _rewind(setting, folder, trial, at)
            standing = going_on(load_standing(file(trial), identity(setting, trial)), config.rounds)
        except GradveilError as error:
            problems += error.problems
            continue
        if standing is None or standing.status == "running":
            waiting.append(trial)
        else:
            write(trial, summarise(trial, standing, facts(setting.federation(trial), config, standing)))
    refuse(problems)
    with schedule(Job(working(setting, recorder), order, store), waiting) as done:
        for trial, result in done:
            write(trial, failure(trial, result) if isinstance(result, str) else result.facts)
    return load_summaries(folder)


def trial_file(folder: Path, trial: TrainingTrial, number: int | None = None) -> Path:
    """Return the file of a training's current state, or of its state after a chosen round."""
    return folder / TRIALS / (trial.id + ("" if number is None else f".round-{number}") + ".safetensors")


def _rewind(setting: TrainingSetting, folder: Path, trial: TrainingTrial, at: Collection[int]) -> None:
    """Go back to before the first chosen state that is missing; store the one before the first round."""
    files = {number: trial_file(folder, trial, number) for number in sorted(at)}
    missing = [number for number, stored in files.items() if not stored.is_file()]
    settings, file = identity(setting, trial), trial_file(folder, trial)
    if 0 in missing:
        write_private(files[0], pack_standing(begun(setting, trial, setting.federation(trial)), settings))
    standing = load_standing(file, settings) if missing else None
    late = [number for number in missing if 0 < number <= (len(standing.records) if standing else 0)]
    if late:
        before = max((number for number in files if number < late[0]), default=None)
        if before is None:
            file.unlink()
        else:
            write_private(file, files[before].read_bytes())


def describe(
    config: TrainConfig,
    command: str,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
    images: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Return the content of `train.json`; other initial weights or `images` make another training."""
    start = fingerprint(weights) if weights else None
    return described(config, command, (trial.id for trial in trials(config)), start, images)


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """Read the summaries of the finished trainings of a run, with their curves."""
    return [dict(summary) for _, summary in load_training(folder).trials if summary is not None]
