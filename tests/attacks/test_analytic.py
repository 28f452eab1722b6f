"""The closed form is exact for one image; batches come apart by label; models without such a layer are refused."""

import pytest
import torch
from torch import nn

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.presets import make_attack
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from tests.attacks.scenes import observed, tiny


def dense(*layers, victims=3, labels=((0,), (1,), (3,))):
    """A net that begins with a linear layer of the pixels, and what its clients sent."""
    generator = Key(3).generator()
    model = nn.Sequential(nn.Flatten(), *layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=generator)
    targets = torch.tensor(labels)
    inputs = torch.rand(*targets.shape, 1, 6, 6, dtype=torch.float64, generator=generator)
    return observed(Client(model), Batch(inputs, targets), torch.zeros(1, 1, 1), torch.ones(1, 1, 1), 4)


def attack(scene, text="analytic"):
    return make_attack(text)([scene.observation], scene.client, scene.knowledge, Key(0))


@pytest.mark.parametrize("layers", [(nn.Linear(36, 4),), (nn.Linear(36, 50), nn.ReLU(), nn.Linear(50, 4))])
def test_one_image_is_exact(layers):
    scene = dense(*layers)
    found = attack(scene)
    torch.testing.assert_close(found.inputs, scene.truth.inputs, rtol=1e-8, atol=1e-8)
    assert bool((found.objective < 1e-10).all())
    assert found.status == ("converged",) * 3


def test_noise_shows_in_the_misfit():
    scene = dense(nn.Linear(36, 4))
    weight = scene.observation.update["1.weight"]
    weight += 0.1 * weight.std() * torch.randn(weight.shape, dtype=weight.dtype, generator=Key(9).generator())
    assert bool((attack(scene).objective > 0.01).all())


def test_an_update_that_is_not_a_number_is_a_status():
    scene = dense(nn.Linear(36, 4), labels=((0, 2), (1, 3)))
    scene.observation.update["1.weight"][1] = torch.nan
    found = attack(scene)
    assert found.status == ("converged", "diverged")
    assert bool(torch.isinf(found.objective[1]))
    assert bool(torch.isfinite(found.inputs).all())


def test_labels_may_be_read_off():
    scene = dense(nn.Linear(36, 4))
    assert torch.equal(attack(scene, "analytic(labels=idlg)").targets, scene.truth.targets)


@pytest.mark.parametrize("layers", [(nn.Linear(36, 4),), (nn.Linear(36, 64), nn.LeakyReLU(0.5), nn.Linear(64, 4))])
def test_a_batch_of_different_labels_comes_apart(layers):
    scene = dense(*layers, labels=((0, 2, 3), (3, 1, 0)))
    found, truth = attack(scene).inputs, scene.truth.inputs
    own = (found - truth).square().flatten(2).mean(-1)
    mixed = (truth.mean(1, keepdim=True) - truth).square().flatten(2).mean(-1)
    assert bool((own < 0.5 * mixed).all()), (own, mixed)


def test_examples_of_one_label_come_back_as_their_mean():
    scene = dense(nn.Linear(36, 4), labels=((1, 1, 3),))
    found = attack(scene).inputs
    torch.testing.assert_close(found[0, 0], found[0, 1])
    mean = scene.truth.inputs[0, :2].mean(0)
    assert (found[0, 0] - mean).abs().mean() < 0.1


def test_other_models_are_refused_with_the_reason():
    scene = tiny()
    with pytest.raises(GradveilError, match="begins with a Conv2d '0', not with a linear layer of the 36 pixels"):
        attack(scene)
    frozen = dense(nn.Linear(36, 4))
    frozen.client = Client(frozen.client.model, trainable=("1.weight",))
    with pytest.raises(GradveilError, match=r"1\.bias are not sent"):
        attack(frozen)


def test_it_takes_no_iterations():
    assert isinstance(make_attack("analytic"), Analytic)
    with pytest.raises(GradveilError, match="iterations"):
        make_attack("analytic(iterations=5)")
