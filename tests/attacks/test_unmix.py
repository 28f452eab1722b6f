"""Unmixing recovers whole batches behind a fully connected layer, and certifies true images only."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.independent_images import completed, differences, independent, spanned, whitening
from gradveil.attacks.protocol import Prospect
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.spaces import ImageSpace
from tests.attacks.small_experiments import observed, tiny

DATA = load("patches").private
SPACE = ImageSpace((3, 16, 16), DATA.mean, DATA.std)


def mixed(
    examples: int,
    clients: int = 1,
    act: type[nn.Module] = nn.ReLU,
    local: Local | None = None,
    members: int = 1,
    width: int = 256,
):
    """Updates of an MLP on patches of 16 x 16 pixels."""
    generator = Key(2).generator()
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, width), act(), nn.Linear(width, 64), act(), nn.Linear(64, 10))
    for parameter in net.parameters():
        bound = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.05
        nn.init.uniform_(parameter.data, -bound, bound, generator=generator)
    count = clients * examples
    images = DATA.inputs[:count, :, 8:24, 8:24].reshape(clients, examples, 3, 16, 16)
    batch = Batch(images, torch.arange(count).view(clients, examples) % 10)
    if local is None:
        return observed(Client(net, members=members), batch, 10, SPACE)
    scene = observed(Client(net), batch, 10, SPACE)
    client, params = Client(net, local=local), scene.observation.params
    order = client.noise_spec(params, Batch(images[0], batch.targets[0])).sample(Key(3))
    sent = client.updates(params, batch, {n: v.expand(clients, *v.shape) for n, v in order.items()}, {})[0]
    scene.client, scene.observation = (
        client,
        replace(scene.observation, update={n: v.detach() for n, v in sent.items()}),
    )
    return scene


def attack(scene, text="unmix"):
    knowledge = replace(scene.knowledge, targets=None)
    return make_attack(text)([scene.observation], scene.client, knowledge, Key(0))


def psnr(found, scene, score="psnr"):
    truth = SPACE.view(scene.truth.inputs)
    return SPACE.scores(SPACE.match(SPACE.view(found.inputs), truth)[1], truth)[score]


def certified(found):
    return [remark.numbers for remark in found.remarks if "certified" in remark.words]


def test_all_images_of_all_clients_are_exact_behind_relu():
    scene = mixed(12, clients=3)
    found = attack(scene)
    assert bool((psnr(found, scene) > 60).all())
    assert certified(found) == [(12, 12, 12)]
    assert bool((found.objective < 1e-8).all())
    order, _ = SPACE.match(SPACE.view(found.inputs), SPACE.view(scene.truth.inputs))
    assert torch.equal(found.targets.gather(1, order), scene.truth.targets)


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.GELU])
def test_images_are_separated_by_their_statistics_alone(act):
    scene = mixed(12, act=act)
    found = attack(scene)
    assert float(psnr(found, scene).median()) > 20
    assert certified(found) == []


@pytest.mark.parametrize(
    ("local", "members"), [(None, 4), (Local(batch=4, lr=0.01, epochs=5), 1), (Local(batch=8, lr=0.05, epochs=2), 1)]
)
def test_sums_of_clients_and_local_epochs_are_separated_too(local, members):
    scene = mixed(16, local=local, members=members)
    assert bool((psnr(attack(scene), scene) > 40).all())


@pytest.mark.parametrize("size", [0.01, 0.1])
def test_zeros_do_no_harm_under_noise(size):
    scene = mixed(12)
    disturb(scene, size)
    alone, polished = (psnr(attack(scene, text), scene) for text in ("unmix(exact=never)", "unmix"))
    assert float(polished.mean()) > float(alone.mean()) - 0.5


def disturb(scene, size):
    """Add noise in units of the gradient's root mean square."""
    generator, update = Key(8).generator(), scene.observation.update
    noise = size * update["1.weight"].square().mean().sqrt()
    sent = {name: v + noise * torch.randn(v.shape, generator=generator) for name, v in update.items()}
    scene.observation = replace(scene.observation, update=sent)


def test_noise_alone_gives_neither_images_nor_certificates():
    scene = mixed(12)
    disturb(scene, 10)
    found = attack(scene)
    assert certified(found) == [(0,)]
    assert not bool((psnr(found, scene, "ssim") > 0.5).any())


@pytest.mark.parametrize(("width", "seed"), [(40, 0), (64, 0), (64, 1)])
def test_narrow_layers_certify_no_wrong_image(width, seed):
    scene = mixed(24, width=width)
    client, knowledge = scene.client, replace(scene.knowledge, targets=None)
    found = make_attack("unmix")([scene.observation], client, knowledge, Key(seed))
    assert certified(found)[0][0] <= int((psnr(found, scene) > 30).sum())


