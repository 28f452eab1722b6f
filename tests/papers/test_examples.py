"""The example run with every defence leaves none out: a new one has to be attacked there too."""

from pathlib import Path

import pytest

from gradveil.audit.run_file import read
from gradveil.defences import entries
from gradveil.defences.defence_catalogue import DEFENCES

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_OTHERS = {"mixup", "token-dropout"}
"""The run has single images: the first mixes those of a client with each other, the second is for texts."""


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_example_can_be_read(file: Path):
    config = read(str(file))
    assert config.name == file.stem
    assert config.attacks
    assert config.defences


def test_every_defence_is_in_the_example():
    config = read(str(EXAMPLES / "every-defence.toml"))
    named = {entry.name for text in config.defences for entry in entries(text)}
    assert named == set(DEFENCES) - NEEDS_OTHERS
