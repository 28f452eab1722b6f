"""Streams of deployments: nobody can name one again, no two processes share one, and every law draws from them."""

import copy
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import betainc

from gradveil.core.distributions import Agreed, Beta, OneOf, Shares, Signs
from gradveil.core.errors import GradveilError
from gradveil.core.noise import (
    Bernoulli,
    Key,
    Laplace,
    Noise,
    NoiseSpec,
    Normal,
    Schedule,
    Uniform,
    integers,
    normal,
    permutation,
    uniform,
)
from gradveil.core.secure_noise import CipherStream, SecretKey
from gradveil.nn.keylock import Locked

ROOT = Path(__file__).parents[2]


def test_stream_is_chacha20():
    """The first block under a key of zeros, as RFC 8439 has it (appendix A.1, vector 1)."""
    found = CipherStream(bytes(32)).words(8).astype("<u8").tobytes().hex()
    assert found.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


def test_stream_depends_on_address_and_secret():
    key = SecretKey()
    one = key.child("a", 3).stream().words(4)
    assert np.array_equal(one, key.child("a").child(3).stream().words(4))
    others = (key, key.child("a"), key.child("a", "3"), key.child("b", 3), SecretKey().child("a", 3))
    assert all(not np.array_equal(one, other.stream().words(4)) for other in others)


def test_secret_cannot_be_shown_copied_or_stored(monkeypatch):
    roots = []

    def recorded(count):
        roots.append(bytes(range(count)))
        return roots[-1]

    monkeypatch.setattr(os, "urandom", recorded)
    key = SecretKey().child("round", 1)
    assert repr(key) == "SecretKey(path=('round', 1))"
    assert len(roots) == 1
    assert len(roots[0]) == 32
    for attempt in (copy.copy, copy.deepcopy, lambda key: key.__reduce_ex__(2), lambda key: key.__reduce__()):
        with pytest.raises(GradveilError, match="cannot be copied or stored"):
            attempt(key)
    assert not hasattr(key, "__dict__")


FORKS = """
import os
from gradveil.core.secure_noise import SecretKey
from gradveil.core.errors import GradveilError
key = SecretKey()
if not os.fork():
    try:
        print("shared", key.stream().words(1)[0])
    except GradveilError as error:
        print("refused", error.problems[0].what, flush=True)
    print(SecretKey().stream().words(1)[0], flush=True)
    os._exit(0)
os.wait()
print(key.stream().words(1)[0])
print(SecretKey().stream().words(1)[0])
"""


def test_processes_and_forks_share_no_stream():
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=surroundings, capture_output=True, text=True, check=True)
    refused, *words = done.stdout.splitlines()
    assert refused.startswith("refused was made in another process")
    words += [str(SecretKey().stream().words(1)[0]) for _ in range(2)]
    assert len(set(words)) == 5


def test_missing_cryptography_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(GradveilError, match=r"gradveil\[flower\]"):
        SecretKey().stream()


COUNT = 40_000
LAWS = [
    (Normal(2.0), lambda x: stats.norm.cdf(x / 2)),
    (Laplace(0.5), lambda x: stats.laplace.cdf(x / 0.5)),
    (Uniform(-1, 3), lambda x: (x + 1) / 4),
    (Beta(0.4), lambda x: betainc(0.4, 0.4, x)),
]


@pytest.mark.parametrize(("law", "cdf"), LAWS, ids=lambda value: type(value).__name__)
def test_continuous_laws_equal_those_of_simulations(law, cdf):
    """Kolmogorov-Smirnov against the law; it fails by chance once in 10^5 runs."""
    drawn = SecretKey().draw(law, (COUNT,), torch.float64).numpy()
    assert stats.kstest(drawn, cdf).pvalue > 1e-5
    assert SecretKey().draw(law, (3, 5), torch.float32).dtype == torch.float32


def within(found: float, expected: float, spread: float, count: int = COUNT) -> bool:
    """Whether a mean is within 4.5 standard errors of what it should be."""
    return abs(found - expected) <= 4.5 * spread / math.sqrt(count)


