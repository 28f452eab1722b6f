"""CMA-ES on functions with known minima: every target client has an independent population."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import STATUSES, Descent, Plateau, descend
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key


def sphere(x):
    return x.square().sum(1)


def ellipsoid(x):
    """Axes of lengths 1 to 1,000, none along a coordinate."""
    turned = x @ torch.linalg.qr(torch.randn(8, 8, generator=Key(7).generator(), dtype=x.dtype)).Q
    return (turned.square() * torch.logspace(0, 6, 8, dtype=x.dtype)).sum(1)


def rosenbrock(x):
    return (100 * (x[:, 1:] - x[:, :-1].square()).square() + (1 - x[:, :-1]).square()).sum(1)


def evolve(function, target_clients=3, size=8, population=12, generations=200, tolerance=0.0, first=0, **settings):
    """Search every target client's minimum, which is at the target client's number."""
    rows = target_clients * population

    def streams(key):
        return [Key(5, (key, first + row)).generator() for row in range(rows)]

    def draw(opened, count):
        return torch.stack([torch.randn(count, generator=stream, dtype=torch.float64) for stream in opened])

    opened = streams("iterations")

    def loss(variables, constants, numbers, iteration):
        return function(variables["x"] - constants["centre"])

    start = {"x": draw(streams("start"), size)}
    groups = torch.arange(rows) // population
    centre = 0.1 * (groups + first // population).double().unsqueeze(1)
    assert not start["x"].requires_grad
    return descend(
        loss,
        start,
        {"centre": centre},
        Descent(CMAES(population=population), iterations=generations, tolerance=tolerance, report=10, **settings),
        lambda name, value: value,
        groups=groups,
        normal=lambda numbers, count: draw([opened[row] for row in numbers.tolist()], count),
    )


def best(solution, population=12):
    return solution.objective.view(-1, population).min(1).values


@pytest.mark.parametrize(("function", "generations"), [(sphere, 120), (ellipsoid, 400), (rosenbrock, 600)])
def test_population_finds_the_minimum_of(function, generations):
    assert bool((best(evolve(function, generations=generations)) < 1e-8).all())


def test_step_size_falls_on_the_sphere_at_the_published_rate():
    """The distance falls to a tenth every 30 to 40 evaluations per variable, if rates and damping are right."""
    early, late = (best(evolve(sphere, generations=count)).log10().mean() / 2 for count in (40, 120))
    assert 30 < 80 * 12 / 8 / float(early - late) < 40


def test_populations_are_independent():
    together = evolve(rosenbrock, generations=60)
    alone = evolve(rosenbrock, target_clients=1, generations=60, first=24)
    torch.testing.assert_close(alone.objective, together.objective[24:], rtol=1e-6, atol=0)


def test_a_population_ends_as_a_whole():
    shifted = evolve(lambda x: sphere(x) * torch.arange(1, 4).repeat_interleave(12)[: len(x)], tolerance=1e-3)
    assert {STATUSES[code] for code in shifted.status.tolist()} <= {"converged", "budget"}
    ended = shifted.iterations.view(3, 12)
    assert bool((best(shifted) <= 1e-3).all())
    assert bool((ended.max(1).values < 200).all())


def test_rounding_of_equal_spreads_does_not_change_the_next_generation():
    """After one generation of a small population most numbers still spread alike."""

    def second(nudge):
        draw = Key(3).generator()
        x, other, normal = (torch.randn(20, 32, generator=draw, dtype=torch.float64) for _ in range(3))
        x = x + nudge * other
        evolving = CMAES(population=20)
        state = evolving.init({"x": x})
        rows = torch.arange(20)
        return evolving.step({"x": x}, sphere(x), state, lambda *_: normal, rows, 0, lambda _, value: value)[0]["x"]

    torch.testing.assert_close(second(1e-14), second(0.0), rtol=0, atol=1e-12)


def test_a_population_stalls_as_a_whole():
    found = evolve(lambda x: sphere(x).clamp_min(1e-6), generations=400, patience=20)
    assert {STATUSES[code] for code in found.status.tolist()} == {"stalled"}
    assert bool((best(found) == 1e-6).all())
    ended = found.iterations.view(3, 12)
    assert bool((ended == ended[:, :1]).all())
    assert bool((ended < 400).all())


@pytest.mark.parametrize("none", [torch.nan, torch.inf, -torch.inf])
def test_nan_candidates_have_no_weight(none):
    def walled(x):
        return torch.where(x[:, 0] > 0.3, none, sphere(x))

    found = evolve(walled)
    assert bool((best(found) < 1e-8).all())
    nowhere = evolve(lambda x: x[:, 0] * torch.nan, generations=30)
    assert {STATUSES[code] for code in nowhere.status.tolist()} == {"diverged"}
    assert nowhere.iterations.tolist() == [10] * 36, "no population continues without an objective"


def test_settings_without_meaning_for_a_population_raise():
    with pytest.raises(GradveilError, match=r"attack.schedule: .*population"):
        Descent(CMAES(), Plateau())
    with pytest.raises(GradveilError, match=r"mine.restarts: .*population"):
        Inversion("mine", descent=Descent(CMAES(population=20)))
    with pytest.raises(GradveilError, match=r"attack.descent: .*5000"):
        evolve(sphere, target_clients=1, size=5000, generations=1)


def test_halving_a_population_raises():
    attack = make_attack("ggl")
    halving = replace(attack.descent, halving=True)
    with pytest.raises(GradveilError, match=r"ggl.halving: .*population"):
        replace(attack, descent=halving)
