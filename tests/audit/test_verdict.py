"""The sentences, what must stand beside them, and which trial they quote."""

from typing import Any

import numpy as np
import pytest

from gradveil.audit.attack_check import complaints
from gradveil.audit.baselines import interval_of
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.audit.verdict import Verdict, price, verdicts
from gradveil.metrics import risk, wilson
from tests.report.trials import BARE, CONTROLS, HEALTHY, row


def judge(*rows: Row) -> Verdict:
    """The verdict on `dgp`, beside an undefended control."""
    (found,) = [v for v in verdicts([*rows, BARE]) if v.best.defence == "dgp"]
    return found


def test_an_adaptive_attacker_is_quoted_with_wilsons_interval() -> None:
    verdict = judge(row(31))
    said = "An attacker who knows this defence recovers 31 of 32 images, 31 of them identifiable"
    assert verdict.sentence == f"{said} (96.9%, 95% CI 84.3–99.4%)."
    assert (verdict.defence, verdict.level) == ("dgp", "broken")
    assert (verdict.images, verdict.recovered, verdict.identified, verdict.identifiable) == (32, 31, 31, 31)
    assert verdict.interval == wilson(31, 32)
    assert verdict.risk == risk(31, 32, 0.0)
    assert verdict.notes == ()


def test_images_that_are_identified_without_being_recovered_are_part_of_the_sentence() -> None:
    verdict = judge(row(0, identified=True))
    assert verdict.level == "leaks"
    assert verdict.sentence.endswith("0 of them identifiable (0%, 95% CI 0–10.7%). It identifies 32 of 32.")


def test_a_naive_attacker_alone_is_no_evidence_of_safety() -> None:
    verdict = judge(row(0, simulated_client="naive"))
    assert "An attacker who ignores this defence recovers 0 of 32 images, 0 of them" in verdict.sentence
    assert "(0%, 95% CI 0–10.7%)" in verdict.sentence
    assert verdict.warning == "No attacker who knows this defence was run: add --attack adaptive."
    assert verdict.level == "not tested"
    assert judge(row(0)).warning == ""
    assert judge(row(20, simulated_client="naive")).warning == verdict.warning
    (bare,) = [v for v in verdicts([row(0), BARE]) if v.undefended]
    assert bare.warning == ""


def test_the_strongest_attacker_comes_first_and_equal_rates_prefer_him_who_knows() -> None:
    weak, strong = row(3), row(20, simulated_client="naive", attack="dlg")
    verdict = judge(weak, strong)
    assert verdict.best is strong
    assert [r.recovered for r in verdict.rows] == [20, 3]
    assert any("less than one who ignores the defence" in note for note in verdict.notes)
    equal = judge(row(3, simulated_client="naive", ssim=0.4), row(3, ssim=0.2))
    assert equal.best.attacker == "adaptive"


def test_handed_over_randomness_is_an_upper_bound_only() -> None:
    told = row(32, grants=["targets: the true labels", "send.noise.w: its true value"], attack="wiig")
    verdict = judge(told, row(1), row(0, attack="dlg"))
    assert verdict.best.recovered == 1
    assert verdict.level == "leaks"
    assert [r.attack for r in verdict.rows] == ["ig", "dlg", "wiig"]
    assert [r.attack for r in verdict.judged] == ["ig", "dlg"]
    assert verdict.union is not None
    assert verdict.union.recovered == 1
    assert any("(wiig) recovers 32 of 32" in note for note in verdict.notes if note.startswith("Upper bound"))
    alone = judge(told)
    assert alone.sentence.startswith("An attacker who knows the client's secrets recovers 32 of 32")
    assert any("upper bound" in note for note in alone.notes)
    assert alone.level == "not tested"
    assert alone.warning


