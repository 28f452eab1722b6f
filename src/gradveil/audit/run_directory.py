"""The run directory: records, images, configuration. Private, atomic, checked, and resumable.

`run.json` says which settings the results were made with; `trials/NAME/` has `trial.json` (facts), `records.json` (one
object a target client) and `images.safetensors` (truths and reconstructions, where the run keeps them).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from torch import Tensor

from gradveil.audit.attack_selection import Attacker, Method, stands_for_many, without_aim
from gradveil.audit.audit_config import BUDGET, FREE
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import listing, plural
from gradveil.core.private_files import (
    DamagedError,
    read_json,
    seal,
    sync,
    unreadable,
    unseal,
    write_json,
    write_private,
)
from gradveil.federated.training_run import is_training
from gradveil.runs.run_folder import (
    TRIALS,
    Amount,
    Count,
    RunKind,
    Share,
    StoredPart,
    StoredRun,
    checked,
    children,
    digest,
    noting,
    remove,
)

RUN, TRIAL, RECORDS, IMAGES = "run.json", "trial.json", "records.json", "images.safetensors"
"""File names: of the run, and of a trial's facts, its target clients' records and its images."""
PLANS = "plans"
"""Folder of the plans of trials in flight."""
TRAINING = "training"
"""Folder of the trainings that an audit follows."""
AGAIN = "give the command of the audit again, which makes this trial again, or remove its folder"
"""What to do about a damaged trial: resuming replaces it, since equal settings give equal records."""


class _AuditConfig(StoredPart):
    """What reports read of a run's settings; resuming compares all of them."""

    data: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    defences: list[str] | None = None
    attacks: list[str] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    budget: Annotated[str, Field(pattern=BUDGET)] | None = None
    images: bool | None = None


class _AuditInfo(StoredRun):
    config: _AuditConfig
    share: Annotated[int, Field(ge=1)]
    sharing: dict[str, list[Count]] = Field(default={})
    warnings: list[str] = Field(default=[])
    untried: list[str] = Field(default=[])
    packages: dict[str, str] = Field(default={})
    machine: dict[str, str | int | None] = Field(default={})


AUDIT = RunKind(
    file=RUN,
    noun="run directory",
    form=TypeAdapter(_AuditInfo),
    restore="put a copy of the file back, or audit again with --fresh, which removes the results",
    free=FREE,
    folders=(TRIALS, PLANS, TRAINING),
    grows=("sharing", "warnings", "untried"),
)
"""The folder of an audit."""


class _Address(StoredPart):
    trial: str
    model: str
    data: str
    seed: int
    round: Count
    trained: Count | None
    client: str
    batch: Annotated[int, Field(ge=1, le=10**15)]
    update: str
    local: bool
    defence: str
    defence_title: str = ""
    changes: list[str]
    undefended: bool
    examples: dict[str, Any] | None = None
    recorded_defence: str | None = None
    attack: str
    attack_title: str = ""
    preset: str
    control: bool = False
    prepared: list[str] = Field(default=[])
    citations: list[str] = Field(default=[])
    code: dict[str, str] = Field(default={})


class _Failed(_Address):
    failed: str
    unfit: bool = False


class _Control(StoredPart):
    asr: Share
    ssim_mean: float | None = None
    psnr_mean: float | None = None
    identified: Share | None = None


class _Training(StoredPart):
    round: Count
    accuracy: Share
    bytes_up: Amount
    bytes_down: Amount
    seconds: Amount
    client_seconds: Amount | None = None
    final_accuracy: Share | None = None
    guarantee: str | None = None
    epsilon: dict[str, float] = Field(default={})
    delta: Share | None = None


class _Bound(StoredPart):
    mse: Amount | None
    by: str = ""
    prior: Amount | None = None


class _RecoveryBound(StoredPart):
    of: Literal["watched", "planned"]
    unit: str
    noise: Annotated[float, Field(ge=0)]
    releases: Count
    rate: Share
    guess: Share | None
    bound: Share | None
    bound_any: Share | None
    guess_recovered: Share | None
    bound_recovered: Share | None
    quoted: dict[str, Share]
    mse_unbiased: float | None


class _Point(StoredPart):
    iterations: Count
    asr: Share
    ssim_mean: float | None = None
    ssim_std: float | None = None


class _LayerNoise(StoredPart):
    parameter: str
    values: Count
    noise: float | None
    update: float | None


