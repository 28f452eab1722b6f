"""Workers on a Ray cluster: one started for the work, or an existing one.

Ray may end the process that drives it (it does if the head of the cluster is lost), has its own threads and signal
handlers, and writes to standard output. So a process in between drives it, connected by pipes like a worker process.
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
"""The place that errors of a cluster name."""
_AGAIN = "finished trials are kept: run the same command again, with another --engine if there is no cluster"
_LEAVE_SECONDS = 20.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
    # Workers that ask for no GPU still see all devices, as in later versions of Ray.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Starting Python and torch may take a minute on a busy machine. Until that time is over, Ray counts a worker that was
# killed during its start as starting; others must be able to start at the same time.
_PATIENT = {
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_worker_maximum_startup_concurrency": "1000",
    "RAY_worker_niceness": "0",
    # Every starting process is then one of an actor.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Cluster:
    """A scheduler with actors of `threads` threads each on a Ray cluster."""

    site: Site
    workers: int
    threads: int = 1
    address: str | None = None
    """Address of an existing cluster; None to start Ray on this machine, and to end it with the work."""
    gpus: int = 0
    """GPUs of each actor."""

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Do every task; leaving the `with` ends the actors, and a cluster that was started for them."""
        return _employed(self, job, tasks)


@contextmanager
def _employed(cluster: Cluster, job: Job[T], tasks: Sequence[T]) -> Generator[Done[T]]:
    if not tasks:  # a cluster takes many seconds to start
        yield iter(())
        return
    if importlib.util.find_spec("ray") is None:
        raise fail(WHERE, "the package 'ray' is not installed", f"{install('ray')}, or use another --engine")
    with closing(_Driver(cluster)) as driver:
        driver.connect()
        with crew(driver.hire, cluster.workers, job, tasks) as done:
            yield done


class _Driver:
    """The process that drives Ray, and its actors."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = tempfile.TemporaryDirectory(prefix="gradveil-", ignore_cleanup_errors=True)
        self.errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the driver
        # A session of its own: Ctrl-C does not reach it, and the processes that it starts can be ended with it.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil.runs.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=_environment(cluster),
            start_new_session=True,
        )
        self.hired: dict[int, tuple[_Actor, Inbox]] = {}
        self.ended = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def connect(self) -> None:
        """Start Ray or join the cluster, which takes several seconds."""
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
        self.send("connect", Parcel(facts))
        assert self.process.stdout is not None
        reply = read(self.process.stdout)
        if reply is None:
            raise self.lost()
        if reply[0] == "refused":
            raise fail(WHERE, reply[1].facts["message"], "correct it, or use another --engine")
        self.thread.start()

    def hire(self, inbox: Inbox) -> _Actor:
        """Start an actor."""
        with self.lock:
            if self.ended:
                raise self.lost()
            actor = _Actor(self, len(self.hired))
            self.hired[actor.number] = (actor, inbox)
        self.send("hire", Parcel({"actor": actor.number}))
        return actor

    def send(self, kind: str, parcel: Parcel) -> None:
        """Send a message to the driver; a dead driver shows when its output ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            write(self.process.stdin, kind, parcel)

    def _read(self) -> None:
        assert self.process.stdout is not None
        while (message := read(self.process.stdout)) is not None:
            kind, parcel = message
            actor, inbox = self.hired[parcel.facts["actor"]]
            if kind == "gone":
                actor.reason = parcel.facts["message"]
            inbox.put(Message(actor, None if kind == "gone" else kind, Parcel(parcel.facts["facts"], parcel.data)))
        with self.lock:
            self.ended = True
            for actor, inbox in self.hired.values():
                inbox.put(Message(actor, None, Parcel({})))

    def lost(self) -> GradveilError:
        """Return the error of a lost cluster, with the driver's last message."""
        self._end()
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        return fail(WHERE, "the cluster is lost" + (f": {lines[-1]}" if lines else ""), _AGAIN)

    def _end(self) -> None:
        """End the process with its whole session: Ray leaves processes behind for a while, however it ends."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Leave the cluster; one that was started here ends with all its processes."""
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
        self.errors.close()
        self.folder.cleanup()


class _Actor:
    """One worker of the cluster, reached through the driver."""

    def __init__(self, driver: _Driver, number: int) -> None:
        self.driver, self.number = driver, number
        self.reason = "the worker on the cluster is gone"

    def send(self, order: Parcel) -> None:
        """Send a task."""
        self.driver.send("order", Parcel({"actor": self.number, "facts": order.facts}, order.data))

    def end(self) -> str:
        """End the actor; return the reason if it was gone."""
        self.driver.send("end", Parcel({"actor": self.number}))
        return self.reason


def _environment(cluster: Cluster) -> Mapping[str, Any]:
    """Return the environment of the driver, and of a Ray that it starts."""
    threads = str(cluster.threads)
    settings = {**_QUIET, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if cluster.address is None:
        # Ray listens on every interface, and anyone who can connect runs code as its user: it needs a token.
        settings |= {**_PATIENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**os.environ, **settings}
