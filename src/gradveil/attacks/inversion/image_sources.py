"""Search spaces of an inversion: pixels, the weights of a generator, or its latent numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from gradveil.attacks.inversion.generators import Generator, custom_network, draw_with, train_generator
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Count, Positive, Share, Strength, TextValue
from gradveil.core.tree import Tensors, select, under
from gradveil.core.user_code import called
from gradveil.nn.initial_weights import initialise
from gradveil.nn.weight_files import fingerprint

INPUTS, TARGETS = "inputs", "targets"
"""Names of the variables that are not random tensors of the client: the inputs and their labels."""
LATENT, WEIGHTS = "images.latent", "images.weights"
"""Names of a generator's latent numbers and of its weights."""
Latent = Annotated[Count, "Latent numbers of the generator."]
Width = Annotated[Count, "Channels of the generator's last feature map."]
_FEWEST = 2
"""Fewest public images on which a generator can be trained."""
_SLACK = 0.1
"""Distance outside of [0, 1] that custom generators may reach: those without a bounded output overshoot a little."""


@dataclass(frozen=True)
class Canvas:
    """Shape and bounds of a row's images [B, C, H, W], and its labels if they are searched too."""

    examples: int
    shape: tuple[int, ...]
    lower: Tensor
    upper: Tensor
    classes: int
    joint: bool
    start: Literal["normal", "uniform", "solved"]
    """Law of the first pixels."""
    relaxed: Callable[[Tensor], Tensor] | None = None
    """Free variables -> inputs, of the space of the examples."""

    def scaled(self, images: Tensor) -> Tensor:
        """Scale images in [0, 1] to the range of valid inputs."""
        return self.lower + (self.upper - self.lower) * images


class Drawing(Protocol):
    """The images of one call as a function of variables and constants."""

    @property
    def labelled(self) -> bool:
        """True if it draws the labels too."""
        ...

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        """Draw the variables and the constants of a row."""
        ...

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Train on auxiliary data before the attack."""
        ...

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return every row's images [N, B, ...], and the logits of their labels [N, B, K] if it draws those."""
        ...

    def penalty(self, variables: Tensors, constants: Tensors) -> Tensor | None:
        """Return the penalty [N] of every row's latent numbers, if they have one."""
        ...

    def tuned(self, rows: int) -> Tensors:
        """Return the variables of the second part of the budget, if there is one."""
        ...


@dataclass(frozen=True)
class Pixels:
    """The images are the variables."""

    needs: ClassVar[str] = "numbers"

    def open(self, canvas: Canvas, key: Key) -> _Pixels:
        """Prepare a call."""
        return _Pixels(canvas)

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Accept any data."""
        yield from ()


@dataclass(frozen=True)
class _Pixels:
    canvas: Canvas
    labelled = False

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        # Drawn on the CPU, so that a key gives the same numbers on every device.
        canvas, lower, upper = self.canvas, self.canvas.lower.cpu(), self.canvas.upper.cpu()
        shape, draw = (canvas.examples, *canvas.shape), key.child(INPUTS).generator()
        if canvas.start == "uniform":
            return {INPUTS: lower + (upper - lower) * torch.rand(shape, dtype=lower.dtype, generator=draw)}, {}
        return {INPUTS: torch.randn(shape, dtype=lower.dtype, generator=draw)}, {}

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Learn nothing."""

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, None]:
        return variables[INPUTS], None

    def penalty(self, variables: Tensors, constants: Tensors) -> None:
        return None

    def tuned(self, rows: int) -> Tensors:
        return {}


@dataclass(frozen=True)
class Relaxed(Pixels):
    """The examples are what their space makes of free variables: of rows, probabilities and bounded numbers."""

    needs: ClassVar[str] = "columns"

    def open(self, canvas: Canvas, key: Key) -> _Pixels:
        """Prepare a call."""
        return _Relaxed(canvas)


@dataclass(frozen=True)
class _Relaxed(_Pixels):
    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        shape, like = (self.canvas.examples, *self.canvas.shape), self.canvas.lower
        return {INPUTS: torch.randn(shape, dtype=like.dtype, generator=key.child(INPUTS).generator())}, {}

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, None]:
        assert self.canvas.relaxed is not None
        return self.canvas.relaxed(variables[INPUTS]), None


@dataclass(frozen=True)
class Untrained(Checked):
    """An untrained generator with separate weights for each row, which are fitted to the update (GRNN).

    The latent numbers do not change. A linear layer draws the labels if they are searched.
    """

    needs: ClassVar[str] = "pictures"

    latent: Latent = 128
    width: Width = 16
    label: ClassVar[str] = "attack"

    def open(self, canvas: Canvas, key: Key) -> _Untrained:
        """Prepare a call."""
        return _Untrained(self.latent, canvas, _WithLabels(self, canvas).to(canvas.lower))

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Accept any data."""
        yield from ()


class _WithLabels(nn.Module):
    def __init__(self, images: Untrained, canvas: Canvas) -> None:
        super().__init__()
        self.images = Generator(images.latent, canvas.shape, images.width, "batch")
        self.labels = nn.Linear(images.latent, canvas.classes) if canvas.joint else None

    def forward(self, latent: Tensor) -> tuple[Tensor, ...]:
        drawn = self.images(latent)
        return (drawn,) if self.labels is None else (drawn, self.labels(latent))


@dataclass(frozen=True)
class _Untrained:
    latent: int
    canvas: Canvas
    network: nn.Module

    @property
    def labelled(self) -> bool:
        return self.canvas.joint

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        network = initialise(deepcopy(self.network), key.child(WEIGHTS).generator())
        weights = {name: value.detach().cpu() for name, value in network.named_parameters()}
        return under(WEIGHTS, weights), {LATENT: _normal((self.canvas.examples, self.latent), self.canvas, key)}

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Learn nothing."""

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, Tensor | None]:
        images, *logits = draw_with(self.network, select(variables, WEIGHTS), constants[LATENT])
        return self.canvas.scaled(images), logits[0] if logits else None

    def penalty(self, variables: Tensors, constants: Tensors) -> None:
        return None

    def tuned(self, rows: int) -> Tensors:
        return {}


