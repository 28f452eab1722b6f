"""Honest models: fresh under several initialisations, trained, normalised, adapted, pruned, quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.nn.models import build
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, LayerNorm
from tests.federated.malicious_models import PUBLIC, Net, entering, leaky, network, perceptron, unscaled

Initialisation = Callable[..., Any]


def convnet(seed: int = 0, norm: Callable[[int], nn.Module] | None = None) -> Net:
    """Two convolutions and two linear layers."""
    norms = {} if norm is None else {"n1": norm(16), "n2": norm(32)}
    layers: dict[str, nn.Module] = {"c1": nn.Conv2d(1, 16, 5, stride=2, padding=2)}
    layers |= {"n1": norms["n1"]} if norms else {}
    layers |= {"a1": nn.ReLU(), "c2": nn.Conv2d(16, 32, 5, stride=2, padding=2)}
    layers |= {"n2": norms["n2"]} if norms else {}
    layers |= {"a2": nn.ReLU(), "flat": nn.Flatten(), "first": nn.Linear(512, 128), "a3": nn.ReLU()}
    return Net(seed, **layers, head=nn.Linear(128, 10))


def deep(seed: int = 0) -> Net:
    """Three hidden layers."""
    layers: dict[str, nn.Module] = {"flat": nn.Flatten()}
    for number in range(3):
        layers |= {f"l{number}": nn.Linear(256, 256), f"a{number}": nn.ReLU()}
    return Net(seed, **layers, head=nn.Linear(256, 10))


def wide(seed: int = 0) -> Net:
    """A first layer of 1,024 units."""
    layers = {"first": nn.Linear(256, 1024), "a": nn.ReLU(), "second": nn.Linear(1024, 64), "b": nn.ReLU()}
    return Net(seed, flat=nn.Flatten(), **layers, head=nn.Linear(64, 10))


class Residual(nn.Module):
    """x + a block of two convolutions, whose last norm may start at zero."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet(seed: int = 0, norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(2, n), zero: str = "") -> Net:
    """A small residual network; `zero` names the part of its blocks that starts at zero."""
    blocks = {"b1": Residual(16, norm), "b2": Residual(16, norm)}
    start = {"stem": nn.Conv2d(1, 16, 3, stride=2, padding=1), "n": norm(16), "a": nn.ReLU()}
    net = Net(seed, **start, **blocks, pool=nn.AvgPool2d(4), flat=nn.Flatten(), head=nn.Linear(64, 10))
    for name, parameter in net.named_parameters():
        if zero and f".{zero}." in name:
            nn.init.zeros_(parameter)
    return net


