"""Streams are addressed by frozen labels: recorded results depend on each of them."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import gradveil
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.defences import parse
from tests.laws.cases import CLIENTS, COMBINED, OF_IMAGES, draw_batch

FROZEN = json.loads(Path(__file__).with_name("streams.json").read_text())
"""Labels, the names of the noise of clients with each defence, and the first words of some streams."""
SOURCE = Path(gradveil.__file__).parent


def noise_names(text: str, kind: str) -> list[str]:
    client = parse(text)(CLIENTS[kind])
    return sorted(client.noise_spec(client.params(), draw_batch(Key(0))))


def test_labels_are_frozen():
    assert {label.name: label.value for label in Stream} == FROZEN["labels"]


def test_labels_are_unique():
    assert len({label.value for label in Stream}) == len(Stream.__members__)


@pytest.mark.parametrize("kind", ["gradient", "sgd"])
@pytest.mark.parametrize("text", [*(law.texts[0] for law in OF_IMAGES), *COMBINED])
def test_noise_names_are_frozen(text, kind):
    assert noise_names(text, kind) == FROZEN["noise"][kind][text]


@pytest.mark.parametrize("address", FROZEN["streams"], ids=str)
def test_first_numbers_are_frozen(address):
    seed, *path = address["address"]
    drawn = torch.randint(0, 2**24, (4,), generator=Key(seed, tuple(path)).generator())
    assert drawn.tolist() == address["drawn"]


def _literal_addresses(source: str) -> list[int]:
    """Find the lines that address a stream by a text of their own: `key.child("x")`, `Key(0, ("x",))`."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("child", "Key"):
            parts = [part for argument in node.args for part in ast.walk(argument)]
            lines += [p.lineno for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    return lines


def test_code_uses_only_frozen_labels():
    found = {
        f"{file.relative_to(SOURCE)}:{line}"
        for file in SOURCE.rglob("*.py")
        for line in _literal_addresses(file.read_text())
    }
    assert not found
    assert _literal_addresses('key.child("x", 1); Key(0, ("y",)); key.child(Stream.CLIENT)') == [1, 1]


def twister(generator: torch.Generator) -> np.ndarray:
    """Return the 624 words of a generator's state."""
    return generator.get_state().numpy()[24 : 24 + 8 * 624].view("<u8").astype(np.uint32)


def test_key_seeds_the_mersenne_twister_with_shake256():
    """Numpy's own twister, started with the same 624 words, draws the same."""
    reference, words = np.random.MT19937(), twister(Key(3, ("a", 1)).generator())
    reference.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    drawn = torch.rand(1500, generator=Key(3, ("a", 1)).generator()).numpy()
    assert np.array_equal(drawn, (reference.random_raw(1500) & 0xFFFFFF).astype(np.float32) / 2**24)


def test_keys_with_equal_32_bit_seeds_differ():
    """Torch's own seeding keeps 32 bits of a seed; a million streams of it meet about 116 times, ours never."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32))
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=second)), "what is to be avoided"

    def made_of_its_first_word(generator: torch.Generator) -> bool:
        first, second = map(int, twister(generator)[:2])
        return second == (1812433253 * (first ^ first >> 30) + 1) % 2**32

    assert made_of_its_first_word(torch.Generator().manual_seed(5))
    assert not any(made_of_its_first_word(Key(number).generator()) for number in range(1000))
    assert len({twister(Key(number).generator())[:2].tobytes() for number in range(1 << 12)}) == 1 << 12
