"""The replay audit finds clients that promise more than their code keeps, and leaves honest ones alone."""

from dataclasses import dataclass
from random import random
from typing import ClassVar

import pytest
import torch

from gradveil.assurance.replay_audit import EpsilonAudit, audit_epsilon
from gradveil.cli.app import run
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import tmap
from gradveil.core.types import Batch, Multiplier, Stage, Transform
from gradveil.defences import Clip, Gaussian, chain, parse
from gradveil.defences.additive_noise import Laplacian
from gradveil.nn.models.token_transformers import small_encoder
from gradveil.theory.accounting import Participation, epsilon
from tests.laws.cases import Tiny, draw_batch

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

BATCH = draw_batch(Key(0))
PLAIN = Client(Tiny())
NOISY = Client(Tiny(), local=Local(2, 0.3, steps=2, sampling="poisson"))
CLAIM = 4.38


def audited(client: Client, **settings: object) -> EpsilonAudit:
    return audit_epsilon(client, BATCH, replays=150, **settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("defence", "client"),
    [
        ("dp(clip=1, sigma=1)", PLAIN),
        ("dp(clip=1, sigma=0.5)", PLAIN),
        ("dp(clip=1, sigma=2, on=mean)", PLAIN),
        ("fed-cdp(clip=1, sigma=2)", PLAIN),
        ("user-dp(clip=1, sigma=1)", PLAIN),
        ("dp(clip=1, sigma=1)", NOISY),
    ],
)
def test_honest_client_is_consistent(defence: str, client: Client) -> None:
    found = audited(parse(defence)(client))
    assert not found.violated
    assert str(found).endswith("consistent")


def test_noise_on_the_mean_is_audited_with_batches_of_one_size() -> None:
    alone = Batch(BATCH.inputs[:1], BATCH.targets[:1])
    found = audit_epsilon(parse("dp(clip=1, sigma=8, on=mean)")(PLAIN), alone, replays=1000)
    assert found.neighbours == "replaced"
    assert not found.violated


def test_releases_of_few_values_may_repeat() -> None:
    signs = Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=Gaussian(1e-6, "sum"), signs=Signs()))
    assert audited(signs, claimed=1e9, unit="example").repeated == 0


def test_lower_bound_is_near_the_claim_of_an_honest_client() -> None:
    found = audit_epsilon(parse("dp(clip=1, sigma=1)")(PLAIN), BATCH, replays=3000)
    assert found.claimed == pytest.approx(CLAIM, abs=0.01)
    assert 3.6 < found.found <= found.claimed


@dataclass(frozen=True)
class HalfNoise(Gaussian):
    """Adds half of the noise that it declares."""

    def apply(self, update, state, noise, context):
        return super().apply(update, state, {name: value / 2 for name, value in noise.items()}, context)


@dataclass(frozen=True)
class Unclipped(Clip):
    """Forgets to clip."""

    def multiplier(self, params, noise, off):
        return Multiplier()

    def apply(self, update, state, noise, context):
        return update, state


@dataclass(frozen=True)
class SameSeed(Transform):
    """Draws the same noise for every release."""

    std: float = 1.0
    stage: ClassVar[Stage] = Stage.NOISE

    def apply(self, update, state, noise, context):
        drawn, std = Key(3).generator(), self.std / context.divisor

        def noisy(value: torch.Tensor) -> torch.Tensor:
            return value + std * torch.randn(value.shape, generator=drawn, dtype=value.dtype)

        return tmap(noisy, update), state


@dataclass(frozen=True)
class QuietBias(Gaussian):
    """Adds no noise to biases."""

    def apply(self, update, state, noise, context):
        drawn = {name: value * (not name.endswith("bias")) for name, value in noise.items()}
        return super().apply(update, state, drawn, context)


@dataclass(frozen=True)
class NoiseTwice(Transform):
    """Uses each noise for two releases, at the right scale."""

    calls: list[int]
    stage: ClassVar[Stage] = Stage.NOISE

    def apply(self, update, state, noise, context):
        self.calls.append(len(self.calls))
        drawn = Key(self.calls[-1] // 2).generator()
        return tmap(lambda value: value + torch.randn(value.shape, generator=drawn) / context.divisor, update), state


@dataclass(frozen=True)
class Signs(Transform):
    """Sends signs only."""

    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(self, update, state, noise, context):
        return tmap(torch.sign, update), state


@dataclass(frozen=True)
class ClipsSum(Clip):
    """Clips after the noise."""

    stage: ClassVar[Stage] = Stage.QUANTISE


@dataclass(frozen=True)
class HiddenNoise(Transform):
    """Draws noise that it does not declare; now and then it sends nothing instead."""

    std: float
    silent: float = 0.0
    stage: ClassVar[Stage] = Stage.NOISE

    def apply(self, update, state, noise, context):
        sends, std = float(torch.rand(())) >= self.silent, self.std / context.divisor
        return tmap(lambda value: sends * (value + std * torch.randn(value.shape)), update), state


class ClientWithOwnUpdate(Client):
    """Clips the gradients and adds noise to their sum in its own `update`."""

    def update(self, params, batch, noise, state):
        clipped, state = Client(self.model, step=chain(clip=HONEST_CLIP)).update(params, batch, {}, state)
        return tmap(lambda value: value + torch.randn(value.shape) / len(batch.targets), clipped), state


HONEST_CLIP, HONEST_NOISE = Clip(1.0, per_example=True), Gaussian(1.0, "sum")
WRONG = {
    "half the noise": Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=HalfNoise(1.0, "sum"))),
    "no clip": Client(Tiny(), step=chain(clip=Unclipped(0.1, per_example=True), noise=Gaussian(0.1, "sum"))),
    "noise before the clip": Client(Tiny(), step=chain(noise=HONEST_NOISE, clip=ClipsSum(1.0))),
    "the same seed": Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=SameSeed())),
    "no noise in biases": Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=QuietBias(1.0, "sum"))),
    "hidden noise, too little": Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=HiddenNoise(0.4))),
    "noise used twice": Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=NoiseTwice([]))),
}


