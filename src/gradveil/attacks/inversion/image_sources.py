"""Variables that an inversion searches, and the images that they make.

Pixels are one choice. Behind a generator the variables are the weights of a network, or the numbers that it draws from,
and only images that the network can draw are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from gradveil.attacks.inversion.generators import Generator, brought, drawn_by, taught
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, select, under
from gradveil.core.user_code import called
from gradveil.nn.initial_weights import initialise
from gradveil.nn.weight_files import fingerprint

INPUTS, TARGETS = "inputs", "targets"
"""Names of the variables that are no random tensors of the client: the examples sought, and their labels."""
LATENT, WEIGHTS = "images.latent", "images.weights"
"""Names of the numbers that a generator draws from, and of its weights."""
_FEWEST = 2
"""Public images that a generator can be taught on, at least."""
_SLACK = 0.1
"""How far outside of [0, 1] somebody's generator may draw: those without a last bound overshoot a little."""


@dataclass(frozen=True)
class Canvas:
    """What is to be drawn for each row: images [B, C, H, W] between two bounds, and labels if they are sought too."""

    examples: int
    shape: tuple[int, ...]
    lower: Tensor
    upper: Tensor
    classes: int
    joint: bool
    start: Literal["normal", "uniform", "solved"]
    """What pixels look like at first."""

    def framed(self, images: Tensor) -> Tensor:
        """Bring images from [0, 1] to the range of valid inputs."""
        return self.lower + (self.upper - self.lower) * images


class Drawing(Protocol):
    """Where the images of one call come from."""

    @property
    def labelled(self) -> bool:
        """Whether it makes the labels too."""
        ...

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        """Draw a row's variables, and what of it stays as it is."""
        ...

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Learn what can be learnt before the attack."""
        ...

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, Tensor | None]:
        """Make every row's images [N, B, ...], and the logits of their labels [N, B, K] where it makes those too."""
        ...

    def penalty(self, variables: Tensors, constants: Tensors) -> Tensor | None:
        """Say how unlikely it is what every row draws from [N], if something is known of that."""
        ...

    def tuned(self, rows: int) -> Tensors:
        """Return what is searched in the second part of the budget: nothing where there is none."""
        ...


