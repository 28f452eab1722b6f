"""Named random tensors of a client: their laws, their streams, and how they are drawn.

A client is a pure function of tensors. All its randomness (dropout masks, bottleneck noise, differential-privacy
noise, the order of examples) is passed as named arguments. A `NoiseSpec` declares them and `sample` draws them; an
attacker may know them, guess them, or optimise over them.

Numbers come from a `Source`: a torch generator in simulations, a cryptographic stream in deployments. Laws draw only
through the functions of this module. From a torch generator, each returns the same bits as torch's function of that
name. From a stream, each uses whole 64-bit words.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.errors import Problem, refuse

Words = NDArray[np.uint64]
"""Uniform 64-bit words."""


class WordSource(Protocol):
    """A source of unpredictable uniform words."""

    def words(self, count: int) -> Words:
        """Return the next words."""
        ...


Source = torch.Generator | WordSource
"""The origin of random numbers."""

_BLOCK = 1 << 16


def words(count: int, source: Source) -> Words:
    """Draw uniform 64-bit words."""
    if not isinstance(source, torch.Generator):
        return source.words(count)
    halves = torch.randint(2**32, (count, 2), generator=source).numpy().astype(np.uint64)
    return (halves[:, 0] << np.uint64(32)) | halves[:, 1]


def uniform(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
    """Draw from U[0, 1): multiples of the spacing of this dtype's numbers just below 1."""
    if isinstance(source, torch.Generator):
        return torch.rand(shape, dtype=dtype, generator=source)
    # 53 for float64, 24 for float32: all bits of a number below 1.
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    drawn = source.words(math.prod(shape)) >> np.uint64(64 - digits)
    return tensor(drawn.astype(np.float64) * 2.0**-digits, shape).to(dtype)


def chance(shape: tuple[int, ...], probability: float, source: Source) -> Tensor:
    """Draw True with a probability, which is rounded to 2^-24 for a generator and to 2^-53 for a stream."""
    if isinstance(source, torch.Generator):
        return torch.rand(shape, generator=source) < probability
    return uniform(shape, torch.float64, source) < probability


