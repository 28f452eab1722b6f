"""Custom code by import path, `pkg.module:name`: import it, read its arguments, and call it."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail
from gradveil.core.formatting import plural
from gradveil.core.settings import REQUIRED, NamedEntry, parameters_of


def imported(path: str, where: str) -> Any:
    """Import the object at `pkg.module:name`; `where` names it in messages."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise fail(where, "is not an import path", "write 'pkg.module:factory'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if module_name.endswith(".py"):
            problem = f"'{module_name}' is a file, and a module is named without '.py'"
            raise fail(where, problem, f"write {module_name.removesuffix('.py')}:{attribute}") from error
        remedy = "install it, or run in its folder or add that folder to PYTHONPATH"
        raise fail(where, f"there is no module '{error.name}'", remedy) from error
    except (*FOREIGN, SystemExit) as error:  # a script that parses its command line or calls sys.exit()
        problem = f"importing '{module_name}' raised {type(error).__name__}: {error}"
        raise fail(where, problem, "correct the module, so that it can be imported from anywhere") from error
    imported_object = getattr(module, attribute, None)
    if imported_object is None:
        names = [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
        near = get_close_matches(attribute, names, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(sorted(names)) or 'nothing callable'}"
        raise fail(where, f"module '{module_name}' has no '{attribute}'", remedy)
    return imported_object


def users(thing: object) -> bool:
    """Return whether a function, class, or the class of an object is custom: not part of this library.

    >>> from gradveil.core.tree import tmap
    >>> users(tmap), users(print)
    (False, True)
    """
    definition = thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)
    return not f"{definition.__module__}.".startswith("gradveil.")


_T = TypeVar("_T")
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]")


def called(where: str, call: str, run: Callable[[], _T], hint: str = "") -> _T:
    """Call custom code; report its exceptions with `where`, except errors of this library."""
    try:
        return run()
    except FOREIGN as error:
        if type(error).__module__.startswith("gradveil."):
            raise
        problem = f"{call} raised {type(error).__name__}: {error}"
        raise fail(where, problem, "correct it" + (f": {hint}" if hint else "")) from error


@dataclass(frozen=True)
class OwnEntry(NamedEntry):
    """A custom entry for a table; its arguments are those of its factory's signature."""

    of: Callable[[Any, str], Any] = lambda result, name: result
    """(the factory's result, canonical text) -> the object, named by that text; raises for a wrong type."""

    def __call__(self, **values: Any) -> Any:
        """Call the factory; report its exceptions with the entry's name."""
        self.filled(values)
        try:
            result = self.factory(**values)
        except GradveilError:
            raise
        except FOREIGN as error:
            arguments = ", ".join(f"{name}={value!r}" for name, value in values.items()) or "no arguments"
            problem = f"raised {type(error).__name__}: {error}"
            raise fail(self.name, problem, f"it was called with {arguments}") from error
        return self.of(result, self.text(values))


def own_entry(
    path: str,
    noun: str,
    is_one: Callable[[Any], bool],
    of: Callable[[Any, str], Any],
    mistaken: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> OwnEntry:
    """Import a custom object, or a class or function that returns one, and make its entry.

    `mistaken` maps required arguments that a text cannot give to (problem, remedy): they reveal functions that were
    meant for another purpose.
    """
    where = f"{noun} {path}"
    target = imported(path, where)
    description = (inspect.getdoc(target) or path).splitlines()[0]
    if not isinstance(target, type) and is_one(target):
        return OwnEntry(path, lambda: target, description, "", of=of)
    if not _is_factory(target):
        problem = f"'{path.partition(':')[2]}' is of type {type(target).__name__}, and makes no {noun}"
        raise fail(where, problem, f"name a {noun}, or a function or class that returns one")
    try:  # the text itself is the object's `name`
        arguments = tuple(argument for argument, _ in parameters_of(target) if argument.name != "name")
    except ValueError as error:  # some builtins have no signature
        raise fail(where, "does not say what it takes", "wrap it in a function that does") from error
    for argument in arguments:
        if argument.default is REQUIRED and argument.name in mistaken:
            raise fail(where, *mistaken[argument.name])
    return OwnEntry(path, target, description, "", arguments, of=of)


def _is_factory(target: Any) -> bool:
    return inspect.isroutine(target) or isinstance(target, type | partial)


def code_of(texts: Iterable[str]) -> dict[str, str]:
    """Hash the files of the imported modules that these texts name by import path."""
    modules = sorted({name for text in texts for name in _PATH.findall(text)} & set(sys.modules))
    files = {name: Path(sys.modules[name].__file__ or "") for name in modules}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items() if file.is_file()}


def outdated(codes: Sequence[Mapping[str, str]], texts: Iterable[str]) -> Iterator[Problem]:
    """Warn about trials that an older version of custom code computed.

    `codes` is the result of `code_of` for each trial when it was computed; `texts` are all texts of the run now.
    """
    for module, current in code_of(texts).items():
        older = sum(code.get(module, current) != current for code in codes)
        if older:
            problem = f"has changed since this run computed {plural(older, 'trial')}"
            remedy = "if the change matters, compute them again with --fresh, or in another --out"
            yield Problem(f"module {module}", problem, remedy, severity="warning")


def mixed(codes: Iterable[Mapping[str, str]]) -> Iterator[Problem]:
    """Warn about custom code that changed between trials that are shown together.

    >>> [str(problem.where) for problem in mixed([{"mine": "a"}, {"mine": "b", "net": "c"}, {}])]
    ['module mine']
    """
    versions: dict[str, set[str]] = {}
    for code in codes:
        for module, version in code.items():
            versions.setdefault(module, set()).add(version)
    for module, hashes in versions.items():
        if len(hashes) > 1:
            problem = f"has changed: {len(hashes)} versions of it computed these trials"
            remedy = "if the change matters, compute them again with --fresh, or summarise them separately"
            yield Problem(f"module {module}", problem, remedy, severity="warning")