def test_true_statistics_are_an_upper_bound_without_a_defence_too() -> None:
    told = row(
        32, defence="none", simulated_client="naive", grants=["statistics.bn.mean: its true value"], attack="gi-strong"
    )
    plain = row(5, defence="none", simulated_client="naive", grants=["targets: the true labels"], attack="gi")
    (verdict,) = verdicts([told, plain])
    assert verdict.undefended
    assert verdict.best is plain
    assert "Without a defence, an attacker recovers 5 of 32" in verdict.sentence
    (alone,) = verdicts([told])
    assert alone.sentence.startswith("Without a defence, an attacker who knows the client's secrets recovers 32")
    doubted = row(0, attack="dlg", grants=[])
    (defended,) = [v for v in verdicts([told, plain, doubted]) if not v.undefended]
    assert "it recovers only 5 of 32 images without any defence" in defended.doubts


def test_the_verdict_is_the_worst_case_of_all_who_were_told_no_secrets() -> None:
    strong = {"defence": "cvb", "simulated_client": "naive"}
    rows = [row(2, defence="cvb"), row(9, **strong, attack="pig"), row(4, **strong), BARE]
    (verdict,) = [v for v in verdicts(rows) if not v.undefended]
    assert verdict.best.attack == "pig"
    assert verdict.sentence.startswith("An attacker who knows this defence's architecture recovers 9 of 32")
    assert verdict.warning == ""
    (unknown,) = [v for v in verdicts(rows[1:]) if not v.undefended]
    assert unknown.warning == "No attacker who knows all of this defence was run: add --attack adaptive."


def test_a_healthy_naive_attacker_does_not_vouch_for_a_broken_one_who_knows() -> None:
    broken = row(0, health=HEALTHY | {"diverged": 1.0})
    naive = row(1, simulated_client="naive", attack="dlg", expected=TENTH, identified=False)
    verdict = judge(broken, naive)
    assert (verdict.best.attack, verdict.doubts) == ("dlg", ())
    assert verdict.level == "inconclusive"
    assert verdict.reasons == (
        "No adaptive attack shows that it would find a leak (ig: suspect, 100% of its runs diverged).",
    )
    assert judge(broken, naive, row(0, attack="cdia")).level == "not broken"


@pytest.mark.parametrize("how", ["sample", "neutral", "optimise", "infer"])
@pytest.mark.parametrize("defence", ["dropout(0.5)", "prune(0.9) + precode", "Dropout(0.5)", 'dropout(where="a+b")'])
def test_drawing_the_masks_afresh_is_not_knowing_them(defence: str, how: str) -> None:
    searched = how in ("optimise", "infer")
    attacked = row(0, defence=defence, knowledge={"targets": "known", "model.*": how})
    (verdict,) = [v for v in verdicts([attacked, BARE]) if not v.undefended]
    assert verdict.level == ("not broken" if searched else "not tested")
    assert any("instead of searching" in note for note in verdict.notes) is not searched
    plain = row(0, defence="prune(0.9)", knowledge={"model.*": how})
    assert [v.level for v in verdicts([plain, BARE]) if not v.undefended] == ["not broken"]


def test_seeds_are_never_pooled() -> None:
    verdict = judge(row(1), row(5, seed=1), row(2, seed=2))
    assert "recovers 5 of 32 images on the worst of 3 seeds" in verdict.sentence
    assert [(seed, r.recovered) for seed, r in verdict.seeds] == [(0, 1), (1, 5), (2, 2)]
    assert any("1 of 32 (seed 0), 5 of 32 (seed 1) and 2 of 32 (seed 2)" in note for note in verdict.notes)
    assert verdict.best.bounds == wilson(5, 32)


def test_the_union_counts_target_clients_of_the_quoted_seed_once() -> None:
    verdict = judge(row(0, which={0, 1}), row(0, which={1, 5}, attack="dlg"), row(0, which={9}, seed=1))
    assert verdict.union is not None
    assert (verdict.union.recovered, verdict.union.images, verdict.union.attackers) == (3, 32, 2)
    assert (verdict.union.low, verdict.union.high) == wilson(3, 32)
    assert judge(row(3)).union is None


