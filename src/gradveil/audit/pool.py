"""Several processes with one thread each: two of them do almost twice the work of one with two threads."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from gradveil.attacks.base import Progress
from gradveil.audit.cell import Recovered, cells
from gradveil.audit.config import RunConfig
from gradveil.audit.run import Recover, Recovery, Task
from gradveil.audit.store import Store
from gradveil.core.errors import fail

_Message = tuple["_Worker", dict[str, Any] | None]


class _Worker:
    """One process, and the task it is working on."""

    def __init__(self, setting: str, inbox: queue.Queue[_Message]) -> None:
        self.complaints = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed when the worker ends
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # Its own session: Ctrl-C reaches the parent only, which then ends its workers in order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil.audit.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env=environment,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self.task: Task | None = None
        self.folder: Path | None = None
        self.thread = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self.thread.start()
        self.send(setting)

    def _read(self, inbox: queue.Queue[_Message]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def send(self, line: str) -> None:
        """Write one line; a dead process is noticed when its output ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def end(self) -> str:
        """Stop the process and return the last thing it complained about."""
        self.process.kill()
        self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.complaints.seek(0)
        lines = self.complaints.read().decode("utf-8", "replace").strip().splitlines()
        self.complaints.close()
        return lines[-1] if lines else ""


def in_processes(config: RunConfig, data_dir: Path | None, store: Store, workers: int) -> Recover:
    """Recover tasks in this many worker processes."""
    order = {address.id: i for i, address in enumerate(cells(config))}
    where = str(data_dir.resolve()) if data_dir else None
    setting = json.dumps({"config": config.resolved(), "data_dir": where})

    @contextmanager
    def recover_all(tasks: Sequence[Task], progress: Callable[[Task, Progress], None]) -> Iterator[Recovery]:
        inbox: queue.Queue[_Message] = queue.Queue()
        crew = [_Worker(setting, inbox) for _ in range(min(workers, len(tasks)))]
        try:
            yield _serve(crew, inbox, tasks, progress, store, order, setting)
        finally:
            for worker in crew:
                worker.end()

    return recover_all


def _serve(
    crew: list[_Worker],
    inbox: queue.Queue[_Message],
    tasks: Sequence[Task],
    progress: Callable[[Task, Progress], None],
    store: Store,
    order: dict[str, int],
    setting: str,
) -> Recovery:
    waiting = deque(tasks)
    left = len(tasks)
    while left:
        worker, message = inbox.get()
        task = worker.task
        if message is None:
            crew.remove(worker)
            said = worker.end()
            why = f"the worker process ended with code {worker.process.returncode}" + (f": {said}" if said else "")
            if task is None:
                raise fail("workers", why, "try --workers 1, which says more")
            if waiting:
                crew.append(_Worker(setting, inbox))
            left -= 1
            yield task, why
            continue
        kind = message["kind"]
        if kind == "refused":
            raise fail("workers", message["message"], "correct it and run the same command again")
        if kind == "progress":
            assert task is not None
            step: dict[str, Any] = message["step"]
            # JSON has no NaN: an objective that is none yet comes as null.
            progress(task, Progress(**{**step, "objective": step["objective"] or float("nan")}))
            continue
        if kind in ("done", "failed"):
            assert task is not None
            assert worker.folder is not None
            left -= 1
            found = message["message"] if kind == "failed" else _collect(worker.folder, task.share)
            worker.task = None
            _assign(worker, waiting, store, order)
            yield task, found
        else:
            _assign(worker, waiting, store, order)


def _assign(worker: _Worker, waiting: deque[Task], store: Store, order: dict[str, int]) -> None:
    if not waiting:
        return
    task = worker.task = waiting.popleft()
    worker.folder = store.scratch(task.cell.id).resolve()
    said = {"cell": order[task.cell.id], "share": task.share, "start": task.numbers.start, "stop": task.numbers.stop}
    worker.send(json.dumps({**said, "plan": str(task.plan_file.resolve()), "folder": str(worker.folder)}))


def _collect(folder: Path, share: int) -> Recovered | str:
    """Read what a worker wrote; files that are damaged or gone fail their cell, which is then tried again."""
    stem = folder / f"share-{share}"
    try:
        said = json.loads(stem.with_suffix(".json").read_text("utf-8"))
        return Recovered(load_file(stem.with_suffix(".safetensors")), said["facts"], tuple(said["statuses"]))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        return f"what the worker wrote cannot be read: {type(error).__name__}: {error}"
