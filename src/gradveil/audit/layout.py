"""What the files of a run directory hold, and what is wrong with one that does not hold it.

`run.json` says which settings the results were made with; `cells/NAME/` has `cell.json` (facts), `records.json` (one
object a victim) and `images.safetensors` (truths and reconstructions, where the run keeps them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from gradveil.audit.config import BUDGET
from gradveil.core.errors import Problem, fail
from gradveil.core.files import DamagedError, read_json, unreadable
from gradveil.core.sealed import unseal

FORMAT = 1
"""Version of the files of a run directory; another is refused."""
RUN, CELL, RECORDS, IMAGES = "run.json", "cell.json", "records.json", "images.safetensors"
"""File names: of the run, and of a cell's facts, its victims' records and its images."""
PLANS = "plans"
"""Folder of the plans of cells in flight."""
TRAINING = "training"
"""Folder of the trainings that an audit follows."""
AGAIN = "give the command of the audit again, which makes this cell anew, or remove its folder"
"""What to do about a damaged cell: resuming replaces it, since equal settings give equal records."""
RESTORE = "put a copy of the file back, or audit anew with --fresh, which removes the results"
"""The remedy where the run's own file is damaged."""


class _Held(BaseModel):
    """What has to be there, of the right kind; whatever else is there may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=10**15)]


class _Config(_Held):
    """What reports read of a run's settings; resuming compares all of them."""

    data: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    defences: list[str] | None = None
    attacks: list[str] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    budget: Annotated[str, Field(pattern=BUDGET)] | None = None
    images: bool | None = None


class _Run(_Held):
    name: str = ""
    created: str = ""
    command: str = ""
    config: _Config
    config_hash: str = ""
    gradveil: str = ""
    growing: list[str] = []
    cells: Annotated[list[str], Field(min_length=1)]
    share: Annotated[int, Field(ge=1)] | None = None
    sharing: dict[str, list[Count]] = {}
    warnings: list[str] = []
    weights: str | None = None
    images: dict[str, str | None] | None = None
    packages: dict[str, str] = {}
    machine: dict[str, str | int | None] = {}


class _Address(_Held):
    cell: str
    model: str
    data: str
    seed: int
    round: Count
    trained: Count | None = None
    client: str
    batch: Annotated[int, Field(ge=1, le=10**15)]
    defence: str
    defence_title: str = ""
    attack: str
    attack_title: str = ""
    control: bool = False
    prepared: list[str] = []
    citations: list[str] = []
    code: dict[str, str] = {}


class _Failed(_Address):
    failed: str
    unfit: bool = False


class _Control(_Held):
    asr: Share
    ssim_mean: float | None = None
    psnr_mean: float | None = None
    identified: Share | None = None


class _Training(_Held):
    round: Count
    accuracy: Share
    bytes_up: Amount
    bytes_down: Amount
    seconds: Amount
    client_seconds: Amount | None = None
    final_accuracy: Share | None = None
    guarantee: str | None = None
    epsilon: dict[str, float] = {}
    delta: Share | None = None


class _Bound(_Held):
    mse: Amount | None
    by: str = ""
    prior: Amount | None = None


class _Point(_Held):
    iterations: Count
    asr: Share
    ssim_mean: float | None


class _Finished(_Address):
    belief: str
    threshold: Annotated[float, Field(ge=-1, le=1)]
    controls: dict[str, _Control]
    knowledge: dict[str, str] = {}
    in_parts: bool = False
    grants: list[str] = []
    remarks: list[str] = []
    suspicions: list[str] = []
    notes: list[str] = []
    guarantee: str | None = None
    epsilon: dict[str, Annotated[float, Field(ge=0)]] = {}
    health: dict[str, float | None] | None = None
    missing: dict[str, str] = {}
    unbounded: str | None = None
    unscored: str | None = None
    planted: str = ""
    guard: list[str] = []
    recorded_defence: str | None = None
    params: Count | None = None
    restarts: Count | None = None
    simulated: Count | None = None
    row_iterations: Count | None = None
    seconds: Amount | None = None
    iterations_per_second: Amount | None = None
    distance: Amount | None = None
    cosine: float | None = None
    first_order_utility: float | None = None
    second_order_utility: float | None = None
    bytes_sent: Amount | None = None
    bytes_dense: Amount | None = None
    pruned: dict[str, float | None] | None = None
    bound: _Bound | None = None
    trace: list[_Point] | None = None
    training: _Training | None = None


class _Expected(_Held):
    recovered: Share = 0.0
    identified: Share = 0.0
    identifiable: Share = 0.0
    exact: Share = 0.0
    public: Count = 0
    public_exact: Count = 0
    gallery: Count = 0


