"""The key-lock: what it computes, that it is one client's own, how it is trained, and that it is never sent."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import kstest
from torch import nn

from gradveil.client import Client, Local, layer_statistics, load_state, save_state
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.keylock import KeyLock, Locked, with_keylock

SECRET = "model.0.lock.secret"


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
    given = torch.randn(2, 4, generator=Key(3).generator(), dtype=torch.float64)
    secret = torch.cat((given.flatten(), torch.rand(1024, dtype=torch.float64, generator=Key(4).generator())))
    found = torch.func.functional_call(KeyLock(4), {"secret": secret.expand(5, -1)}, (x,), strict=True)
    gamma, beta = given.sigmoid()
    expected = nn.functional.batch_norm(x, None, None, gamma, beta, training=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(KeyLock(4)(x), nn.functional.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("act", ["sigmoid", "tanh", "relu"])
def test_the_neutral_lock_only_normalises(act: str):
    x = torch.rand(5, 4, 6, 6, generator=Key(2).generator())
    lock = KeyLock(4, act=act)
    secret = lock.kept()["secret"].off()
    found = torch.func.functional_call(lock, {"secret": secret.expand(5, -1)}, (x,), strict=True)
    torch.testing.assert_close(found, lock(x), rtol=0, atol=0)


def test_its_law_is_that_of_linear_layers_of_one_key():
    drawn = Locked(64).sample((2000, 2 + 64), torch.float64, Key(4).generator())
    key = drawn[:, 2:]
    assert 0 <= float(key.min()) < float(key.max()) < 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        rows = [float(nn.Linear(64, 1)(torch.rand(64)).detach()) for _ in range(2000)]
    assert kstest(drawn[:, 0].numpy(), rows).pvalue > 0.01
    assert kstest(drawn[:, 1].numpy(), rows).pvalue > 0.01
    spread = (key.square().sum(1) + 1).mul(1 / (3 * 64)).sqrt()  # of what a layer gives, for this key
    assert kstest((drawn[:, 0] / spread).numpy(), "norm").pvalue > 0.01
    assert Locked(8).sample((2, 3, 12), torch.float32, Key(6).generator()).shape == (2, 3, 12)


def test_it_is_declared_once_whatever_the_batch_and_the_steps():
    for settings in ({}, {"local": Local(batch=2, lr=0.1, steps=3)}):
        defended = client(**settings)
        spec = defended.noise_spec(defended.params(), examples())
        assert spec[SECRET].shape == (8 + 1024,)
    pair = replace(client(), members=2)
    assert pair.noise_spec(pair.params(), examples())[SECRET].shape == (2, 8 + 1024)


class Locking(nn.Module):
    """The network with its lock as the paper has it: two linear layers of a key, which train with the rest."""

    def __init__(self, width: int, act: str) -> None:
        super().__init__()
        net = model()
        self.conv, self.rest, self.act = net[0], net[1:], act
        drawn = torch.rand(width, dtype=torch.float64, generator=Key(0, ("key",)).generator())
        self.register_buffer("key", drawn)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.gamma, self.beta = nn.Linear(width, 4).double(), nn.Linear(width, 4).double()

    def given(self) -> torch.Tensor:
        return torch.cat((self.gamma(self.key), self.beta(self.key))).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.batch_norm(self.conv(x), None, None, training=True)
        gamma, beta = (getattr(torch, self.act)(layer(self.key)) for layer in (self.gamma, self.beta))
        return self.rest(gamma[:, None, None] * y + beta[:, None, None])


EPSILON = 1e-12
"""Adam's steps on a layer are as long for each entry of a row up to epsilon / |gradient|, which is then about 1e-8."""
TRAININGS = {
    "sgd": ({"lr": 0.05}, torch.optim.SGD),
    "momentum": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD),
    "nesterov": ({"lr": 0.05, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "adam": ({"lr": 0.01, "eps": EPSILON}, torch.optim.Adam),
}


@pytest.mark.parametrize("act", ["sigmoid", "tanh", "relu"])
@pytest.mark.parametrize("name", TRAININGS)
def test_local_training_moves_it_as_it_moves_the_layers(name: str, act: str):
    """Over two rounds: what is sent, and what the layers give for the client's key."""
    settings, optimiser = TRAININGS[name]
    local = Local(batch=2, steps=4, optimiser="adam" if name == "adam" else "sgd", **settings)
    defended, reference, batch = client(f"keylock(width=16, act={act})", local=local), Locking(16, act), examples()
    params, state = defended.params(), None
    first = reference.given()
    for number in range(2):
        noise = defended.noise_spec(params, batch).sample(Key(7, (number,)))
        if state is None:
            state = defended.init(params)
            noise[SECRET] = torch.cat((first, reference.key))
        sent, state = defended.update(params, batch, noise, state)
        before = [p.detach().clone() for n, p in reference.named_parameters() if n.split(".")[0] in ("conv", "rest")]
        steps = optimiser(reference.parameters(), **settings)
        for own in noise["schedule"]:
            steps.zero_grad()
            nn.functional.cross_entropy(reference(batch.inputs[own]), batch.targets[own]).backward()
            steps.step()
        after = [p.detach() for n, p in reference.named_parameters() if n.split(".")[0] in ("conv", "rest")]
        moved = [old - new for old, new in zip(before, after, strict=True)]
        # A bias before a normalisation has no gradient but rounding, which Adam blows up.
        same = [i for i, parameter in enumerate(sent) if name != "adam" or parameter != "0.inner.bias"]
        exact = {"rtol": 1e-6 if name == "adam" else 1e-10, "atol": 1e-8 if name == "adam" else 1e-13}
        torch.testing.assert_close([list(sent.values())[i] for i in same], [moved[i] for i in same], **exact)
        torch.testing.assert_close(state[f"kept.{SECRET}"][:8], reference.given(), **exact)
        assert set(sent) == set(params)
        assert torch.equal(state[f"kept.{SECRET}"][8:], reference.key)
        params = {name: value - sent[name] for name, value in params.items()}
        with torch.no_grad():
            for path, layer in (("0.inner", reference.conv), ("3", reference.rest[2])):
                layer.weight.copy_(params[f"{path}.weight"])
                layer.bias.copy_(params[f"{path}.bias"])
    assert float((reference.given() - first).abs().max()) > 0.01


def test_one_gradient_leaves_it_and_it_is_kept_from_the_first_round_on():
    defended = client()
    params, batch = defended.params(), examples()
    spec = defended.noise_spec(params, batch)
    first, second = spec.sample(Key(7)), spec.sample(Key(8))
    sent, state = defended.update(params, batch, first, defended.init(params))
    assert set(sent) == set(params)
    assert torch.equal(state[f"kept.{SECRET}"], first[SECRET])
    later, after = defended.update(params, batch, second, state)
    expected, _ = defended.update(params, batch, first, defended.init(params))
    torch.testing.assert_close(later, expected, rtol=0, atol=0)
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert not defended.pipeline.trains_private_layers


def test_attacker_with_the_lock_replays_the_round():
    """The state that a client comes with stands in for what it drew in its first round, to the last bit."""
    defended = client(local=Local(batch=2, lr=0.1, steps=3, momentum=0.9))
    params, batch = defended.params(), examples()
    spec = defended.noise_spec(params, batch)
    _, state = defended.update(params, batch, spec.sample(Key(7)), defended.init(params))
    noise = spec.sample(Key(8))
    assert not torch.equal(state[f"kept.{SECRET}"], noise[SECRET])
    told = {**noise, **defended.pipeline.kept(noise, state)}
    later, after = defended.update(params, batch, noise, state)
    again, other = defended.update(params, batch, told, defended.init(params))
    torch.testing.assert_close((later, after), (again, other), rtol=0, atol=0)
    assert defended.pipeline.trains_private_layers


def test_a_trained_lock_is_on_disk_what_it_was(tmp_path: Path):
    defended = client(local=Local(batch=2, lr=0.1, steps=3))
    params, batch = defended.params(), examples()
    spec = defended.noise_spec(params, batch)
    _, state = defended.update(params, batch, spec.sample(Key(7)), defended.init(params))
    save_state(tmp_path / "state", defended, state)
    loaded = load_state(tmp_path / "state", defended)
    gone_on, resumed = (defended.update(params, batch, spec.sample(Key(8)), held) for held in (state, loaded))
    torch.testing.assert_close(gone_on, resumed, rtol=0, atol=0)


def test_examples_that_are_worked_on_alone_move_it_by_their_mean():
    """As a defence of each example, and Poisson sampling, have it: normalised alone, weighted by who is in the step."""
    batch = examples()
    ones = torch.ones(1, 4, dtype=torch.float64)
    for text, local, drawn in (
        ("clip-example(norm=1e9) + keylock(width=4)", Local(batch=4, lr=0.1, steps=1), {"schedule": None}),
        ("keylock(width=4)", Local(batch=4, lr=0.1, steps=1, sampling="poisson"), {"inclusion": ones}),
    ):
        defended = client(text, local=local)
        params = defended.params()
        noise = defended.noise_spec(params, batch).sample(Key(7))
        noise |= {name: value for name, value in drawn.items() if value is not None}
        _, state = defended.update(params, batch, noise, defended.init(params))
        moves = []
        for b in range(4):
            alone = client("keylock(width=4)", local=Local(batch=1, lr=0.1, steps=1))
            own = Batch(batch.inputs[b : b + 1], batch.targets[b : b + 1])
            single = {SECRET: noise[SECRET], "schedule": torch.zeros(1, 1, dtype=torch.long)}
            _, after = alone.update(params, own, single, alone.init(params))
            moves.append(after[f"kept.{SECRET}"] - noise[SECRET])
        torch.testing.assert_close(state[f"kept.{SECRET}"] - noise[SECRET], torch.stack(moves).mean(0))
        assert float(torch.stack(moves).abs().max()) > 1e-3


def test_an_update_is_that_of_the_model_with_the_lock_written_in():
    defended, batch = client(), examples()
    params = defended.params()
    noise = defended.noise_spec(params, batch).sample(Key(9))
    sent, _ = defended.update(params, batch, noise, defended.init(params))
    net = with_keylock(model())
    conv, lock, head = net[0].inner, net[0].lock, nn.Sequential(*list(net)[1:])
    y = lock.norm(conv(batch.inputs))
    gamma, beta = noise[SECRET][:8].sigmoid().view(2, 4, 1, 1)
    out = head(gamma * y + beta)
    loss = nn.functional.cross_entropy(out, batch.targets)
    expected = torch.autograd.grad(loss, list(net.parameters()))
    torch.testing.assert_close(list(sent.values()), list(expected))


def test_statistics_pass_through_the_lock():
    defended = client('keylock(position="0")')
    defended.model.add_module("last", nn.Identity())
    batch = examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(1))
    one = Batch(batch.inputs[None], batch.targets[None])
    found = layer_statistics(defended, defended.params(), one, stack([noise]))
    assert set(found) == {"0.lock.norm.mean", "0.lock.norm.var"}


def test_members_of_a_sum_have_locks_of_their_own():
    pair, alone = replace(client(), members=2), client()
    batch = examples()
    params = pair.params()
    noise = pair.noise_spec(params, batch).sample(Key(2))
    sent, state = pair.update(params, batch, noise, pair.init(params))
    parts = []
    for member in range(2):
        own = Batch(batch.inputs[2 * member : 2 * member + 2], batch.targets[2 * member : 2 * member + 2])
        parts.append(alone.update(params, own, {n: v[member] for n, v in noise.items()}, alone.init(params))[0])
    torch.testing.assert_close(sent, {name: (parts[0][name] + parts[1][name]) / 2 for name in sent})
    assert state[f"kept.{SECRET}"].shape == (2, 8 + 1024)


def test_wrong_places_are_refused():
    with pytest.raises(GradveilError, match="no convolution"):
        with_keylock(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(GradveilError, match=r"choose an nn\.Conv2d"):
        with_keylock(model(), position="3")
    with pytest.raises(GradveilError, match="sigmoid, tanh, relu"):
        KeyLock(3, act="sine")
