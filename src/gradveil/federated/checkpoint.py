"""A training on disk: one file that is whole or not there, and from which the next round goes on bit by bit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from gradveil.core.errors import Problem, fail
from gradveil.core.files import DamagedError, plain, unreadable
from gradveil.core.tree import Tensors, select, under
from gradveil.federated.standing import Round, Standing, Status

VERSION = 1
"""Version of a checkpoint's files; another is refused."""
_REMEDY = "remove it: the same command then trains this part anew"
_records = TypeAdapter(tuple[Round, ...])
_status: TypeAdapter[Status] = TypeAdapter(Status)
_code = TypeAdapter(dict[str, str])
_start: TypeAdapter[tuple[float | None, float]] = TypeAdapter(tuple[float | None, float])


def pack_standing(standing: Standing, training: str) -> bytes:
    """Put where a training stands into the bytes of its file; `training` is the digest of its settings."""
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
    # A copy of each: where nobody answered the best parameters are the last ones, and shared memory is not written.
    own = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    return save(own, {"gradveil": json.dumps(facts)})


def load_standing(file: Path, training: str) -> Standing | None:
    """Read where a training stands; None if it has not begun. Another training's file, or a damaged one, is refused."""
    if not file.is_file():
        return None
    try:
        content = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    return unpack_standing(content, training, str(file))


def unpack_standing(content: bytes, training: str, where: str = "standing", device: str = "cpu") -> Standing:
    """Read where a training stands from the bytes of its file; `where` names them if they are refused."""
    try:
        found = load(content)
        size = int.from_bytes(content[:8], "little")
        facts = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["gradveil"])
        # In the order they were in, not the file's: sums over tensors have to round as they did. Copied to where
        # torch puts its own: sums within a tensor depend on where it lies.
        tensors = {name: found[name].clone().to(device) for name in facts["names"]}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(Problem(where, f"is damaged: {error}", _REMEDY)) from error
    return _checked(where, facts, tensors, training)


def _checked(where: str, facts: Mapping[str, Any], tensors: Tensors, training: str) -> Standing:
    if facts.get("version") != VERSION:
        remedy = "go on with the version of Gradveil that wrote it, or remove it"
        raise fail(where, f"has format {facts.get('version')}, this program reads {VERSION}", remedy)
    if facts.get("training") != training:
        remedy = "give the settings it was made with, start again with --fresh, or choose another --out"
        raise fail(where, "belongs to a training with other settings", remedy)
    try:
        return Standing(
            params=select(tensors, "params"),
            server=select(tensors, "server"),
            clients={int(client): select(tensors, f"client.{client}") for client in facts["clients"]},
            mean=select(tensors, "mean"),
            best=select(tensors, "best"),
            best_round=int(facts["best_round"]),
            moved=int(facts["moved"]),
            records=_records.validate_python(_with_nan(facts["records"])),
            status=_status.validate_python(facts["status"]),
            planned=int(facts.get("planned", 0)),
            start=_start.validate_python(facts["start"]) if facts.get("start") else None,
            code=_code.validate_python(facts.get("code", {})),
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise DamagedError(Problem(where, f"is damaged: {error}", _REMEDY)) from error


def _with_nan(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Read a loss that JSON could not hold (a diverged training's) as NaN."""
    told = {"loss": "accuracy", "validation_loss": "validation_accuracy"}
    return [
        record | {loss: math.nan for loss, share in told.items() if record[loss] is None and record[share] is not None}
        for record in records
    ]
