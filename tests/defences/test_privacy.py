"""What clips and noise amount to, whatever the defence is called; what voids it; and the warnings about both."""

import math
from dataclasses import replace

import pytest
import torch

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.tree import norm, tmap
from gradveil.core.types import Batch, Domain, Stage, Transform
from gradveil.defences import DEFENCES, Chain, Clip, Defence, Gaussian, chain, parse
from gradveil.defences.guarantees import NOTHING, examine
from gradveil.defences.privacy_warnings import suspicions
from gradveil.defences.stage_probes import data_dependent
from gradveil.spaces import ImageSpace
from gradveil.theory.accounting import Participation
from tests.defences.custom_stages import (
    BATCH,
    LAYERS,
    PLAIN,
    TRAINED,
    Counting,
    Differentiating,
    Documented,
    Even,
    Faint,
    Loose,
    Mixing,
    Narrow,
    Peeking,
    Repeating,
    Seeded,
    Silent,
    after_dp,
    multipliers,
    privacy_of,
    warned,
)
from tests.laws.cases import DOMAIN, LAWS, B


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dp(clip=2, sigma=0.7)", {"example": 0.7}),
        ("dp(clip=2, sigma=0.7, on=mean)", {"example": 0.7 * B}),
        ("fed-cdp(clip=2, sigma=0.7)", {"example": 0.7 / math.sqrt(LAYERS)}),
        ("user-dp(clip=2, sigma=0.7)", {"client": 0.7}),
        ("clip-example(2) + gaussian(0.5)", {"example": 0.5 * B / 2}),
        ("clip(2) + gaussian(3)", {"client": 1.5}),
        ("dp(clip=2, sigma=0.7) + user-dp(clip=1, sigma=3)", {"example": 0.7, "client": 3.0}),
        ("dp(clip=2, sigma=0.7) + clip-example(1)", {"example": 1.4}),
        ("clip-example(1) + dp(clip=2, sigma=0.7)", {"example": 1.4}),
        ("dp(clip=2, sigma=3) + gaussian(2)", {"example": math.hypot(3, 2 * B / 2)}),
        ("dp(clip=2, sigma=0.7) + laplace(1) + quantise + prune(0.5) + dropout + cvb", {"example": 0.7}),
        ("dp(clip=2, sigma=0)", {}),
        ("gaussian(1)", {}),
        ("clip(1)", {}),
        ("clip-example(1) + laplace(1)", {}),
    ],
)
def test_mechanisms_of_one_gradient_are_listed(text, wanted):
    assert multipliers(text) == pytest.approx(wanted)


def test_promise_counts_every_local_step():
    (mechanism,) = privacy_of("dp(clip=2, sigma=0.7)", TRAINED).mechanisms
    assert (mechanism.sums, mechanism.multiplier) == (3, pytest.approx(0.7))
    assert multipliers("user-dp(clip=2, sigma=0.7)", TRAINED) == pytest.approx({"client": 0.7})
    # What three steps of clipped gradients add up to is not bounded by the clip of each.
    assert multipliers("clip-example(2) + gaussian(0.5)", TRAINED) == {}


def test_promise_of_a_sum_adds_noise_of_members():
    four = replace(PLAIN, members=4)
    assert multipliers("user-dp(clip=2, sigma=0.5)", four) == pytest.approx({"client": 1.0})
    assert multipliers("dp(clip=2, sigma=0.5)", four) == pytest.approx({"example": 1.0})
    # Each of the four has one example, so the mean of its batch is the sum.
    assert multipliers("dp(clip=2, sigma=0.5, on=mean)", four) == pytest.approx({"example": 1.0})
    trained = replace(TRAINED, members=4)
    assert multipliers("user-dp(clip=2, sigma=0.5)", trained) == pytest.approx({"client": 1.0})
    assert multipliers("dp(clip=2, sigma=0.5)", trained) == pytest.approx({"example": 0.5})


@pytest.mark.parametrize(
    "text", ["dp(clip=0.3, sigma=1)", "fed-cdp(clip=0.3, sigma=1)", "dp(clip=0.3, sigma=1, on=mean)"]
)
def test_mechanism_bounds_equal_the_effect_of_one_example(text):
    """The greatest change by leaving one out, its gradient taken from B times the mean, reaches the bound."""
    client = parse(text)(PLAIN)
    (mechanism,) = examine(client, BATCH).mechanisms
    params = client.params()
    silent = client.noise_spec(params, BATCH).neutral()
    whole = client.update(params, BATCH, silent, {})[0]
    changes = []
    for i in range(B):
        keep = [j for j in range(B) if j != i]
        rest = Batch(BATCH.inputs[keep], BATCH.targets[keep])
        without = client.update(params, rest, client.noise_spec(params, rest).neutral(), {})[0]
        changes.append(float(norm({n: whole[n] - without[n] * (B - 1) / B for n in whole})))
    assert max(changes) <= mechanism.bound * (1 + 1e-9)
    assert max(changes) > 0.8 * mechanism.bound


