"""Row norms of dg/dx: the estimate by random probes against the whole Jacobian."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.gradients.objective import mean_gradient
from gradveil.nn.models import build
from gradveil.theory.input_jacobian import exact_squared_row_norms, jacobian, norms, probe_noise, squared_row_norms
from tests.defences.optimal_defence_cases import relu_net
from tests.laws.cases import Tiny, draw_batch


def gradient_of(model: nn.Module):
    client = Client(model)
    params = client.params()
    return lambda batch: mean_gradient(client.objective, params, {}, batch, {})


def probes(batch: Batch, count: int, seed: int = 0) -> Tensor:
    return probe_noise(batch, count).sample(Key(seed, ("probes",)))["probe"]


def flat(tensors) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def test_a_thousand_probes_are_within_five_per_cent():
    """The 95th percentile of the relative error is 2 / sqrt(2 K) = 4.4 % of a norm at K = 1000, in expectation."""
    batch = draw_batch(Key(1))
    gradient = gradient_of(Tiny())
    exact = flat(norms(exact_squared_row_norms(gradient, batch)))
    assert bool((exact > 0).all())
    for seed in range(3):
        found = flat(norms(squared_row_norms(gradient, batch, probes(batch, 1000, seed), at_once=250)))
        assert float(((found - exact) / exact).abs().quantile(0.95)) <= 0.05


def test_the_estimate_is_unbiased_with_the_variance_of_its_law():
    batch = draw_batch(Key(1))
    gradient = gradient_of(Tiny())
    exact = flat(exact_squared_row_norms(gradient, batch))
    tens = [flat(squared_row_norms(gradient, batch, probes(batch, 10, seed))) / exact for seed in range(150)]
    ratios = torch.stack(tens)
    torch.testing.assert_close(ratios.mean(), torch.ones(()).double(), rtol=0.02, atol=0)
    torch.testing.assert_close(ratios.var(0).mean(), torch.tensor(0.2).double(), rtol=0.1, atol=0)


def test_rows_of_units_that_are_off_are_exactly_zero_and_have_a_derivative():
    batch = draw_batch(Key(1))
    gradient = gradient_of(relu_net())
    exact = exact_squared_row_norms(gradient, batch)
    assert not exact["1.weight"][:2].any()
    assert not exact["3.weight"][:, :2].any()
    assert bool((exact["1.weight"][2:] > 0).any())
    x = batch.inputs.clone().requires_grad_()
    found = squared_row_norms(gradient, Batch(x, batch.targets), probes(batch, 10))
    for name, value in found.items():
        torch.testing.assert_close(value == 0, exact[name] == 0, rtol=0, atol=0)
    (slope,) = torch.autograd.grad(flat(norms(found)).sum(), x)
    assert bool(slope.isfinite().all())
    assert bool(slope.any())


def test_no_direction_finds_nothing():
    batch = draw_batch(Key(1))
    neutral = probe_noise(batch, 4).neutral()["probe"]
    assert not flat(squared_row_norms(gradient_of(Tiny()), batch, neutral)).any()


def test_rows_of_a_batch_add_up_over_its_examples():
    """||dg_i/dX||^2 = B^-2 sum_b ||dg_i^(b)/dx_b||^2, since examples meet only in the mean."""
    batch = draw_batch(Key(1))
    gradient = gradient_of(Tiny())
    single = [Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]) for i in range(4)]
    each = sum(flat(exact_squared_row_norms(gradient, one)) for one in single)
    torch.testing.assert_close(flat(exact_squared_row_norms(gradient, batch)), each / 16)


def test_the_jacobian_has_these_rows():
    batch = draw_batch(Key(1))
    gradient = gradient_of(Tiny())
    matrix = jacobian(gradient, batch)
    assert matrix.shape == (flat(gradient(batch)).numel(), batch.inputs.numel())
    torch.testing.assert_close(matrix.square().sum(1), flat(exact_squared_row_norms(gradient, batch)))
    step = 1e-6 * torch.randn(batch.inputs.shape, generator=Key(4).generator(), dtype=torch.float64)
    moved = flat(gradient(Batch(batch.inputs + step, batch.targets))) - flat(gradient(batch))
    torch.testing.assert_close(matrix @ step.flatten(), moved, rtol=1e-4, atol=1e-12)


def test_batches_of_probes_and_of_target_clients_change_nothing():
    batch = draw_batch(Key(1))
    gradient = gradient_of(Tiny())
    probe = probes(batch, 7)
    whole = flat(squared_row_norms(gradient, batch, probe, at_once=7))
    torch.testing.assert_close(flat(squared_row_norms(gradient, batch, probe, at_once=2)), whole)
    other = draw_batch(Key(2))
    rows = Batch(torch.stack([batch.inputs, other.inputs]), torch.stack([batch.targets, other.targets]))
    both = vmap(lambda own, own_probe: squared_row_norms(gradient, own, own_probe))(rows, torch.stack([probe, probe]))
    torch.testing.assert_close(torch.cat([value[0].flatten() for value in both.values()]), whole)


@pytest.mark.parametrize("name", ["lenet-zhu", "scheliga-cnn", "vit"])
def test_forward_mode_runs_on_the_models_of_the_studies(name: str):
    net = build(name, channels=3, size=32, classes=10, generator=Key(0).generator())
    batch = Batch(torch.rand(1, 3, 32, 32, generator=Key(1).generator()), torch.tensor([1]))
    found = squared_row_norms(gradient_of(net), batch, probes(batch, 2))
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert float(flat(found).sum()) > 0


def test_images_whose_channels_come_last_in_memory():
    """As Parquet has them: forward mode of a group norm takes no such tensors."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))
    images = torch.rand(2, 8, 8, 3, generator=Key(0).generator()).permute(0, 3, 1, 2)
    found, expected = (
        squared_row_norms(gradient_of(net), batch, probes(batch, 2))
        for batch in (Batch(x, torch.tensor([0, 1])) for x in (images, images.contiguous()))
    )
    torch.testing.assert_close(found, expected)
