"""Work, tasks and their results: the interface of schedulers.

A task is told to a worker as a parcel (plain values and bytes) and comes back as one, so it can be done in this
process, in another one, or on a machine that shares no files with this one; who asked for it writes the files.
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
    """What goes between those who schedule and those who work: values that JSON holds, and tensors as safetensors."""

    facts: Mapping[str, Any]
    data: bytes = b""


Tell = Callable[[Parcel], None]
"""What a worker calls with news of the task it is at."""
Work = Callable[[Parcel, Tell], Parcel]
"""(order, tell) -> result: does one task. Equal orders give equal results, wherever they are carried out."""


@dataclass(frozen=True)
class Job(Generic[T]):
    """Work, and how each of its tasks is ordered and listened to."""

    work: Work
    """Does tasks in this process."""
    order: Callable[[T], Parcel]
    """Says what a worker needs for a task. Asked again whenever the task is given out, so that a task whose worker was
    lost is taken up from what had been heard of it."""
    heard: Callable[[T, Parcel], None]
    """Hears, in this process, what a worker tells of its task."""


@dataclass(frozen=True)
class Site:
    """What a worker elsewhere opens before its first task."""

    opener: str
    """`package.module:function`, which makes the work from the setting."""
    setting: Mapping[str, Any]


Done = Iterator[tuple[T, Parcel | str]]
"""Finished tasks in any order; a string says why a task failed."""

_INSTALLED = (
    str(Path(__file__).parents[1]),
    *{sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")},
    "<",
)
"""Where code lies that is nobody's own; names in angles are of no file."""


class Scheduler(Protocol):
    """A way of getting tasks done."""

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Get every task done; leaving the `with` ends what is still at work."""
        ...


def in_process(job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
    """Do one task after the other in this process."""

    def each() -> Done[T]:
        for task in tasks:

            def tell(news: Parcel, task: T = task) -> None:
                job.heard(task, news)

            order = ordered(job, task)
            yield task, order if isinstance(order, str) else attempt(job.work, order, tell)

    return nullcontext(each())


def ordered(job: Job[T], task: T) -> Parcel | str:
    """Make the order of a task; files that cannot be read fail it."""
    try:
        return job.order(task)
    except GradveilError as error:
        return str(error)


def attempt(work: Work, order: Parcel, tell: Tell) -> Parcel | str:
    """Do one task; what goes wrong in it (running out of memory, too) becomes its message and fails it."""
    try:
        return work(order, tell)
    except GradveilError as error:
        return str(error)
    except (*FOREIGN, SystemExit) as error:  # an attack that ends with sys.exit() ends itself, and no worker
        return f"{type(error).__name__}: {error}{_place(error)}"


def _place(error: BaseException) -> str:
    """Say where a user's own code raised: the innermost line that is neither this library's nor an installed one's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(f.filename.startswith(folder) for folder in _INSTALLED)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def arrive(site: Site, threads: int) -> Work | str:
    """Open a site with so many threads of computation; say why if that cannot be done."""
    torch.set_num_threads(threads)
    module, _, name = site.opener.partition(":")
    try:
        return getattr(import_module(module), name)(site.setting)
    except GradveilError as error:
        return str(error)
    except FOREIGN as error:
        return f"{type(error).__name__}: {error}"
