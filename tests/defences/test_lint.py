"""What is warned of in a private client: lint of clips, noise, epsilons and sampling."""

from dataclasses import replace

import pytest

from gradveil.client import Local
from gradveil.core.types import Batch
from gradveil.defences import Clip, Defence, chain, parse
from gradveil.defences.privacy_warnings import MEANINGLESS, suspicions
from gradveil.theory.accounting import Participation, epsilon
from tests.defences.custom_stages import (
    BATCH,
    PLAIN,
    TRAINED,
    Mixing,
    Peeking,
    Repeating,
    Seeded,
    after_dp,
    found,
    warned,
)


def test_heuristics_are_not_warned_of():
    for text in ("none", "gaussian(0.1)", "prune(0.5)", "optimal-noise(0.1)", "clip(1)", "dropout + cvb"):
        assert warned(text) == []


class TestWithAnAccountant:
    @pytest.fixture(autouse=True)
    def _accountant(self):
        pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

    def test_sound_mechanisms_are_not_warned_of(self):
        for text in (
            "dp(clip=1, sigma=2)",
            "user-dp(clip=1, sigma=2)",
            "dp(clip=1, sigma=2) + prune(0.5, feedback=true)",
        ):
            assert warned(text) == []
        assert warned("dp(clip=1, sigma=1)", Participation(1000, 0.01)) == []

    def test_sensitivity_and_clip_that_disagree(self):
        (told,) = warned("fed-cdp(clip=4, sigma=6)")
        assert told.startswith(
            "noise: the noise is scaled to a sensitivity of 1, but one example can change the mean by 2.4"
        )
        assert "noise multiplier is 2.449, 0.4082 times sigma" in told
        (told,) = warned("dp(clip=5, sigma=2) + clip-example(1)")
        assert "5 times sigma" in told
        (told,) = warned("dp(clip=5, sigma=2, on=mean)")
        assert "noise multiplier is 8" in told

    def test_an_epsilon_that_means_nothing(self):
        (told,) = warned("dp(clip=20, sigma=1e-3)")
        assert "epsilon of one update alone is " in told
        assert "not a useful guarantee" in told
        (told,) = warned("dp(clip=1, sigma=1)", Participation(1000))
        assert "epsilon of a training of 1,000 sums" in told
        (told,) = warned("dp(clip=1, sigma=1)", client=replace(TRAINED, local=Local(2, 0.3, steps=30)))
        assert "of one update alone" in told

    @pytest.mark.parametrize(("sampling", "sigma"), [("poisson", 1.0), ("batches", 3.0)])
    def test_an_update_is_accounted_as_its_examples_are_drawn(self, sampling, sigma):
        """Of 100 steps each example is in one, by chance or in turn: not in all of them."""
        many = Batch(BATCH.inputs.repeat(25, 1, 1, 1), BATCH.targets.repeat(25))
        drawn = Participation(100, 0.01) if sampling == "poisson" else Participation(100, 0.01, sampling="shuffled")
        assert epsilon(sigma, drawn) < 3 < MEANINGLESS < epsilon(sigma, Participation(100))
        for strength in (sigma, 0.01):
            trained = replace(PLAIN, local=Local(1, 0.3, steps=100, sampling=sampling))
            said = [*suspicions(parse(f"dp(clip=1, sigma={strength})")(trained), many)]
            assert bool(said) == (strength < sigma)

    def test_a_training_that_is_shorter_than_one_update(self):
        trained = replace(TRAINED, local=Local(2, 0.3, steps=30))
        texts = warned("dp(clip=1, sigma=90)", Participation(10, sampling="shuffled"), trained)
        assert texts == ["privacy.steps: are 10, but one update alone has 30 noisy sums"]
        for text, training in (
            ("dp(clip=1, sigma=90)", Participation(30)),
            ("user-dp(clip=1, sigma=90)", Participation(10)),
        ):
            assert not any("privacy.steps" in line for line in warned(text, training, trained))

    def test_noise_from_a_shared_seed(self):
        told = warned(Defence("seeded", send=chain(clip=Clip(1.0), noise=Seeded())))
        assert len(told) == 1
        assert told[0].startswith("send.noise: adds the same noise to every client")
        assert any(
            "same noise" in line for line in warned(Defence("rep", send=chain(clip=Clip(1.0), noise=Repeating(2.0))))
        )

    def test_a_step_that_looks_at_the_data(self):
        (told,) = warned("dp(clip=1, sigma=2) + optimal-prune(0.5)")
        assert told.startswith("send.prune: uses the data again")
        (told,) = warned(after_dp(Peeking()))
        assert told.startswith("send.mine: uses the data again")
        (told,) = warned(parse("dp(clip=1, sigma=2)") + Defence("mix", batch=(Mixing(),)))
        assert told.startswith("batch: mixes examples before the clip")

    def test_promises_with_a_training_name_their_epsilon_and_what_they_assume(self):
        training = Participation(1000, 0.01)
        said = found("dp(clip=1, sigma=1)").promise(training)
        assert said.startswith(f"epsilon {epsilon(1.0, training):.4g} at delta 1e-05 of each example")
        assert "(Poisson)" in said
        both = found("dp(clip=1, sigma=1) + user-dp(clip=1, sigma=2)").promise(training)
        assert "of each example" in both
        assert "neighbours differ by one client" in both


@pytest.mark.parametrize(
    ("text", "members", "rate", "warned"),
    [
        ("user-dp(clip=1, sigma=5)", 1, 0.1, True),
        ("user-dp(clip=1, sigma=5)", 1, 1.0, False),
        ("user-dp(clip=1, sigma=5)", 2, 0.1, False),
        ("dp(clip=1, sigma=5)", 1, 0.1, False),
    ],
)
def test_drawing_clients_amplifies_nothing_for_who_sees_each_update(text, members, rate, warned):
    client = replace(parse(text)(PLAIN), members=members)
    said = [str(problem) for problem in suspicions(client, BATCH, Participation(10, rate=rate))]
    assert len(said) == int(warned)
    assert all(each.startswith("privacy.rate: ") for each in said)
