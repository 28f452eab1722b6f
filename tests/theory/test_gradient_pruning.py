"""What pruning leaves out, against its definition and over random updates."""

import math

import pytest
import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from gradveil.core.noise import Key
from gradveil.core.tree import norm, squared_norm, tmap
from gradveil.core.types import Batch, Context
from gradveil.data import load
from gradveil.defences import Dual
from gradveil.metrics import cosine, relative_distance
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models import build
from gradveil.theory.gradient_pruning import (
    aligned_residual_bound,
    best_step,
    convergence_bound,
    convergence_rate,
    degraded,
    degraded_cosine,
    gamma,
    least_gamma,
    residual_bound,
    strength,
    taylor_bound,
    worst_cosine,
)
from gradveil.theory.input_jacobian import jacobian, spectral_norms

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
SETTINGS = [(0.05, 0.75), (0.1, 0.5), (0.2, 0.6)]


def update(number: int, power: float = 1.0):
    drawn = torch.randn(400, generator=Key(0, (number,)).generator(), dtype=torch.float64)
    return {"w": drawn.sign() * drawn.abs() ** power}


def pruned(g, top: float, bottom: float):
    return Dual(top, bottom).apply(g, {}, {}, CONTEXT)[0]


def test_gamma_is_the_share_of_energy_not_sent():
    g = {**update(0), "v": torch.arange(6.0, dtype=torch.float64)}
    sent = pruned(g, 0.05, 0.75)
    left = sum(float(((g[name] - sent[name]) ** 2).sum()) for name in g)
    assert float(gamma(g, sent)) == pytest.approx(left / float(squared_norm(g)))
    recorded = relative_distance({n: v[None] for n, v in sent.items()}, {n: v[None] for n, v in g.items()})
    assert float(gamma(g, sent)) == pytest.approx(float(recorded) ** 2)
    nothing = tmap(torch.zeros_like, g)
    assert [float(gamma(*pair)) for pair in ((g, g), (nothing, nothing), (g, nothing))] == [0, 0, 1]


@pytest.mark.parametrize(("top", "bottom"), SETTINGS)
def test_at_least_so_much_is_left_out(top: float, bottom: float):
    printed, largest = least_gamma(top, bottom)
    for number, power in enumerate((0.0, 0.5, 1.0, 3.0)):
        g = update(number, power)
        measured = float(gamma(g, pruned(g, top, bottom)))
        assert printed < largest <= measured + 1e-12 < 1
    flat = torch.zeros(400, dtype=torch.float64)
    flat[round(400 * bottom) :] = 1
    assert float(gamma({"w": flat}, pruned({"w": flat}, top, bottom))) == pytest.approx(largest)


def matches(g, sent, distance: float, numbers: int = 200):
    """Gradients at a distance from what was sent, some of them straight away from the true one."""
    for number in range(numbers):
        away = tmap(torch.sub, sent, g) if number == 0 else update(number + 10)
        yield tmap(lambda s, a: s + distance * a / norm(away), sent, away)  # noqa: B023 - used at once


@pytest.mark.parametrize("distance", [0.0, 0.5, 5.0])
def test_no_match_is_further_from_the_truth_than_theorem_1_says(distance: float):
    g = update(0)
    sent = pruned(g, 0.05, 0.75)
    bound = degraded(torch.tensor(distance, dtype=torch.float64), gamma(g, sent), norm(g))
    found = [float(norm(tmap(torch.sub, match, g))) for match in matches(g, sent, distance)]
    assert max(found) <= float(bound) + 1e-9
    assert found[0] == pytest.approx(float(bound))