@dataclass(frozen=True)
class Pixels:
    """The images are the variables."""

    def open(self, canvas: Canvas, key: Key) -> _Pixels:
        """Get ready for a call."""
        return _Pixels(canvas)

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Find nothing in the way."""
        yield from ()


@dataclass(frozen=True)
class _Pixels:
    canvas: Canvas
    labelled = False

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
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
class Untrained:
    """A generator that knows nothing, with weights of its own for each row: it learns from the update alone (GRNN).

    What it draws from stays as it was drawn, and labels, if they are sought, are a linear layer's.
    """

    latent: int = 128
    width: int = 16

    def open(self, canvas: Canvas, key: Key) -> _Untrained:
        """Get ready for a call."""
        return _Untrained(self.latent, canvas, _WithLabels(self, canvas).to(canvas.lower))

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Find nothing in the way."""
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
        own = initialise(deepcopy(self.network), key.child(WEIGHTS).generator())
        weights = {name: value.detach().cpu() for name, value in own.named_parameters()}
        return under(WEIGHTS, weights), {LATENT: _normal((self.canvas.examples, self.latent), self.canvas, key)}

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Learn nothing."""

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, Tensor | None]:
        images, *logits = drawn_by(self.network, select(variables, WEIGHTS), constants[LATENT])
        return self.canvas.framed(images), logits[0] if logits else None

    def penalty(self, variables: Tensors, constants: Tensors) -> None:
        return None

    def tuned(self, rows: int) -> Tensors:
        return {}


@dataclass(frozen=True)
class Trained:
    """A generator that has learnt what images look like: the numbers that it draws from are searched (GIAS, GGL).

    The attacker teaches one on his public images, or brings his own `generator`: a module, or the import path of one or
    of what makes one, from [B, latent] to [B, C, H, W] in [0, 1]. With `tuned` this share of the budget goes on with
    each row's own weights of the generator, from the latent numbers that were found.
    """

    latent: int = 32
    width: int = 8
    lessons: int = 600
    """Batches of 64 public images that it is taught with."""
    prior: float = 0.0
    """Weight of half the mean square of the latent numbers, which are N(0, 1) where the generator learnt."""
    tuned: float = 0.0
    tuning: float = 1e-3
    """Step size of the weights."""
    generator: nn.Module | str | None = None

    def open(self, canvas: Canvas, key: Key) -> _Trained:
        """Get ready for a call; what the attacker teaches himself knows nothing until it is taught."""
        if self.generator is None:
            network: nn.Module = Generator(self.latent, canvas.shape, self.width, "group").to(canvas.lower)
            return _Trained(self, canvas, initialise(network, key.generator()).requires_grad_(requires_grad=False))
        refuse(list(self.problems(canvas.shape, None)))
        return _Trained(self, canvas, brought(self.generator).to(canvas.lower))

    def problems(self, shape: tuple[int, ...], public: int | None) -> Iterator[Problem]:
        """Refuse where nothing is there to learn from (`public` images; None: unknown), and images of another shape."""
        if self.generator is None:
            if public is not None and public < _FEWEST:
                remedy = "audit data with a public split, give public= from Python, or bring a generator"
                yield Problem("data", "there are no public images to teach a generator on", remedy)
            return
        try:
            network = brought(self.generator)
            blank = next(network.parameters(), torch.zeros(())).new_zeros(2, self.latent)
            with torch.no_grad():
                found = called("generator", "the generator", lambda: network(blank))
        except GradveilError as error:
            yield from error.problems
            return
        drawn = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if drawn != (2, *shape):
            what = f"returns {drawn} for [2, {self.latent}]"
            yield Problem("generator", what, f"return images {(2, *shape)} with values in [0, 1], or set latent=")
        elif not float(found.min()) > -_SLACK or not float(found.max()) < 1 + _SLACK:
            what = f"draws values from {float(found.min()):.2g} to {float(found.max()):.2g}"
            yield Problem("generator", what, "return images with values in [0, 1]: of a tanh, (x + 1) / 2")


@dataclass
class _Trained:
    images: Trained
    canvas: Canvas
    network: nn.Module
    labelled = False

    def learn(self, public: Tensor | None, key: Key) -> None:
        """Teach the generator, unless somebody else did or this process has: it depends on no update."""
        if self.images.generator is not None:
            return
        refuse(list(self.images.problems(self.canvas.shape, 0 if public is None else len(public))))
        assert public is not None
        images, canvas = self.images, self.canvas
        pixels = ((public.to(canvas.lower) - canvas.lower) / (canvas.upper - canvas.lower)).clamp(0, 1)
        lesson = (
            fingerprint({"public": pixels.cpu()}),
            images.latent,
            images.width,
            images.lessons,
            key,
            pixels.device,
        )
        if lesson not in _TAUGHT:
            while len(_TAUGHT) >= _REMEMBERED:
                _TAUGHT.pop(next(iter(_TAUGHT)))
            _TAUGHT[lesson] = taught(pixels, images.latent, images.width, images.lessons, key)
        self.network = _TAUGHT[lesson]

    def start(self, key: Key) -> tuple[Tensors, Tensors]:
        return {LATENT: _normal((self.canvas.examples, self.images.latent), self.canvas, key)}, {}

    def draw(self, variables: Tensors, constants: Tensors) -> tuple[Tensor, None]:
        latent = _latent(variables, constants)
        if weights := select(variables, WEIGHTS):
            drawn = drawn_by(self.network, weights, latent)
        else:
            drawn = self.network(latent.flatten(0, 1)).unflatten(0, latent.shape[:2])
        return self.canvas.framed(drawn), None

    def penalty(self, variables: Tensors, constants: Tensors) -> Tensor | None:
        if not self.images.prior:
            return None
        return self.images.prior / 2 * _latent(variables, constants).square().flatten(1).mean(1)

    def tuned(self, rows: int) -> Tensors:
        weights = dict(self.network.named_parameters()) if self.images.tuned else {}
        return under(WEIGHTS, {name: value.detach().expand(rows, *value.shape) for name, value in weights.items()})


def _latent(variables: Tensors, constants: Tensors) -> Tensor:
    """Return what a generator draws from: searched, or left as it was found."""
    return variables[LATENT] if LATENT in variables else constants[LATENT]


def _normal(shape: tuple[int, ...], canvas: Canvas, key: Key) -> Tensor:
    return torch.randn(shape, dtype=canvas.lower.dtype, generator=key.child(LATENT).generator())


_REMEMBERED = 4
_TAUGHT: dict[tuple[object, ...], Generator] = {}
"""What this process has taught: every trial of a run would teach the same."""

Images = Pixels | Untrained | Trained
"""What the images of an inversion can be drawn from."""
