"""Servers that keep the architecture: images come back from a hidden layer; convolutions carry them there."""

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.malicious.carried_images import Decoder, carried, carrying, is_carried, way
from gradveil.attacks.malicious.fishing import Fishing
from gradveil.attacks.protocol import Active, Observation, Prospect
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.nn.models import build
from gradveil.nn.module_paths import features
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, LayerNorm

DIGITS = load("digits", size=16)
SPACE, SHAPE = DIGITS.private.space, (1, 16, 16)
PUBLIC = Batch(DIGITS.public.inputs, DIGITS.public.targets)


def known(batch=None):
    return Knowledge(SPACE, 10, public=PUBLIC, targets=None if batch is None else batch.targets[None])


def digits(count):
    return Batch(DIGITS.private.inputs[:count], DIGITS.private.targets[:count])


def perceptron(norm=None):
    torch.manual_seed(0)
    behind = [] if norm is None else [norm(256)]
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 256), *behind, nn.ReLU(), nn.Linear(256, 32), nn.Linear(32, 10))


def trained_statistics(width):
    norm = BatchStatistics(width)
    torch.nn.init.constant_(norm.weight, 5.0)
    return norm


def convolutional(norm=None):
    torch.manual_seed(0)
    between = [] if norm is None else [norm(8)]
    convs = [nn.Conv2d(1, 8, 3, stride=2, padding=1), *between, nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))


def errors(attack, model, batch, seed=0):
    """Return the relative squared error of the nearest reconstruction of each image, and the crafted client."""
    client, knowledge = Client(model), known(batch)
    sent = attack.craft(client, knowledge, Key(seed))
    params = sent.params()
    update, _ = sent.update(params, batch, {}, sent.init(params))
    seen = Observation(params, {n: v[None] for n, v in update.items()}, len(batch.targets), (0,))
    found = attack([seen], sent, knowledge, Key(seed))
    apart = (found.inputs[0].unsqueeze(0) - batch.inputs.unsqueeze(1)).square().flatten(2).mean(2).amin(1)
    return apart / batch.inputs.var(), sent


@pytest.mark.parametrize(
    ("text", "norm", "least"),
    [
        ("quantile", None, 24),
        ("quantile(part=0.25)", None, 16),
        ("quantile(place=norm)", LayerNorm, 16),
        ("quantile(place=norm)", BatchStatistics, 20),
        ("quantile(place=norm)", trained_statistics, 20),
        ("quantile(place=norm)", FrozenNorm, 24),
        ("quantile(place=statistics)", FrozenNorm, 24),
        ("conv-imprint", None, 28),
    ],
)
def test_most_of_a_batch_returns_from_a_hidden_layer(text, norm, least):
    apart, sent = errors(make_attack(text), perceptron(norm), digits(32))
    assert int((apart < 0.2).sum()) >= least
    assert torch.equal(sent.model[1].weight, perceptron(norm)[1].weight) is (text != "conv-imprint")


@pytest.mark.parametrize("text", ["quantile", "conv-imprint"])
@pytest.mark.parametrize("norm", [None, FrozenNorm])
def test_convolutions_carry_images_to_the_layer(text, norm):
    apart, _ = errors(make_attack(text), convolutional(norm), digits(16))
    assert int((apart < 0.01).sum()) >= 10


def test_decoder_restores_what_a_stride_leaves_out():
    model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator())
    data = load("digits", size=32)
    course, (lower, upper) = way(model, (1, 32, 32)), data.private.space.bounds(torch.zeros(()))
    assert course is not None
    assert course.layer == "body.block2.conv"
    carrying(model, course, lower.expand(1, 32, 32), upper.expand(1, 32, 32))
    decode, images = Decoder.fitted(model, course, data.public.inputs), data.private.inputs[:8]
    count = carried(model, course, (1, 32, 32))
    assert decode is not None
    decoded = decode(features(model, images, course.layer).flatten(1)[:, :count].double().detach())
    assert float((decoded - images.flatten(1)).square().mean() / images.var()) < 0.1


@pytest.mark.parametrize(
    ("model", "text", "where"),
    [
        (build("lenet-zhu", channels=1, size=16, classes=10, generator=Key(0).generator()), "quantile", "model"),
        (nn.Sequential(*convolutional()[:4], nn.MaxPool2d(2), nn.Flatten(), *perceptron()[1:]), "quantile", "model"),
        (perceptron(BatchStatistics), "quantile", "place"),
        (perceptron(), "quantile(place=norm)", "place"),
        (perceptron(LayerNorm), "quantile(place=statistics)", "place"),
        (perceptron(LayerNorm), "conv-imprint", "model"),
    ],
)
def test_unsuited_models_are_refused(model, text, where):
    problems = list(make_attack(text).problems(Prospect(Client(model), SHAPE, 8, 10, 100)))
    assert [problem.where for problem in problems] == [where]


def test_maximum_of_carried_pixels_carries_no_image():
    pooled = nn.Sequential(*convolutional()[:4], nn.MaxPool2d(2), nn.Flatten(), *perceptron()[1:])
    images = torch.rand((2, *SHAPE), generator=Key(0).generator())
    for model, carries in ((convolutional(), True), (pooled, False)):
        course = way(model, SHAPE)
        assert course is not None
        assert is_carried(model, course, images) is carries


def test_steering_leaves_the_loss_to_one_class():
    attack, batch = make_attack("steering(target=1)"), digits(64)
    client = Client(convolutional())
    assert isinstance(attack, Active)
    assert isinstance(attack, Fishing)
    sent = attack.craft(client, known(), Key(0))
    changed = [n for n, v in sent.params().items() if not torch.equal(v, client.params()[n])]
    assert changed == ["7.weight", "7.bias"]
    shares: list[float] = []
    for net in (client.model, sent.model):
        loss = nn.functional.cross_entropy(net(batch.inputs), batch.targets, reduction="none").detach()
        shares.append(float(loss[batch.targets == 1].sum() / loss.sum()))
    assert shares[1] > 0.9 > 0.3 > shares[0]


def test_steering_counts_its_class_and_searches_for_it():
    batch = digits(8)
    attack, count = make_attack("steering(target=1, iterations=2)"), int((batch.targets == 1).sum())
    sent = attack.craft(Client(convolutional()), known(), Key(0))
    update, _ = sent.update(sent.params(), batch, {}, {})
    seen = Observation(sent.params(), {n: v[None] for n, v in update.items()}, 8, (0,))
    groups, counted = attack._caught([seen], sent, known())
    assert [group.observation.examples for group in groups] == [count]
    assert counted[0].tolist() == [0, count, *[0] * 8]
    found = attack([seen], sent, known(batch), Key(0))
    assert found.inputs.shape == (1, 8, *SHAPE)
    blind = attack.problems(Prospect(Client(convolutional()), SHAPE, 8, 10, 0))
    assert [problem.where for problem in blind] == ["data.public"]
