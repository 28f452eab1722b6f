"""The process that drives Ray, started by `gradveil.runs.ray_pool`.

It starts actors on request, hands orders to them, and passes on their messages. It ends when its input does: the
actors end with it, and a Ray that it started.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gradveil.runs.messages import read, write
from gradveil.runs.ray_actor import Desk, Piece, joined, pack, pieces, unpack, versions
from gradveil.runs.task import Parcel

_STORE = 256 * 2**20
"""Bytes of the store of a Ray that is started here: messages pass through it piece by piece."""
_AHEAD = 8
"""Pieces that an actor may be ahead of who listens."""
_KNOCK_SECONDS = 30.0
_ROOM_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_STARTING = b"default_worker.py"
"""Part of the command line of a worker process until it is registered, when Ray gives it another name."""
_PLACE = ("opener", "setting", "threads")


def main() -> None:
    """Serve orders until the input ends."""
    # What Ray prints must not mix with the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    said = read(sys.stdin.buffer)
    if said is None:
        return
    facts = said[1].facts
    problem = _connect(facts)
    write(out, "refused" if problem else "connected", Parcel({"message": problem}))
    if problem:
        return
    bridge = _Actors(facts, out)
    try:
        while (said := read(sys.stdin.buffer)) is not None:
            bridge.hear(*said)
    finally:
        _leave(bridge, facts)


def _connect(facts: Mapping[str, Any]) -> str:
    """Start Ray, or join the cluster; say why that cannot be done."""
    import ray
    from ray.exceptions import RayError

    own = facts["address"] is None
    places = facts["workers"] * facts["threads"]
    start = {"num_cpus": places, "object_store_memory": _STORE, "include_dashboard": False}
    start |= {"_temp_dir": facts["folder"]}
    try:
        _knock(facts["address"])
        # "local" starts a cluster, whatever is running on this machine.
        ray.init(
            facts["address"] or "local", log_to_driver=False, logging_level=logging.ERROR, **(start if own else {})
        )
        return _room({"CPU": places, "GPU": facts["workers"] * facts["gpus"]})
    except (OSError, RuntimeError, ValueError, RayError) as error:
        return f"{type(error).__name__}: {error}"


def _room(wanted: Mapping[str, int]) -> str:
    """Say what the cluster lacks: a worker that waits for a place would keep its task from the others."""
    import ray

    end = time.monotonic() + _ROOM_SECONDS  # what another run has just left takes a while to be free
    while True:
        there, free = ray.cluster_resources(), ray.available_resources()
        if all(free.get(kind, 0) >= count for kind, count in wanted.items()):
            return ""
        if time.monotonic() > end or any(there.get(kind, 0) < count for kind, count in wanted.items()):
            needs = " and ".join(f"{count} {kind}s" for kind, count in wanted.items() if count)
            has = " and ".join(f"{free.get(kind, 0):g} of {there.get(kind, 0):g} {kind}s" for kind in wanted)
            return f"the workers need {needs}, and of the cluster {has} are free"
        time.sleep(0.2)


def _knock(address: str | None) -> None:
    """Ask whether anybody is there: Ray itself would ask for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS):
            pass


def _leave(bridge: _Actors, facts: Mapping[str, Any]) -> None:
    """End the actors and go; with a Ray that was started here, at once."""
    if facts["address"] is None:
        shutil.rmtree(facts["folder"], ignore_errors=True)  # who started this may have been killed
        os.killpg(0, signal.SIGKILL)
    import ray

    bridge.end_all()
    ray.shutdown()
    os._exit(0)