class Adapted(nn.Module):
    """A linear layer that is frozen, and a product of two small ones that is trained (LoRA): B starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=0.05, generator=Key(3).generator())
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted(seed: int = 0) -> Net:
    """A network with adapters of rank 16 in its linear layers."""
    net = trained(wide(seed), 3)
    for name in ("first", "second"):
        layer = net.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(net, name, Adapted(layer, 16))
    return net


def vit(seed: int = 0) -> nn.Module:
    """A small vision transformer."""
    options = {"width": 64, "blocks": 2, "heads": 4}
    return build("vit", channels=1, size=16, classes=10, generator=Key(seed).generator(), **options)


def named(name: str, size: int = 16) -> Callable[[], nn.Module]:
    """A network of the studies, with norms by groups."""
    return lambda: build(name, channels=1, size=size, classes=10, generator=Key(2).generator())


def initialised(net: nn.Module, how: Initialisation, bias: float | None = 0.0, **options: Any) -> nn.Module:
    """Draw the weights of layers another way, and set their biases."""
    generator = Key(5).generator()
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            how(module.weight, generator=generator, **options)
            if module.bias is not None and bias is not None:
                nn.init.constant_(module.bias, bias)
    return net


def trained(
    net: Any,
    epochs: int,
    lr: float = 0.05,
    adam: bool = False,
    decay: float = 0.0,
    batch: int = 32,
    public: Batch = PUBLIC,
) -> Any:
    """Train on public images, in float64: rounding, which grows over the steps, differs between processors."""
    net.double()
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    how = torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
    if not adam:
        how = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay)
    generator = Key(4).generator()
    for _ in range(epochs):
        for positions in torch.randperm(len(public.inputs), generator=generator).split(batch):
            how.zero_grad()
            F.cross_entropy(net(public.inputs[positions].double()), public.targets[positions]).backward()
            how.step()
    return net.float()


def measured(net: Net) -> Net:
    """Give frozen norms the statistics of public images, layer by layer."""
    for path, module in net.named_modules():
        if isinstance(module, FrozenNorm):
            before = entering(net, path, PUBLIC.inputs)
            over = [0, *range(2, before.ndim)]
            module.running_mean.copy_(before.mean(over))
            module.running_var.copy_(before.var(over))
    return net


@torch.no_grad()
def changed(net: nn.Module, how: Callable[[Tensor], Tensor]) -> nn.Module:
    """Apply a function to the weights of layers."""
    for parameter in net.parameters():
        if parameter.ndim > 1:
            parameter.copy_(how(parameter))
    return net


def _small_to_zero(weight: Tensor) -> Tensor:
    return weight * (weight.abs() > weight.abs().quantile(0.8))


def _rows_to_zero(weight: Tensor) -> Tensor:
    size = weight.flatten(1).norm(dim=1)
    keep = size >= size.quantile(0.7) if len(size) > 10 else size >= 0
    return weight * keep.view(-1, *[1] * (weight.ndim - 1))


def _binary(weight: Tensor) -> Tensor:
    return weight.sign() * weight.abs().flatten(1).mean(1).view(-1, *[1] * (weight.ndim - 1))


def _grid(levels: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: (weight / weight.abs().max() * levels).round() * weight.abs().max() / levels


HONEST: dict[str, Callable[[], nn.Module]] = {
    "mlp": perceptron,
    "mlp, kaiming": lambda: initialised(perceptron(), nn.init.kaiming_normal_),
    "mlp, xavier": lambda: initialised(perceptron(), nn.init.xavier_uniform_, None),
    "mlp, orthogonal": lambda: initialised(perceptron(), nn.init.orthogonal_),
    "mlp, normal 0.02": lambda: initialised(perceptron(), nn.init.normal_, std=0.02),
    "mlp, gain 2": lambda: initialised(perceptron(), nn.init.xavier_normal_, gain=2.0),
    "mlp, biases 0.1": lambda: initialised(perceptron(), nn.init.kaiming_uniform_, 0.1),
    "mlp, layer norm": lambda: perceptron(norm=LayerNorm),
    "mlp, batch statistics": lambda: perceptron(norm=BatchStatistics),
    "mlp, frozen norm": lambda: measured(perceptron(norm=FrozenNorm)),
    "mlp, 1 epoch": lambda: trained(perceptron(), 1),
    "mlp, 5 epochs": lambda: trained(perceptron(), 5),
    "mlp, 5 epochs, layer norm": lambda: trained(perceptron(norm=LayerNorm), 5),
    "mlp, 5 epochs, frozen norm": lambda: trained(measured(perceptron(norm=FrozenNorm)), 5, lr=0.005),
    "mlp, 5 epochs, batch statistics": lambda: trained(perceptron(norm=BatchStatistics), 5),
    "mlp, leaky": lambda: leaky(perceptron()),
    "wide mlp, 5 epochs, leaky": lambda: trained(leaky(wide()), 5),
    "mlp, 20 epochs": lambda: trained(perceptron(), 20),
    "mlp, 5 epochs of Adam": lambda: trained(perceptron(), 5, lr=0.003, adam=True),
    "mlp, 5 epochs, decay": lambda: trained(perceptron(), 5, decay=5e-3),
    "wide mlp": wide,
    "wide mlp, 5 epochs": lambda: trained(wide(), 5),
    "deep mlp": deep,
    "deep mlp, 5 epochs": lambda: trained(deep(), 5),
    "cnn": convnet,
    "cnn, orthogonal": lambda: initialised(convnet(), nn.init.orthogonal_),
    "cnn, group norm": lambda: convnet(norm=lambda n: nn.GroupNorm(4, n)),
    "cnn, 5 epochs": lambda: trained(convnet(), 5),
    "cnn, 5 epochs, frozen norm": lambda: trained(measured(convnet(norm=FrozenNorm)), 5, lr=0.005),
    "cnn, 1 epoch, batch statistics": lambda: trained(convnet(norm=BatchStatistics), 1),
    "one convolution, 3 epochs": lambda: trained(network(), 3),
    "lenet": named("lenet-zhu"),
    "lenet, 5 epochs": lambda: trained(named("lenet-zhu")(), 5),
    "resnet": resnet,
    "resnet, frozen norm": lambda: measured(resnet(norm=FrozenNorm)),
    "resnet, zero norms": lambda: resnet(zero="norm2"),
    "resnet, zero convolutions": lambda: resnet(zero="conv2"),
    "resnet, 3 epochs": lambda: trained(resnet(), 3),
    "resnet, 3 epochs, batch statistics": lambda: trained(resnet(norm=BatchStatistics), 3),
    "vit": vit,
    "vit, 3 epochs of Adam": lambda: trained(vit(), 3, lr=0.002, adam=True),
    "lora": adapted,
    "lora, 3 epochs": lambda: trained(adapted(), 3),
    "pruned weights": lambda: changed(trained(wide(), 3), _small_to_zero),
    "pruned rows": lambda: changed(trained(wide(), 3), _rows_to_zero),
    "pruned filters": lambda: changed(trained(convnet(), 3), _rows_to_zero),
    "8 bits": lambda: changed(trained(convnet(), 3), _grid(127)),
    "3 bits": lambda: changed(trained(wide(), 3), _grid(3)),
    "binary": lambda: changed(trained(wide(), 3), _binary),
    "binary cnn": lambda: changed(trained(convnet(), 3), _binary),
}
"""Honest models by name."""

UNSCALED: dict[str, Callable[[], nn.Module]] = {
    "mlp, batch statistics": lambda: perceptron(norm=BatchStatistics),
    "mlp, 5 epochs, batch statistics": lambda: _on_pixels(perceptron(norm=BatchStatistics), 5),
    "mlp, 20 epochs, batch norm in evaluation": lambda: _on_pixels(perceptron(norm=nn.BatchNorm1d), 20).eval(),
    "cnn, 1 epoch, batch statistics": lambda: _on_pixels(convnet(norm=BatchStatistics), 1),
    "resnet, 3 epochs, batch statistics": lambda: _on_pixels(resnet(norm=BatchStatistics), 3),
    "resnet, zero norms, batch statistics": lambda: resnet(norm=BatchStatistics, zero="norm2"),
}
"""Honest models of pixels from 0 to 255, whose norms have to make up for that."""


def large_steps() -> nn.Module:
    """Train on pixels from 0 to 255 with steps of 0.2: an honest model behind a false alarm."""
    return _on_pixels(perceptron(norm=BatchStatistics), 5, lr=0.2)


def _on_pixels(net: nn.Module, epochs: int, lr: float = 0.05) -> nn.Module:
    return trained(net, epochs, lr=lr, public=unscaled(PUBLIC))


def batches(source: Batch, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """Take the first examples of each number."""
    for size in sizes:
        yield Batch(source.inputs[:size], source.targets[:size])
