"""What a person sees: live on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from gradveil.attacks.protocol import Progress
from gradveil.audit import display
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_run import expected_work
from gradveil.audit.display import Screen, result_table
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import Trial
from gradveil.core.errors import Problem
from gradveil.core.formatting import interval, percent
from gradveil.metrics import wilson
from tests.audit.runs import config, legend
from tests.report.trials import recorded


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def result(
    defence: str, attack: str, successes: int, status: str = "budget", truth: float | None = None, **change: Any
) -> Trial:
    info = {"defence": defence, "attack": attack, "seed": 0, "client": "gradient", "threshold": 0.5, "seconds": 2.0}
    controls = {"wrong_target_client": {"asr": 0.9}, "mean_image": {"asr": 0.0}, "class_image": {"asr": 0.25}}
    info |= {"model": "lenet", "data": "faces", "batch": 1, "round": 0, "simulated_client": "full", "knowledge": {}}
    info["health"] = {"objective": 0.1, "objective_initial": 1.0, "objective_truth": truth, "diverged": 0.0}
    scores = {"mse": 0.1, "psnr": 10.0, "ssim": 0.6, "expected": {"recovered": 0.25}}
    images = [scores | {"success": int(i < successes)} for i in range(4)]
    records = [
        {"target_client": target_client, "status": status, "label_accuracy": 1.0, "per_image": [image]}
        for target_client, image in enumerate(images)
    ]
    info |= {"distance": 0.5, "row_iterations": 8, "controls": controls}
    return Trial(recorded({**info, **change}), records)


def play(screen: Screen, steps: list[Progress]) -> None:
    address = trials(config())[0]
    with screen:
        screen.start(trials(config()), set(), 2)
        for step in steps:
            screen.progress(address, 0, step)
        screen.done(address, result("none", "ig", 3))


def test_plain_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    out = console(terminal=False)
    play(Screen(out), [Progress(0, 2, i, 10, 0.5) for i in range(1, 9)])
    assert text(out).splitlines() == [
        "2 trials of 2 target clients",
        "[1/2] ig(iterations=6, report=2) against none, seed 0: 75% recovered, SSIM 0.60, 2.0 s",
    ]
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 20)).__next__)
    slow = console(terminal=False)
    play(Screen(slow), [Progress(1, 1, 5, 10, 0.5)])
    line = text(slow).splitlines()[1]
    assert "ig(iterations=6, report=2) against none, seed 0 (50%)" in line
    assert "iterations/s" not in line
    assert "left" in line


def test_an_attack_that_reports_nothing_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.02)
    monkeypatch.setattr(display, "_LOOK_SECONDS", 0.01)
    out = console(terminal=False)
    with Screen(out, "a model") as screen:
        screen.start(trials(config()), set(), 2)
        deadline = time.monotonic() + 5
        while "0 of 2 trials done" not in text(out) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert text(out).startswith("a model: 2 trials of 2 target clients\n  0 of 2 trials done, ")
    before = text(out)
    time.sleep(0.05)
    assert text(out) == before, "nothing after the end"


def test_a_terminal_shows_what_is_under_way() -> None:
    out = console(terminal=True)
    play(Screen(out), [Progress(1, 1, 5, 10, 0.25), Progress(2, 0, 10, 10, float("nan"))])
    assert "1 of 2 trials done" in text(out)
    assert "nan" not in text(out)


def test_the_time_left_goes_by_the_work_of_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = config(attacks=["ig(iterations=10)", "ig(iterations=90)"], defences=["none"])
    short, long = trials(plan)
    clock = iter((0.0, 0.0, 30.0, 30.0, 60.0, 60.0, 60.0))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    screen = Screen(console(terminal=False))
    screen.start([short, long], set(), 2, (), expected_work(open_experiment(plan)))
    screen.done(short, result("none", "ig", 1))
    assert "30 s so far, about 4 min 30 s left" in screen._rest()
    screen.progress(long, 0, Progress(0, 2, 30, 180, 0.5))
    assert "1 min 0 s so far, about 3 min 0 s left; " in text(screen.console).splitlines()[-1]


def test_a_trial_under_way_takes_as_long_as_its_own_pace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its iterations may each take longer than those of the trials before it."""
    first, second = trials(config(attacks=["ig", "cdia"], defences=["none"]))
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    screen = Screen(console(terminal=False))
    screen.start([first, second], set(), 2, (), {first.id: 99.0, second.id: 1.0})
    now[0] = 10.0
    screen.done(first, result("none", "ig", 1))
    for seconds, iterations in ((20.0, 10), (30.0, 20)):
        now[0] = seconds
        screen.progress(second, 0, Progress(0, 2, iterations, 100, 0.5))
    assert "30 s so far, about 1 min 20 s left" in screen._rest()