class _Actors:
    """The actors, each with a thread that waits for what it says."""

    def __init__(self, facts: Mapping[str, Any], out: IO[bytes]) -> None:
        self.facts, self.out = facts, out
        self.lock = threading.Lock()
        self.orders: dict[int, queue.SimpleQueue[Parcel]] = {}
        self.actors: dict[int, Any] = {}

    def hear(self, kind: str, parcel: Parcel) -> None:
        """Do what was asked for."""
        number = parcel.facts["actor"]
        if kind == "hire":
            self.orders[number] = queue.SimpleQueue()
            self.actors[number] = self._actor()
            threading.Thread(target=self._serve, args=(number,), daemon=True).start()
        elif kind == "order":
            self.orders[number].put(Parcel(parcel.facts["facts"], parcel.data))
        else:
            self._end(number)

    def end_all(self) -> None:
        """End every actor."""
        for number in list(self.actors):
            self._end(number)

    def _actor(self) -> Any:
        import ray

        threads = str(self.facts["threads"])
        # One arena: blocks that the thread at work frees are kept as they are where there is one thread only.
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "MALLOC_ARENA_MAX": "1"}
        options = {"num_cpus": self.facts["threads"], "num_gpus": self.facts["gpus"]}
        return ray.remote(Desk).options(**options, max_restarts=0, runtime_env={"env_vars": own}).remote()

    def _end(self, number: int) -> None:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.kill(self.actors.pop(number))

    def _serve(self, number: int) -> None:
        """Hand orders to an actor for as long as it lives."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        actor = self.actors[number]
        place = {name: self.facts[name] for name in _PLACE}
        place |= {"folder": os.getcwd(), "paths": sys.path, "versions": versions()}
        try:
            opening = actor.open.remote(pack("open", Parcel(place)))
            if self.facts["address"] is None and _killed_at_start(opening):
                self._say(number, "gone", Parcel({}), "the worker on the cluster was killed while it started")
                return
            kind, parcel = unpack(ray.get(opening))
            if kind == "refused":
                self._say(number, kind, parcel)
                return
            while True:
                self._order(actor, self.orders[number].get())
                for each in self._told(actor):
                    self._say(number, *each)
        except RayTaskError as error:
            # The desk catches what goes wrong in a task: this machine cannot even begin.
            self._say(number, "refused", Parcel({"message": f"a machine of the cluster cannot begin: {_last(error)}"}))
        except RayError as error:
            self._check()
            self._say(number, "gone", Parcel({}), f"the worker on the cluster is gone: {_last(error)}")

    def _order(self, actor: Any, order: Parcel) -> None:
        """Send an order piece by piece: one after the other, so that a small store holds any."""
        import ray

        for piece in pieces(pack("order", order)):
            ray.get(actor.take.remote(piece))

    def _told(self, actor: Any) -> Iterator[tuple[str, Parcel]]:
        import ray

        stream = actor.do.options(num_returns="streaming", _generator_backpressure_num_objects=_AHEAD).remote()
        arrived: Iterator[Piece] = (ray.get(reference) for reference in stream)
        for message in joined(arrived):
            yield unpack(message)

    def _say(self, number: int, kind: str, parcel: Parcel, why: str = "") -> None:
        with self.lock, suppress(BrokenPipeError):
            write(self.out, kind, Parcel({"actor": number, "facts": parcel.facts, "message": why}, parcel.data))

    def _check(self) -> None:
        """End this process where its machine is no part of the cluster any more: nothing comes of waiting."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own):
            print("Ray is gone from this machine", file=sys.stderr, flush=True)
            os._exit(1)


def _killed_at_start(opening: Any) -> bool:
    """Wait until an actor answers; return whether a worker process of this session died before it was one.

    Ray itself waits for such a process until its time for registration is over. Which actor it was meant for nobody
    knows, so each one that has not answered yet is replaced.
    """
    import ray

    starting: set[int] = set()
    while not ray.wait([opening], timeout=_LOOK_SECONDS)[0]:
        called = _session()
        if starting - called.keys():
            return True
        starting = {pid for pid, name in called.items() if _STARTING in name and not name.startswith(b"ray::")}
    return False


def _session() -> dict[int, bytes]:
    """Read the command lines of the living processes of this session."""
    found: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == os.getsid(0) and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def _last(error: Exception) -> str:
    """Take the line that says most of one of Ray's long messages: the first of a death, the last of a traceback."""
    from ray.exceptions import RayTaskError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if isinstance(error, RayTaskError) else 0]


if __name__ == "__main__":
    main()