def test_discrete_laws_equal_those_of_simulations():
    key = SecretKey()
    taken = key.child("b").draw(Bernoulli(0.3), (COUNT,), torch.float32)
    assert set(taken.unique().tolist()) == {0.0, 1.0}
    assert within(taken.mean().item(), 0.3, 0.46)
    signs = key.child("s").draw(Signs(), (COUNT,), torch.float32)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert within(signs.mean().item(), 0.0, 1.0)
    one = key.child("o").draw(OneOf(), (COUNT, 5), torch.float64)
    assert one.sum(1).unique().tolist() == [1.0]
    assert all(within(share, 0.2, 0.4) for share in one.mean(0).tolist())
    shares = key.child("h").draw(Shares(0.6, 0.3), (500, 4), torch.float64)
    assert shares.amax() <= 0.6
    torch.testing.assert_close(shares.sum(1), torch.ones(500, dtype=torch.float64))
    order = key.child("p").draw(Schedule(6), (2, 9, 2), torch.int64)
    assert all(sorted(epoch.tolist()) == list(range(6)) for epoch in order.view(6, 6))
    assert len({tuple(epoch.tolist()) for epoch in order.view(6, 6)}) > 1
    lock = key.child("l").draw(Locked(3), (7,), torch.float64)
    assert bool(((lock[4:] >= 0) & (lock[4:] < 1)).all())
    public = Agreed(Key(1), (4,))
    assert torch.equal(key.child("g").draw(public, (2, 4), torch.float64)[0], public.sample((4,), torch.float64, 0))


def test_integers_and_permutations_are_uniform():
    stream = SecretKey().stream()
    counts = torch.bincount(integers(3, (COUNT,), stream), minlength=3)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-5
    firsts = torch.bincount(torch.stack([permutation(4, stream) for _ in range(2000)])[:, 0], minlength=4)
    assert stats.chisquare(firsts.numpy()).pvalue > 1e-5


class Scripted:
    """A stream of given words."""

    def __init__(self, *given):
        self.given = list(given)

    def words(self, count):
        taken, self.given = self.given[:count], self.given[count:]
        assert len(taken) == count
        return np.array(taken, np.uint64)


def test_extreme_words_stay_in_range():
    last = 2**64 - 1
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        low, high = uniform((2,), dtype, Scripted(0, last)).tolist()
        assert low == 0
        assert 0.99 < high < 1
    assert torch.isfinite(normal((4,), torch.float64, Scripted(0, 1, last - 1, last))).all()
    assert integers(3, (1,), Scripted(last, 5)).tolist() == [2], "the last word would favour 0, and is drawn again"
    assert permutation(2, Scripted(7, 7, 9, 8)).tolist() == [1, 0], "equal words have an order of their own"


@dataclass(frozen=True)
class Own(Normal):
    """A user's law that takes a generator of torch's."""

    def sample(self, shape, dtype, generator):
        return torch.randn(shape, dtype=dtype, generator=generator)


@dataclass(frozen=True)
class Deaf(Normal):
    """A user's law with a seed of its own."""

    def sample(self, shape, dtype, generator):
        return torch.randn(shape, dtype=dtype, generator=Key(3).generator())


@dataclass(frozen=True)
class Global(Normal):
    """A user's law that draws from torch's global generator."""

    def sample(self, shape, dtype, generator):
        return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("law", "what"),
    [(Own(), "cannot draw from a cryptographic stream"), (Deaf(), "draws nothing"), (Global(), "draws nothing")],
)
def test_law_with_another_source_raises(law, what):
    spec = NoiseSpec({"mine": Noise((20,), law)})
    assert spec.sample(Key(0))["mine"].shape == (20,)
    with pytest.raises(GradveilError, match=rf"noise\.mine: its law {type(law).__name__} {what}.* -> let it draw by"):
        spec.sample(SecretKey())
