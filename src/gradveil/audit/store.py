"""The run directory: records, images, configuration. Private, atomic, and resumable after any kill."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gradveil.audit.adaptive import stands_for_many
from gradveil.audit.config import FREE
from gradveil.audit.layout import (
    AGAIN,
    CELL,
    IMAGES,
    PLANS,
    RECORDS,
    RESTORE,
    RUN,
    TRAINING,
    read_images,
    read_parts,
    read_run,
)
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.files import LOCK, DamagedError, locked, sync, write_json, write_private
from gradveil.core.growth import refuse_others
from gradveil.core.sealed import seal
from gradveil.core.words import listing, plural
from gradveil.federated.reading import is_training

UNFIT = "does not apply"
"""The status of a cell whose attack does not apply to its defended client."""


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
        """Why it has no result; None if it has one."""
        return self.info.get("failed")

    @property
    def unfit(self) -> bool:
        """Whether it has no result because the attack does not apply there."""
        return bool(self.info.get("unfit"))

    @property
    def broken(self) -> bool:
        """Whether it failed although the attack applies: doing it again may help."""
        return self.failed is not None and not self.unfit

    @property
    def unscored(self) -> str | None:
        """Why it has no scores although it did not fail; None if it has."""
        return self.info.get("unscored")

    def images(self) -> dict[str, Tensor] | None:
        """Load truths and reconstructions, [V, B, C, H, W] in [0, 1]; None where only scores were kept."""
        if self.path is None:
            return dict(self.kept) or None
        file = self.path / IMAGES
        return read_images(file) if file.is_file() else None


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk: `run.json`, and its cells in the order of the run file."""

    info: dict[str, Any]
    cells: list[Cell]
    path: Path | None = None


def load_run(path: Path | str) -> Run:
    """Read a run directory, finished or not; refuse with every damaged file at once."""
    folder = Path(path)
    if is_training(folder) and not (folder / RUN).is_file():
        remedy = f"gradveil report {folder} shows it, gradveil summary {folder} sums it up"
        raise fail(str(folder), "is a training, and no audit", remedy)
    if not (folder / RUN).is_file():
        remedy = "give the folder that `gradveil audit` or `gradveil train` wrote, such as runs/faces"
        raise fail(str(folder), "is not a run directory (it has no run.json)", remedy)
    info = read_run(folder)
    found = {child.name: child for child in _children(folder / "cells") if ".tmp-" not in child.name}
    cells: list[Cell] = []
    problems: list[Problem] = []
    for name in info["cells"]:
        try:
            cells += [read_cell(found[name], info)] if name in found else []
        except GradveilError as error:
            problems += error.problems
    refuse(problems)
    return Run(info, cells, folder)


def keeps_images(info: Mapping[str, Any]) -> bool:
    """Say whether every finished cell of a run has images."""
    return info["config"].get("images") is True


def read_cell(folder: Path, run: Mapping[str, Any]) -> Cell:
    """Read one cell of a run, of which `run.json` says whether images have to be there; refuse another run's cell."""
    cell = Cell(*read_parts(folder, keeps_images(run)), folder)
    if wrong := listing(_foreign(cell.info, folder.name, run["config"])):
        raise DamagedError(Problem(str(folder / CELL), f"is no cell of this run: {wrong}", AGAIN))
    return cell


