"""A process that runs tasks, started by `gradveil.runs.pool`.

It ends when its input does, so that a killed parent leaves no orphan at work.
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
    # What a user's model prints must not mix with the messages.
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
        found = attempt(work, orders.get(), lambda news: write(out, "told", news))
        if isinstance(found, str):
            write(out, "failed", Parcel({"message": found}))
        else:
            write(out, "done", found)


def _listen(source: IO[bytes], orders: queue.Queue[Parcel]) -> None:
    while (said := read(source)) is not None:
        orders.put(said[1])
    os._exit(0)


if __name__ == "__main__":
    main()
