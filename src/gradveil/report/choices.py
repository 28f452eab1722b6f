"""Choices for figures and tables: which defences and attacks are shown, in which order, and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gradveil.core.errors import Problem
from gradveil.core.formatting import listing
from gradveil.core.text_form import bare

T = TypeVar("T")


def is_named(text: str, name: str) -> bool:
    """Return whether a name means this defence or attack: its text, or its text without settings.

    >>> is_named("dgp(top=0.05, bottom=0.75)", "dgp"), is_named("dp(clip=1, sigma=2)", "dp(clip=1,sigma=2)")
    (True, True)
    >>> is_named("dp(clip=1, sigma=2)", "dp(clip=1)")
    False
    """
    squeezed = name.replace(" ", "")
    return squeezed in (text.replace(" ", ""), bare(text).replace(" ", ""))


def pair(text: str) -> tuple[str, str] | None:
    """Split NAME=TEXT at the first equals sign outside parentheses; None where there is none.

    >>> pair("gaussian(std=0.1)=Gaussian, std=0.1"), pair("dgp")
    (('gaussian(std=0.1)', 'Gaussian, std=0.1'), None)
    """
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "=" and depth <= 0:
            return text[:place].strip(), text[place + 1 :].strip()
    return None


@dataclass(frozen=True)
class Choices:
    """What a figure or a table shows; empty choices show everything, in the run's order, by its own names."""

    defences: Sequence[str] = ()
    attacks: Sequence[str] = ()
    order: Sequence[str] = ()
    """Defences and attacks that come first, in this order."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """The text to show for a defence or an attack."""

    def label(self, text: str) -> str:
        """Return the text to show for a defence or an attack; a label for the exact text comes first."""
        exact = text.replace(" ", "")
        chosen = [label for name, label in self.labels.items() if is_named(text, name)]
        return next((t for n, t in self.labels.items() if n.replace(" ", "") == exact), chosen[0] if chosen else text)

    def shows_defence(self, text: str) -> bool:
        """Return whether a defence is shown."""
        return not self.defences or any(is_named(text, name) for name in self.defences)

    def shows_attack(self, text: str) -> bool:
        """Return whether an attack is shown."""
        return not self.attacks or any(is_named(text, name) for name in self.attacks)

    def sort(self, texts: Iterable[str]) -> list[str]:
        """Sort defences or attacks: those of `order` first, the others after them as they come."""
        every = list(dict.fromkeys(texts))
        return sorted(every, key=self._place)

    def _place(self, text: str) -> int:
        return next((i for i, name in enumerate(self.order) if is_named(text, name)), len(self.order))

    def problems(self, defences: Iterable[str], attacks: Iterable[str]) -> Iterator[Problem]:
        """Find names that no defence or attack of the runs has."""
        known = {"defence": list(dict.fromkeys(defences)), "attack": list(dict.fromkeys(attacks))}
        for kind, names in (("defence", self.defences), ("attack", self.attacks)):
            yield from _unknown(kind, names, known[kind])
        for option, names in (("order", self.order), ("label", self.labels)):
            yield from _unknown(option, names, [*known["defence"], *known["attack"]])


def _unknown(option: str, names: Iterable[str], known: Sequence[str]) -> Iterator[Problem]:
    fix = f"choose from: {listing(known)}" if known else "leave it out"
    for name in names:
        if not any(is_named(text, name) for text in known):
            kind = option if option in ("defence", "attack") else "defence or attack"
            yield Problem(option, f"'{name}' is no {kind} of these runs", fix)


@dataclass(frozen=True)
class TableChoices(Choices):
    """What a table for a paper shows."""

    metrics: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def wrong_words(self, metrics: Iterable[str], headers: Iterable[str]) -> Iterator[Problem]:
        """Find metrics that a table does not have, and headers of none of its columns."""
        for option, given, known in (("metric", self.metrics, [*metrics]), ("header", self.headers, [*headers])):
            for name in given:
                if name not in known:
                    yield Problem(option, f"'{name}' is none of this table", f"choose from: {', '.join(known)}")


ALL = TableChoices()
"""A table with everything, by its own names."""


def pairs_of(option: str, texts: Iterable[str], problems: list[Problem]) -> dict[str, str]:
    """Read NAME=TEXT options; add a problem for each that is none."""
    result: dict[str, str] = {}
    for text in texts:
        split = pair(text)
        if split is None or not split[0]:
            problems.append(Problem(option, f"'{text}' is not NAME=TEXT", f"write for example --{option} 'dgp=DGP'"))
        else:
            result[split[0]] = split[1]
    return result
