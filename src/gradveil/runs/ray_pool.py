"""Workers on a Ray cluster: one started for the work, or an existing one.

Ray may end the process that drives it (where the head of the cluster is lost, it does), has threads and signal handlers
of its own, and writes where it likes. So a process in between drives it, and this one speaks with that by pipes, as it
does with worker processes.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gradveil.core.errors import GradveilError, fail
from gradveil.core.extras import install
from gradveil.runs.messages import read, write
from gradveil.runs.pool import Inbox, Message, crew
from gradveil.runs.task import Done, Job, Parcel, Site, T

WHERE = "--engine ray"
"""Where errors of a cluster are said to be."""
_AGAIN = "what is finished is kept: give the same command again, with another --engine where there is no cluster"
_LEAVE_SECONDS = 20.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
    # Nothing is hidden from workers that ask for no GPU, which is what later versions of Ray do.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Starting Python and torch may take a minute on a busy machine. Ray counts a worker that was killed while it started as
# one that starts until that time is over: others have to be able to start besides.
_PATIENT = {
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_worker_maximum_startup_concurrency": "1000",
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True)
class Cluster:
    """A schedule: so many actors of so many threads each on a Ray cluster."""

    site: Site
    workers: int
    threads: int = 1
    address: str | None = None
    """Of a cluster that is there; without one, Ray is started on this machine, and ended with the work."""
    gpus: int = 0
    """GPUs of each actor."""

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Get every task done; leaving the `with` ends the actors, and a cluster that was started for them."""
        return _employed(self, job, tasks)


@contextmanager
def _employed(cluster: Cluster, job: Job[T], tasks: Sequence[T]) -> Generator[Done[T]]:
    if not tasks:  # a cluster takes many seconds to start
        yield iter(())
        return
    if importlib.util.find_spec("ray") is None:
        raise fail(WHERE, "needs the package 'ray'", f"{install('ray')}, or use another --engine")
    with closing(_Driver(cluster)) as bridge:
        bridge.connect()
        with crew(bridge.hire, cluster.workers, job, tasks) as done:
            yield done


class _Driver:
    """The process that drives Ray, and the actors that it was told to hire."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = tempfile.TemporaryDirectory(prefix="gradveil-", ignore_cleanup_errors=True)
        self.complaints = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the bridge
        # Its own session: Ctrl-C does not reach it, and what it starts can be ended with it.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil.runs.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env=_environment(cluster),
            start_new_session=True,
        )
        self.hired: dict[int, tuple[_Actor, Inbox]] = {}
        self.gone = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def connect(self) -> None:
        """Start Ray or join the cluster, which takes its time."""
        cluster = self.cluster
        facts = {
            "address": cluster.address,
            "folder": self.folder.name,
            "workers": cluster.workers,
            "threads": cluster.threads,
            "gpus": cluster.gpus,
            "opener": cluster.site.opener,
            "setting": cluster.site.setting,
        }
        self.tell("connect", Parcel(facts))
        assert self.process.stdout is not None
        said = read(self.process.stdout)
        if said is None:
            raise self.lost()
        if said[0] == "refused":
            raise fail(WHERE, said[1].facts["message"], "correct it, or use another --engine")
        self.thread.start()

    def hire(self, inbox: Inbox) -> _Actor:
        """Have an actor made."""
        with self.lock:
            if self.gone:
                raise self.lost()
            actor = _Actor(self, len(self.hired))
            self.hired[actor.number] = (actor, inbox)
        self.tell("hire", Parcel({"actor": actor.number}))
        return actor

    def tell(self, kind: str, parcel: Parcel) -> None:
        """Tell the bridge something; that it is gone is noticed when its output ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            write(self.process.stdin, kind, parcel)

    def _read(self) -> None:
        assert self.process.stdout is not None
        while (said := read(self.process.stdout)) is not None:
            kind, parcel = said
            actor, inbox = self.hired[parcel.facts["actor"]]
            if kind == "gone":
                actor.why = parcel.facts["message"]
            inbox.put(Message(actor, None if kind == "gone" else kind, Parcel(parcel.facts["facts"], parcel.data)))
        with self.lock:
            self.gone = True
            for actor, inbox in self.hired.values():
                inbox.put(Message(actor, None, Parcel({})))

    def lost(self) -> GradveilError:
        """Say what became of the cluster: what was said last of it."""
        self._end()
        self.complaints.seek(0)
        lines = self.complaints.read().decode("utf-8", "replace").strip().splitlines()
        return fail(WHERE, "the cluster is lost" + (f": {lines[-1]}" if lines else ""), _AGAIN)

    def _end(self) -> None:
        """End the process with all of its session: Ray leaves processes behind for a while, however it ends."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Leave the cluster; one that was started here ends with everything that belongs to it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.cluster.address is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_LEAVE_SECONDS)
        self._end()
        if self.thread.is_alive():
            self.thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.complaints.close()
        self.folder.cleanup()


class _Actor:
    """One worker of the cluster, by way of the bridge."""

    def __init__(self, bridge: _Driver, number: int) -> None:
        self.bridge, self.number = bridge, number
        self.why = "the worker on the cluster is gone"

    def send(self, order: Parcel) -> None:
        """Give out a task."""
        self.bridge.tell("order", Parcel({"actor": self.number, "facts": order.facts}, order.data))

    def end(self) -> str:
        """Have the actor ended; say why it is gone, if it is."""
        self.bridge.tell("end", Parcel({"actor": self.number}))
        return self.why


def _environment(cluster: Cluster) -> Mapping[str, Any]:
    """Say what the bridge and the Ray that it starts find in their environment."""
    threads = str(cluster.threads)
    own = {**_QUIET, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if cluster.address is None:
        # Ray listens on every interface, and whoever may speak to it runs code as its user.
        own |= {**_PATIENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**os.environ, **own}
