"""Stochastic layers whose noise is an argument: dropout, PRECODE, and its convolutional successor CVB."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from math import isqrt, log, prod

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Bernoulli, Noise, Normal
from gradveil.nn.initial_weights import initialise
from gradveil.nn.insertion_places import blank_input, forward_pass
from gradveil.nn.module_paths import at, insert_after, insert_before, last_layer, like, output_shape
from gradveil.nn.stochastic import Stochastic, penalise
from gradveil.nn.token_layout import TokenModel


class Dropout(Stochastic):
    """y = x * mask / (1 - p), mask ~ Bernoulli(1 - p) of the shape of x (Srivastava et al. 2014, scaled in training).

    Attackers may optimise the mask in the box [0, 1]; the neutral mask 1 - p leaves x unchanged. `channelwise` draws
    one entry per example and channel, like `nn.Dropout2d`; `examplewise` one per example, like stochastic depth. A
    module that runs several times in a forward pass has as many masks, [B, calls, ...]. Inputs of `single` dimensions
    have no batch to torch, which takes their examples for channels: it drops whole ones.
    """

    mask: Tensor

    def __init__(
        self,
        p: float = 0.25,
        *,
        channelwise: bool = False,
        examplewise: bool = False,
        calls: int = 1,
        single: int | None = None,
    ) -> None:
        """Drop with probability p, 0 <= p < 1, `calls` times in a forward pass."""
        super().__init__()
        if not 0 <= p < 1:
            raise fail("dropout.p", f"is {p}", "give a probability in [0, 1)")
        self.p = p
        self.channelwise = channelwise
        self.examplewise = examplewise
        self.calls = calls
        self.single = single
        self._last: tuple[int, weakref.ref[Tensor] | None] = (0, None)
        self.declare("mask")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Describe the mask."""
        own = 1 if self.examplewise or x.dim() == self.single else 2 if self.channelwise else x.dim()
        shape = (*x.shape[:own], *[1] * (x.dim() - own))
        shape = shape if self.calls == 1 else (shape[0], self.calls, *shape[1:])
        keep = 1 - self.p
        return {"mask": Noise(shape, Bernoulli(keep), neutral=keep, dtype=x.dtype, lower=0.0, upper=1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mask; without one, pass x on."""
        mask = self.supplied("mask")
        return x if mask is None else x * self._next(mask) / (1 - self.p)

    def _next(self, mask: Tensor) -> Tensor:
        """Return the part of the mask for this call: the first again after a new mask is supplied."""
        if self.calls == 1:
            return mask
        turn, last = self._last
        turn = (turn + 1) % self.calls if last is not None and last() is mask else 0
        self._last = (turn, weakref.ref(mask))
        return mask[:, turn]

    def extra_repr(self) -> str:
        """Show the probability."""
        return (
            f"p={self.p}"
            + ", channelwise" * self.channelwise
            + ", examplewise" * self.examplewise
            + f", calls={self.calls}" * (self.calls > 1)
        )


def _read(model: nn.Module, path: str, where: str) -> Iterator[Problem]:
    """Refuse places in a model of texts that attacks read by their paths, which would change."""
    if isinstance(model, TokenModel) and model.layout.reads(path):
        remedy = f"choose a module next to the head, '{last_layer(model)}', or a defence of the update"
        yield Problem(f"{where} {path}", "is, or holds, a layer that attacks on texts read", remedy)


def with_dropout(model: nn.Module, p: float = 0.25, where: Sequence[str] | None = None) -> nn.Module:
    """Copy a model and insert `Dropout(p)` after the modules at the given paths.

    The default is the model's `dropout_positions`: every convolutional block (after its activation, before pooling),
    every stage of a ResNet, every block of the vision transformer. A model that declares none has it after every
    activation module before the last linear layer, if a forward pass shows that these are all. To an `nn.Sequential`
    the dropout is appended, so that no parameter changes its name.
    """
    known = dict(model.named_modules())
    positions = dict.fromkeys(getattr(model, "dropout_positions", ()) if where is None else where, 1)
    paths = ", ".join(path for path in known if path)
    inputs = blank_input(model)
    ran = None if inputs is None or (positions and where is None) else forward_pass(model, inputs)
    if not positions:
        why = "no input_shape" if inputs is None else "cannot be run on an input of its input_shape"
        positions, why = ({}, why) if ran is None else ran.hidden_activations()
        if not positions:
            remedy = f"give the paths of the modules to put it after, some of: {paths}"
            raise fail("dropout.where", f"this model declares no dropout_positions, and {why}", remedy)
    absent = [path for path in positions if path not in known]
    refuse([Problem(f"dropout.where {path}", "no such module", f"its modules: {paths}") for path in absent])
    refuse([problem for path in positions for problem in _read(model, path, "dropout.where")])
    if ran is not None:
        several = {path: ran.several_shapes(path) for path in positions}
        remedy = "choose a module whose calls give the same shape"
        refuse([Problem(f"dropout.where {path}", why, remedy) for path, why in several.items() if why])
        positions = {path: max(len(ran.calls(path)), 1) for path in positions}
    copy = deepcopy(model)
    for path in sorted(positions, reverse=True):
        copy = insert_after(copy, path, "dropout", Dropout(p, calls=positions[path]))
    return copy


KL_VARIANTS = ("exact", "published_code")
"""The divergence of the normal law, or the published program's, which differs."""


class VariationalBottleneck(Stochastic):
    """PRECODE's bottleneck (Scheliga, Mäder, Seeland: PRECODE, WACV 2022).

    mu | raw = encoder(x), sigma = softplus(raw), z = mu + sigma * eps with eps ~ N(0, 1), y = decoder(z). The loss
    gains beta * KL, where KL = mean over the batch of sum_k -1/2 (1 + 2 ln sigma - mu^2 - sigma^2) / ln 2. It is
    stochastic in training and in evaluation; the neutral eps is 0. The features are the last dimension, or all but the
    first, flattened.
    """

    eps: Tensor
    noisy_from = "decoder"

    def __init__(self, features: int, k: int = 256, beta: float = 1e-3) -> None:
        """Squeeze `features` values through `k` Gaussian ones."""
        super().__init__()
        self.k = k
        self.beta = beta
        self.features = features
        self.encoder = nn.Linear(features, 2 * k)
        self.decoder = nn.Linear(k, features)
        self.declare("eps")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Describe eps."""
        return {"eps": Noise((*self._rows(x).shape[:-1], self.k), Normal(), dtype=x.dtype)}

    def _rows(self, x: Tensor) -> Tensor:
        return x if x.shape[-1] == self.features else x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Encode, add the noise, decode; add the KL term to the loss."""
        encoded = self.encoder(self._rows(x))
        mean, sigma = encoded[..., : self.k], F.softplus(encoded[..., self.k :])
        # Divided by log 2, as the divergence is in bits here.
        penalise(self.beta * _divergence(mean, sigma).sum(-1).mean() / log(2))
        eps = self.supplied("eps")
        return self.decoder(mean if eps is None else mean + sigma * eps).reshape(x.shape)

    def extra_repr(self) -> str:
        """Show the weight of the KL term."""
        return f"k={self.k}, beta={self.beta}"


class ConvBottleneck(Stochastic):
    """The convolutional variational bottleneck, CVB (Scheliga, Mäder, Seeland 2024).

    mu and s are same-padded bias-free convolutions of x from C to K channels, K = C // 2 if C >= 8 else 8;
    sigma = softplus(clip(s, -5, 5)), z = mu + sigma * eps, y = decoder(z) with a bias-free 1x1 convolution back to C.
    The loss gains beta * mean over batch and positions of the KL term, summed over channels:
    `kl="exact"` -1/2 (1 + 2 ln sigma - mu^2 - sigma^2); `kl="published_code"` -1/2 (1 + sigma - mu^2 - e^sigma), which
    uses sigma as a log-variance, like the authors' program, and has its minimum at zero noise.

    Tokens [B, T, W] are treated as T channels of a square grid of W values (W = 256: 16 x 16).
    """

    eps: Tensor
    noisy_from = "decoder"

    def __init__(self, channels: int, kernel: int = 5, beta: float = 0.1, kl: str = "exact") -> None:
        """Squeeze `channels` feature maps through K Gaussian ones."""
        super().__init__()
        if kl not in KL_VARIANTS:
            raise fail("cvb.kl", f"unknown name '{kl}'", f"choose one of: {', '.join(KL_VARIANTS)}")
        if kernel < 1 or kernel % 2 == 0:
            raise fail("cvb.kernel", f"is {kernel}", "choose an odd number, so that the maps keep their size")
        self.k = channels // 2 if channels >= 8 else 8
        self.beta = beta
        self.kl = kl
        self.mean = nn.Conv2d(channels, self.k, kernel, padding=kernel // 2, bias=False)
        self.scale = nn.Conv2d(channels, self.k, kernel, padding=kernel // 2, bias=False)
        self.decoder = nn.Conv2d(self.k, channels, 1, bias=False)
        self.declare("eps")

    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Describe eps."""
        grid = as_grid(x)
        return {"eps": Noise((grid.shape[0], self.k, *grid.shape[2:]), Normal(), dtype=x.dtype)}

    def forward(self, x: Tensor) -> Tensor:
        """Encode, add the noise, decode; add the KL term to the loss."""
        grid = as_grid(x)
        mean, raw = self.mean(grid), self.scale(grid).clamp(-5, 5)
        sigma = F.softplus(raw)
        as_log_variance = -0.5 * (1 + sigma - mean.square() - sigma.exp())
        divergence = _divergence(mean, sigma) if self.kl == "exact" else as_log_variance
        penalise(self.beta * divergence.sum(1).mean())
        eps = self.supplied("eps")
        return self.decoder(mean if eps is None else mean + sigma * eps).reshape(x.shape)

    def extra_repr(self) -> str:
        """Show the weight of the KL term."""
        return f"k={self.k}, beta={self.beta}, kl={self.kl!r}"


def as_grid(x: Tensor) -> Tensor:
    """View tokens [B, T, W] as [B, T, sqrt(W), sqrt(W)]; leave images as they are."""
    if x.dim() == 4:
        return x
    side = isqrt(x.shape[-1])
    if x.dim() != 3 or side * side != x.shape[-1]:
        remedy = "place it after feature maps [B, C, H, W] or tokens [B, T, W] with a square W"
        raise fail("cvb.position", f"the bottleneck cannot take values of shape {tuple(x.shape)}", remedy)
    return x.reshape(*x.shape[:2], side, side)


def _divergence(mean: Tensor, sigma: Tensor) -> Tensor:
    """KL(N(mean, sigma^2) || N(0, 1)) of each entry."""
    return -0.5 * (1 + 2 * sigma.log() - mean.square() - sigma.square())


def with_precode(
    model: nn.Module, generator: Generator, k: int = 256, beta: float = 1e-3, position: str | None = None
) -> nn.Module:
    """Copy a model and put a `VariationalBottleneck` before its last linear layer, or at `position`.

    A position is a linear layer, which the bottleneck comes before, or another module, which it comes after: it then
    takes all values of an example. The bottleneck's weights come from the generator, all others stay. Parameters of
    this package's models keep their names; in a custom model the module becomes the child `inner` of its old path.
    """
    copy = deepcopy(model)
    inputs = blank_input(model)
    if inputs is not None and forward_pass(model, inputs) is None:  # its `input_shape` means something else
        inputs = None
    path = position or last_layer(copy, inputs)
    refuse(list(_read(model, path, "precode.position")))
    linear = at(copy, path)
    if not isinstance(linear, nn.Linear):
        if inputs is None:
            remedy = f"choose an nn.Linear, for example '{last_layer(copy)}', or set model.input_shape = (C, H, W)"
            raise fail(f"precode.position {path}", f"is a {type(linear).__name__}", remedy)
        features = prod(output_shape(copy, path, inputs)[1:])
        after = like(initialise(VariationalBottleneck(features, k, beta), generator), copy)
        return insert_after(copy, path, "precode", after)
    bottleneck = like(initialise(VariationalBottleneck(linear.in_features, k, beta), generator), copy)
    if position is None and isinstance(getattr(copy, "body", None), nn.Sequential) and path == "head":
        return insert_after(copy, "body", "precode", bottleneck)
    return insert_before(copy, path, "precode", bottleneck)


def with_cvb(
    model: nn.Module,
    generator: Generator,
    kernel: int | None = None,
    beta: float | None = None,
    position: str | None = None,
    kl: str = "exact",
    inputs: Tensor | None = None,
) -> nn.Module:
    """Copy a model and put a `ConvBottleneck` after the module at `position`.

    Position, kernel and beta default to the model's `cvb_position`, `cvb_kernel` and `cvb_beta`. `inputs`, one batch of
    any size, determines the shape at that position where the model has no `input_shape`. A model that declares no
    position has it after the first activation of a convolution's maps. The bottleneck's weights come from the
    generator, all others stay.
    """
    copy = deepcopy(model)
    inputs = blank_input(model) if inputs is None else inputs
    path = position or getattr(model, "cvb_position", None)
    if path is None:
        ran = None if inputs is None else forward_pass(model, inputs[:1])
        path = None if ran is None else next(ran.maps(), None)
    if path is None:
        paths = ", ".join(name for name, _ in model.named_modules() if name)
        what = (
            "this model declares no cvb_position, and has no activation module on a convolution's maps that runs once"
        )
        raise fail("cvb.position", what, f"give a module path, one of: {paths}")
    if inputs is None:
        what = "this model declares no input_shape"
        raise fail("cvb.inputs", what, "set model.input_shape = (C, H, W), or give one batch of inputs")
    channels = as_grid(torch.empty(output_shape(copy, path, inputs), device="meta")).shape[1]
    declared: tuple[int, float] = (getattr(model, "cvb_kernel", 5), getattr(model, "cvb_beta", 0.1))
    size, weight = declared[0] if kernel is None else kernel, declared[1] if beta is None else beta
    bottleneck = like(initialise(ConvBottleneck(channels, size, weight, kl), generator), copy)
    return insert_after(copy, path, "cvb", bottleneck)
