"""The run directory: records, images, configuration. Private, atomic, and resumable after any kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gradveil.audit.files import read_json, sync, write_json, write_private
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.metrics import wilson

FORMAT = 1
RUN, CELL, RECORDS, IMAGES, LOCK = "run.json", "cell.json", "records.json", "images.safetensors", ".lock"
PLANS = "plans"


@dataclass(frozen=True)
class Cell:
    """One finished (or failed) cell: what `cell.json` and `records.json` say, and where the images lie."""

    info: dict[str, Any]
    records: list[dict[str, Any]]
    path: Path | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Images that were never written (`images` of a result in memory)."""

    @property
    def failed(self) -> str | None:
        """Why it failed; None if it did not."""
        return self.info.get("failed")

    def images(self) -> dict[str, Tensor] | None:
        """Load truths and reconstructions, [V, B, C, H, W] in [0, 1]; None where only scores were kept."""
        if self.path is None:
            return dict(self.kept) or None
        file = self.path / IMAGES
        if not file.is_file():
            return None
        try:
            return load_file(file)
        except SafetensorError as error:
            raise fail(str(file), f"is damaged: {error}", "remove its folder and run the audit again") from error


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk: `run.json`, and its cells in the order of the run file."""

    info: dict[str, Any]
    cells: list[Cell]
    path: Path | None = None


def load_run(path: Path | str) -> Run:
    """Read a run directory, finished or not."""
    folder = Path(path)
    if not (folder / RUN).is_file():
        remedy = "give the folder that `gradveil audit` wrote, such as runs/faces"
        raise fail(str(folder), "is not a run directory (it has no run.json)", remedy)
    info = read_json(folder / RUN)
    if info.get("format") != FORMAT:
        what = f"has format {info.get('format')}, this version reads {FORMAT}"
        raise fail(str(folder / RUN), what, "read it with the version that wrote it")
    found = {child.name: child for child in _children(folder / "cells") if ".tmp-" not in child.name}
    order = [name for name in info.get("cells", []) if name in found]
    return Run(info, [read_cell(found[name]) for name in order], folder)


def read_cell(folder: Path) -> Cell:
    """Read one cell."""
    records = folder / RECORDS
    return Cell(read_json(folder / CELL), read_json(records) if records.is_file() else [], folder)


def summarise(cell: Cell) -> dict[str, Any]:
    """Sum one cell up in one flat object.

    Rates count images; means are over images; `seconds` is the attack's working time, summed over processes; an
    unfinished cell has None.
    """
    info, records = cell.info, cell.records
    keys = ("cell", "model", "data", "seed", "round", "client", "defence", "attack")
    images = [image for record in records for image in record["per_image"]]
    successes = sum(image["success"] for image in images)
    low, high = wilson(successes, len(images)) if images else (None, None)
    statuses: dict[str, int] = {}
    for record in records:
        statuses[record["status"]] = statuses.get(record["status"], 0) + 1
    return {
        **{key: info.get(key) for key in keys},
        "victims": len(records),
        "images": len(images),
        "asr": successes / len(images) if images else None,
        "asr_low": low,
        "asr_high": high,
        "ssim_mean": _mean(images, "ssim"),
        "psnr_mean": _mean(images, "psnr"),
        "mse_mean": _mean(images, "mse"),
        "label_accuracy": _mean(records, "label_accuracy"),
        "distance": info.get("distance"),
        "bytes_sent": info.get("bytes_sent"),
        "seconds": info.get("seconds"),
        "statuses": statuses or {"failed": 1},
        "failed": cell.failed,
    }


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return fmean(values) if values else None


class Store:
    """The writing side of a run directory. Use as a context manager: it holds the directory's lock."""

    def __init__(self, folder: Path) -> None:
        """Name the directory; nothing is touched before `open`."""
        self.folder = folder

    @contextlib.contextmanager
    def open(self, info: Mapping[str, Any], fresh: bool = False) -> Iterator[Store]:
        """Create or resume the run; refuse another configuration, and a second process."""
        if self.folder.exists() and not self.folder.is_dir():
            raise fail(str(self.folder), "is a file", "choose another --out")
        existed = (self.folder / RUN).is_file()
        if not existed and self.folder.is_dir() and any(child.name != LOCK for child in self.folder.iterdir()):
            ours = all(".tmp-" in child.name or child.name in (LOCK, "cells", PLANS) for child in self.folder.iterdir())
            if not ours:
                raise fail(str(self.folder), "holds other files and is not a run directory", "choose another --out")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise fail(str(self.folder), f"cannot be made: {error.strerror}", "choose another --out") from error
        with self._locked():
            if existed and fresh:
                shutil.rmtree(self.folder / "cells", ignore_errors=True)
                shutil.rmtree(self.folder / PLANS, ignore_errors=True)
                (self.folder / RUN).unlink()
                (self.folder / "report.html").unlink(missing_ok=True)
                existed = False
            self._clean()
            if existed:
                self._same(info)
            else:
                (self.folder / "cells").mkdir(mode=0o700, exist_ok=True)
                write_json(self.folder / RUN, info)
            yield self

    def info(self) -> dict[str, Any]:
        """Return what `run.json` says."""
        return read_json(self.folder / RUN)

    def finished(self, cell: str) -> bool:
        """Say whether a cell is there and did not fail."""
        file = self.folder / "cells" / cell / CELL
        return file.is_file() and "failed" not in read_json(file)

    def plan_file(self, cell: str, numbers: range) -> Path:
        """Say where the plan of these victims' attack is kept while it is under way; a finished cell tells its own."""
        return self.folder / PLANS / cell / f"{numbers.start}-{numbers.stop - 1}.json"

    def scratch(self, cell: str) -> Path:
        """Return a directory for unfinished parts of a cell; it vanishes when the cell is written."""
        folder = self.folder / "cells" / f"{cell}.tmp-{os.getpid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def write(self, cell: str, result: Cell) -> None:
        """Write a cell: it appears whole or not at all."""
        folder = self.scratch(cell)
        for part in folder.iterdir():
            part.unlink()
        write_json(folder / RECORDS, result.records)
        if result.kept:
            write_private(folder / IMAGES, save(dict(result.kept)))
        write_json(folder / CELL, result.info)
        final = self.folder / "cells" / cell
        if final.exists():
            old = self.folder / "cells" / f"{cell}.tmp-old-{os.getpid()}"
            os.replace(final, old)
            shutil.rmtree(old)
        os.replace(folder, final)
        sync(final.parent)
        shutil.rmtree(self.folder / PLANS / cell, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                remedy = "wait for it, or choose another --out"
                raise fail(str(self.folder), "is in use by another process", remedy) from error
            yield
        finally:
            os.close(handle)

    def _clean(self) -> None:
        """Remove what a killed process left, but for the plans of the cells that were in flight."""
        for child in _children(self.folder / PLANS):
            if (self.folder / "cells" / child.name).exists():
                shutil.rmtree(child)
        for child in [*_children(self.folder), *_children(self.folder / "cells")]:
            if ".tmp-" in child.name:
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def _same(self, info: Mapping[str, Any]) -> None:
        there = self.info()
        if there.get("config_hash") == info["config_hash"] and there.get("format") == FORMAT:
            return
        remedy = (
            "go on with the old settings, start again with --fresh (removes the old results), or choose another --out"
        )
        differences = list(_differences(there.get("config", {}), info["config"])) or ["format"]
        raise GradveilError(
            Problem(f"{self.folder}, {what}", "differs from the run that is there", remedy) for what in differences
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield f"{where} ({json.dumps(old)} there, {json.dumps(new)} now)"


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
