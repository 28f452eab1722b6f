"""Plug-ins: entries that installed packages add to the tables, imported when a name is used or listed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from gradveil.core.errors import GradveilError, Problem, fail

_E = TypeVar("_E")


@dataclass(frozen=True)
class Plugin:
    """A name that an installed package registers for an import path."""

    name: str
    path: str
    """`pkg.module:name`."""
    package: str
    """The name of the installed distribution."""


def plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Return the plug-ins of the entry-point group `gradveil.<group>` by name, without importing them."""
    return _plugins(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _plugins(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    by_name: dict[str, tuple[Plugin, ...]] = {}
    for point in entry_points(group=f"gradveil.{group}"):
        name = point.name.lower().replace("_", "-")
        by_name[name] = (*by_name.get(name, ()), Plugin(name, point.value, point.dist.name if point.dist else "?"))
    return by_name


class Catalogue(Mapping[str, _E], Generic[_E]):
    """A table of this library joined with the plug-ins of a group.

    A name that two packages register, or a package and this library, is ambiguous and raises an error on use.
    """

    def __init__(self, group: str, noun: str, own: Mapping[str, _E], enter: Callable[[Plugin], _E]) -> None:
        """Join the table `own` with a group of plug-ins; `enter` imports a plug-in and returns its entry."""
        self.group, self.noun, self.own, self._enter = group, noun, own, enter

    def plugin(self, name: str) -> Plugin | None:
        """Return the plug-in of a name, None if there is none; raise if the name is ambiguous."""
        candidates = plugins(self.group).get(name, ())
        owners = [f"the package {plugin.package}" for plugin in candidates]
        owners += ["gradveil itself"] if name in self.own else []
        if candidates and len(owners) > 1:
            remedy = f"rename one of the entry points in gradveil.{self.group}, or uninstall a package"
            raise fail(f"{self.noun} {name}", f"is a name of {' and '.join(owners)}", remedy)
        return candidates[0] if candidates else None

    def __getitem__(self, name: str) -> _E:
        """Return an entry, importing it if it is a plug-in."""
        plugin = self.plugin(name)
        if plugin is None:
            return self.own[name]
        try:
            return self._enter(plugin)
        except GradveilError as error:
            where = f"{self.noun} {name} of the package {plugin.package}"
            raise GradveilError(Problem(where, f"{p.where}: {p.what}", p.remedy) for p in error.problems) from error

    def __contains__(self, name: object) -> bool:
        """Return whether the table or a plug-in has the name, without importing anything."""
        return name in self.own or name in plugins(self.group)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the table, then those of plug-ins."""
        return iter(dict.fromkeys([*self.own, *plugins(self.group)]))

    def __len__(self) -> int:
        """Count the names."""
        return sum(1 for _ in self)

    def installed(self) -> tuple[list[tuple[Plugin, _E]], list[Problem]]:
        """Import all plug-ins; return the usable ones, and a warning for each of the others."""
        usable: list[tuple[Plugin, _E]] = []
        problems: list[Problem] = []
        for name, (first, *_) in plugins(self.group).items():
            try:
                usable.append((first, self[name]))
            except GradveilError as error:
                problems += [Problem(p.where, p.what, p.remedy, severity="warning") for p in error.problems]
        return usable, problems