@pytest.mark.parametrize("name", DEFENCES)
def test_promise_needs_registered_clipped_normal_noise(name):
    message = privacy_of(LAWS[name].texts[0]).promise()
    assert message.startswith("differential privacy of each") == (name in {"dp", "fed-cdp", "user-dp", "local-dp"})
    assert "epsilon" not in message.replace("epsilon follows from the training", "")
    if name not in {"dp", "fed-cdp", "user-dp", "local-dp"}:
        assert message == NOTHING


HALVES = {"clip", "clip-example", "gaussian"}
"""Nothing by themselves, and together a mechanism."""


@pytest.mark.parametrize("name", DEFENCES)
def test_heuristics_have_no_formal_guarantee(name):
    """`gradveil list` prints these words, and never an epsilon's number."""
    message = DEFENCES[name].guarantee
    if name not in {"dp", "fed-cdp", "user-dp", "local-dp"} | HALVES:
        assert message.startswith(NOTHING)
    assert not any(character.isdigit() for character in message.replace("l1", "").replace("l2", ""))


@pytest.mark.parametrize("text", ["optimal-noise(0.1, clamp=0.5)", "optimal-prune(0.5)"])
def test_promise_before_an_optimal_defence_is_void(text):
    """Their noise, or their mask, is fitted to the private gradient's own derivative."""
    privacy = privacy_of(f"dp(clip=1, sigma=2) + {text}")
    assert privacy.mechanisms
    assert privacy.promise(Participation(10)).startswith(f"{NOTHING}: ")
    assert "uses the data again" in privacy.promise()
    assert privacy_of(text).promise(Participation(10)) == NOTHING


@pytest.mark.parametrize("transform", [Peeking(), Differentiating()])
def test_custom_stage_that_uses_the_data_is_detected(transform):
    assert "'mine' uses the data again" in (privacy_of(after_dp(transform)).void("example") or "")


LOOKING = {"censor", "dcs", "optimal-noise", "optimal-prune", "soteria"}


def test_few_registered_defences_use_the_data():
    for name, law in LAWS.items():
        client = parse(law.texts[0])(PLAIN)
        for slot in (client.step, client.send):
            for _, stage in slot or ():
                assert data_dependent(stage, client, BATCH) == (name in LOOKING), name


def test_promise_with_mixed_examples_is_void():
    domain = Domain(ImageSpace.between(-9, 9, (1, 8, 8)), 3)
    known = replace(PLAIN, domain=domain)
    for mixed in (Defence("mix", batch=(Mixing(),)), parse("mixup(1)"), parse("instahide")):
        assert "examples are mixed" in (privacy_of(parse("dp(sigma=2)") + mixed, known).void("example") or "")
    assert privacy_of("dp(sigma=2) + label-smoothing(0.1)", known).sound


@pytest.mark.parametrize("text", ["mixup(2)", "instahide(2)"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (64, 1)])
def test_mixing_is_found_for_any_image(text, shape):
    """What is found must not depend on the examples: a refusal would tell of them."""
    domain = Domain(ImageSpace((1, 8, 8)), 2)
    custom = Client(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)), domain=domain)
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(8, *shape, generator=draw), torch.arange(8) % 2
    for first in (inputs[0], torch.zeros(shape), inputs[0] + inputs[0].flip(-1), torch.full(shape, math.nan)):
        batch = Batch(torch.cat([first.unsqueeze(0), inputs[1:]]), targets)
        assert not examine(parse(f"dp(sigma=2) + {text}")(custom), batch).sound


def test_data_dependence_is_found_for_any_batch():
    """Neither examples that are their own mirror images plus one, as far as numbers go, nor labels of one class."""
    for inputs in (BATCH.inputs, torch.full_like(BATCH.inputs, math.inf), torch.full_like(BATCH.inputs, 1e30)):
        batch = Batch(inputs, torch.zeros_like(BATCH.targets))
        for transform in (Peeking(), Counting()):
            assert data_dependent(transform, PLAIN, batch)


def test_promise_with_a_lock_trained_without_noise_is_void():
    trained = privacy_of("dp(sigma=2) + keylock(width=4)", TRAINED)
    assert "trained without noise" in (trained.void("example") or "")
    (warning,) = (p for p in suspicions(parse("dp(sigma=2) + keylock(width=4)")(TRAINED), BATCH) if p.where == "model")
    assert "later steps depend on them" in warning.what
    for text, client in (("dp(sigma=2) + keylock(width=4)", PLAIN), ("user-dp(sigma=2) + keylock(width=4)", TRAINED)):
        assert privacy_of(text, client).sound == privacy_of(text, client).mechanisms != ()
        assert not any(problem.where == "model" for problem in suspicions(parse(text)(client), BATCH))


