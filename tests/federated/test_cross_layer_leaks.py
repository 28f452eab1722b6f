"""Examples that no single weight matrix of one round reveals: parallel layers, reparametrised weights, two rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.federated.update_inspection import Exposure, exposure
from gradveil.nn.initial_weights import initialise
from tests.federated.malicious_models import (
    PRIVATE,
    PUBLIC,
    Net,
    gradient,
    linear,
    moved_quantiles,
    perceptron,
    quantile,
)

HALF = 128


def some(count: int, start: int = 0) -> Batch:
    return Batch(PRIVATE.inputs[start : start + count], PRIVATE.targets[start : start + count])


def shown(net: nn.Module, batch: Batch, sent: dict[str, Tensor] | None = None) -> Exposure:
    client = Client(net)
    return exposure(client, client.params(), batch, gradient(net, batch) if sent is None else sent)


def recognised(rows: Tensor, shifts: Tensor, batch: Batch) -> int:
    """Count the images that are one of the quotients of rows and shifts, within 5% of the variance."""
    images = (rows.double() / shifts.double()[:, None])[shifts.abs() > 1e-9]
    truth = batch.inputs.flatten(1).double()
    errors = torch.cdist(images, truth).square().amin(0) / truth.shape[1]
    return int((errors < 0.05 * (truth - truth.mean(0)).square().mean()).sum())


class Parallel(nn.Module):
    """Two layers that take the same inputs, and one that adds up what both pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(256, HALF), nn.Linear(256, HALF)
        self.second, self.head = nn.Linear(256, 32), nn.Linear(32, 10)
        initialise(self, Key(0).generator())

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x.flatten(1)).relu(), self.right(x.flatten(1)).relu()], 1)
        return self.head(self.second(both).relu())


def parallel(batch: int, step: int = 5) -> Parallel:
    """Bins of one example between a row of the one layer and a row of the other; within a layer they have several."""
    net, generator, pixels, first = Parallel(), Key(4).generator(), PUBLIC.inputs.flatten(1), 0
    with torch.no_grad():
        while first < HALF:
            measure = torch.randn(256, generator=generator) / 16
            cuts = (torch.arange(0, batch, step) + step * torch.rand((), generator=generator)) / batch
            cuts = cuts[cuts + 1 / batch < 1][: HALF - first]
            rows = slice(first, first + len(cuts))
            for layer, more in ((net.left, 0), (net.right, 1)):
                layer.weight[rows] = measure
                layer.bias[rows] = -(pixels @ measure).quantile(cuts + more / batch)
            net.second.weight[:, rows] = net.second.weight[:, first : first + 1]
            net.second.weight[:, HALF + first : HALF + first + len(cuts)] = net.second.weight[:, first : first + 1]
            first += len(cuts)
    return net


@pytest.mark.parametrize(("size", "start"), [(64, 0), (64, 300), (128, 0), (128, 300)])
def test_rows_of_layers_with_the_same_inputs_are_compared_with_each_other(size: int, start: int) -> None:
    net, batch = parallel(size), some(size, start)
    update = gradient(net, batch)
    read = recognised(update["left.weight"] - update["right.weight"], update["left.bias"] - update["right.bias"], batch)
    assert read > 0.3 * size
    exposed = shown(net, batch)
    assert exposed.malice
    assert len(exposed.read) >= 0.7 * read
    assert not shown(Parallel(), batch).malice


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_convolution_with_one_position_is_a_linear_layer(size: int) -> None:
    """An imprint in 100 of 256 kernels as large as the image, of sizes from 0.5 to 1.5."""
    conv, second = nn.Conv2d(1, 256, 16), nn.Linear(256, 32)
    layers = {"first": conv, "a": nn.ReLU(), "flat": nn.Flatten(), "second": second, "b": nn.ReLU()}
    net, generator, batch = Net(0, **layers, head=nn.Linear(32, 10)), Key(4).generator(), some(size)
    assert not shown(net, batch).malice
    measure = torch.randn(256, generator=generator) / 16
    cuts = (PUBLIC.inputs.flatten(1) @ measure).quantile(torch.linspace(0, 1, 102)[1:-1])
    places, sizes = torch.randperm(256, generator=generator)[:100], 0.5 + torch.rand(100, generator=generator)
    assert conv.bias is not None
    with torch.no_grad():
        conv.weight[places] = (sizes[:, None] * measure).view(100, 1, 16, 16)
        conv.bias[places] = -cuts * sizes
        second.weight[:, places] = second.weight[:, places[:1]] / sizes
    update = gradient(net, batch)
    rows, shifts = update["first.weight"].flatten(1)[places] * sizes[:, None], update["first.bias"][places] * sizes
    read = recognised(rows.diff(dim=0), shifts.diff(), batch)
    exposed = shown(net, batch)
    assert len(exposed.read) >= 0.8 * read >= 0.15 * size
    assert exposed.malice


