"""Budgets: shared by the attackers of a defence, never above an attack's own, the same after an interruption."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.learned import Learned
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_run import AuditTask, recovered, site
from gradveil.audit.budgets import (
    Budget,
    BudgetShare,
    Plans,
    read_budget,
    read_plans,
    restarts_worth,
    share_left,
    within,
    write_plan,
)
from gradveil.audit.preflight import open_experiment
from gradveil.audit.sources import Source
from gradveil.audit.trial import budget_of, merge, recover
from gradveil.core.errors import GradveilError
from gradveil.runs.task import arrive
from tests.audit.runs import config, execute


def ran(**changes):
    """Iterations of the first target client in every trial of a small run."""
    base = {"defences": ["none"], "attacks": ["ig(report=1)"]}
    experiment = open_experiment(config(**{**base, **changes}))
    return {
        trial.attack: recover(experiment, trial, range(2), lambda _: None).tensors["iterations"].tolist()
        for trial in trials(experiment.config)
    }


def test_target_client_iterations_are_shared():
    assert ran(budget="40") == {"ig(report=1)": [20, 20]}
    both = ran(budget="40", attacks=["ig(report=1)", "gi(restarts=1, report=1)"])
    assert set(map(tuple, both.values())) == {(10, 10)}
    assert ran(budget="40", restarts=2) == {"ig(report=1)": [10, 10]}
    assert ran(budget="4000", iterations=7) == {"ig(report=1)": [7, 7]}


def test_who_does_not_apply_takes_no_share(tmp_path):
    """Of one client's bottleneck nothing is trained before it, so that `pig` has nothing to compare there."""
    chosen = config(
        client=[{"trainable": ["head.*"]}, {}],
        defences=["precode"],
        attacks=["ig(report=1)", "pig(report=1)"],
        budget="40",
    )
    run, _ = execute(chosen, tmp_path / "run")
    alone, left_out, *both = run.trials
    assert [record["iterations"] for record in alone.records] == [20, 20]
    assert left_out.unfit
    assert [[record["iterations"] for record in trial.records] for trial in both] == [[10, 10], [10, 10]]
    experiment = open_experiment(chosen)
    elsewhere = arrive(site(experiment, None), torch.get_num_threads())
    order = AuditTask(trials(chosen)[0], 0, range(2)).order({}, Source())
    assert not isinstance(elsewhere, str)
    assert recovered(elsewhere(order, lambda _: None)).tensors["iterations"].tolist() == [20, 20]


def test_halving_pays_for_few_restarts():
    attack = Inversion("h", restarts=8, descent=Descent(halving=True))
    assert restarts_worth(attack) == pytest.approx(2.5)
    assert restarts_worth(replace(attack, restarts=1)) == 1
    spent = ran(budget="200", attacks=["ig(restarts=8, halving=true, report=1)"])
    assert spent == {"ig(restarts=8, halving=true, report=1)": [40, 40]}


def timed(seconds, beginning=0.0):
    """Return a clock by which an iteration (of a learner, an update) takes so long, and the list of what it timed."""
    tried = []

    def time_of(attack):
        tried.append(attack)
        return beginning + seconds * (attack.updates if isinstance(attack, Learned) else attack.descent.iterations)

    return tried, time_of


def test_seconds_become_iterations_that_are_written_down(tmp_path):
    (tmp_path / "plans").mkdir()
    folder, numbers = tmp_path / "plans" / "trial", range(2)

    def plans():
        return Plans(read_plans(folder, numbers), partial(write_plan, folder, numbers))

    attack = Inversion("slow", descent=Descent(iterations=10**12))
    tried, time_of = timed(0.05, beginning=1.5)
    first = within(Budget(60, "seconds"), attack, BudgetShare(1, 2, 2), time_of, plans())
    assert [run.descent.iterations for run in tried] == [1, 11, 1]
    assert first.descent.iterations == 1200  # whatever a search takes before its first iteration
    again = within(Budget(60, "seconds"), attack, BudgetShare(1, 2, 2), time_of, plans())
    assert (again, len(tried)) == (first, 3)
    assert json.loads((folder / "0-1-iterations.json").read_text()) == [first.descent.iterations]
    half = within(Budget(60, "seconds"), attack, BudgetShare(2, 1, 2), time_of, Plans())
    assert half.descent.iterations == 300


def test_a_slow_search_is_measured_on_few_iterations():
    tried, time_of = timed(2.5)
    slow = within(Budget(60, "seconds"), Inversion("slow"), BudgetShare(1, 2, 2), time_of, Plans())
    assert [run.descent.iterations for run in tried] == [1, 4, 1]
    assert slow.descent.iterations == 24


def test_a_search_that_a_time_budget_stops_early_lowers_its_step_size_until_its_end():
    attack = Inversion("long", descent=Descent(schedule=Plateau(400), iterations=10**6))
    short = within(Budget(100, "seconds"), attack, BudgetShare(1, 2, 2), timed(0.1)[1], Plans())
    assert (short.descent.iterations, type(short.descent.schedule)) == (1000, Cosine)
    counted = within(Budget(2000, "target-iterations"), attack, BudgetShare(1, 2, 2), timed(0.1)[1], Plans())
    assert (counted.descent.iterations, counted.descent.schedule) == (1000, Plateau(400))


