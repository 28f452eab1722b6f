"""With a prior of public images, the analytic attack works against pruning and additive noise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.disturbed import Disturbance, images_like, likeliest, prior_problems, uncertain
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.attacks.small_experiments import observed
from tests.attacks.test_analytic import attack, dense, patches


def sent_by(defence, target_clients=6):
    """A defended client's updates of smooth images, which public images of the same kind resemble."""
    scene = patches(convolution=False, token=True, target_clients=target_clients)
    basis = torch.linspace(0, 3, 6, dtype=torch.float64)
    draw = Key(5).generator()
    slopes, turns = (torch.rand(target_clients + 64, 2, 1, 1, dtype=torch.float64, generator=draw) for _ in range(2))
    waves = torch.sin(basis.view(1, 6, 1) * slopes[:, 0] + 6 * turns[:, 0])
    waves = waves * torch.cos(basis.view(1, 1, 6) * slopes[:, 1] + 6 * turns[:, 1])
    images = ((1 + waves) / 2).view(-1, 1, 1, 6, 6)
    truth = Batch(images[:target_clients], torch.randint(0, 4, (target_clients, 1), generator=draw))
    client = parse(defence)(scene.client)
    scene = observed(replace(client, step=None, send=None), truth, 4)
    public = Batch(images[target_clients:, 0], torch.randint(0, 4, (64,), generator=draw))
    scene.knowledge = replace(scene.knowledge, public=public)
    params = scene.observation.params
    spec = client.noise_spec(params, Batch(truth.inputs[0], truth.targets[0]))
    noise = stack([spec.sample(Key(6).child(row)) for row in range(target_clients)])
    sent, _ = client.updates(params, truth, noise, {})
    scene.observation = replace(scene.observation, update=sent)
    scene.client = client
    return scene


def mean_error(scene, text):
    return float((attack(scene, text).inputs - scene.truth.inputs).square().mean())


@pytest.mark.parametrize("defence", ["prune(0.3)", "prune(0.5)", "dp(clip=20, sigma=1e-3)"])
def test_prior_and_defence_knowledge_help(defence):
    scene = sent_by(defence)
    assert mean_error(scene, "analytic(prior=public)") < 0.7 * mean_error(scene, "analytic")


def test_prior_keeps_undefended_images_exact():
    scene = sent_by("none")
    found = attack(scene, "analytic(prior=public)")
    torch.testing.assert_close(found.inputs, scene.truth.inputs, rtol=1e-4, atol=1e-4)
    assert bool((found.objective < 1e-6).all())


def test_the_likeliest_image_is_the_posterior_mean_where_everything_is_normal():
    """The reference: an image from the prior, with known equations and normal noise, has a known posterior."""
    draw = Key(7).generator()
    images = images_like(torch.rand(200, 1, 4, 4, dtype=torch.float64, generator=draw))
    z = torch.randn(4, 30, dtype=torch.float64, generator=draw)
    pixels = torch.arange(16).view(4, 4)
    truth = images.mean + torch.linalg.cholesky(images.covariance) @ torch.randn(
        16, dtype=torch.float64, generator=draw
    )
    weight = z.T @ truth[pixels] + 0.3 * torch.randn(30, 4, dtype=torch.float64, generator=draw)
    exact, noisy = (Disturbance(torch.tensor(v, dtype=torch.float64), torch.zeros(())) for v in (0.0, 0.09))
    found = likeliest(uncertain(z, weight, exact, noisy), pixels, images)
    design = torch.zeros(30, 4, 16, dtype=torch.float64)
    for place in range(4):
        design[:, place, pixels[:, place]] = z.T
    design, seen = design.flatten(0, 1), weight.flatten()
    gain = (
        images.covariance @ design.T @ torch.linalg.inv(design @ images.covariance @ design.T + 0.09 * torch.eye(120))
    )
    torch.testing.assert_close(found, images.mean + gain @ (seen - design @ images.mean), rtol=1e-6, atol=1e-8)


def test_unsuitable_data_for_a_prior_raise():
    scene = patches(convolution=False, token=True)
    with pytest.raises(GradveilError, match="no public images"):
        attack(scene, "analytic(prior=public)")
    batch = dense(nn.Linear(36, 4), labels=((0, 2), (1, 3)))
    batch.knowledge = replace(batch.knowledge, public=Batch(torch.rand(8, 1, 6, 6).double(), torch.zeros(8).long()))
    with pytest.raises(GradveilError, match="a prior is for one image, and an update has 2"):
        attack(batch, "analytic(prior=public)")
    (problem,) = prior_problems((3, 64, 64), 1, public=True)
    assert "12288 values" in problem.what
    assert not list(prior_problems((3, 32, 32), 1, public=True))


def test_evaluate_uses_the_equations_of_the_attack():
    """At its reconstructions, the objective equals the reported one; at other images it is higher."""
    scene = sent_by("prune(0.3)")
    attacker = make_attack("analytic(prior=public)")
    found = attack(scene, "analytic(prior=public)")

    def judged(inputs):
        return attacker.evaluate([scene.observation], scene.client, scene.knowledge, Key(0), inputs, {})

    inside = (found.inputs > 0).flatten(1).all(1) & (found.inputs < 1).flatten(1).all(1)
    assert bool(inside.any()), "an answer cut to its box is not what the objective was told of"
    torch.testing.assert_close(judged(found.inputs)[inside], found.objective[inside])
    assert bool((judged(1 - scene.truth.inputs) > 2 * found.objective).all())


def test_nan_update_diverges_with_a_prior():
    scene = sent_by("prune(0.3)")
    scene.observation.update["embed.weight"][1] = torch.nan
    found = attack(scene, "analytic(prior=public)")
    assert found.status[1] == "diverged"
    assert found.status.count("converged") == 5
    assert bool(torch.isinf(found.objective[1]))
    assert bool(torch.isfinite(found.inputs).all())
