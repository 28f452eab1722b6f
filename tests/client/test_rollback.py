"""An update that contains NaN or Inf leaves the client's state unchanged."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from gradveil.client import Client, Local, drawn_update, looped_updates, save_state
from gradveil.core.noise import Key
from gradveil.core.tree import stack, tmap
from gradveil.core.types import Batch
from gradveil.defences import Defence, chain, parse
from gradveil.defences.standin import StandIn
from tests.client.test_state import KEEPING
from tests.laws.cases import CLIENTS, Tiny, draw, draw_batch

KINDS = ("gradient", "sgd")


def spoilt(batch: Batch, value: float = math.nan) -> Batch:
    inputs = batch.inputs.clone()
    inputs[:, 0, 0, 0] = value
    return Batch(inputs, batch.targets)


def finite(update) -> bool:
    return all(bool(value.isfinite().all()) for value in update.values())


def same(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", KEEPING)
def test_the_round_after_a_bad_one_is_as_if_that_had_not_been(text: str, kind: str, tmp_path):
    client = parse(text)(CLIENTS[kind])
    params, batch, noise, state = draw(client)
    with torch.no_grad():
        bad, after = client.update(params, spoilt(batch), noise, state)
        assert not finite(bad) or "clip" in text or "dp(" in text, "it is sent as it is, for everybody to see"
        assert finite(after)
        if not finite(bad):
            same(after, state)
            assert list(after) == list(state)
            for part, expected in zip(
                client.update(params, batch, noise, after), client.update(params, batch, noise, state), strict=True
            ):
                same(part, expected)
    save_state(tmp_path / "state", client, after)


@pytest.mark.parametrize("text", ["standin", "dgp(feedback=true)", "dgc(keep=0.1, warmup=3)", "keylock + standin"])
def test_each_client_of_a_batch_by_itself(text: str):
    for client in (parse(text)(CLIENTS["gradient"]), replace(parse(text)(CLIENTS["sgd"]), members=2)):
        params, batch, noise, state = draw(client)
        rows = [Batch(batch.inputs, batch.targets), spoilt(batch)]
        own, drawn, states = (
            Batch(*(torch.stack(v) for v in zip(*rows, strict=True))),
            stack([noise] * 2),
            stack([state] * 2),
        )
        for way in (client.updates, partial(looped_updates, client)):
            with torch.no_grad():
                _, after = way(params, own, drawn, states)
            same(tmap(lambda value: value[1], after), state)
            torch.testing.assert_close(
                tmap(lambda value: value[0], after), client.update(params, batch, noise, state)[1]
            )
            assert any(not torch.equal(after[name][0], value) for name, value in state.items())


def test_an_attackers_derivative_of_a_sound_round_is_untouched():
    client = parse("standin(optimiser=adagrad)")(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    inputs = batch.inputs.clone().requires_grad_()
    sent, after = client.update(params, Batch(inputs, batch.targets), noise, state)
    moved = tmap(torch.sub, after, state)
    (slope,) = torch.autograd.grad(sum(value.sum() for value in (*sent.values(), *moved.values())), inputs)
    assert bool(slope.isfinite().all())
    assert bool(slope.any())


def test_a_state_that_overflows_behind_a_finite_update_stays_too():
    """The quotient g / sqrt(g^2) is zero where g^2 overflows; v would be infinite, all that is sent later zero."""
    client = Client(Tiny().float(), send=Defence("own", send=chain(standin=StandIn("adagrad"))).send)
    batch = Batch(draw_batch(Key(1)).inputs.float(), draw_batch(Key(1)).targets)
    params = client.params()
    huge = replace(client, loss=lambda outputs, targets: 1e25 * outputs.sum(-1))
    with torch.no_grad():
        sent, after = huge.update(params, batch, {}, client.init(params))
    assert finite(sent)
    same(after, client.init(params))


@pytest.mark.parametrize("text", ["standin", "keylock + dgp(feedback=true)"])
def test_where_noise_is_drawn_as_it_comes(text: str):
    client = parse(text)(replace(CLIENTS["sgd"], local=Local(batch=2, lr=0.3, epochs=1)))
    params, batch, _, state = draw(client)
    with torch.no_grad():
        _, after = drawn_update(client, params, spoilt(batch, math.inf), Key(1), state)
        same(after, state)
        _, after = drawn_update(client, params, batch, Key(1), state)
    assert finite(after)
    assert any(not torch.equal(after[name], value) for name, value in state.items())
