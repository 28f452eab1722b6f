"""The analytic attack is exact for one image and separates batches by label; unsuitable models raise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.attacks.small_experiments import observed, tiny


def dense(*layers, target_clients=3, labels=((0,), (1,), (3,))):
    """A network that begins with a linear layer of the pixels, and its clients' updates."""
    generator = Key(3).generator()
    model = nn.Sequential(nn.Flatten(), *layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=generator)
    targets = torch.tensor(labels)
    inputs = torch.rand(*targets.shape, 1, 6, 6, dtype=torch.float64, generator=generator)
    return observed(Client(model), Batch(inputs, targets), 4)


def attack(scene, text="analytic"):
    return make_attack(text)([scene.observation], scene.client, scene.knowledge, Key(0))


@pytest.mark.parametrize("layers", [(nn.Linear(36, 4),), (nn.Linear(36, 50), nn.ReLU(), nn.Linear(50, 4))])
def test_one_image_is_exact(layers):
    scene = dense(*layers)
    found = attack(scene)
    torch.testing.assert_close(found.inputs, scene.truth.inputs, rtol=1e-8, atol=1e-8)
    assert bool((found.objective < 1e-10).all())
    assert found.status == ("converged",) * 3


def resent(text, scene):
    """Let the same clients train locally, or clip."""
    defended = parse(text)(scene.client)
    params = defended.params()
    batch = scene.truth
    spec = defended.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
    noise = {name: value.expand(len(batch.targets), *value.shape) for name, value in spec.neutral().items()}
    scene.observation = replace(scene.observation, update=defended.updates(params, batch, noise, {})[0])
    scene.client = defended
    return scene


@pytest.mark.parametrize(
    ("local", "defence"),
    [(Local(batch=3, lr=0.05, steps=4), "none"), (Local(batch=3, lr=2.0, steps=1), "none"), (None, "clip(0.01)")],
)
def test_scale_of_a_batch_is_read_off_the_bias(local, defence):
    """Local steps and clips scale the gradient; an attack that ignores the scale is worse than the mean image."""
    scene = dense(nn.Linear(36, 64), nn.LeakyReLU(0.5), nn.Linear(64, 4), labels=((0, 2, 3), (3, 1, 0)))
    scene.client = replace(scene.client, local=local)
    found, truth = attack(resent(defence, scene)).inputs, scene.truth.inputs
    own = (found - truth).square().flatten(2).mean(-1)
    mixed = (truth.mean(1, keepdim=True) - truth).square().flatten(2).mean(-1)
    assert bool((own < 0.5 * mixed).all()), (own, mixed)


@pytest.mark.parametrize("labels", [((0,), (1,), (3,)), ((0, 2, 3), (3, 1, 0))])
def test_misfit_is_zero_only_at_the_ground_truth(labels):
    scene = dense(nn.Linear(36, 50), nn.ReLU(), nn.Linear(50, 4), labels=labels)
    closed = make_attack("analytic")
    given = [scene.observation], scene.client, scene.knowledge, Key(0)
    assert bool((closed.evaluate(*given, scene.truth.inputs, {}) < 1e-9).all())
    assert bool((closed.evaluate(*given, scene.truth.inputs.flip(0), {})[[0, -1]] > 0.05).all())
    torch.testing.assert_close(closed.evaluate(*given, closed(*given).inputs, {}), closed(*given).objective)


def test_noise_raises_the_misfit():
    scene = dense(nn.Linear(36, 4))
    weight = scene.observation.update["1.weight"]
    weight += 0.1 * weight.std() * torch.randn(weight.shape, dtype=weight.dtype, generator=Key(9).generator())
    assert bool((attack(scene).objective > 0.01).all())


def test_nan_update_diverges():
    scene = dense(nn.Linear(36, 4), labels=((0, 2), (1, 3)))
    scene.observation.update["1.weight"][1] = torch.nan
    found = attack(scene)
    assert found.status == ("converged", "diverged")
    assert bool(torch.isinf(found.objective[1]))
    assert bool(torch.isfinite(found.inputs).all())


def test_labels_can_be_read_off_the_update():
    scene = dense(nn.Linear(36, 4))
    assert torch.equal(attack(scene, "analytic(labels=idlg)").targets, scene.truth.targets)


@pytest.mark.parametrize("layers", [(nn.Linear(36, 4),), (nn.Linear(36, 64), nn.LeakyReLU(0.5), nn.Linear(64, 4))])
def test_batch_of_different_labels_is_separated(layers):
    scene = dense(*layers, labels=((0, 2, 3), (3, 1, 0)))
    found, truth = attack(scene).inputs, scene.truth.inputs
    own = (found - truth).square().flatten(2).mean(-1)
    mixed = (truth.mean(1, keepdim=True) - truth).square().flatten(2).mean(-1)
    assert bool((own < 0.5 * mixed).all()), (own, mixed)


