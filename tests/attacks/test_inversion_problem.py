"""The inversion problem: the start of its rows, and the terms of their objective."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.inversion.distances import cosine
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.problem import INPUTS, TARGETS, InversionProblem
from gradveil.attacks.inversion_presets import MASKS
from gradveil.attacks.knowledge import Optimise
from gradveil.client import Client, cosine_distances
from gradveil.core.noise import Key
from gradveil.core.tree import select
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.stochastic_layers import VariationalBottleneck
from gradveil.spaces import ImageSpace
from tests.attacks.small_experiments import tiny


def rows(attack, scene=None, client=None, tensors=None):
    """Set up an attack on three target clients."""
    scene = scene or tiny()
    seen, client = scene.observation, client or scene.client
    if client is not scene.client:
        params = client.params()
        spec = client.noise_spec(params, Batch(*(value[0] for value in scene.truth)))
        noise = {name: value.expand(3, *value.shape) for name, value in spec.neutral().items()}
        seen = replace(seen, params=params, update=client.updates(params, scene.truth, noise, {})[0])
    return InversionProblem(attack, [seen], client, replace(scene.knowledge, tensors=tensors or {}), Key(0))


def noisy():
    """A client whose model draws noise: one tensor `model.3.eps` of eight numbers."""
    layers = tiny().client.model
    model = nn.Sequential(*layers[:3], VariationalBottleneck(144, 8), nn.Linear(144, 4)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=Key(1).generator())
    return Client(model)


def test_uniform_starts_fill_the_box_and_normal_ones_leave_it():
    scene = tiny()
    scene.knowledge = replace(scene.knowledge, space=ImageSpace.between(-3, 5, scene.knowledge.space.shape))
    uniform, normal = (
        torch.cat([rows(Inversion("a", start=start, restarts=4), scene).start(range(12))[0][INPUTS].flatten()])
        for start in ("uniform", "normal")
    )
    assert -3 <= uniform.min() < -2.7
    assert 4.7 < uniform.max() <= 5
    assert uniform.mean().item() == pytest.approx(1, abs=0.4)
    assert normal.std().item() == pytest.approx(1, abs=0.1)
    assert normal.mean().item() == pytest.approx(0, abs=0.1)


def test_optimised_tensor_adds_its_weight_times_its_penalty():
    client = noisy()
    spec = client.noise_spec(client.params(), Batch(torch.zeros(1, 1, 6, 6).double(), torch.zeros(1).long()))
    (name,) = spec
    values = {}
    for weight in (0.0, 0.5, 2.0):
        scene = rows(Inversion("a"), client=client, tensors={name: Optimise(weight)})
        variables, constants = scene.start(range(3))
        values[weight] = scene.loss(variables, constants, torch.arange(3), {})
    penalty = spec[name].law.penalty(variables[name])
    assert bool((penalty > 0.1).all())
    for weight, value in values.items():
        torch.testing.assert_close(value - values[0.0], weight * penalty, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["tv", "l2"])
def test_image_priors_raise_the_objective(name):
    plain, heavy = (rows(Inversion("a", **{name: weight})) for weight in (0.0, 0.7))
    variables, constants = plain.start(range(3))
    difference = heavy.loss(variables, constants, torch.arange(3), {}) - plain.loss(
        variables, constants, torch.arange(3), {}
    )
    x = variables[INPUTS]
    if name == "l2":
        expected = x.flatten(2).norm(dim=2).mean(1)
    else:
        down, right = x.diff(dim=-2).abs(), x.diff(dim=-1).abs()
        expected = down.flatten(1).mean(1) + right.flatten(1).mean(1)
    torch.testing.assert_close(difference, 0.7 * expected)


def test_box_clamps_only_if_set():
    x = torch.tensor([-1.0, 0.5, 2.0]).double().view(3, 1, 1, 1, 1)
    assert rows(Inversion("a")).project(INPUTS, x).flatten().tolist() == [0, 0.5, 1]
    assert torch.equal(rows(Inversion("a", box=False)).project(INPUTS, x), x)


def test_objective_of_several_rounds_is_their_mean():
    scene = tiny()
    other = {name: value.flip(0) for name, value in scene.observation.update.items()}
    seen = [scene.observation, replace(scene.observation, update=other, round=1)]
    values = {}
    for which in ("first", "last", "all"):
        opened = InversionProblem(Inversion("a", rounds=which), seen, scene.client, scene.knowledge, Key(0))
        variables, constants = opened.start(range(3))
        values[which] = opened.loss(variables, constants, torch.arange(3), {})
    assert not torch.allclose(values["first"], values["last"])
    torch.testing.assert_close(values["all"], (values["first"] + values["last"]) / 2)


def test_objective_at_the_truth_is_of_each_target_client():
    """Several restarts shift the row numbers of a target client; jointly optimised labels count as certain."""
    scene = tiny()
    for labels in ("given", "joint"):
        opened = rows(Inversion("a", restarts=3, labels=labels), scene)
        assert (TARGETS in opened.start([0])[0]) is (labels == "joint")
        at = opened.objective_at(range(3), scene.truth.inputs, {})
        assert bool((at < 1e-9).all()), labels
        assert bool((opened.objective_at([1, 2, 0], scene.truth.inputs, {}) < 1e-9).all())
        assert bool((opened.objective_at(range(3), scene.truth.inputs.flip(0), {})[[0, 2]] > 1e-4).all())


def test_each_row_compares_its_target_clients_update():
    scene = tiny()
    opened = rows(Inversion("a", restarts=2), scene)
    variables, constants = opened.start([1, 4])
    for name, value in select(constants, "observed").items():
        assert torch.equal(value, scene.observation.update[name][[0, 2]])
    sent, _ = scene.client.updates(
        scene.observation.params, Batch(variables[INPUTS], scene.truth.targets[[0, 2]]), {}, {}
    )
    expected = cosine(sent, {name: value[[0, 2]] for name, value in scene.observation.update.items()})
    torch.testing.assert_close(opened.loss(variables, constants, torch.tensor([1, 4]), {}), expected)


@pytest.mark.parametrize(
    ("ignore", "defence"),
    [("nothing", "none"), ("stochastic", "none"), ("nothing", "user-dp(clip=0.1, sigma=1) + prune(0.8)")],
)
def test_the_objective_of_a_large_network_is_the_angle_of_its_updates(ignore, defence):
    """The angle is computed from factors of the gradients."""
    layers = (nn.Flatten(), nn.Linear(36, 2048), nn.Sigmoid(), VariationalBottleneck(2048, 8), nn.Linear(2048, 4))
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=Key(1).generator())
    opened = rows(Inversion("a", ignore=ignore), client=parse(defence)(Client(model)), tensors=MASKS)
    variables, constants = opened.start(range(3))
    assert opened.off == set(opened.spec), "this attacker leaves all noise alone"
    noise = select(constants, "noise")
    batch = Batch(variables[INPUTS], constants[TARGETS])
    seen = select(constants, "observed")
    squares = constants["squares.0"]
    params = opened.simulated_client.params()
    short = cosine_distances(opened.simulated_client, params, batch, noise, seen, squares, opened.off)
    assert short is not None, "the scene takes the short way"
    sent, _ = opened.simulated_client.updates(params, batch, noise, {})
    found = opened.loss(variables, constants, torch.arange(3), {})
    torch.testing.assert_close(found, short, rtol=0, atol=0)
    torch.testing.assert_close(found, cosine(sent, seen), rtol=1e-10, atol=0)
