"""Fused objectives against their formulas, in value and gradient."""

import pytest
import torch
from torch import Generator, Tensor

from gradveil.core.noise import Key
from gradveil.gradients.fused import cosine_distance, in_blocks, squared_distance, total_variation, written_bytes

SHAPES = [(4, 3, 2, 5), (4, 7), (4,), (4, 1)]


def draw(generator: Generator, *, grad: bool = False) -> list[Tensor]:
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [value.requires_grad_(grad) for value in drawn]


def joined(vectors: list[Tensor]) -> Tensor:
    return torch.cat([v.reshape(4, -1) for v in vectors], 1)


def naive_cosine(g: Tensor, t: Tensor) -> Tensor:
    return 1 - (g * t).sum(1) / (g.norm(dim=1) * t.norm(dim=1))


def naive_squared(g: Tensor, t: Tensor) -> Tensor:
    return (g - t).square().sum(1)


@pytest.mark.parametrize(
    ("fused", "naive"), [(cosine_distance, naive_cosine), (squared_distance, naive_squared)], ids=["cosine", "squared"]
)
def test_distances_equal_their_formulas(fused, naive, generator: Generator) -> None:
    g, t = draw(generator, grad=True), draw(generator)
    weights = torch.rand(4, generator=generator, dtype=torch.float64)
    value, expected = fused(g, t), naive(joined(g), joined(t))
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    found = torch.autograd.grad((value * weights).sum(), g)
    wanted = torch.autograd.grad((expected * weights).sum(), g)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_cosine_is_precise_for_small_angles(generator: Generator) -> None:
    t = torch.randn(1, 1000, generator=generator, dtype=torch.float64)
    near = t + 1e-4 * torch.randn(1, 1000, generator=generator, dtype=torch.float64)
    exact = naive_cosine(near, t)
    single = cosine_distance([near.float()], [t.float()]).double()
    assert abs(float(single / exact) - 1) < 1e-2
    assert abs(float(naive_cosine(near.float(), t.float()) / exact) - 1) > 0.5


def test_zero_rows_have_zero_gradient() -> None:
    g, t = torch.zeros(2, 3, requires_grad=True), torch.tensor([[1.0, 2, 3], [0, 0, 0]])
    value = cosine_distance([g], [t])
    assert value.tolist() == [1.0, 1.0], "neither better than a right angle nor a match"
    assert torch.autograd.grad(value.sum(), g)[0].eq(0).all()


def test_zero_targets_have_zero_gradient() -> None:
    g, t = torch.tensor([[1.0, 2, 3], [1, 2, 3]], requires_grad=True), torch.tensor([[0.0, 0, 0], [1, 2, 4]])
    value = cosine_distance([g], [t])
    assert value[0].item() == 1.0
    slope = torch.autograd.grad(value.sum(), g)[0]
    assert slope[0].eq(0).all()
    assert slope[1].ne(0).all()


@pytest.mark.parametrize("shape", [(3, 2, 3, 6, 5), (2, 4, 4), (2, 1, 3, 1, 5), (2, 1, 3, 5, 1), (2, 1, 1, 1)])
def test_total_variation_equals_its_formula(shape: tuple[int, ...], generator: Generator) -> None:
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    terms = (x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1])
    expected = torch.stack([d.abs().flatten(1).mean(1) if d.numel() else torch.zeros(shape[0]).double() for d in terms])
    weights = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    value = total_variation(x)
    torch.testing.assert_close(value, expected.sum(0))
    found = torch.autograd.grad((value * weights).sum(), x)[0]
    wanted = torch.autograd.grad((expected.sum(0) * weights).sum(), x)[0] if expected.requires_grad else found * 0
    torch.testing.assert_close(found, wanted)


def test_blockwise_equals_whole_bitwise():
    x, y = torch.randn(2, 3, 70_001, generator=Key(9).generator())

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a / (b.abs().sqrt() + 1e-8), a > b

    sizes: list[int] = []

    def watched(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes.append(a.numel())
        return function(a, b)

    for found, expected in zip(in_blocks(watched, x, y), function(x, y), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert max(sizes) < x.numel() == sum(sizes)
    in_blocks(watched, x.requires_grad_(), y)
    assert sizes[-1] == x.numel()


def test_written_bytes_counts_results_and_not_views() -> None:
    x = torch.zeros(8, 4)
    assert written_bytes(lambda: (x + 1).view(-1)) == 8 * 4 * 4