def test_the_work_of_a_trial_is_what_its_attack_may_take() -> None:
    def work(**changes: Any) -> list[float]:
        return [*expected_work(open_experiment(config(defences=["none"], **changes), checked=False)).values()]

    attacks = ["ig(iterations=10, restarts=3)", "ig(iterations=40)"]
    assert work(attacks=attacks) == [30, 40]
    assert work(attacks=attacks, client={"batch": 2, "local": {"lr": 0.1, "epochs": 3}}) == [180, 240]
    assert work(attacks=attacks, budget="64") == [16, 16]
    assert work(attacks=attacks, budget="2m") == [1, 1]
    assert work(attacks=["analytic", "rob", "curious", *attacks]) == [0, 0, 0, 30, 40]


@pytest.mark.parametrize("objective", [float("nan"), float("inf")])
def test_an_objective_that_is_no_number_is_a_dash(objective: float, monkeypatch: pytest.MonkeyPatch) -> None:
    out = console(terminal=True)
    screen = Screen(out)
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 20)).__next__)
    with screen:
        screen.start(trials(config()), set(), 2)
        screen.progress(trials(config())[0], 0, Progress(2, 0, 10, 10, objective))
        if screen.live:
            screen.live.refresh()
    assert "objective –" in text(out)
    assert "nan" not in text(out)
    assert "objective inf" not in text(out)


def test_scores_that_are_no_numbers_are_dashes() -> None:
    spoilt = result("none", "ig", 0)
    for record in spoilt.records:
        record["per_image"][0] |= {"ssim": None, "psnr": float("nan")}
    out = console(terminal=False)
    out.print(result_table([spoilt]))
    assert text(out).splitlines()[1].split()[6:8] == ["–", "–"]


def test_a_failure_is_shown() -> None:
    out = console(terminal=False)
    screen = Screen(out)
    screen.start(trials(config()), {"a"}, 2)
    screen.done(trials(config())[0], Trial({"failed": "out of [memory]"}, []))
    assert "1 of them already done" in text(out)
    assert "[2/2]" in text(out)
    assert "failed: out of [memory]" in text(out)


def test_what_is_damaged_and_done_again_is_said() -> None:
    out = console(terminal=False)
    Screen(out).start(trials(config()), set(), 2, [Problem("run/trials/a/records.json", "[0] is 1, not an object", "")])
    said = "Damaged, its trial is done again: run/trials/a/records.json: [0] is 1, not an object"
    assert text(out).splitlines() == [said, "2 trials of 2 target clients"]


def test_the_table_has_the_strongest_attack_first() -> None:
    failed = Trial({**result("dgp", "gi", 0).info, "failed": "broke"}, [])
    rows: list[Any] = [result("none", "ig", 1), result("dgp", "ig", 0), result("none", "dlg", 4), failed]
    out = console(terminal=False)
    out.print(result_table(rows))
    lines = [line.split() for line in text(out).splitlines()]
    assert [line[:2] for line in lines[1:]] == [["none", "dlg"], ["none", "ig"], ["dgp", "ig"], ["dgp", "gi"]]
    assert lines[1][2:] == ["–", "100%", "51–100%", "25%", "0.60", "±", "0.00", "10.0", "0.5", "effective"]
    assert lines[3][2:4] == ["adaptive", "0%"]
    assert lines[4][2:] == ["–", "failed"]


