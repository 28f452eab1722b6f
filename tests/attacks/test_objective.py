import pytest
import torch

from gradveil.attacks.inversion.distances import OBJECTIVES, cosine, energy
from gradveil.gradients.fused import total_variation


def pair(generator, dtype=torch.float64):
    def draw():
        return {
            "a": torch.randn(3, 4, 2, generator=generator, dtype=dtype),
            "b": torch.randn(3, 5, generator=generator, dtype=dtype),
        }

    return draw(), draw()


def rows(update, row):
    return torch.cat([update["a"][row].flatten(), update["b"][row]])


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("l2", lambda a, b: (a - b).square().sum()),
        ("l2-and-norm", lambda a, b: (a - b).square().sum() + (a - b).norm()),
        ("l1", lambda a, b: (a - b).abs().sum()),
        ("cosine", lambda a, b: 1 - torch.nn.functional.cosine_similarity(a, b, dim=0)),
    ],
)
def test_distance_equals_its_formula_on_the_concatenated_vector(name, formula, generator):
    simulated, observed = pair(generator)
    values = OBJECTIVES[name](simulated, observed)
    for row in range(3):
        torch.testing.assert_close(values[row], formula(rows(simulated, row), rows(observed, row)))


def test_layerwise_cosine_is_the_mean_of_the_layers(generator):
    simulated, observed = pair(generator)
    layers = [cosine({n: simulated[n]}, {n: observed[n]}) for n in observed]
    torch.testing.assert_close(OBJECTIVES["layerwise-cosine"](simulated, observed), (layers[0] + layers[1]) / 2)


def test_tokenwise_cosine_compares_every_row_of_an_embedding(generator):
    simulated, observed = (
        {**each, "position": torch.randn(3, 1, 4, 5, generator=generator, dtype=torch.float64)}
        for each in pair(generator)
    )
    value = OBJECTIVES["tokenwise-cosine"]
    rest = [cosine({n: simulated[n]}, {n: observed[n]}) for n in "ab"]
    tokens = [cosine({"": simulated["position"][:, 0, t]}, {"": observed["position"][:, 0, t]}) for t in range(4)]
    torch.testing.assert_close(value(simulated, observed), (sum(rest) + sum(tokens) / 4) / 3)
    plain = {n: simulated[n] for n in "ab"}, {n: observed[n] for n in "ab"}
    assert torch.equal(value(*plain), OBJECTIVES["layerwise-cosine"](*plain))


def test_large_tokens_do_not_hide_small_ones():
    """The class token's gradient is right, the much smaller ones of patches have the wrong sign, and count equally."""
    observed = {"position": torch.tensor([[[[1e3, 1e3], [1.0, 0.0], [0.0, 1.0]]]])}
    wrong = {"position": observed["position"] * torch.tensor([1.0, -1.0, -1.0]).view(3, 1)}
    assert float(OBJECTIVES["layerwise-cosine"](wrong, observed)) < 1e-5
    assert float(OBJECTIVES["tokenwise-cosine"](wrong, observed)) == pytest.approx(4 / 3)


def test_sapag_weighs_layers_and_saturates(generator):
    simulated, observed = pair(generator)
    expected = torch.zeros(3, dtype=torch.float64)
    for layer, name in enumerate(observed):
        for row in range(3):
            d = (simulated[name][row] - observed[name][row]).square().mean()
            v = observed[name][row].var(unbiased=False)
            expected[row] += (1 - torch.exp(-d / (2 * v))) / (layer + 1)
    torch.testing.assert_close(OBJECTIVES["sapag"](simulated, observed), expected)
    far = {n: v * 1e6 for n, v in simulated.items()}
    torch.testing.assert_close(OBJECTIVES["sapag"](far, observed), torch.full((3,), 1.5, dtype=torch.float64))


def test_signs_are_compared_whatever_the_sizes(generator):
    simulated, observed = pair(generator)
    loud = {n: v * torch.exp(9 * torch.randn(v.shape, dtype=v.dtype, generator=generator)) for n, v in observed.items()}
    torch.testing.assert_close(OBJECTIVES["signs"](simulated, loud), OBJECTIVES["signs"](simulated, observed))
    at_truth, opposite = (OBJECTIVES["signs"]({n: f * v for n, v in observed.items()}, loud) for f in (1, -1))
    assert (at_truth < OBJECTIVES["signs"](simulated, loud)).all()
    torch.testing.assert_close(at_truth + opposite, torch.full_like(at_truth, 2))
    # What was not sent has no sign, and neither have entries that are zero.
    half = {n: torch.where(v > 0, v, torch.zeros_like(v)) for n, v in observed.items()}
    assert (OBJECTIVES["signs"](observed, half) < 0.5).all()
    nothing = {n: torch.zeros_like(v) for n, v in observed.items()}
    for sent, seen in ((nothing, observed), (observed, nothing)):
        torch.testing.assert_close(OBJECTIVES["signs"](sent, seen), torch.ones_like(at_truth))
    for start in (simulated, nothing):
        flat = {n: v.float().requires_grad_() for n, v in start.items()}
        slopes = torch.autograd.grad(OBJECTIVES["signs"](flat, loud).sum(), [*flat.values()])
        assert all(slope.isfinite().all() and 0 < slope.abs().max() < 1e21 for slope in slopes)
    broken = {n: torch.full_like(v, torch.nan) for n, v in observed.items()}
    assert OBJECTIVES["signs"](simulated, broken).isnan().all()


# Updates are turned on purpose for the first; the second takes softer signs of what it simulates.
@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"right-angles", "signs"}))
def test_distance_is_zero_at_the_truth_only(name, generator):
    simulated, observed = pair(generator)
    assert bool((OBJECTIVES[name](observed, observed).abs() < 1e-12).all())
    assert bool((OBJECTIVES[name](simulated, observed) > 1e-3).all())


def test_cosine_keeps_its_digits_where_the_angle_is_small(generator):
    _, observed = pair(generator, torch.float32)
    near = {n: v + 1e-4 * torch.randn(v.shape, generator=generator) for n, v in observed.items()}
    exact = cosine({n: v.double() for n, v in near.items()}, {n: v.double() for n, v in observed.items()})
    naive = torch.stack(
        [1 - torch.nn.functional.cosine_similarity(rows(near, r), rows(observed, r), 0) for r in (0, 1, 2)]
    )
    ours = cosine(near, observed)
    assert bool(((ours.double() - exact).abs() < 1e-3 * exact).all())
    assert bool(((naive.double() - exact).abs() > 1e-2 * exact).any()), "the naive formula is no opponent here"


def test_cosine_of_a_row_of_zeros_is_finite_with_a_finite_derivative():
    zero = {"a": torch.zeros(2, 3, requires_grad=True)}
    value = cosine(zero, {"a": torch.ones(2, 3)})
    (slope,) = torch.autograd.grad(value.sum(), zero["a"])
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(slope).all())


def test_total_variation_and_energy_equal_naive_loops(generator):
    x = torch.rand(2, 3, 1, 4, 5, generator=generator, dtype=torch.float64)
    for row in range(2):
        down = [abs(x[row, b, 0, i + 1, j] - x[row, b, 0, i, j]) for b in range(3) for i in range(3) for j in range(5)]
        right = [abs(x[row, b, 0, i, j + 1] - x[row, b, 0, i, j]) for b in range(3) for i in range(4) for j in range(4)]
        naive = sum(down) / len(down) + sum(right) / len(right)
        torch.testing.assert_close(total_variation(x)[row], naive)
        torch.testing.assert_close(energy(x)[row], torch.stack([x[row, b].norm() for b in range(3)]).mean())
