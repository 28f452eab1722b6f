"""The process that drives Ray, started by `gradveil.runs.ray_pool`.

It starts actors on request, forwards orders to them and their messages to its parent. It ends when its input ends, and
with it the actors and a Ray that it started.
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
"""Bytes of the object store of a Ray that is started here: messages pass through it piece by piece."""
_AHEAD = 8
"""Number of pieces that an actor may send ahead of the reader."""
_KNOCK_SECONDS = 30.0
_ROOM_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_UNSEEN_SECONDS = 20.0
"""Seconds after the last starting process was seen, after which an actor that does not live yet is replaced."""
_STARTING = (b"default_worker.py", b"ray::IDLE")
"""Parts of a worker process's command line until it is an actor."""
_SITE = ("opener", "setting", "threads")


def main() -> None:
    """Serve orders until the input ends."""
    # Ray's output must not mix with the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    message = read(sys.stdin.buffer)
    if message is None:
        return
    facts = message[1].facts
    problem = _connect(facts)
    write(out, "refused" if problem else "connected", Parcel({"message": problem}))
    if problem:
        return
    actors = _Actors(facts, out)
    try:
        while (message := read(sys.stdin.buffer)) is not None:
            actors.handle(*message)
    finally:
        _leave(actors, facts)


def _connect(facts: Mapping[str, Any]) -> str:
    """Start Ray, or join the cluster; return the reason if that fails, else an empty string."""
    import ray
    from ray.exceptions import RayError

    starts_ray = facts["address"] is None
    cores = facts["workers"] * facts["threads"]
    start = {"num_cpus": cores, "object_store_memory": _STORE, "include_dashboard": False}
    start |= {"_temp_dir": facts["folder"]}
    try:
        _knock(facts["address"])
        # "local" starts a new cluster even if one runs on this machine.
        address, options = facts["address"] or "local", start if starts_ray else {}
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        return _missing_resources({"CPU": cores, "GPU": facts["workers"] * facts["gpus"]})
    except (OSError, RuntimeError, ValueError, RayError) as error:
        return f"{type(error).__name__}: {error}"


def _missing_resources(needed: Mapping[str, int]) -> str:
    """Return what the cluster lacks: a worker that waits for resources would keep its task from the others."""
    import ray

    end = time.monotonic() + _ROOM_SECONDS  # resources of a run that has just ended take a while to be free
    while True:
        total, free = ray.cluster_resources(), ray.available_resources()
        if all(free.get(kind, 0) >= count for kind, count in needed.items()):
            return ""
        if time.monotonic() > end or any(total.get(kind, 0) < count for kind, count in needed.items()):
            needs = " and ".join(f"{count} {kind}s" for kind, count in needed.items() if count)
            has = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in needed)
            return f"the workers need {needs}, and of the cluster {has} are free"
        time.sleep(0.2)


def _knock(address: str | None) -> None:
    """Check that the address answers: Ray itself would try for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS):
            pass


def _leave(actors: _Actors, facts: Mapping[str, Any]) -> None:
    """End the actors and this process; if Ray was started here, kill the whole session."""
    if facts["address"] is None:
        shutil.rmtree(facts["folder"], ignore_errors=True)  # the parent may have been killed
        os.killpg(0, signal.SIGKILL)
    import ray

    actors.end_all()
    ray.shutdown()
    os._exit(0)


class _Actors:
    """The actors, each with a thread that waits for its messages."""

    def __init__(self, facts: Mapping[str, Any], out: IO[bytes]) -> None:
        self.facts, self.out = facts, out
        self.lock = threading.Lock()
        self.orders: dict[int, queue.SimpleQueue[Parcel]] = {}
        self.actors: dict[int, Any] = {}

    def handle(self, kind: str, parcel: Parcel) -> None:
        """Carry out a request."""
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
        # One malloc arena: with a single computing thread, its freed blocks are then reused as they are.
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "MALLOC_ARENA_MAX": "1"}
        options = {"num_cpus": self.facts["threads"], "num_gpus": self.facts["gpus"]}
        return ray.remote(Desk).options(**options, max_restarts=0, runtime_env={"env_vars": environment}).remote()

    def _end(self, number: int) -> None:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.kill(self.actors.pop(number))

    def _serve(self, number: int) -> None:
        """Send orders to an actor for as long as it lives."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        actor = self.actors[number]
        site = {name: self.facts[name] for name in _SITE}
        site |= {"folder": os.getcwd(), "paths": sys.path, "versions": versions()}
        try:
            if self.facts["address"] is None and _killed_at_start(actor):
                self._forward(number, "gone", Parcel({}), "the worker on the cluster was killed while it started")
                return
            kind, parcel = unpack(ray.get(actor.open.remote(pack("open", Parcel(site)))))
            if kind == "refused":
                self._forward(number, kind, parcel)
                return
            while True:
                self._order(actor, self.orders[number].get())
                for message in self._messages(actor):
                    self._forward(number, *message)
        except RayTaskError as error:
            # The actor catches errors in tasks, so this one is of its start.
            problem = f"a machine of the cluster cannot begin: {_last(error)}"
            self._forward(number, "refused", Parcel({"message": problem}))
        except RayError as error:
            self._check()
            self._forward(number, "gone", Parcel({}), f"the worker on the cluster is gone: {_last(error)}")

    def _order(self, actor: Any, order: Parcel) -> None:
        """Send an order piece by piece: one after the other, so that a small store holds any."""
        import ray

        for piece in pieces(pack("order", order)):
            ray.get(actor.take.remote(piece))

    def _messages(self, actor: Any) -> Iterator[tuple[str, Parcel]]:
        import ray

        stream = actor.do.options(num_returns="streaming", _generator_backpressure_num_objects=_AHEAD).remote()
        arrived: Iterator[Piece] = (ray.get(reference) for reference in stream)
        for message in joined(arrived):
            yield unpack(message)

    def _forward(self, number: int, kind: str, parcel: Parcel, why: str = "") -> None:
        with self.lock, suppress(BrokenPipeError):
            write(self.out, kind, Parcel({"actor": number, "facts": parcel.facts, "message": why}, parcel.data))

    def _check(self) -> None:
        """End this process if its machine has left the cluster: waiting would never end."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id):
            print("Ray is gone from this machine", file=sys.stderr, flush=True)
            os._exit(1)


def _killed_at_start(actor: Any) -> bool:
    """Wait until an actor lives; return whether its process died before, so that none in this session is starting.

    Ray itself waits for such a process until its time for registration is over.
    """
    import ray

    lives = actor.__ray_ready__.remote()
    seen: float | None = None  # preparing the first start takes long on a busy machine
    while not ray.wait([lives], timeout=_LOOK_SECONDS)[0]:
        # The raylet has the command line of its workers among its arguments.
        calls = [called for called in _session() if not called.partition(b"\0")[0].endswith(b"raylet")]
        if any(part in called for called in calls for part in _STARTING):
            seen = time.monotonic()
        elif seen is not None and time.monotonic() > seen + _UNSEEN_SECONDS:
            return True
    return False


def _session() -> list[bytes]:
    """Read the command lines of the living processes of this session."""
    commands: list[bytes] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == os.getsid(0) and state != "Z":
                commands.append((folder / "cmdline").read_bytes())
    return commands


def _last(error: Exception) -> str:
    """Return the most informative line of one of Ray's long messages: the first of a death, the last of a traceback."""
    from ray.exceptions import RayTaskError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if isinstance(error, RayTaskError) else 0]


if __name__ == "__main__":
    main()
