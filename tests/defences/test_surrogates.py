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


def test_quantise_surrogate_penalises_only_outside_the_interval():
    """Levels of a quarter: the interval of 1/2 reaches from 1/4 to 3/4, that of 0 from -1/4 to 1/4."""
    sent = torch.tensor([0.5, 0.5, 0.5, -0.5, -0.25, 0.0, 0.0, 1.0], dtype=torch.float64)
    tried = torch.tensor([0.3, 0.1, 0.9, 0.2, -0.1, 0.2, -0.5, 1.1], dtype=torch.float64)
    outside = {"l2": [0, -0.15, 0.15, 0.45, 0, 0, -0.25, 0], "max": [0, -0.15, 0.15, 0.45, 0, 0, -0.25, 0.1]}
    for scale, expected in outside.items():
        result = Quantise(4, scale).apply({"w": tried}, {}, {"sent.w": sent}, CONTEXT)[0]["w"] - sent
        torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), atol=2e-5, rtol=0)
    cut = Quantise(4, "max", clip=2.0).apply({"w": tried}, {}, {"sent.w": sent}, CONTEXT)[0]["w"]
    assert float(cut[-1]) == 1.0, "the clip may have cut what is at the top"


def test_sign_surrogate_penalises_at_the_sent_magnitude():
    sent, tried = torch.tensor([0.2, -0.2, 0.2, -0.2]), torch.tensor([3.0, -2.0, -1.0, 2.0])
    result = Sign().apply({"w": tried}, {}, {"sent.w": sent}, CONTEXT)[0]["w"] - sent
    torch.testing.assert_close(result, torch.tensor([0.0, 0.0, -0.1, 0.2]))
    (small,) = slope(lambda g: Sign().apply({"w": g}, {}, {"sent.w": G.sign()}, CONTEXT)[0]["w"], -1e-3 * G)
    assert bool(small.any()), "an update near zero explains no sign"


@pytest.mark.parametrize("text", ["sign", "ternary", "quantise(bits=3)"])
def test_surrogate_of_a_zero_layer_is_finite(text: str):
    transform = parse(text).send
    zero = torch.zeros(4, requires_grad=True)
    noise = transform.noise({"w": zero}).sample(Key(0))
    sent, _ = transform.apply({"w": zero}, {}, noise, CONTEXT)
    (result,) = torch.autograd.grad(sent["w"].sum(), zero)
    assert bool(torch.isfinite(result).all())
