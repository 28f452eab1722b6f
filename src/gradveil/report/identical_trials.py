"""Attacks with the same reconstructions, shown once; and short names of attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradveil.audit.result_rows import Row
from gradveil.report.pictures import TrialPictures

KINDS = {
    "naive": "non-adaptive",
    "aware": "architecture-aware",
    "adaptive": "adaptive",
    "active": "malicious server",
    "informed": "oracle",
}
"""Kinds of attackers in a word."""


def short_names(rows: Sequence[Row]) -> dict[str, str]:
    """Map every attack of a run to the name of its preset, or to its whole text where two share a preset.

    >>> short_names([])
    {}
    """
    presets = {row.attack: row.preset for row in rows}
    shared = {preset for preset in presets.values() if list(presets.values()).count(preset) > 1}
    return {attack: attack if preset in shared else preset for attack, preset in presets.items()}


def identical(rows: Sequence[Row], pictures: Mapping[int, TrialPictures]) -> list[tuple[Row, ...]]:
    """Group the trials of one defence that reconstruct the same images, in the order of their first members.

    Trials without pictures are compared by the scores of every image.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.seed, row.setting, row.defence, _answer(row, pictures)), []).append(row)
    return [tuple(group) for group in groups.values()]


def _answer(row: Row, pictures: Mapping[int, TrialPictures]) -> object:
    if row.number in pictures:
        return pictures[row.number].answer_digest
    values = tuple(tuple(scores.get(name) for name in ("ssim", "mse", "psnr")) for _, _, scores in row.scores())
    # Without a score of each image, equal trials cannot be told from different ones.
    return values if values and all(None not in each for each in values) else row.number


def named(group: Sequence[Row], names: Mapping[str, str]) -> str:
    """Name the attacks of a group of identical trials, and the attacker where there is a defence to know."""
    kinds = dict.fromkeys(row.attacker for row in group)
    attacks = ", ".join(dict.fromkeys(names[row.attack] for row in group))
    if len(group) > 1:
        return f"{attacks} (identical)"
    kind = next(iter(kinds))
    return attacks if kind == "undefended" else f"{attacks}, {KINDS[kind]}"
