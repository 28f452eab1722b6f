"""A process that runs tasks, started by `gradveil.runs.pool`.

It ends when its input ends, so that a killed parent leaves no process behind.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import IO

from gradveil.runs.messages import read, write
from gradveil.runs.task import Parcel, Site, arrive, attempt


def main() -> None:
    """Serve tasks until the input ends."""
    # Output of a custom model must not mix with the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders: queue.Queue[Parcel] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, orders), daemon=True).start()
    first = orders.get().facts
    work = arrive(Site(first["opener"], first["setting"]), first["threads"])
    if isinstance(work, str):
        write(out, "refused", Parcel({"message": work}))
        return
    while True:
        result = attempt(work, orders.get(), lambda parcel: write(out, "progress", parcel))
        if isinstance(result, str):
            write(out, "failed", Parcel({"message": result}))
        else:
            write(out, "done", result)


def _listen(source: IO[bytes], orders: queue.Queue[Parcel]) -> None:
    while (message := read(source)) is not None:
        orders.put(message[1])
    os._exit(0)


if __name__ == "__main__":
    main()