TENTH = {"recovered": 0.1, "identified": 0.05, "identifiable": 0.02}
ALIKE = {"recovered": 0.8, "identified": 0.1, "identifiable": 0.1}
"""What a guess is expected to reach where images of a class are so alike that their mean passes for most of them."""


@pytest.mark.parametrize(
    ("attacked", "level"),
    [
        ({"won": 16}, "broken"),
        ({"won": 15}, "leaks"),
        ({"won": 0}, "not broken"),
        ({"won": 4, "expected": TENTH, "identified": False}, "not broken"),
        ({"won": 4, "expected": TENTH, "identified": True}, "leaks"),
        ({"won": 0, "expected": TENTH, "identified": True}, "leaks"),
        ({"won": 10, "expected": TENTH, "identified": False}, "leaks"),
        ({"won": 28, "expected": ALIKE, "identified": False}, "not broken"),
        ({"won": 31, "expected": ALIKE, "identified": False}, "broken"),
        ({"won": 20, "expected": ALIKE, "identified": True}, "broken"),
        ({"won": 20, "expected": ALIKE | {"identified": 1.0}, "identified": True}, "not broken"),
        ({"won": 0, "simulated_client": "naive"}, "not tested"),
        ({"won": 0, "health": HEALTHY | {"objective": 0.95}}, "inconclusive"),
        ({"won": 0, "health": HEALTHY | {"diverged": 0.5}}, "inconclusive"),
        ({"won": 0, "of": 7}, "inconclusive"),
        ({"won": 0, "of": 8}, "not broken"),
        ({"won": 20, "health": HEALTHY | {"objective": 0.95}}, "broken"),
    ],
)
def test_levels(attacked: dict[str, Any], level: str) -> None:
    assert judge(row(**attacked)).level == level


@pytest.mark.parametrize(("won", "noted"), [(3, True), (4, False)])
def test_what_guessing_reaches_stands_next_to_a_rate_no_higher(won: int, noted: bool) -> None:
    verdict = judge(row(won, expected=TENTH))
    assert any("expected to recover 3.2" in note for note in verdict.notes) is noted


def test_an_attacker_who_guesses_more_hides_none_who_shows_something() -> None:
    shown = row(19, expected=ALIKE)
    guessed = row(28, expected=ALIKE, identified=False, attack="learned")
    for rows in ([guessed, shown], [guessed, shown, row(0, defence="none", seed=1)]):
        verdict = judge(*rows)
        assert (verdict.level, verdict.best.recovered) == ("broken", 19)


def test_several_attackers_are_tested_together() -> None:
    alone = row(8, expected=TENTH, identified=False)
    assert judge(alone).level == "leaks"
    guessing = [row(3, expected=TENTH, identified=False, attack=f"dlg-{place}", number=place) for place in range(1, 5)]
    together = judge(alone, *guessing)
    assert together.level == "not broken"
    assert [test.p for test in together.tests if test.observed == 8] == [judge(alone).tests[0].p]


def test_the_interval_of_the_strongest_of_several_attackers_is_no_narrower_than_its_own() -> None:
    rows = [row(0, which=set(range(place, 10 + place)), attack=f"dlg-{place}") for place in range(4)]
    low, high = judge(*rows).interval
    assert low <= wilson(10, 32)[0]
    assert high >= wilson(10, 32)[1]


def test_the_view_that_a_client_trained_on_counts_and_is_named() -> None:
    plain = row(0)
    changed = {"success_transformed": 1, "identified_transformed": True}
    unlikely = {"expected_transformed": {"recovered": 0.1, "public": 200, "identified": 0.1, "gallery": 10}}
    records = [r | {"per_image": [r["per_image"][0] | changed | unlikely]} for r in plain.trial.records]
    trained = judge(Row(0, Trial(plain.trial.info, records)))
    assert trained.level == "broken"
    assert "ig: 32 of 32 images recovered as trained on; guessing" in " ".join(trained.reasons)
    assert (trained.recovered, trained.identifiable) == (0, 0)
    hidden = [r | {"per_image": [r["per_image"][0] | {"success_transformed": 0}]} for r in records]
    singled = judge(Row(0, Trial(plain.trial.info, hidden)))
    assert singled.level == "leaks"
    assert {test.criterion for test in singled.tests if test.leaks} == {"identified as trained on"}


