"""The key-lock: what it computes, that it is one client's own, and that it is never sent."""

import pytest
import torch
from scipy.stats import kstest
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.keylock import KeyLock, Locked, with_keylock

NAMES = ["model.0.lock.gamma", "model.0.lock.beta"]


def model() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            drawn = torch.randn(parameter.shape, generator=Key(0, (number,)).generator(), dtype=torch.float64)
            parameter.copy_(0.3 * drawn)
    return net


def examples(count: int = 4) -> Batch:
    inputs = torch.rand(count, 1, 8, 8, generator=Key(1).generator(), dtype=torch.float64)
    return Batch(inputs, torch.arange(count) % 3)


def client(text: str = "keylock", **settings) -> Client:
    return parse(text)(Client(model(), **settings))


def test_it_normalises_scales_and_shifts():
    x = torch.rand(5, 4, 6, 6, generator=Key(2).generator(), dtype=torch.float64)
    gamma, beta = torch.rand(2, 4, generator=Key(3).generator(), dtype=torch.float64)
    found = torch.func.functional_call(
        KeyLock(4), {"gamma": gamma.expand(5, 4), "beta": beta.expand(5, 4)}, (x,), strict=True
    )
    expected = nn.functional.batch_norm(x, None, None, gamma, beta, training=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(KeyLock(4)(x), nn.functional.batch_norm(x, None, None, training=True))


def test_its_law_is_that_of_linear_layers_of_keys():
    drawn = Locked(64, "tanh").sample((2000, 2), torch.float64, Key(4).generator())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        rows = [float(nn.Linear(64, 1)(torch.rand(64)).tanh().detach()) for _ in range(2000)]
    assert kstest(drawn[:, 0].numpy(), rows).pvalue > 0.01
    sigmoid = Locked(64, "sigmoid").sample((400,), torch.float64, Key(4).generator())
    assert float(sigmoid.min()) > 0
    assert Locked(8, "relu").sample((2, 3, 4), torch.float32, Key(6).generator()).shape == (2, 3, 4)


def test_it_is_declared_once_whatever_the_batch_and_the_steps():
    for settings in ({}, {"local": Local(batch=2, lr=0.1, steps=3)}):
        defended = client(**settings)
        spec = defended.noise_spec(defended.params(), examples())
        assert [spec[name].shape for name in NAMES] == [(4,), (4,)]
    summed = client(members=2)
    assert summed.noise_spec(summed.params(), examples())[NAMES[0]].shape == (2, 4)


def test_nothing_of_it_is_sent_and_it_is_kept_from_the_first_round_on():
    defended = client("keylock", local=Local(batch=2, lr=0.1, steps=3))
    params, batch = defended.params(), examples()
    spec = defended.noise_spec(params, batch)
    first, second = spec.sample(Key(7)), spec.sample(Key(8))
    sent, state = defended.update(params, batch, first, defended.init(params))
    assert set(sent) == set(params)
    assert not any("lock" in name for name in sent)
    assert all(torch.equal(state[f"kept.{name}"], first[name]) for name in NAMES)
    mixed = {**second, **{name: first[name] for name in NAMES}}
    later, after = defended.update(params, batch, second, state)
    expected, _ = defended.update(params, batch, mixed, defended.init(params))
    torch.testing.assert_close(later, expected, rtol=0, atol=0)
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_an_update_is_that_of_the_model_with_the_lock_written_in():
    defended, batch = client(), examples()
    params = defended.params()
    noise = defended.noise_spec(params, batch).sample(Key(9))
    sent, _ = defended.update(params, batch, noise, defended.init(params))
    net = with_keylock(model())
    conv, lock, head = net[0].inner, net[0].lock, nn.Sequential(*list(net)[1:])
    y = lock.norm(conv(batch.inputs))
    out = head(noise[NAMES[0]][:, None, None] * y + noise[NAMES[1]][:, None, None])
    loss = nn.functional.cross_entropy(out, batch.targets)
    expected = torch.autograd.grad(loss, list(net.parameters()))
    torch.testing.assert_close(list(sent.values()), list(expected))


def test_statistics_pass_through_the_lock():
    defended = client('keylock(position="0")')
    defended.model.add_module("last", nn.Identity())
    batch = examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(1))
    one = Batch(batch.inputs[None], batch.targets[None])
    found = defended.statistics(defended.params(), one, stack([noise]))
    assert set(found) == {"0.lock.norm.mean", "0.lock.norm.var"}


def test_members_of_a_sum_have_locks_of_their_own():
    summed, alone = client(members=2), client()
    batch = examples()
    params = summed.params()
    noise = summed.noise_spec(params, batch).sample(Key(2))
    sent, state = summed.update(params, batch, noise, summed.init(params))
    parts = []
    for member in range(2):
        own = Batch(batch.inputs[2 * member : 2 * member + 2], batch.targets[2 * member : 2 * member + 2])
        parts.append(alone.update(params, own, {n: v[member] for n, v in noise.items()}, alone.init(params))[0])
    torch.testing.assert_close(sent, {name: (parts[0][name] + parts[1][name]) / 2 for name in sent})
    assert state[f"kept.{NAMES[0]}"].shape == (2, 4)


def test_wrong_places_are_refused():
    with pytest.raises(GradveilError, match="no convolution"):
        with_keylock(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(GradveilError, match=r"choose an nn\.Conv2d"):
        with_keylock(model(), position="3")
    with pytest.raises(GradveilError, match="sigmoid, tanh, relu"):
        KeyLock(3, act="sine")
