"""A training as a run file describes it: every defence with every seed, written each round, resumed after any stop."""

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
        """Compare the numbers with each other."""
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
    """A training as it lies on disk."""

    path: Path
    info: Mapping[str, Any]
    config: TrainConfig
    trials: Sequence[tuple[TrainingTrial, Mapping[str, Any] | None]]
    """Every trial with its summary, in the run file's order; None where it is not finished."""


def is_training(folder: Path) -> bool:
    """Say whether `gradveil train` wrote this folder."""
    return TRAINING_RUN.exists(folder)


def load_training(folder: Path) -> StoredTraining:
    """Read a training, finished or not; refuse with every damaged file at once."""
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
    found: list[tuple[TrainingTrial, Mapping[str, Any] | None]] = []
    problems: list[Problem] = []
    for trial in trials(config):
        file = folder / TRIALS / f"{trial.id}.json"
        with noting(problems):
            told = _summary(file) if file.is_file() else None
            found.append((trial, None if told and _longer(config, told) else told))
    refuse(problems)
    return StoredTraining(folder, info, config, found)


def _longer(config: TrainConfig, told: Mapping[str, Any]) -> bool:
    """Say whether more rounds were asked for since a training was summed up, and it has not got there yet."""
    return told["status"] == "finished" and told["rounds"] < config.rounds


def _summary(file: Path) -> dict[str, Any]:
    return checked(_SUMMARY, file, read_json(file, TRAINING_RUN.restore), TRAINING_RUN.restore)


FAILED = "failed"
"""Status of a training that ended in an error; the next call takes it up again."""


def site(opened: TrainingSetting, data_dir: Path | None, recorder: UpdateRecorder | None = None) -> Site:
    """Say what workers elsewhere open to train the trials of this run."""
    record = None
    if recorder is not None:
        record = {"truth": recorder.truth, "rounds": recorder.rounds, "clients": recorder.clients}
        record["folder"] = str(recorder.folder.resolve())
    where = str(data_dir.resolve()) if data_dir else None
    setting = {"config": opened.config.resolved(), "data_dir": where, "record": record}
    return Site(f"{__name__}:{open_work.__name__}", {**setting, "images": opened.data.identities()})


def open_work(setting: Mapping[str, Any]) -> Work:
    """Open the setting of a run, where somebody else has checked it."""
    data_dir = Path(setting["data_dir"]) if setting["data_dir"] else None
    opened = open_setting(TrainConfig.model_validate(setting["config"]), data_dir, checked=False)
    refuse_other_images(setting["images"], opened.data.identities())
    record = setting["record"]
    return working(opened, UpdateRecorder(**{**record, "folder": Path(record["folder"])}) if record else None)


def working(setting: TrainingSetting, recorder: UpdateRecorder | None = None) -> Work:
    """Return the work of a run whose setting is open: it tells each round with the bytes that go on from there."""
    config = setting.config
    every = {trial.id: trial for trial in trials(config)}

    def work(order: Parcel, tell: Report) -> Parcel:
        trial = every[order.facts["trial"]]
        own = identity(setting, trial)
        standing = unpack_standing(order.data, own, device=config.device) if order.data else None

        def keep(now: Standing) -> None:
            tell(Parcel({"record": asdict(now.records[-1]), "status": now.status}, pack_standing(now, own)))

        federation = setting.federation(trial)
        if recorder is not None:
            federation = replace(federation, recorder=_configured(recorder, trial, config, federation))
        standing = going_on(standing, config.rounds) or begun(setting, trial, federation)
        standing = replace(standing, planned=max(standing.planned, config.rounds))
        standing = train(federation, config.rounds, standing, keep)
        return Parcel(summarise(trial, standing, facts(federation, config, standing)))

    return work


def _configured(
    recorder: UpdateRecorder, trial: TrainingTrial, config: TrainConfig, federation: Federation
) -> UpdateRecorder:
    """Report the recorder what the clients of this trial are configured as."""
    local = federation.client.local
    if config.local is None or local is None:
        return replace(recorder, run=trial.id, defence=trial.defence, local=None, sends="gradient")
    spelled = config.local.model_copy(update={"batch": local.batch})
    return replace(recorder, run=trial.id, defence=trial.defence, local=spelled, sends="difference")


def begun(setting: TrainingSetting, trial: TrainingTrial, federation: Federation) -> Standing:
    """Return where a training stands before its first round, with what of its code is the user's own."""
    return replace(federation.start(), code=code_of((setting.config.model.name, trial.defence)))


