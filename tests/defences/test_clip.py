"""Nothing that is clipped is longer than the bound, whatever it is made of, and however it is computed."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from gradveil.client import Client, Local, looped_updates
from gradveil.core.noise import Key
from gradveil.core.tree import norm, tmap
from gradveil.core.types import Batch
from gradveil.defences import parse

BAD = (1e18, 1e30, 3e38, math.inf, math.nan)
TARGETS = torch.tensor([0, 1, 2, 0])


def net(linear: bool = False) -> nn.Module:
    """Build a small network; the linear one lets large inputs through to the gradient."""
    layers = [nn.Linear(12, 3)] if linear else [nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(nn.Flatten(), *layers)
    generator = Key(0).generator()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.5, generator=generator)
    return model


def batch(value: float | None) -> Batch:
    inputs = torch.randn(4, 3, 2, 2, generator=Key(1).generator())
    if value is not None:
        inputs[0] = value
    return Batch(inputs, TARGETS)


def sent(client: Client, examples: Batch) -> dict[str, torch.Tensor]:
    params = client.params()
    with torch.no_grad():
        return client.update(params, examples, client.noise_spec(params, examples).neutral(), client.init(params))[0]


def finite(update) -> bool:
    return all(bool(value.isfinite().all()) for value in update.values())


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("text", ["dp(clip=0.1, sigma=0)", "fed-cdp(clip=0.1, sigma=0)", "clip-example(0.1)"])
def test_clip_bounds_the_effect_of_an_extreme_example(text: str, value: float, linear: bool):
    client = parse(text)(Client(net(linear)))
    bound = 0.1 * (math.sqrt(2 if linear else 4) if text.startswith("fed") else 1)
    examples = batch(value)
    with_it, without = sent(client, examples), sent(client, Batch(examples.inputs[1:], TARGETS[1:]))
    assert finite(with_it)
    change = float(norm(tmap(lambda a, b: 4 * a - 3 * b, with_it, without)))
    assert change <= bound * (1 + 1e-4)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("value", [None, *BAD])
@pytest.mark.parametrize("text", ["dp(clip=0.1, sigma=0)", "fed-cdp(clip=0.1, sigma=0)"])
def test_clip_bound_holds_for_every_computation(text: str, value: float | None, linear: bool):
    client = parse(text)(Client(net(linear)))
    params, examples = client.params(), batch(value)
    noise = client.noise_spec(params, examples).neutral()
    alone = sent(client, examples)
    two = [Batch(*(torch.stack([a, b]) for a, b in zip(batch(None), examples, strict=True)))]
    both = {name: torch.stack([each, each]) for name, each in noise.items()}
    for way in (client.updates, partial(looped_updates, client)):
        result = way(params, two[0], both, {})[0]
        torch.testing.assert_close({name: rows[1] for name, rows in result.items()}, alone, rtol=1e-4, atol=1e-7)
        undisturbed = {name: rows[0] for name, rows in result.items()}
        torch.testing.assert_close(undisturbed, sent(client, batch(None)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sampling", ["batches", "poisson"])
def test_clip_bound_holds_in_local_steps(sampling):
    client = parse("dp(clip=0.1, sigma=0)")(Client(net(), local=Local(2, 0.5, steps=3, sampling=sampling)))
    examples = batch(math.nan)
    params = client.params()
    noise = client.noise_spec(params, examples).sample(Key(2))
    if sampling == "poisson":
        noise["inclusion"] = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 1.0]])
    update = client.update(params, examples, noise, {})[0]
    assert finite(update)
    assert 0 < float(norm(update)) <= 3 * 0.5 * 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("value", BAD[1:])
@pytest.mark.parametrize("text", ["clip(0.1)", "user-dp(clip=0.1, sigma=0)"])
def test_clip_bound_holds_for_a_whole_update(text: str, value: float):
    update = sent(parse(text)(Client(net())), batch(value))
    assert finite(update)
    assert float(norm(update)) <= 0.1 * (1 + 1e-4)


def test_update_without_a_clip_exposes_an_extreme_example():
    client = parse("dp(clip=inf, sigma=0)")(Client(net(linear=True)))
    assert not finite(sent(client, batch(math.nan)))
    plain = replace(client, step=None)
    torch.testing.assert_close(sent(client, batch(1e18)), sent(plain, batch(1e18)), rtol=1e-5, atol=0)
