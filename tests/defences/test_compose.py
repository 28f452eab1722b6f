"""Chains, feedback and defences: legal orders, refusals, names."""

from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import ClassVar

import pytest
import torch

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import select, tmap
from gradveil.core.types import Batch, Context, Stage, Transform
from gradveil.defences import (
    Chain,
    Clip,
    CvbSurgery,
    Defence,
    DropoutSurgery,
    Dual,
    Feedback,
    Gaussian,
    Laplacian,
    Magnitude,
    PrecodeSurgery,
    chain,
    parse,
)
from gradveil.defences.pruning import share
from gradveil.nn.models import build
from tests.laws.cases import CLIENTS, Tiny, draw

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))


@dataclass(frozen=True)
class Half(Transform):
    """A compressor-like transform that acts on each example, for the refusals."""

    per_example: bool = True
    stage: ClassVar[Stage] = Stage.PRUNE

    def apply(self, update, state, noise, context):
        return tmap(lambda value: value / 2, update), state


def problems(build) -> list[str]:
    with pytest.raises(GradveilError) as caught:
        build()
    return [str(problem) for problem in caught.value.problems]


def test_chain_with_an_invalid_order_raises():
    (text,) = problems(lambda: chain(prune=Magnitude(0.5), noise=Gaussian(1)))
    assert "chain.noise: comes after 'prune'" in text
    assert "clip < noise < prune" in text
    assert len(problems(lambda: chain(prune=Dual(), noise=Laplacian(1), clip=Clip(1)))) == 2
    (text,) = problems(lambda: chain(clip=Clip(1), each=Clip(1, per_example=True)))
    assert "acts on each example" in text
    assert "in a chain of its own" in problems(lambda: chain(inner=chain(half=Half())))[0]
    assert "has no stage" in problems(chain)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("prune(0.5)", "dp"),
        ("prune(0.5)", "gaussian(0.1)"),
        ("dgp + clip(1)", "laplace(0.1)"),
        ("dp", "clip-example(3)"),
    ],
)
def test_composition_order_of_slots_does_not_matter(first: str, second: str):
    a, b = parse(f"{first} + {second}"), parse(f"{second} + {first}")
    for defence in (a, b):
        for slot in (defence.step, defence.send):
            stages = [transform.stage for _, transform in slot] if slot else []
            assert stages == sorted(stages)
    if "clip-example" not in second:  # two clips keep the order in which they were written
        assert (a.step, a.send) == (b.step, b.send)
    client = a(Client(Tiny()))
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    again, _ = b(Client(Tiny())).update(params, batch, noise, state)
    torch.testing.assert_close(sent, again)


def test_prune_after_dp_prunes_the_noisy_gradient():
    """GP(DP(g)): noise reaches only what is kept, and the mask is chosen after the noise."""
    client = parse("prune(0.5) + dp(clip=0.3, sigma=1)")(Client(Tiny()))
    params, batch, noise, state = draw(client)
    noisy, _ = parse("dp(clip=0.3, sigma=1)")(Client(Tiny())).update(params, batch, noise, {})
    expected, _ = Magnitude(0.5).apply(noisy, {}, {}, CONTEXT)
    torch.testing.assert_close(client.update(params, batch, noise, state)[0], expected, rtol=0, atol=0)


SLOTS = {
    "batch": "label-smoothing(0.2)",
    "model": "precode(k=5)",
    "step": "dp(clip=0.3, sigma=0.5)",
    "send": "dgp(top=0.1, bottom=0.5)",
}
SUBSETS = [some for count in range(1, 5) for some in combinations(SLOTS, count)]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_composition_of_any_slots_works_in_any_order(subset: tuple[str, ...]):
    """The same is sent whatever the order, and no part of it is lost."""
    plain = CLIENTS["sgd"]
    first = parse(" + ".join(SLOTS[slot] for slot in subset))
    assert {slot for slot in SLOTS if getattr(first, slot)} == set(subset)
    client = first(plain, Key(1))
    params, batch, noise, state = draw(client)
    sent, after = client.update(params, batch, noise, state)
    for order in permutations(subset):
        other = parse(" + ".join(SLOTS[slot] for slot in order))(plain, Key(1))
        result, later = other.update(params, batch, noise, state)
        torch.testing.assert_close(result, sent, rtol=0, atol=0)
        torch.testing.assert_close(later, after, rtol=0, atol=0)
    for slot in subset:
        without = parse(" + ".join(SLOTS[each] for each in subset if each != slot) or "none")(plain, Key(1))
        names = {**without.noise_spec(without.params(), batch)}
        selected = {name: value for name, value in state.items() if name in without.init(without.params())}
        less = without.update(without.params(), batch, {n: v for n, v in noise.items() if n in names}, selected)[0]
        assert any(name not in less or not torch.equal(less[name], value) for name, value in sent.items()), slot


