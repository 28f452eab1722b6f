"""Custom code by import path, `pkg.module:name`: load it, read its arguments, and call it safely."""

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
from gradveil.core.settings import REQUIRED, Argument, NamedEntry, parameters_of


def imported(path: str, where: str) -> Any:
    """Import what `pkg.module:name` names; `where` is what messages call it."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise fail(where, "is not an import path", "write 'pkg.module:factory'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if module_name.endswith(".py"):
            what = f"'{module_name}' is a file, and a module is named without '.py'"
            raise fail(where, what, f"write {module_name.removesuffix('.py')}:{attribute}") from error
        remedy = "install it, or run in the folder it lies in or add that folder to PYTHONPATH"
        raise fail(where, f"there is no module '{error.name}'", remedy) from error
    except (*FOREIGN, SystemExit) as error:  # a script that reads its command line, or ends with sys.exit()
        what = f"importing '{module_name}' raised {type(error).__name__}: {error}"
        raise fail(where, what, "correct the module, so that it can be imported from anywhere") from error
    found = getattr(module, attribute, None)
    if found is None:
        names = [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
        near = get_close_matches(attribute, names, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(sorted(names)) or 'nothing callable'}"
        raise fail(where, f"module '{module_name}' has no '{attribute}'", remedy)
    return found


def users(thing: object) -> bool:
    """Say whether a function, or what an object is made of, is a user's own: not of this library.

    >>> from gradveil.core.tree import tmap
    >>> users(tmap), users(print)
    (False, True)
    """
    maker = thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)
    return not f"{maker.__module__}.".startswith("gradveil.")


_T = TypeVar("_T")
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]")


def called(where: str, call: str, run: Callable[[], _T], hint: str = "") -> _T:
    """Run what is a user's own; what it raises is told with its place, but for errors of this library."""
    try:
        return run()
    except FOREIGN as error:
        if type(error).__module__.startswith("gradveil."):
            raise
        what = f"{call} raised {type(error).__name__}: {error}"
        raise fail(where, what, "correct it" + (f": {hint}" if hint else "")) from error


@dataclass(frozen=True)
class OwnEntry(NamedEntry):
    """A user's own thing in the place of a table's: its factory's signature says which arguments there are."""

    of: Callable[[Any, str], Any] = lambda made, name: made
    """(what the factory returned, canonical text) -> the thing, named by that text; anything else is refused."""

    def __call__(self, **values: Any) -> Any:
        """Call the factory; what it raises is told with its place."""
        self.filled(values)
        try:
            made = self.factory(**values)
        except GradveilError:
            raise
        except FOREIGN as error:
            given = ", ".join(f"{name}={value!r}" for name, value in values.items()) or "no arguments"
            what = f"raised {type(error).__name__}: {error}"
            raise fail(self.name, what, f"it was called with {given}") from error
        return self.of(made, self.text(values))


def own_entry(
    path: str,
    noun: str,
    is_one: Callable[[Any], bool],
    of: Callable[[Any, str], Any],
    mistaken: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> OwnEntry:
    """Import a user's own thing, or what makes it: an object, a class, or a function that returns one.

    `mistaken` says of an argument that no text can give what its function is instead, and what to do.
    """
    where = f"{noun} {path}"
    found = imported(path, where)
    about = (inspect.getdoc(found) or path).splitlines()[0]
    if not isinstance(found, type) and is_one(found):
        return OwnEntry(path, lambda: found, about, "", of=of)
    if not _is_maker(found):
        what = f"'{path.partition(':')[2]}' is {_a(type(found).__name__)}, and makes no {noun}"
        raise fail(where, what, f"name a {noun}, or a function or class that returns one")
    arguments = _arguments(found, where)
    for argument in arguments:
        if argument.default is REQUIRED and argument.name in mistaken:
            raise fail(where, *mistaken[argument.name])
    return OwnEntry(path, found, about, "", arguments, of=of)


def _is_maker(found: Any) -> bool:
    return inspect.isroutine(found) or isinstance(found, type | partial)


def code_of(texts: Iterable[str]) -> dict[str, str]:
    """Hash the files of the modules that these texts name by import path, as far as they are imported here."""
    modules = sorted({name for text in texts for name in _PATH.findall(text)} & set(sys.modules))
    files = {name: Path(sys.modules[name].__file__ or "") for name in modules}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items() if file.is_file()}


def outdated(made: Sequence[Mapping[str, str]], texts: Iterable[str]) -> Iterator[Problem]:
    """Warn of trials that a user's own code made as it was before: their results are kept as they are.

    `made` is what `code_of` was when each trial was made; `texts` are all that the run names now.
    """
    for module, now in code_of(texts).items():
        others = [code for code in made if code.get(module, now) != now]
        if others:
            were = "was" if len(others) == 1 else "were"
            what = f"has changed since {plural(len(others), 'trial')} of this run {were} made"
            remedy = "if that matters to what they try, make them again with --fresh, or in another --out"
            yield Problem(f"module {module}", what, remedy, severity="warning")


def mixed(made: Iterable[Mapping[str, str]]) -> Iterator[Problem]:
    """Warn of a user's own code that was not the same when trials that stand beside each other were made.

    >>> [str(problem.where) for problem in mixed([{"mine": "a"}, {"mine": "b", "net": "c"}, {}])]
    ['module mine']
    """
    found: dict[str, set[str]] = {}
    for code in made:
        for module, text in code.items():
            found.setdefault(module, set()).add(text)
    for module, texts in found.items():
        if len(texts) > 1:
            what = f"was changed in between: these trials were made by {len(texts)} versions of it"
            remedy = "if that matters to what they show, make them again with --fresh, or sum them up apart"
            yield Problem(f"module {module}", what, remedy, severity="warning")


def _a(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _arguments(factory: Callable[..., Any], where: str) -> tuple[Argument, ...]:
    """Read off a signature what can be given by keyword; the name is given by the text itself."""
    try:
        return tuple(argument for argument, _ in parameters_of(factory) if argument.name != "name")
    except ValueError as error:  # some builtins
        raise fail(where, "does not say what it takes", "wrap it in a function that does") from error
