import itertools

import pytest
import torch

from gradveil.attacks.inversion.descent import STATUSES, Descent, Plateau, StepSchedule, descend
from gradveil.attacks.inversion.optimisers import LBFGS, Adam
from gradveil.core.errors import GradveilError


def keep(name, value):
    return value


def bowl(variables, constants, rows, iteration):
    return (variables["x"] - constants["centre"]).square().sum(1)


def words(solution):
    return [STATUSES[code] for code in solution.status.tolist()]


def test_rows_leave_with_their_status_and_none_is_lost():
    centre = torch.tensor([[0.0], [5.0], [1e3], [2.0]])

    def loss(variables, constants, rows, iteration):
        value = bowl(variables, constants, rows, iteration)
        value = torch.where(constants["kind"] == 1, value.detach() * 0 + 7.0 + 0 * value, value)  # flat: stalls
        return torch.where(constants["kind"] == 3, value / (iteration < 12), value)  # turns infinite: diverges

    constants = {"centre": centre, "kind": torch.arange(4)}
    descent = Descent(Adam(lr=0.5), iterations=100, tolerance=1e-6, patience=30, report=10)
    solution = descend(loss, {"x": torch.zeros(4, 1)}, constants, descent, keep)
    assert words(solution) == ["converged", "stalled", "budget", "diverged"]
    assert solution.iterations.tolist()[0] == 1
    assert solution.iterations.tolist()[2] == 100
    assert solution.iterations.tolist()[3] == 13
    assert bool(torch.isfinite(solution.variables["x"]).all()), "a diverged row keeps its last good iterate"


def test_a_diverged_row_does_not_change_the_others():
    def loss(variables, constants, rows, iteration):
        value = bowl(variables, constants, rows, iteration)
        return torch.where((constants["centre"][:, 0] > 1) & (iteration == 3), value * torch.nan, value)

    both = torch.tensor([[0.5], [2.0]])
    descent = Descent(Adam(lr=0.1), iterations=20, report=5)
    pair = descend(loss, {"x": torch.zeros(2, 1)}, {"centre": both}, descent, keep)
    alone = descend(loss, {"x": torch.zeros(1, 1)}, {"centre": both[:1]}, descent, keep)
    assert words(pair) == ["budget", "diverged"]
    assert torch.equal(pair.variables["x"][0], alone.variables["x"][0])


def test_restarts_of_a_solved_target_client_stop():
    constants = {"centre": torch.tensor([[0.0], [9.0], [9.0], [9.0]])}
    descent = Descent(Adam(lr=0.1), iterations=30, tolerance=1e-6, report=10)
    groups = torch.tensor([0, 0, 1, 1])
    solution = descend(bowl, {"x": torch.zeros(4, 1)}, constants, descent, keep, groups=groups)
    assert solution.iterations.tolist() == [1, 10, 30, 30]


def test_keep_best_and_keep_last_return_these_iterates():
    def away(variables, constants, rows, iteration):
        return bowl(variables, constants, rows, iteration) + 10.0 * iteration

    start = {"x": torch.zeros(1, 1)}
    constants = {"centre": torch.ones(1, 1)}
    best = descend(away, start, constants, Descent(Adam(lr=0.1), iterations=8), keep)
    last = descend(away, start, constants, Descent(Adam(lr=0.1), iterations=8, keep="last"), keep)
    assert best.variables["x"].item() == 0.0
    assert last.variables["x"].item() > 0.5
    assert best.objective.item() < last.objective.item()


def test_plateau_lowers_the_step_of_a_waiting_row_only():
    moves = []

    def loss(variables, constants, rows, iteration):
        moves.append(variables["x"].detach().clone())
        return torch.where(constants["flat"], 1.0 + 0 * variables["x"], variables["x"]).sum(1)

    constants = {"flat": torch.tensor([[True], [False]])}

    def push(variables, *rest):
        return loss(variables, *rest) + (variables["x"] * 0.1 * constants["flat"]).sum(1).detach()

    descent = Descent(Adam(lr=1.0), Plateau(patience=5), iterations=20, keep="last")
    descend(push, {"x": torch.zeros(2, 1)}, constants, descent, keep)
    path = torch.stack(moves).squeeze(-1)
    falling = path[1:, 1] - path[:-1, 1]
    torch.testing.assert_close(falling, torch.full_like(falling, -1.0), rtol=1e-3, atol=0)


def test_plateau_shrinks_steps_tenfold():
    path = []

    def loss(variables, constants, rows, iteration):
        path.append(variables["x"].item())
        return variables["x"].sum(1) * 1e-9 + 1.0  # falls too little to count as progress

    descent = Descent(Adam(lr=1.0, eps=0.0), Plateau(patience=5), iterations=15)
    descend(loss, {"x": torch.zeros(1, 1, dtype=torch.float64)}, {}, descent, keep)
    steps = [round(a - b, 6) for a, b in itertools.pairwise(path)]
    assert steps[:5] == [1.0] * 5
    assert steps[7:10] == [0.1] * 3
    assert steps[-1] == 0.01


