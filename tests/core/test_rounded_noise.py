"""Normal noise in whole steps: its law is that of the rounded normal number, digit by digit."""

import math
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from gradveil.core import secure_noise
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.secure_noise import LARGEST, Rounded, SecretKey, tail
from tests.core.test_secure_noise import Scripted

COUNT = 1_000_000


def drawn(scale: float, count: int = COUNT) -> np.ndarray:
    return SecretKey().draw(Rounded(scale), (count,), torch.int64).numpy()


def test_fine_grid_is_normal():
    """Kolmogorov-Smirnov on 10^6 draws, and the variance within 4 standard errors."""
    scale = 2.0**20 / 3
    found = drawn(scale)
    assert stats.kstest(found[:COUNT] / scale, "norm").pvalue > 1e-5
    assert abs(found.mean()) <= 4.5 * scale / math.sqrt(COUNT)
    assert abs(found.var() / scale**2 - 1) <= 4 * math.sqrt(2 / COUNT)


def coins(steps: Fraction, uniform) -> bool:
    """Be true with probability exp(-steps), by whole numbers alone (Canonne, Kamath and Steinke 2020, Alg. 1)."""
    while steps > 1:
        if not coins(Fraction(1), uniform):
            return False
        steps -= 1
    k = 1
    while uniform(steps.denominator * k) < steps.numerator:
        k += 1
    return k % 2 == 1


def exact(sigma: int, uniform) -> int:
    """Draw from the discrete Gaussian by whole numbers alone (their Alg. 2 and 3)."""
    t = sigma + 1
    while True:
        u = uniform(t)
        if not coins(Fraction(u, t), uniform):
            continue
        v = 0
        while coins(Fraction(1), uniform):
            v += 1
        sign, size = uniform(2), u + t * v
        if sign and not size:
            continue
        if coins((Fraction(size) - Fraction(sigma**2, t)) ** 2 / (2 * sigma**2), uniform):
            return -size if sign else size


def test_sixteen_steps_follow_the_rounded_normal_law():
    """Chi-square on 10^6 draws: against its probabilities, and against draws by fractions.

    A rounded normal number and a discrete Gaussian differ by parts in 10^4 there, of which 10^6 draws show nothing.
    """
    found = Counter(np.clip(drawn(16.0), -64, 64).tolist())
    sizes = range(-64, 65)
    density = np.exp(-0.5 * (np.arange(-400, 401) / 16.0) ** 2)
    share = density / density.sum()
    expected = np.array([share[n + 400] for n in sizes])
    expected[0], expected[-1] = share[: 400 - 63].sum(), share[400 + 64 :].sum()
    counts = np.array([found[n] for n in sizes])
    assert stats.chisquare(counts, expected * COUNT).pvalue > 1e-5

    stream = SecretKey().stream()
    pool: list[int] = []

    def uniform(high: int) -> int:
        if not pool:
            pool.extend(stream.words(100_000).tolist())
        return pool.pop() % high

    reference = Counter(exact(16, uniform) // 8 for _ in range(6_000))
    ours = Counter(dict.fromkeys(reference, 0))
    for n, count in found.items():
        ours[n // 8] += count
    places = range(-5, 5)
    table = [[counter[n] for n in places] for counter in (reference, ours)]
    assert stats.chi2_contingency(table).pvalue > 1e-5


def test_tail_is_exact_to_100_digits():
    for x, value in ((0.5, 0.3085375387259869), (3.0, 0.0013498980316300933), (9.0, 1.1285884059538405e-19)):
        assert float(tail(Decimal(x))) == pytest.approx(value, rel=1e-14)


def test_float64_path_equals_exact_path():
    """Numbers in float64 against 100 digits, for words as they are drawn and for those of the tails."""
    words = SecretKey().stream().words(60)
    words[:20] >>= np.arange(0, 40, 2, dtype=np.uint64)
    for scale in (0.7, 1000.0, 3.3e6):
        nearest, unsure = secure_noise._nearest(words, scale)
        sure = set(range(len(words))) - set(unsure.tolist())
        assert len(sure) >= 45
        for place in sure:
            for more in (0, 2**64 - 1):
                number = secure_noise._exact(int(words[place]), 0, scale, np.array([more] * 2, np.uint64))
                assert number == nearest[place]


@pytest.mark.parametrize("n", [0, 5, 4000])
def test_ties_are_decided_by_more_digits(n):
    """A word of u whose interval holds the border of two numbers: the digits after it say on which side it is."""
    scale = 1000.0
    with localcontext(secure_noise._PRECISE):
        border = tail((n + Decimal("0.5")) / Decimal(scale)) * 2**64
    word = int(border) * 2 + 1
    _, unsure = secure_noise._nearest(np.array([word], np.uint64), scale)
    assert unsure.tolist() == [0]
    ends = [Rounded(scale).sample((1,), torch.int64, Scripted(word, more, more)).item() for more in (0, 2**64 - 1)]
    assert ends == [-n - 1, -n]
    assert secure_noise._nearest(np.array([word + 2 * 10**9], np.uint64), scale).unsure.tolist() == []


def test_extreme_word_has_a_number():
    (far,) = Rounded(1.0).sample((1,), torch.int64, Scripted(0, 0, 2**32)).tolist()
    assert far == 15  # u is 2^-160, and Phi(-14.6) about that


def test_simulation_key_can_draw_rounded_noise():
    law = Rounded(100.0)
    once, again = (Key(1).draw(law, (50_000,), torch.int64) for _ in range(2))
    assert torch.equal(once, again)
    assert stats.kstest((once.numpy() + 0.0) / 100, "norm").pvalue > 1e-6


@pytest.mark.parametrize("scale", [0.0, -1.0, 2 * LARGEST, math.inf, math.nan])
def test_too_large_scale_raises(scale):
    with pytest.raises(GradveilError, match="steps of its grid, at most"):
        Rounded(scale)