def test_tests_are_of_attackers_without_secrets_only() -> None:
    told = row(32, grants=["send.noise.w: its true value"], attack="wiig")
    assert judge(told).tests == ()
    assert {test.attack for test in judge(told, row(0)).tests} == {"ig"}
    assert len(judge(row(0), row(0, attack="dlg")).tests) == 4


@pytest.mark.parametrize(("health", "level"), [({}, "inconclusive"), ({"objective_truth": 0.01}, "not broken")])
def test_an_undefended_client_is_not_broken_only_where_other_images_fit_as_well(
    health: dict[str, float], level: str
) -> None:
    (verdict,) = verdicts([row(0, defence="none", simulated_client="naive", health=HEALTHY | health)])
    assert (verdict.undefended, verdict.level) == (True, level)
    assert ("undefended client shows" in verdict.reasons[0]) is (level == "inconclusive")


def test_trials_of_an_earlier_version_are_tested_against_their_recorded_guesses() -> None:
    guessed = {"class_mean": {"asr": 0.7, "identified": 0.05}, "wrong_target_client": {"asr": 0.0}}
    (verdict,) = verdicts([row(24, defence="none", expected={}, controls=guessed, identified=False)])
    assert [(test.criterion, round(test.expected, 3)) for test in verdict.tests] == [
        ("recovered", 22.4),
        ("identified", 1.6),
    ]
    assert verdict.level == "inconclusive"
    assert verdict.baseline == pytest.approx(0.05)


def test_risk_is_over_the_larger_of_baseline_and_mismatch_control() -> None:
    wrong = CONTROLS | {"wrong_target_client": {"asr": 0.5, "identifiable": 0.3}}
    assert judge(row(20, expected=TENTH)).risk == risk(20, 32, 0.02)
    assert judge(row(20, expected=TENTH, controls=wrong)).risk == risk(20, 32, 0.3)


def test_the_interval_of_the_best_of_many_attackers_covers_luck() -> None:
    """Five attackers of the same rate: the best of them is above it, and its own interval too often as well."""
    rng, missed = np.random.default_rng(0), np.zeros(2)
    for _ in range(80):
        hits = rng.random((5, 32)) < 0.1
        rows = [row(0, which=set(one.nonzero()[0].tolist()), attack=f"a{i}", number=i) for i, one in enumerate(hits)]
        best = max(rows, key=lambda each: each.identifiable)
        missed += wilson(best.identifiable, 32)[0] > 0.1, interval_of(best, rows)[0] > 0.1
    assert missed[0] > 8
    assert missed[1] <= 6


def test_an_attack_that_fails_without_a_defence_proves_nothing() -> None:
    poor = row(3, defence="none", simulated_client="naive")
    (verdict,) = [v for v in verdicts([row(0), poor]) if v.best.defence == "dgp"]
    assert verdict.level == "inconclusive"
    assert "it recovers only 3 of 32 images without any defence" in verdict.doubts
    (alone,) = verdicts([row(0)])
    assert "nothing shows that the attack works" in alone.doubts[0]


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ([15], "the other 15 rounds were not used: --attack 'portfolio' or averaging"),
        (None, "nothing says which of the 16 rounds it used, so it shows nothing of all of them: if it uses all, give"),
        (range(16), ""),
    ],
)
def test_an_attack_on_one_of_many_rounds_vouches_for_none_of_the_others(used: Any, reason: str) -> None:
    watched = {"round": 15, "rounds_used": None if used is None else list(used)}
    control = row(32, defence="none", simulated_client="naive", number=90, **watched)
    trial = row(0, health=HEALTHY | {"objective_truth": 0.01}, attack="cdia", **watched)
    verdict = next(each for each in verdicts([trial, control]) if not each.undefended)
    assert verdict.health.state == "ambiguous"
    assert verdict.level == ("inconclusive" if reason else "not broken")
    assert reason in " ".join(verdict.reasons)


