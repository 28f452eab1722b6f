"""R-GAP that simulates the defended client recovers images behind masks and noise, where the naive one fails."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.outer_products import factored
from gradveil.attacks.closed_form.sent_entries import sent_entries
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.audit.attackers.run_attackers import decide, widened
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.initial_weights import initialise
from tests.attacks.small_experiments import Scene, observed

FULL = "r-gap(labels=restore, simulated_client=full)"
SIDE, COUNT = 16, 6


def _net(act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Two convolutions, the second of which has one output position, and a linear layer."""
    layers = (nn.Conv2d(1, 8, 5, stride=2), act(), nn.Conv2d(8, 24, 6), act(), nn.Flatten(), nn.Linear(24, 10))
    return initialise(nn.Sequential(*layers), Key(0, ("net",)).generator())


def _scene(defence: str = "none", net: nn.Module | None = None) -> Scene:
    """Let clients with a defence send the gradients of faces."""
    images = load("faces", size=SIDE).private
    batch = Batch(images.inputs[:COUNT].unsqueeze(1), (images.targets[:COUNT] % 10).unsqueeze(1))
    scene = observed(Client(net or _net()), batch, 10, images.space)
    client = parse(defence)(scene.client, Key(0))
    params, one = client.params(), Batch(batch.inputs[0], batch.targets[0])
    drawn = stack([client.noise_spec(params, one).sample(Key(0, ("client", row))) for row in range(COUNT)])
    state = {n: v.expand(COUNT, *v.shape) for n, v in client.init(params).items()}
    sent, _ = client.updates(params, batch, drawn, state)
    knowledge = replace(scene.knowledge, targets=None)
    return replace(scene, client=client, observation=replace(scene.observation, update=sent), knowledge=knowledge)


def _recovered(scene: Scene, attack: str = FULL, shift: int = 0) -> int:
    """Count the images with an SSIM above 0.5 to those of the clients, or of the clients `shift` further."""
    knowledge = scene.knowledge if "restore" in attack else replace(scene.knowledge, targets=scene.truth.targets)
    made = make_attack(attack)
    client = scene.client if made.simulated_client == "full" else scene.client.undefended_update()
    found = made([scene.observation], client, knowledge, Key(0))
    views = [knowledge.space.view(inputs[:, 0]) for inputs in (found.inputs, scene.truth.inputs.roll(shift, 0))]
    return int((knowledge.space.scores(*views)["ssim"] > 0.5).sum())


@pytest.mark.parametrize(
    "defence", ["gaussian(std=0.005)", "dp(clip=1, sigma=0.005)", "prune(ratio=0.8)", "dgp(top=0.1, bottom=0.5)"]
)
def test_estimate_recovers_images_without_labels_where_exact_recursion_fails(defence):
    scene = _scene(defence)
    assert _recovered(scene) >= 5
    assert _recovered(scene, "r-gap") <= 2


def test_estimate_recovers_nothing_of_another_client():
    assert _recovered(_scene("gaussian(std=0.005)"), shift=1) == 0


def test_smooth_layers_need_no_gates():
    assert _recovered(_scene("gaussian(std=0.0005)", _net(nn.Sigmoid))) >= 5


@pytest.mark.parametrize("positive", [True, False])
def test_outer_product_is_completed_from_a_third_of_its_entries(positive):
    draw = Key(0, ("factors",)).generator()
    errors, inputs = (torch.randn(size, dtype=torch.float64, generator=draw) for size in (12, 40))
    inputs = inputs.abs() if positive else inputs
    whole = torch.outer(errors, torch.cat([inputs, inputs.new_ones(1)]))
    sent = whole * (torch.rand(whole.shape, dtype=torch.float64, generator=draw) < 1 / 3)
    found = factored(sent[:, :-1], sent[:, -1], 0.0, masked=True, positive=positive)
    assert bool(found.known.all())
    assert float((found.inputs - inputs).abs().max()) < 1e-9
    assert float((found.errors - errors).abs().max()) < 1e-9


