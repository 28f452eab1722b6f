"""What has no derivative declares one: an attacker descends along it."""

import pytest
import torch

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Quantise, Sign, parse

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
G = torch.randn(20, generator=Key(0).generator(), dtype=torch.float64)
TOWARDS = torch.randn(20, generator=Key(1).generator(), dtype=torch.float64)


def slope(function, *at: torch.Tensor):
    arguments = [value.clone().requires_grad_() for value in at]
    return torch.autograd.grad((function(*arguments) * TOWARDS).sum(), arguments)


def test_sign_sends_the_mean_magnitude():
    sent, _ = Sign().apply({"w": G, "v": 3 * G}, {}, {}, CONTEXT)
    assert torch.equal(sent["w"], G.sign() * G.abs().mean())
    assert torch.equal(sent["v"].sign(), G.sign())
    assert torch.equal(Sign("unit").apply({"w": G}, {}, {}, CONTEXT)[0]["w"], G.sign())


def test_surrogate_of_signs_has_a_larger_slope_for_small_entries():
    def exact(g):
        return Sign().apply({"w": g}, {}, {}, CONTEXT)[0]["w"]

    mean = G.abs().mean()
    (result,) = slope(exact, G)
    torch.testing.assert_close(result, TOWARDS * mean / (G.abs() + mean))


def test_surrogate_of_rounding_is_its_mean():
    u = torch.rand(20, generator=Key(2).generator(), dtype=torch.float64)

    def rounded(g, draw):
        return Quantise(3).apply({"w": g}, {}, {"w": draw}, CONTEXT)[0]["w"]

    in_g, in_u = slope(rounded, G, u)
    torch.testing.assert_close(in_g, TOWARDS)
    torch.testing.assert_close(in_u, -TOWARDS * G.sign() * G.norm() / 3)


def test_surrogate_of_clipped_levels_has_no_derivative():
    u = torch.rand(20, generator=Key(2).generator(), dtype=torch.float64)

    def rounded(g):
        return Quantise(1, "max", clip=1.0).apply({"w": g}, {}, {"w": u}, CONTEXT)[0]["w"]

    (result,) = slope(rounded, G)
    inside = G.abs() < G.square().mean().sqrt()
    assert 0 < int(inside.sum()) < 20
    torch.testing.assert_close(result, TOWARDS * inside)


@pytest.mark.parametrize("text", ["sign", "ternary", "quantise(bits=3)"])
def test_surrogate_of_a_zero_layer_is_finite(text: str):
    transform = parse(text).send
    zero = torch.zeros(4, requires_grad=True)
    noise = transform.noise({"w": zero}).sample(Key(0))
    sent, _ = transform.apply({"w": zero}, {}, noise, CONTEXT)
    (result,) = torch.autograd.grad(sent["w"].sum(), zero)
    assert bool(torch.isfinite(result).all())