def test_no_defence_is_known_however_it_was_written() -> None:
    (first, *_) = verdicts([row(0), row(32, defence="None", simulated_client="full")])
    assert first.undefended
    assert complaints(row(0), [row(32, defence=" none ", simulated_client="naive")]) == []


def test_settings_are_judged_apart() -> None:
    found = verdicts([BARE, row(0), row(32, model="resnet"), row(1, batch=4)])
    assert len(found) == 4
    assert len({v.setting for v in found}) == 3


def test_a_batch_counts_images_not_target_clients() -> None:
    trial = row(0, of=1).trial
    images = [{"ssim": s, "success": int(s > 0.5), "identified": None, "matched": 0} for s in (0.9, 0.8, 0.1)]
    batch = Row(0, Trial(trial.info | {"batch": 3}, [trial.records[0] | {"per_image": images}]))
    assert (batch.recovered, batch.images, batch.asr) == (2, 3, 2 / 3)
    assert "2 of 3 images" in verdicts([batch])[0].sentence


SEARCHED = {"targets": "known", "model.*": "optimise"}


def told_price(*rows: Row) -> str:
    """What is said of a defended client's price."""
    return next(verdict.price.detail() for verdict in verdicts(rows) if not verdict.undefended)


def test_the_price_of_a_changed_model_is_held_against_the_undefended_client() -> None:
    changed = row(0, defence="precode", knowledge=SEARCHED, bytes_sent=150.0, bytes_dense=150.0, distance=0.25)
    bare = row(32, defence="none", simulated_client="naive", bytes_sent=100.0)
    noise = "update moved by 0.25, by the noise in the changed model"
    assert told_price(changed, bare) == f"150% of the 100 B without a defence · {noise}"
    other_seed = row(32, defence="none", simulated_client="naive", bytes_sent=120.0, seed=1)
    assert told_price(changed, other_seed, bare).startswith("150% of the 100 B")
    alone = told_price(changed)
    assert alone == f"this run has no client without a defence to compare with · {noise}"
    pruned = row(0, defence="prune(0.5)", bytes_sent=15.0, bytes_dense=20.0, distance=0.5)
    assert told_price(pruned) == "75% of the 20 B without a defence · update moved by 0.5"


def test_the_price_of_a_defence_is_that_of_the_honest_model() -> None:
    def planted(won: int, attack: str, sent: float, **more: Any) -> Row:
        return row(
            won, attack=attack, simulated_client="naive", planted="a block", bytes_sent=sent, bytes_dense=900.0, **more
        )

    honest = [row(0, bytes_sent=10.0), row(32, defence="none", simulated_client="naive", bytes_sent=20.0)]
    bare = [planted(32, "rob", 900.0, defence="none"), planted(32, "rob(sparse=true)", 300.0, defence="none")]
    sparse = planted(32, "rob(sparse=true)", 150.0)
    (verdict,) = [v for v in verdicts([*bare, *honest, sparse]) if not v.undefended]
    assert verdict.best is sparse
    assert (verdict.price.sent, verdict.price.plain) == (10.0, 20.0)
    assert price(sparse, [*bare, *honest, sparse]).share == 0.5
    (alone,) = [v for v in verdicts([*bare, sparse]) if not v.undefended]
    assert (alone.price.sent, alone.price.plain) == (150.0, 300.0)


def test_images_of_a_class_without_public_images_are_no_leak_by_recovery() -> None:
    """A guess at a class that nobody knows may pass for all of it; who singles images out leaks all the same."""
    rare = {"recovered": 1.0, "public": 0, "identified": 0.05, "gallery": 20, "identifiable": 0.05}
    guessed = row(20, 20, identified=False, expected=rare)
    (verdict,) = [each for each in verdicts([guessed, BARE]) if not each.undefended]
    assert verdict.level == "not broken"
    assert (
        "20 of 20 images cannot be tested for recovery: there are fewer than two public images" in verdict.reasons[-1]
    )
    (named,) = [each for each in verdicts([row(20, 20, expected=rare), BARE]) if not each.undefended]
    assert "20 of 20 images identified" in named.reasons[0]
    assert named.level == "broken"


