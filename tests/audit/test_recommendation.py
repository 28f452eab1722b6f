"""What a run recommends: only what no attack broke, with its cost, or the next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gradveil.audit.defence_costs import STUCK, DefenceCost, costs
from gradveil.audit.findings import accuracies, equal_counts, findings, guaranteed
from gradveil.audit.recommendation import Recommendation, _Candidate, _dominates
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.federated.training_groups import MeasuredAccuracy
from gradveil.federated.training_setup import TrainingTrial
from gradveil.metrics import wilson
from tests.report.trials import HEALTHY, row

DP, DGP = "dp(clip=1, sigma=2)", "dgp"
SHORT = {"health": HEALTHY | {"objective": 0.95}}
COMMAND = "gradveil audit study.toml"


def recommended(*rows: Row, costs: Mapping[str, DefenceCost] | None = None, command: str = COMMAND) -> Recommendation:
    found = findings([each.trial for each in rows], costs or {}, command).recommendation
    assert found is not None
    return found


def against(defence: str, won: int = 0, **change: Any) -> Row:
    return row(won, **{"defence": defence, "attack": "cdia", **change})


def bare(won: int = 32, **change: Any) -> Row:
    return row(won, defence="none", **change)


def summary(accuracy: float, defence: str = "none", seed: int = 0, **change: Any) -> dict[str, Any]:
    point = {"number": 1, "bytes_up": 10.0, "seconds": 1.0, "clients": [0]}
    whole = {"trial": defence, "defence": defence, "seed": seed, "status": "finished", "rounds": 1, "best_round": 1}
    whole |= {"accuracy": accuracy, "tested": 100, "constant": 0.5, "epsilon": {}, "guarantee": "none", "delta": None}
    return whole | {"bytes_up": 10.0, "client_seconds": 2.0, "curve": [point]} | change


def trained(**accuracies: Sequence[float] | float) -> dict[str, DefenceCost]:
    names = {"none": "none", "dp": DP, "dgp": DGP}
    told = {names[key]: value if isinstance(value, list) else [value] for key, value in accuracies.items()}
    return costs([
        (TrainingTrial(name, seed), summary(value, name, seed, **(MORE if name == DP else {})))
        for name, values in told.items()
        for seed, value in enumerate(values)
    ])  # fmt: skip


MORE = {"bytes_up": 25.0, "client_seconds": 3.0, "epsilon": {"example": 6.9}, "guarantee": "epsilon 6.9 at delta 1e-3"}


def test_what_no_attack_broke_is_recommended_with_its_cost_and_errors() -> None:
    found = recommended(bare(), against(DGP, 32), against(DP), costs=trained(none=0.92, dp=0.84, dgp=0.9))
    assert found.defence == DP
    assert found.text == (
        "Use dp(clip=1, sigma=2): attackers recover and identify 0 of 32 images (95% CI 0–10.7%). It costs 8 points of "
        "accuracy (92% → 84%, ± 5), 2.5 times the bytes sent in training and up to "
        "twice the client's time (2 → 3 s). Of 2 defences it is the only one that was not broken."
    )
    numbers = found.as_object()
    assert (numbers["recovered"], numbers["images"], numbers["bytes_ratio"], numbers["seconds_ratio"]) == (
        0,
        32,
        2.5,
        1.5,
    )
    assert numbers["accuracy_lost"] == pytest.approx(0.08)
    assert numbers["accuracy_lost_error"] == pytest.approx(0.048, abs=2e-3)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([against(DGP, 32)], ["No tested defence protects this model.", '--defence "dp(clip=1, sigma=2)"']),
        ([against(DGP, 6)], ["No tested defence protects this model."]),
        ([against(DP, 32)], ['more noise: --defence "dp(clip=1, sigma=4)"', "client.batch=8"]),
        ([against("dp(clip=2, sigma=0.1) + cvb", 32)], ['--defence "dp(clip=2, sigma=1) + cvb"']),
        ([against(DGP, simulated_client="naive")], ["No defence can be recommended yet.", "--attack adaptive"]),
        ([against(DGP, of=4)], ["No defence can be recommended yet.", "--target-clients 8"]),
        ([against(DGP, **SHORT)], ["No defence can be recommended yet.", "more --iterations"]),
        ([against(DGP, attack="ig(iterations=50)", **SHORT)], ["again with ig(iterations=200)."]),
        ([against(DGP, 32, batch=8)], ["larger batches: --set client.batch=32"]),
        (
            [against(DGP, 32), against(DP, simulated_client="naive")],
            ["No tested defence is shown to protect", f"{DP} (not tested)", "--attack adaptive", "noise"],
        ),
    ],
)
def test_without_a_defence_that_was_not_broken_the_next_step_is_named(rows: list[Row], words: list[str]) -> None:
    found = recommended(bare(), *rows)
    assert found.defence is None
    assert all(word in found.text for word in words), found.text
    assert found.as_object()["next"]


def test_the_next_step_of_a_call_from_python_names_its_arguments() -> None:
    rows = [bare(), against(DGP, 32), against(DP, of=4)]
    text = recommended(*rows, command="gradveil.audit(...)").text
    assert "--" not in text
    assert all(word in text for word in ("8 target clients", 'the defence "dp(clip=1, sigma=2)"', "client_batch=8"))


def test_a_defence_has_to_hold_in_every_setting() -> None:
    rows = [against(DP), against(DP, 32, client="local T=2"), against(DGP), against(DGP, client="local T=2")]
    assert recommended(bare(), bare(client="local T=2"), *rows).defence == DGP


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({}, DGP),  # equal rates, fewer bytes
        ({"none": 0.9, "dp": 0.88, "dgp": 0.7}, DP),
        ({"none": 0.9, "dp": 0.8, "dgp": 0.85}, DGP),
        ({"none": 0.9, "dp": 0.8}, DP),  # of the other one nobody knows
    ],
)
def test_the_most_accurate_of_several_is_recommended_and_the_others_named(
    measured: dict[str, float], chosen: str
) -> None:
    rows = [bare(), against(DP, bytes_sent=20.0), against(DGP, bytes_sent=5.0)]
    found = recommended(*rows, costs=trained(**measured))
    other = DP if chosen == DGP else DGP
    assert found.defence == chosen
    assert f"{other} was not broken either; nothing that was tried is better in everything" in found.text


@pytest.mark.parametrize(
    ("command", "data", "words"),
    [
        (COMMAND, "faces", f"was not measured. To measure it: {COMMAND} --set cost.rounds=20 --set cost.local.lr=0.1"),
        ("gradveil audit --observed seen", "faces", "gradveil train on the same data and model"),
        ("gradveil.audit(...)", "faces", "gradveil.train(...)"),
        (COMMAND, "patches", "cannot be measured: the labels of patches mean nothing"),
    ],
)
def test_an_accuracy_that_was_not_measured_is_said_with_the_command(command: str, data: str, words: str) -> None:
    found = recommended(bare(data=data), against(DP, data=data), command=command)
    assert words in found.text


def test_a_training_that_learned_nothing_loses_no_accuracy() -> None:
    found = recommended(bare(), against(DP), costs=trained(none=0.5, dp=0.5))
    assert "points of accuracy" not in found.text
    assert "no training without a defence made progress" in found.text
    assert found.as_object()["progress"] is False


def test_an_attack_check_and_an_epsilon_that_need_a_word_are_told() -> None:
    def told(epsilon: float, **change: Any) -> str:
        return recommended(bare(), against(DP, epsilon={"example": epsilon}, **change)).text

    misled = {"health": HEALTHY | {"objective": 0.01, "objective_truth": 0.02}}
    assert "Its attack check is ambiguous." in told(6.9, **misled)
    assert "Its epsilon is 48.8, above 10: no guarantee to rely on." in told(48.8)
    assert "attack check" not in told(6.9)
    assert "no guarantee" not in told(6.9)


def test_a_quoted_attack_in_doubt_is_named_with_the_one_that_passed() -> None:
    rows = [bare(), bare(attack="vbia"), against(DP, attack="vbia", **SHORT), against(DP)]
    rows += [bare(attack="ig"), against(DP, attack="ig", attacker="naive")]  # passes, but shows nothing of the defence
    assert "of vbia, which is quoted, is suspect; cdia passed it." in recommended(*rows).text


def test_accuracies_say_their_examples_and_mark_trainings_that_learned_nothing() -> None:
    stuck = findings([bare().trial, against(DP).trial], trained(none=0.5, dp=0.5))
    first, second = accuracies(stuck, {})
    assert "100 test images" in first
    assert second.startswith(f"{STUCK} none and {DP} classified no more")
    assert {stuck.cost(name).accuracy_words[-1] for name in ("none", DP)} == {STUCK}  # pyright: ignore[reportOptionalMemberAccess]
    (sound,) = accuracies(findings([bare(of=100).trial, against(DP).trial], trained(none=0.9, dp=0.8)), {})
    assert "the 100 attacked images" in sound
    assert not [*accuracies(findings([bare().trial]), {})]


def test_lines_explain_an_ambiguous_check_equal_counts_and_an_epsilon() -> None:
    misled = {"health": HEALTHY | {"objective": 0.01, "objective_truth": 0.02}}
    twice = [against(DGP, 32), against(DGP, 32, attack="ig")]
    found = findings([row.trial for row in (bare(), *twice, against(DP, epsilon={"example": 48.8}, **misled))])
    (check,) = found.checks()
    assert check.startswith(f"Attack check of {DP}: ambiguous, which means that other images fit")
    assert [*equal_counts(found)]
    assert not [*equal_counts(findings([row.trial for row in (bare(), twice[0])]))]
    (promise,) = guaranteed(found)
    assert f"only {DP}, epsilon 48.8 of each example (above 10: no guarantee to rely on)" in promise


def test_a_run_without_a_defence_recommends_nothing() -> None:
    assert findings([bare().trial]).recommendation is None
    assert findings([]).recommendation is None


def test_a_defence_whose_attack_was_cut_is_said_to_hold_within_the_budget() -> None:
    near = {"health": HEALTHY | {"objective": 0.012, "objective_truth": 0.01}}
    found = recommended(bare(), against(DP, budget_share=0.05, **near))
    assert f"Use {DP}: within the budget, attackers recover and identify 0 of 32 images" in found.text
    assert found.as_object()["within_budget"] is True


def test_a_defence_with_a_failed_trial_is_not_recommended() -> None:
    failed = Trial({**against(DP, seed=1).trial.info, "failed": "RuntimeError: out of memory"}, [])
    trials = [bare().trial, bare(seed=1).trial, against(DP).trial, failed]
    found = findings(trials).recommendation
    assert found is not None
    assert found.defence is None
    assert f"an attack on {DP} failed" in found.text
    others = findings([*trials, against(DGP).trial, against(DGP, seed=1).trial]).recommendation
    assert others is not None
    assert others.defence == DGP


def test_nothing_is_recommended_before_all_trials_are_done() -> None:
    assert findings([bare().trial, against(DP).trial], undone=2).sentence.endswith("Incomplete: 2 not done.")
    found = findings([bare().trial, against(DP).trial], undone=2).recommendation
    assert found is not None
    assert found.defence is None
    assert "No defence can be recommended yet. Next: give the same command again: 2 trials are not done." in found.text


def test_a_defence_with_which_a_training_learned_nothing_is_not_recommended() -> None:
    found = recommended(bare(), against(DP), costs=trained(none=0.92, dp=0.5))
    assert found.defence is None
    assert f"train longer with {DP}, or weaken it: its training learned nothing" in found.text
    found = recommended(bare(), against(DP), against(DGP), costs=trained(none=0.92, dp=0.5, dgp=0.7))
    assert found.defence == DGP


def test_accuracies_are_of_the_seeds_that_both_trainings_have() -> None:
    found = recommended(bare(), against(DP), costs=trained(none=[0.9, 0.7], dp=[0.8]))
    assert "It costs 10 points of accuracy (90% → 80%" in found.text


def test_a_loss_of_no_accuracy_has_no_sign() -> None:
    assert "It costs 0 points of accuracy" in recommended(bare(), against(DP), costs=trained(none=0.9, dp=0.9)).text


def test_errors_of_accuracies_count_test_images_and_seeds() -> None:
    one, several = (trained(none=values)["none"].accuracy for values in ([0.9], [0.8, 0.9, 1.0]))
    assert one == MeasuredAccuracy(0.9, pytest.approx((92 / 104 * 12 / 104 / 104) ** 0.5), tested=100)
    assert several.value == pytest.approx(0.9)
    assert several.error == pytest.approx((one.error**2 + 0.1**2 / 3) ** 0.5)
    assert trained(none=1.0)["none"].accuracy.error > 0.01
    assert one.interval == pytest.approx(wilson(90, 100))
    low, high = several.interval
    assert 0 < low < one.interval[0] < one.interval[1] < high < 1
    assert trained(none=0.0)["none"].accuracy.interval == (0.0, pytest.approx(wilson(0, 100)[1]))


def test_accuracies_lost_are_of_the_same_seeds() -> None:
    lost = trained(none=[0.9, 0.8], dp=[0.8, 0.8])[DP].lost
    assert lost is not None
    assert lost.value == pytest.approx(0.05)


def test_a_cost_that_one_defence_did_not_measure_makes_it_no_better() -> None:
    known = trained(none=0.92, dp=0.84, dgp=0.84)
    (dp,), (dgp,) = (findings([against(name).trial]).verdicts for name in (DP, DGP))
    one, other = (_Candidate(v.defence, "not broken", v, known[v.defence]) for v in (dgp, dp))
    assert _dominates(one, other)
    assert not _dominates(other, one)
    unmeasured = dataclasses.replace(one, cost=dataclasses.replace(known[DGP], seconds_ratio=None))
    assert not _dominates(unmeasured, other)
