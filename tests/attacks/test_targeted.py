"""Adaptive attacks rank as published, and gain nothing on undefended clients."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.audit.attack_selection import trials
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.trial import recover
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key, Normal
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.module_paths import downstream
from gradveil.nn.stochastic_layers import ConvBottleneck, VariationalBottleneck
from tests.attacks.small_experiments import pictures, psnr, tiny
from tests.audit.runs import config

TARGETED = ("wiig", "gpia", "vbia", "dpia", "pig", "cdia")


def audit(defence, attacks, iterations=60, **changes):
    """Open the experiment of a run on two digits."""
    base = {"data": {"name": "digits"}, "model": {"name": "scheliga-cnn"}, "iterations": iterations}
    return open_experiment(config(**{**base, "defences": [defence], "attacks": list(attacks), **changes}))


def quality(defence, *attacks, **changes):
    """Return the mean PSNR of each attack on two defended digits, and its reconstructions."""
    scene = audit(defence, attacks, **changes)
    lower, upper = scene.private.space.bounds(scene.private.inputs)
    found = {}
    for trial in trials(scene.config):
        tensors = recover(scene, trial, range(2), lambda _: None).tensors
        truth = scene.batch(scene.examples(0, range(2))).inputs
        found[trial.attack] = (float(psnr(tensors["inputs"], truth, lower, upper).mean()), tensors)
    return found


def test_undefended_adaptive_attacks_equal_the_non_adaptive_bit_for_bit():
    found = quality("none", "ig-scheliga", *TARGETED, iterations=8)
    naive = found["ig-scheliga"][1]
    for name in TARGETED:
        assert torch.equal(found[name][1]["inputs"], naive["inputs"]), name
        assert torch.equal(found[name][1]["objectives"], naive["objectives"]), name


@pytest.mark.parametrize(
    ("defence", "worse", "better"),
    [
        ("prune(0.95)", "ig-scheliga", "gpia"),
        ("dropout(0.25)", "ig-scheliga", "dia"),
        ("precode", "ig-scheliga", "vbia"),
        ("cvb", "pig", "wiig"),
        ("dp(clip=20, sigma=1e-3)", "dpia", "ig-scheliga"),
        ("dp(clip=20, sigma=1e-3)", "ig-scheliga", "wiig"),
    ],
)
def test_attacks_rank_as_published(defence, worse, better):
    found = quality(defence, worse, better)
    assert found[better][0] > found[worse][0] + 0.5, {name: value for name, (value, _) in found.items()}


def test_bottleneck_declares_the_layers_that_its_noise_reaches():
    scene = pictures("scheliga-cnn", "digits", 1)
    precode = parse("precode")(scene.client, Key(0)).model
    reached = downstream(precode, scene.truth.inputs[0])
    assert {name.split(".")[-2] for name in reached} == {"decoder", "head"}
    assert not downstream(scene.client.model, scene.truth.inputs[0])
    cvb = parse("cvb")(scene.client, Key(0)).model
    early = set(dict(cvb.named_parameters())) - downstream(cvb, scene.truth.inputs[0])
    assert {"cvb.mean.weight", "cvb.scale.weight"} <= {".".join(name.split(".")[-3:]) for name in early}
    assert not any("head" in name or "decoder" in name for name in early)


def test_custom_bottleneck_needs_no_registration():
    class Mine(VariationalBottleneck):
        pass

    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 9), Mine(9, 4), nn.ReLU(), nn.Linear(9, 4)).double()
    assert downstream(net, torch.zeros(1, 1, 6, 6).double()) == {
        "2.decoder.weight", "2.decoder.bias", "4.weight", "4.bias",
    }  # fmt: skip


class Deep(VariationalBottleneck):
    """A custom bottleneck whose decoder has several layers."""

    def __init__(self, features: int, k: int) -> None:
        super().__init__(features, k)
        self.decoder = nn.Sequential(nn.Linear(k, 16), nn.ReLU(), nn.Linear(16, features))


class Attention(nn.Module):
    """A block that uses the weights of its output projection without calling it, as torch's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x):
        rows = x.view(len(x), -1, 3)
        return self.inner(rows, rows, rows, need_weights=False)[0].flatten(1)


def test_noise_reaches_a_deep_decoder_and_later_layers():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 9), Deep(9, 4), Attention(), nn.Linear(9, 4))
    early = {name for name, _ in net.named_parameters()} - downstream(net, torch.zeros(1, 1, 6, 6))
    assert early == {"1.weight", "1.bias", "2.encoder.weight", "2.encoder.bias"}


