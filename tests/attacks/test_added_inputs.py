"""Unmixing behind DCS separates the proxies too, and leaves them out without the ground truth."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.added_inputs import mixed_inputs
from gradveil.attacks.protocol import Prospect
from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch, Domain
from gradveil.defences import parse
from tests.attacks.test_unmix import DATA, SPACE, attack, certified, mixed, psnr

DCS = "dcs(iterations=40)"


def of_client(text: str, model: nn.Module, local: Local | None = None, members: int = 1) -> Client:
    public = DATA.inputs[100:116, :, 8:24, 8:24]
    domain = Domain(SPACE, 10, public, torch.arange(len(public)) % 10)
    return parse(text)(Client(model, local=local, members=members, domain=domain))


def concealed(text, examples, clients=1, local=None, members=1):
    """Updates of an MLP on patches of 16 x 16 pixels, and the noise that made them."""
    scene = mixed(examples, clients)
    client = of_client(text, scene.client.model, local, members)
    params, first = client.params(), Batch(scene.truth.inputs[0], scene.truth.targets[0])
    noise = stack([client.noise_spec(params, first).sample(Key(3).child(number)) for number in range(clients)])
    sent = client.updates(params, scene.truth, noise, {})[0]
    scene.client = client
    scene.observation = replace(scene.observation, update={name: value.detach() for name, value in sent.items()})
    return scene, noise


@pytest.mark.parametrize(("examples", "clients"), [(1, 2), (6, 2)])
@pytest.mark.parametrize("text", [DCS, "dcs(iterations=40, share=1)", "dcs(iterations=40, share=0, mix=false)"])
def test_all_images_are_exact_and_their_labels_right(text, examples, clients):
    """Some updates are not explained, and say so: rounding decides which, as the proxies are searched for."""
    scene, _ = concealed(text, examples, clients)
    found = attack(scene)
    explained = found.objective < 1e-8
    assert bool(explained.all() if text == DCS or examples == 1 else explained.any())
    assert bool((psnr(found, scene)[explained] > 60).all())
    assert all(count == 2 * examples for count, one in zip(certified(found)[0], explained, strict=True) if one)
    order, _ = SPACE.match(SPACE.view(found.inputs), SPACE.view(scene.truth.inputs))
    assert torch.equal(found.targets.gather(1, order)[explained], scene.truth.targets[explained])


@pytest.mark.parametrize(
    ("text", "local", "members"),
    [(DCS, None, 4), (DCS, Local(batch=4, lr=0.01, epochs=2), 1), (f"gaussian(1e-5) + {DCS}", None, 1)],
)
def test_sums_local_epochs_and_noise_end_it_no_more_than_without_proxies(text, local, members):
    scene, _ = concealed(text, 8, local=local, members=members)
    assert bool((psnr(attack(scene), scene) > 30).all())


def test_without_a_relu_images_are_told_apart_by_their_looks():
    scene, _ = concealed(DCS, 6)
    assert bool((psnr(attack(scene, "unmix(exact=never)"), scene, "ssim") > 0.5).all())


def test_the_objective_at_the_truth_repeats_the_search_of_the_proxies():
    scene, noise = concealed(DCS, 3)
    unmix = make_attack("unmix")
    known = replace(scene.knowledge, tensors=unmix.knowledge)
    arguments = [scene.observation], scene.client, known, Key(0)
    assert float(unmix.evaluate(*arguments, scene.truth.inputs, noise)) < 1e-8
    assert float(unmix.evaluate(*arguments, scene.truth.inputs.flip(1), noise)) > 1e-3


def test_every_proxy_takes_a_row_of_the_layer():
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 10))
    shape, steps = SPACE.shape, Local(batch=4, lr=0.01, epochs=2)
    assert [mixed_inputs(of_client(text, narrow), 8) for text in ("clip(1)", DCS)] == [8, 16]
    assert mixed_inputs(of_client(DCS, narrow, steps), 8) == 8 + 2 * 2 * 4
    assert mixed_inputs(of_client(DCS, narrow, steps, members=2), 16) == 16 + 2 * 2 * 2 * 4
    for text, refused in (("clip(1)", []), (DCS, ["16 images are mixed"])):
        problems = make_attack("unmix").problems(Prospect(of_client(text, narrow), shape, 8, 10, 16))
        assert [problem.what[:19] for problem in problems] == refused
