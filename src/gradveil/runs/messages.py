"""Messages on a pipe: a line of JSON with the number of bytes that follow, and those bytes."""

from __future__ import annotations

import json
from typing import IO, Any

from gradveil.runs.task import Parcel


def write(pipe: IO[bytes], kind: str, parcel: Parcel) -> None:
    """Write one parcel and its kind."""
    head = {"kind": kind, "facts": parcel.facts, "bytes": len(parcel.data)}
    pipe.write(json.dumps(head).encode() + b"\n" + parcel.data)
    pipe.flush()


def read(pipe: IO[bytes]) -> tuple[Any, Parcel] | None:
    """Read one parcel and its kind; None if the writer is gone, even in the middle of a parcel."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    data = pipe.read(head["bytes"])
    return (head["kind"], Parcel(head["facts"], data)) if len(data) == head["bytes"] else None