def test_bottleneck_that_declares_an_unused_module_raises():
    class Renamed(VariationalBottleneck):
        noisy_from = "out"

    with pytest.raises(
        GradveilError, match=r"2: declares that its noise enters 'out', which a forward pass does not run"
    ):
        downstream(nn.Sequential(nn.Flatten(), nn.Linear(36, 9), Renamed(9, 4)), torch.zeros(1, 1, 6, 6))


def test_ignore_without_a_layer_before_the_noise_raises():
    scene = tiny()
    net = nn.Sequential(ConvBottleneck(1, 3), nn.Flatten(), nn.Linear(36, 4)).double()
    client = Client(net, trainable=("2.*",))
    attack = make_attack("pig(iterations=1)")
    observation = replace(scene.observation, params=client.params())
    with pytest.raises(GradveilError, match="and that is every trained layer"):
        InversionProblem(attack, [observation], client, scene.knowledge, Key(0))


def test_oracle_is_granted_secrets_and_infers_the_rest():
    scene = audit("dp(clip=20, sigma=1e-3) + prune(0.5) + dropout", ["wiig"])
    trial = trials(scene.config)[0]
    attack, client = scene.attacks["wiig"], scene.client(0, trial.defence, 0)
    params = client.params()
    seen, truth = observe(scene, trial, client, range(2))
    knowledge, grants, _ = grant(scene, attack, client, params, truth)
    told = {grant.partition(":")[0] for grant in grants}
    assert set(client.noise_spec(params, Batch(truth.raw.inputs[0], truth.raw.targets[0]))) <= told
    assert not any("mask.conv" in name for name in told if name.startswith("send."))
    at_truth = attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise)
    blind = attack.evaluate(seen, client, knowledge, Key(0), torch.zeros_like(truth.raw.inputs), truth.noise)
    assert bool((at_truth < 0.05).all())
    assert bool((blind > at_truth + 0.1).all())


def test_additive_noise_is_neutral_or_optimised_and_masks_do_not_change():
    """`cdia(additive=optimised)` fits the noise as DPIA does, `dpia(additive=neutral)` does not."""
    optimised = make_attack("cdia(additive=optimised)").knowledge
    plain, dpia = make_attack("cdia").knowledge, make_attack("dpia").knowledge
    assert {name: how for name, how in optimised.items() if name in plain} == plain
    assert list(optimised)[-2:] == ["step.*", "send.*"]
    assert {name: optimised[name] for name in ("step.*", "send.*")} == {n: dpia[n] for n in ("step.*", "send.*")}
    assert (
        make_attack("dpia(additive=neutral)").knowledge["step.*"]
        == make_attack("cdia(additive=neutral)").knowledge["step.*"]
    )
    assert make_attack("dpia(additive=neutral)").knowledge["step.*"] != dpia["step.*"]


def test_optimised_noise_is_pulled_to_the_moments_of_its_own_law():
    how, draws = make_attack("dpia").knowledge["send.*"], Key(0).generator()
    own = torch.randn(3, 40, 50, generator=draws)
    values = torch.stack([torch.zeros(40, 50), own[0], 3 * own[0], own[0] + 1])
    nothing, drawn, wide, moved = how.prior(Normal(), values).tolist()
    assert drawn < 1e-2
    assert (nothing, wide, moved) == (pytest.approx(1), pytest.approx(4, abs=0.2), pytest.approx(1, abs=0.1))
    with pytest.raises(GradveilError) as error:
        make_attack("cdia(noise_std=1, noise_weight=1)")
    for name, problem in zip(("noise_std", "noise_weight"), error.value.problems, strict=True):
        assert name in f"{problem.where}: {problem.what}"


def test_order_of_magnitudes_is_inferred_only_if_set():
    """Only `pruned=ordered` pins borders in addition to masks; even the oracle does not."""
    scene = audit("dgp", ["cdia", "cdia(pruned=ordered)", "wiig"])
    params = scene.client(0, "dgp", 0).params()
    for trial in trials(scene.config):
        attack, client = scene.attacks[trial.attack], scene.client(0, trial.defence, 0)
        seen, truth = observe(scene, trial, client, range(2))
        knowledge, _, _ = grant(scene, attack, client, params, truth)
        (one,) = InversionProblem(attack, seen, client, knowledge, Key(0)).rounds
        kinds = {name.split(".")[2] for name in one.pinned}
        assert kinds == ({"mask", "border"} if "ordered" in trial.attack else {"mask"})
