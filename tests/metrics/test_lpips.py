"""LPIPS with a stand-in for its package, and the reasons for its absence."""

import sys
from types import ModuleType

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.metrics import Missing, image_similarity, lpips


class Distance(torch.nn.Module):
    """Stands in for the network: remembers its inputs, returns their mean absolute difference as [N, 1, 1, 1]."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        self.seen = first
        return (first - second).abs().mean((1, 2, 3), keepdim=True)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Install a constructor (or an exception it raises) as `lpips.LPIPS`."""

    def put(made) -> None:
        def constructor(**_: object):
            if isinstance(made, Exception):
                raise made
            return made

        package = ModuleType("lpips")
        package.LPIPS = constructor
        monkeypatch.setitem(sys.modules, "lpips", package)

    image_similarity._network.cache_clear()
    yield put
    image_similarity._network.cache_clear()


def test_grey_pixels_reach_the_network_as_colour_in_minus_one_to_one(install) -> None:
    network = Distance()
    install(network)
    candidate, truth = torch.ones(2, 3, 1, 32, 32), torch.zeros(2, 3, 1, 32, 32)
    assert torch.equal(lpips(candidate, truth), torch.full((2, 3), 2.0))
    assert network.seen.shape == (6, 3, 32, 32)
    assert torch.equal(network.seen, torch.ones(6, 3, 32, 32))


def test_a_broken_candidate_gets_the_worst_score(install) -> None:
    install(Distance())
    candidate, truth = torch.zeros(1, 2, 3, 32, 32), torch.zeros(1, 2, 3, 32, 32)
    candidate[0, 1, 0, 0, 0] = torch.nan
    assert lpips(candidate, truth).tolist() == [[0.0, image_similarity.WORST]]


@pytest.mark.parametrize(("error", "reason"), [
    (ImportError("No module named 'torchvision'"), "pip install"),
    (RuntimeError("operator torchvision::nms does not exist"), "beside this torch"),
    (OSError("no network"), "cannot be fetched"),
])  # fmt: skip
def test_its_absence_has_a_reason(install, error: Exception, reason: str) -> None:
    install(error)
    answer = lpips(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
    assert isinstance(answer, Missing)
    assert reason in answer.reason
    assert str(error) in answer.reason


def test_without_the_package_the_extra_is_named(install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    answer = lpips(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
    assert isinstance(answer, Missing)
    assert "gradveil[perceptual]" in answer.reason


def test_small_images_are_missing_and_wrong_calls_refused() -> None:
    small = torch.zeros(1, 3, 28, 28)
    assert lpips(small, small) == Missing("LPIPS (alex) needs images of at least 31x31 pixels")
    with pytest.raises(GradveilError, match="choose one of: alex, vgg"):
        lpips(small, small, net="squeeze")
    with pytest.raises(GradveilError, match="1 or 3"):
        lpips(torch.zeros(1, 2, 32, 32), torch.zeros(1, 2, 32, 32))