@pytest.mark.parametrize("model", ["dropout(0.4)", "precode(k=5)", "cvb(beta=0.1)"])
@pytest.mark.parametrize("text", ["optimal-noise(0.1)", "optimal-prune(0.5, of=example)"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_composition_of_mean_gradient_stages_works_with_random_models(text: str, model: str, kind: str):
    """Local steps draw for parts of the examples: in a gradient of all of them the model's own noise is off."""
    client = parse(f"{text} + {model}")(CLIENTS[kind], Key(1))
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    before = parse(model)(CLIENTS[kind], Key(1))
    plain = before.update(params, batch, {n: v for n, v in noise.items() if not n.startswith("send.")}, {})[0]
    once = replace(client, local=None)
    off = select(once.noise_spec(params, batch).neutral(), "model")
    assert off
    context = once.pipeline.gradient.context(params, batch, off)
    assert client.send is not None
    wanted, _ = client.send.apply(plain, state, select(noise, "send"), context)
    torch.testing.assert_close(sent, wanted)


def test_chain_same_stage_twice_gets_own_name_and_noise():
    client = parse("gaussian(0.1) + gaussian(0.2)")(Client(Tiny()))
    noise = draw(client)[2]
    assert {name.split(".")[1] for name in noise} == {"noise", "noise2"}
    assert not torch.equal(noise["send.noise.head.weight"], noise["send.noise2.head.weight"])


def test_defence_applies_to_a_defended_client():
    once = parse("dp(clip=0.3) + dropout + prune(0.5)")(Client(Tiny()))
    twice = parse("prune(0.5)")(parse("dropout")(parse("dp(clip=0.3)")(Client(Tiny()))))
    params, batch, noise, state = draw(once)
    torch.testing.assert_close(
        twice.update(params, batch, noise, state)[0], once.update(params, batch, noise, state)[0]
    )


def test_feedback_of_noise_raises():
    (text,) = problems(lambda: Feedback(Gaussian(0.1)))
    assert "feedback.inner: draws noise, and the residual would cancel it" in text
    inner = chain(clip=Clip(1), noise=Laplacian(0.1), prune=Magnitude(0.5))
    result = problems(lambda: Feedback(inner))
    assert [text.split(":")[0] for text in result] == ["feedback.clip", "feedback.noise"]
    nested = Chain((("outer", inner),))
    assert problems(lambda: Feedback(nested))[1].startswith("feedback.outer.noise")
    assert "acts on each example" in problems(lambda: Feedback(Half()))[0]


def test_feedback_of_a_chain_keeps_its_residual():
    inner = chain(prune=Magnitude(0.5), again=Dual(0.1, 0.1))
    feedback = Feedback(inner)
    assert feedback.stage == Stage.PRUNE
    g = {"w": torch.arange(1.0, 11.0)}
    sent, state = feedback.apply(g, feedback.init(g), {}, CONTEXT)
    torch.testing.assert_close(sent["w"] + state["residual.w"], g["w"])
    assert set(feedback.intermediates(g)) == {"prune.mask.w", "prune.border.w", "again.mask.w", "again.border.w"}
    assert set(feedback.evidence(sent)) == {"again.mask.w", "again.border.w"}
    assert set(feedback.evidence(sent, exact=False)) == {"again.mask.w"}
    torch.testing.assert_close(chain(inner=feedback).init(g)["inner.residual.w"], torch.zeros(10))


def test_feedback_sends_the_residual_later():
    """With a constant gradient, what was sent over many rounds approaches rounds * g: nothing is lost for good."""
    feedback = Feedback(Magnitude(0.75))
    g = {"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}
    state, total = feedback.init(g), torch.zeros(4)
    for _ in range(40):
        sent, state = feedback.apply(g, state, {}, CONTEXT)
        assert int((sent["w"] != 0).sum()) == 1
        total += sent["w"]
    torch.testing.assert_close(total / 40, g["w"], rtol=0.15, atol=0.15)
    plain = Magnitude(0.75).apply(g, {}, {}, CONTEXT)[0]["w"]
    assert plain.tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize(
    ("build", "positions"),
    [
        (lambda: Clip(float("nan"), per_example=1), ["clip.norm", "clip.per_example"]),
        (lambda: Gaussian(-1, on="batch"), ["gaussian.std", "gaussian.on"]),
        (lambda: Laplacian("1"), ["laplace.scale"]),
        (lambda: Magnitude(1.0, "row"), ["prune.ratio", "prune.scope"]),
        (lambda: Dual(-0.1, 1.5), ["dgp.top", "dgp.bottom"]),
        (lambda: Dual(0.4, 0.6), ["dgp"]),
        (lambda: DropoutSurgery(1.0, where=""), ["dropout.p", "dropout.where"]),
        (lambda: PrecodeSurgery(k=0, beta=-1), ["precode.k", "precode.beta"]),
        (lambda: CvbSurgery(kernel=2, kl="approximate"), ["cvb.kernel", "cvb.kl"]),
    ],
)
def test_stages_with_invalid_settings_raise_every_problem(build, positions: list[str]):
    assert [text.split(":")[0] for text in problems(build)] == positions


def test_model_replacements_draw_from_the_key():
    defence = parse("precode(k=4)")
    first, same = (defence(Client(Tiny()), Key(1)).params() for _ in range(2))
    other = defence(Client(Tiny()), Key(2)).params()
    torch.testing.assert_close(first, same, rtol=0, atol=0)
    new = [name for name in first if "precode" in name]
    assert new
    assert all(not torch.equal(first[name], other[name]) for name in new if "weight" in name)


def test_model_replacements_draw_from_separate_streams():
    params = parse("cvb + cvb")(Client(Tiny())).params()
    first, second = (params[name] for name in params if "cvb" in name and name.endswith("mean.weight"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("model", ["lenet-zhu", "scheliga-cnn", "vit"])
def test_composition_of_all_slots_works_on_study_models(model: str):
    network = build(model, channels=3, size=32, classes=10, generator=Key(0).generator())
    defence = parse("precode + cvb + dropout(0.25) + dp + dgp")
    client = defence(Client(network))
    params = client.params()
    batch = Batch(torch.rand(2, 3, 32, 32, generator=Key(1).generator()), torch.tensor([1, 2]))
    spec = client.noise_spec(params, batch)
    kinds = {name.rsplit(".", 1)[-1] for name in spec if name.startswith("model.")}
    assert kinds == {"mask", "eps"}
    sent, state = client.update(params, batch, spec.sample(Key(2)), client.init(params))
    for name, value in sent.items():
        removed = share(0.05, value.numel()) + share(0.75, value.numel())
        assert int((value != 0).sum()) == value.numel() - removed, name
        assert bool(torch.isfinite(state[f"send.prune.residual.{name}"]).all())


def test_guarantee_names_every_stage():
    text = parse("dp + prune(0.5)")
    assert "clip: bounds the norm" in text.step.guarantee
    assert "noise: differential privacy only after a clip" in text.step.guarantee
    assert isinstance(text + Defence("none"), Defence)


def test_defence_that_changes_a_client_cannot_be_named_none():
    """Its trials would count as those of the undefended client, and vouch for attacks on other defences."""
    with pytest.raises(GradveilError, match=r"defence\.name: is 'none'"):
        Defence("none", send=parse("prune(0.5)").send)
