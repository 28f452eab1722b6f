"""Cosine coefficients, the prior made of them, and the bound over groups of directions."""

import pytest
import torch
from scipy.fft import dctn

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.theory.reconstruction_bound import (
    ROUNDING,
    Spectrum,
    block_bound,
    cosine,
    error_bound,
    from_cosine,
    spectrum,
    trace_bound,
)


def normal(*shape: int, key: str) -> torch.Tensor:
    return torch.randn(shape, generator=Key(0, (key,)).generator(), dtype=torch.float64)


def test_cosine_transform_is_scipys_and_orthonormal():
    images = normal(3, 2, 6, 5, key="images")
    wanted = torch.from_numpy(dctn(images.numpy(), axes=(-2, -1), norm="ortho"))
    torch.testing.assert_close(cosine(images), wanted)
    torch.testing.assert_close(from_cosine(cosine(images)), images)
    torch.testing.assert_close(cosine(images).square().sum(), images.square().sum())


def test_variances_of_drawn_images_are_found_again():
    true = Spectrum(normal(2, 4, 4, key="variances").square() + 0.1)
    images = from_cosine(normal(20_000, 2, 4, 4, key="draws") * true.variances.sqrt())
    found = spectrum(images)
    torch.testing.assert_close(found.variances, true.variances, rtol=0.05, atol=0)
    # The mean image, as a guess, errs by the prior's variance: the transform keeps squares.
    assert (images - images.mean(0)).square().mean().item() == pytest.approx(found.variance, rel=1e-3)


def test_groups_hold_every_coefficient_once_by_falling_variance():
    prior = Spectrum(normal(1, 4, 5, key="groups").square())
    groups = prior.groups()
    assert groups.flatten(1).sum(1).tolist() == [1, 1, 2, 4, 8, 4]
    assert bool((groups.sum(0) == 1).all())
    lowest = [float(prior.variances[mask].min()) for mask in groups]
    highest = [float(prior.variances[mask].max()) for mask in groups]
    assert all(low >= high for low, high in zip(lowest, highest[1:], strict=False))
    wanted = torch.stack([(1 / prior.variances[mask]).sum() for mask in groups])
    torch.testing.assert_close(prior.information(), wanted)


def test_a_coefficient_that_never_changes_has_the_variance_of_rounding():
    assert float(spectrum(torch.full((3, 1, 2, 2), 0.5)).variances.max()) == pytest.approx(ROUNDING)
    with pytest.raises(GradveilError, match="at least two public images"):
        spectrum(torch.zeros(1, 1, 2, 2))


def test_the_bound_over_groups_lies_between_the_trace_and_the_matrix():
    root = normal(7, 7, key="fisher")
    fisher, prior = root @ root.T, (0.1 + normal(7, key="prior").square()).diag()
    sharp = error_bound(fisher, prior)
    of_trace = trace_bound(fisher.trace(), prior.trace(), 7)
    for split in ([7], [1, 2, 4], [3, 4], [1] * 7):
        sizes = torch.tensor(split).double()
        traces = [torch.stack([part.sum() for part in m.diagonal().split(split)]) for m in (fisher, prior)]
        found = block_bound(*traces, sizes)
        assert of_trace * (1 - 1e-12) <= found < sharp
        if split == [7]:
            torch.testing.assert_close(found, of_trace)
    alike = torch.full((7,), 3.0).double()
    torch.testing.assert_close(
        block_bound(alike, alike, torch.ones(7).double()), error_bound(alike.diag(), alike.diag())
    )
