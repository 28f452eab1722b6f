"""The denoiser of public images: it removes noise, is trained once, and pulls a search towards such images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion import denoiser
from gradveil.attacks.inversion.denoiser import Denoiser, kept_denoiser, train_denoiser, unlikeness
from gradveil.attacks.protocol import Prospect
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.nn.models import build
from tests.attacks.small_experiments import tiny


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    public = load("patches").public
    return public.space.view(public.inputs).float()


def test_a_trained_denoiser_removes_noise(images: torch.Tensor) -> None:
    small = images[..., :16, :16]
    net, level = train_denoiser(small[:300], Key(0), lessons=80), torch.full((64,), 0.2)
    noisy = small[300:364] + 0.2 * torch.randn(64, *small.shape[1:], generator=Key(1).generator())
    assert (net(noisy, level) - small[300:364]).square().mean() < 0.5 * 0.2**2


def test_a_denoiser_is_trained_once_for_the_same_images(
    images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def train(given: torch.Tensor, key: Key) -> Denoiser:
        trained.append(len(given))
        return train_denoiser(given, key, lessons=1)

    monkeypatch.setattr(denoiser, "train_denoiser", train)
    first, again = (kept_denoiser(images[:70], tmp_path) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"none")
    kept_denoiser(images[:70], tmp_path)
    kept_denoiser(images[:80], tmp_path)
    assert trained == [70, 70, 80]
    assert len([*tmp_path.iterdir()]) == 2


def test_the_derivative_of_the_prior_is_what_the_denoiser_removes(images: torch.Tensor) -> None:
    net, some = train_denoiser(images, Key(0), lessons=1), images[:2, None].clone().requires_grad_()
    (slope,) = torch.autograd.grad(unlikeness(net, some).sum(), some)
    removed = some[:, 0] - net(some[:, 0], torch.full((2,), denoiser.LEVEL))
    assert torch.allclose(slope[:, 0] * images[0].numel(), removed, atol=1e-6)


def test_a_denoiser_needs_public_images() -> None:
    attack = make_attack("cdia(denoise=1)")
    assert "public" in attack.knowledge
    net = build("lenet-zhu", channels=1, size=16, classes=3, generator=Key(0).generator())
    few, enough = (Prospect(Client(net), (1, 16, 16), 1, 3, public) for public in (8, 64))
    assert [problem.where for problem in attack.problems(few)] == ["denoise"]
    assert list(attack.problems(enough)) == []


class Blurred(torch.nn.Module):
    """A denoiser of a user's own."""

    def forward(self, images: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        assert level.shape == images.shape[:1]
        return torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)


def test_a_custom_denoiser_smooths_what_a_search_finds() -> None:
    scene = tiny(dtype=torch.float32)
    found = {}
    for weight in (0, 30):
        text = f'cdia(iterations=60, denoise={weight}, denoiser="tests.attacks.test_denoiser:Blurred")'
        attack = make_attack(text)
        assert "public" not in attack.knowledge
        images = scene.knowledge.space.view(attack([scene.observation], scene.client, scene.knowledge, Key(0)).inputs)
        found[weight] = float(unlikeness(Blurred(), images).mean())
    assert found[30] < 0.5 * found[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cdia(denoiser="tests.attacks.test_denoiser:Blurred")', "has no effect, because the weight denoise is 0"),
        ('cdia(denoise=1, denoiser="torch.nn:Identity")', "the denoiser raised TypeError"),
        ('cdia(denoise=1, denoiser="nowhere.at.all:Net")', "there is no module 'nowhere'"),
    ],
)
def test_unfit_denoisers_are_refused(text: str, message: str) -> None:
    net = build("lenet-zhu", channels=1, size=16, classes=3, generator=Key(0).generator())
    (problem,) = make_attack(text).problems(Prospect(Client(net), (1, 16, 16), 1, 3, 0))
    assert message in str(problem)


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_training(
    images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoiser, "train_denoiser", lambda given, key: train_denoiser(given, key, lessons=1))
    (tmp_path / "file").write_text("no folder")
    assert kept_denoiser(images[:70], tmp_path / "file" / "cache").layers
