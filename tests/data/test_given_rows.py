"""Plain vectors are rows of numbers: named, ranged by what is known, and unchanged for the model."""

import numpy as np
import pandas as pd
import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data.given_examples import column_names, tensors_of
from gradveil.data.given_rows import space_of_vectors, space_of_vectors_sent

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1.0])
Y = torch.arange(40) % 2
FRAME = pd.DataFrame(X.numpy(), columns=pd.Index(list("abcde")))


def test_vectors_are_read_as_they_are_and_scored_by_their_deviations() -> None:
    space = space_of_vectors(X)
    assert torch.equal(space.encode(X), X)
    assert torch.equal(space.view(X), X)
    assert [column.name for column in space.columns] == ["x0", "x1", "x2", "x3", "x4"]
    deviations = X.std(0, correction=0)
    assert bool(space.right(X + 0.3 * deviations, X).all())
    assert not bool(space.right(X + 0.35 * deviations, X).any())
    lower, upper = space.bounds(X)
    torch.testing.assert_close((lower, upper), (X.amin(0), X.amax(0)))
    inside, rounding = space.relaxed(X * 100), 1e-5
    assert bool(((inside >= lower - rounding) & (inside <= upper + rounding)).all())
    close = torch.stack([X, X + 0.3 * deviations, X])
    assert bool((space.agreement(close) == 1).all())
    assert bool((space.agreement(torch.stack([X, X + deviations, X])) < 1).all())


def test_standardised_vectors_are_shown_as_the_numbers_that_they_were() -> None:
    mean, std = X.mean(0), X.std(0, correction=0)
    space = space_of_vectors((X - mean) / std, mean=mean.tolist(), std=std.tolist())
    torch.testing.assert_close(space.view((X - mean) / std), X)
    torch.testing.assert_close(space.bounds(X)[1], ((X - mean) / std).amax(0))


def test_a_range_that_is_given_is_that_of_every_column() -> None:
    assert space_of_vectors(X, bounds=(-5.0, 5.0)).bounds(X[0])[0].tolist() == [-5.0] * 5
    alone = space_of_vectors_sent(None, (3,), bounds="unit")
    assert alone is not None
    assert alone.bounds(X[0, :3])[1].tolist() == [1.0] * 3
    assert space_of_vectors_sent(None, (1, 8, 8)) is None
    with pytest.raises(GradveilError, match=r"bounds: are not known.*give bounds=\(low, high\)"):
        space_of_vectors_sent(None, (3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.0, 1.0]}, "mean: has 2 numbers for 5 columns"),
        ({"std": [1.0, 1.0, 0.0, 1.0, 1.0]}, "std: holds 0"),
    ],
)
def test_scaling_that_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        space_of_vectors(X, **options)


@pytest.mark.parametrize("given", [(FRAME, Y), {"x": FRAME, "y": Y.tolist()}], ids=["pair", "dictionary"])
def test_a_frame_of_numbers_is_vectors_with_names(given: object) -> None:
    inputs, targets = tensors_of(given, "batch")
    torch.testing.assert_close(inputs, X)
    assert torch.equal(targets, Y)
    assert column_names(given) == tuple("abcde")
    assert column_names((X, Y)) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            FRAME.assign(ill=Y.numpy()),
            r"data frame of the columns a, b, c, d, e and ill; .*gradveil\.data\.table\(frame, label",
        ),
        ((FRAME.assign(sex="f"), Y), "column 'sex' holds 'f', and inputs are numbers"),
        ((pd.concat([FRAME, FRAME[["a"]]], axis=1), Y), "has two columns 'a'"),
    ],
    ids=["labels-inside", "text", "twice"],
)
def test_frames_that_are_no_vectors_are_refused_with_a_way(given: object, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        tensors_of(given, "batch")


def test_empty_cells_of_a_frame_are_not_a_number() -> None:
    inputs, _ = tensors_of((FRAME.where(FRAME < 1, np.nan), Y), "batch")
    assert torch.equal(inputs.isnan(), X >= 1)
