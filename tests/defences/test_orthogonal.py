"""CENSOR: what is sent has the norm of each gradient and no part of it; of the trials the best by the loss."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.inversion.distances import right_angles
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import parse
from gradveil.defences.orthogonal import Censor


def small():
    """Return a client, a batch and its gradient."""
    torch.manual_seed(0)
    client = Client(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double())
    batch = Batch(torch.randn(4, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
    return client, batch, client.update(client.params(), batch, {}, {})[0]


def sent(client, batch, seed=0):
    params = client.params()
    noise = client.noise_spec(params, batch).sample(Key(seed))
    return client.update(params, batch, noise, client.init(params))[0]


def test_update_is_orthogonal_and_as_long_as_the_gradient():
    client, batch, gradient = small()
    update = sent(parse("censor")(client), batch)
    for name, value in gradient.items():
        assert float((update[name] * value).sum() / value.square().sum()) == pytest.approx(0, abs=1e-9)
        assert float(update[name].norm()) == pytest.approx(float(value.norm()))
    assert (
        float(right_angles({n: v[None] for n, v in gradient.items()}, {n: v[None] for n, v in update.items()})) < 1e-9
    )


def test_published_code_leaves_a_part_of_the_gradient():
    gradient, drawn = torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    exact, published = (Censor(variant=v).across(gradient, drawn) @ gradient for v in ("paper", "published_code"))
    torch.testing.assert_close(exact, torch.zeros(2), atol=1e-5, rtol=0)
    assert float(published.abs().min()) > 1
    unit = gradient / gradient.norm()
    same = [Censor(variant=v).across(unit, drawn) for v in ("paper", "published_code")]
    torch.testing.assert_close(*same)


def test_of_the_trials_that_with_the_least_loss_is_sent():
    client, batch, gradient = small()
    params, censor = client.params(), Censor(trials=5)
    noise = censor.noise(gradient).sample(Key(3))
    trials = {name: censor.across(value, noise[name]) for name, value in gradient.items()}
    wanted = 3

    def loss(at):
        first = trials["1.weight"] * 1e-4
        return (at["1.weight"] - (params["1.weight"] - first[wanted])).square().sum()

    update, _ = censor.apply(gradient, {}, noise, Context(params, batch, loss=loss))
    assert all(torch.equal(update[name], value[wanted]) for name, value in trials.items())
    with pytest.raises(GradveilError) as caught:
        censor.apply(gradient, {}, noise, Context(params, batch))
    assert [problem.where for problem in caught.value.problems] == ["censor"]


def test_single_numbers_and_zero_gradients_send_zeros():
    for gradient in (torch.tensor([2.0]), torch.zeros(3)):
        assert not Censor().across(gradient, torch.ones(2, *gradient.shape)).any()


def test_many_clients_send_what_each_does_alone():
    client, batch, _ = small()
    client = parse("censor(trials=3)")(client)
    params = client.params()
    noise = [client.noise_spec(params, batch).sample(Key(seed)) for seed in range(2)]
    both = {name: torch.stack([part[name] for part in noise]) for name in noise[0]}
    batches = Batch(*(torch.stack([value, value.flip(0)]) for value in batch))
    together, _ = client.updates(params, batches, both, {})
    for place, own in enumerate(noise):
        alone, _ = client.update(params, Batch(*(value[place] for value in batches)), own, {})
        for name, value in alone.items():
            torch.testing.assert_close(together[name][place], value)


def test_directions_of_many_rounds_give_a_small_gradient_away():
    client, batch, gradient = small()
    client = replace(parse("censor(trials=1)")(client))
    rows = torch.stack([sent(client, batch, seed)["3.bias"] for seed in range(4)])
    direction = torch.linalg.svd(rows).Vh[-1]
    cosine = torch.cosine_similarity(direction, gradient["3.bias"], dim=0)
    assert float(cosine.abs()) == pytest.approx(1, abs=1e-6)