def test_half_recovered_by_guessing_alone_is_not_broken_where_a_few_are_identified() -> None:
    """20 of 36 recovered is what guessing reaches; 6 of 36 identified is the leak, and 3 are both."""
    half = {"recovered": 0.55, "public": 200, "identified": 0.01, "gallery": 100, "identifiable": 0.01}
    trial = row(20, 36, expected=half)
    for place, record in enumerate(trial.trial.records):
        record["per_image"][0]["identified"] = 17 <= place < 23
    verdict = judge(trial)
    assert (verdict.recovered, verdict.identified, verdict.identifiable) == (20, 6, 3)
    assert verdict.level == "leaks"
    assert "6 of 36 images identified" in verdict.reasons[0]
    assert judge(row(20, 36, expected=half)).level == "broken", "20 of 36 are identifiable"


def test_an_attack_that_identifies_is_effective_whatever_else_fits_the_update() -> None:
    health = HEALTHY | {"objective_truth": 0.01}
    verdict = judge(row(0, health=health, identified=True))
    assert (verdict.level, verdict.health.state, verdict.health.reasons) == ("leaks", "effective", ())
    assert judge(row(0, health=health)).health.state == "ambiguous"
    short = judge(row(0, health=HEALTHY | {"objective": 0.5, "objective_truth": 0.1}, identified=True))
    assert short.health.state == "under-optimised"


def test_an_attack_that_passes_on_one_seed_shows_nothing_of_another() -> None:
    ambiguous = HEALTHY | {"objective_truth": 0.01}
    short = HEALTHY | {"objective": 0.9, "objective_truth": 0.1}
    bare = row(32, defence="none", simulated_client="naive", seed=1)
    passed = row(0, health=ambiguous)
    assert judge(passed, row(0, health=ambiguous, seed=1), bare).level == "not broken"
    found = judge(passed, row(0, health=short, seed=1), bare)
    assert found.level == "inconclusive"
    assert "on seed 1 (ig: under-optimised, it did not reach the objective" in found.reasons[0]
    assert judge(passed, row(0, health=ambiguous, seed=1)).level == "inconclusive"  # no control on that seed
    assert judge(passed, row(0, health=ambiguous, seed=1, simulated_client="naive"), bare).level == "inconclusive"


def test_an_attack_that_a_budget_stopped_is_marked() -> None:
    fits_as_well = HEALTHY | {"objective_truth": 0.01}
    stopped = judge(row(0, health=fits_as_well, budget_share=0.4), BARE)
    assert (stopped.level, stopped.limited) == ("not broken", True)
    assert "The budget stopped ig at 40%." in stopped.reasons
    assert not judge(row(0, health=fits_as_well), BARE).limited
    unknown = judge(row(0, budget_share=0.4), BARE)
    assert unknown.level == "inconclusive"
    assert "ig: under-optimised, the budget stopped it at 40% of its iterations" in unknown.reasons[0]


def test_exact_copies_among_the_targets_are_hit_by_one_guess() -> None:
    chances = {"recovered": 0.2, "public": 400, "identified": 0.01}
    found = row(8, 8, identified=False, expected=chances)
    assert judge(found).level == "broken"
    for record in found.trial.records:
        record["per_image"][0]["copy_of"] = 0
    verdict = judge(found)
    assert (verdict.level, verdict.reasons[0][:34]) == ("inconclusive", "Only 1 different image attacked: a")
    assert verdict.tests[0].p == pytest.approx(0.2, abs=0.01)
    one = row(1, 8, identified=False, expected=chances | {"recovered": 0.02})
    apart = judge(one).tests[0].p
    for record in one.trial.records:
        record["per_image"][0]["copy_of"] = 0
    assert judge(one).tests[0].p == apart  # a guess of its own for each copy hits one of them more often