def test_the_time_of_a_search_leaves_out_what_is_compared_afterwards(monkeypatch):
    """A large model's answers take longer to compare with its update than an iteration: that once ate the budget."""
    experiment = open_experiment(config(defences=["none"], attacks=["ig(report=1)"], budget="1s"))
    (trial,) = trials(experiment.config)
    compared = []
    whole = InversionProblem.match
    monkeypatch.setattr(InversionProblem, "match", lambda self, *given: compared.append(1) or whole(self, *given))
    plans = {}
    recover(experiment, trial, range(2), lambda _: None, Plans(plans, plans.__setitem__))
    assert "iterations" in plans
    assert len(compared) == 1


SMALL = "learned(epochs=9, width=8, features=16)"


def test_a_learner_shares_the_budget_too():
    """An update that it simulates is worth an iteration on a target client."""
    images, few = 20, {"data": {"name": "faces", "size": 16, "public": 20}, "attacks": [SMALL]}
    assert ran(budget=str(4 * images), **few) == {SMALL: [4, 4]}
    both = ran(budget=str(8 * images), **few | {"attacks": [SMALL, "ig(report=1, iterations=5)"]})
    assert both == {SMALL: [4, 4], "ig(report=1, iterations=5)": [5, 5]}
    assert ran(budget=str(4 * images), client={"batch": 2}, **few) == {SMALL: [8, 8]}
    assert ran(budget="1", **few) == {SMALL: [1, 1]}
    assert ran(budget=str(99 * images), **few) == {SMALL: [9, 9]}
    experiment = open_experiment(config(defences=["none"], **few))
    found = recover(experiment, trials(experiment.config)[0], range(2), lambda _: None)
    assert found.facts["simulated"] == 9 * images


def test_a_halved_search_records_the_iterations_that_its_budget_counts():
    experiment = open_experiment(config(defences=["none"], attacks=["ig(restarts=8, halving=true, iterations=40)"]))
    found = merge([recover(experiment, trials(experiment.config)[0], range(v, v + 1), lambda _: None) for v in (0, 1)])
    worth = restarts_worth(experiment.attacks[experiment.config.attacks[0]])
    assert worth < 8
    assert found.facts["target_iterations"] == found.facts["row_iterations"] * worth / 8


def test_the_seconds_of_a_learner_are_measured_once_and_the_measurement_counts():
    (tried, time_of), kept = timed(0.01, beginning=1.5), {}
    attack = Learned(epochs=30)
    first = within(Budget(40, "seconds"), attack, BudgetShare(2, 1, 1, 100), time_of, Plans({}, kept.__setitem__))
    assert [(run.epochs, run.updates) for run in tried] == [(1, 3), (1, 67), (1, 3)]
    assert (first.epochs, first.updates) == (14, None)  # 20 s, less 5.2 s to measure
    again = within(Budget(40, "seconds"), attack, BudgetShare(2, 1, 1, 100), time_of, Plans(kept))
    assert (again, len(tried)) == (first, 3)


def test_a_learner_that_cannot_pay_for_a_pass_learns_from_fewer_updates():
    tried, time_of = timed(1.0)
    first = within(Budget(40, "seconds"), Learned(epochs=30), BudgetShare(1, 1, 1, 100), time_of, Plans())
    assert [run.updates for run in tried] == [3, 6, 3]
    assert (first.epochs, first.updates) == (1, 28)
    assert share_left(Learned(epochs=30), first, 100) == pytest.approx(28 / 3000)
    least = within(Budget(1, "target-iterations"), Learned(), BudgetShare(1, 1, 1, 100), time_of, Plans())
    assert (least.epochs, least.updates) == (1, 2)


def test_auto_is_shared_by_the_defended_settings_and_the_control():
    def seconds(**changes):
        return budget_of(config(budget="auto", **changes)).amount

    whole = seconds(defences=["none"])
    assert seconds(defences=["none", "dgp"]) == whole / 2
    assert seconds(defences=["none"], seeds=[0, 1, 2]) == whole / 3
    assert seconds(defences=["dgp"], control=True) == whole / 2


def test_time_is_about_kept():
    experiment = open_experiment(config(defences=["none"], attacks=["ig"], budget="1s"))
    found = recover(experiment, trials(experiment.config)[0], range(2), lambda _: None)
    assert 0.1 < found.facts["seconds"] < 10


def test_attacks_without_iterations_stay_as_they_are():
    for attackers in (0, 1):
        share = BudgetShare(attackers, 1, 1)
        assert within(Budget(1, "seconds"), Analytic(), share, lambda _: 0.0, Plans()) == Analytic()


@pytest.mark.parametrize("text", ["", "fast", "-3", "0", "10 d", "0s"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(GradveilError, match="budget"):
        read_budget(text)


def test_a_budget_is_part_of_the_run(tmp_path):
    run, _ = execute(config(defences=["none"], attacks=["ig(report=1)"], budget="8"), tmp_path / "run")
    assert run.trials[0].records[0]["iterations"] == 4
    assert [point["iterations"] for point in run.trials[0].info["trace"]] == [1, 2]
    with pytest.raises(GradveilError, match="budget"):
        config(budget="soon")


def test_shares_that_measured_apart_are_put_together(tmp_path):
    run, _ = execute(
        config(defences=["none"], attacks=["ig"], budget="1s", target_clients=3), tmp_path / "run", share=2
    )
    assert run.trials[0].failed is None
    assert len(run.trials[0].records) == 3
