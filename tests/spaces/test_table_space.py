"""Rows of tables: encoding, scores, matching and baselines."""

import pytest
import torch
from torch import Tensor

from gradveil.spaces import TableColumn, TableSpace
from gradveil.spaces.table_space import TOLERANCE

SPACE = TableSpace(
    (
        TableColumn("age", (), mean=40.0, std=10.0, low=17.0, high=90.0, whole=True),
        TableColumn("sex", ("female", "male", "other")),
        TableColumn("job", ("clerk", "nurse", "other")),
    )
)


def rows(count: int, generator: torch.Generator) -> Tensor:
    ages = torch.randint(17, 91, (count,), generator=generator).double()
    return torch.stack([ages, *(torch.randint(0, 3, (count,), generator=generator).double() for _ in range(2))], -1)


def test_encoding_then_viewing_is_the_identity(generator: torch.Generator) -> None:
    views = rows(20, generator)
    inputs = SPACE.encode(views)
    assert inputs.shape == (20, *SPACE.shape)
    assert torch.equal(SPACE.view(inputs), views)
    assert torch.equal(SPACE.view(SPACE.projected(inputs)), views)


def test_free_variables_become_valid_rows(generator: torch.Generator) -> None:
    variables = (5 * torch.randn(9, *SPACE.shape, generator=generator)).double()
    relaxed = SPACE.relaxed(variables)
    lower, upper = SPACE.bounds(relaxed)
    assert bool(((relaxed >= lower) & (relaxed <= upper)).all())
    assert torch.allclose(relaxed[:, 1:4].sum(-1), torch.ones(9, dtype=torch.float64))
    assert SPACE.projected(relaxed)[:, 1:].unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("off", "right"), [(0.99, 1.0), (1.01, 2 / 3)])
def test_a_number_is_right_within_the_tolerance_only(off: float, right: float) -> None:
    truth = torch.tensor([[50.0, 1.0, 0.0]], dtype=torch.float64)
    guess = truth + torch.tensor([off * TOLERANCE * 10, 0.0, 0.0])
    assert SPACE.scores(guess, truth)["cells"].item() == pytest.approx(right)
    assert SPACE.similarity(guess, truth).item() == pytest.approx(right)


def test_restarts_agree_where_they_give_the_same_cells(generator: torch.Generator) -> None:
    views = rows(5, generator)
    same = SPACE.encode(views).repeat(4, 1, 1)
    assert SPACE.agreement(same).allclose(torch.ones(5, 3).double())
    other = same.clone()
    other[:2, :, 1:4] = SPACE.encode(views.fmod(2) * 0 + 2)[:, 1:4]
    apart = SPACE.agreement(other)
    assert bool((apart[views[:, 1] != 2, 1] < 0.5).all())
    assert apart[:, [0, 2]].allclose(torch.ones(5, 2).double())


def test_matching_undoes_a_permutation_and_broken_rows_come_last(generator: torch.Generator) -> None:
    truth = rows(6, generator)[None]
    order, matched = SPACE.match(truth[:, [3, 1, 0, 5, 4, 2]], truth)
    assert torch.equal(matched, truth)
    assert order.shape == (1, 6)
    broken = truth.clone()
    broken[0, 2] = torch.nan
    assert SPACE.scores(SPACE.match(broken, truth)[1], truth)["cells"].sum() == 5


def test_identified_rows_are_nearer_than_every_other_row() -> None:
    gallery = torch.tensor([[30.0, 0.0, 0.0], [30.0, 0.0, 0.0], [60.0, 1.0, 1.0], [31.0, 0.0, 1.0]]).double()
    candidates = torch.tensor([[30.0, 0.0, 0.0], [60.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]]).double()
    assert SPACE.identified(candidates, torch.tensor([0, 2, 3]), gallery).tolist() == [True, False, False]
    assert SPACE.nearest(candidates, gallery).tolist()[1:] == [0, -1]


def test_guesses_come_from_other_rows(generator: torch.Generator) -> None:
    views = rows(50, generator)
    usual, drawn = SPACE.guesses(views, 10)
    assert torch.equal(usual, SPACE.average(views).expand(10, -1))
    assert not bool((drawn == views[:10]).all(-1).any())
    for place in range(3):
        assert set(drawn[:, place].tolist()) <= set(views[:, place].tolist())


def test_pooling_takes_medians_of_numbers_and_means_of_probabilities() -> None:
    answers = torch.zeros(3, 1, *SPACE.shape)
    answers[:, 0, 0] = torch.tensor([1.0, 2.0, 9.0])
    answers[:, 0, 1] = torch.tensor([1.0, 0.5, 0.0])
    pooled = SPACE.pooled(answers)[0]
    assert pooled[:2].tolist() == [2.0, 0.5]
