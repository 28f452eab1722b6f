"""Normalisation and bounds travel with the data, and bad data is refused."""

import math
from dataclasses import replace

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import Dataset


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    pixels = torch.rand(6, 3, 4, 4, generator=generator)
    inputs = (pixels - torch.tensor(mean).reshape(3, 1, 1)) / torch.tensor(std).reshape(3, 1, 1)
    return Dataset("made", inputs, torch.arange(6) % 2, ("a", "b"), mean, std)


def test_inputs_and_views_are_inverse(data: Dataset) -> None:
    torch.testing.assert_close(data.space.encode(data.views), data.inputs)
    assert data.space.encode(data.views.reshape(2, 3, 3, 4, 4).double()).dtype == torch.float64


def test_bounds_are_black_and_white(data: Dataset) -> None:
    lower, upper = data.space.bounds(data.inputs)
    assert lower.shape == upper.shape == (3, 1, 1)
    torch.testing.assert_close(lower.flatten(), torch.tensor([-2.5, -1.6, -1.0]))
    torch.testing.assert_close(upper.flatten(), torch.tensor([2.5, 2.4, 7 / 3]))
    assert data.space.view(upper + 1).tolist() == torch.ones(3, 1, 1).tolist()
    assert data.space.view(lower - 1).tolist() == torch.zeros(3, 1, 1).tolist()
    assert data.space.view(lower * math.nan).isnan().all()


def test_subset_keeps_order_and_everything_else(data: Dataset) -> None:
    part = data.subset([4, 1])
    assert torch.equal(part.inputs, data.inputs[[4, 1]])
    assert part.targets.tolist() == [0, 1]
    assert (part.mean, part.classes) == (data.mean, data.classes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"inputs": torch.zeros(6, 4, 4)}, "float32 images of shape"),
    ({"inputs": torch.zeros(6, 3, 4, 4, dtype=torch.float64)}, "float32 images of shape"),
    ({"inputs": torch.zeros(0, 3, 4, 4)}, "holds no images"),
    ({"inputs": torch.zeros(6, 0, 4, 4)}, "float32 images of shape"),
    ({"inputs": torch.full((6, 3, 4, 4), math.nan)}, "image 0 holds NaN"),
    ({"inputs": torch.full((6, 3, 4, 4), math.inf)}, "NaN or infinite"),
    ({"inputs": torch.full((6, 3, 4, 4), 3.0)}, "outside [0, 1]"),
    ({"inputs": torch.full((6, 3, 4, 4), -2.0)}, "pixels range from -0.3"),
    ({"inputs": torch.zeros(6, 2, 4, 4)}, "do not fit 2 channel(s)"),
    ({"targets": torch.zeros(5, dtype=torch.int64)}, "one int64 class number per image"),
    ({"targets": torch.zeros(6)}, "one int64 class number per image"),
    ({"targets": torch.tensor([0, 1, 0, 2, 0, 1])}, "label 2 of image 3 is outside 0 to 1"),
    ({"targets": torch.tensor([0, 1, 0, 1, -1, 1])}, "label -1 of image 4"),
    ({"std": (0.2, 0.0, 0.3)}, "every std above 0"),
])  # fmt: skip
def test_bad_data_raises(data: Dataset, changes: dict, message: str) -> None:
    with pytest.raises(GradveilError) as caught:
        replace(data, **changes)
    assert message in str(caught.value)


def test_bad_image_and_bad_labels_are_both_reported(data: Dataset) -> None:
    inputs = data.inputs.clone()
    inputs[2, 1, 0, 0] = math.nan
    with pytest.raises(GradveilError) as caught:
        replace(data, inputs=inputs, targets=torch.full((6,), 9))
    assert "image 2 holds NaN" in str(caught.value)
    assert "label 9 of image 0" in str(caught.value)
