"""Partitions assign every example exactly once, and Dirichlet shares follow their law."""

import pytest
import torch
from scipy.stats import beta, kstest

from gradveil.core.errors import GradveilError
from gradveil.data import dirichlet, grouped, iid
from gradveil.data.partition import _dirichlet

TARGETS = torch.arange(1000) % 10


@pytest.mark.parametrize("clients", [1, 3, 7, 100])
@pytest.mark.parametrize("concentration", [None, 1e-4, 0.1, 1.0, 1e4])
def test_every_example_belongs_to_one_client(clients: int, concentration: float | None) -> None:
    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        if concentration is None:
            return iid(1000, clients, generator)
        return dirichlet(TARGETS, clients, concentration, generator)

    parts = make()
    assert len(parts) == clients
    assert torch.cat(parts).sort().values.tolist() == list(range(1000))
    assert min(len(part) for part in parts) >= 1
    assert all(torch.equal(one, two) for one, two in zip(parts, make(), strict=True))


def test_iid_sizes_are_even_and_classes_mixed(generator: torch.Generator) -> None:
    parts = iid(1000, 7, generator)
    assert {len(part) for part in parts} == {142, 143}
    assert all(len(TARGETS[part].unique()) == 10 for part in parts)


def test_the_smaller_the_concentration_the_fewer_classes(generator: torch.Generator) -> None:
    def classes(concentration: float) -> float:
        parts = dirichlet(TARGETS, 10, concentration, generator, at_least=0)
        return sum(len(TARGETS[part].unique()) for part in parts) / 10

    assert classes(1e-4) == 1.0  # every class has a single owner
    assert classes(0.1) < classes(1.0) < classes(1e4) == 10.0


def test_large_concentration_gives_even_shares(generator: torch.Generator) -> None:
    parts = dirichlet(TARGETS, 5, 1e7, generator)
    assert all(TARGETS[part].bincount(minlength=10).tolist() == [20] * 10 for part in parts)


@pytest.mark.parametrize("concentration", [0.05, 0.5, 3.0])
def test_shares_follow_the_dirichlet_law(concentration: float, generator: torch.Generator) -> None:
    shares = torch.stack([_dirichlet(4, concentration, generator) for _ in range(2000)])
    torch.testing.assert_close(shares.sum(1), torch.ones(2000, dtype=torch.float64))
    marginal = beta(concentration, 3 * concentration)  # of each coordinate
    assert kstest(shares[:, 0].numpy(), marginal.cdf).pvalue > 0.01


def test_at_least_is_kept(generator: torch.Generator) -> None:
    parts = dirichlet(TARGETS, 40, 0.01, generator, at_least=25)
    assert [len(part) for part in parts] == [25] * 40


@pytest.mark.parametrize(("call", "message"), [
    (lambda g: iid(10, 0, g), "at least 1"),
    (lambda g: iid(3, 4, g), "fewer clients or more examples"),
    (lambda g: dirichlet(TARGETS, 5, 0.0, g), "a number above 0"),
    (lambda g: dirichlet(TARGETS, 5, float("nan"), g), "a number above 0"),
    (lambda g: dirichlet(TARGETS, 5, 1.0, g, at_least=201), "cannot give 5 clients 201 each"),
])  # fmt: skip
def test_impossible_partition_raises(call, message: str, generator: torch.Generator) -> None:
    with pytest.raises(GradveilError, match=message):
        call(generator)


def test_the_examples_of_one_writer_stay_together(generator: torch.Generator) -> None:
    writers = [f"w{i % 13}" for i in range(400)]
    parts = grouped(writers, 5, generator)
    assert torch.cat(parts).sort().values.tolist() == list(range(400))
    owners = {writer: {i for i, part in enumerate(parts) for place in part.tolist() if writers[place] == writer}
              for writer in set(writers)}  # fmt: skip
    assert all(len(clients) == 1 for clients in owners.values())
    assert max(map(len, parts)) - min(map(len, parts)) <= 31  # the examples of one writer


def test_as_many_clients_as_writers_get_one_each(generator: torch.Generator) -> None:
    parts = grouped([3, 1, 3, 2], 3, generator)
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]


def test_ungroupable_column_raises(generator: torch.Generator) -> None:
    with pytest.raises(GradveilError, match="2 different values cannot make 3 clients"):
        grouped([1, 2, 1], 3, generator)
    with pytest.raises(GradveilError, match="row 1 holds a list"):
        grouped([1, [2]], 1, generator)


def test_empty_client_gets_random_examples_of_the_largest():
    """Not those of the last class alone, which were dealt last."""
    targets, seen = torch.arange(1000) % 10, 0
    for seed in range(30):
        bare, filled = (
            dirichlet(targets, 8, 0.05, torch.Generator().manual_seed(seed), at_least=least) for least in (0, 40)
        )
        rich = max(bare, key=len)
        for before, after in zip(bare, filled, strict=True):
            if len(before) == 0 and len(targets[rich].unique()) > 2:
                seen += 1
                assert len(targets[after].unique()) > 1
    assert seen > 3
