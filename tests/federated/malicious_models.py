"""Models as malicious servers craft them, so that one gradient of a batch holds single examples in closed form.

Each function changes a copy of an honest model. `reconstructed` is the attack that all of them serve: it sees the
parameters and the raw update alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.nn.initial_weights import initialise
from gradveil.nn.module_paths import caught_inputs
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, LayerNorm

WIDTH = 256
_DIGITS = load("digits", size=16)
PUBLIC = Batch(_DIGITS.public.inputs, _DIGITS.public.targets)
"""Images of the server."""
PRIVATE = Batch(_DIGITS.private.inputs, _DIGITS.private.targets)
"""Images of the clients."""


def unscaled(batch: Batch) -> Batch:
    """Return images as their files have them, with pixels from 0 to 255."""
    least, most = PUBLIC.inputs.min(), PUBLIC.inputs.max()
    return Batch(255 * (batch.inputs - least) / (most - least), batch.targets)


class Net(nn.Module):
    """A chain of layers with names."""

    def __init__(self, seed: int = 0, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        initialise(self, Key(seed).generator())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def perceptron(seed: int = 0, *, norm: Callable[[int], nn.Module] | None = None, hidden: int = 32) -> Net:
    """Two hidden layers, with a norm behind the first if one is given."""
    between = {} if norm is None else {"norm": norm(WIDTH)}
    first, second = nn.Linear(256, WIDTH), nn.Linear(WIDTH, hidden)
    last = nn.Linear(hidden, 10)
    return Net(seed, flat=nn.Flatten(), first=first, **between, a=nn.ReLU(), second=second, b=nn.ReLU(), head=last)


def leaky(net: Net) -> Net:
    """Put leaky activations behind the first layer: no error is zero any more."""
    net.add_module("a", nn.LeakyReLU())
    return net


def network(seed: int = 0) -> Net:
    """A convolution before the hidden layer."""
    conv = nn.Conv2d(1, 4, 3, padding=1)
    hidden = nn.Linear(4 * 256, WIDTH)
    return Net(seed, conv=conv, a=nn.ReLU(), flat=nn.Flatten(), first=hidden, b=nn.ReLU(), head=nn.Linear(WIDTH, 10))


class Crafted(NamedTuple):
    """A manipulated model, the honest one that it was, and the layer whose input is read."""

    honest: Net
    model: Net
    layer: str
    order: Tensor | None = None
    """Units whose bins follow each other, where examples are in the differences of rows."""
    scale: Tensor | None = None
    """What each unit's row is multiplied by before that."""
    solve: Tensor | None = None
    """Inverses [bins, r, r] of what the r units of a bin, `order` [bins, r], pass on: rows are solved before that."""


def outputs(net: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """Return what the module at a path puts out."""
    caught: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, out: Tensor) -> None:
        caught.append(out)

    hook = net.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        net(inputs)
    hook.remove()
    return caught[0]


