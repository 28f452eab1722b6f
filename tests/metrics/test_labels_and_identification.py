"""Label accuracy and identification against naive counting."""

from collections import Counter

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.metrics import identification, label_accuracy, matched_label_accuracy, rank


def test_multiset_accuracy_against_counters(generator: torch.Generator) -> None:
    guessed, actual = (torch.randint(0, 4, (20, 6), generator=generator) for _ in range(2))
    expected = [
        sum((Counter(g) & Counter(a)).values()) / 6 for g, a in zip(guessed.tolist(), actual.tolist(), strict=True)
    ]
    assert label_accuracy(guessed, actual).tolist() == pytest.approx(expected)
    assert torch.equal(label_accuracy(actual.flip(1), actual), torch.ones(20))


def test_matched_accuracy_is_per_image() -> None:
    assert matched_label_accuracy(torch.tensor([[1, 2]]), torch.tensor([[1, 3]])).tolist() == [[1.0, 0.0]]


def test_scores_are_read_by_their_largest_and_broken_ones_count_as_wrong() -> None:
    scores = torch.zeros(1, 3, 5)
    scores[0, 0, 4] = scores[0, 1, 2] = scores[0, 2, 0] = 1
    assert label_accuracy(scores, torch.tensor([[0, 4, 2]])).item() == 1
    scores[0, 0, 1] = torch.nan
    assert label_accuracy(scores, torch.tensor([[0, 4, 2]])).item() == pytest.approx(2 / 3)
    assert matched_label_accuracy(scores, torch.tensor([[4, 2, 0]])).tolist() == [[0.0, 1.0, 1.0]]
    assert label_accuracy(torch.tensor([[-1, -1]]), torch.tensor([[0, 0]])).item() == 0


def test_labels_of_other_shapes_are_refused() -> None:
    with pytest.raises(GradveilError, match=r"\[V, B\]"):
        label_accuracy(torch.zeros(1, 2), torch.zeros(1, 3))


def test_a_noisy_face_is_found_in_the_gallery_and_noise_is_not(generator: torch.Generator) -> None:
    gallery = load("faces", normalise="none").private.views
    index = torch.tensor([[0, 5], [9, 40]])
    noisy = gallery[index] + 0.1 * torch.randn(2, 2, 1, 32, 32, generator=generator)
    assert torch.equal(identification(noisy, index, gallery), torch.ones(2, 2))
    assert torch.equal(identification(noisy.flip(0), index, gallery), torch.zeros(2, 2))


def test_rank_counts_nearer_images_naively(generator: torch.Generator) -> None:
    gallery = torch.rand(7, 1, 3, 3, generator=generator)
    candidate, index = torch.rand(4, 1, 3, 3, generator=generator), torch.tensor([0, 3, 6, 2])
    for image, place, found in zip(candidate, index, rank(candidate, index, gallery), strict=True):
        distances = [(image - other).square().sum().item() for other in gallery]
        assert found == sum(distance < distances[place] for distance in distances)


def test_a_copy_in_the_gallery_does_not_hide_the_target_client() -> None:
    gallery = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 2)])
    near = torch.full((2, 1, 2, 2), 0.9)
    assert identification(near, torch.tensor([1, 2]), gallery).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_broken_candidate_identifies_nobody(size: int) -> None:
    gallery = torch.arange(size).float().reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    broken = torch.full((1, 1, 2, 2), torch.nan)
    assert identification(broken, torch.tensor([0]), gallery).item() == 0
    assert rank(broken, torch.tensor([0]), gallery).item() == max(size - 1, 1)


def test_places_outside_the_gallery_and_other_shapes_are_refused() -> None:
    images = torch.zeros(1, 1, 2, 2)
    with pytest.raises(GradveilError, match="outside 0 to 0"):
        rank(images, torch.tensor([1]), images)
    with pytest.raises(GradveilError, match="truth_index and gallery"):
        rank(images, torch.tensor([0, 0]), images)
