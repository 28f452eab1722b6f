"""The stand-in against torch's optimisers and a plain program, round after round."""

import math

import pytest
import torch

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import StandIn, parse
from tests.laws.cases import Tiny, draw, draw_batch

ROUNDS = 6
CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))


def gradients(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Gradients of several rounds; one entry is zero in the first and one always."""
    drawn = [torch.randn(8, generator=Key(0, (t,)).generator(), dtype=torch.float64) for t in range(ROUNDS)]
    drawn[0][3] = 0
    for g in drawn:
        g[5] = 0
    return [g.to(dtype) for g in drawn]


def sent(text: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    transform = parse(text).send
    state = transform.init({"w": gradients(dtype)[0]})
    found = []
    for g in gradients(dtype):
        update, state = transform.apply({"w": g}, state, {}, CONTEXT)
        found.append(update["w"])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adam_sends_what_torch_would_step_by(dtype: torch.dtype):
    weight = torch.zeros(8, dtype=dtype)
    optimiser = torch.optim.Adam([weight], lr=1.0, betas=(0.8, 0.99), eps=1e-6)
    for g, found in zip(gradients(dtype), sent("standin(beta1=0.8, beta2=0.99, eps=1e-6)", dtype), strict=True):
        before = weight.clone()
        weight.grad = g
        optimiser.step()
        torch.testing.assert_close(found, before - weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("place", "first"), [("sum", 0.990), ("root", 0.010)])
def test_epsilon_counts_where_the_paper_prints_it(place: str, first: float):
    """Eqs. 12 to 15 of the paper add it to the root, its Eq. 5 under the root."""
    transform = parse(f"standin(eps_in={place})").send
    g = torch.tensor([1e-6, 1e-6], dtype=torch.float64)
    state = transform.init({"w": g})
    for _ in range(3):  # with a constant gradient the corrected moments are g and g^2 in every round
        update, state = transform.apply({"w": g}, state, {}, CONTEXT)
        torch.testing.assert_close(update["w"], torch.full_like(g, first), rtol=1e-2, atol=0)


def test_adagrad_sends_what_torch_would_step_by():
    weight = torch.zeros(8, dtype=torch.float64)
    optimiser = torch.optim.Adagrad([weight], lr=1.0, eps=1e-8)
    for g, found in zip(gradients(), sent("standin(optimiser=adagrad)"), strict=True):
        before = weight.clone()
        weight.grad = g
        optimiser.step()
        torch.testing.assert_close(found, before - weight)


def plain(g: list[float], kind: str, published: bool, b1: float = 0.9, b2: float = 0.999) -> list[float]:
    """One entry, in the words of the formula."""
    m = v = 0.0
    out = []
    for t, value in enumerate(g):
        m = b1 * m + (1 - b1) * value
        if kind == "adam":
            v = b2 * v + (1 - b2) * value**2
        elif kind == "adagrad":
            v = v + value**2
        else:
            sign = (v > value**2) - (v < value**2)
            v = v - (1 - b2) * sign * value**2
        if published:
            n = max(t, 1)
            out.append(1e-3 * math.sqrt(1 - b2**n) / (1 - b1**n) * m / (math.sqrt(v) + 1e-8))
        else:
            k = t + 1
            out.append(m / (1 - b1**k) / (math.sqrt(v / (1 - b2**k)) + 1e-8))
    return out


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *((kind, each) for kind in ("adam", "yogi") for each in ("paper", "published_code")),
        ("adagrad", "published_code"),
    ],
)
def test_formula_of_every_variant(kind: str, variant: str):
    found = torch.stack(sent(f"standin(optimiser={kind}, variant={variant})"))
    given = torch.stack(gradients())
    for entry in range(8):
        expected = plain(given[:, entry].tolist(), kind, variant == "published_code")
        torch.testing.assert_close(found[:, entry], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_the_first_round_is_the_sign_of_the_gradient(optimiser: str):
    first = sent(f"standin(optimiser={optimiser})")[0]
    torch.testing.assert_close(first, gradients()[0].sign(), rtol=1e-6, atol=0)
    single = sent(f"standin(optimiser={optimiser})", torch.float32)[0]
    torch.testing.assert_close(single, gradients()[0].sign().float(), rtol=1e-6, atol=0)


def test_moments_are_each_clients_own_and_follow_the_rounds():
    client = parse("standin")(Client(Tiny()))
    params, _, _, _ = draw(client)
    state = client.init(params)
    assert all(not value.any() for value in state.values())
    first, after = client.update(params, draw_batch(Key(1)), {}, state)
    second, _ = client.update(params, draw_batch(Key(2)), {}, after)
    alone, _ = client.update(params, draw_batch(Key(2)), {}, state)
    assert after["send.standin.rounds"] == 1
    assert all(not torch.equal(second[name], alone[name]) for name in second)
    assert all(bool((first[name].abs() <= 1).all()) for name in first)


@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_an_attacker_descends_along_the_ratio_in_the_first_round(optimiser: str):
    g = gradients()[0].requires_grad_()
    stand_in = StandIn(optimiser)
    towards = torch.arange(1.0, 9.0, dtype=torch.float64)
    update, _ = stand_in.apply({"w": g}, stand_in.init({"w": g}), {}, CONTEXT)
    (slope,) = torch.autograd.grad((update["w"] * towards).sum(), g)
    assert bool(torch.isfinite(slope).all())
    size = g.detach().abs()
    # d/dg of g / (|g| + width), the width held fixed: width / (|g| + width)^2
    width = size.mean() + 1e-8
    expected = towards * width / (size + width) ** 2
    there = size > 0
    torch.testing.assert_close(slope[there], expected[there])
    torch.testing.assert_close(slope[~there], (towards / width)[~there])


@pytest.mark.parametrize("optimiser", ["adam", "adagrad", "yogi"])
@pytest.mark.parametrize("variant", ["paper", "published_code"])
def test_a_client_sends_what_an_attacker_simulates(optimiser: str, variant: str):
    """The second round of a layer that is large enough for blocks, plainly, differentiated, and as one of victims."""
    layer = torch.randn(3, 300, 301, generator=Key(5).generator())
    layer[:, 0] = 0.0
    standin = StandIn(optimiser=optimiser, variant=variant)  # pyright: ignore[reportArgumentType]
    _, state = standin.apply({"layer": layer[0]}, standin.init({"layer": layer[0]}), {}, CONTEXT)

    def second(g: torch.Tensor) -> dict[str, torch.Tensor]:
        sent, after = standin.apply({"layer": g}, state, {}, CONTEXT)
        return {"sent": sent["layer"], **after}

    plain = second(layer[1])
    simulated = second(layer[1].clone().requires_grad_())
    batched = torch.vmap(second)(layer[1:])
    assert list(plain) == list(simulated)
    for name, value in plain.items():
        assert torch.equal(value, simulated[name]), name
        assert torch.equal(value, batched[name][0]), name
