"""Work, tasks and their results: the interface of schedulers.

A task is sent to a worker as a parcel (plain values and bytes), and its result comes back as one. So it can be done in
this process, in another one, or on a machine that shares no files with this one. The sender writes the files.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from gradveil.core.errors import FOREIGN, GradveilError

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Parcel:
    """A message between scheduler and worker: plain values, as JSON has them, and tensors as bytes of safetensors."""

    facts: Mapping[str, Any]
    data: bytes = b""


Report = Callable[[Parcel], None]
"""Function that a worker calls with the progress of its task."""
Work = Callable[[Parcel, Report], Parcel]
"""(order, report) -> result: does one task. Equal orders give equal results on any worker."""


@dataclass(frozen=True)
class Job(Generic[T]):
    """Work, with the order of each of its tasks and a callback for its progress."""

    work: Work
    """Does tasks in this process."""
    order: Callable[[T], Parcel]
    """Returns the order of a task. Called again whenever the task is sent, so that a task whose worker was lost resumes
    from its last reported progress."""
    progress: Callable[[T, Parcel], None]
    """Receives, in this process, the progress of a task."""


@dataclass(frozen=True)
class Site:
    """The function and setting that a worker elsewhere opens before its first task."""

    opener: str
    """`package.module:function`, which returns the work for the setting."""
    setting: Mapping[str, Any]


Done = Iterator[tuple[T, Parcel | str]]
"""Finished tasks in any order, with the result, or the reason of a failure as a string."""

_INSTALLED = (
    str(Path(__file__).parents[1]),
    *{sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")},
    "<",
)
"""Folders of this library and of installed code. Names in angle brackets belong to no file."""


class Scheduler(Protocol):
    """A way to do tasks."""

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Do every task; leaving the `with` ends what is still at work."""
        ...


def in_process(job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
    """Do one task after the other in this process."""

    def each() -> Done[T]:
        for task in tasks:

            def report(parcel: Parcel, task: T = task) -> None:
                job.progress(task, parcel)

            order = ordered(job, task)
            yield task, order if isinstance(order, str) else attempt(job.work, order, report)

    return nullcontext(each())


def ordered(job: Job[T], task: T) -> Parcel | str:
    """Return the order of a task; files that cannot be read fail it."""
    try:
        return job.order(task)
    except GradveilError as error:
        return str(error)


def attempt(work: Work, order: Parcel, report: Report) -> Parcel | str:
    """Do one task; an error in it, out of memory included, fails the task with its message."""
    try:
        return work(order, report)
    except GradveilError as error:
        return str(error)
    except (
        *FOREIGN,
        SystemExit,
    ) as error:  # sys.exit() in an attack fails its task, not the worker
        return f"{type(error).__name__}: {error}{_location(error)}"


def _location(error: BaseException) -> str:
    """Locate an error in custom code: the innermost line outside this library and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    custom = [f for f in frames if not any(f.filename.startswith(folder) for folder in _INSTALLED)]
    return f" ({Path(custom[-1].filename).name}, line {custom[-1].lineno})" if custom else ""


def arrive(site: Site, threads: int) -> Work | str:
    """Open a site with this number of threads; return the reason as a string if that fails."""
    torch.set_num_threads(threads)
    module, _, name = site.opener.partition(":")
    try:
        return getattr(import_module(module), name)(site.setting)
    except GradveilError as error:
        return str(error)
    except FOREIGN as error:
        return f"{type(error).__name__}: {error}"
