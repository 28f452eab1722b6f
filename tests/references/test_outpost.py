"""Outpost against its description, entry by entry with NumPy."""

import numpy as np
import pytest
import torch

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Outpost, parse
from tests.laws.cases import CLIENTS, draw

SHAPES = {"conv.weight": (6, 5, 3, 3), "conv.bias": (7,), "head.weight": (10, 20), "scale": (1,)}


def tensors(label: str, size: float = 1.0):
    return {
        name: size * torch.randn(shape, generator=Key(0, (label, name)).generator(), dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def by_hand(g, weights, normal, scale=0.8, prune=80.0, phi=40.0):
    fisher = {name: np.square(value).mean(0) for name, value in g.items()}
    border = np.percentile(np.concatenate([value.ravel() for value in fisher.values()]), 100 - phi)
    sent = {}
    for name, value in g.items():
        pruned = np.where(np.abs(value) < np.percentile(np.abs(value), prune), 0.0, value)
        std = scale * min(weights[name].var(), 1.0)
        sent[name] = pruned + (fisher[name] >= border) * std * normal[name]
    return sent


def apply(outpost: Outpost, steps: float = 0.0, coin: float = 0.0, size: float = 1.0, pinned=None):
    g, weights = tensors("g"), tensors("weights", size)
    noise = {f"normal.{name}": value for name, value in tensors("normal").items()}
    context = Context(weights, Batch(torch.zeros(1), torch.zeros(1)))
    noise |= {"coin": torch.tensor(coin, dtype=torch.float64), **(pinned or {})}
    return outpost.apply(g, {"steps": torch.tensor(steps, dtype=torch.float64)}, noise, context)


@pytest.mark.parametrize("size", [0.1, 3.0])
@pytest.mark.parametrize(("prune", "phi"), [(80.0, 40.0), (33.0, 75.0), (0.0, 10.0)])
def test_it_is_its_description(size: float, prune: float, phi: float):
    """Weights of variance 9 count as 1."""
    sent, _ = apply(Outpost(prune=prune, phi=phi), size=size)
    numbers = [{n: v.numpy() for n, v in tensors(*which).items()} for which in (("g",), ("weights", size), ("normal",))]
    for name, value in by_hand(*numbers, prune=prune, phi=phi).items():
        torch.testing.assert_close(sent[name], torch.from_numpy(np.asarray(value)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("steps", "coin", "hit"), [(0, 0.999, True), (8, 0.499, True), (8, 0.501, False)])
def test_it_is_rarer_the_longer_the_client_trains(steps: int, coin: float, hit: bool):
    sent, state = apply(Outpost(), steps, coin)
    g = tensors("g")
    assert all(torch.equal(sent[name], g[name]) for name in g) is not hit
    assert state == {"steps": steps + 1}


def test_local_steps_and_rounds_are_counted():
    client = parse("outpost")(CLIENTS["sgd"])
    params, batch, noise, _ = draw(client)
    _, state = client.update(params, batch, noise, client.init(params))
    assert state == {"step.outpost.steps": 2}
    _, state = client.update(params, batch, noise, state)
    assert state == {"step.outpost.steps": 4}


def test_zeros_tell_where_no_noise_is_and_nothing_elsewhere():
    outpost = Outpost()
    sent, _ = apply(outpost)
    seen = outpost.evidence(sent)
    g = tensors("g")
    guessed, _ = apply(outpost, coin=1.0, pinned=seen)  # steps 0: the coin 1 believes in no perturbation
    for name, value in sent.items():
        quiet = (value == 0).any(0, keepdim=True).expand_as(value)
        assert torch.equal(guessed[name][quiet], value[quiet])
        assert torch.equal(guessed[name][~quiet], g[name][~quiet])


def test_the_neutral_coin_does_what_is_likelier():
    noise = Outpost().noise(tensors("g"))["coin"].off()
    perturbed, _ = apply(Outpost(), 7, float(noise))
    spared, _ = apply(Outpost(), 9, float(noise))
    g = tensors("g")
    assert not torch.equal(perturbed["head.weight"], g["head.weight"])
    assert torch.equal(spared["head.weight"], g["head.weight"])


def test_what_an_attacker_may_optimise_has_a_derivative():
    names = ("coin", "normal.head.weight")
    g = {name: value.requires_grad_() for name, value in tensors("g").items()}
    noise = {f"normal.{name}": value for name, value in tensors("normal").items()}
    noise |= {"coin": torch.tensor(0.3, dtype=torch.float64)}
    noise = {name: value.requires_grad_() for name, value in noise.items()}
    outpost, context = Outpost(), Context(tensors("weights"), Batch(torch.zeros(1), torch.zeros(1)))
    sent, _ = outpost.apply(g, outpost.init(g), noise, context)
    slopes = torch.autograd.grad(sent["head.weight"].sum(), [g["head.weight"], *(noise[n] for n in names)])
    assert torch.equal(slopes[0], torch.ones_like(slopes[0]))
    assert all(bool(torch.isfinite(slope).all()) and bool(slope.any()) for slope in slopes)