def normal(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
    """Draw from N(0, 1), in blocks that fit the cache: 1.5 times as fast.

    torch fills a tensor with uniform numbers and transforms them in place in groups of 16. It redraws the last 16 if 16
    does not divide the size. Blocks therefore give the same numbers if 16 divides the size of all but the last.
    """
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    blocks = max(1, flat.numel() // _BLOCK)
    for i in range(blocks):
        block = flat[i * _BLOCK : (i + 1) * _BLOCK if i + 1 < blocks else flat.numel()]
        if isinstance(source, torch.Generator):
            block.normal_(generator=source)
        else:
            signs, u = halves(source.words(block.numel()))
            block.copy_(tensor(quantiles(u) * signs, block.shape))
    return out


def halves(drawn: Words) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split words into signs (1 bit) and midpoints of intervals of length 2^-64 in (0, 1/2) (63 bits)."""
    signs = (drawn & np.uint64(1)).astype(np.float64) * 2 - 1
    return signs, ((drawn >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64


def quantiles(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute Phi^-1."""
    special: Any = torch.special
    return cast("NDArray[np.float64]", special.ndtri(tensor(u, u.shape)).numpy())


def integers(high: int, shape: tuple[int, ...], source: Source) -> Tensor:
    """Draw integers from 0 to high - 1, each equally likely."""
    if isinstance(source, torch.Generator):
        return torch.randint(high, shape, generator=source)
    drawn = source.words(math.prod(shape))
    excess = 2**64 % high  # the last `excess` words would favour small remainders: draw them again
    while excess and (biased := drawn >= np.uint64(2**64 - excess)).any():
        drawn[biased] = source.words(int(biased.sum()))
    return tensor((drawn % np.uint64(high)).astype(np.int64), shape)


def permutation(count: int, source: Source) -> Tensor:
    """Draw a permutation of `count` items, each equally likely."""
    if isinstance(source, torch.Generator):
        return torch.randperm(count, generator=source)
    drawn = source.words(count)
    while len(np.unique(drawn)) < count:  # argsort would always put equal words in the same order
        drawn = source.words(count)
    return tensor(np.argsort(drawn), (count,))


def tensor(values: NDArray[Any], shape: tuple[int, ...]) -> Tensor:
    """View an array as a tensor of a shape."""
    return torch.from_numpy(values).reshape(shape)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True)
class Key:
    """An immutable address of a random stream: the same seed and path give the same numbers on every device.

    Different addresses have different streams: two of a billion (2^30) coincide with probability 2^59 / 2^512 =
    2^-453 (pairs over inner states of SHAKE-256). Keys are for simulations, as the seed determines all numbers;
    deployments use `gradveil.core.secure_noise.SecretKey`.

    >>> a = Key(0).child("target_client", 3)
    >>> torch.equal(torch.randn(2, generator=a.generator()), torch.randn(2, generator=a.generator()))
    True
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def child(self, *parts: str | int) -> Key:
        """Return the address of a stream below this one."""
        return Key(self.seed, (*self.path, *parts))

    def draw(self, law: Law, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw a tensor from the stream of this address, on the CPU."""
        return law.sample(shape, dtype, self.generator())

    def generator(self) -> torch.Generator:
        """Return a fresh CPU generator whose whole state is derived from the address.

        SHAKE-256 of the address fills all 624 words of the Mersenne Twister. `torch.Generator.manual_seed` would keep
        only 32 bits of a seed: streams of many addresses would collide. The generator is not cryptographic.
        """
        address = json.dumps([self.seed, *self.path]).encode()
        words = np.frombuffer(hashlib.shake_256(address).digest(4 * _WORDS), "<u4")
        generator = torch.Generator()
        generator.set_state(_twister(words))
        return generator


_WORDS = 624
"""32-bit words in the state of the Mersenne Twister MT19937."""


def _twister(words: np.ndarray) -> Tensor:
    """Return the words as the state of torch's CPU generator; the next draw twists them first.

    The state is: the seed (8 bytes), the words left before the next twist (4, here 1), a flag for seeded (4), the index
    of the next word (8), the words (8 each), and cached normal numbers (none).
    """
    state = np.zeros(5056, np.uint8)
    state[8:16].view("<i4")[:] = (1, 1)
    state[24 : 24 + 8 * _WORDS].view("<u8")[:] = words
    return tensor(state, state.shape)


class Address(Protocol):
    """The address of a random stream: `Key` in simulations, `gradveil.core.secure_noise.SecretKey` in deployments."""

    def child(self, *parts: str | int) -> Address:
        """Return the address of a stream below this one."""
        ...

    def draw(self, law: Law, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw a tensor from the stream of this address, on the CPU."""
        ...


class Law(Protocol):
    """The distribution of a named tensor."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU, by the functions of this module: a deployment passes no torch generator."""
        ...

    def penalty(self, value: Tensor) -> Tensor:
        """Return a penalty per row of `value` [N, ...] for unlikely values, for attackers that optimise it."""
        ...


@dataclass(frozen=True)
class Normal:
    """N(0, std^2), independently for each entry."""

    std: float = 1.0

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        drawn = normal(shape, dtype, source)
        return drawn if self.std == 1 else drawn.mul_(self.std)

    def penalty(self, value: Tensor) -> Tensor:
        """Return half the sum of squares over std^2 per row: -log density up to a constant."""
        return (value / self.std).flatten(1).square().sum(1) / 2


@dataclass(frozen=True)
class Laplace:
    """Laplace(0, scale): the difference of two exponentials, -scale * sign(u) * log(1 - 2|u|) for u in (-1/2, 1/2)."""

    scale: float = 1.0

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        # u = -1/2 can be drawn, and would give log 0: the clamp makes the largest number 53 log 2 scales.
        u = uniform(shape, torch.float64, source) - 0.5
        tail = torch.log1p(-2 * u.abs().clamp(max=0.5 - 2**-54))
        return (-self.scale * torch.sign(u) * tail).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return the sum of magnitudes over the scale per row: -log density up to a constant."""
        return (value / self.scale).flatten(1).abs().sum(1)


@dataclass(frozen=True)
class Uniform:
    """U(low, high), independently for each entry."""

    low: float = 0.0
    high: float = 1.0

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        return self.low + (self.high - self.low) * uniform(shape, dtype, source)

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: all values in the box are equally likely."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)


@dataclass(frozen=True)
class Bernoulli:
    """1 with probability `probability`, else 0."""

    probability: float

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        return chance(shape, self.probability, source).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return |mean - probability| per row (the mask prior of Scheliga et al. 2023)."""
        return (value.flatten(1).mean(1) - self.probability).abs()


@dataclass(frozen=True)
class Schedule:
    """Indices of the examples in each local step: shape [T, B], a new permutation per epoch, cut into batches in order.

    Along leading dimensions (clients of an aggregation group), the orders are independent.
    """

    examples: int

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        if leading := shape[:-2]:
            return torch.stack([self.sample(shape[1:], dtype, source) for _ in range(leading[0])])
        steps, batch = shape
        per_epoch = self.examples // batch
        epochs = -(-steps // per_epoch)
        orders = [permutation(self.examples, source)[: per_epoch * batch] for _ in range(epochs)]
        return torch.cat(orders)[: steps * batch].reshape(shape).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: all orders are equally likely."""
        return torch.zeros(len(value), device=value.device)


@dataclass(frozen=True)
class Noise:
    """Description of one named random tensor: shape, law, neutral value, and constraints for attackers."""

    shape: tuple[int, ...]
    law: Law
    neutral: float | Tensor = 0.0
    """The value that switches the randomness off: 0 for additive noise, the identity for an order."""
    dtype: torch.dtype = torch.float32
    lower: float | None = None
    upper: float | None = None
    """The box that optimised values are projected to; None for no bound."""
    discrete: bool = False
    """True if gradients cannot optimise it (for example, the order of examples)."""

    def sample(self, key: Address) -> Tensor:
        """Draw the tensor."""
        return key.draw(self.law, self.shape, self.dtype)

    def off(self) -> Tensor:
        """Return the neutral value in the full shape."""
        if isinstance(self.neutral, Tensor):
            return self.neutral.to(self.dtype).expand(self.shape).clone()
        return torch.full(self.shape, self.neutral, dtype=self.dtype)

    def project(self, value: Tensor) -> Tensor:
        """Clamp an optimised value to its box."""
        return value if self.lower is None and self.upper is None else value.clamp(self.lower, self.upper)


@dataclass(frozen=True)
class NoiseSpec(Mapping[str, Noise]):
    """The named random tensors of a client, or of a part of it.

    >>> spec = NoiseSpec({"mask": Noise((2,), Bernoulli(0.5), neutral=1.0)}).under("model.drop")
    >>> list(spec), spec.neutral()["model.drop.mask"]
    (['model.drop.mask'], tensor([1., 1.]))
    """

    tensors: Mapping[str, Noise] = field(default_factory=dict[str, Noise])

    def __getitem__(self, name: str) -> Noise:
        """Return the description of one tensor."""
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Count the names."""
        return len(self.tensors)

    def __or__(self, other: NoiseSpec) -> NoiseSpec:
        """Return the union of two specifications with different names."""
        both = set(self.tensors) & set(other.tensors)
        assert not both, f"noise named twice: {sorted(both)}"
        return NoiseSpec({**self.tensors, **other.tensors})

    def under(self, prefix: str) -> NoiseSpec:
        """Add a prefix to every name."""
        return NoiseSpec({f"{prefix}.{name}": noise for name, noise in self.tensors.items()})

    def times(self, *leading: int) -> NoiseSpec:
        """Add leading dimensions (local steps, examples) to every tensor."""
        return NoiseSpec({name: replace(n, shape=(*leading, *n.shape)) for name, n in self.tensors.items()})

    def to(self, dtype: torch.dtype) -> NoiseSpec:
        """Set the dtype of every floating-point tensor."""
        cast = {
            name: replace(noise, dtype=dtype) if noise.dtype.is_floating_point else noise
            for name, noise in self.tensors.items()
        }
        return NoiseSpec(cast)

    def sample(self, key: Address, device: torch.device | None = None) -> dict[str, Tensor]:
        """Draw every tensor from its own stream; client code draws random numbers nowhere else.

        Numbers are drawn on the CPU, so that they are the same everywhere, then moved to the device.
        """
        return {name: noise.sample(key.child(name)).to(device) for name, noise in self.tensors.items()}

    def neutral(self) -> dict[str, Tensor]:
        """Return the values that switch all randomness off."""
        return {name: noise.off() for name, noise in self.tensors.items()}

    def check(self, noise: Mapping[str, Tensor], optional: NoiseSpec | None = None) -> None:
        """Raise with all missing, unknown or wrongly shaped tensors. Tensors of `optional` may be missing."""
        allowed = {**self.tensors, **(optional.tensors if optional else {})}
        problems = [
            Problem(f"noise.{name}", "is missing", "sample it from noise_spec(...) or give the neutral value")
            for name in self.tensors
            if name not in noise
        ]
        for name, value in noise.items():
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                problems.append(Problem(f"noise.{name}", "is not an input of this client", f"known names: {known}"))
            elif tuple(value.shape) != allowed[name].shape:
                expected = allowed[name].shape
                problems.append(Problem(f"noise.{name}", f"has shape {tuple(value.shape)}", f"expected {expected}"))
        refuse(problems)
