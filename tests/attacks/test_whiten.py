"""Whitening: the inferred noise, and the gain from weights where it can be computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.known_noise import LEAST_WEIGHT as LEAST
from gradveil.attacks.inversion.known_noise import REFRESH, Whitening, deviations, weights
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import stack, tmap
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.metrics.image_similarity import ssim
from gradveil.spaces import ImageSpace
from tests.attacks.small_experiments import Scene, observed
from tests.attacks.test_cdia import defended

TARGET_CLIENTS, SIDE, FEATURES = 12, 5, 80
SETTINGS = 'iterations=150, objective="l2", tv=0, lr=0.1, sign=plain, patience=300'


class Minus(nn.Module):
    """Minus the output of the true class: a loss whose gradient is linear in the inputs."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.gather(1, targets.unsqueeze(1)).squeeze(1)


def linear(text: str) -> Scene:
    """Clients whose gradient is A x in one row of the last layer and zero in the others, defended."""
    generator = Key(0, ("linear",)).generator()
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, FEATURES, bias=False), nn.Linear(FEATURES, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=SIDE**-1.0, generator=generator)
    inputs = torch.randn(TARGET_CLIENTS, 1, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (TARGET_CLIENTS, 1), generator=generator)
    client = Client(model, loss=Minus(), trainable=("2.weight",))
    scene = observed(client, Batch(inputs, targets), 3, ImageSpace.between(-9, 9, tuple(inputs.shape[2:])))
    client = parse(text)(scene.client)
    state = stack([client.init(client.params())] * TARGET_CLIENTS)
    sent, _ = client.updates(client.params(), scene.truth, drawn(client, scene.truth), state)
    return replace(scene, client=client, observation=replace(scene.observation, update=sent))


def drawn(client: Client, truth: Batch):
    spec = client.noise_spec(client.params(), Batch(truth.inputs[0], truth.targets[0]))
    return stack([spec.sample(Key(1).child("client", target_client)) for target_client in range(TARGET_CLIENTS)])


def errors(scene: Scene, text: str) -> Tensor:
    """Mean squared error of each target client's reconstruction."""
    attack = make_attack(text)
    found = attack([scene.observation], scene.client, replace(scene.knowledge, tensors=attack.knowledge), Key(0))
    return (found.inputs - scene.truth.inputs).square().flatten(1).mean(1)


def test_whitening_recovers_more_of_a_linear_model():
    """Least squares with the true variances gives the largest possible gain."""
    scene = linear("optimal-noise(0.05)")
    plain = errors(scene, f"cdia({SETTINGS})")
    whitened = errors(scene, f"cdia({SETTINGS}, whiten=true)")
    assert whitened.mean() < 0.7 * plain.mean(), (whitened.mean(), plain.mean())
    assert int((whitened < plain).sum()) >= TARGET_CLIENTS - 1
    params, own = scene.client.params(), drawn(scene.client, scene.truth)
    spread = deviations(scene.client, params, scene.truth, own, {})[0]["2.weight"]
    exact = []
    for target_client in range(TARGET_CLIENTS):
        row = int(scene.truth.targets[target_client])
        scale = spread[target_client, row].reciprocal()
        design, seen = (
            -params["1.weight"] * scale[:, None],
            scene.observation.update["2.weight"][target_client, row] * scale,
        )
        best = torch.linalg.lstsq(design, seen[:, None]).solution.view(SIDE, SIDE)
        exact.append((best - scene.truth.inputs[target_client, 0, 0]).square().mean())
    assert torch.stack(exact).mean() < 1.1 * whitened.mean()


def test_uniform_noise_gives_unit_weights():
    scene = linear("gaussian(0.2)")
    torch.testing.assert_close(errors(scene, f"cdia({SETTINGS}, whiten=true)"), errors(scene, f"cdia({SETTINGS})"))


@pytest.mark.parametrize(
    ("text", "factor"),
    [("gaussian(0.3)", 0.3), ("laplace(0.3)", 0.3 * 2**0.5), ("gaussian(0.3) + optimal-prune(0.5, std=0.4)", 0.5)],
)
def test_deviations_include_all_additive_noise(text: str, factor: float):
    scene = linear(text)
    params, own = scene.client.params(), drawn(scene.client, scene.truth)
    found = deviations(scene.client, params, scene.truth, own, {})[0]["2.weight"]
    sent = scene.client.updates(params, scene.truth, tmap(torch.zeros_like, own) | own, {})[0]["2.weight"]
    if "prune" in text:
        own |= {f"send.prune.mask.{n}": v for n, v in {"2.weight": (sent != 0).double()}.items()}
        found = deviations(scene.client, params, scene.truth, own, {})[0]["2.weight"]
        assert not found[sent == 0].any()
        found = found[sent != 0]
    torch.testing.assert_close(found, torch.full_like(found, factor))


def test_data_dependent_scales_equal_the_defence_scales():
    scene = linear("optimal-noise(0.2)")
    params, own = scene.client.params(), drawn(scene.client, scene.truth)
    found = deviations(scene.client, params, scene.truth, own, {})[0]["2.weight"]
    plain = scene.client.updates(params, scene.truth, tmap(torch.zeros_like, own), {})[0]["2.weight"]
    added = (scene.observation.update["2.weight"] - plain) / own["send.noise.normal.2.weight"]
    torch.testing.assert_close(found, added.abs())