def going_on(standing: Standing | None, rounds: int) -> Standing | None:
    """Let a training that is finished run on where more rounds are asked for."""
    if standing is not None and standing.status == "finished" and len(standing.records) < rounds:
        return replace(standing, status="running")
    return standing


def facts(federation: Federation, config: TrainConfig, standing: Standing) -> dict[str, Any]:
    """Say what is proven of a training, how many test examples judge it, and what share of them one class for all is.

    What is proven counts the most rounds that it was ever planned for, or had.
    """
    counts = federation.test.targets.bincount()
    rounds = max(config.rounds, standing.planned, len(standing.records))
    judged = {"tested": int(counts.sum()), "constant": int(counts.max()) / int(counts.sum())}
    return guarantee(federation, rounds, config.delta) | judged


def identity(setting: TrainingSetting, trial: TrainingTrial) -> str:
    """Hash what a training's standing depends on; the weights it starts from too, where a file gives them."""
    start = [fingerprint(setting.weights)] if setting.weights else []
    return digest([setting.config.digest(), trial.title, trial.seed, *start])


def summarise(trial: TrainingTrial, standing: Standing, told: Mapping[str, Any]) -> dict[str, Any]:
    """Sum one training up, with every round's record: the accuracy is that of the parameters it ends with.

    `told` is what else is known of it, see `facts`. Bytes are the means of the rounds, seconds their medians: a
    process is slow once, in the first round of its first training, which says nothing of that training's defence.
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
            **told,
            "code": dict(standing.code),
            "start": None if standing.start is None else dict(zip(("loss", "accuracy"), standing.start, strict=True)),
            "curve": [asdict(record) for record in records],
        }
    )


def failure(trial: TrainingTrial, why: str) -> dict[str, Any]:
    """Sum up a training that failed: it has no numbers."""
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
    tell: Callable[[TrainingTrial, RoundResult, Status], None],
    schedule: Scheduler = in_process,
    recorder: UpdateRecorder | None = None,
    at: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Train every trial as far as the run asks for; write each after every round. Returns a summary of each.

    `recorder` keeps what leaves the clients of every trial, as the trial's own run. Where a trial stood after the
    rounds `at` (0: before the first) is kept beside where it stands: see `trial_file`.
    """
    config = setting.config

    def file(trial: TrainingTrial) -> Path:
        return trial_file(folder, trial)

    def order(trial: TrainingTrial) -> Parcel:
        return Parcel({"trial": trial.id}, file(trial).read_bytes() if file(trial).is_file() else b"")

    def heard(trial: TrainingTrial, news: Parcel) -> None:
        record = _round.validate_python(news.facts["record"])
        # What is to be kept comes first: a kill in between is then made up for.
        if record.number in at:
            write_private(trial_file(folder, trial, record.number), news.data)
        write_private(file(trial), news.data)
        tell(trial, record, news.facts["status"])

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
    with schedule(Job(working(setting, recorder), order, heard), waiting) as done:
        for trial, found in done:
            write(trial, failure(trial, found) if isinstance(found, str) else found.facts)
    return load_summaries(folder)


def trial_file(folder: Path, trial: TrainingTrial, number: int | None = None) -> Path:
    """Say where it is written where a training stands, or where it stood after a chosen round."""
    return folder / TRIALS / (trial.id + ("" if number is None else f".round-{number}") + ".safetensors")


def _rewind(setting: TrainingSetting, folder: Path, trial: TrainingTrial, at: Collection[int]) -> None:
    """Go back to before the first standing that should be kept and is gone; keep the one before the first round."""
    files = {number: trial_file(folder, trial, number) for number in sorted(at)}
    gone = [number for number, kept in files.items() if not kept.is_file()]
    own, file = identity(setting, trial), trial_file(folder, trial)
    if 0 in gone:
        write_private(files[0], pack_standing(begun(setting, trial, setting.federation(trial)), own))
    standing = load_standing(file, own) if gone else None
    late = [number for number in gone if 0 < number <= (len(standing.records) if standing else 0)]
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
    """Return what `train.json` holds; a start from other weights, or on other `images`, is another training."""
    start = fingerprint(weights) if weights else None
    return described(config, command, (trial.id for trial in trials(config)), start, images)


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """Read what the finished trainings of a run came to, with their curves."""
    return [dict(told) for _, told in load_training(folder).trials if told is not None]