class _Finished(_Address):
    attacker: Attacker
    method: Method
    simulated_client: str
    threshold: Annotated[float, Field(ge=-1, le=1)]
    controls: dict[str, _Control]
    knowledge: dict[str, str]
    in_parts: bool
    grants: list[str]
    secrets: list[str]
    rounds_used: Annotated[list[Count], Field(min_length=1)] | None
    carries: bool = False
    remarks: list[str] = Field(default=[])
    suspicions: list[str] = Field(default=[])
    notes: list[str] = Field(default=[])
    guarantee: str | None = None
    epsilon: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    health: dict[str, float | None] | None = None
    missing: dict[str, str] = Field(default={})
    unbounded: str | None = None
    unscored: str | None = None
    planted: str = ""
    guard: list[str] = Field(default=[])
    params: Count | None = None
    restarts: Count | None = None
    simulated: Count
    target_iterations: Amount
    budget_share: Share | None = None
    row_iterations: Count | None = None
    seconds: Amount | None = None
    iterations_per_second: Amount | None = None
    distance: Annotated[float, Field(ge=0)] | None = None  # loud noise moves an update as far as numbers go
    cosine: float | None = None
    first_order_utility: float | None = None
    second_order_utility: float | None = None
    bytes_sent: Amount | None = None
    bytes_dense: Amount | None = None
    pruned: dict[str, float | None] | None = None
    held_back: list[dict[str, float]] | None = None
    bound: _Bound | None = None
    recovery_bounds: list[_RecoveryBound] = Field(default=[])
    trace: list[_Point] | None = None
    layers: list[_LayerNoise] | None = None
    training: _Training | None = None


class _Expected(StoredPart):
    recovered: Share = 0.0
    identified: Share = 0.0
    identifiable: Share = 0.0
    exact: Share = 0.0
    public: Count = 0
    public_exact: Count = 0
    gallery: Count = 0


class _ExampleScores(StoredPart):
    success: Annotated[int, Field(ge=0, le=1)]
    exact: bool | None = None
    identified: bool | None = None
    copy_of: Count | None = None
    expected: _Expected = _Expected()
    success_transformed: Annotated[int, Field(ge=0, le=1)] | None = None
    identified_transformed: bool | None = None
    expected_transformed: _Expected = _Expected()


class _ImageScores(_ExampleScores):
    mse: Amount
    psnr: float
    ssim: float
    ssim_transformed: float | None = None
    lpips: float | None = None


class _TargetRecord(StoredPart):
    target_client: int
    status: str
    label: list[int] | None = None
    label_accuracy: Share | None
    identified: bool | float | None = None
    iterations: Count | None = None
    objective: float | None = None
    initial: float | None = None
    distance: float | None = None
    mse_taylor: float | None = None
    per_image: Annotated[list[_ExampleScores], Field(min_length=1)]


class _ImagesRecord(_TargetRecord):
    per_image: Annotated[list[_ImageScores], Field(min_length=1)]  # pyright: ignore[reportIncompatibleVariableOverride]


class _Guess(StoredPart):
    target_client: int
    status: str
    objective: float | None = None
    initial: float | None = None
    predicted: Annotated[list[int], Field(min_length=1)]


_FAILED, _FINISHED = TypeAdapter(_Failed), TypeAdapter(_Finished)
_RECORDS = TypeAdapter(Annotated[list[_TargetRecord], Field(min_length=1)])
_IMAGES_RECORDS = TypeAdapter(Annotated[list[_ImagesRecord], Field(min_length=1)])
_GUESSES = TypeAdapter(Annotated[list[_Guess], Field(min_length=1)])
_NO_RECORDS = TypeAdapter(Annotated[list[Any], Field(max_length=0)])


