"""Quality against budget: choice of curves, their points and the advice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.result_rows import BudgetPoint, Row
from gradveil.audit.run_directory import load_run
from gradveil.audit.verdict import verdicts
from gradveil.report import audit_page
from gradveil.report.plots import curves, progress_charts
from tests.audit.runs import config, execute
from tests.report.runs import CASES, played, write_run
from tests.report.trials import CONTROLS, HEALTHY, row


def traced(won: int, *ssims: float | None, final: float, **change: Any) -> Row:
    """A trial whose attack had these mean SSIMs on the way to its 400 iterations."""
    counts = [400 >> halving for halving in range(len(ssims), 0, -1)]
    noted = [{"iterations": count, "asr": 0.25, "ssim_mean": value} for count, value in zip(counts, ssims, strict=True)]
    return row(won, trace=noted, ssim=final, **change)


BARE = traced(32, 0.2, 0.6, 0.8, final=0.9, defence="none", simulated_client="naive", number=90)


def test_the_final_answer_is_the_last_point() -> None:
    trial = traced(8, 0.1, 0.2, 0.25, final=0.3)
    assert trial.curve[:2] == (BudgetPoint(50, 0.1, 0.25), BudgetPoint(100, 0.2, 0.25))
    assert trial.curve[-1].iterations == 400
    assert (trial.curve[-1].asr, trial.curve[-1].score) == (0.25, pytest.approx(0.3))
    assert trial.last_doubling == pytest.approx(0.05)
    trial.trial.records[3]["iterations"] = 401  # an odd budget is noted at its half, rounded down
    assert Row(0, trial.trial).curve[-1].iterations == 401
    assert row(8).curve == ()
    assert row(8).last_doubling is None


def test_real_attacks_have_a_curve_and_the_closed_form_has_none(tmp_path: Path) -> None:
    wanted = config(attacks=["ig(iterations=7)", "learned(epochs=1, width=8)"], defences=["none"], target_clients=1)
    run, _ = execute(wanted, tmp_path / "run")
    ig, learned = (Row(number, trial) for number, trial in enumerate(run.trials))
    assert [spot.iterations for spot in ig.curve] == [1, 3, 7]
    assert ig.curve[-1].score == ig.mean("ssim")
    assert learned.curve == ()


def test_chart_has_the_strongest_iterating_attack_of_every_defence() -> None:
    rows = [
        BARE,
        traced(3, 0.2, 0.3, final=0.31, attack="cdia", number=1),
        traced(2, 0.2, 0.3, final=0.31, attack="dia", number=2),
        row(9, attack="learned", number=3),
        traced(32, 0.2, 0.3, final=0.9, attack="wiig", number=4, grants=["step.noise.w: its true value"]),
        row(1, defence="clip(1)", attack="learned", number=5),
    ]
    (chart,) = progress_charts(verdicts(rows))
    assert [(r.defence, r.attack) for r in chart.rows] == [("none", "ig"), ("dgp", "cdia")]
    assert chart.note.startswith("The strongest attack against dgp (learned) does not iterate")
    (described,) = curves([chart], rows)
    assert [line["series"] for line in described["lines"]] == [0, 1]
    assert described["lines"][0]["points"][0]["lines"][0] == "after 50 iterations of 400"
    assert described["lines"][0]["points"][-1]["lines"] == ["after 400 iterations", "mean SSIM 0.9 · 100% recovered"]
    assert described["baseline"] == {"asr": 0.0, "score": 0.1}


def test_settings_have_charts_of_their_own_and_colours_in_common() -> None:
    rows = [BARE, traced(3, 0.3, final=0.3), traced(3, 0.3, final=0.3, batch=4), row(1, model="resnet")]
    both = progress_charts(verdicts(rows))
    assert [len(chart.rows) for chart in both] == [2, 1]
    assert curves(both, rows)[1]["lines"][0]["series"] == 1
    assert progress_charts(verdicts([row(3)])) == []


@pytest.mark.parametrize(
    ("halves", "expected"),
    [
        ((0.85, 0.25), "help without a defence (mean SSIM rose by 0.05 in the last doubling), but hardly against dgp."),
        (
            (0.85, 0.2),
            "help without a defence and against dgp (mean SSIM rose by 0.05 and 0.08 in the last doubling).",
        ),
        ((0.89, 0.2), "likely help against dgp (mean SSIM rose by 0.08 in the last doubling), but hardly without a"),
        ((0.89, 0.262), "More iterations would hardly help: no mean SSIM rose by more than 0.02 in the last doubling."),
        ((0.95, 0.4), "More iterations would hardly help"),
        ((None, 0.4), "More iterations would hardly help"),
    ],
)
def test_advice_names_defences_whose_curves_rise(halves: tuple[float | None, float], expected: str) -> None:
    bare = traced(32, 0.2, halves[0], final=0.9, defence="none", simulated_client="naive", number=90)
    defended = traced(0, 0.2, halves[1], final=0.28 if halves[1] != 0.25 else 0.265)
    (chart,) = progress_charts(verdicts([bare, defended]))
    assert expected in chart.advice


def test_an_attack_that_is_stuck_needs_something_else_than_iterations() -> None:
    short = HEALTHY | {"objective": 0.5, "objective_truth": 0.1}
    rows = [BARE, traced(0, 0.2, 0.28, final=0.28, health=short), traced(0, 0.28, final=0.28, defence="clip(1)")]
    (chart,) = progress_charts(verdicts(rows))
    ends = (
        "(mean SSIM rose by 0.1 in the last doubling), but hardly against dgp and clip(1); restarts or another attack"
    )
    assert chart.advice.endswith(f"{ends} may against dgp.")
    (alone,) = progress_charts(verdicts(rows[:2]))
    assert alone.advice.endswith("but hardly against dgp; restarts or another attack may.")
    (stopped,) = progress_charts(verdicts(rows[1:2]))
    assert stopped.advice.endswith("in the last doubling; restarts or another attack may.")


def test_numbers_stand_below_the_picture() -> None:
    short = traced(3, 0.3, final=0.3, controls=CONTROLS)
    (chart,) = progress_charts(verdicts([BARE, short]))
    assert chart.shares == ["1/8", "1/4", "1/2", "1"]
    assert [spot and spot.iterations for spot in chart.table[1][1]] == [None, None, 200, 400]


def test_the_page_has_the_picture_where_an_attack_iterated(tmp_path: Path) -> None:
    trials = played(target_clients=4, cases=CASES[:3])
    html = audit_page(load_run(write_run(tmp_path / "with", trials)))
    assert 'id="budget"' in html
    assert html.count('data-chart="') == 1
    assert "More iterations would" in html
    bare = copy.deepcopy(trials)
    for trial in bare:
        del trial["info"]["trace"]
    without = audit_page(load_run(write_run(tmp_path / "without", bare)))
    assert 'id="budget"' not in without
    assert 'data-chart="' not in without