def test_step_schedule_drops_at_its_shares():
    path = []

    def loss(variables, constants, rows, iteration):
        path.append(variables["x"].item())
        return variables["x"].sum(1)

    descent = Descent(Adam(lr=1.0), StepSchedule((0.5,), 0.1), iterations=10)
    descend(loss, {"x": torch.zeros(1, 1, dtype=torch.float64)}, {}, descent, keep)
    steps = [round(a - b, 3) for a, b in itertools.pairwise(path)]
    assert steps == [1.0] * 4 + [0.1] * 5


def test_progress_is_reported_at_reporting_points_only():
    seen = []
    descent = Descent(Adam(lr=0.1), iterations=25, report=10)
    descend(
        bowl, {"x": torch.zeros(1, 1)}, {"centre": torch.ones(1, 1)}, descent, keep, report=lambda i, v: seen.append(i)
    )
    assert seen == [10, 20, 25]


def within_one(name, value):
    return value.clamp(-1, 1)


@pytest.mark.parametrize("stepper", [Adam(lr=0.1), LBFGS()])
@pytest.mark.parametrize("keeping", ["best", "last"])
def test_start_outside_the_box_is_not_a_result(stepper, keeping):
    """The objective is lowest at the start, 5, outside the box; the descent still begins there."""
    seen = []

    def loss(variables, constants, rows, iteration):
        seen.append(variables["x"].detach().clone())
        return bowl(variables, constants, rows, iteration)

    start = {"x": torch.tensor([[5.0], [0.5]])}
    constants = {"centre": torch.tensor([[5.0], [0.5]])}
    descent = Descent(stepper, iterations=4, tolerance=1e-6, keep=keeping)
    solution = descend(loss, start, constants, descent, within_one)
    assert torch.equal(seen[0], start["x"])
    assert solution.initial.tolist() == [0, 0]
    assert words(solution) == ["budget", "converged"]
    assert solution.variables["x"].tolist() == [[1.0], [0.5]]
    assert solution.objective.tolist() == [16.0, 0.0]


def test_row_that_fails_after_a_start_outside_the_box_ends_inside():
    def loss(variables, constants, rows, iteration):
        return bowl(variables, constants, rows, iteration) / (iteration < 1)

    constants = {"centre": torch.tensor([[5.0]])}
    solution = descend(loss, {"x": torch.tensor([[3.0]])}, constants, Descent(iterations=4), within_one)
    assert words(solution) == ["diverged"]
    assert solution.variables["x"].tolist() == [[1.0]]


def test_invalid_settings_raise_together():
    with pytest.raises(GradveilError) as caught:
        Descent(iterations=0, patience=0, keep="first", report=0)
    assert [p.where for p in caught.value.problems] == [
        "attack.iterations",
        "attack.patience",
        "attack.keep",
        "attack.report",
    ]


def test_an_objective_at_the_tolerance_has_converged():
    descent = Descent(Adam(lr=0.1), iterations=3, tolerance=1.0, report=1)
    solution = descend(bowl, {"x": torch.zeros(1, 1)}, {"centre": torch.ones(1, 1)}, descent, keep)
    assert words(solution) == ["converged"]
    assert solution.iterations.tolist() == [1]


@pytest.mark.parametrize("sign", ["plain", "signed", "soft"])
def test_nan_objective_at_a_start_outside_the_box_does_not_end_the_row(sign):
    """A model with roots of pixels; the initial objective is the first that is finite."""

    def loss(variables, constants, rows, iteration):
        return (variables["x"].sqrt() - 0.5).square().sum(1)

    starts = {"x": torch.tensor([[-1.0, 0.9], [0.8, 0.9]])}
    descent = Descent(Adam(lr=0.02, sign=sign), iterations=60, report=7)
    solution = descend(loss, starts, {}, descent, lambda name, value: value.clamp(0.01, 1.0))
    assert words(solution) == ["budget", "budget"]
    assert bool(torch.isfinite(solution.initial).all())
    assert bool((solution.objective < 0.1 * solution.initial).all())
    torch.testing.assert_close(solution.variables["x"], torch.full((2, 2), 0.25), atol=0.03, rtol=0)
    without = descend(loss, starts, {}, descent, keep)
    assert words(without) == ["diverged", "budget"]


@pytest.mark.parametrize("cut", ["y", "everything"])
def test_optimising_without_a_derivative_raises(cut):
    variables = {name: torch.ones(2, 3) for name in ("x", "y")}

    def loss(live, constants, rows, iteration):
        x = live["x"].detach() if cut == "everything" else live["x"]
        return (x + (live["y"] > 0.5)).square().sum(1)

    with pytest.raises(GradveilError) as caught:
        descend(loss, variables, {}, Descent(iterations=2), keep)
    places = [problem.where for problem in caught.value.problems]
    assert places == (["knowledge.y"] if cut == "y" else ["knowledge.x", "knowledge.y"])
    assert "no derivative" in str(caught.value)
    assert "ig(simulated_client=full)" in str(caught.value)
