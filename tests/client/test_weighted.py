"""Sums of weighted per-example gradients equal a loop over the examples, though none of these gradients is made."""

import pytest
import torch
from torch import nn

from gradveil.client import Client, cross_entropy
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.gradients.convolution import Geometry, squared_weight_gradients, weight_gradient
from gradveil.gradients.objective import Objective
from gradveil.gradients.per_client import weighted_sum
from gradveil.nn.models import MODELS
from gradveil.nn.stochastic import model_noise
from tests.client.test_batched import HAND_MADE, looped, small

OF_IMAGES = [name for name, entry in MODELS.items() if "channels" in entry.takes]

EXAMPLES = 5


def assert_weighs(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Compare squared norms and sums, whose weights follow from the norms, with the loop's."""
    model = model.double()
    inputs = torch.randn(EXAMPLES, *shape, generator=Key(0).generator(), dtype=torch.float64)
    batch = Batch(inputs, torch.arange(EXAMPLES) % 4)
    noise = model_noise(model, inputs).to(torch.float64).sample(Key(1))
    params = {name: value.detach() for name, value in model.named_parameters()}
    objective = Objective(model, cross_entropy)
    apart = Batch(*(value.unsqueeze(1) for value in batch))
    rows = looped(objective, params, {}, apart, {name: value.unsqueeze(1) for name, value in noise.items()})
    seen: Tensors = {}

    def weigh(squares: Tensors) -> Tensors:
        seen.update(squares)
        return {name: torch.cos(square + i) for i, (name, square) in enumerate(squares.items())}

    result = weighted_sum(objective, params, {}, batch, noise, weigh)
    assert result is not None
    assert list(result) == list(rows)
    expected = {name: row.detach().reshape(EXAMPLES, -1).square().sum(1) for name, row in rows.items()}
    largest = max(float(square.max()) for square in expected.values())
    for name, square in expected.items():
        torch.testing.assert_close(seen[name], square, rtol=1e-9, atol=1e-12 * largest, msg=name)
    for i, (name, row) in enumerate(rows.items()):
        sums = torch.tensordot(torch.cos(seen[name] + i), row.detach(), 1)
        torch.testing.assert_close(result[name], sums, rtol=1e-8, atol=1e-11 * max(1.0, largest**0.5), msg=name)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_weighted_sum_of_every_model_equals_the_loop(name: str) -> None:
    assert_weighs(small(name).eval(), (3, 32, 32))


@pytest.mark.parametrize("case", HAND_MADE)
def test_weighted_sum_of_small_models_equals_the_loop(case: str) -> None:
    model, shape = HAND_MADE[case]
    assert_weighs(model(), shape[2:])


@pytest.mark.parametrize("side", [1, 2, 9, 40])
@pytest.mark.parametrize("stride", [1, 2])
def test_squared_norms_equal_those_of_the_gradients(side: int, stride: int) -> None:
    geometry = Geometry((3, 3), (stride, stride), (1, 1), (1, 1))
    outside = -(-side // stride)
    draw = Key(3).generator()
    x = torch.randn(EXAMPLES, 30, side, side, generator=draw, dtype=torch.float64)
    delta = torch.randn(EXAMPLES, 40, outside, outside, generator=draw, dtype=torch.float64)
    expected = weight_gradient(delta, x, EXAMPLES, geometry).flatten(1).square().sum(1)
    torch.testing.assert_close(squared_weight_gradients(delta, x, geometry), expected)


@pytest.mark.parametrize("text", ["dp(clip=0.3, sigma=0.5)", "fed-cdp(clip=0.1, sigma=0.5)", "clip-example(0.2)"])
def test_clipping_client_stores_no_example_gradients(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends what one sends who holds them; more than a few are never asked for."""
    client: Client = parse(text)(Client(small("lenet-zhu").double()), Key(1))
    params, draw = client.params(), Key(2).generator()
    images = torch.rand(12, 3, 32, 32, generator=draw, dtype=torch.float64)
    batch = Batch(images, torch.randint(0, 4, (12,), generator=draw))
    noise = client.noise_spec(params, batch).sample(Key(3))
    with monkeypatch.context() as patched:
        patched.setattr("gradveil.client.defended_gradient.weighted_sum", lambda *_: None)
        expected, _ = client.update(params, batch, noise, client.init(params))
    for rows in ("example_gradients", "per_client_gradients"):
        monkeypatch.setattr(f"gradveil.client.defended_gradient.{rows}", None)
    result, _ = client.update(params, batch, noise, client.init(params))
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-9, atol=1e-14)
