from functools import partial

import pytest
import torch

from gradveil.attacks.inversion.descent import Descent, descend
from gradveil.attacks.inversion.optimisers import LBFGS, Adam, RMSprop


def keep(name, value):
    return value


def quadratics(rows, size, generator):
    """One random positive definite form per row, with very different conditioning."""
    basis = torch.linalg.qr(torch.randn(rows, size, size, generator=generator, dtype=torch.float64)).Q
    scales = torch.logspace(0, 2, size, dtype=torch.float64)
    forms = basis @ torch.diag_embed(scales.expand(rows, size)) @ basis.mT
    centres = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return {"form": forms, "centre": centres}


def quadratic(variables, constants, rows, iteration):
    d = (variables["x"] - constants["centre"]).unsqueeze(-1)
    return (d.mT @ constants["form"] @ d).flatten() / 2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Adam(lr=0.05), partial(torch.optim.Adam, lr=0.05)),
        (RMSprop(lr=0.01, momentum=0.9), partial(torch.optim.RMSprop, lr=0.01, momentum=0.9)),
    ],
)
def test_steps_equal_torchs_on_every_row(ours, theirs, generator):
    constants = quadratics(3, 5, generator)
    start = torch.zeros(3, 5, dtype=torch.float64)
    solution = descend(quadratic, {"x": start}, constants, Descent(ours, iterations=40, keep="last", report=7), keep)
    for row in range(3):
        x = start[row].clone().requires_grad_()
        optimiser = theirs([x])
        for _ in range(39):  # the loop's last iteration is an evaluation
            optimiser.zero_grad()
            quadratic({"x": x[None]}, {n: v[row : row + 1] for n, v in constants.items()}, None, 0).sum().backward()
            optimiser.step()
        torch.testing.assert_close(solution.variables["x"][row], x.detach(), rtol=1e-10, atol=1e-12)


def test_lbfgs_solves_quadratics_far_faster_than_steepest_descent(generator):
    constants = quadratics(4, 12, generator)
    start = {"x": torch.zeros(4, 12, dtype=torch.float64)}
    solution = descend(quadratic, start, constants, Descent(LBFGS(), iterations=120, tolerance=1e-18), keep)
    assert bool((solution.objective < 1e-12).all())
    steepest = descend(quadratic, start, constants, Descent(LBFGS(history=1), iterations=120, tolerance=1e-18), keep)
    assert bool((steepest.objective > solution.objective).all())


def test_lbfgs_line_search_solves_rosenbrock_where_full_steps_fail():
    def rosenbrock(variables, constants, rows, iteration):
        x, y = variables["x"].unbind(1)
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    start = {"x": torch.tensor([[-1.2, 1.0], [3.0, -2.0]], dtype=torch.float64)}
    solution = descend(rosenbrock, start, {}, Descent(LBFGS(), iterations=300, tolerance=1e-16), keep)
    torch.testing.assert_close(solution.variables["x"], torch.ones(2, 2, dtype=torch.float64), rtol=0, atol=1e-6)


ADAMS = [Adam(lr=0.1), Adam(lr=0.1, sign="signed"), Adam(lr=0.1, sign="soft")]


@pytest.mark.parametrize("stepper", [*ADAMS, RMSprop(momentum=0.5), LBFGS()])
def test_rows_are_independent(stepper, generator):
    constants = quadratics(4, 6, generator)
    start = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    together = descend(quadratic, {"x": start}, constants, Descent(stepper, iterations=30), keep)
    for row in range(4):
        alone = descend(
            quadratic,
            {"x": start[row : row + 1]},
            {n: v[row : row + 1] for n, v in constants.items()},
            Descent(stepper, iterations=30),
            keep,
        )
        torch.testing.assert_close(alone.variables["x"][0], together.variables["x"][row], rtol=1e-9, atol=1e-9)


