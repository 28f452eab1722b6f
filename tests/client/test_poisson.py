"""Poisson sampling within local training: a loop's numbers, the mean, and what accounting takes for granted."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Known
from gradveil.client import Client, Local
from gradveil.client.defended_gradient import At
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import norm, squared_norm, stack, tmap
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.fisher_information import obstacle
from gradveil.defences.guarantees import examine
from gradveil.defences.privacy_warnings import suspicions
from gradveil.theory.accounting import Participation
from tests.laws.cases import DOMAIN, B, T, Tiny, V, draw, draw_batch

reference = At.each
POISSON = Client(Tiny(), local=Local(batch=2, lr=0.3, steps=T, momentum=0.9, sampling="poisson"), domain=DOMAIN)
TEXTS = [
    "none",
    "dp(clip=0.3, sigma=0.5)",
    "dp(clip=0.3) + precode(k=5)",
    "dropout(0.4) + prune(0.5)",
    "optimal-noise(0.1)",
]


def one_step(text: str) -> Client:
    return parse(text)(replace(POISSON, local=Local(batch=2, lr=1.0, steps=1, sampling="poisson")))


def test_poisson_step_equals_a_naive_loop():
    """The sum over who is in the step, of clipped gradients, and the noise, are divided by the expected number."""
    client = one_step("dp(clip=0.3, sigma=0.5)")
    params, batch, noise, state = draw(client)
    noise["inclusion"] = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    sent, _ = client.update(params, batch, noise, state)
    plain, total = Client(Tiny()), tmap(torch.zeros_like, params)
    for i in (0, 2, 3):
        update, _ = plain.update(params, Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]), {}, {})
        factor = min(1.0, 0.3 / float(norm(update)))
        total = {name: value + factor * update[name] for name, value in total.items()}
    expected = {name: (value + 0.5 * 0.3 * noise[f"step.noise.{name}"][0]) / 2 for name, value in total.items()}
    torch.testing.assert_close(sent, expected)


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize(
    "text", ["none", "prune(0.5, feedback=true)", "dp(clip=0.3, sigma=0.5)", "soteria", "outpost", "keylock(width=4)"]
)
def test_poisson_step_ignores_examples_not_drawn(text: str, absurd: float):
    client = parse(text)(replace(POISSON, local=Local(batch=2, lr=0.1, steps=2, sampling="poisson")))
    params, batch, noise, state = draw(client)
    noise["inclusion"] = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    wanted, _ = client.update(params, batch, noise, state)
    batch.inputs[1] = absurd
    sent, _ = client.update(params, batch, noise, state)
    torch.testing.assert_close(sent, wanted)
    several = Batch(batch.inputs[None], batch.targets[None])
    both, _ = client.updates(params, several, stack([noise]), stack([state]))
    torch.testing.assert_close(both, stack([wanted]))


@pytest.mark.parametrize("text", ["none", "dp(clip=0.3, sigma=0.5)", "soteria"])
def test_poisson_step_computes_gradients_of_drawn_examples_only(text: str, monkeypatch: pytest.MonkeyPatch):
    client, sizes = one_step(text), []
    monkeypatch.setattr(At, "each", lambda at: sizes.append(len(at.batch.inputs)) or reference(at))
    monkeypatch.setattr(At, "weighed", lambda *_: None)
    params, batch, noise, state = draw(client)
    noise["inclusion"] = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    client.update(params, batch, noise, state)
    assert sizes == [2]


def test_poisson_step_may_be_empty():
    client = one_step("dp(clip=0.3, sigma=0.5)")
    params, batch, noise, state = draw(client)
    noise["inclusion"] = torch.zeros_like(noise["inclusion"])
    sent, _ = client.update(params, batch, noise, state)
    torch.testing.assert_close(sent, {name: 0.15 * noise[f"step.noise.{name}"][0] / 2 for name in sent})


def test_poisson_mean_over_draws_is_the_neutral_gradient():
    client, plain = one_step("none"), Client(Tiny())
    params, batch, _, _ = draw(client)
    spec = client.noise_spec(params, batch)
    assert set(spec) == {"inclusion"}
    whole, _ = plain.update(params, batch, {}, {})
    torch.testing.assert_close(client.update(params, batch, spec.neutral(), {})[0], whole)
    sets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * B).double()
    sent = [client.update(params, batch, {"inclusion": row[None]}, {})[0] for row in sets]
    torch.testing.assert_close({n: v.mean(0) for n, v in stack(sent).items()}, whole)  # the rate is one half
    drawn = spec["inclusion"].law.sample((4000, B), torch.float64, Key(0).generator())
    assert abs(float(drawn.mean()) - 0.5) < 3.3 * 0.5 / (4000 * B) ** 0.5


@pytest.mark.parametrize("text", TEXTS)
def test_poisson_client_obeys_the_laws(text: str):
    """The same noise gives the same bits, batched equals looped, and full knowledge replays what was sent."""
    client, believed = parse(text)(POISSON), parse(text)(POISSON)
    rows = [draw(client, number) for number in range(V)]
    looped = stack([client.update(*row)[0] for row in rows])
    torch.testing.assert_close(stack([believed.update(*row)[0] for row in rows]), looped, rtol=0, atol=0)
    batch = Batch(torch.stack([row[1].inputs for row in rows]), torch.stack([row[1].targets for row in rows]))
    both = client.updates(rows[0][0], batch, stack([row[2] for row in rows]), stack([row[3] for row in rows]))[0]
    torch.testing.assert_close(both, looped, rtol=1e-12, atol=1e-12)
    params, update, noise, state = rows[0]
    other = {**noise, "inclusion": 1 - noise["inclusion"]}
    assert (
        squared_norm(
            tmap(torch.sub, client.update(params, update, other, state)[0], {n: v[0] for n, v in looped.items()})
        )
        > 0
    )


def test_poisson_attack_knows_the_draws_or_uses_the_mean():
    assert make_attack("ig(order=told)").knowledge["inclusion"] == Known()
    assert "inclusion" not in make_attack("ig").knowledge


def test_poisson_clip_and_noise_match_the_accounting():
    client = parse("dp(clip=2, sigma=0.7)")(POISSON)
    (mechanism,) = examine(client, draw_batch(Key(0))).mechanisms
    assert (mechanism.multiplier, mechanism.sums, mechanism.bound) == pytest.approx((0.7, T, 1.0))
    assert "drawn at random" in str(obstacle(client, draw_batch(Key(0))))


@pytest.mark.parametrize(
    ("sampling", "training", "position"),
    [
        ("poisson", Participation(T, rate=0.5, sampling="poisson"), None),
        ("poisson", Participation(T, rate=0.25, sampling="poisson"), "privacy.rate"),
        ("batches", Participation(T, rate=0.5, sampling="poisson"), "privacy.sampling"),
        ("batches", Participation(T, rate=0.5, sampling="shuffled"), None),
        ("batches", Participation(T, rate=0.25, sampling="shuffled"), "privacy.rate"),
        ("poisson", Participation(T, rate=0.5, sampling="shuffled"), "privacy.sampling"),
        ("poisson", Participation(T, rate=1.0, sampling="shuffled"), None),
    ],
)
def test_suspicions_warn_of_a_different_sampling(sampling, training, position):
    client = parse("dp(clip=2, sigma=9)")(replace(POISSON, local=replace(POISSON.local, sampling=sampling)))
    result = [problem.where for problem in suspicions(client, draw_batch(Key(0)), training)]
    assert result == ([position] if position else [])


def test_local_with_unknown_sampling_raises():
    with pytest.raises(GradveilError, match=r"local\.sampling"):
        Local(batch=2, lr=0.1, steps=1, sampling="fixed")
    with pytest.raises(GradveilError, match=r"local\.batch"):
        Local(batch=8, lr=0.1, steps=1, sampling="poisson").drawn(4)
