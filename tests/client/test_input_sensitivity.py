"""Row norms of dg/dx from derivatives of single examples' gradients: exact, unbiased, and the same in both ways."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import select
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.gradients import input_sensitivity
from gradveil.nn.models import build
from gradveil.theory.input_jacobian import exact_squared_row_norms
from tests.laws.cases import B, Tiny, draw_batch


class Linear(nn.Module):
    """Minus the output of the true class: a loss without a second derivative."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.gather(1, targets.unsqueeze(1)).squeeze(1)


def flat(tensors) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def normal(*shape: int, key: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=Key(0, (key,)).generator(), dtype=dtype)


def given(client: Client, batch: Batch, noise=None):
    """What both ways take, with a direction and a factor for each example."""
    inner = select(noise or {}, "model")
    probe = normal(*batch.inputs.shape, key="probe", dtype=batch.inputs.dtype)
    factor = normal(len(batch.inputs), key="factor", dtype=batch.inputs.dtype).square()
    return client.objective, client.params(), {}, batch, inner, probe, factor


@pytest.mark.parametrize("loss", [None, Linear()])
def test_the_sum_is_that_of_each_examples_own_jacobian(loss):
    client = Client(Tiny()) if loss is None else Client(Tiny(), loss=loss)
    batch = draw_batch(Key(1))
    *rest, probe, factor = given(client, batch)
    expected = 0.0
    for b in range(B):

        def own(x: Tensor, b: int = b) -> tuple[Tensor, ...]:
            return tuple(client.update(client.params(), Batch(x, batch.targets[b : b + 1]), {}, {})[0].values())

        _, moved = torch.autograd.functional.jvp(own, batch.inputs[b : b + 1], probe[b : b + 1])
        expected = expected + factor[b] * torch.cat([value.flatten() for value in moved]).square()
    torch.testing.assert_close(flat(input_sensitivity.reference(*rest, probe, factor)), expected)
    torch.testing.assert_close(flat(input_sensitivity._swept(*rest, probe, factor)), expected)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("scheliga-cnn", "none"),
        ("lenet-zhu", "none"),
        ("resnet18", "none"),
        ("scheliga-cnn", "precode(k=8)"),
        ("scheliga-cnn", "dropout(0.3)"),
    ],
)
def test_the_sweep_is_the_reference_on_models_of_the_studies(model: str, text: str):
    """PRECODE adds its own loss and noise; none of these falls back."""
    net = build(model, channels=3, size=32, classes=10, generator=Key(0).generator())
    client = parse(text)(Client(net))
    batch = Batch(normal(6, 3, 32, 32, key="x", dtype=torch.float32), torch.arange(6))
    noise = client.noise_spec(client.params(), batch).sample(Key(2))
    arguments = given(client, batch, noise)
    found, expected = input_sensitivity._swept(*arguments), input_sensitivity.reference(*arguments)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6 * float(value.max()) + 1e-30)
    assert input_sensitivity._serves(*arguments)


def test_a_model_that_the_sweep_does_not_fit_is_computed_by_the_reference():
    class Twice(nn.Module):
        """Its layer is used twice, so that derivatives add up before they are squared."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(64, 64).double(), nn.Linear(64, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x.flatten(1))))))

    client, batch = Client(Twice()), draw_batch(Key(1))
    arguments = given(client, batch)
    assert not input_sensitivity._serves(*arguments)
    found = input_sensitivity.example_squared_row_norms(*arguments[:-2], arguments[-2], torch.tensor(0.5).double())
    assert bool((flat(found) > 0).any())


def test_the_estimate_is_unbiased_and_narrower_than_that_of_whole_batches():
    """Its variance is that of as many draws as directions, or more where one direction of the batch has one."""
    client, batch = Client(Tiny()), draw_batch(Key(1))

    def gradient(own: Batch):
        return client.update(client.params(), own, {}, {})[0]

    exact = flat(exact_squared_row_norms(gradient, batch))
    arguments = given(client, batch)[:-2]
    rows = []
    for number in range(600):
        key = Key(number, ("cell",))
        probe = torch.randn(8, *Tiny.input_shape, generator=key.generator(), dtype=torch.float64)
        offset = torch.rand((), generator=key.child("offset").generator(), dtype=torch.float64)
        rows.append(flat(input_sensitivity.example_squared_row_norms(*arguments, probe, offset)) / exact)
    ratios = torch.stack(rows)
    torch.testing.assert_close(ratios.mean(), torch.ones(()).double(), rtol=0.02, atol=0)
    assert float((ratios.mean(0) - 1).abs().max()) < 0.3
    # Two directions of the batch cost as much as these eight of one example: their relative variance is 2 / 2.
    assert float(ratios.var(0).mean()) < 0.6


def test_examples_that_a_model_is_sure_of_get_few_directions():
    client = Client(Tiny())
    outputs = torch.tensor([[20.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 20.0, 0.0]]).double()
    share = input_sensitivity.shares(client.objective, outputs, torch.tensor([0, 0, 0]))
    gradients = (outputs.softmax(1) - F.one_hot(torch.zeros(3, dtype=torch.long), 3)).norm(dim=1)
    torch.testing.assert_close(share, 0.9 * gradients / gradients.sum() + 0.1 / 3)
    same = input_sensitivity.shares(client.objective, 1000 * outputs[:1].repeat(4, 1), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(same, torch.full((4,), 0.25).double())


def test_known_outputs_save_the_forward_pass_and_change_nothing():
    calls = []

    class Counting(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    client = parse("optimal-noise(0.1, probes=3, of=example)")(Client(Counting()))
    params, batch = client.params(), draw_batch(Key(1))
    noise = client.noise_spec(params, batch).sample(Key(2))
    for _ in range(2):
        calls.clear()
        sent, _ = client.update(params, batch, noise, {})
    assert calls == [B, 3], "the gradient, and the directions"
    context = replace(client, send=None).pipeline.gradient.context(params, batch, {})
    squares = context.sensitivity(noise["send.noise.probe"], noise["send.noise.offset"])
    plain, _ = replace(client, send=None).update(params, batch, {}, {})
    transform = dict(client.send)["noise"]
    scales = transform.scales(plain, squares)
    for name, value in plain.items():
        torch.testing.assert_close(sent[name], value + scales[name] * noise[f"send.noise.normal.{name}"])
