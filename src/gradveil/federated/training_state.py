"""The state of a training, and its checkpoint: one atomic file, from which it resumes with the same bits."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from gradveil.core.errors import Problem, fail
from gradveil.core.private_files import DamagedError, plain, seal, unreadable, unseal
from gradveil.core.tree import Tensors, select, under
from gradveil.federated.held_back import HeldBack

Status = Literal["running", "finished", "stopped early", "diverged"]
"""Status of a training."""


@dataclass(frozen=True)
class RoundResult:
    """Results of one round; rounds are numbered from 1."""

    number: int
    clients: tuple[int, ...]
    """Clients whose updates were aggregated."""
    absent: tuple[int, ...]
    """Clients that were chosen and did not answer."""
    accuracy: float
    """Share of test examples that the new global parameters classify correctly, with the model's randomness off."""
    loss: float
    validation_loss: float | None
    """Mean over all clients of the loss on their validation examples."""
    validation_accuracy: float | None
    bytes_up: int
    """Bytes sent by all clients together."""
    bytes_down: int
    """Bytes sent by the server to all chosen clients together."""
    seconds: float
    """Duration of the whole round: all clients in one process, the server, and the evaluation."""
    client_seconds: float | None = None
    """Mean duration of one client's update (clients that compute at once share theirs equally); None if no client
    answered, or if an earlier version wrote the round."""
    refused: tuple[int, ...] = ()
    """Clients whose update was not finite: it is left out, as a Flower client would not send it."""
    spoke: tuple[int, int] | None = None
    """Number of clients that sent public messages, and the number needed; None if none are needed."""
    held_back: HeldBack | None = None
    """What error feedback held back; None if the defence does not end with it."""


@dataclass(frozen=True)
class Standing:
    """State of a training: everything that the next round depends on, and the results so far."""

    params: Tensors
    server: Tensors
    clients: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    """The state of every client that has ever taken part (residuals, moments)."""
    best: Tensors = field(default_factory=dict[str, Tensor])
    """The parameters after the round with the lowest validation loss; empty while that is the last round."""
    best_round: int = 0
    mean: Tensors = field(default_factory=dict[str, Tensor])
    """The mean update of the last round, which is public; empty before the first."""
    moved: int = 0
    """Bytes of the last round's change of the parameters, which the server sends to clients of that round."""
    records: tuple[RoundResult, ...] = ()
    status: Status = "running"
    planned: int = 0
    """Largest number of rounds ever planned: the guarantee counts them, even if the training stops earlier."""
    start: tuple[float | None, float] | None = None
    """Loss and accuracy on the test examples before the first round."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of custom modules at the start of the training (`code_of`)."""

    @property
    def final(self) -> Tensors:
        """The parameters that the training ends with: the best ones."""
        return self.best or self.params


VERSION = 1
"""Version of a checkpoint's files; another is refused."""
_REMEDY = "remove it: the same command then trains this part again"
_records = TypeAdapter(tuple[RoundResult, ...])
_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=_MOST)]


class _Facts(BaseModel):
    """The metadata of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    names: list[str]
    clients: list[Count]
    best_round: Count
    moved: Count
    status: Status
    planned: Count = 0
    start: Annotated[tuple[float | None, float] | None, Field(strict=False)] = None
    code: dict[str, str] = {}
    records: list[dict[str, Any]]


def pack_standing(standing: Standing, training: str) -> bytes:
    """Serialise the state of a training; `training` is the digest of its settings."""
    tensors: Tensors = under("params", standing.params) | under("server", standing.server)
    tensors |= under("best", standing.best) | under("mean", standing.mean)
    for client, state in standing.clients.items():
        tensors |= under(f"client.{client}", state)
    facts = {
        "version": VERSION,
        "training": training,
        "names": list(tensors),
        "clients": sorted(standing.clients),
        "best_round": standing.best_round,
        "moved": standing.moved,
        "status": standing.status,
        "planned": standing.planned,
        "start": plain(standing.start),
        "code": dict(standing.code),
        "records": [plain(dataclasses.asdict(record)) for record in standing.records],
    }
    # Copies, because the best parameters may be the last ones, and safetensors refuses shared memory.
    copies = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    return seal(copies, {"gradveil": json.dumps(facts)})


def load_standing(file: Path, training: str) -> Standing | None:
    """Read the state of a training; None if it has not begun. Raise for a damaged file or another training's."""
    if not file.is_file():
        return None
    try:
        content = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    return unpack_standing(content, training, str(file))


def unpack_standing(content: bytes, training: str, where: str = "standing", device: str = "cpu") -> Standing:
    """Deserialise the state of a training; errors name the source `where`."""
    stored, metadata = unseal(content, where, _REMEDY)
    try:
        facts = dict(json.loads(metadata["gradveil"]))
        # In the original order, not the file's: sums over tensors must round in the same way. Cloned into memory of
        # torch's allocator: the rounding of sums within a tensor depends on its alignment.
        tensors = {name: stored[name].clone().to(device) for name in facts["names"]}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(Problem(where, f"is damaged: {error}", _REMEDY)) from error
    return _checked(where, facts, tensors, training)


def _checked(where: str, facts: Any, tensors: Tensors, training: str) -> Standing:
    if facts.get("version") != VERSION:
        remedy = "go on with the version of Gradveil that wrote it, or remove it"
        raise fail(where, f"has format {facts.get('version')!r:.40}, this program reads {VERSION}", remedy)
    if facts.get("training") != training:
        remedy = "give the settings it was made with, start again with --fresh, or choose another --out"
        raise fail(where, "belongs to a training with other settings", remedy)
    try:
        content = _Facts.model_validate(facts)
        records = _records.validate_python(_with_nan(content.records))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"])) or "all of it"
        raise DamagedError(Problem(where, f"is damaged: {key}: {first['msg']}", _REMEDY)) from None
    if odd := [record.number for record in records if _odd(record)]:
        raise DamagedError(Problem(where, f"is damaged: round {odd[0]} has impossible numbers", _REMEDY))
    if not records and content.status != "running":
        raise DamagedError(Problem(where, f"is damaged: it is {content.status} without a round", _REMEDY))
    if [record.number for record in records] != list(range(1, len(records) + 1)) or content.best_round > len(records):
        raise DamagedError(Problem(where, "is damaged: its rounds are not counted from 1", _REMEDY))
    return Standing(
        params=select(tensors, "params"),
        server=select(tensors, "server"),
        clients={client: select(tensors, f"client.{client}") for client in content.clients},
        mean=select(tensors, "mean"),
        best=select(tensors, "best"),
        best_round=content.best_round,
        moved=content.moved,
        records=records,
        status=content.status,
        planned=content.planned,
        start=content.start,
        code=content.code,
    )


def _with_nan(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Restore losses of a diverged training, which JSON has as null, as NaN."""
    pairs = {"loss": "accuracy", "validation_loss": "validation_accuracy"}
    return [
        record | {loss: math.nan for loss, share in pairs.items() if _diverged(record, loss, share)}
        for record in records
    ]


def _diverged(record: Mapping[str, Any], loss: str, share: str) -> bool:
    return loss in record and record[loss] is None and record.get(share) is not None


def _odd(record: RoundResult) -> bool:
    """Return whether a round has impossible numbers; a loss may have any value, or be NaN."""
    shares = (record.accuracy, record.validation_accuracy)
    counts = (record.bytes_up, record.bytes_down, record.seconds, record.client_seconds)
    within = all(0 <= share <= 1 for share in shares if share is not None)
    return not within or not all(0 <= count <= _MOST for count in counts if count is not None)
