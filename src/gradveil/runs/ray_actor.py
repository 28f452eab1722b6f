"""An actor on a machine of a Ray cluster, which runs one task at a time.

Only bytes go to and from it: parcels in the form of pipes, cut into pieces.
"""

from __future__ import annotations

import io
import os
import platform
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from gradveil.runs.messages import read, write
from gradveil.runs.task import Parcel, Site, arrive, attempt

PIECE = 8 * 2**20
"""Bytes per piece."""
Piece = tuple[bool, bytes]
"""Whether a part is the last of its message, and its bytes."""


class Desk:
    """An actor that opens a site, then does one ordered task after the other."""

    def __init__(self) -> None:
        """Wait for the site to open."""
        self._taken: list[Piece] = []
        self._orders: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def open(self, message: bytes) -> bytes:
        """Open the site; refuse it if this machine has other versions than the driver's."""
        facts = unpack(message)[1].facts
        wanted = facts["versions"]
        differing = [
            f"{name} {here} instead of {wanted[name]}" for name, here in versions().items() if here != wanted[name]
        ]
        if differing:
            problem = f"{platform.node()} has {', '.join(differing)}: only equal versions give the same bits"
            return pack("refused", Parcel({"message": problem}))
        if os.path.isdir(facts["folder"]):
            os.chdir(facts["folder"])
        sys.path += [path for path in facts["paths"] if path not in sys.path]
        threading.Thread(target=self._work, args=(facts,), daemon=True).start()
        return self._messages.get()

    def take(self, piece: Piece) -> None:
        """Take a piece of an order."""
        self._taken.append(piece)

    def do(self) -> Iterator[Piece]:
        """Do the ordered task; yield its progress, then its result or failure."""
        (order,) = joined(self._taken)
        self._taken = []
        self._orders.put(unpack(order)[1])
        kind = "progress"
        while kind == "progress":
            message = self._messages.get()
            kind = unpack(message)[0]
            yield from pieces(message)

    def _work(self, facts: Mapping[str, Any]) -> None:
        try:
            work = arrive(Site(facts["opener"], facts["setting"]), facts["threads"])
            if isinstance(work, str):
                self._send("refused", Parcel({"message": work}))
                return
            self._send("open", Parcel({}))
            while True:
                result = attempt(work, self._orders.get(), lambda parcel: self._send("progress", parcel))
                if isinstance(result, str):
                    self._send("failed", Parcel({"message": result}))
                else:
                    self._send("done", result)
        except SystemExit as error:  # raised by a custom model; the driver would wait forever
            os._exit(error.code if isinstance(error.code, int) else 1)

    def _send(self, kind: str, parcel: Parcel) -> None:
        self._messages.put(pack(kind, parcel))


def versions() -> dict[str, str]:
    """Return the versions that decide the bits of results."""
    return {name: version(name) for name in ("gradveil", "torch")}


def pack(kind: str, parcel: Parcel) -> bytes:
    """Write a parcel in the form of a pipe."""
    out = io.BytesIO()
    write(out, kind, parcel)
    return out.getvalue()


def unpack(message: bytes) -> tuple[Any, Parcel]:
    """Read a parcel and its kind.

    >>> unpack(pack("done", Parcel({"number": 3}, b"bytes")))
    ('done', Parcel(facts={'number': 3}, data=b'bytes'))
    """
    content = read(io.BytesIO(message))
    assert content is not None
    return content


def pieces(message: bytes, size: int = PIECE) -> Iterator[Piece]:
    """Cut a message into pieces.

    >>> [*pieces(b"abcde", 2)]
    [(False, b'ab'), (False, b'cd'), (True, b'e')]
    """
    for start in range(0, len(message), size):
        yield start + size >= len(message), message[start : start + size]


def joined(arrived: Iterable[Piece]) -> Iterator[bytes]:
    """Join pieces into messages.

    >>> [*joined([(False, b"ab"), (True, b"c"), (True, b"d")])]
    [b'abc', b'd']
    """
    parts: list[bytes] = []
    for last, part in arrived:
        parts.append(part)
        if last:
            yield b"".join(parts)
            parts = []
