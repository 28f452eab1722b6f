"""What pruning leaves out, against its definition and over random updates."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from gradveil.core.noise import Key
from gradveil.core.tree import norm, squared_norm, tmap
from gradveil.core.types import Batch, Context
from gradveil.data import load
from gradveil.defences import Dual
from gradveil.metrics import cosine, relative_distance
from gradveil.nn.models import build
from gradveil.theory.first_order_utility import degraded, degraded_cosine, gamma, least_gamma, worst_cosine

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