class Tied(nn.Module):
    """A layer whose weight goes by another layer's name."""

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.first = nn.Linear(256, 256), nn.Linear(256, 256)
        self.second, self.head = nn.Linear(256, 32), nn.Linear(32, 10)
        initialise(self, Key(0).generator())
        self.first.weight, self.first.bias = self.stored.weight, self.stored.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())


def _tied(batch: int) -> nn.Module:
    net = Tied()
    with torch.no_grad():
        net.first.bias.sub_(net.first(PUBLIC.inputs.flatten(1)).quantile(1 - 1 / batch, dim=0))
    return net


def _normed(batch: int) -> nn.Module:
    net = quantile(batch).model
    weight_norm(linear(net, "first"))
    return net


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("make", [_tied, _normed])
def test_weights_that_go_by_other_names_are_looked_at(make: Callable[[int], nn.Module], size: int) -> None:
    net, batch = make(size), some(size)
    exposed, update = shown(net, batch), gradient(net, batch)
    assert exposed.malice
    assert exposed.share > 0.4
    noise = Key(5).generator()
    noisy = {name: value + 0.1 * torch.randn(value.shape, generator=noise) for name, value in update.items()}
    assert not shown(net, batch, noisy).malice
    assert shown(net, batch, noisy).share < 0.1


def test_honest_weights_that_go_by_other_names_raise_no_alarm() -> None:
    normed = perceptron()
    weight_norm(linear(normed, "first"))
    for net in (normed, Tied()):
        assert not any(shown(net, some(size)).malice for size in (32, 64))


@pytest.mark.parametrize("size", [32, 64])
def test_what_two_rounds_show_together_is_a_leak(size: int) -> None:
    """Each of them alone shows what an honest model shows."""
    batch, (net, moved) = some(size), moved_quantiles(perceptron(), size)
    last, sent = gradient(net, batch), gradient(moved, batch)
    more = {name: sent[name] - last[name] for name in sent}
    read = recognised(more["first.weight"], more["first.bias"], batch)
    client = Client(moved)
    params = client.params()
    alone = exposure(client, params, batch, sent)
    assert read > 0.5 * size > 1.9 * len(alone.read)
    exposed = exposure(client, params, batch, sent, last=last)
    assert exposed.share >= 0.7 * read / size
    found = exposed.leak()
    assert found is not None
    assert "the difference from the last update shows" in found.evidence
    assert exposed.read == alone.read
    noise = Key(5).generator()
    noisy = {name: value + 0.01 * torch.randn(value.shape, generator=noise) for name, value in sent.items()}
    assert exposure(client, params, batch, noisy, last=last).share < 0.1


class Views(nn.Module):
    """A model that makes two examples of each: no layer gets the batch as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(256, 64), nn.Linear(64, 10)
        initialise(self, Key(0).generator())

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        both = self.head(self.first(torch.cat([x, -x])).relu())
        return both[: len(x)] + both[len(x) :]


def test_what_nobody_looked_at_is_named() -> None:
    turned = nn.Sequential(nn.ConvTranspose2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 18 * 18, 10))
    initialise(turned, Key(0).generator())
    normed = perceptron()
    weight_norm(linear(normed, "first"))
    unseen = {"first.weight", "head.weight"}
    for net, names in ((Views(), unseen), (turned, {"0.weight"}), (normed, set()), (Tied(), set())):
        assert set(shown(net, some(32)).unseen) == names
