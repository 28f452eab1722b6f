"""The grammar of defences and attacks as text: `dp(clip=20, sigma=1e-4) + cvb + dropout(0.25)`.

text     = term {"+" term}
term     = (name | path) ["(" [argument {"," argument}] ")"]
path     = module {"." module} ":" name
argument = [name "="] value
value    = number | "inf" | "true" | "false" | "none" | name | quoted text
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.formatting import suggestion
from gradveil.core.settings import REQUIRED, NamedEntry

_SETTINGS = re.compile(r"\([^()]*\)")
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)
    |(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    |(?P<name>-?inf(?!\w)|[A-Za-z_](?:-?\w)*)
    |(?P<quoted>"[^"]*"|'[^']*')
    |(?P<mark>[()+,=])
    |(?P<wrong>[^\s()+,=]+)""",
    re.VERBOSE,
)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int

    @property
    def value(self) -> Any:
        """The value of a number, word or quoted text."""
        if self.kind == "number":
            return int(self.text) if re.fullmatch(r"-?\d{1,15}", self.text) else float(self.text)
        if self.kind == "quoted":
            return self.text[1:-1]
        return _WORDS.get(self.text.lower(), self.text)


@dataclass
class _Reader:
    """A text and the problems found in it so far."""

    text: str
    table: Mapping[str, Any]
    noun: str
    own: Callable[[str], Any] | None
    problems: list[Problem] = field(default_factory=list[Problem])

    def refuse(self, at: int, what: str, remedy: str) -> None:
        """Record a problem at a character, with a caret below it."""
        line = re.sub(r"\s", " ", self.text)
        self.problems.append(
            Problem(f"{self.noun}, character {at + 1}", f"{what}\n    {line}\n    {' ' * at}^\n   ", remedy)
        )

    def refuse_all(self, at: int, error: GradveilError) -> None:
        """Record the problems of an error at a character."""
        for problem in error.problems:
            self.refuse(at, f"{problem.where}: {problem.what}", problem.remedy)


def read(
    text: str, table: Mapping[str, Any], noun: str, own: Callable[[str], Any] | None = None
) -> list[tuple[Any, Any]]:
    """Read `name(arguments) + ...` with a table of callable entries; return (entry, built object) for each term.

    One error reports every mistake with its position. `noun` names a term in messages. `own` returns the entry of an
    import path, and so runs code that the text names. Without it import paths raise an error: omit it for texts that
    others wrote.
    """
    reader = _Reader(text, table, noun, own)
    built = [_term(reader, term, start) for term, start in _terms(reader)]
    refuse(reader.problems)
    return [pair for pair in built if pair is not None]


def bare(text: str) -> str:
    """Drop the settings of a defence or an attack.

    >>> bare("dp(clip=1, sigma=2) + cvb"), bare("mixup(of=own(2))")
    ('dp + cvb', 'mixup')
    """
    shorter = _SETTINGS.sub("", text)
    return shorter if shorter == text else bare(shorter)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _terms(reader: _Reader) -> list[tuple[list[_Token], int]]:
    """Split the text at every plus sign; return the tokens of each term and the index at which it starts."""
    terms: list[tuple[list[_Token], int]] = [([], 0)]
    for match in _TOKEN.finditer(reader.text):
        token = _Token(str(match.lastgroup), match.group(), match.start())
        if token.text == "+" and token.kind == "mark":
            terms.append(([], match.end()))
        elif token.kind != "space":
            terms[-1][0].append(token)
    return terms


def _term(reader: _Reader, tokens: list[_Token], start: int) -> tuple[Any, Any] | None:
    """Read and build one term; None after a problem."""
    names = ", ".join(reader.table)
    if not tokens:
        reader.refuse(start, f"expected the name of {_a(reader.noun)}", f"choose from: {names}")
        return None
    head = tokens[0]
    if head.kind not in ("name", "path"):
        reader.refuse(head.at, f"expected the name of {_a(reader.noun)}, not '{head.text}'", f"choose from: {names}")
        return None
    entry = _entry(reader, head)
    before = len(reader.problems)
    given = _arguments(reader, tokens)
    if entry is None or given is None:
        return None
    values = _bind(reader, entry, head, given)
    if len(reader.problems) > before:
        return None
    try:
        return entry, entry(**values)
    except GradveilError as error:
        reader.refuse_all(head.at, error)
        return None