@pytest.mark.parametrize("fault", WRONG)
def test_faulty_client_violates_its_claim(fault: str) -> None:
    found = audited(WRONG[fault], claimed=CLAIM, unit="example", normal=True)
    assert found.violated, str(found)
    assert found.plain()["violated"]


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize(
    "client",
    [
        ClientWithOwnUpdate(Tiny()),
        Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=HiddenNoise(1.0))),
        Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=HiddenNoise(1.0, silent=0.3))),
    ],
)
def test_right_client_that_draws_its_own_noise_is_consistent(client: Client, normal: bool) -> None:
    torch.manual_seed(0)
    found = audited(client, claimed=CLAIM, unit="example", normal=normal)
    assert not found.violated, str(found)


def test_client_that_differs_without_its_own_stages_is_refused() -> None:
    class Random(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + random())

    with pytest.raises(GradveilError, match="noise_spec"):
        audited(Client(Random(), step=chain(clip=HONEST_CLIP, noise=HiddenNoise(1.0))), claimed=1.0, unit="example")


def test_only_noise_that_is_normal_by_its_accountant_or_its_author_gets_the_bound_of_normal_noise() -> None:
    own = Client(Tiny(), step=chain(clip=HONEST_CLIP, noise=Laplacian(0.2)))
    assert audited(own, claimed=9.0, unit="example").bound.gaussian is None
    assert audited(own, claimed=9.0, unit="example", normal=True).bound.gaussian is not None
    assert audited(parse("dp(clip=1, sigma=1)")(PLAIN), claimed=9.0).bound.gaussian is not None


@pytest.mark.parametrize("defence", ["dp(clip=1, sigma=1)", "user-dp(clip=1, sigma=1)"])
def test_updates_of_texts_are_audited(defence: str) -> None:
    client = parse(defence)(Client(small_encoder(vocabulary=20, length=6, width=16)))
    texts = Batch(torch.tensor([[1, 4, 5, 2, 0, 0], [1, 7, 8, 9, 2, 0]]), torch.tensor([0, 1]))
    found = audit_epsilon(client, texts, replays=100)
    assert 0 < found.found <= found.claimed


def test_claims_and_deltas_out_of_range_are_refused_together() -> None:
    with pytest.raises(GradveilError) as caught:
        audited(PLAIN, claimed=-1.0, unit="example", delta=2.0)
    assert [problem.where for problem in caught.value.problems] == ["delta", "claimed"]


def test_deployed_client_is_consistent_and_its_noise_is_audited() -> None:
    found = audit_epsilon(parse("dp(clip=1, sigma=1)")(PLAIN), BATCH, replays=150, deployed=True)
    assert 0.5 < found.found <= found.claimed


def test_client_without_a_promise_has_to_be_given_one() -> None:
    with pytest.raises(GradveilError) as caught:
        audited(parse("prune(0.5)")(PLAIN))
    assert [problem.where for problem in caught.value.problems] == ["client"]
    fixed = Client(Tiny(), local=Local(2, 0.3, steps=2))
    with pytest.raises(GradveilError, match="fixed batches"):
        audited(parse("dp(clip=1, sigma=1)")(fixed))


def test_claim_is_the_accountants_epsilon_of_one_update() -> None:
    found = audited(parse("user-dp(clip=1, sigma=4)")(PLAIN))
    assert found.claimed == pytest.approx(epsilon(4.0, Participation(1, sampling="shuffled", at_most=1)))
    assert found.neighbours == "replaced"


def test_command_that_could_audit_nothing_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--defence", "prune(0.5)", "--set", 'model.name="mlp"', "--replays", "20"]
    assert run(["audit-epsilon", "digits", *options]) == 1
    assert "not audited: client has no formal guarantee to audit -> give" in capsys.readouterr().out
