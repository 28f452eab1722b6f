"""The attack check separates broken attacks, attacks that stopped early and ambiguous ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from gradveil.audit.attack_check import STATES, coincidence, complaints, descent, examine
from gradveil.audit.attack_selection import trials
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import load_run
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import recover
from gradveil.audit.verdict import verdicts
from gradveil.core.types import Stage, Transform
from gradveil.defences import Defence, chain
from gradveil.report import audit_page
from tests.audit.runs import config
from tests.report.runs import CASES, played, write_run
from tests.report.trials import BARE, CONTROLS, HEALTHY, row


def ended(reached: float | None, truth: float | None, won: int = 0, **change: Any) -> Row:
    """A trial whose attack reached an objective, where the true images have another."""
    return row(won, health=HEALTHY | {"objective": reached, "objective_truth": truth}, **change)


@pytest.mark.parametrize(
    ("reached", "truth", "state"),
    [
        (0.1, 0.1, "ambiguous"),
        (0.01, 0.2, "ambiguous"),
        (0.105, 0.1, "ambiguous"),
        (1e-6, 0.0, "ambiguous"),
        (0.106, 0.1, "converged"),
        (0.149, 0.1, "converged"),
        (0.151, 0.1, "under-optimised"),
        (0.00009, 0.0, "converged"),
        (0.00011, 0.0, "under-optimised"),
        (0.5, 0.1, "under-optimised"),
        (-0.2, -0.1, "ambiguous"),
        (0.1, None, "converged"),
        (None, 0.1, "suspect"),
        (0.95, None, "suspect"),
        (0.95, 0.95, "ambiguous"),
        (0.95, 0.8, "suspect"),
    ],
)
def test_the_objective_of_the_true_images_decides(reached: float | None, truth: float | None, state: str) -> None:
    assert examine(ended(reached, truth), [BARE]).state == state


@pytest.mark.parametrize(("reached", "state"), [(5e-7, "under-optimised"), (9e-11, "converged"), (1e-12, "ambiguous")])
def test_small_objectives_are_judged_by_where_they_started(reached: float, state: str) -> None:
    health = HEALTHY | {"objective_initial": 1e-6, "objective": reached, "objective_truth": 0.0}
    assert examine(row(0, health=health), [BARE]).state == state


def test_a_search_and_a_changed_model_do_not_vouch_for_each_other() -> None:
    planted = {"attack": "rob", "simulated_client": "naive", "planted": "an imprint block"}
    robbed, searched = row(32, defence="none", **planted), row(0, defence="none", simulated_client="naive")
    cdia, sparse = row(0, attack="cdia"), row(0, **{**planted, "attack": "curious"})
    assert "only 0 of 32" in complaints(cdia, [robbed, searched])[0]
    assert "was not attacked by such an attacker in this run" in complaints(cdia, [robbed])[0]
    assert "was not attacked by such an attacker in this run" in complaints(sparse, [BARE])[0]
    assert complaints(sparse, [robbed, searched]) == []
    assert "update was not attacked in this run" in complaints(cdia, [])[0]


def test_a_high_rate_is_never_in_doubt() -> None:
    assert examine(ended(0.95, 0.1, won=16), [BARE]).state == "effective"
    assert examine(ended(0.5, 0.1, won=15), [BARE]).state == "under-optimised"


def test_what_is_said_of_each() -> None:
    (short,) = examine(ended(0.5, 0.1), [BARE]).reasons
    assert short.startswith("it did not reach the objective that the true images have (0.5 reached, 0.1 at the true")
    assert short.endswith("more iterations or restarts may do better, so do not read this as protection")
    learner = {"targets": "known", "public": "known"}
    for attack, more in (
        ("learned", "epochs or public images"),
        ("mine", "epochs"),
        ("gias", "iterations or restarts"),
    ):
        short = examine(ended(0.5, 0.1, knowledge=learner, attack=attack), [BARE]).reasons[0]
        assert f"more {more}" in short
    (short, *_) = examine(ended(0.5, 0.1, attack="r-gap"), [BARE]).reasons
    assert "leave too much open: a search may do better" in short
    (misled,) = examine(ended(0.1, 0.1), [BARE]).reasons
    assert "objective is satisfied by other images (0.1 reached, 0.1 at the true images)" in misled
    assert "the update does not say enough" in misled
    (unordered,) = examine(ended(0.1, 0.1, in_parts=True), [BARE]).reasons
    assert "which examples the client took in which local step" in unordered
    assert "the update does not say enough" not in unordered
    grants = ["targets: the true labels", "round0.schedule: its true value"]
    (ordered,) = examine(ended(0.1, 0.1, in_parts=True, grants=grants), [BARE]).reasons
    assert "the update does not say enough" in ordered
    (naive,) = examine(ended(0.1, 0.1, simulated_client="naive"), [BARE]).reasons
    assert "an attacker who knows the defence may do better" in naive
    (solved,) = examine(
        ended(
            0.1,
            0.1,
            attack="analytic(labels=idlg)",
            defence="none",
            simulated_client="naive",
            client="local T=4 sgd lr=0.1",
        ),
        [],
    ).reasons
    assert "a search that simulates them may do better" in solved
    assert descent(ended(0.5, 0.1)) == "objective 1 → 0.5, true images 0.1"


def test_an_attack_that_fell_short_proves_nothing() -> None:
    (verdict,) = [v for v in verdicts([ended(0.5, 0.1), BARE]) if not v.undefended]
    assert verdict.level == "inconclusive"
    assert verdict.doubts == examine(ended(0.5, 0.1), [BARE]).reasons
    (held,) = [v for v in verdicts([ended(0.1, 0.1), BARE]) if not v.undefended]
    assert (held.level, held.doubts) == ("not broken", ())


def test_falling_short_comes_with_the_other_complaints() -> None:
    poor = row(3, defence="none", simulated_client="naive")
    assert len(examine(ended(0.95, 0.1), [poor]).reasons) == 3
    assert examine(ended(0.1, 0.1), [poor]).state == "suspect"


def test_the_page_tells_them_apart(tmp_path: Path) -> None:
    trials = played(target_clients=4, cases=(CASES[0], CASES[6], CASES[5]))
    for trial in trials:
        objective = trial["info"]["health"]["objective"]
        strong = "dp(" in trial["info"]["defence"]
        trial["info"]["health"]["objective_truth"] = objective * (1.0 if strong else 0.25)
    html = audit_page(load_run(write_run(tmp_path / "run", trials)))
    text = " ".join(html.split())
    assert "<strong>Attack ambiguous.</strong> The attacker&#39;s objective is satisfied by other images" in text
    assert "<strong>Attack under-optimised.</strong> The low rate here may not be due to the defence: it" in text
    assert 'data-key="attack_check"' in html
    assert all(f'data-sort="{STATES[state][0]}"' in html for state in ("effective", "under-optimised", "ambiguous"))
    assert 'data-key="objective_truth"' in html


def test_reconstructions_that_fit_other_target_clients_as_well_are_no_recovery() -> None:
    wrong = {**CONTROLS, "wrong_target_client": CONTROLS["wrong_target_client"] | {"asr": 0.5}}
    assert "other target clients, the same reconstructions pass as often (50%)" in coincidence(row(16, controls=wrong))
    assert coincidence(row(17, controls=wrong)) == ""
    assert coincidence(row(0)) == coincidence(row(16, controls={})) == ""
    (verdict,) = [v for v in verdicts([row(16, controls=wrong), BARE]) if not v.undefended]
    assert "Scored against other target clients, the same reconstructions pass as often (50%)" in " ".join(
        verdict.notes
    )


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (HEALTHY | {"objective": 0.91}, "did not fall (1 at the start, 0.91 at the end)"),
        (HEALTHY | {"diverged": 0.75}, "75% of its runs diverged"),
        (HEALTHY | {"objective": None}, "no restart ended with a finite objective"),
    ],
)
def test_a_broken_attack_is_complained_about(health: dict[str, Any], said: str) -> None:
    assert said in "; ".join(complaints(row(0, health=health), [BARE]))
    assert complaints(row(0), [BARE]) == []


def test_an_attack_that_only_guesses_without_a_defence_is_no_measure_of_one() -> None:
    easy = {"recovered": 0.7, "identified": 0.1, "identifiable": 0.1}
    bare = [
        row(won, defence="none", simulated_client="naive", number=90, expected=easy, identified=False)
        for won in (24, 30)
    ]
    assert (
        "no more than guessing explains (the best guess is expected to recover 70%)" in complaints(row(0), bare[:1])[0]
    )
    assert complaints(row(0), bare) == []
    known = row(20, defence="none", simulated_client="naive", number=90, expected=easy)
    assert complaints(row(0), [known]) == []
    assert [examine(each, bare).label for each in bare] == ["suspect", "effective"]
    assert "no more than guessing explains" in examine(bare[0], bare).doubts[0]
    # Against a defence that is no fault of the attack, but nor does it work there.
    defended = [row(won, expected=easy, identified=False) for won in (24, 30)]
    assert [examine(each, [BARE]).label for each in defended] == ["converged", "effective"]


def test_the_control_is_the_same_attack_with_any_simulated_client() -> None:
    bare = [row(2, defence="none", simulated_client="naive", attack="dlg"), BARE]
    assert complaints(row(0, attack="ig(simulated_client=full)"), bare) == []
    assert "only 2 of 32" in complaints(row(0, attack="dlg(simulated_client=full)"), bare)[0]


def matched(match: float, layers: float, truth: float = 0.0, **change: Any) -> Row:
    """A trial whose objective reached that of the truth, with so much left of it where priors do not count."""
    reached = {"objective": 0.01, "objective_truth": 0.01}
    without = {"match": match, "match_truth": truth, "layers": layers, "layers_truth": truth}
    return row(0, health=HEALTHY | reached | without, **change)


@pytest.mark.parametrize(("others", "state"), [(None, "ambiguous"), (1.0, "ambiguous"), (1e-8, "suspect")])
def test_distances_that_are_tiny_for_all_images_are_compared_in_their_own_unit(
    others: float | None, state: str
) -> None:
    trial = matched(1e-9, 0.0)
    health = trial.info["health"] | ({} if others is None else {"match_others": others})
    assert examine(row(0, health=health), [BARE]).state == state


@pytest.mark.parametrize(
    ("match", "layers", "truth", "state"),
    [
        (0.0, 0.0, 0.0, "ambiguous"),
        (0.00009, 0.0, 0.0, "ambiguous"),
        (0.00011, 0.0, 0.0, "suspect"),
        (0.0, 0.0009, 0.0, "ambiguous"),
        (0.0, 0.0011, 0.0, "suspect"),
        (0.6, 0.85, 0.6, "ambiguous"),
        (0.91, 0.6, 0.6, "suspect"),
        (0.6, 0.91, 0.6, "suspect"),
        (0.1, 0.1, 0.6, "ambiguous"),
    ],
)
def test_images_that_priors_alone_prefer_show_nothing_of_the_update(
    match: float, layers: float, truth: float, state: str
) -> None:
    trial = matched(match, layers, truth)
    assert examine(trial, [BARE]).state == state
    trial.info["health"]["objective"] = 0.012  # neither as low as that of the truth, nor far above it
    assert examine(trial, [BARE]).state == ("converged" if state == "ambiguous" else state)


def test_a_prior_that_decides_leaves_the_verdict_open() -> None:
    (prior,) = examine(matched(0.2, 0.0), [BARE]).doubts
    assert "its prior decides" in prior
    assert "0.2 at the answer and 0 at the true images" in prior
    (layers,) = examine(matched(0.0, 0.3), [BARE]).doubts
    assert "in the median layer the distance from the update is 0.3 at the answer" in layers
    levels = [
        next(v for v in verdicts([trial, BARE]) if not v.undefended).level
        for trial in (matched(0.2, 0.0), matched(0.0, 0.3), matched(0.0, 0.0))
    ]
    assert levels == ["inconclusive", "inconclusive", "not broken"]


def test_an_attacker_who_ignores_the_defence_is_not_held_to_the_fit_of_the_true_images() -> None:
    assert examine(matched(0.2, 0.3, simulated_client="naive"), [BARE]).state == "ambiguous"
    assert examine(matched(0.2, 0.3, simulated_client="naive", defence="none"), [BARE]).state == "suspect"


@dataclass(frozen=True)
class Louder(Transform):
    """Multiply the last parameter's entries by a public number."""

    stage: ClassVar[Stage] = Stage.QUANTISE
    factor: float = 1e6

    def apply(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Mapping[str, Tensor], context: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        last = list(update)[-1]
        return {n: value * self.factor if n == last else value for n, value in update.items()}, dict(state)


louder = Defence("louder", send=chain(louder=Louder()))


@pytest.mark.parametrize(
    ("defence", "said"),
    [("none", "its prior decides"), ("tests.audit.test_attack_check:louder", "few layers decide its objective")],
)
def test_where_a_strong_prior_ends_below_the_truth_the_update_is_not_to_blame(defence: str, said: str) -> None:
    attack = "ig(iterations=40, tv=1, simulated_client=full)"
    experiment = open_experiment(config(defences=[defence], data={"name": "digits", "size": 16}, attacks=[attack]))
    address = trials(experiment.config)[0]
    found = score(
        experiment, address, recover(experiment, address, range(2), lambda step: None), TrialNames("", "", ())
    )
    health = found.info["health"]
    assert health["objective"] < health["objective_truth"]
    assert max(health["match_truth"], health["layers_truth"]) < 1e-6
    assert [said in each for each in complaints(Row(0, found), [BARE])].count(True) == 1
    assert (health["match"] > 1e-3) is (defence == "none")


def test_a_custom_attack_without_an_objective_at_the_truth_vouches_for_no_defence() -> None:
    """A closed form that ignores what it believes recovers the undefended images, and nothing behind an offset."""
    assert examine(ended(0.0, None), [BARE]).state == "converged"
    found = examine(ended(0.0, None, custom=True), [BARE])
    assert found.state == "suspect"
    assert "no objective that can be computed at the true images" in found.doubts[0]
    assert examine(ended(0.1, 0.1, custom=True), [BARE]).state == "ambiguous"


def test_an_attack_that_cannot_tell_passes_only_where_no_other_shows_that_the_truth_explains_more() -> None:
    told, short = ended(0.0, None), ended(1.0, 0.1)
    assert examine(told, [BARE, told, ended(0.1, 0.1)]).state == "converged"
    found = examine(told, [BARE, told, short])
    assert found.state == "under-optimised"
    assert "explain the update better than what" in found.doubts[0]
    assert next(v for v in verdicts([told, short, BARE]) if not v.undefended).level == "inconclusive"
    # One who ignores the defence says nothing of a client that has it.
    naive = matched(0.2, 0.3, simulated_client="naive")
    assert examine(told, [BARE, told, naive]).state == "converged"


@pytest.mark.parametrize("attack", ["analytic", "r-gap", "learned(epochs=1, width=8)"])
def test_attacks_without_a_search_compute_how_well_their_answer_explains_the_whole_update(attack: str) -> None:
    model = {"name": "vit" if attack == "analytic" else "lenet-zhu"}
    experiment = open_experiment(config(defences=["none"], model=model, attacks=[attack]))
    address = trials(experiment.config)[0]
    found = score(
        experiment, address, recover(experiment, address, range(2), lambda step: None), TrialNames("", "", ())
    )
    health = found.info["health"]
    assert max(health["match_truth"], health["layers_truth"]) < 1e-6
    assert (max(health["match"], health["layers"]) < 1e-3) is (attack != "learned(epochs=1, width=8)")


@pytest.mark.parametrize(
    ("knowledge", "drawn", "level"),
    [
        ({"model.*": "sample"}, {"model.2.mask": "sample"}, "not tested"),
        ({"model.*": "optimise"}, {"model.2.mask": "optimise"}, "not broken"),
        ({"model.*.mask": "optimise", "model.*": "sample"}, {"model.vb.eps": "sample"}, "not tested"),
        ({"model.*.mask": "optimise"}, {"model.2.mask": "optimise", "model.vb.eps": ""}, "not tested"),
        ({"send.*": "sample"}, {}, "not broken"),
    ],
)
@pytest.mark.parametrize("defence", ["an object's name", "gaussian(0.1)"])
def test_who_draws_what_the_defence_draws_in_the_model_does_not_adapt(
    defence: str, knowledge: dict[str, str], drawn: dict[str, str], level: str
) -> None:
    health = HEALTHY | {"objective_truth": 0.01}
    trial = row(0, health=health, defence=defence, knowledge=knowledge, drawn=drawn)
    (verdict,) = [each for each in verdicts([trial, BARE]) if not each.undefended]
    known = defence == "gaussian(0.1)" or level == "not tested"
    assert verdict.level == (level if known else "inconclusive")


def test_no_other_attack_vouches_for_a_custom_one() -> None:
    health = HEALTHY | {"objective_truth": 0.01}
    found = examine(row(0, health=health, attack="mine", custom=True), [BARE])
    assert (found.state, "by such an attacker" in found.reasons[0]) == ("suspect", True)
    own = row(32, defence="none", simulated_client="naive", attack="mine", custom=True)
    assert examine(row(0, health=health, attack="mine", custom=True), [BARE, own]).state == "ambiguous"
