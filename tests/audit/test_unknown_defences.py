"""A defence that nobody knows is not broken only if all general attacks failed, and one that is shown to undo it."""

from dataclasses import replace
from typing import Any

import pytest

from gradveil.audit.attack_selection import aimed_at, make_name
from gradveil.audit.recommendation import recommend
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.audit.verdict import Verdict, verdicts
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
    assert f"Left out or stopped early: {make_name(text)}. --attack adaptive makes all, or" in judge(*some).reasons[0]
    made = attacked(0, LATTICE, attack=text)
    assert judge(*some, made).level == "not broken"
    short = {"objective": 0.5, "objective_initial": 1.0, "objective_truth": 0.1, "diverged": 0.0}
    for change in ({"control": True}, {"custom": True}, {"health": short}, {"attacker": "informed"}):
        other = replace(made, trial=replace(made.trial, info={**made.info, **change}))
        level = "not broken" if "health" in change and text == "learned" else "inconclusive"
        assert judge(*some, other).level == level
    address = {key: value for key, value in made.info.items() if key not in ("attacker", "health", "method")}
    failed, unfit = (Row(0, Trial({**address, "failed": "why", "unfit": unfit}, [])) for unfit in (False, True))
    assert judge(*some, failed).level == "inconclusive"
    assert judge(*some, unfit).level == "not broken"


@pytest.mark.parametrize(("text", "share", "level"), [("learned", 0.4, "inconclusive"), ("learned", 0.6, "not broken")])
def test_a_general_attack_that_a_budget_left_less_than_half_was_not_made(text: str, share: float, level: str) -> None:
    made = attacked(0, LATTICE, attack=text, budget_share=share)
    assert judge(*general(0, LATTICE, but=text), *OWN_ROWS, *SHOWN, made).level == level


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


def test_a_verdict_says_what_it_rests_on() -> None:
    assert judge(*UNDONE, *SHOWN).basis == (
        f"it rests on mine:undo, which has to undo this setting as it undoes {WEAKER} (32 of 32 images).",
    )
    assert judge(*UNDONE).basis == ()


def test_settings_that_make_no_other_attack_of_it_do_not_matter() -> None:
    some = [*general(0, LATTICE, but="portfolio"), *OWN_ROWS, *SHOWN]
    assert judge(*some, attacked(0, LATTICE, attack="portfolio(iterations=9)")).level == "not broken"
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
    "others",
    [
        (attacked(32, "mine:Other(step=0.1)", **OWN), *general(0, "mine:Other(step=0.1)")),
        general(32, WEAKER),
        (*general(0, WEAKER), attacked(0, WEAKER, **OWN)),
        (*general(0, WEAKER), attacked(8, WEAKER, **OWN)),
        (*general(0, WEAKER, seed=1), attacked(32, WEAKER, seed=1, **OWN)),
        # Behind quiet noise every search finds the images: that one of them is one's own shows nothing.
        (*general(0, WEAKER, but="portfolio"), attacked(32, WEAKER, attack="portfolio"), attacked(32, WEAKER, **OWN)),
        (attacked(32, WEAKER, **OWN),),
        (attacked(32, WEAKER, **OWN), *general(0, WEAKER, but="portfolio(undo_entries=true)")),
        (attacked(32, WEAKER, control=True, **OWN), *general(0, WEAKER)),
    ],
)
def test_nothing_else_vouches_for_the_attack_on_it(others: tuple[Row, ...]) -> None:
    verdict = judge(*UNDONE, *others)
    assert verdict.level == "inconclusive"
    assert "searches of adaptive, which undo nothing, find none" in verdict.reasons[0]


@pytest.mark.parametrize("text", ["learned", "portfolio(undo_entries=true)"])
def test_a_general_attack_that_undoes_the_weaker_setting_too_does_not_matter(text: str) -> None:
    shown = (attacked(32, WEAKER, **OWN), attacked(32, WEAKER, attack=text), *general(0, WEAKER, but=text))
    assert judge(*UNDONE, *shown).level == "not broken"
