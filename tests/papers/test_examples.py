"""The example run with every defence leaves none out: a new one has to be attacked there too."""

from pathlib import Path

from gradveil.audit.reader import read
from gradveil.defences import entries
from gradveil.defences.presets import DEFENCES

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_A_BATCH = {"mixup"}
"""Mixes the images of one client with each other: it does nothing to a single one."""


def test_every_defence_is_in_the_example():
    config = read(str(EXAMPLES / "every-defence.toml"))
    named = {entry.name for text in config.defences for entry in entries(text)}
    assert named == set(DEFENCES) - NEEDS_A_BATCH
