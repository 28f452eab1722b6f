"""A defence that nobody knows is not broken only if all general attacks failed, and one that is shown to undo it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks.protocol import Reconstruction
from gradveil.audit.attack_selection import aimed_at, is_same_attack, make_name, trials
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recommendation import recommend
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.audit.trial import recover
from gradveil.audit.verdict import Verdict, verdicts
from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.tree import Tensors
from gradveil.core.types import Stage, Transform
from gradveil.data import load
from gradveil.defences import Defence, chain
from tests.audit.runs import config
from tests.report.trials import BARE, HEALTHY, row

LATTICE, WEAKER = "mine:Lattice(step=1)", "mine:Lattice(step=0.1)"
OWN: dict[str, Any] = {"attack": "mine:undo", "custom": True}


def judge(*rows: Row) -> Verdict:
    """The verdict on the stronger setting."""
    return next(each for each in verdicts([*rows, BARE]) if each.defence == LATTICE)


def attacked(recovered: int, defence: str, **change: Any) -> Row:
    return row(recovered, health=HEALTHY | {"objective_truth": 0.01}, defence=defence, **change)


def general(recovered: int, defence: str, but: str = "", **change: Any) -> tuple[Row, ...]:
    """All general attacks on a defence, but one."""
    texts = (text for text in aimed_at(defence) if text != but)
    return tuple(attacked(recovered, defence, attack=text, **change) for text in texts)


OWN_ROWS = (attacked(0, LATTICE, **OWN), row(32, defence="none", simulated_client="naive", **OWN))
UNDONE = (*general(0, LATTICE), *OWN_ROWS)
SHOWN = (attacked(32, WEAKER, **OWN), *general(0, WEAKER))


def test_it_holds_only_against_an_attack_that_alone_undoes_a_weaker_setting() -> None:
    assert judge(*general(0, LATTICE)).level == "inconclusive"
    assert judge(*UNDONE).level == "inconclusive"
    assert judge(*UNDONE, *SHOWN).level == "not broken"
    told = recommend(verdicts([*general(0, LATTICE), BARE]), [])
    assert told is not None
    assert (told.defence, "a weaker setting that only this code undoes" in told.text) == (None, True)


@pytest.mark.parametrize("text", aimed_at(LATTICE))
def test_it_holds_only_if_every_general_attack_was_made_or_does_not_apply(text: str) -> None:
    some = [*general(0, LATTICE, but=text), *OWN_ROWS, *SHOWN]
    assert judge(*some).level == "inconclusive"
    said = f"Left out, failed or stopped early: {make_name(text)}. --attack adaptive makes all, or"
    assert said in judge(*some).reasons[0]
    made = attacked(0, LATTICE, attack=text)
    assert judge(*some, made).level == "not broken"
    short = {"objective": 0.5, "objective_initial": 1.0, "objective_truth": 0.1, "diverged": 0.0}
    astray = HEALTHY | {"diverged": 1.0, "objective": None}
    changes = ({"control": True}, {"custom": True}, {"attacker": "informed"}, {"health": astray}, {"health": short})
    for change in changes:
        other = replace(made, trial=replace(made.trial, info={**made.info, **change}))
        level = "not broken" if change == {"health": short} and text == "learned" else "inconclusive"
        assert judge(*some, other).level == level
    address = {key: value for key, value in made.info.items() if key not in ("attacker", "health", "method")}
    failed, unfit = (Row(0, Trial({**address, "failed": "why", "unfit": unfit}, [])) for unfit in (False, True))
    assert judge(*some, failed).level == "inconclusive"
    assert judge(*some, unfit).level == "not broken"
    needless = Row(0, Trial({**unfit.info, "failed": "not needed, since ig already breaks it"}, []))
    assert judge(*some, needless).level == "inconclusive"


@pytest.mark.parametrize(
    ("text", "share", "level"),
    [
        ("learned", 0.0, "inconclusive"),
        ("learned", 0.4, "inconclusive"),
        ("learned", 0.6, "not broken"),
        ("learned(epochs=20)", None, "not broken"),
        ("learned(epochs=9)", None, "inconclusive"),
    ],
)
def test_a_learner_with_less_than_half_of_its_epochs_was_not_made(text: str, share: float | None, level: str) -> None:
    made = attacked(0, LATTICE, attack=text, budget_share=share)
    assert judge(*general(0, LATTICE, but="learned"), *OWN_ROWS, *SHOWN, made).level == level


def test_restarts_of_a_mixing_part_do_not_make_its_attacks_others() -> None:
    both, weaker = f"mixup + {LATTICE}", f"mixup + {WEAKER}"
    texts = [text.replace("restarts=4", "restarts=2") for text in aimed_at(both)]
    rows = [attacked(0, name, attack=text) for text in texts for name in (both, weaker)]
    own = (attacked(0, both, **OWN), attacked(32, weaker, **OWN), OWN_ROWS[1])
    (verdict,) = (each for each in verdicts([*rows, *own, BARE]) if each.defence == both)
    assert not any("Left out" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("health", "why"),
    [
        ({"objective": 0.12}, "the true images fit better (0.1) than its answer (0.12)"),
        ({"objective": 0.5}, "under-optimised, it did not reach the objective that the true images have"),
        ({"objective": 0.95, "objective_truth": 0.9}, "suspect, its objective did not fall"),
    ],
)
def test_an_attack_of_ones_own_that_misses_what_fits_better_vouches_for_nothing(
    health: dict[str, float], why: str
) -> None:
    own = row(0, health=HEALTHY | {"objective_truth": 0.1} | health, defence=LATTICE, **OWN)
    verdict = judge(*general(0, LATTICE), own, OWN_ROWS[1], *SHOWN)
    assert verdict.level == "inconclusive"
    assert verdict.reasons[-1].startswith(f"mine:undo does not count here: {why}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"simulated_client": "naive"}, 'it says simulated_client="naive", so it counts as one that ignores'),
        ({"drawn": {"model.eps": "sample"}}, "it draws the random values of the model again"),
        ({"round": 3, "rounds_used": [3]}, "the other 3 rounds were not used"),
        ({"budget_share": 0.1}, "the budget stopped it before half of its iterations"),
    ],
)
def test_an_attack_of_ones_own_that_does_not_count_is_told_why(change: dict[str, Any], why: str) -> None:
    rows = (*general(0, LATTICE), attacked(0, LATTICE, **OWN, **change), OWN_ROWS[1], *SHOWN)
    late = [_in_round(each, 3) for each in rows] if "round" in change else rows
    bare = [_in_round(BARE, 3)] if "round" in change else []
    (verdict,) = (each for each in verdicts([*late, *bare, BARE]) if each.defence == LATTICE)
    assert verdict.level == "inconclusive"
    assert f"mine:undo does not count here: {why}" in verdict.reasons[-1]


@pytest.mark.parametrize(("rounds", "carries"), [(1, True), (2, False), (2, True)])
def test_several_rounds_of_a_defence_that_carries_a_state_are_not_judged(rounds: int, carries: bool) -> None:
    """Noise that a client draws once and keeps cancels in the difference of two rounds."""
    rows = [_in_round(each, rounds - 1) for each in (*UNDONE, *SHOWN, BARE)]
    used = {"rounds_used": list(range(rounds)), "carries": carries}
    kept = [replace(each, trial=replace(each.trial, info={**each.info, **used})) for each in rows]
    (verdict,) = (each for each in verdicts(kept) if each.defence == LATTICE)
    assert verdict.level == ("inconclusive" if rounds > 1 and carries else "not broken")
    assert any("carries something from round to round" in reason for reason in verdict.reasons) is (
        rounds > 1 and carries
    )


def test_a_general_attack_on_the_last_of_several_rounds_is_another_one() -> None:
    assert is_same_attack("portfolio", "portfolio(rounds=all)")
    assert not is_same_attack("portfolio", "portfolio(rounds=last)")


@pytest.mark.parametrize(("defence", "carries"), [("dgp", True), ("dgp(feedback=false)", False), ("dp(1, 1)", False)])
def test_a_trial_says_whether_clients_keep_something_between_rounds(defence: str, carries: bool) -> None:
    experiment = open_experiment(config(defences=[defence], attacks=["ig(iterations=1)"], target_clients=1))
    found = recover(experiment, trials(experiment.config)[0], range(1), lambda _: None)
    assert found.facts["carries"] is carries


def _in_round(each: Row, number: int) -> Row:
    used = {"rounds_used": [*range(number + 1)]} if not each.info.get("custom") or each.undefended else {}
    return replace(each, trial=replace(each.trial, info={**each.info, "round": number, **used}))


def test_a_verdict_says_what_it_rests_on() -> None:
    said = (
        f"The verdict on {LATTICE} rests on mine:undo. It undoes {WEAKER} (32 of 32 images); nothing checks that it "
        "undoes this setting too."
    )
    verdict = judge(*UNDONE, *SHOWN)
    assert (verdict.basis, verdict.reasons[-1]) == ((said,), said)
    assert judge(*UNDONE).basis == ()
    # Another attack of one's own, whose answer fits worse than the true images, is none that it rests on.
    health = HEALTHY | {"objective_truth": 0.009}
    second = row(0, health=health, defence=LATTICE, attack="mine:second", custom=True)
    shown = attacked(32, WEAKER, attack="mine:second", custom=True)
    bare = row(32, defence="none", simulated_client="naive", attack="mine:second", custom=True)
    assert judge(*UNDONE, *SHOWN, second, shown, bare).basis == (said,)


def test_settings_that_make_no_other_attack_of_it_do_not_matter() -> None:
    some = [*general(0, LATTICE, but="portfolio"), *OWN_ROWS, *SHOWN]
    for same in ("portfolio(iterations=9)", "portfolio(simulated_client=full)", "portfolio(restarts=2)"):
        assert judge(*some, attacked(0, LATTICE, attack=same)).level == "not broken"
    assert judge(*some, attacked(0, LATTICE, attack="portfolio(simulated_client=naive, tv=0)")).level == "inconclusive"
    some = [*general(0, LATTICE, but="portfolio(undo_entries=true)"), *OWN_ROWS, *SHOWN]
    longer = attacked(0, LATTICE, attack="portfolio(iterations=9, undo_entries=true)")
    assert judge(*some, longer).level == "not broken"


def test_every_seed_needs_all_of_them() -> None:
    second = [
        replace(each, trial=replace(each.trial, info={**each.info, "seed": 1})) for each in (*UNDONE, *SHOWN, BARE)
    ]
    assert judge(*UNDONE, *SHOWN, *second).level == "not broken"
    left = [each for each in second if each.attack != "learned"]
    assert judge(*UNDONE, *SHOWN, *left).level == "inconclusive"


def test_without_public_images_nothing_has_to_be_learned() -> None:
    rows = [each for each in (*UNDONE, *SHOWN) if each.attack != "learned"]
    assert judge(*rows).level == "inconclusive"
    bare = [
        replace(each, trial=replace(each.trial, records=[_without_guess(record) for record in each.trial.records]))
        for each in rows
    ]
    assert judge(*bare).level == "not broken"


def _without_guess(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"per_image": [image | {"expected": {"identified": 0.01}} for image in record["per_image"]]}


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((attacked(32, "mine:Other(step=0.1)", **OWN), *general(0, "mine:Other(step=0.1)")), ""),
        (general(32, WEAKER), ""),
        ((*general(0, WEAKER), attacked(0, WEAKER, **OWN)), "mine:undo finds 0 of 32 images"),
        ((*general(0, WEAKER), attacked(8, WEAKER, **OWN)), "mine:undo finds 8 of 32 images"),
        ((*general(0, WEAKER, seed=1), attacked(32, WEAKER, seed=1, **OWN)), ""),
        # Behind quiet noise every search finds the images: that one of them is one's own shows nothing.
        (
            (*general(0, WEAKER, but="portfolio"), attacked(32, WEAKER, attack="portfolio"), SHOWN[0]),
            "portfolio finds them too, without undoing anything",
        ),
        ((SHOWN[0],), "these were left out, failed or stopped early: portfolio, "),
        ((SHOWN[0], *general(0, WEAKER, but="learned")), "these were left out, failed or stopped early: learned"),
        ((attacked(32, WEAKER, control=True, **OWN), *general(0, WEAKER)), ""),
    ],
)
def test_nothing_else_vouches_for_the_attack_on_it(others: tuple[Row, ...], why: str) -> None:
    verdict = judge(*UNDONE, *others)
    assert verdict.level == "inconclusive"
    assert "adaptive that undo nothing find none" in verdict.reasons[0]
    assert (f"Behind {WEAKER} {why}" in verdict.reasons[-1]) == bool(why)


def test_of_texts_too_the_weaker_setting_has_to_hide_something() -> None:
    words = {"examples": {"kind": "texts"}}
    texts = aimed_at(LATTICE, "texts")

    def every(recovered: int, defence: str) -> list[Row]:
        return [attacked(recovered, defence, attack=text, method="closed form", **words) for text in texts]

    own = (attacked(0, LATTICE, **OWN, **words), OWN_ROWS[1], attacked(32, WEAKER, **OWN, **words))
    assert judge(*every(0, LATTICE), *own, *every(0, WEAKER)).level == "not broken"
    assert judge(*every(0, LATTICE), *own, *every(32, WEAKER)).level == "inconclusive"


@pytest.mark.parametrize("text", ["learned", "portfolio(undo_entries=true)"])
def test_a_general_attack_that_undoes_the_weaker_setting_too_does_not_matter(text: str) -> None:
    shown = (attacked(32, WEAKER, **OWN), attacked(32, WEAKER, attack=text), *general(0, WEAKER, but=text))
    assert judge(*UNDONE, *shown).level == "not broken"


@dataclass(frozen=True)
class Loud(Transform):
    """Noise that hides nearly all of an entry, so that it cannot be read backwards."""

    std: float
    stage = Stage.NOISE

    def noise(self, params: Tensors) -> NoiseSpec:
        return NoiseSpec({name: Noise(tuple(p.shape), Normal(self.std)) for name, p in params.items()})

    def apply(self, update: Tensors, state: Tensors, noise: Tensors, context: Any) -> tuple[Tensors, Tensors]:
        return {n: g + noise[n] for n, g in update.items()}, state


@dataclass(frozen=True)
class Guess:
    """Returns grey images."""

    name: str = "guess"
    simulated_client: str = "full"
    knowledge: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(
        self, observations: Any, simulated_client: Any, knowledge: Any, key: Any, progress: Any = None, plan: Any = ()
    ) -> Reconstruction:
        clients, examples = len(observations[-1].target_clients), observations[-1].examples
        targets = torch.zeros(clients, examples, dtype=torch.long)
        return Reconstruction(torch.zeros(clients, examples, *knowledge.space.shape), targets, torch.zeros(clients))


UNDO = "portfolio(undo_entries=true)"


@pytest.mark.parametrize(
    ("asked", "unfit", "whole"),
    [(["adaptive"], True, True), (["portfolio", UNDO], True, False), (["portfolio"], False, False)],
)
def test_an_audit_from_python_makes_all_that_apply_and_does_not_ask_for_them_again(
    asked: list[Any], unfit: bool, whole: bool
) -> None:
    splits = load("digits")
    inputs, targets = splits.private.inputs[:2, :, ::4, ::4], splits.private.targets[:2]
    result = gradveil.audit(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        (inputs, targets),
        defences=[Defence("loud", send=chain(loud=Loud(10.0)))],
        attacks=[*asked, Guess()],
        public=(splits.public.inputs[:40, :, ::4, ::4], splits.public.targets[:40]),
        iterations=2,
    )
    states = {trial.info["attack"]: trial.unfit for trial in result.trials if trial.info["defence"] == "loud"}
    assert states.get(UNDO, False) is unfit
    assert any("some general attacks on loud were not made" in each for each in result.warnings) is not whole


def test_noise_of_any_size_is_recorded_and_read() -> None:
    splits = load("digits")
    result = gradveil.audit(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        (splits.private.inputs[:1, :, ::4, ::4], splits.private.targets[:1]),
        defences=[Defence("loud", send=chain(loud=Loud(1e18)))],
        attacks=["ig(iterations=1)"],
        control=False,
    )
    (trial,) = result.trials
    assert trial.failed is None
    assert trial.info["distance"] > 1e15