def test_the_order_of_rows_does_not_matter():
    scene, turned = mixed(12), mixed(12)
    order = torch.randperm(256, generator=Key(4).generator())
    net = turned.client.model
    for name in ("1.weight", "1.bias"):
        net.get_parameter(name).data = net.get_parameter(name).data[order]
    net.get_parameter("3.weight").data = net.get_parameter("3.weight").data[:, order]
    turned = observed(replace(turned.client), turned.truth, 10, SPACE)
    torch.testing.assert_close(turned.observation.update["1.bias"], scene.observation.update["1.bias"][:, order])
    assert bool((psnr(attack(turned), turned) > 60).all())


def test_a_batch_of_clients_is_separated_like_each_alone():
    scene = mixed(6, clients=2, act=nn.Sigmoid)
    seen = scene.observation
    alone = replace(seen, update={n: v[1:] for n, v in seen.update.items()}, target_clients=seen.target_clients[1:])
    found = attack(scene).inputs[1:]
    torch.testing.assert_close(found, attack(replace(scene, observation=alone)).inputs, atol=2e-3, rtol=0)


def test_equal_images_are_found_once_and_counted():
    scene = mixed(6)
    twice = Batch(scene.truth.inputs[:, [0, 1, 2, 3, 4, 4]], scene.truth.targets[:, [0, 1, 2, 3, 4, 4]])
    scene = observed(scene.client, twice, 10, SPACE)
    found = attack(scene)
    assert int((psnr(found, scene) > 60).sum()) == 5
    assert [remark.numbers for remark in found.remarks if "mean image" in remark.words] == [(5,)]


def test_pruned_entries_are_missing_values_not_zeros():
    scene = mixed(6)
    client = parse("prune(0.6)")(scene.client)
    scene = observed(client, scene.truth, 10, SPACE)
    believing = psnr(attack(scene), scene)
    scene.client = client.undefended_update()
    assert float(believing.median()) > float(psnr(attack(scene), scene).median()) + 1


def test_an_update_without_the_bias_gradient_of_the_first_layer_is_attacked_all_the_same():
    scene = mixed(4)
    scene = observed(parse("prune(0.995, scope=global)")(scene.client), scene.truth, 10, SPACE)
    assert not scene.observation.update["1.bias"].any()
    assert bool(torch.isfinite(attack(scene).inputs).all())


def test_nan_update_diverges():
    scene = mixed(6, clients=2)
    scene.observation.update["1.weight"][1, 0, 0] = torch.nan
    found = attack(scene)
    assert found.status == ("converged", "diverged")
    assert bool(torch.isfinite(found.inputs).all())


@pytest.mark.parametrize(
    ("model", "examples", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10)), 8, "begins with a Conv2d"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), 10, "10 images"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), 1, "one image"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=False)), 4, "bias"),
    ],
)
def test_models_and_batches_that_do_not_fit_are_refused(model, examples, words):
    problems = list(make_attack("unmix").problems(Prospect(Client(model), SPACE.shape, examples, 10, 0)))
    assert any(words in problem.what for problem in problems), problems


def test_convolutional_models_raise_with_the_reason():
    scene = tiny(examples=4)
    with pytest.raises(GradveilError, match="begins with a Conv2d"):
        attack(scene)


def test_separation_agrees_with_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    images = SPACE.view(DATA.inputs[:8, :, 8:24, 8:24]).double().flatten(1)
    mixing = torch.randn(40, 8, dtype=torch.float64, generator=Key(1).generator())
    span = spanned((mixing @ images).unsqueeze(0), 8)
    features = differences(span.right, SPACE.shape)
    white = whitening(features)
    starts = torch.randn(3, 8, 8, dtype=torch.float64, generator=Key(2).generator())
    ours = independent(white.expand(3, -1, -1) @ features, starts) @ white @ features
    fitted = decomposition.FastICA(whiten="unit-variance", fun="exp", random_state=0, max_iter=1000, tol=1e-6)
    theirs = torch.from_numpy(fitted.fit_transform(features[0].T.numpy()).T)
    truth = differences(images, SPACE.shape)
    found = [torch.corrcoef(torch.cat([each, truth]))[:8, 8:].abs().amax(1).mean() for each in (*ours, theirs)]
    assert max(found[:3]) > found[3] - 0.01


def test_completion_restores_a_matrix_of_low_rank():
    generator = Key(5).generator()
    whole = torch.randn(1, 40, 4, generator=generator) @ torch.randn(1, 4, 60, generator=generator)
    known = torch.rand(whole.shape, generator=generator) < 0.7
    error = (completed(torch.where(known, whole, 0.0).double(), known, 4) - whole).norm() / whole.norm()
    assert error < 0.05