def answers_for(text: str | Defence, client: Client = PLAIN) -> tuple[set[str], set[str]]:
    """Of which units something is promised, and of which it is warned that it is void."""
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    privacy = privacy_of(text, client)
    warnings = [line for line in warned(text, client=client) if "voids the differential privacy" in line]
    void = {unit for unit in ("example", "client") if any(f"each {unit}" in line for line in warnings)}
    message = privacy.promise()
    for unit in ("example", "client"):
        assert (f"differential privacy of each {unit}" in message) == (unit in {m.unit for m in privacy.sound})
        assert (privacy.void(unit) is not None) == (unit in void), "promise and warnings agree"
    return {mechanism.unit for mechanism in privacy.sound}, void


@pytest.mark.parametrize("client", [PLAIN, TRAINED], ids=["gradient", "local"])
@pytest.mark.parametrize("first", ["mixup(1)", "soteria", "keylock(width=4)", "ats", "mixup + soteria"])
def test_client_clip_covers_earlier_stages(first: str, client: Client):
    known = replace(client, domain=DOMAIN)
    assert answers_for(f"{first} + user-dp(sigma=20)", known) == ({"client"}, set())


def test_promise_is_given_per_privacy_unit():
    known, trained = replace(PLAIN, domain=DOMAIN), replace(TRAINED, domain=DOMAIN)
    for client in (known, trained):
        both = "dp(clip=1, sigma=20) + user-dp(sigma=20)"
        assert answers_for(both, client) == ({"example", "client"}, set())
        assert answers_for(f"{both} + mixup", client) == ({"client"}, {"example"})
        assert answers_for(f"{both} + optimal-prune(0.5)", client) == (set(), {"example", "client"})
    assert answers_for("dp(clip=1, sigma=20) + user-dp(sigma=20) + keylock", trained) == ({"client"}, {"example"})
    message = privacy_of("dp(clip=1, sigma=20) + user-dp(sigma=20) + mixup", known).promise()
    assert message.startswith("differential privacy of each client")
    assert message.endswith(
        "no formal guarantee of each example: examples are mixed before the clip, so one example reaches the "
        "gradients of others"
    )


@pytest.mark.parametrize(("stage", "covered"), [(Stage.CLIP, True), (Stage.QUANTISE, False)])
def test_data_dependent_stage_is_covered_only_before_the_clip(stage: Stage, covered: bool):
    peeking = Peeking()
    peeking.stage = stage  # pyright: ignore
    clipped = chain(clip=Clip(1.0), noise=Gaussian(20.0))
    order = dict(mine=peeking, **dict(clipped)) if covered else dict(**dict(clipped), mine=peeking)
    wanted = ({"client"}, set()) if covered else (set(), {"client"})
    assert answers_for(Defence("mine", send=chain(**order))) == wanted
    # In a local step it is before the clip of the whole update, wherever it stands.
    assert answers_for(Defence("mine", step=chain(mine=peeking), send=clipped), TRAINED) == ({"client"}, set())


def test_promise_with_noise_of_a_shared_seed_is_void():
    assert privacy_of(Defence("shared", send=chain(clip=Clip(1.0), noise=Repeating(2.0)))).promise() == NOTHING
    assert privacy_of(Defence("shared", send=chain(clip=Clip(1.0), noise=Seeded()))).promise() == NOTHING


def test_unknown_stage_before_the_noise_has_no_bound():
    class Stretch(Transform):
        stage = Stage.CLIP

        def apply(self, update, state, noise, context):
            return tmap(lambda value: 5 * value, update), state

    assert multipliers(Defence("mine", send=chain(clip=Clip(1.0), stretch=Stretch(), noise=Gaussian(1.0)))) == {}


@pytest.mark.parametrize(
    "stages",
    [
        {"clip": Loose(1.0), "noise": Gaussian(2.0)},
        {"clip": Clip(1.0), "noise": Faint(2)},
        {"clip": Even(1.0), "noise": Gaussian(2.0)},
        {"clip": Clip(1.0), "noise": Narrow(2)},
    ],
)
def test_promise_with_a_subclass_is_void(stages):
    assert privacy_of(Defence("mine", send=chain(**stages))).promise() == NOTHING
    assert privacy_of(Defence("known", send=chain(clip=Clip(1.0), noise=Gaussian(2.0)))).promise() != NOTHING


def test_promise_with_a_custom_chain_is_void():
    stages = (("clip", Clip(1.0)), ("noise", Gaussian(2.0)))
    assert privacy_of(Defence("mine", send=Silent(stages))).promise() == NOTHING
    assert privacy_of(Defence("known", send=Chain(stages))).promise() != NOTHING


def test_promise_holds_for_an_unchanged_subclass():
    assert multipliers(Defence("mine", send=chain(clip=Clip(1.0), noise=Documented(2.0)))) == {"client": 2.0}


def test_example_clip_on_an_update_raises():
    """It would clip the mean, and pass for what bounds each example's share of it."""
    stages = chain(clip=Clip(1.0, per_example=True), noise=Gaussian(1.0))
    with pytest.raises(GradveilError, match=r"client.send: acts on each example, .* -> give it as step=chain"):
        replace(PLAIN, send=stages)
