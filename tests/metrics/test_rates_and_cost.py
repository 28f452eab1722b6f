"""Wilson's interval against scipy; bytes and distances against naive loops."""

import math

import pytest
import torch
from scipy.stats import binomtest

from gradveil.core.errors import GradveilError
from gradveil.metrics import asr, cosine, dense_bytes, relative_distance, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 32), (31, 32), (32, 32), (50, 128), (1, 10_000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_wilson_is_scipys(successes: int, n: int, confidence: float) -> None:
    reference = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    low, high = wilson(successes, n, confidence)
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert 0 <= low <= successes / n <= high <= 1


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 0), "at least one target client"), ((3, 2), "between 0 and n"), ((-1, 2), "between 0 and n"),
    ((1, 2, 95), "say 0.95"), ((1, 2, float("nan")), "say 0.95"),
])  # fmt: skip
def test_wilson_refuses_what_is_no_share(arguments: tuple, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        wilson(*arguments)


def test_asr_is_strictly_above_the_threshold_and_nan_fails() -> None:
    rate = asr(torch.tensor([[0.5, 0.51], [math.nan, 0.9]]))
    assert (rate.successes, rate.n, rate.rate) == (2, 4, 0.5)
    assert (rate.low, rate.high) == wilson(2, 4)
    assert asr(torch.tensor([0.3, 0.5]), threshold=0.2).rate == 1


def update(generator: torch.Generator, kept: float = 1.0) -> dict[str, torch.Tensor]:
    made = {"w": torch.randn(3, 4, 5, generator=generator), "b": torch.randn(3, 4, generator=generator)}
    return {name: value * (torch.rand(value.shape, generator=generator) < kept) for name, value in made.items()}


def test_dense_bytes_are_four_a_value_for_every_target_client() -> None:
    sent = {"w": torch.zeros(3, 100, 10, dtype=torch.float64), "b": torch.zeros(3, 9)}
    assert dense_bytes(sent).tolist() == [4 * 1009] * 3


def test_distances_against_one_long_vector(generator: torch.Generator) -> None:
    raw, sent = update(generator), update(generator, kept=0.5)
    for target_client in range(3):
        x, y = (torch.cat([part[name][target_client].flatten().double() for name in raw]) for part in (sent, raw))
        assert relative_distance(sent, raw)[target_client].item() == pytest.approx(((x - y).norm() / y.norm()).item())
        assert cosine(sent, raw)[target_client].item() == pytest.approx((x @ y / x.norm() / y.norm()).item())
    assert relative_distance(raw, raw).tolist() == [0.0] * 3
    torch.testing.assert_close(cosine(raw, raw), torch.ones(3, dtype=torch.float64))


def test_distances_never_give_nan() -> None:
    raw = {"w": torch.tensor([[0.0], [0.0], [1.0], [1.0]])}
    sent = {"w": torch.tensor([[0.0], [1.0], [math.nan], [math.inf]])}
    assert relative_distance(sent, raw).tolist() == [0.0, math.inf, math.inf, math.inf]
    assert cosine(sent, raw).tolist() == [0.0] * 4


def test_updates_that_do_not_fit_are_refused_all_at_once() -> None:
    sent, raw = {"w": torch.zeros(1, 2), "a": torch.zeros(1)}, {"w": torch.zeros(1, 3), "b": torch.zeros(1)}
    with pytest.raises(GradveilError) as caught:
        cosine(sent, raw)
    assert [problem.where for problem in caught.value.problems] == ["update.a", "update.b", "update.w"]
    with pytest.raises(GradveilError, match="one number of target clients"):
        dense_bytes({"w": torch.zeros(1, 2), "b": torch.zeros(2)})
    with pytest.raises(GradveilError, match="one number of target clients"):
        dense_bytes({})
