"""Clients of half-precision models: defences compute in single precision, updates are half precision again."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.client import Client, Local, load_state, save_state
from gradveil.client.seeded_update import drawn_update
from gradveil.core.noise import Key
from gradveil.core.tree import norm
from gradveil.core.types import Batch, Domain
from gradveil.defences import parse
from gradveil.gradients.objective import cross_entropy
from gradveil.spaces import ImageSpace
from tests.laws.cases import COMBINED, OF_IMAGES

HALVES = (torch.float16, torch.bfloat16)
LOCALS = {
    "gradient": None,
    "local": Local(batch=2, lr=0.1, steps=2),
    "poisson": Local(batch=2, lr=0.1, steps=2, sampling="poisson"),
}
TEXTS = (*(law.texts[0] for law in OF_IMAGES), *COMBINED)


class Net(nn.Sequential):
    input_shape = (1, 8, 8)
    dropout_positions = ("1",)
    cvb_position = "1"
    cvb_kernel = 3

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 3))
        generator = Key(0, ("net",)).generator()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def client_of(text: str, dtype: torch.dtype, local: Local | None = None) -> tuple[Client, Batch]:
    drawn = torch.rand(12, 1, 8, 8, generator=Key(0, ("images",)).generator()).to(dtype)
    domain = Domain(ImageSpace((1, 8, 8)), 3, drawn[4:])
    client = parse(text)(Client(Net().to(dtype), local=local, domain=domain))
    return client, Batch(drawn[:4], torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("text", TEXTS)
def test_defended_update_has_the_models_dtype(text, local, dtype, tmp_path):
    client, batch = client_of(text, dtype, LOCALS[local])
    params, state = client.params(), client.init(client.params())
    for number in range(2):
        before = {name: value.dtype for name, value in state.items()}
        sent, state = drawn_update(client, params, batch, Key(0, (number,)), state)
        assert all(value.isfinite().all() for value in sent.values())
        assert {value.dtype for value in sent.values()} == {dtype}
        assert {name: value.dtype for name, value in state.items()} == before
    save_state(tmp_path / "state", client, state)
    assert all(torch.equal(value, state[name]) for name, value in load_state(tmp_path / "state", client).items())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize(
    "text",
    [
        "clip(0.001)",
        "clip-example(0.001)",
        "dp(clip=0.001, sigma=1)",
        "user-dp(clip=0.001, sigma=1)",
        "sign",
        "quantise(bits=8)",
        "quantise(bits=8, scale=max)",
        "ternary(clip=2.5)",
        "minmax(0.5)",
        "standin",
        "standin(optimiser=adagrad)",
        "standin(variant=published_code)",
        "optimal-noise(0.01)",
        "optimal-noise(0.01, of=example)",
        "optimal-noise(0.01, form=global, batches=1)",
        "optimal-prune(0.5)",
        "optimal-prune(0.5, of=example)",
    ],
)
def test_defended_half_precision_update_is_near_single_precision(text, scale, dtype):
    """Whatever the size of the gradient: squares of small and of large halves are no halves.

    Signs take the place of normal numbers. Optimal noise goes to the entries with the smallest gradients, which halves
    round away; so the length would hang on the few numbers that these entries are multiplied by.
    """
    client, batch = client_of(text, dtype)
    client = replace(client, loss=lambda outputs, targets: scale * cross_entropy(outputs, targets))
    spec = client.noise_spec(client.params(), batch).to(torch.float64)
    noise = {name: value.sign() if ".normal." in name else value for name, value in spec.sample(Key(1)).items()}
    lengths: list[float] = []
    for kind in (dtype, torch.float64):
        copy = replace(client, model=Net().to(dtype).to(kind))
        arguments = Batch(batch.inputs.to(kind), batch.targets)
        drawn = {name: value.to(torch.promote_types(kind, torch.float32)) for name, value in noise.items()}
        params = copy.params()
        sent, _ = copy.update(params, arguments, drawn, copy.init(params))
        lengths.append(float(norm({name: value.double() for name, value in sent.items()})))
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)
    assert lengths[1] > 0