def _foreign(info: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Say where a cell differs from its place and from the settings of its run, as far as these tell."""
    attacks = config.get("attacks") or ()
    many = info.get("control") or any(map(stands_for_many, attacks))
    planned: dict[str, Sequence[Any]] = {
        "cell": [name],
        "model": [value for value in [(config.get("model") or {}).get("name")] if value],
        "data": [value for value in [(config.get("data") or {}).get("name")] if value],
        "seed": config.get("seeds") or (),
        "threshold": [value for value in [config.get("threshold")] if value is not None],
        "defence": () if info.get("control") else config.get("defences") or (),
        "attack": () if many else attacks,
    }
    for key, values in planned.items():
        if values and key in info and info[key] not in values:
            yield f"{key} is '{info[key]}', and the run's {listing(map(str, values))}"


class Store:
    """The writing side of a run directory. Use as a context manager: it holds the directory's lock."""

    def __init__(self, folder: Path) -> None:
        """Name the directory; nothing is touched before `open`."""
        self.folder = folder

    @contextlib.contextmanager
    def open(self, info: Mapping[str, Any], fresh: bool = False) -> Iterator[Store]:
        """Create or resume the run; refuse another configuration, and a second process.

        What `info` says is `growing` in the configuration may have more in it than there: the run then has more cells.
        """
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise fail(str(self.folder), "is a file", "choose another --out")
            existed = (self.folder / RUN).is_file()
            if not existed:
                self._only_ours()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise fail(str(self.folder), f"cannot be made or read: {error.strerror}", "choose another --out") from error
        with locked(self.folder):
            if existed and fresh:
                shutil.rmtree(self.folder / "cells", ignore_errors=True)
                shutil.rmtree(self.folder / PLANS, ignore_errors=True)
                shutil.rmtree(self.folder / TRAINING, ignore_errors=True)
                (self.folder / RUN).unlink()
                (self.folder / "report.html").unlink(missing_ok=True)
                existed = False
            self._clean()
            if existed:
                now = self._grown(info)
                if any(now[key] != self.info().get(key) for key in ("cells", "images")):
                    write_json(self.folder / RUN, now)
            else:
                (self.folder / "cells").mkdir(mode=0o700, exist_ok=True)
                write_json(self.folder / RUN, info)
            yield self

    def info(self) -> dict[str, Any]:
        """Return what `run.json` says."""
        return read_run(self.folder)

    def survey(self, names: Iterable[str]) -> tuple[set[str], list[Problem]]:
        """Say which of these cells are done, and which files are damaged: their cells are not done.

        Equal settings give equal records, so a damaged cell may be made again, and its remains lie there until the new
        one is whole. A file that cannot be read is no such case: it may be whole, and is refused.
        """
        run = self.info()
        done: set[str] = set()
        damaged: list[Problem] = []
        unread: list[Problem] = []
        for name in names:
            folder = self.folder / "cells" / name
            try:
                if folder.exists() and read_cell(folder, run).failed is None:
                    done.add(name)
            except DamagedError as error:
                damaged += error.problems
            except GradveilError as error:
                unread += error.problems
        refuse(unread)
        return done, damaged

    def plans(self, cell: str) -> Path:
        """Say where the plans of a cell's attack are kept while it is under way; a finished cell tells its own."""
        return self.folder / PLANS / cell

    def write(self, cell: str, result: Cell) -> None:
        """Write a cell: it appears whole or not at all."""
        folder = self.folder / "cells" / f"{cell}.tmp-{os.getpid()}"
        folder.mkdir(mode=0o700)
        write_json(folder / RECORDS, result.records)
        if result.kept:
            write_private(folder / IMAGES, seal(dict(result.kept)))
        write_json(folder / CELL, result.info)
        final = self.folder / "cells" / cell
        if final.exists():
            old = self.folder / "cells" / f"{cell}.tmp-old-{os.getpid()}"
            os.replace(final, old)
            _remove(old)
        os.replace(folder, final)
        sync(final.parent)
        shutil.rmtree(self.plans(cell), ignore_errors=True)

    def _only_ours(self) -> None:
        """Refuse a folder without run.json that holds more than a start which was killed early leaves."""
        names = {child.name for child in _children(self.folder) if ".tmp-" not in child.name}
        orphans = [child for child in _children(self.folder / "cells") if ".tmp-" not in child.name]
        if names - {LOCK, "cells", PLANS, TRAINING} and not orphans:
            raise fail(str(self.folder), "holds other files and is not a run directory", "choose another --out")
        if orphans:
            what = f"is missing, and nothing else says with which settings the {len(orphans)} cells there were made"
            raise fail(str(self.folder / RUN), what, "put a copy of it back, or choose another --out")

    def _clean(self) -> None:
        """Remove what a killed process left, but for the plans of the cells that were in flight."""
        for child in _children(self.folder / PLANS):
            if (self.folder / "cells" / child.name).exists():
                shutil.rmtree(child)
        for child in [*_children(self.folder), *_children(self.folder / "cells")]:
            if ".tmp-" in child.name:
                _remove(child)

    def _grown(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `run.json` should say now; refuse other settings, and lists without something that is there."""
        there = self.info()
        if there.get("share") is None:
            raise fail(str(self.folder / RUN), "share is missing", RESTORE)
        refuse_others(self.folder, there, info, FREE)
        refuse(list(_shared_otherwise(there.get("sharing", {}), info["sharing"])))
        grown = {key: info[key] for key in ("config", "cells", "command", "sharing", "warnings")}
        # An earlier version did not say what the files held.
        return {**there, **grown, "images": there.get("images") or info["images"]}


def _shared_otherwise(there: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> Iterator[Problem]:
    """Find the defences whose budget would be shared by others than before: their attacks would have had less of it."""
    for defence, counts in there.items():
        if counts != now.get(defence, counts):
            told = f"shared by {plural(max(counts), 'attack')} in the run that is there, and now by {max(now[defence])}"
            remedy = "give the attacks that are there, start again with --fresh, or choose another --out"
            yield Problem("attacks", f"the budget of '{defence}' was {told}", remedy)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
