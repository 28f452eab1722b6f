"""Running an audit: every cell that is not there yet, attacked, scored and written."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from gradveil.attacks.base import Progress
from gradveil.attacks.presets import ATTACKS
from gradveil.audit.cell import Address, Recovered, cells, merge
from gradveil.audit.config import RunConfig
from gradveil.audit.expected import expected_work
from gradveil.audit.layout import FORMAT
from gradveil.audit.plans import read_plans, write_plan
from gradveil.audit.scene import Scene
from gradveil.audit.score import Named, failure, score
from gradveil.audit.sighted import score_observed
from gradveil.audit.store import Cell, Store
from gradveil.audit.undefended import target_clients
from gradveil.audit.work import Task, recovered, working
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.own import code_of
from gradveil.defences import entries
from gradveil.federated.config import digest
from gradveil.nn.weights import fingerprint
from gradveil.schedule.work import Job, Parcel, Schedule, in_process

_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "scikit-image", "scikit-learn", "torchmetrics", "pydantic")


class Display(Protocol):
    """What a run tells while it works. Every method is called from one thread."""

    def start(
        self,
        planned: Sequence[Address],
        finished: set[str],
        victims: int,
        damaged: Sequence[Problem] = (),
        work: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Hear of the cells: those that are there, files whose cells are made again, how much work each will be."""
        ...

    def progress(self, cell: Address, share: int, step: Progress) -> None:
        """Hear that one share of a cell got on."""
        ...

    def done(self, cell: Address, result: Cell) -> None:
        """Hear that a cell is finished."""
        ...


def run(scene: Scene, store: Store, display: Display, share: int, schedule: Schedule = in_process) -> list[Cell]:
    """Attack every cell that is not there whole; write each as soon as it is. Returns the results of this call."""
    planned = cells(scene.config)
    finished, damaged = store.survey(cell.id for cell in planned)
    display.start(planned, finished, scene.config.victims, damaged, expected_work(scene))
    first, whole = scene.config.first_victim, scene.config.victims
    divided = {
        control: [
            some
            for numbers in shares(target_clients(whole, control), share)
            for some in scene.source.together(numbers, first)
        ]
        for control in (False, True)
    }
    left = [cell for cell in planned if cell.id not in finished]
    fits = [cell for cell in left if cell.meeting not in scene.unfit]
    tasks = [Task(cell, i, numbers) for cell in fits for i, numbers in enumerate(divided[cell.control])]
    results: list[Cell] = []

    def finished_with(cell: Address, result: Cell) -> None:
        store.write(cell.id, result)
        display.done(cell, result)
        results.append(result)

    for cell in left:
        if why := scene.unfit.get(cell.meeting):
            finished_with(cell, failure(scene, cell, name(scene, cell), why, unfit=True))

    def order(task: Task) -> Parcel:
        return task.order(read_plans(store.plans(task.cell.id), task.numbers), scene.source)

    def heard(task: Task, news: Parcel) -> None:
        if "step" in news.facts:
            display.progress(task.cell, task.share, Progress(**news.facts["step"]))
        else:
            write_plan(store.plans(task.cell.id), task.numbers, news.facts["plan"], news.facts["settled"])

    open_parts: dict[str, dict[int, Recovered | str]] = {}
    with schedule(Job(working(scene), order, heard), tasks) as done:
        for task, part in done:
            parts = open_parts.setdefault(task.cell.id, {})
            parts[task.share] = part if isinstance(part, str) else recovered(part)
            if len(parts) < len(divided[task.cell.control]):
                continue
            whole = [parts[i] for i in sorted(open_parts.pop(task.cell.id))]
            finished_with(task.cell, finish(scene, task.cell, whole))
    return results


def shares(victims: int, share: int) -> list[range]:
    """Divide the victims into shares of this size.

    >>> shares(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(start, min(start + share, victims)) for start in range(0, victims, share)]


def finish(scene: Scene, cell: Address, parts: Sequence[Recovered | str]) -> Cell:
    """Score a cell, or say why it failed."""
    named = name(scene, cell)
    failures = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
    if failures:
        return failure(scene, cell, named, "; ".join(failures))
    scored = score if scene.source.simulated else score_observed
    result = scored(scene, cell, merge([part for part in parts if isinstance(part, Recovered)]), named)
    return replace(result, info={**result.info, "code": code_of((scene.config.model.name, cell.defence, cell.attack))})


def name(scene: Scene, cell: Address) -> Named:
    """Look up titles and citations in the tables of attacks and defences."""
    attack = ATTACKS.get(scene.attacks[cell.attack].name.partition("(")[0])
    # A defence given as an object has a name of its own, which need not be a text of the grammar.
    known = entries(cell.defence) if _reads(cell.defence) else []
    citations = [entry.citation for entry in known if entry.name != "none"]
    return Named(
        "; ".join(entry.description for entry in known) or cell.defence,
        attack.description if attack else cell.attack,
        tuple(dict.fromkeys(([attack.citation] if attack else []) + citations)),
    )


def _reads(text: str) -> bool:
    try:
        return bool(entries(text))
    except GradveilError:
        return False


def describe(
    config: RunConfig,
    share: int,
    command: str,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
    sharing: Mapping[str, Sequence[int]] = MappingProxyType({}),
    warnings: Sequence[str] = (),
    images: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Say everything that `run.json` holds; other weights in a file of the same name are another run.

    `sharing` tells how many attacks share the budget of each defence, client by client; `warnings` what a reader of the
    results has to know that no attack of the run shows; `images` what the files of the data hold.
    """
    settings = config.digest()
    return {
        "format": FORMAT,
        "name": config.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.resolved(),
        "growing": config.growing,
        "config_hash": digest([settings, fingerprint(weights)]) if weights else settings,
        "weights": fingerprint(weights) if weights else None,
        "images": dict(images) if images else None,
        "cells": [cell.id for cell in cells(config)],
        "share": share,
        "sharing": dict(sharing),
        "warnings": list(warnings),
        "gradveil": version("gradveil"),
        "packages": dict(_versions()),
        "machine": machine(config.device),
        "command": command,
    }


def machine(device: str) -> Mapping[str, Any]:
    """Describe the machine: what a timing depends on, and nothing that names its owner."""
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": where,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