def test_noisy_factors_are_within_their_deviations():
    draw = Key(0, ("factors",)).generator()
    errors, inputs = (torch.rand(size, dtype=torch.float64, generator=draw) for size in (32, 60))
    noise = 0.02 * torch.randn(32, 61, dtype=torch.float64, generator=draw)
    rows = torch.outer(errors, torch.cat([inputs, inputs.new_ones(1)])) + noise
    found = factored(rows[:, :-1], rows[:, -1], 0.02, masked=False, positive=True)
    scale = (found.inputs * inputs).sum() / inputs.square().sum()
    assert 0.7 < float(((found.inputs / scale - inputs) / found.of_inputs).square().mean().sqrt()) < 1.3
    assert abs(float(scale) - 1) < 3 * found.scale


def test_sum_of_two_outer_products_has_no_factors():
    draw = Key(0, ("factors",)).generator()
    left, right = (torch.rand(size, 2, dtype=torch.float64, generator=draw) for size in (12, 40))
    rows = (left @ right.T) * (torch.rand(12, 40, dtype=torch.float64, generator=draw) < 0.5)
    assert not factored(rows, None, 0.0, masked=True, positive=True).known.any()


@pytest.mark.parametrize(
    ("defence", "masked", "largest", "ordered"),
    [
        ("dgp(top=0.1, bottom=0.5)", True, 691, True),
        ("prune(ratio=0.5)", True, 0, True),
        ("gaussian(std=0.02)", False, 0, False),
    ],
)
def test_simulated_client_shows_masks_order_and_noise(defence, masked, largest, ordered):
    scene = _scene(defence)
    shown = sent_entries(scene.client, scene.observation, scene.knowledge.space.shape, Key(1))["2.weight"]
    assert (shown.masked(6912), shown.largest, shown.ordered) == (masked, largest, ordered)
    assert shown.noise == pytest.approx(0.02 if "gaussian" in defence else 0.0, rel=0.05)


@pytest.mark.parametrize(
    ("change", "examples", "place"),
    [
        ({}, 2, "client.batch"),
        ({"local": Local(lr=0.1, epochs=1, batch=1)}, 1, "client.local"),
        ({"members": 2}, 1, "client.members"),
    ],
)
def test_updates_of_several_images_steps_or_clients_are_refused(change, examples, place):
    client = replace(Client(_net()), **change)
    problems = list(make_attack(FULL).problems(Prospect(client, (1, SIDE, SIDE), examples, 10, 0)))
    assert place in {problem.where for problem in problems}


def test_undoing_and_estimating_exclude_each_other():
    with pytest.raises(GradveilError, match=r"r-gap\.undo"):
        make_attack("r-gap(simulated_client=full, undo=true)")


def test_update_of_zeros_is_reported_as_stalled():
    scene = _scene()
    sent = {name: torch.zeros_like(value) for name, value in scene.observation.update.items()}
    blank = Observation(scene.observation.params, sent, 1, scene.observation.target_clients)
    client = parse("prune(ratio=0.5)")(scene.client, Key(0))
    found = make_attack(FULL)([blank], client, scene.knowledge, Key(0))
    assert set(found.status) == {"stalled"}
    assert bool(found.inputs.isfinite().all())


@pytest.mark.parametrize(("model", "chain"), [("scheliga-cnn", True), ("resnet18", False)])
def test_adaptive_solves_plain_chains_and_estimates_them_where_updates_are_changed(model, chain):
    raw = {"name": "r", "data": {"name": "faces", "size": 32, "public": 12}, "model": {"name": model}}
    raw |= {"target_clients": 1, "defences": ["none", "label-smoothing", "dgp", "dropout"], "attacks": ["ig"]}
    experiment = open_experiment(resolve(raw), checked=False)
    added = widened(experiment, decide(experiment))[0].config.attacks[1:]
    assert added == (["r-gap on none", "r-gap on label-smoothing", f"{FULL} on dgp"] if chain else [])