class _Image(_Held):
    success: Annotated[int, Field(ge=0, le=1)]
    mse: Amount
    psnr: float
    ssim: float
    ssim_transformed: float | None = None
    lpips: float | None = None
    exact: bool | None = None
    identified: bool | None = None
    expected: _Expected = _Expected()
    success_transformed: Annotated[int, Field(ge=0, le=1)] | None = None
    identified_transformed: bool | None = None
    expected_transformed: _Expected = _Expected()


class _Record(_Held):
    victim: int
    status: str
    label: list[int] | None = None
    label_accuracy: Share | None
    identified: bool | float | None = None
    iterations: Count | None = None
    objective: float | None = None
    initial: float | None = None
    distance: float | None = None
    per_image: Annotated[list[_Image], Field(min_length=1)]


class _Guess(_Held):
    victim: int
    status: str
    objective: float | None = None
    initial: float | None = None
    predicted: Annotated[list[int], Field(min_length=1)]


_RUN, _FAILED, _FINISHED = TypeAdapter(_Run), TypeAdapter(_Failed), TypeAdapter(_Finished)
_RECORDS = TypeAdapter(Annotated[list[_Record], Field(min_length=1)])
_GUESSES = TypeAdapter(Annotated[list[_Guess], Field(min_length=1)])
_NO_RECORDS = TypeAdapter(Annotated[list[Any], Field(max_length=0)])


def read_run(folder: Path) -> dict[str, Any]:
    """Read and check `run.json`."""
    file = folder / RUN
    info = read_json(file, RESTORE)
    if isinstance(info, dict) and isinstance(said := info.get("format"), int) and said != FORMAT:
        remedy = "use the version that wrote it, or choose another folder"
        raise fail(str(file), f"has format {said}, this version reads {FORMAT}", remedy)
    _check(_RUN, file, info, RESTORE)
    return info


def read_parts(folder: Path, images: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read and check `cell.json` and `records.json`, and look at the images that should be there.

    Everything that is not as an audit writes it is told in one `DamagedError`. A file that the system does not let us
    read is another error: it may be whole.
    """
    problems: list[Problem] = []
    info: Any = None
    records: Any = None
    with _noting(problems):
        info = read_json(folder / CELL, AGAIN)
        _check(_FAILED if _failed(info) else _FINISHED, folder / CELL, info)
    with _noting(problems):
        records = read_json(folder / RECORDS, AGAIN)
        _check(_NO_RECORDS if _failed(info) else _GUESSES if _unscored(info) else _RECORDS, folder / RECORDS, records)
    with _noting(problems):
        if not _failed(info) and (images or (folder / IMAGES).exists()):
            _check_images(folder / IMAGES, None if problems else records, _unscored(info))
    if problems:
        raise DamagedError(problems)
    return info, records


def _failed(info: Any) -> bool:
    return isinstance(info, dict) and "failed" in info


def _unscored(info: Any) -> bool:
    return isinstance(info, dict) and "unscored" in info


@contextmanager
def _noting(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        problems += error.problems


def _check(held: TypeAdapter[Any], file: Path, value: Any, remedy: str = AGAIN) -> None:
    try:
        held.validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        told = "; ".join(_said(entry["type"], entry["loc"], entry["input"], entry["msg"]) for entry in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise DamagedError(Problem(str(file), f"{told}{more}", remedy)) from None


_WANTED = {"model_type": "an object", "dict_type": "an object", "list_type": "a list", "string_type": "a text"}
_WANTED |= {"int_type": "a whole number", "float_type": "a number"}


def _said(kind: str, location: Sequence[str | int], value: Any, message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if kind == "missing":
        return f"{where} is missing"
    if kind == "too_short":
        return f"{where} is empty".strip()
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    wanted = f"not {_WANTED[kind]}" if kind in _WANTED else message
    return f"{where} is {shown}, {wanted}".strip()


def read_images(file: Path) -> dict[str, Tensor]:
    """Read the images of a cell, and check the digest of the file."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(Problem(str(file), "is missing, and the run keeps images", AGAIN)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    return unseal(content, str(file), AGAIN)[0]


def _check_images(file: Path, records: Sequence[Mapping[str, Any]] | None, unscored: bool) -> None:
    """Check the digest, and compare names and shapes with the records."""
    shapes = {name: tuple(value.shape) for name, value in read_images(file).items()}
    examples = "predicted" if unscored else "per_image"
    for name in ("reconstruction",) if unscored else ("truth", "reconstruction"):
        if len(shapes.get(name, ())) != 5:
            raise DamagedError(Problem(str(file), f"holds no images '{name}'", AGAIN))
        wanted = (len(records), len(records[0][examples])) if records else shapes[name][:2]
        if shapes[name][:2] != wanted:
            what = f"holds {shapes[name][:2]} images '{name}', the records tell of {wanted}"
            raise DamagedError(Problem(str(file), what, AGAIN))
