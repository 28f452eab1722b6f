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
from safetensors import SafetensorError, safe_open

from gradveil.core.errors import Problem, fail
from gradveil.core.files import DamagedError, read_json, unreadable

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


class _Run(_Held):
    name: str = ""
    created: str = ""
    command: str = ""
    config: dict[str, Any]
    config_hash: str = ""
    cells: Annotated[list[str], Field(min_length=1)]
    share: Annotated[int, Field(ge=1)] | None = None
    sharing: dict[str, list[int]] = {}
    warnings: list[str] = []
    packages: dict[str, Any] = {}
    machine: dict[str, Any] = {}


class _Address(_Held):
    cell: str
    model: str
    data: str
    seed: int
    round: int
    trained: int | None = None
    client: str
    batch: int
    defence: str
    attack: str
    prepared: list[str] = []


class _Failed(_Address):
    failed: str
    unfit: bool = False


class _Control(_Held):
    asr: float
    ssim_mean: float | None = None
    identified: float | None = None


class _Training(_Held):
    round: int
    accuracy: float
    bytes_up: float
    bytes_down: float
    seconds: float
    client_seconds: float | None = None
    final_accuracy: float | None = None
    epsilon: dict[str, float] = {}


class _Finished(_Address):
    belief: str
    threshold: float
    controls: dict[str, _Control]
    knowledge: dict[str, str] = {}
    in_parts: bool = False
    grants: list[str] = []
    remarks: list[str] = []
    citations: list[str] = []
    health: dict[str, Any] = {}
    seconds: float | None = None
    distance: float | None = None
    bytes_sent: float | None = None
    bytes_dense: float | None = None
    training: _Training | None = None


class _Image(_Held):
    success: int
    mse: float
    psnr: float
    ssim: float
    identified: bool | None = None
    expected: dict[str, float] = {}
    success_transformed: int | None = None
    identified_transformed: bool | None = None
    expected_transformed: dict[str, float] = {}


class _Record(_Held):
    victim: int
    status: str
    label_accuracy: float | None
    per_image: Annotated[list[_Image], Field(min_length=1)]


class _Guess(_Held):
    victim: int
    status: str
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


def _check_images(file: Path, records: Sequence[Mapping[str, Any]] | None, unscored: bool) -> None:
    """Compare names and shapes with the records; the header also tells a file that was cut off."""
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DamagedError(Problem(str(file), "is missing, and the run keeps images", AGAIN)) from error
    except SafetensorError as error:
        raise DamagedError(Problem(str(file), f"is damaged: {error}", AGAIN)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    examples = "predicted" if unscored else "per_image"
    for name in ("reconstruction",) if unscored else ("truth", "reconstruction"):
        if len(shapes.get(name, ())) != 5:
            raise DamagedError(Problem(str(file), f"holds no images '{name}'", AGAIN))
        wanted = (len(records), len(records[0][examples])) if records else shapes[name][:2]
        if shapes[name][:2] != wanted:
            what = f"holds {shapes[name][:2]} images '{name}', the records tell of {wanted}"
            raise DamagedError(Problem(str(file), what, AGAIN))