@dataclass(frozen=True)
class Trained:
    """A trained generator whose latent numbers are searched (GIAS, GGL).

    The attack trains it on public images, or uses a custom `generator`: a module, or the import path of a module or of
    a function that returns one, from [B, latent] to [B, C, H, W] in [0, 1]. `tuned` is the share of the budget in which
    the weights are searched for each row, with the best latent numbers.
    """

    needs: ClassVar[str] = "pictures"

    latent: Latent = 32
    width: Width = 8
    lessons: Annotated[Count, "Batches of 64 public images that the generator is trained on."] = 600
    prior: Annotated[Strength, "Weight of half the mean square of the latent numbers."] = 0.0
    tuned: Annotated[Share, "Share of the budget in which the generator's weights are searched."] = 0.0
    tuning: Annotated[Positive, "Step size of the generator's weights."] = 1e-3
    generator: Annotated[
        nn.Module | str | None,
        TextValue("a custom module, 'pkg.module:name'"),
        "Custom generator, which is not trained.",
    ] = None

    def open(self, canvas: Canvas, key: Key) -> _Trained:
        """Prepare a call; the attack's generator has random weights until it is trained."""
        if self.generator is None:
            network: nn.Module = Generator(self.latent, canvas.shape, self.width, "group").to(canvas.lower)
            return _Trained(self, canvas, initialise(network, key.generator()).requires_grad_(requires_grad=False))
        refuse(list(self.problems(canvas.shape, None)))
        return _Trained(self, canvas, custom_network(self.generator).to(canvas.lower))

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Refuse too few `public` images (None: unknown) and generators of other images."""
        if self.generator is None:
            if public is not None and public < _FEWEST:
                fix = "audit data with a public split, give public= from Python, or pass a generator"
                yield Problem("data", "there are no public images to train a generator on", fix)
            return
        try:
            network = custom_network(self.generator)
            blank = next(network.parameters(), torch.zeros(())).new_zeros(2, self.latent)
            with torch.no_grad():
                images = called("generator", "the generator", lambda: network(blank))
        except GradveilError as error:
            yield from error.problems
            return
        returned = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        if returned != (2, *shape):
            problem = f"returns {returned} for [2, {self.latent}]"
            yield Problem("generator", problem, f"return images {(2, *shape)} with values in [0, 1], or set latent=")
        elif not float(images.min()) > -_SLACK or not float(images.max()) < 1 + _SLACK:
            problem = f"draws values from {float(images.min()):.2g} to {float(images.max()):.2g}"
            yield Problem("generator", problem, "return images with values in [0, 1]: of a tanh, (x + 1) / 2")


@dataclass
class _Trained:
    images: Trained
    canvas: Canvas
    network: nn.Module
    labelled = False

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Train the generator, unless it is custom or this process has trained it: it depends on no update."""
        if self.images.generator is not None:
            return
        refuse(list(self.images.problems(self.canvas.shape, 0 if public is None else len(public))))
        assert public is not None
        images, canvas = self.images, self.canvas
        pixels = ((public.to(canvas.lower) - canvas.lower) / (canvas.upper - canvas.lower)).clamp(0, 1)
        training = (
            fingerprint({"public": pixels.cpu()}),
            images.latent,
            images.width,
            images.lessons,
            key,
            pixels.device,
        )
        if training not in _CACHE:
            while len(_CACHE) >= _CACHED:
                _CACHE.pop(next(iter(_CACHE)))
            _CACHE[training] = train_generator(pixels, images.latent, images.width, images.lessons, key)
        self.network = _CACHE[training]

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        return {LATENT: _normal((self.canvas.examples, self.images.latent), self.canvas, key)}, {}

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, None]:
        latent = _latent(variables, constants)
        if weights := select(variables, WEIGHTS):
            drawn = draw_with(self.network, weights, latent)
        else:
            drawn = self.network(latent.flatten(0, 1)).unflatten(0, latent.shape[:2])
        return self.canvas.scaled(drawn), None

    def penalty(self, variables: Tensors, constants: Tensors) -> Tensor | None:
        if not self.images.prior:
            return None
        return self.images.prior / 2 * _latent(variables, constants).square().flatten(1).mean(1)

    def tuned(self, rows: int) -> Tensors:
        weights = dict(self.network.named_parameters()) if self.images.tuned else {}
        return under(WEIGHTS, {name: value.detach().expand(rows, *value.shape) for name, value in weights.items()})


def _latent(variables: Tensors, constants: Tensors) -> Tensor:
    """Return a generator's latent numbers, which are variables or constants."""
    return variables[LATENT] if LATENT in variables else constants[LATENT]


def _normal(shape: tuple[int, ...], canvas: Canvas, key: Key) -> Tensor:
    return torch.randn(shape, dtype=canvas.lower.dtype, generator=key.child(LATENT).generator())


_CACHED = 4
_CACHE: dict[tuple[object, ...], Generator] = {}
"""Generators that this process has trained: every trial of a run needs the same."""

Images = Pixels | Relaxed | Untrained | Trained
"""The search spaces of images."""
