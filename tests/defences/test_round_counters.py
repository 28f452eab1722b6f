"""Rounds are counted in single precision at least: half of it has no number between 256 and 258."""

import pytest
import torch

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.laws.cases import Tiny, draw_batch

COUNTING = {
    "standin": "send.standin.rounds",
    "dgc(warmup=400)": "send.dgc.rounds",
    "outpost": "step.outpost.steps",
    "optimal-noise(0.1, probes=2, every=3, memory=0.5)": "send.noise.rounds",
}


@pytest.mark.parametrize("text", COUNTING)
def test_rounds_are_counted_on_in_half_precision(text: str):
    client = parse(text)(Client(Tiny().bfloat16()))
    params, batch = client.params(), Batch(draw_batch(Key(0)).inputs.bfloat16(), draw_batch(Key(0)).targets)
    state = client.init(params)
    state[COUNTING[text]] = torch.full_like(state[COUNTING[text]], 256)
    noise = client.noise_spec(params, batch).sample(Key(1))
    sent, after = client.update(params, batch, noise, state)
    assert float(after[COUNTING[text]]) == 257
    assert {value.dtype for value in sent.values()} == {torch.bfloat16}
    assert {name: value.dtype for name, value in after.items()} == {name: v.dtype for name, v in state.items()}