def test_weights_are_bounded_and_fall_with_the_noise():
    spread = {"w": torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.0, 0.0]])}
    m = 10 / 3
    expected = [((1 + LEAST) * m / (s * s + LEAST * m)) ** 0.5 for s in (0.0, 1.0, 3.0)]
    torch.testing.assert_close(weights(spread)["w"], torch.tensor([expected, [1.0, 1.0, 1.0]]))


def test_weights_are_updated_now_and_then():
    scene = linear("optimal-noise(0.2)")
    whitening, rows = Whitening(), torch.arange(TARGET_CLIENTS)
    params, own = scene.client.params(), drawn(scene.client, scene.truth)
    moved = Batch(scene.truth.inputs + 1, scene.truth.targets)

    def look(batch: Batch, iteration: int) -> Tensor:
        return whitening(0, scene.client, params, batch, own, {}, rows, iteration)[0]["2.weight"]

    first = look(scene.truth, 0)
    assert torch.equal(look(moved, REFRESH - 1), first)
    later = look(moved, REFRESH)
    assert not torch.equal(later, first)
    rows = rows[1:]
    few = {name: value[1:] for name, value in own.items()}
    kept, _ = whitening(0, scene.client, params, Batch(moved.inputs[1:], moved.targets[1:]), few, {}, rows, REFRESH + 1)
    assert torch.equal(kept["2.weight"], later[1:])


def in_rounds(text: str, count: int) -> list[Scene]:
    """The experiment in each observed round; the parameters stay, the client's state changes."""
    scene = linear(text)
    params, scenes = scene.client.params(), []
    state = stack([scene.client.init(params)] * TARGET_CLIENTS)
    for number in range(count):
        spec = scene.client.noise_spec(params, Batch(scene.truth.inputs[0], scene.truth.targets[0]))
        own = stack(
            [spec.sample(Key(1).child("round", number, target_client)) for target_client in range(TARGET_CLIENTS)]
        )
        sent, after = scene.client.updates(params, scene.truth, own, state)
        scenes.append(replace(scene, observation=replace(scene.observation, update=sent, round=number)))
        spread = deviations(scene.client, params, scene.truth, own, state)[0]["2.weight"]
        plain = scene.client.updates(params, scene.truth, tmap(torch.zeros_like, own), state)[0]["2.weight"]
        added = (sent["2.weight"] - plain) / own["send.noise.normal.2.weight"]
        torch.testing.assert_close(spread, added.abs(), msg=f"deviations in round {number}")
        state = after
    return scenes


@pytest.mark.parametrize("cheap", ["every=3", "of=example, every=2, memory=0.5"])
def test_observed_rounds_determine_the_noise_scale(cheap: str):
    """The state behind the scale is simulated from the first round on, at the reconstruction."""
    scenes = in_rounds(f"optimal-noise(0.08, {cheap})", 3)
    first, seen = scenes[0], [scene.observation for scene in scenes]

    def error(text: str) -> Tensor:
        attack = make_attack(text)
        found = attack(seen, first.client, replace(first.knowledge, tensors=attack.knowledge), Key(0))
        return (found.inputs - first.truth.inputs).square().flatten(1).mean(1)

    plain = error(f"cdia({SETTINGS}, rounds=all)")
    whitened = error(f"cdia({SETTINGS}, rounds=all, whiten=true)")
    assert whitened.mean() < 0.75 * plain.mean(), (whitened.mean(), plain.mean())
    assert int((whitened < plain).sum()) >= TARGET_CLIENTS - 4


def test_whitening_by_rounding_noise_gains_nothing(monkeypatch: pytest.MonkeyPatch):
    """Random rounding keeps the mean, so that an entry's variance is (up - mean) (mean - down)."""

    def rounding(simulated_client: Client, params, batch: Batch, noise, state):
        own = {n: v for n, v in noise.items() if n.startswith("send.quantise.")}
        assert own.keys() == {f"send.quantise.{n}" for n in params}
        mean, up, down = (
            simulated_client.updates(
                params, batch, {**noise, **{n: torch.full_like(v, u) for n, v in own.items()}}, state
            )
            for u in (1.0, 0.0, 1 - 2**-24)
        )
        return {n: ((up[0][n] - v) * (v - down[0][n])).clamp_min(0).sqrt() for n, v in mean[0].items()}, mean[1]

    monkeypatch.setattr("gradveil.attacks.inversion.known_noise.deviations", rounding)
    scene, found = defended("quantise(bits=3)", 60, ("cdia", "cdia(whiten=true)"), target_clients=4)
    low, high = scene.knowledge.space.bounds(scene.truth.inputs)
    alike, weighed = (
        ssim(*(((x.flatten(0, 1) - low) / (high - low)).clamp(0, 1) for x in (f.inputs, scene.truth.inputs))).mean()
        for f in found.values()
    )
    assert weighed < alike + 0.02, (weighed, alike)
