"""Defended clients take the batched sweep too, and send what the loop over target clients sends."""

from functools import partial

import pytest
import torch

from gradveil.client import Client, looped_updates
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.models import build

TARGET_CLIENTS = 3


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize(
    "text",
    ["dp(clip=0.3, sigma=0.5)", "clip-example(0.2)", "dp(clip=0.3) + dropout(0.5) + prune(0.4, feedback=true)", "dgp"],
)
def test_defended_updates_equal_the_loop(text, examples):
    model = build("lenet-zhu", channels=1, size=16, classes=4, generator=Key(0).generator()).double()
    client: Client = parse(text)(Client(model), Key(1))
    params = client.params()
    draw = Key(2).generator()
    inputs = torch.rand(TARGET_CLIENTS, examples, 1, 16, 16, dtype=torch.float64, generator=draw).requires_grad_()
    batch = Batch(inputs, torch.randint(0, 4, (TARGET_CLIENTS, examples), generator=draw))
    spec = client.noise_spec(params, Batch(inputs[0], batch.targets[0]))
    noise = stack([spec.sample(Key(3, (target_client,))) for target_client in range(TARGET_CLIENTS)])
    state = {name: value.expand(TARGET_CLIENTS, *value.shape) for name, value in client.init(params).items()}
    assert client.pipeline.obstacle(params, batch, noise) is None
    results = []
    for compute in (client.updates, partial(looped_updates, client)):
        sent, after = compute(params, batch, noise, state)
        weighed = sum((value * torch.arange(value.numel()).view_as(value).cos()).sum() for value in sent.values())
        results.append(({**sent, **after}, torch.autograd.grad(weighed, inputs)[0]))
    (fast, slope), (slow, expected) = results
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-12)
