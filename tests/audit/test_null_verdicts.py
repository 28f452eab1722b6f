"""Attackers that only guess are not called a leak, and attackers that do better are found."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from benchmarks.null_verdicts import (
    ALMOST,
    BATCHES,
    COPIED,
    KINDS,
    Pool,
    Split,
    beyond_error,
    power,
    real_runs,
    synthetic_runs,
)


@cache
def pool(easy: int | None = None) -> Pool:
    """The bundled faces and backgrounds."""
    return Pool.of("faces", 25, easy)


@cache
def splits(batch: int) -> tuple[Split, ...]:
    """Random splits of the bundled faces into auxiliary and private images."""
    rng = np.random.default_rng(batch)
    return tuple(Split(pool(), rng) for _ in range(3))


@pytest.mark.parametrize("batch", [1, 8])
def test_guesses_at_real_faces_are_no_leak(batch: int) -> None:
    """300 runs: five kinds of guesses, one to five attackers, 8 to 96 images, alone and in batches."""
    leaks: dict[object, list[bool]] = defaultdict(list)
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for attackers, n in ((1, 8), (1, 96), (2, 32), (5, 8), (5, 96)):
            found = [*real_runs(splits(batch), n, attackers, kind, batch, 6, rng)]
            for trial in (kind, attackers, n):
                leaks[trial] += found
    assert sum(map(len, leaks.values())) == 3 * 150
    for found in leaks.values():
        assert not beyond_error({"rate": np.mean(found), "runs": len(found)})


@pytest.mark.parametrize(("kind", "batch"), [(ALMOST, 1), (ALMOST, 8), *((kind, 8) for kind in BATCHES)])
@pytest.mark.parametrize(("copied", "easy"), [(0.0, None), (COPIED, None), (0.0, 1)])
def test_guesses_at_copies_and_at_easy_classes_are_no_leak(
    kind: str, batch: int, copied: float, easy: int | None
) -> None:
    rng = np.random.default_rng(0)
    some = [Split(pool(easy), rng, copied, easy) for _ in range(3)]
    for attackers, n in ((1, 32), (5, 32), (1, 96)):
        found = [*real_runs(some, n, attackers, kind, batch, 9, rng)]
        assert not beyond_error({"rate": np.mean(found), "runs": len(found)})
        hit = some[0].score(some[0].guesses(kind, range(32), batch, rng), range(32), batch)
        assert hit.exact is not None
        assert sum(hit.exact) <= sum(hit.success)


def test_a_share_of_the_private_images_has_a_near_copy_among_the_auxiliary_ones() -> None:
    split = Split(pool(), np.random.default_rng(0), COPIED)
    auxiliary = split.exactly[: -len(split.means) - 1]
    assert COPIED <= float(auxiliary.any(0).double().mean()) < COPIED + 0.2


@pytest.mark.parametrize("public", [20, 200, None])
def test_guesses_of_known_and_of_estimated_chances_are_no_leak(public: int | None) -> None:
    rng = np.random.default_rng(0)
    for attackers, n in ((1, 8), (1, 128), (5, 32)):
        found = [leak for kind in KINDS for leak in synthetic_runs(n, attackers, kind, public, 5, rng)]
        assert not beyond_error({"rate": np.mean(found), "runs": len(found)})


def test_an_attacker_25_points_above_a_baseline_of_10_is_found() -> None:
    rng = np.random.default_rng(0)
    assert power(0.1, 0.25, 1, 32, 400, rng) >= 0.88
    assert power(0.1, 0.25, 5, 32, 200, rng) > 0.7
    assert power(0.0, 0.25, 1, 32, 50, rng) == 1
    assert power(0.5, 0.0, 1, 32, 200, rng) < 0.06
