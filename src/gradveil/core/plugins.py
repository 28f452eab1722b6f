"""Names that installed packages add to the tables: entry points, imported when a name is used or listed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from gradveil.core.errors import GradveilError, Problem, refuse

_E = TypeVar("_E")


@dataclass(frozen=True)
class Plugin:
    """A name that an installed package gives to what lies at an import path."""

    name: str
    path: str
    """`pkg.module:name`."""
    package: str
    """The distribution that is installed."""


def plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Find the names that installed packages have in `gradveil.<group>`, without importing any of them."""
    return _found(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _found(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    found: dict[str, tuple[Plugin, ...]] = {}
    for point in entry_points(group=f"gradveil.{group}"):
        name = point.name.lower().replace("_", "-")
        found[name] = (*found.get(name, ()), Plugin(name, point.value, point.dist.name if point.dist else "?"))
    return found


class Catalogue(Mapping[str, _E], Generic[_E]):
    """A table of this library together with what installed packages add to it.

    A name that two packages have, or a package and the table, is refused wherever it is used: nobody could tell which
    of them a text means.
    """

    def __init__(self, group: str, noun: str, own: Mapping[str, _E], enter: Callable[[Plugin], _E]) -> None:
        """Join a table with the packages of a group; `enter` imports what a plug-in names and makes its entry."""
        self.group, self.noun, self.own, self._enter = group, noun, own, enter

    def plugin(self, name: str) -> Plugin | None:
        """Return the plug-in of a name, None for a name of the table or of nobody; refuse a name of several."""
        rivals = plugins(self.group).get(name, ())
        refuse(self._clash(name, rivals))
        return rivals[0] if rivals else None

    def _clash(self, name: str, rivals: tuple[Plugin, ...]) -> list[Problem]:
        owners = [f"the package {plugin.package}" for plugin in rivals] + (
            ["gradveil itself"] if name in self.own else []
        )
        if not rivals or len(owners) == 1:
            return []
        remedy = f"let one of them name its entry point in gradveil.{self.group} otherwise, or uninstall it"
        return [Problem(f"{self.noun} {name}", f"is a name of {' and '.join(owners)}", remedy)]

    def __getitem__(self, name: str) -> _E:
        """Return an entry; that of a plug-in is imported."""
        plugin = self.plugin(name)
        if plugin is None:
            return self.own[name]
        try:
            return self._enter(plugin)
        except GradveilError as error:
            where = f"{self.noun} {name} of the package {plugin.package}"
            raise GradveilError(Problem(where, f"{p.where}: {p.what}", p.remedy) for p in error.problems) from error

    def __contains__(self, name: object) -> bool:
        """Say whether anybody has the name, without importing anything."""
        return name in self.own or name in plugins(self.group)

    def __iter__(self) -> Iterator[str]:
        """List the table's names, then those of packages."""
        return iter(dict.fromkeys([*self.own, *plugins(self.group)]))

    def __len__(self) -> int:
        """Count the names."""
        return sum(1 for _ in self)

    def installed(self) -> tuple[list[tuple[Plugin, _E]], list[Problem]]:
        """Import what packages add: every usable one, and a warning for each that is not."""
        usable: list[tuple[Plugin, _E]] = []
        problems: list[Problem] = []
        for name, (first, *_) in plugins(self.group).items():
            try:
                usable.append((first, self[name]))
            except GradveilError as error:
                problems += [Problem(p.where, p.what, p.remedy, severity="warning") for p in error.problems]
        return usable, problems
