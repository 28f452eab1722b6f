"""Command lines in forked processes that need no time to import torch, and their child processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

WORKER = b"gradveil.runs.worker"
IMPORTED = ["gradveil.cli.app", "gradveil.cli.audit_steps", "torch._dynamo", "sklearn.datasets", "skimage.util"]
"""What commands import, some of it late: `_dynamo` at torch's first batched derivative, the last two for data sets."""


def begin(folder: Path, arguments: Sequence[str]) -> BaseProcess:
    """Start `gradveil ARGUMENTS` in this folder, as a copy of a process that has imported everything before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_command, args=(str(folder), list(arguments)))
    process.start()
    return process


def _command(folder: str, arguments: list[str]) -> None:
    from gradveil.cli.app import run

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.chdir(folder)
    sys.exit(run(arguments))


def workers_of(pid: int) -> set[int]:
    """The worker processes that a process has; none where it is gone."""
    found = set[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(child) for child in (task / "children").read_text().split()}
    return {child for child in found if is_worker(child)}


def is_worker(pid: int) -> bool:
    """Whether this process lives and is a worker."""
    with suppress(OSError):
        return WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def left_over(workers: set[int], seconds: float = 60) -> set[int]:
    """Wait for workers whose parent is gone to notice it; return those that did not."""
    end = time.monotonic() + seconds
    while (left := {pid for pid in workers if is_worker(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return left