def test_signed_adam_first_step_has_the_length_of_lr_everywhere(generator):
    constants = quadratics(2, 4, generator)
    start = torch.zeros(2, 4, dtype=torch.float64)
    moved = descend(
        quadratic, {"x": start}, constants, Descent(Adam(lr=0.25, sign="signed"), iterations=2, keep="last"), keep
    )
    torch.testing.assert_close(
        moved.variables["x"].abs(), torch.full((2, 4), 0.25, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_projection_holds_at_every_iterate(generator):
    constants = quadratics(2, 4, generator)
    seen = []

    def watch(variables, *rest):
        seen.append(variables["x"].detach().abs().max())
        return quadratic(variables, *rest)

    def box(name, value):
        return value.clamp(-0.1, 0.1)

    for stepper in (Adam(lr=1.0), LBFGS()):
        descend(watch, {"x": torch.zeros(2, 4, dtype=torch.float64)}, constants, Descent(stepper, iterations=20), box)
    assert max(seen) <= 0.1
    assert max(seen) > 0.05


def test_compact_lbfgs_direction_equals_the_two_loop_recursion(generator):
    """The textbook recursion over the same pairs, for a history that wrapped around."""
    stepper = LBFGS(history=4, line_search="none")
    constants = quadratics(3, 7, generator)
    x = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    variables, state, pairs = {"x": x}, stepper.init({"x": x}), []
    before = (x, x)
    for count in range(7):
        live = {"x": variables["x"].clone().requires_grad_()}
        value = quadratic(live, constants, None, 0)
        (g,) = torch.autograd.grad(value.sum(), live["x"])
        if count:
            pairs.append((live["x"].detach() - before[0], g - before[1]))
        before = (live["x"].detach(), g)
        variables, state = stepper.step(
            variables, {"x": g}, value.detach(), state, torch.ones(3, dtype=torch.float64), count, keep
        )
        expected = torch.stack([two_loop(g[row], [(s[row], y[row]) for s, y in pairs[-4:]]) for row in range(3)])
        torch.testing.assert_close(state["d"], expected, rtol=1e-8, atol=1e-10)


def two_loop(g, pairs):
    q, weights = g.clone(), []
    for s, y in reversed(pairs):
        weights.append((s @ q) / (s @ y))
        q = q - weights[-1] * y
    if pairs:
        s, y = pairs[-1]
        q = q * (s @ y) / (y @ y)
    for (s, y), weight in zip(pairs, reversed(weights), strict=True):
        q = q + (weight - (y @ q) / (s @ y)) * s
    return -q


@pytest.mark.parametrize(
    ("sign", "expected"), [("soft", [1 / 3, 3 / 5]), ("signed", [1.0, 1.0]), ("plain", [1.0, 3.0])]
)
def test_signs_follow_their_formulas_except_for_plain_variables(sign, expected):
    """Without momentum and curvature (b1 = 0, eps large) a step is lr times the signed gradient."""
    stepper = Adam(lr=1.0, sign=sign, betas=(0.0, 0.0), eps=1e12)
    start = {"x": torch.zeros(1, 2, dtype=torch.float64), "y": torch.zeros(1, 2, dtype=torch.float64)}
    g = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    moved, _ = stepper.step(
        start, {"x": g, "y": g}, g[:, 0], stepper.init(start), g[:, 0], 0, keep, plain=frozenset({"y"})
    )
    torch.testing.assert_close(-moved["x"] * 1e12, g.new_tensor([expected]), rtol=1e-9, atol=0)
    torch.testing.assert_close(-moved["y"] * 1e12, g, rtol=1e-9, atol=0)


def test_lbfgs_steps_back_from_points_that_are_not_finite_while_finished_rows_leave():
    def walled(variables, constants, rows, iteration):
        x = variables["x"][:, 0]
        return torch.where(x > 1.5, torch.inf, (x - constants["centre"]) ** 2)

    constants = {"centre": torch.tensor([1.0, 0.0, 1.4], dtype=torch.float64)}
    start = {"x": torch.tensor([[-9.0], [0.0], [-3.0]], dtype=torch.float64)}
    solution = descend(
        walled, start, constants, Descent(LBFGS(lr=3.0), iterations=200, tolerance=1e-10, report=1), keep
    )
    assert solution.status.tolist() == [0, 0, 0]
    assert solution.iterations[1] == 1


def bowl_step(stepper, state, x, loss, count, scale=1.0, slope=None):
    """One step of one row on x^2 / 2, or with the loss and slope of the test."""
    point = torch.tensor([[x]], dtype=torch.float64)
    g = point if slope is None else torch.full_like(point, slope)
    values = point.new_tensor([loss])
    return stepper.step({"x": point}, {"x": g}, values, state, values * 0 + scale, count, keep)


def test_a_step_that_does_not_lower_the_loss_enough_is_halved():
    """Armijo: from x = 1 with slope 1 a step of length t must lower the loss by half of t, if `decrease` is 1 / 2."""
    stepper = LBFGS(decrease=0.5)
    start = {"x": torch.ones(1, 1, dtype=torch.float64)}
    moved, state = bowl_step(stepper, stepper.init(start), 1.0, 10.0, 0)
    t = state["t"].item()
    assert moved["x"].item() == pytest.approx(1 - t)
    for fall, accepted in ((0.4 * t, False), (0.6 * t, True)):
        _, after = bowl_step(stepper, {n: v.clone() for n, v in state.items()}, 1 - t, 10.0 - fall, 1)
        assert after["x"].item() == pytest.approx(1 - t if accepted else 1.0)
        assert (after["t"].item() == t / 2) is not accepted
    _, after = bowl_step(stepper, {n: v.clone() for n, v in state.items()}, 1 - t, 10.0, 1)
    assert after["x"].item() == 1.0, "a loss that stays is no progress"


def test_failed_line_search_restarts_from_steepest_descent():
    stepper = LBFGS(history=3, smallest=0.2)
    start = {"x": torch.full((2, 1), 4.0, dtype=torch.float64)}
    variables, state = start, stepper.init(start)
    for count in range(3):
        loss, slope = variables["x"].pow(4).sum(1) / 4, {"x": variables["x"] ** 3}
        variables, state = stepper.step(variables, slope, loss, state, torch.ones(2).double(), count, keep)
    assert bool(state["live"].any(1).all())
    walled = torch.tensor([torch.inf, 0.0], dtype=torch.float64)  # the first row finds no way down
    for count in range(3, 7):
        _, state = stepper.step(variables, slope, walled, state, torch.ones(2).double(), count, keep)
        if not bool(state["live"][0].any()):
            break
    assert state["live"].any(1).tolist() == [False, True]
    torch.testing.assert_close(state["d"][0], -state["g"][0])
    assert state["t"][0].item() == pytest.approx(min(1.0, 1 / state["g"][0].abs().sum().item()))


def test_the_schedule_shortens_lbfgs_steps_too():
    stepper = LBFGS(lr=0.5)
    start = {"x": torch.ones(1, 1, dtype=torch.float64)}
    sizes = [bowl_step(stepper, stepper.init(start), 1.0, 1.0, 0, scale)[1]["t"].item() for scale in (1.0, 0.25)]
    assert sizes == [0.5, 0.125]
