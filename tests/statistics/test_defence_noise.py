"""The noise of the defences follows its law: fixed-seed tests that would also notice a scale wrong by 3%."""

import pytest
import torch
from scipy.stats import binomtest, kstest
from torch import Tensor, nn

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse

ENTRIES = 400_000
LEVEL = 0.001


def linear() -> Client:
    model = nn.Linear(ENTRIES // 10, 10, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return Client(model)


def added_by(text: str, examples: int, local: Local | None = None) -> Tensor:
    """What the drawn noise adds to what is sent, compared with neutral noise."""
    client = parse(text)(Client(linear().model, local=local))
    params = client.params()
    inputs = torch.randn(examples, ENTRIES // 10, generator=Key(1).generator())
    batch = Batch(inputs, torch.arange(examples) % 10)
    spec = client.noise_spec(params, batch)
    noise = spec.neutral() | {k: v for k, v in spec.sample(Key(2)).items() if k != "schedule"}
    drawn = client.update(params, batch, noise, client.init(params))[0]["weight"]
    neutral = client.update(params, batch, spec.neutral(), client.init(params))[0]["weight"]
    return (drawn - neutral).flatten().double()


def follows(sample: Tensor, law: str, scale: float) -> bool:
    return bool(kstest((sample / scale).numpy(), law).pvalue > LEVEL)


@pytest.mark.parametrize(
    ("text", "law", "scale"),
    [
        ("gaussian(std=0.5)", "norm", 0.5),
        ("laplace(scale=0.5)", "laplace", 0.5),
        ("dp(clip=20, sigma=0.1)", "norm", 20 * 0.1 / 4),
        ("dp(clip=20, sigma=0.1, on=mean)", "norm", 20 * 0.1),
        ("prune(ratio=0) + gaussian(std=2)", "norm", 2.0),
    ],
)
def test_added_noise_has_its_law_and_scale(text: str, law: str, scale: float):
    """DP-SGD: sigma * clip on the sum of B = 4 examples is sigma * clip / B on the mean that is sent."""
    sample = added_by(text, examples=4)
    assert follows(sample, law, scale)
    assert not follows(sample, law, scale * 1.03)


def test_noise_of_each_local_step_is_independent_and_scaled_by_its_batch():
    """Three steps of SGD: lr * sigma * clip / B a step, so sqrt(3) times as much in the sum."""
    clip, sigma, lr, batch, steps = 1e-6, 1e5, 0.5, 2, 3
    sample = added_by(f"dp(clip={clip}, sigma={sigma})", examples=4, local=Local(batch=batch, lr=lr, steps=steps))
    scale = lr * sigma * clip / batch * steps**0.5
    assert follows(sample, "norm", scale)
    assert not follows(sample, "norm", scale * 1.03)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.6])
def test_dropout_drops_its_rate_and_keeps_the_mean(rate: float):
    model = nn.Sequential(nn.Linear(1, 20_000), nn.Linear(20_000, 1))
    client = parse(f'dropout(p={rate}, where="0")')(Client(model))
    spec = client.noise_spec(client.params(), Batch(torch.ones(5, 1), torch.zeros(5)))
    ((name, mask),) = spec.sample(Key(3)).items()
    assert mask.shape == (5, 20_000)
    dropped = int((mask == 0).sum())
    assert dropped + int((mask == 1).sum()) == mask.numel()
    assert binomtest(dropped, mask.numel(), rate).pvalue > LEVEL
    layer = client.model.get_submodule(name.removeprefix("model.").removesuffix(".mask"))
    torch.testing.assert_close(spec.neutral()[name] / (1 - layer.p), torch.ones_like(mask))
