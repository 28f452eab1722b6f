"""The chance of a guess, against the same numbers computed one pair at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from gradveil.audit import baselines as module
from gradveil.audit.baselines import Gallery, Guessing
from gradveil.data import Dataset, load
from gradveil.metrics import ssim, ssim_pairs
from gradveil.spaces import ImageSpace


def few(count: int = 12) -> Dataset:
    """Handwritten ones and sevens, at 16x16 pixels."""
    public = load("digits", size=16).public
    chosen = torch.cat([(public.targets == label).nonzero().flatten()[:count] for label in (1, 7)])
    return public.subset(chosen)


def test_pairs_are_scored_as_single_images_are() -> None:
    images = torch.rand(5, 3, 16, 20, generator=torch.Generator().manual_seed(0)).double()
    found = ssim_pairs(images[:2], images)
    for row, one in zip(found, images, strict=False):
        torch.testing.assert_close(row.double(), ssim(one.expand_as(images), images), rtol=0, atol=1e-5)
    paired = ssim_pairs(images.flip(0)[None], images)
    torch.testing.assert_close(paired[0].double(), ssim(images.flip(0), images), rtol=0, atol=1e-5)


def test_the_chance_is_that_of_the_best_guess_and_leaves_itself_out() -> None:
    public = few()
    images = public.subset((public.targets == 7).nonzero().flatten()).views.double()
    shares = []
    for place, guess in enumerate(images):
        others = torch.cat([images[:place], images[place + 1 :]])
        shares.append(float((ssim(guess.expand_as(others), others) > 0.5).double().mean()))
    left_out = torch.stack([(images.sum(0) - one) / (len(images) - 1) for one in images])
    level = left_out.mean((-3, -2, -1), keepdim=True)
    for contrast in (1, 1.3, 1.7):
        raised = (level + contrast * (left_out - level)).clamp(0, 1)
        shares.append(float((ssim(raised, images) > 0.5).double().mean()))
    shares.append(float((ssim(public.views.double().mean(0).expand_as(images), images) > 0.5).double().mean()))
    found = Guessing(public, 0.5, 2).chance(7)
    assert found.share == pytest.approx(max(shares))
    assert found.images in (11, 12)


def test_more_guesses_at_a_class_cover_more_of_it() -> None:
    guessing = Guessing(few(), 0.8, 2)
    shares = [guessing.chance(7, guesses).share for guesses in (1, 2, 3, 100)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1]
    images = guessing.images(7)
    alike = ssim_pairs(images, images) > 0.8
    best = max(
        float(
            torch.cat([(alike[i] | alike[j])[:i], (alike[i] | alike[j])[i + 1 : j], (alike[i] | alike[j])[j + 1 :]])
            .double()
            .mean()
        )
        for i in range(12)
        for j in range(i + 1, 12)
    )
    assert shares[1] >= best - 0.1


@pytest.mark.parametrize("spare", [0, 1])
def test_guesses_at_a_class_without_images_to_spare_are_taken_to_pass_always(spare: int) -> None:
    public = few()
    rare = (public.targets == 1).nonzero().flatten()[:spare]
    guessing = Guessing(public.subset(torch.cat([(public.targets == 7).nonzero().flatten(), rare])), 0.5, 2)
    assert guessing.chance(1)[:2] == guessing.chance(1, exact=True)[:2] == (1.0, 0)
    assert [chance[:2] for chance in guessing.of_batch([1, 7])] == [(1.0, 0)] * 2
    assert guessing.chance(7).images > 0
    assert guessing.sample(1)[2] == len(guessing.public)


def test_large_classes_are_sampled_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    public = load("digits", size=16).public
    whole = Guessing(public, 0.5, 1)
    assert whole.sample(1) == (124, 120, 120)
    monkeypatch.setattr(module, "PAIRS", 2000)
    sampled = Guessing(public, 0.5, 4)
    guesses, images, of = sampled.sample(1)
    assert guesses * images < 2 * 2000 * 4 // 4
    assert (images < of, of) == (True, 120)
    assert sampled.chance(1) == Guessing(public, 0.5, 4).chance(1)
    assert sampled.chance(1).share == pytest.approx(whole.chance(1).share, abs=0.15)


def test_guesses_of_a_batch_pass_for_images_of_other_labels_too() -> None:
    """Where labels say nothing about images, ten guesses cover the images of ten labels together."""
    public = load("digits", size=16).public
    order = torch.randperm(len(public), generator=torch.Generator().manual_seed(0))
    unrelated = replace(public.subset(order), targets=torch.arange(len(public)) % 10)
    guessing = Guessing(unrelated.subset(range(600)), 0.5, 10)
    others = unrelated.views[600:]
    # The guesses are chosen greedily, as an attacker can, and never see the others.
    images = guessing.images(None)[:120]
    alike, chosen = ssim_pairs(images, images) > 0.5, list[int]()
    for _ in range(10):
        covered = alike[chosen].any(0)
        chosen.append(int((alike & ~covered).sum(1).argmax()))
    reached = float((ssim_pairs(images[chosen], others) > 0.5).any(0).double().mean())
    chances = guessing.of_batch(range(10))
    assert reached > 1.3 * sum(guessing.chance(label).share for label in range(10)) / 10
    assert min(chance.share for chance in chances) >= reached - 0.05
    assert guessing.of_batch([7, 7]) == [guessing.chance(7, 2)] * 2


def test_share_of_weights_never_exceeds_one() -> None:
    """The sum over the covered images has fewer terms than the whole, and is rounded differently."""
    for seed in range(100):
        weights = torch.rand(60, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        weights[::3] = 0
        (chance,) = module._cover((weights > 0)[None], torch.tensor([-1]), weights)
        assert chance.share == pytest.approx(1)
        assert chance.share <= 1


@pytest.mark.parametrize("labels", [[0], [1], [0, 1], [0, 0], [1, 1, 0], [0, 1, 2]])
@pytest.mark.parametrize("images", ["aaabcdefg", "abcdefghi", "aabbccaac", "aaaaaaaaa", "abacadaea"])
def test_no_choice_of_guesses_names_more_images_than_expected(labels: list[int], images: str) -> None:
    """All ways to deal the images of a class, all choices of guesses: one for each image of the batch."""
    targets = [0, 0, 0, 1, 1, 1, 1, 2, 0]
    pixels = torch.tensor([float(ord(image)) for image in images]).view(-1, 1, 1, 1)
    named = Gallery(pixels, torch.tensor(targets)).of_batch(labels)
    own = [[image for image, target in zip(images, targets, strict=True) if target == label] for label in labels]
    distinct = sorted(set(images))
    best = 0.0
    for guesses in combinations(distinct, min(len(labels), len(distinct))):
        best = max(best, sum(sum(image in guesses for image in each) / len(each) for each in own))
    assert sum(one.share for one in named) >= best - 1e-9
    if len(set(labels)) == 1:
        assert sum(one.share for one in named) == pytest.approx(best)
    for label, one in zip(labels, named, strict=True):
        assert one.gallery == targets.count(label)
        if one.exact:
            assert one.share == pytest.approx(min(1, labels.count(label) / one.gallery))


def test_a_batch_of_guesses_at_its_easiest_class_passes_for_no_more_than_expected() -> None:
    """Images of class 0 are one of eight patterns, all others are noise: eight guesses at class 0 hit all of it."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.rand(8, 1, 16, 16, generator=draw)
    targets = torch.arange(400) % 10
    pixels = torch.rand(400, 1, 16, 16, generator=draw)
    easy = (targets == 0).nonzero().flatten()
    pixels[easy] = (patterns[torch.arange(len(easy)) % 8] + 0.01 * pixels[easy]).clamp(0, 1)
    guessing = Guessing(Dataset("patterns", pixels, targets, tuple("0123456789")), 0.5, 10)
    for labels in ([0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 2, 3, 4, 5, 6]):
        hit = int((ssim_pairs(patterns, patterns[: labels.count(0)]) > 0.5).any(0).sum())
        assert hit == labels.count(0)
        assert sum(chance.share for chance in guessing.of_batch(labels)) >= hit - 1e-6
        assert sum(chance.share for chance in guessing.of_batch(labels)) <= hit + 1


def test_mean_guess_is_exactly_the_mean_of_the_other_images() -> None:
    views = 0.2 + 0.6 * torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    plain, raised, *_ = ImageSpace((1, 3, 3)).guesses(views, tested=2)
    others = torch.stack([views[1:].mean(0), views[[0, 2, 3]].mean(0)])
    torch.testing.assert_close(plain, others)
    torch.testing.assert_close(raised.mean((1, 2, 3)), others.mean((1, 2, 3)))
    assert (raised.flatten(1).std(1) > plain.flatten(1).std(1)).all()
