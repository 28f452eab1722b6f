"""Fed-CDP with a decaying clip and noise: the update, its guarantee, and the schedule an attacker knows."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from gradveil.audit.error_bound import leaked
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe
from gradveil.client import Client, Local, scheduled
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.defences import Clip, Feedback, Gaussian, Magnitude, chain, parse
from gradveil.defences.dp import BASELINE, FadingClip, FadingNoise
from gradveil.defences.guarantees import NOTHING, examine
from gradveil.federated.privacy_ledger import guarantee
from tests.audit.test_rounds import opened
from tests.federated.small_federations import federation
from tests.laws.cases import Tiny, draw, draw_batch

FADING, BATCH = "fed-cdp(clip=0.8, sigma=0.5, decay=0.9)", draw_batch(Key(0))


@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("local", [None, Local(2, 0.3, steps=3)])
def test_a_round_is_that_of_a_fixed_clip_that_is_shorter(number: int, local: Local | None):
    plain = Client(Tiny(), local=local)
    fading, fixed = parse(FADING)(plain), parse(f"fed-cdp(clip={0.8 * 0.9**number!r}, sigma=0.5)")(plain)
    params, batch, noise, _ = draw(fading)
    found, wanted = (client.update(params, batch, noise, {})[0] for client in (scheduled(fading, number), fixed))
    torch.testing.assert_close(found, wanted)
    same = fading.update(params, batch, noise, {})[0]
    assert all(torch.equal(same[name], found[name]) for name in found) == (number == 0)


@dataclass(frozen=True)
class Thinning(Magnitude):
    """Sends less in every round."""

    def in_round(self, number: int) -> Magnitude:
        return Magnitude(1 - (1 - self.ratio) / (number + 1))


def test_a_schedule_is_kept_within_error_feedback():
    client = Client(Tiny(), send=chain(prune=Feedback(Thinning(0.5))))
    params, batch, noise, state = draw(client)
    later, _ = scheduled(client, 4).update(params, batch, noise, state)
    wanted, _ = replace(client, send=chain(prune=Feedback(Magnitude(0.9)))).update(params, batch, noise, state)
    torch.testing.assert_close(later, wanted, rtol=0, atol=0)


def test_every_round_promises_what_the_first_does():
    fixed, fading = (parse(text)(Client(Tiny())) for text in ("fed-cdp(clip=0.8, sigma=0.5)", FADING))
    (wanted,) = examine(fixed, BATCH).mechanisms
    assert examine(fading, BATCH).mechanisms == (wanted,)
    for number in (0, 1, 30, 10**6):
        (mechanism,) = examine(scheduled(fading, number), BATCH).mechanisms
        assert mechanism.multiplier == pytest.approx(wanted.multiplier, rel=1e-12)
        assert mechanism.bound == pytest.approx(wanted.bound * max(0.9**number, BASELINE))
    assert examine(fading, BATCH).promise() == examine(fixed, BATCH).promise()


def least(client: Client) -> float:
    """The least noise multiplier of any round, from each round's own clip and noise; infinite without a mechanism."""
    rounds = (examine(scheduled(client, number), BATCH).mechanisms for number in range(150))
    return min((found.multiplier for of_round in rounds for found in of_round), default=math.inf)


def built(noise: Gaussian, *clips: Clip) -> Client:
    return Client(Tiny(), step=chain(**{f"clip{i}": clip for i, clip in enumerate(clips)}, noise=noise))


def clip(norm: float, decay: float = 1.0) -> Clip:
    return FadingClip(norm, per_example=True, decay=decay) if decay < 1 else Clip(norm, per_example=True)


@pytest.mark.parametrize(
    ("client", "exact"),
    [
        (built(FadingNoise(2.0, "sum", decay=0.9), clip(1.0, 0.9)), True),
        (built(FadingNoise(2.0, "sum", decay=0.9), clip(1.0, 0.9), clip(0.5)), True),
        (built(Gaussian(2.0, "sum"), clip(1.0, 0.9)), True),
        (built(Gaussian(2.0, "sum"), clip(1.0, 0.9), clip(0.5)), True),
        (built(FadingNoise(2.0, "sum", decay=0.99), clip(1.0, 0.9)), False),
    ],
)
def test_no_round_is_promised_more_than_it_has(client: Client, exact: bool):
    found = examine(client, BATCH).mechanisms
    if exact:
        (mechanism,) = found
        assert mechanism.multiplier == pytest.approx(least(client), rel=1e-9)
    else:  # a schedule of its own: nothing is said, which is not too much
        assert found == ()


def test_noise_that_shrinks_alone_promises_nothing():
    client = built(FadingNoise(2.0, "sum", decay=0.9), clip(1.0))
    assert least(client) < 1e-5
    assert examine(client, BATCH).promise() == NOTHING


def test_a_training_follows_it_and_proves_as_much():
    fading, fixed = (federation(f"fed-cdp(clip=1, sigma=0.5{more})") for more in (", decay=0.5", ""))
    standing = fading.start()
    third = fading.local_update(standing, 0, 3)[0]
    heard, _ = fading.heard(standing, (0,), 3)
    clipped = dict(heard.step)["clip"]  # pyright: ignore
    assert (clipped.norm, type(clipped)) == (0.25, Clip)
    again = fading.local_update(standing, 0, 3, heard)[0]
    at_a_quarter = federation("fed-cdp(clip=0.25, sigma=0.5)").local_update(standing, 0, 3)[0]
    for name, value in third.items():
        assert torch.equal(value, again[name])
        torch.testing.assert_close(value, at_a_quarter[name])
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    assert guarantee(fading, 3, 1e-5) == guarantee(fixed, 3, 1e-5)


def test_attackers_know_the_round_that_they_see():
    experiment, trial, client = opened(
        "fed-cdp(clip=0.01, sigma=0.1, decay=0.5)", "wiig(rounds=all, tv=0, objective=l2)", rounds=3
    )
    seen, truth = observe(experiment, trial, client, range(2))
    attack = experiment.attacks[trial.attack]
    knowledge, _, _ = grant(experiment, attack, client, client.params(), truth)

    def value(since: int) -> torch.Tensor:
        watched = [replace(one, since=since) for one in seen]
        return attack.evaluate(watched, client, knowledge, Key(0), truth.raw.inputs, truth.noise)  # pyright: ignore

    assert bool((value(0) < 1e-12).all())
    assert bool((value(1) > 1e-6).all())


def test_the_bound_takes_each_round_as_it_is():
    """Clip and noise shrink together, so that a long gradient tells as much as it did in the first round."""
    told = {}
    for text in ("fed-cdp(clip=1e-4, sigma=1, decay=0.5)", "fed-cdp(clip=1e-4, sigma=1)", "gaussian(1e-4)"):
        experiment, trial, client = opened(text, rounds=3, server_lr=0.0, model={"name": "lenet-zhu"})
        seen, truth = observe(experiment, trial, client, range(2))
        told[text] = leaked(experiment, 0, client, seen, truth)[0]["nats"]
    fading, fixed, _ = told.values()
    torch.testing.assert_close(fading, fixed, rtol=1e-4, atol=0)


def test_a_growing_schedule_is_refused():
    for text in ("fed-cdp(decay=1.5)", "fed-cdp(decay=0)"):
        with pytest.raises(GradveilError, match="decay"):
            parse(text)