def test_the_angles_bound_the_cosine_and_the_printed_form_does_not():
    g = update(0)
    sent = pruned(g, 0.05, 0.75)
    share = gamma(g, sent)

    def apart(first, second):
        return 1 - cosine({n: v[None] for n, v in first.items()}, {n: v[None] for n, v in second.items()})

    assert float(apart(sent, g)) == pytest.approx(float(worst_cosine(torch.tensor(0.0), share)))
    broken = 0
    for distance in (0.1, 1.0, 3.0, 30.0):
        for match in matches(g, sent, distance * float(norm(sent))):
            epsilon, found = apart(match, sent), apart(match, g)
            assert float(found) <= float(worst_cosine(epsilon, share)) + 1e-9
            broken += float(found) > float(degraded_cosine(epsilon, share))
    assert broken > 0
    assert float(worst_cosine(torch.tensor(2.0), share)) == 2
    assert float(degraded_cosine(torch.tensor(0.5), torch.tensor(0.25))) == 0.75


def counted(g, top: float, bottom: float) -> float:
    """What our bound says of these layers: the shares that come out, weighed by the layers' energies."""
    whole, least = float(squared_norm(g)), 0.0
    for value in g.values():
        first, last = (math.floor(share * value.numel() + 1e-9) / value.numel() for share in (top, bottom))
        least += float(value.square().sum()) * first / (1 - last)
    return least / whole


def real(number: int):
    """The gradient of one face: layers of a few entries, and of thousands."""
    target_clients = load("faces", size=16).private
    net = build("lenet-zhu", channels=1, size=16, classes=2, generator=Key(number).generator()).double()
    loss = cross_entropy(
        net(target_clients.inputs[number : number + 1].double()), target_clients.targets[number : number + 1]
    )
    names, params = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params), strict=True))


@pytest.mark.parametrize(("top", "bottom"), [*SETTINGS, (0.02, 0.4), (0.24, 0.72), (0.01, 0.95)])
def test_every_gamma_lies_where_assumption_1_says_and_above_the_sharper_bound(top: float, bottom: float):
    printed, largest = least_gamma(top, bottom)
    assert printed < largest
    drawn = [update(number, power) for number in range(8) for power in (0.0, 0.3, 1.0, 2.0, 8.0)]
    for g in [*drawn, *(real(number) for number in range(3))]:
        measured = float(gamma(g, pruned(g, top, bottom)))
        assert printed < measured < 1
        assert measured >= counted(g, top, bottom) - 1e-12
    assert counted(drawn[0], top, bottom) == pytest.approx(largest)  # 400 entries: the shares come out whole


def test_the_printed_bound_says_next_to_nothing():
    shares = [(i / 40, j / 40) for i in range(41) for j in range(41 - i) if j < 40]
    both = [least_gamma(*each) for each in shares]
    assert max(printed for printed, _ in both) == pytest.approx((1 - 0.75**0.5) ** 2)
    assert max(printed for printed, _ in both) < 0.018
    for (top, bottom), (printed, largest) in zip(shares, both, strict=True):
        assert printed < largest or top == 0 == printed == largest
        assert printed > 0 or top == 0 or bottom == 0


def test_where_assumption_1_fails():
    """Of small layers nothing goes; of one entry alone, which is the largest, all."""
    small = {"w": torch.ones(3, dtype=torch.float64), "b": -torch.ones(1, dtype=torch.float64)}
    assert float(gamma(small, pruned(small, 0.05, 0.3))) == 0 < least_gamma(0.05, 0.3)[0]
    lone = {"w": torch.eye(20, dtype=torch.float64)[0]}
    assert float(gamma(lone, pruned(lone, 0.05, 0.75))) == 1


def smooth(seed: int = 0):
    """A client's gradient as a function of its image, without kinks, and two images with their labels."""
    batch = load("digits", size=8).private
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.Tanh(), torch.nn.Linear(6, 10))
    net = initialise(net, Key(seed).generator()).double()
    params = {name: value.detach() for name, value in net.named_parameters()}

    def gradient(some: Batch):
        def loss(weights):
            return cross_entropy(functional_call(net, weights, (some.inputs,)), some.targets)

        return grad(loss)(params)

    return gradient, batch.inputs[:2].double(), batch.targets[:2]


