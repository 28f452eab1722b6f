"""What a client computes, against naive programs that share no code with it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.gradients.objective import example_gradients
from tests.laws.cases import B, Tiny, draw


def gradients(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Autograd, one backward pass."""
    values = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), values, strict=True))


def test_gradient_is_autograd():
    client = Client(Tiny())
    params, batch, _, _ = draw(client)
    torch.testing.assert_close(client.update(params, batch, {}, {})[0], gradients(client.model, *batch))


def test_example_gradients_are_a_loop():
    client = Client(Tiny())
    params, batch, _, _ = draw(client)
    rows = example_gradients(client.objective, params, {}, batch, {})
    for i in range(B):
        alone = gradients(client.model, batch.inputs[i : i + 1], batch.targets[i : i + 1])
        torch.testing.assert_close({name: value[i] for name, value in rows.items()}, alone)


def test_example_gradients_take_the_model_noise_apart():
    """The penalty of a bottleneck is a mean over the batch, so the examples' gradients average to the batch's."""
    client = parse("cvb(beta=0.2) + dropout + precode(k=4, beta=0.1)")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    inner = {name.removeprefix("model."): value for name, value in noise.items()}
    rows = example_gradients(client.objective, params, {}, batch, inner)
    whole = client.update(params, batch, noise, {})[0]
    torch.testing.assert_close({name: value.mean(0) for name, value in rows.items()}, whole)


@pytest.mark.parametrize("on", ["sum", "mean"])
def test_dp_sgd_is_a_loop(on: str):
    clip, sigma = 0.4, 0.7
    client = parse(f"dp(clip={clip}, sigma={sigma}, on={on})")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    clipped = 0
    for i in range(B):
        one = gradients(client.model, batch.inputs[i : i + 1], batch.targets[i : i + 1])
        length = torch.cat([value.flatten() for value in one.values()]).norm()
        clipped += int(length > clip)
        for name, value in one.items():
            total[name] += value / max(1.0, float(length) / clip)
    assert clipped > 0
    expected = {}
    for name, value in total.items():
        unit = noise[f"step.noise.{name}"]
        expected[name] = (value + sigma * clip * unit) / B if on == "sum" else value / B + sigma * clip * unit
    torch.testing.assert_close(client.update(params, batch, noise, {})[0], expected)


def test_fed_cdp_is_a_loop():
    """Each example's tensors are clipped one by one; noise of sigma C on the sum."""
    clip, sigma = 1.0, 0.7
    client = parse(f"fed-cdp(clip={clip}, sigma={sigma})")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    rows = [gradients(client.model, batch.inputs[i : i + 1], batch.targets[i : i + 1]) for i in range(B)]
    lengths = [float(value.norm()) for row in rows for value in row.values()]
    assert min(lengths) < clip < max(lengths)
    sums = {name: sum(row[name] / max(1.0, float(row[name].norm()) / clip) for row in rows) for name in params}
    expected = {name: (sums[name] + sigma * clip * noise[f"step.noise.{name}"]) / B for name in params}
    torch.testing.assert_close(client.update(params, batch, noise, {})[0], expected)


def test_user_dp_is_one_clip_of_what_local_training_sends():
    clip, sigma = 0.05, 0.7
    local = Local(2, 0.3, steps=3)
    client = parse(f"user-dp(clip={clip}, sigma={sigma})")(Client(Tiny(), local=local))
    params, batch, noise, _ = draw(client)
    plain = Client(Tiny(), local=local).update(params, batch, {"schedule": noise["schedule"]}, {})[0]
    length = float(torch.cat([value.flatten() for value in plain.values()]).norm())
    assert length > clip
    expected = {n: value * clip / length + sigma * clip * noise[f"send.noise.{n}"] for n, value in plain.items()}
    torch.testing.assert_close(client.update(params, batch, noise, {})[0], expected)


OPTIMISERS = {
    "sgd": (Local(2, 0.3, steps=5), torch.optim.SGD, {}),
    "momentum": (Local(2, 0.3, steps=5, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (
        Local(2, 0.3, steps=5, momentum=0.9, nesterov=True, weight_decay=0.05),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    "decay": (
        Local(2, 0.3, epochs=2, momentum=0.5, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.5, "weight_decay": 0.1},
    ),
    "adam": (Local(2, 0.02, steps=5, optimiser="adam"), torch.optim.Adam, {}),
    "adam-decay": (
        Local(3, 0.02, steps=4, optimiser="adam", weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
        torch.optim.Adam,
        {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3},
    ),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_local_training_is_torch_optim(name: str):
    local, optimiser, settings = OPTIMISERS[name]
    client = Client(Tiny(), local=local)
    params, batch, noise, _ = draw(client)
    model = Tiny()
    steps = optimiser(model.parameters(), lr=local.lr, **settings)
    for chosen in noise["schedule"]:
        steps.zero_grad()
        F.cross_entropy(model(batch.inputs[chosen]), batch.targets[chosen]).backward()
        steps.step()
    moved = {name: params[name] - value.detach() for name, value in model.named_parameters()}
    torch.testing.assert_close(client.update(params, batch, noise, {})[0], moved, rtol=1e-10, atol=1e-13)


def test_dp_sgd_of_local_training_is_a_loop():
    """Each local step clips its own examples and adds its own noise."""
    client = parse("dp(clip=0.4, sigma=0.7)")(Client(Tiny(), local=Local(2, 0.3, steps=3)))
    params, batch, noise, _ = draw(client)
    model = Tiny()
    for t, chosen in enumerate(noise["schedule"]):
        rows = [gradients(model, batch.inputs[i : i + 1], batch.targets[i : i + 1]) for i in chosen.tolist()]
        lengths = [torch.cat([value.flatten() for value in row.values()]).norm() for row in rows]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                total = sum(row[name] / max(1, length / 0.4) for row, length in zip(rows, lengths, strict=True))
                parameter -= 0.3 * (total + 0.28 * noise[f"step.noise.{name}"][t]) / 2
    moved = {name: params[name] - value.detach() for name, value in model.named_parameters()}
    torch.testing.assert_close(client.update(params, batch, noise, {})[0], moved)


def test_schedule_covers_every_example_once_an_epoch():
    client = Client(Tiny(), local=Local(2, 0.1, epochs=3))
    params = client.params()
    batch = Batch(torch.zeros(7, 1, 8, 8).double(), torch.zeros(7, dtype=torch.long))
    schedule = client.noise_spec(params, batch).sample(Key(4))["schedule"]
    assert schedule.shape == (9, 2)
    for epoch in schedule.reshape(3, 6):
        assert len(set(epoch.tolist())) == 6
