"""What the table says that a defence costs: every entry says it, and the bytes are those of an update."""

import re
from functools import cache

import pytest
import torch

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.defences import DEFENCES, parse
from gradveil.defences.entry import DefenceEntry
from gradveil.nn.models import build
from gradveil.wire.codec import encoded_size

NEEDED = {"norm": 1.0, "std": 0.001, "scale": 0.001, "ratio": 0.8, "keep": 0.2}
"""What is set where an argument has no default."""


@cache
def sent_bytes(text: str, kind: str = "images") -> int:
    """Encode the first update of 64 digits, by the small CNN of the cost benchmark; or of 64 texts."""
    key, data = Key(0), load("digits" if kind == "images" else "reviews").private
    model, drawn = {"images": "scheliga-cnn", "texts": "small-encoder"}[kind], key.child("model").generator()
    net = build(model, channels=1, size=32, classes=10, generator=drawn, example=data.space.model_facts())
    domain = Domain(data.space, 10, data.inputs[64:80])
    client, batch = parse(text)(Client(net, domain=domain), key), Batch(data.inputs[:64], data.targets[:64])
    params = client.params()
    noise = client.noise_spec(params, batch).sample(key.child("noise"))
    with torch.no_grad():
        return encoded_size(client.update(params, batch, noise, client.init(params))[0])


@pytest.mark.parametrize("name", DEFENCES)
def test_declared_bytes_equal_the_sent_bytes(name: str):
    entry = DEFENCES[name]
    work, _, message = entry.cost.partition("; ")
    assert work, f"{name} does not say what it costs a client to compute"
    values = {each.name: NEEDED[each.name] for each in entry.arguments if repr(each.default) == "required"}
    plain = "gaussian(0.001)" if entry.kind == "images" else "none"  # words that no text has send nothing
    share = sent_bytes(entry.text(values), entry.kind) / sent_bytes(plain, entry.kind)
    percent, times = re.search(r"(\d+)% of the bytes", message), re.search(r"([\d.]+)x the bytes", message)
    problem = float(percent[1]) / 100 if percent else float(times[1]) if times else 1.0
    assert percent or times or "all bytes" in message, message
    # Units behind a ReLU that is off leave zeros in the first matrices of any defence without noise.
    assert (0.8 if problem == 1 else 0.9) * problem - 0.005 <= share <= 1.1 * problem + 0.005, message


def test_entry_without_a_cost_raises():
    with pytest.raises(TypeError, match="cost"):
        DefenceEntry(  # type: ignore[call-arg]
            name="mine", factory=dict, description="", citation="", changes=(), guarantee="none", adaptive=("ig",)
        )