def entering(net: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """Return what the module at a path takes."""
    with torch.no_grad(), caught_inputs(net, path) as caught:
        net(inputs)
    return caught[-1]


def linear(net: nn.Module, path: str) -> nn.Linear:
    """Return the linear layer at a path."""
    layer = net.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _cut(net: Net, path: str, batch: int, rows: slice | Tensor = slice(None)) -> None:
    """Move biases at a path so that one public image of a batch passes each unit, on average."""
    out = outputs(net, path, PUBLIC.inputs)
    bias = net.get_submodule(path).bias
    assert isinstance(bias, Tensor)
    with torch.no_grad():
        bias[rows] = (bias - out.quantile(1 - 1 / batch, dim=0))[rows]


def quantile(batch: int, share: float = 1.0) -> Crafted:
    """Honest weights; biases of the first layer at a quantile of its outputs (Nowak et al. 2024)."""
    honest = perceptron()
    net = copy.deepcopy(honest)
    _cut(net, "first", batch, slice(round(share * WIDTH)))
    return Crafted(honest, net, "first")


def some_quantiles(batch: int) -> Crafted:
    """The same in a quarter of the units."""
    return quantile(batch, 0.25)


def faint(batch: int, share: float = 0.45, size: float = 1e-11) -> Crafted:
    """Quantile biases in units whose outgoing weights are next to nothing, and with them their rows: but each is exact.

    All images pass the other units.
    """
    made, count = quantile(batch, share), round(share * WIDTH)
    first, second = linear(made.model, "first"), linear(made.model, "second")
    with torch.no_grad():
        second.weight[:, :count] *= size
        first.bias[count:] -= outputs(made.model, "first", PUBLIC.inputs).amin(0)[count:]
    return made


def silent(batch: int, share: float = 0.6) -> Net:
    """Quantile biases in units that nothing goes out from: no error reaches them, and the next layer's columns tell.

    All images pass the other units, and half of them each unit of the layer behind.
    """
    net, count = faint(batch, share, 0.0).model, round(share * WIDTH)
    second = linear(net, "second")
    with torch.no_grad():
        second.weight[:, count:] /= (1 - share) ** 0.5
        second.bias.sub_(outputs(net, "second", PUBLIC.inputs).median(0).values)
    return net


def moved_quantiles(net: Net, batch: int) -> tuple[Net, Net]:
    """The models of two rounds: outgoing weights times 0.01, then biases by which each unit loses one example more."""
    with torch.no_grad():
        linear(net, "second").weight.mul_(0.01)
        moved, out = copy.deepcopy(net), outputs(net, "first", PUBLIC.inputs)
        shares = (out < 0).float().mean(0) + 1 / batch
        steps = [
            unit.quantile(share.clamp(max=1)) - unit.quantile(share - 1 / batch)
            for unit, share in zip(out.T, shares, strict=True)
        ]
        linear(moved, "first").bias.sub_(torch.stack(steps))
    return net, moved


def norm_bias(batch: int) -> Crafted:
    """The biases of a layer normalisation in the place of those of the layer."""
    honest = perceptron(norm=LayerNorm)
    net = copy.deepcopy(honest)
    _cut(net, "norm", batch)
    return Crafted(honest, net, "first")


def batch_norm_bias(batch: int) -> Crafted:
    """The biases of a batch normalisation in training mode: -1.9 standard deviations."""
    honest = perceptron(norm=BatchStatistics)
    net = copy.deepcopy(honest)
    _cut(net, "norm", batch)
    return Crafted(honest, net, "first")


def running_mean(batch: int) -> Crafted:
    """The running means of a batch normalisation in evaluation mode: a client takes them with the model."""
    honest = perceptron(norm=FrozenNorm)
    norm, out = honest.get_submodule("norm"), outputs(honest, "first", PUBLIC.inputs)
    assert isinstance(norm, FrozenNorm)
    norm.running_mean.copy_(out.mean(0))
    norm.running_var.copy_(out.var(0))
    net = copy.deepcopy(honest)
    moved = net.get_submodule("norm")
    assert isinstance(moved, FrozenNorm)
    moved.running_mean.copy_(out.quantile(1 - 1 / batch, dim=0))
    return Crafted(honest, net, "first")


def kept_by_kernel(batch: int) -> Crafted:
    """A convolution that passes the image on, nearly, and quantile biases behind it."""
    honest = network()
    net = copy.deepcopy(honest)
    conv = net.get_submodule("conv")
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    with torch.no_grad():
        conv.weight[0] *= 0.1
        conv.weight[0, 0, 1, 1] = 1.0
        conv.bias[0] = 1.5
    _cut(net, "first", batch)
    return Crafted(honest, net, "first")


def fishing(_batch: int, norm: Callable[[int], nn.Module] | None = None) -> Crafted:
    """The last layer's rows of all classes but one times 0.002, its bias lower: one class moves the other layers."""
    honest = perceptron(norm=norm)
    net = copy.deepcopy(honest)
    head = linear(net, "head")
    with torch.no_grad():
        head.weight[torch.arange(10) != 3] *= 0.002
        head.bias[3] = head.bias.max() - 9
    return Crafted(honest, net, "first")


def trap(batch: int) -> Crafted:
    """Rows with 35% to 65% negative weights, scaled until one image of a batch passes each (Boenisch et al. 2023)."""
    honest = perceptron()
    net, generator = copy.deepcopy(honest), Key(3).generator()
    first = linear(net, "first")
    images = PUBLIC.inputs.flatten(1) - PUBLIC.inputs.min()
    with torch.no_grad():
        for row in first.weight:
            negative = int(torch.randint(90, 167, (), generator=generator))
            size = torch.randn(256, generator=generator).abs() / 16
            places = torch.randperm(256, generator=generator)
            row[places] = size
            row[places[:negative]] *= -1
            ratios = (images @ row.clamp(max=0)).neg() / (images @ row.clamp(min=0)).clamp(min=1e-6)
            row[places[negative:]] *= ratios.quantile(1 / batch)
        first.bias.copy_(-PUBLIC.inputs.min() * first.weight.sum(1))
    return Crafted(honest, net, "first")


def trap_without_biases(batch: int) -> Crafted:
    """The same for images whose pixels are not negative, such as `unscaled`: nothing is left without the weights."""
    made = trap(batch)
    with torch.no_grad():
        linear(made.model, "first").bias.zero_()
    return made


def _bins(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a measure [256] and the thresholds that cut its range on public images into equal bins."""
    measure = torch.randn(256, generator=generator) / 16
    values = PUBLIC.inputs.flatten(1) @ measure
    return measure, values.quantile(torch.linspace(0, 1, count + 2)[1:-1])


def imprint(_batch: int, share: float = 1.0) -> Crafted:
    """Copies of one measure, biases that cut its range into bins (Fowl et al. 2022), and a layer that adds them up."""
    honest = perceptron()
    net, generator, count = copy.deepcopy(honest), Key(4).generator(), round(share * WIDTH)
    measure, cuts = _bins(count, generator)
    first, second = linear(net, "first"), linear(net, "second")
    with torch.no_grad():
        places = torch.randperm(WIDTH, generator=generator)[:count]
        first.weight[places], first.bias[places] = measure, -cuts
        second.weight[:, places] = second.weight[:, places[:1]]
    return Crafted(honest, net, "first", places)


def part_of_an_imprint(batch: int) -> Crafted:
    """The same in 45% of the rows, whose sizes differ by up to a tenth."""
    made = imprint(batch, 0.45)
    first, second = linear(made.model, "first"), linear(made.model, "second")
    assert made.order is not None
    sizes = torch.ones(WIDTH)
    sizes[made.order] += 0.1 * torch.rand(len(made.order), generator=Key(5).generator())
    with torch.no_grad():
        first.weight *= sizes[:, None]
        first.bias.mul_(sizes)
        second.weight /= sizes
    return made._replace(scale=sizes)


def hidden_imprint(batch: int) -> Crafted:
    """Random weights on pixels that are never inked hide that the rows are copies; the next layer is jittered."""
    made = imprint(batch)
    first, second = linear(made.model, "first"), linear(made.model, "second")
    pixels = PUBLIC.inputs.flatten(1)
    empty = pixels.std(0).argsort()[:16]
    generator = Key(6).generator()
    with torch.no_grad():
        before = first.weight[:, empty].clone()
        first.weight[:, empty] = torch.randn(WIDTH, 16, generator=generator) / 4
        first.bias.sub_((first.weight[:, empty] - before) @ pixels.median(0).values[empty])
        second.weight *= 1 + 1e-3 * torch.randn(second.weight.shape, generator=generator)
    return made


def latent(batch: int) -> Crafted:
    """Convolutions that lose nothing of an image, and an imprint in the layer behind (Shi et al. 2025, Scale-MIA)."""
    convs = {"c1": nn.Conv2d(1, 4, 2, stride=2), "a1": nn.LeakyReLU(0.3), "c2": nn.Conv2d(4, 16, 2, stride=2)}
    rest = {"flat": nn.Flatten(), "first": nn.Linear(256, WIDTH), "b": nn.ReLU(), "head": nn.Linear(WIDTH, 10)}
    honest = Net(7, **convs, a2=nn.LeakyReLU(0.3), **rest)
    net, generator = copy.deepcopy(honest), Key(8).generator()
    with torch.no_grad():
        for name in ("c1", "c2"):
            conv = net.get_submodule(name)
            assert isinstance(conv, nn.Conv2d)
            basis = torch.linalg.qr(torch.randn(conv.weight[0].numel(), len(conv.weight), generator=generator)).Q
            conv.weight.copy_(basis.T.reshape(conv.weight.shape))
        first, head = linear(net, "first"), linear(net, "head")
        first.weight.copy_(torch.randn(256, generator=generator) / 16)
        values = outputs(net, "a2", PUBLIC.inputs).flatten(1) @ first.weight[0]
        first.bias.copy_(-values.quantile(torch.linspace(0, 1, WIDTH + 2)[1:-1]))
        head.weight.copy_(head.weight[:, :1].expand(-1, WIDTH))
    return Crafted(honest, net, "first", torch.arange(WIDTH))


def flipped(batch: int) -> Crafted:
    """Copies with either sign and sizes between 0.5 and 1.5, each passed by one image of a batch or by all but one."""
    honest = perceptron()
    net, generator = copy.deepcopy(honest), Key(9).generator()
    measure, cuts = _bins(WIDTH, generator)
    first, second = linear(net, "first"), linear(net, "second")
    sizes = 0.5 + torch.rand(WIDTH, generator=generator)
    signs = torch.ones(WIDTH)
    signs[WIDTH // 2 :] = -1
    with torch.no_grad():
        first.weight.copy_((sizes * signs)[:, None] * measure)
        first.bias.copy_(-sizes * signs * cuts)
        second.weight.copy_(second.weight[:, :1] / sizes)
    return Crafted(honest, net, "first", torch.arange(WIDTH), sizes)


def split(batch: int) -> Crafted:
    """An imprint over two layers: a random rotation that all images pass, then rows that look Gaussian.

    The second layer's rows are one measure of the image, rotated, and noise where no image has anything.
    """
    honest = perceptron(hidden=128)
    net, generator = copy.deepcopy(honest), Key(10).generator()
    pixels = PUBLIC.inputs.flatten(1)
    first, second = linear(net, "first"), linear(net, "second")
    rotation = torch.linalg.qr(torch.randn(WIDTH, 256, generator=generator)).Q
    _, _, axes = torch.linalg.svd(pixels - pixels.mean(0))
    quiet = axes[-96:]  # directions in which images differ least
    measure, _ = _bins(1, generator)
    with torch.no_grad():
        first.weight.copy_(rotation)
        first.bias.copy_(1 - (pixels @ rotation.T).amin(0))
        noise = torch.randn(128, len(quiet), generator=generator) @ quiet
        rows = measure + 0.5 * noise / noise.norm(dim=1, keepdim=True) * measure.norm()
        second.weight.copy_(rows @ rotation.T)
        second.bias.zero_()
        out = outputs(net, "second", PUBLIC.inputs)
        second.bias.copy_(-torch.stack([out[:, k].quantile((k + 1) / 129) for k in range(128)]))
        head = linear(net, "head")
        head.weight.copy_(head.weight[:, :1].expand(-1, 128))
    return Crafted(honest, net, "second", torch.arange(128))


def pencil(_batch: int, honest_units: int = 64) -> Crafted:
    """Three units per bin, with noise of their own where images differ least, that pass on three numbers.

    No row and no difference of two rows shows an image: only those of three solved rows do. A quarter of the units
    stays honest.
    """
    honest = perceptron()
    net, generator = copy.deepcopy(honest), Key(11).generator()
    pixels = PUBLIC.inputs.flatten(1)
    _, _, axes = torch.linalg.svd(pixels - pixels.mean(0))
    measure = torch.randn(40, generator=generator) @ axes[:40]
    measure /= measure.norm()
    bins = (WIDTH - honest_units) // 3
    order = torch.randperm(WIDTH, generator=generator)[: 3 * bins].view(bins, 3)
    cuts = (pixels @ measure).quantile(torch.linspace(0, 0.85, bins)).repeat_interleave(3)
    noise = torch.randn(3 * bins, 96, generator=generator) @ axes[-96:]
    noise *= 5 / noise.norm(dim=1, keepdim=True)
    mixed = torch.linalg.qr(torch.randn(bins, 3, 3, generator=generator)).Q
    mixed += 0.3 * torch.randn(bins, 3, 3, generator=generator)
    first, second = linear(net, "first"), linear(net, "second")
    with torch.no_grad():
        first.weight[order.flatten()] = 0.35 * (measure + noise)
        first.bias[order.flatten()] = -0.35 * (cuts + noise @ pixels.mean(0))
        second.weight *= (WIDTH / honest_units) ** 0.5
        three = torch.randn(len(second.weight), 3, generator=generator)
        second.weight[:, order.flatten()] = 0.01 * three @ mixed.flatten(0, 1).T
        second.bias.add_(0.3)
    return Crafted(honest, net, "first", order, solve=torch.linalg.inv(mixed))


CRAFTED: dict[str, Callable[[int], Crafted]] = {
    made.__name__: made
    for made in (
        quantile,
        some_quantiles,
        faint,
        norm_bias,
        batch_norm_bias,
        running_mean,
        kept_by_kernel,
        fishing,
        trap,
        imprint,
        part_of_an_imprint,
        hidden_imprint,
        latent,
        flipped,
        split,
        pencil,
    )
}


def gradient(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the mean gradient of a batch."""
    loss = F.cross_entropy(net(batch.inputs), batch.targets)
    trained = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def candidates(made: Crafted, update: dict[str, Tensor]) -> Tensor:
    """Compute what the server reads: dW_i / dc_i, and the same of differences of the rows that it made neighbours."""
    weight, normed = update[f"{made.layer}.weight"], "norm.bias" in update
    shift = update["norm.bias"] if normed else update[f"{made.layer}.bias"]
    rows, shifts = [weight], [shift]
    if made.order is not None and made.solve is not None:
        rows.append((made.solve @ weight[made.order]).diff(dim=0).flatten(0, 1))
        shifts.append((made.solve @ shift[made.order][..., None]).diff(dim=0).flatten())
    elif made.order is not None:
        scale = torch.ones(len(weight)) if made.scale is None else made.scale
        rows.append((weight * scale[:, None])[made.order].diff(dim=0))
        shifts.append((shift * scale)[made.order].diff())
    row, by = torch.cat(rows), torch.cat(shifts)
    sound = by != 0
    images = row[sound] / by[sound][:, None]
    if isinstance(made.model.get_submodule("norm") if normed else None, BatchStatistics):
        # A norm over the batch takes off the mean and the trend along the unit: public images have nearly the same.
        out, pixels = outputs(made.model, "first", PUBLIC.inputs), PUBLIC.inputs.flatten(1)
        trend = ((out - out.mean(0)) / out.std(0)).T @ pixels / len(pixels)
        slope = update["norm.weight"][sound] / by[sound]
        images = images * out.std(0)[sound][:, None] + slope[:, None] * trend[sound] + pixels.mean(0)
    return images


def reconstructed(made: Crafted, update: dict[str, Tensor], batch: Batch, most: float = 0.05) -> int:
    """Count the examples that a candidate is, but for its scale and this share of the inputs' variance."""
    truth, images = entering(made.model, made.layer, batch.inputs), candidates(made, update)
    images = images[images.isfinite().all(1)]
    factor = images @ truth.T / images.square().sum(1)[:, None].clamp(min=1e-30)
    errors = (truth.square().sum(1) - factor * (images @ truth.T)) / truth.shape[1]
    return int((errors.amin(0) < most * (truth - truth.mean(0)).square().mean()).sum())
