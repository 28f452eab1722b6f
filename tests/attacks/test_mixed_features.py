"""The last layer's inputs of a batch, unmixed from its gradient."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.mixed_features import mixed_features
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.distances import feature_distance
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.problem import INPUTS, InversionProblem
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.nn.module_paths import features, last_layer
from tests.attacks.small_experiments import observed, pictures, tiny


def head(scene):
    """Return the gradients and the parameters of the last layer, weight and bias each."""
    last, seen = last_layer(scene.client.model), scene.observation
    of_weight, of_bias, weight, bias = (
        tensors[f"{last}.{name}"] for tensors in (seen.update, seen.params) for name in ("weight", "bias")
    )
    return (of_weight, of_bias), (weight, bias)


def found(scene, clients):
    """Return the unmixed and the true inputs of the last layer, [B, F] each, of some target clients."""
    (weight, bias), layer = head(scene)
    for place in range(clients):
        truth = features(scene.client.model, scene.truth.inputs[place]).detach()
        labels = scene.truth.targets[place]
        yield mixed_features((weight[place], bias[place]), layer, labels, Key(0, (place,))), truth


@pytest.mark.parametrize("model", ["scheliga-cnn", "resnet18"])
@pytest.mark.parametrize("examples", [2, 6])
def test_features_of_a_batch_are_exact(model, examples):
    for own, truth in found(pictures(model, "digits", 2, examples), 2):
        nearest = torch.cdist(own, truth)
        assert nearest.amin(1).max() < 0.02 * (truth - truth.mean(0)).norm(dim=1).mean()
        assert sorted(nearest.argmin(1).tolist()) == [*range(examples)]


def test_a_clip_is_found_with_them():
    scene = pictures("scheliga-cnn", "digits", 1, 4)
    (weight, bias), layer = head(scene)
    truth = features(scene.client.model, scene.truth.inputs[0]).detach()
    own = mixed_features((0.2 * weight[0], 0.2 * bias[0]), layer, scene.truth.targets[0], Key(0))
    assert torch.cdist(own, truth).amin(1).max() < 0.02 * (truth - truth.mean(0)).norm(dim=1).mean()


@pytest.mark.parametrize("change", ["noise", "pruned", "labels", "equal", "many", "not finite"])
def test_where_they_are_hidden_there_is_no_answer(change):
    scene = pictures("scheliga-cnn", "digits", 1, 12 if change == "many" else 4)
    ((weight,), (bias,)), layer = head(scene)
    labels = scene.truth.targets[0]
    if change == "noise":
        weight = weight + 1e-3 * weight.std() * torch.randn(weight.shape, generator=Key(1).generator())
    elif change == "pruned":
        weight = torch.where(weight.abs() > weight.abs().median(), weight, 0.0)
    elif change == "labels":
        labels = (labels + 1) % 10
    elif change == "equal":
        alike = Batch(scene.truth.inputs[:, :1].expand(-1, 4, -1, -1, -1), labels[:1].expand(1, 4))
        ((weight,), (bias,)), _ = head(observed(scene.client, alike, 10, scene.knowledge.space))
    elif change == "not finite":
        weight = weight.clone().fill_(torch.nan)
    assert mixed_features((weight, bias), layer, labels, Key(0)).isnan().all()


def test_the_term_vanishes_at_the_true_images_in_any_order_of_one_label():
    scene = tiny(2, 3)
    scene = observed(scene.client, Batch(scene.truth.inputs, torch.tensor([[0, 0, 1], [2, 1, 2]])), 4)
    attack = Inversion("a", features=1.0)
    known = replace(scene.knowledge, tensors={})
    bare = InversionProblem(replace(attack, features=0.0), [scene.observation], scene.client, known, Key(0))
    assert bare.features is None
    judge = InversionProblem(attack, [scene.observation], scene.client, known, Key(0), judges=True)
    assert judge.features is not None
    assert judge.features.isfinite().all()
    swapped = scene.truth.inputs.clone()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    for images in (scene.truth.inputs, swapped):
        assert judge.objective_at([0, 1], images, {}).max() < 1e-5
    search = InversionProblem(attack, [scene.observation], scene.client, known, Key(0))
    assert search.features is not None
    variables, constants = search.start([0, 1])
    rows = torch.arange(2)
    more = search.loss(variables, constants, rows, {}) - bare.loss(variables, bare.start([0, 1])[1], rows, {})
    own = torch.stack([features(scene.client.model, images) for images in variables[INPUTS]])
    torch.testing.assert_close(more, feature_distance(own, search.features), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("defence", ["dropout", "mixup", "precode"])
def test_inputs_that_the_search_cannot_draw_are_left_out(defence):
    scene = pictures("scheliga-cnn", "digits", 1, 3)
    client = parse(defence)(scene.client, Key(0))
    spec = client.noise_spec(client.params(), Batch(*(value[0] for value in scene.truth)))
    params = client.params()
    noise = {name: value.unsqueeze(0) for name, value in spec.neutral().items()}
    update = client.updates(params, scene.truth, noise, {})[0]
    seen = replace(scene.observation, params=params, update=update)
    problem = InversionProblem(Inversion("a", features=1.0), [seen], client, scene.knowledge, Key(0))
    assert problem.features is None


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4, 1e38])
@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 1]])
def test_gradients_of_any_size_raise_nothing(scale, labels):
    generator = Key(0).generator()
    inputs, weight, bias = (torch.rand(shape, generator=generator) for shape in ((3, 16), (10, 16), (10,)))
    chosen, inputs = torch.tensor(labels), scale * inputs
    errors = ((inputs @ weight.T + bias).softmax(1) - nn.functional.one_hot(chosen, 10)) / 3
    answer = mixed_features((errors.T @ inputs, errors.sum(0)), (weight, bias), chosen, Key(0))
    assert answer.isnan().all() or torch.cdist(answer, inputs).amin(1).max() < 0.01 * scale


class Pooled(nn.Module):
    """The last linear layer acts on every place of an image; its outputs are averaged."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 5, 3), nn.Linear(5, 10)

    def forward(self, images):
        return self.head(self.body(images).tanh().flatten(2).mT).mean(1)


@pytest.mark.parametrize("model", [Pooled(), nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())])
def test_models_without_a_classifier_of_one_vector_are_searched_as_before(model):
    model = model.double()
    truth = Batch(
        torch.rand(2, 3, 1, 8, 8, generator=Key(0).generator(), dtype=torch.double),
        torch.tensor([[0, 1, 1], [2, 3, 4]]),
    )
    scene = observed(Client(model), truth, 10)
    attack = Inversion("a", descent=Descent(Adam(lr=0.1), iterations=2), features=0.03)
    found, bare = (
        each([scene.observation], scene.client, scene.knowledge, Key(0))
        for each in (attack, replace(attack, features=0.0))
    )
    assert torch.equal(found.inputs, bare.inputs)


def test_a_batch_on_convolutions_separates():
    scene = pictures("scheliga-cnn", "digits", 1, 6)
    space, scores = scene.knowledge.space, {}
    truth = space.view(scene.truth.inputs)
    for weight in (0.0, 0.03):
        attack = make_attack(f"portfolio(tv=0.03, features={weight:g}, iterations=100)")
        result = attack([scene.observation], scene.client, scene.knowledge, Key(0))
        scores[weight] = float(space.scores(space.match(space.view(result.inputs), truth)[1], truth)["ssim"].mean())
    assert scores[0.03] > scores[0.0] + 0.02
