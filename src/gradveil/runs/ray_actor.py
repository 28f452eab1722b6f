"""An actor on a machine of a Ray cluster, which runs one task at a time.

Only bytes go to and from it: parcels as they are written on pipes, cut into pieces.
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
"""Bytes that are sent at once."""
Piece = tuple[bool, bytes]
"""A part of a message, and whether it is the last."""


class Desk:
    """Opens a site, then does tasks: as many as it is ordered to, one after the other."""

    def __init__(self) -> None:
        """Wait to be told what to open."""
        self._taken: list[Piece] = []
        self._orders: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def open(self, message: bytes) -> bytes:
        """Open the site, where this machine can do what the others do."""
        facts = unpack(message)[1].facts
        wanted = facts["versions"]
        others = [f"{name} {own} instead of {wanted[name]}" for name, own in versions().items() if own != wanted[name]]
        if others:
            what = f"{platform.node()} has {', '.join(others)}: the same bits come of the same versions only"
            return pack("refused", Parcel({"message": what}))
        if os.path.isdir(facts["folder"]):
            os.chdir(facts["folder"])
        sys.path += [path for path in facts["paths"] if path not in sys.path]
        threading.Thread(target=self._work, args=(facts,), daemon=True).start()
        return self._said.get()

    def take(self, piece: Piece) -> None:
        """Take a piece of an order."""
        self._taken.append(piece)

    def do(self) -> Iterator[Piece]:
        """Do what was ordered; yield the news of it, and what came of it."""
        (order,) = joined(self._taken)
        self._taken = []
        self._orders.put(unpack(order)[1])
        kind = "told"
        while kind == "told":
            message = self._said.get()
            kind = unpack(message)[0]
            yield from pieces(message)

    def _work(self, facts: Mapping[str, Any]) -> None:
        try:
            work = arrive(Site(facts["opener"], facts["setting"]), facts["threads"])
            if isinstance(work, str):
                self._say("refused", Parcel({"message": work}))
                return
            self._say("open", Parcel({}))
            while True:
                found = attempt(work, self._orders.get(), lambda news: self._say("told", news))
                if isinstance(found, str):
                    self._say("failed", Parcel({"message": found}))
                else:
                    self._say("done", found)
        except SystemExit as error:  # of a user's model; who waits for news would wait for ever
            os._exit(error.code if isinstance(error.code, int) else 1)

    def _say(self, kind: str, parcel: Parcel) -> None:
        self._said.put(pack(kind, parcel))


def versions() -> dict[str, str]:
    """Name what decides the bits of results."""
    return {name: version(name) for name in ("gradveil", "torch")}


def pack(kind: str, parcel: Parcel) -> bytes:
    """Write a parcel as a pipe carries it."""
    out = io.BytesIO()
    write(out, kind, parcel)
    return out.getvalue()


def unpack(message: bytes) -> tuple[Any, Parcel]:
    """Read a parcel and what it is.

    >>> unpack(pack("done", Parcel({"number": 3}, b"bytes")))
    ('done', Parcel(facts={'number': 3}, data=b'bytes'))
    """
    said = read(io.BytesIO(message))
    assert said is not None
    return said


def pieces(message: bytes, size: int = PIECE) -> Iterator[Piece]:
    """Cut a message into pieces.

    >>> [*pieces(b"abcde", 2)]
    [(False, b'ab'), (False, b'cd'), (True, b'e')]
    """
    for start in range(0, len(message), size):
        yield start + size >= len(message), message[start : start + size]


def joined(arrived: Iterable[Piece]) -> Iterator[bytes]:
    """Put pieces together again.

    >>> [*joined([(False, b"ab"), (True, b"c"), (True, b"d")])]
    [b'abc', b'd']
    """
    parts: list[bytes] = []
    for last, part in arrived:
        parts.append(part)
        if last:
            yield b"".join(parts)
            parts = []