def read_parts(folder: Path, images: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read and check `trial.json` and `records.json`, and look at the images that should be there.

    Everything that is not as an audit writes it is told in one `DamagedError`. A file that the system does not let us
    read is another error: it may be whole.
    """
    problems: list[Problem] = []
    info: Any = None
    records: Any = None
    with noting(problems, DamagedError):
        info = read_json(folder / TRIAL, AGAIN)
        checked(_FAILED if _failed(info) else _FINISHED, folder / TRIAL, info, AGAIN)
    with noting(problems, DamagedError):
        records = read_json(folder / RECORDS, AGAIN)
        form = (
            _NO_RECORDS
            if _failed(info)
            else _GUESSES
            if _unscored(info)
            else _RECORDS
            if _other(info)
            else _IMAGES_RECORDS
        )
        checked(form, folder / RECORDS, records, AGAIN)
    with noting(problems, DamagedError):
        if not _failed(info) and (images or (folder / IMAGES).exists()):
            _check_images(folder / IMAGES, None if problems else records, _unscored(info), _other(info))
    if problems:
        raise DamagedError(problems)
    return info, records


def _failed(info: Any) -> bool:
    return isinstance(info, dict) and "failed" in info


def _unscored(info: Any) -> bool:
    return isinstance(info, dict) and "unscored" in info


def _other(info: Any) -> bool:
    """Report whether a trial attacks other examples than images."""
    return isinstance(info, dict) and "examples" in info


def read_images(file: Path) -> dict[str, Tensor]:
    """Read the images of a trial, and check the digest of the file."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(Problem(str(file), "is missing, and the run keeps images", AGAIN)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    return unseal(content, str(file), AGAIN)[0]


def _check_images(file: Path, records: Sequence[Mapping[str, Any]] | None, unscored: bool, other: bool = False) -> None:
    """Check the digest, and compare names and shapes with the records."""
    shapes = {name: tuple(value.shape) for name, value in read_images(file).items()}
    examples = "predicted" if unscored else "per_image"
    for name in ("reconstruction",) if unscored else ("truth", "reconstruction"):
        if len(shapes.get(name, ())) < 3 or (not other and len(shapes[name]) != 5):
            raise DamagedError(Problem(str(file), f"holds no images '{name}'", AGAIN))
        wanted = (len(records), len(records[0][examples])) if records else shapes[name][:2]
        if shapes[name][:2] != wanted:
            what = f"holds {shapes[name][:2]} images '{name}', the records tell of {wanted}"
            raise DamagedError(Problem(str(file), what, AGAIN))


UNFIT = "does not apply"
"""The status of a trial whose attack does not apply to its defended client."""
NEEDLESS = "not needed"
"""How the reason begins where a search is left out because a closed form breaks the defence already."""


@dataclass(frozen=True)
class Trial:
    """One finished (or failed) trial: what `trial.json` and `records.json` say, and where the images lie."""

    info: dict[str, Any]
    records: list[dict[str, Any]]
    path: Path | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Images that were never written (`images` of a result in memory)."""

    @property
    def failed(self) -> str | None:
        """Why it has no result; None if it has one."""
        return self.info.get("failed")

    @property
    def unfit(self) -> bool:
        """Whether it has no result because the attack does not apply there."""
        return bool(self.info.get("unfit"))

    @property
    def broken(self) -> bool:
        """Whether it failed although the attack applies: doing it again may help."""
        return self.failed is not None and not self.unfit

    @property
    def unscored(self) -> str | None:
        """Why it has no scores although it did not fail; None if it has."""
        return self.info.get("unscored")

    def images(self) -> dict[str, Tensor] | None:
        """Load truths and reconstructions, [V, B, C, H, W] in [0, 1]; None where only scores were kept."""
        if self.path is None:
            return dict(self.kept) or None
        file = self.path / IMAGES
        return read_images(file) if file.is_file() else None


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk: `run.json`, and its trials in the order of the run file."""

    info: dict[str, Any]
    trials: list[Trial]
    path: Path | None = None


def load_run(path: Path | str) -> Run:
    """Read a run directory, finished or not; refuse with every damaged file at once."""
    folder = Path(path)
    if is_training(folder) and not AUDIT.exists(folder):
        remedy = f"gradveil report {folder} shows it, gradveil summary {folder} sums it up"
        raise fail(str(folder), "is a training, and no audit", remedy)
    if not AUDIT.exists(folder):
        remedy = "give the folder that `gradveil audit` or `gradveil train` wrote, such as runs/faces"
        raise fail(str(folder), "is not a run directory (it has no run.json)", remedy)
    info = AUDIT.read(folder)
    found = {child.name: child for child in children(folder / TRIALS) if ".tmp-" not in child.name}
    trials: list[Trial] = []
    problems: list[Problem] = []
    for name in info["trials"]:
        with noting(problems):
            trials += [read_trial(found[name], info)] if name in found else []
    refuse(problems)
    return Run(info, trials, folder)


def has_own_settings(info: Mapping[str, Any]) -> bool:
    """Return whether the settings of `run.json` are those that its trials were made with, by their digest."""
    left_out = {*info["growing"], *FREE}
    settings = digest({key: value for key, value in info["config"].items() if key not in left_out})
    return info["config_hash"] == (digest([settings, info["weights"]]) if info["weights"] else settings)


def results_digest(run: Run) -> str:
    """Hash facts and records of a run's trials as they lie on disk, so that a later change of one can be seen."""
    files = [trial.path / name for trial in run.trials if trial.path is not None for name in (TRIAL, RECORDS)]
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest() if files else ""


def keeps_images(info: Mapping[str, Any]) -> bool:
    """Say whether every finished trial of a run has images."""
    return info["config"].get("images") is True


def read_trial(folder: Path, run: Mapping[str, Any]) -> Trial:
    """Read one trial of a run, of which `run.json` says whether images have to be there; refuse another run's trial."""
    trial = Trial(*read_parts(folder, keeps_images(run)), folder)
    if wrong := listing(_foreign(trial.info, folder.name, run["config"])):
        raise DamagedError(Problem(str(folder / TRIAL), f"is no trial of this run: {wrong}", AGAIN))
    return trial


def _foreign(info: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Say where a trial differs from its place and from the settings of its run, as far as these tell."""
    attacks = config.get("attacks") or ()
    many = info.get("control") or any(map(stands_for_many, attacks))
    planned: dict[str, Sequence[Any]] = {
        "trial": [name],
        "model": [value for value in [(config.get("model") or {}).get("name")] if value],
        "data": [value for value in [(config.get("data") or {}).get("name")] if value],
        "seed": config.get("seeds") or (),
        "threshold": [value for value in [config.get("threshold")] if value is not None],
        "defence": () if info.get("control") else config.get("defences") or (),
        "attack": () if many else without_aim(attacks),
    }
    for key, values in planned.items():
        if values and key in info and info[key] not in values:
            yield f"{key} is '{info[key]}', and the run's {listing(map(str, values))}"


class Store:
    """The writing side of a run directory. Use as a context manager: it holds the directory's lock."""

    def __init__(self, folder: Path) -> None:
        """Name the directory; nothing is touched before `open`."""
        self.folder = folder

    @contextmanager
    def open(self, info: Mapping[str, Any], fresh: bool = False) -> Iterator[Store]:
        """Create or resume the run; refuse another configuration, and a second process.

        A budget that other attacks would share than before is refused, too: they would have had less of it.
        """
        with AUDIT.opened(self.folder, info, fresh, _unshared(info)):
            for child in children(self.folder / PLANS):  # a trial that is finished needs no plan
                if (self.folder / TRIALS / child.name).exists():
                    shutil.rmtree(child)
            yield self

    def problems(self, info: Mapping[str, Any]) -> list[Problem]:
        """Find out why the run can neither begin in the directory nor go on there."""
        return AUDIT.problems(self.folder, info, _unshared(info))

    def info(self) -> dict[str, Any]:
        """Return what `run.json` says."""
        return AUDIT.read(self.folder)

    def survey(self, names: Iterable[str]) -> tuple[set[str], list[Problem]]:
        """Say which of these trials are done, and which files are damaged: their trials are not done.

        Equal settings give equal records, so a damaged trial may be made again, and its remains lie there until the new
        one is whole. A file that cannot be read is no such case: it may be whole, and is refused.
        """
        run = self.info()
        done: set[str] = set()
        damaged: list[Problem] = []
        unread: list[Problem] = []
        for name in names:
            folder = self.folder / TRIALS / name
            try:
                if folder.exists() and read_trial(folder, run).failed is None:
                    done.add(name)
            except DamagedError as error:
                damaged += error.problems
            except GradveilError as error:
                unread += error.problems
        refuse(unread)
        return done, damaged

    def read(self, trial: str) -> Trial:
        """Read a trial that is done."""
        return read_trial(self.folder / TRIALS / trial, self.info())

    def plans(self, trial: str) -> Path:
        """Say where the plans of a trial's attack are kept while it is under way; a finished trial tells its own."""
        return self.folder / PLANS / trial

    def write(self, trial: str, result: Trial) -> None:
        """Write a trial: it appears whole or not at all."""
        folder = self.folder / TRIALS / f"{trial}.tmp-{os.getpid()}"
        folder.mkdir(mode=0o700)
        write_json(folder / RECORDS, result.records)
        if result.kept:
            write_private(folder / IMAGES, seal(dict(result.kept)))
        write_json(folder / TRIAL, result.info)
        final = self.folder / TRIALS / trial
        if final.exists():
            old = self.folder / TRIALS / f"{trial}.tmp-old-{os.getpid()}"
            os.replace(final, old)
            remove(old)
        os.replace(folder, final)
        sync(final.parent)
        shutil.rmtree(self.plans(trial), ignore_errors=True)


def _unshared(info: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterator[Problem]]:
    """Compare the budgets of a run that is there with those of this one."""
    return lambda there: _shared_otherwise(there["sharing"], info["sharing"])


def _shared_otherwise(there: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> Iterator[Problem]:
    """Find the defences whose budget would be shared by others than before: their attacks would have had less of it."""
    for defence, counts in there.items():
        if counts != now.get(defence, counts):
            told = f"shared by {plural(max(counts), 'attack')} in the run that is there, and now by {max(now[defence])}"
            remedy = "give the attacks that are there, start again with --fresh, or choose another --out"
            yield Problem("attacks", f"the budget of '{defence}' was {told}", remedy)