def _entry(reader: _Reader, head: _Token) -> Any:
    """Look up a name in the table, or import a path if that is allowed; None after a problem."""
    if head.kind == "path" and reader.own is None:
        problem = f"'{head.text}' is custom code, which is not run because a text names it"
        reader.refuse(head.at, problem, "import it yourself and pass the object")
        return None
    name = head.text.lower().replace("_", "-")
    try:
        if head.kind == "path" and reader.own:
            return reader.own(head.text)
        entry = reader.table.get(name)
    except GradveilError as error:  # a plug-in's name is ambiguous, or the code cannot be imported
        reader.refuse_all(head.at, error)
        return None
    if entry is None:
        custom = "; or your own as 'pkg.module:name'" if reader.own else ""
        remedy = suggestion(name, reader.table, f"gradveil list {reader.noun}s") + custom
        reader.refuse(head.at, f"unknown {reader.noun} '{head.text}'", remedy)
    return entry


def _arguments(reader: _Reader, tokens: list[_Token]) -> list[tuple[_Token | None, _Token]] | None:
    """Read the parenthesis after a name: (keyword or None, value) pairs; None after a problem."""
    rest = tokens[1:]
    if not rest:
        return []
    opening, end = rest[0], tokens[-1]
    if opening.text != "(":
        reader.refuse(
            opening.at, f"unexpected '{opening.text}'", f"join {reader.noun}s by '+', put arguments in parentheses"
        )
        return None
    given: list[tuple[_Token | None, _Token]] = []
    i = 1
    while i < len(rest) and rest[i].text != ")":
        keyword = None
        if rest[i].kind == "name" and i + 1 < len(rest) and rest[i + 1].text == "=":
            keyword, i = rest[i], i + 2
        if i >= len(rest) or rest[i].kind not in ("number", "name", "quoted"):
            wrong = rest[min(i, len(rest) - 1)]
            reader.refuse(
                wrong.at, f"expected a value, not '{wrong.text}'", 'write name=value: a number, a word or a "text"'
            )
            return None
        given.append((keyword, rest[i]))
        i += 1
        if i < len(rest) and rest[i].text == ",":
            i += 1
        elif i < len(rest) and rest[i].text != ")":
            reader.refuse(rest[i].at, f"unexpected '{rest[i].text}'", "separate arguments by commas")
            return None
    if i >= len(rest):
        reader.refuse(opening.at, "this parenthesis is never closed", f"add ')' after '{end.text}'")
        return None
    if i + 1 < len(rest):
        reader.refuse(rest[i + 1].at, f"unexpected '{rest[i + 1].text}' after ')'", f"join {reader.noun}s by '+'")
        return None
    return given


def _bind(
    reader: _Reader, entry: NamedEntry, head: _Token, given: list[tuple[_Token | None, _Token]]
) -> dict[str, Any]:
    """Match values to arguments, positional ones first, and record every problem."""
    known = {argument.name: argument for argument in entry.arguments}
    order = list(known)
    takes = f"{entry.name} takes {entry.usage()}"
    values: dict[str, Any] = {}
    keywords = False
    for i, (keyword, token) in enumerate(given):
        if keyword is None:
            if keywords:
                reader.refuse(token.at, "a value without a name after one with a name", "write name=value")
                continue
            if i >= len(order):
                reader.refuse(token.at, f"one value too many for '{entry.name}'", takes)
                continue
            name, at = order[i], token.at
        else:
            keywords, name, at = True, keyword.text, keyword.at
            if name not in known:
                near = get_close_matches(name, known, n=1)
                reader.refuse(at, f"unknown argument '{name}'", (f"did you mean '{near[0]}'? " if near else "") + takes)
                continue
        if name in values:
            reader.refuse(at, f"'{name}' is given twice", "keep one")
        values[name] = token.value
        for problem in known[name].allowed.problems(name, token.value):
            reader.refuse(token.at, f"{problem.where} {problem.what}", problem.remedy)
    for name, argument in known.items():
        if argument.default is REQUIRED and name not in values:
            reader.refuse(head.at, f"'{entry.name}' needs '{name}'", f"give {argument.allowed}: {entry.name}({name}=…)")
    return values