def test_power_iteration_finds_the_largest_singular_value_without_the_jacobian():
    gradient, images, labels = smooth()

    def rows(inputs):
        return torch.vmap(lambda x, y: gradient(Batch(x[None], y[None])))(inputs, labels)

    start = torch.randn(images.shape, generator=Key(5).generator(), dtype=torch.float64)
    found = spectral_norms(rows, images, start, iterations=300, tolerance=1e-9)
    for v in range(2):
        exact = torch.linalg.matrix_norm(jacobian(gradient, Batch(images[v : v + 1], labels[v : v + 1])), 2)
        assert float(found[v]) == pytest.approx(float(exact), rel=1e-4)
    early = spectral_norms(rows, images, start, iterations=3)
    assert bool((early <= found * (1 + 1e-9)).all())


def test_proposition_1_holds_for_whole_matches_nearby_and_for_nobody_who_reads_the_mask():
    gradient, images, labels = smooth()
    image, label = images[:1], labels[:1]
    g = gradient(Batch(image, label))
    size = torch.linalg.matrix_norm(jacobian(gradient, Batch(image, label)), 2)
    for number in range(20):
        step = 1e-3 * torch.randn(image.shape, generator=Key(number).generator(), dtype=torch.float64)
        other = gradient(Batch(image + step, label))
        assert float(taylor_bound(norm(tmap(torch.sub, g, other)), size)) <= float(step.norm()) * 1.01
    sent = pruned(g, 0.05, 0.75)
    promised = float(taylor_bound(norm(tmap(torch.sub, g, sent)), size))
    assert promised > 0
    mask = tmap(lambda value: (value != 0).double(), sent)
    assert all(torch.equal(g[name] * mask[name], sent[name]) for name in g)  # the truth itself, at distance zero


def test_definition_1_is_a_quantile_of_the_distances():
    distances = [0.5, 0.1, 0.4, 0.2, 0.3]
    assert [strength(distances, delta) for delta in (0.0, 0.2, 0.5, 0.9, 1.0)] == [0.5, 0.4, 0.3, 0.1, 0.1]


@pytest.mark.parametrize(("share", "bound"), [(0.578, 143), (0.64, 223)])
def test_lemma_1_with_a_constant_share_is_passed_by_the_measured_residual(share: float, bound: float):
    """Of G^2 = 11.41, the largest of 600 rounds on digits, where the residual reaches 236."""
    assert residual_bound(share, 11.41) == pytest.approx(bound, rel=0.01)
    assert bound < 236


def test_lemma_1_with_the_share_of_a_late_round_is_true_and_empty():
    assert residual_bound(0.963, 6.66) == pytest.approx(2.1e4, rel=0.05)
    assert residual_bound(0.998, 11.41) > 1e7
    assert aligned_residual_bound(0.683, 1.0, 0.0) == pytest.approx(24.5, rel=0.01)
    assert aligned_residual_bound(0.998, 0.5, 0.5) > 8e5
    assert residual_bound(1.0, 1.0) == aligned_residual_bound(1.0, 1.0, 1.0) == math.inf


def test_theorem_2_at_the_best_step_is_the_rate_and_a_term_in_one_over_the_rounds():
    for rounds in (10, 1000, 100000):
        step = best_step(2.3, rounds, 4.0, 1.5)
        whole = convergence_bound(2.3, step, rounds, 4.0, 1.5, residual_bound(0.3, 1.0))
        rest = whole - convergence_rate(2.3, rounds, 4.0, 1.5)
        assert rest * rounds == pytest.approx(4 * 4.0 * 2.3 * residual_bound(0.3, 1.0) / 1.5)
        for other in (0.5 * step, 2 * step):
            noisy = convergence_bound(2.3, other, rounds, 4.0, 1.5, residual=0.0)
            assert noisy > 0.9 * convergence_rate(2.3, rounds, 4.0, 1.5)