def test_examples_of_one_label_are_reconstructed_as_their_mean():
    scene = dense(nn.Linear(36, 4), labels=((1, 1, 3),))
    found = attack(scene).inputs
    torch.testing.assert_close(found[0, 0], found[0, 1])
    mean = scene.truth.inputs[0, :2].mean(0)
    assert (found[0, 0] - mean).abs().mean() < 0.1


def test_unsuitable_models_raise_with_the_reason():
    scene = tiny()
    with pytest.raises(GradveilError, match="begins with a Conv2d '0', not with a linear layer of the 36 pixels"):
        attack(scene)
    frozen = dense(nn.Linear(36, 4))
    frozen.client = Client(frozen.client.model, trainable=("1.weight",))
    with pytest.raises(GradveilError, match="no sent parameter is added to each output"):
        attack(frozen)


@pytest.mark.parametrize("tied", [True, False])
def test_reused_first_layer_raises(tied):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 4)
            if tied:
                self.second.weight = self.first.weight

        def forward(self, x):
            again = self.second if tied else self.first
            return self.head(torch.tanh(again(torch.tanh(self.first(x.flatten(1))))))

    with pytest.raises(GradveilError, match=r"its first layer '1.first' (again|alone)"):
        attack(dense(Twice()))


class Embedded(nn.Module):
    """Patches of 2x2 pixels, embedded by a convolution or a linear layer; positions, with a class token or not."""

    def __init__(self, *, convolution: bool, token: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 12)) if token else None
        self.position = nn.Parameter(torch.zeros(9 + token, 12))
        self.embed = nn.Conv2d(1, 12, 2, stride=2) if convolution else nn.Linear(4, 12)
        self.mix, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        if isinstance(self.embed, nn.Conv2d):
            tokens = self.embed(x).flatten(2).transpose(1, 2)
        else:
            cut = x.unfold(2, 2, 2).unfold(3, 2, 2)
            tokens = self.embed(cut.reshape(len(x), 9, 4))
        if self.token is not None:
            tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        tokens = tokens + self.position
        mixed = torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ torch.tanh(self.mix(tokens))
        return self.head(mixed[:, 0] + torch.sin(mixed).sum(1))


def patches(*, target_clients=3, examples=1, **options):
    """A network that begins with an embedding of patches, and its clients' updates."""
    generator = Key(4).generator()
    model = Embedded(**options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.4, generator=generator)
    targets = torch.randint(0, 4, (target_clients, examples), generator=generator)
    inputs = torch.rand(target_clients, examples, 1, 6, 6, dtype=torch.float64, generator=generator)
    return observed(Client(model), Batch(inputs, targets), 4)


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("token", [True, False])
def test_gradient_of_positions_reveals_every_patch(convolution, token):
    scene = patches(convolution=convolution, token=token)
    found = attack(scene)
    torch.testing.assert_close(found.inputs, scene.truth.inputs, rtol=1e-6, atol=1e-6)
    assert bool((found.objective < 1e-10).all())


def test_model_may_require_pixels():
    """The search for the equations runs the model on pixels in the valid range."""
    scene = patches(convolution=False, token=True)

    def insist(_module, inputs):
        assert inputs[0].min() >= 0
        assert inputs[0].max() <= 1

    scene.client.model.register_forward_pre_hook(insist)
    torch.testing.assert_close(attack(scene).inputs, scene.truth.inputs, rtol=1e-6, atol=1e-6)


def test_noise_is_weighted_against_the_equations():
    """Plain least squares amplifies the noise if the errors of patches are similar; the ridge does not."""
    scene = patches(convolution=False, token=True)
    for name in ("embed.weight", "position"):
        value = scene.observation.update[name]
        value += 0.02 * value.std() * torch.randn(value.shape, dtype=value.dtype, generator=Key(9).generator())
    found = attack(scene).inputs
    errors = scene.observation.update["position"][:, 1:].transpose(1, 2)
    plain = torch.linalg.lstsq(errors, scene.observation.update["embed.weight"]).solution.clamp(0, 1)
    cut = scene.truth.inputs[:, 0, 0].unfold(1, 2, 2).unfold(2, 2, 2).reshape(3, 9, 4)
    ours = found[:, 0, 0].unfold(1, 2, 2).unfold(2, 2, 2).reshape(3, 9, 4)
    assert (ours - cut).square().mean() < (plain - cut).square().mean()


def test_patches_of_a_batch_and_frozen_positions_raise():
    with pytest.raises(GradveilError, match="the patches of 2 images are mixed"):
        attack(patches(convolution=False, token=True, examples=2))
    frozen = patches(convolution=False, token=True)
    frozen.client = Client(frozen.client.model, trainable=("embed.*", "mix.*", "head.*"))
    with pytest.raises(GradveilError, match="no sent parameter is added to each output"):
        attack(frozen)


def test_iterations_setting_raises():
    assert isinstance(make_attack("analytic"), Analytic)
    with pytest.raises(GradveilError, match="iterations"):
        make_attack("analytic(iterations=5)")
