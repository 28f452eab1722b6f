"""Ray clusters of tests, and the processes that belong to them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESK, BRIDGE = b"ray::Desk", b"gradveil.runs.ray_driver"
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_register_timeout_seconds": "600", "RAY_AUTH_MODE": "token"}

_KEEPER = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", *sys.argv[1:]], stdin=subprocess.DEVNULL)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""
"""Starts Ray, and ends it once the process that started this is gone, even if killed."""


def members(session: int) -> dict[int, bytes]:
    """Return the command lines of the living processes of a session."""
    commands = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                commands[int(folder.name)] = (folder / "cmdline").read_bytes()
    return commands


def bridges(pid: int) -> list[int]:
    """List the processes through which a process drives Ray; each leads a session."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return [child for child in children if BRIDGE in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill_desk(session: int) -> bool:
    """Kill one of the actors of a session; return whether there was one."""
    desks = [pid for pid, called in members(session).items() if called.startswith(DESK)]
    for pid in desks[:1]:
        os.kill(pid, signal.SIGKILL)
    return bool(desks)


def kill_at_start(session: int, done: set[int]) -> bool:
    """Kill a worker process of an actor before Ray registers it, unless `done` has one; return whether one was killed.

    Its environment differs from that of the processes that Ray starts in advance.
    """
    for pid, called in members(session).items():
        if not done and b"default_worker.py" in called and not called.startswith(b"ray::"):
            with suppress(OSError):
                if b"MALLOC_ARENA_MAX=1" in Path(f"/proc/{pid}/environ").read_bytes():
                    time.sleep(0.3)
                    os.kill(pid, signal.SIGKILL)
                    done.add(pid)
    return bool(done)


def gone(session: int, seconds: float = 60) -> bool:
    """Wait for the end of all processes of a session."""
    end = time.monotonic() + seconds
    while members(session) and time.monotonic() < end:
        time.sleep(0.1)
    return not members(session)


@contextmanager
def standing_cluster(places: int) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Start a cluster outside of any run; yield its address, its session and the environment of its users."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    settings = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    words = ["start", "--head", "--block", f"--num-cpus={places}", f"--port={port}", "--include-dashboard=false"]
    with tempfile.TemporaryDirectory(prefix="gv-", ignore_cleanup_errors=True) as folder:
        words += [f"--temp-dir={folder}", f"--object-store-memory={100 * 2**20}"]
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, *words],
                stdout=out,
                stderr=out,
                stdin=subprocess.PIPE,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        try:
            end = time.monotonic() + 180
            while b"--block" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            address = next(word for word in log.read_text().split("'") if word.endswith(f":{port}"))
            yield address, process.pid, settings
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