def test_the_table_has_a_column_for_each_further_metric() -> None:
    plain, scored = result("none", "dlg", 4), result("none", "ig", 1)
    scored = Trial({**scored.info, "metrics": ["ssim_rescaled"]}, scored.records)
    for record in scored.records:
        for image in record["per_image"]:
            image["ssim_rescaled"] = 0.75
    out = console(terminal=False)
    out.print(result_table([plain, scored]))
    header, first, second = (line.split() for line in text(out).splitlines())
    assert header[header.index("SSIM") + 1] == "ssim_rescaled"
    assert (first[9:11], second[9:11]) == (["–", "10.0"], ["0.750", "10.0"])


def test_rates_are_written_as_in_the_report() -> None:
    out = console(terminal=False)
    one_of_16 = result("none", "ig", 1)
    one_of_16.records.extend(result("none", "ig", 0).records * 3)
    out.print(result_table([one_of_16]))
    assert text(out).splitlines()[1].split()[3:5] == ["6.2%", "1.1–28.3%"]
    assert (percent(1 / 16), interval(*wilson(1, 16))) == ("6.2%", "1.1–28.3%")


def test_a_defence_that_is_not_broken_and_an_attack_that_is_under_optimised_look_different() -> None:
    rows = [result("none", "ig", 4), result("dgp", "ig", 0, truth=0.01), result("dp", "ig", 0, truth=0.1)]
    rows += [result("clip(1)", "ig", 0), result("cvb", "gi", 0)]
    rows[-1].info["health"]["diverged"] = 1.0
    out = console(terminal=False)
    out.print(result_table(rows))
    lines = text(out).splitlines()
    ends = ("attack check", "effective", "under-optimised", "ambiguous", "converged", "suspect")
    assert [line.split("0.5  ")[-1].split("distance")[-1].strip() for line in lines] == list(ends)
    said = legend(rows[:2])
    assert "under-optimised: it stopped above the objective of the true images" in said
    assert "ambiguous" not in said
    assert "is custom and cannot tell its objective at the true images (has no `evaluate`)" in legend(rows)


def test_the_legend_names_diverged_attacks() -> None:
    assert "SSIM to the true image above 0.5" in legend([result("none", "ig", 1)])
    assert "ig against none: scored against other target clients" in legend([result("none", "ig", 2)])
    assert "other target clients" not in legend([result("none", "ig", 4)])
    assert "4 target clients' attacks diverged and count as failed" in legend([result("none", "ig", 0, "diverged")])


def attacked(defence: str, attack: str, successes: int = 0, **change: Any) -> Trial:
    return result(defence, attack, successes, **change)


def test_a_defence_that_nobody_knows_carries_a_warning() -> None:
    out = console(terminal=False)
    naive = {"simulated_client": "naive", "grants": []}
    rows = [attacked("none", "ig", 4, **naive), attacked("dgp", "ig", **naive), attacked("dp", "ig", **naive)]
    rows += [attacked("dp", "cdia"), attacked("cvb", "ig", **naive), attacked("clip(1)", "ig", **naive)]
    out.print(result_table([*rows, attacked("cvb", "pig", **naive)]))
    said = " ".join(text(out).split())
    assert "dgp and clip(1): no attacker who knows them was run: add --attack adaptive." in said
    assert said.endswith("cvb: no attacker who knows all of this defence was run: add --attack adaptive.")
    quiet = console(terminal=False)
    quiet.print(result_table([rows[0], rows[3]]))
    assert "--attack" not in text(quiet)


def test_upper_bounds_stand_last_and_are_named() -> None:
    told = attacked("dp", "wiig", 4, grants=["step.noise.w: its true value"])
    rows = [told, attacked("dp", "cdia", 1, grants=[])]
    out = console(terminal=False)
    out.print(result_table(rows))
    assert [line.split()[1:3] for line in text(out).splitlines()[1:]] == [["cdia", "adaptive"], ["wiig", "informed"]]
    said = legend(rows)
    assert "Attacker, informed: knows client secrets" in said
    assert "upper bounds" in said
    assert "upper bounds" not in legend(rows[1:])


def test_the_legend_says_the_threat_model_with_the_budget() -> None:
    said = legend([result("none", "ig", 1)], {"budget": "64000"})
    assert "Threat model: An honest-but-curious server keeps the global parameters" in said
    assert "share 64,000 target-iterations" in said
    assert "share" not in legend([result("none", "ig", 1)]).partition("Recovered:")[0]
