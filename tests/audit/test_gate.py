"""The gate: which settings count, what is above the limit, and what stands in the way of passing."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from gradveil.audit.findings import findings
from gradveil.audit.gate import Accepted, Gate, gate, images_needed
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Run, Trial
from gradveil.cli.audit_output import above_table
from gradveil.metrics import wilson
from tests.report.trials import BARE, HEALTHY, row

ORACLE: dict[str, Any] = {"grants": ["targets: the true labels", "send.noise.w: its true value"]}
AMBIGUOUS = {**HEALTHY, "objective": 0.01, "objective_truth": 0.01}


def held(limit: float, *rows: Row, planned: int = 0, accepted: tuple[Accepted, ...] = ()) -> tuple[Run, Gate]:
    trials = [Trial({**each.info, "trial": f"trial-{place}"}, each.trial.records) for place, each in enumerate(rows)]
    run = Run({"trials": [f"trial-{place}" for place in range(planned or len(rows))]}, trials)
    return run, gate(run, limit, accepted)


def judged(limit: float, *rows: Row, accepted: tuple[Accepted, ...] = ()) -> Gate:
    return held(limit, *rows, accepted=accepted)[1]


def diverged(won: int, lost: int, of: int = 64, **change: Any) -> Row:
    made = row(won, of, **change)
    for record in made.trial.records[of - lost :]:
        record["status"] = "diverged"
    return made


def failed(**change: Any) -> Row:
    return Row(0, Trial({**row(0, **change).info, "failed": "out of memory"}, []))


def bare(won: int, of: int = 32, **change: Any) -> Row:
    return row(won, of, defence="none", simulated_client="naive", **change)


def unscored(**change: Any) -> Row:
    blind = row(0, observed=[], unscored="no score: the truth was not recorded", **change)
    for record in blind.trial.records:
        del record["per_image"]
    return blind


def as_trained_on(made: Row) -> Row:
    """Let every image come back as the client trained on it."""
    for record in made.trial.records:
        record["per_image"][0] |= {"success_transformed": 1, "expected_transformed": {"recovered": 0.01, "public": 50}}
    return made


def test_a_count_below_its_baseline_is_not_why_a_setting_leaks() -> None:
    guessable = {"recovered": 0.8, "identified": 0.01, "identifiable": 0.01, "public": 1000}
    found = judged(0.1, row(17, attack="cdia", expected=guessable), BARE)
    (one,) = found.above
    assert (one.hits, one.criterion, one.baseline) == (17, "recovered", pytest.approx(0.8, abs=0.01))
    assert one.leak is not None
    assert (one.leak.observed, one.leak.criterion) == (17, "identified")
    console = Console(width=200, record=True, file=StringIO())
    console.print(above_table(found.above))
    assert "leak: 17/32 53.1% identified" in console.export_text()
    (clear,) = judged(0.1, row(17), BARE).above
    assert clear.leak is None


def test_tokens_that_leak_count_as_a_share_of_all_tokens() -> None:
    parts = [{"criterion": "in place", "noun": "token", "observed": 40, "parts": 200, "expected": 2.0, "p": 1e-4}]
    (one,) = judged(0.1, row(0, parts=parts), BARE).above
    assert (one.rate, one.count, one.baseline) == (0.2, "40 of 200 tokens in place", 0.01)
    assert one.verdict.level == "leaks"
    assert not judged(0.5, row(0, parts=parts), BARE).above
    rest = [{**parts[0], "p": 0.5}]
    assert judged(0.1, row(0, parts=rest), BARE).counted[0].count == "0 of 32 images recovered"


def test_the_reason_of_a_broken_defence_is_printed() -> None:
    (note, *_) = findings([row(32).trial]).reasons()
    assert note.startswith("dgp: broken. ig: 32 of 32 images recovered")


def test_an_ambiguous_control_and_no_adaptive_attacker_do_not_pass() -> None:
    """The run that used to pass: 0% without a defence, 0% by an attacker who ignores the defence."""
    found = judged(0.1, bare(0, 64, health=AMBIGUOUS), row(0, 64, simulated_client="naive"))
    assert found.exit_code == 1
    assert [line.partition(".")[0] for line in found.obstacles] == ["dgp (gradient) is not tested"]
    assert found.obstacles[0].endswith("Add --attack adaptive.")


RUNS: dict[str, tuple[Callable[[], tuple[Run, Gate]], int, str]] = {
    "broken attack: nothing without a defence either": (
        lambda: held(0.1, bare(0, 64), row(0, 64)),
        1,
        "dgp (gradient) is inconclusive. No adaptive attack shows that it would find a leak (ig: suspect, it recovers ",
    ),
    "no adaptive attacker": (
        lambda: held(0.1, BARE, row(0, 64, simulated_client="naive")),
        1,
        "dgp (gradient) is not tested. No adaptive attack was run",
    ),
    "one target client": (
        lambda: held(0.1, BARE, row(0, 1)),
        1,
        "Only 1 image attacked: at least 8 are needed. Attack at least 8 images: --target-clients 8.",
    ),
    "diverged": (
        lambda: held(0.1, BARE, row(0, 64, health=HEALTHY | {"diverged": 1.0})),
        1,
        "100% of its runs diverged",
    ),
    "a few runs diverged": (
        lambda: held(0.1, BARE, diverged(0, 6)),
        1,
        "ig against dgp, gradient, seed 0: 6 of 64 targets ended in divergence, and had they been recovered, the rate "
        "would reach 19%.",
    ),
    "failed": (lambda: held(0.1, BARE, row(0, 64), failed(attack="dlg")), 1, "seed 0 failed: out of memory."),
    "every attack on the defence failed": (
        lambda: held(0.1, BARE, failed()),
        1,
        "dgp (gradient) is not tested. Ig failed: out of memory.",
    ),
    "not broken with 35 images": (lambda: held(0.1, BARE, row(0, 35)), 0, ""),
    "not broken with 8 images": (
        lambda: held(0.1, BARE, row(0, 8)),
        1,
        "0 of 8 images recovered, and the 95% interval reaches 32.4%. With none recovered, 35 images show 10%: "
        "--target-clients 35.",
    ),
    "above the limit": (lambda: held(0.1, BARE, row(8, 64)), 3, ""),
    "oracle only": (
        lambda: held(0.1, BARE, row(0, 64, **ORACLE)),
        1,
        "dgp (gradient) is not tested. Only oracle attackers were run",
    ),
    "control missing": (
        lambda: held(0.1, row(0, 64)),
        1,
        "the undefended update was not attacked in this run, so nothing shows that the attack works",
    ),
    "control by itself": (lambda: held(0.1, bare(8, 8, control=True), row(0, 64)), 0, ""),
    "the worst of several seeds is above": (
        lambda: held(0.1, BARE, bare(32, seed=1), row(0, 64), row(8, 64, seed=1)),
        3,
        "",
    ),
    "several seeds, the worst of which shows too little": (
        lambda: held(0.1, BARE, bare(32, seed=1), row(1, 64), row(2, 64, seed=1)),
        1,
        "ig against dgp, gradient, seed 1: 2 of 64 images recovered, and the 95% interval reaches 10.7%.",
    ),
    "not done": (lambda: held(0.1, BARE, row(0, 64), planned=4), 1, "2 of 4 trials are not done"),
    "recorded updates without the truth": (
        lambda: held(1, unscored()),
        1,
        "dgp (gradient) is inconclusive. No score: the truth was not recorded.",
    ),
    "recorded updates count, whatever is believed of them": (
        lambda: held(0.5, row(32, defence="none", observed=[]), row(0, observed=[])),
        3,
        "",
    ),
    "identified without being recovered": (
        lambda: held(0.1, BARE, row(0, 64, identified=True)),
        3,
        "",
    ),
    "recovered as a batch defence made them": (
        lambda: held(0.1, BARE, as_trained_on(row(0, 64, defence="ats"))),
        3,
        "",
    ),
    "nothing but the undefended client": (lambda: held(0.5, BARE), 3, ""),
}


@pytest.mark.parametrize("name", RUNS)
def test_constructed_runs(name: str) -> None:
    make, exit_code, said = RUNS[name]
    _, found = make()
    assert found.exit_code == exit_code, found.obstacles
    assert said in " ".join(found.obstacles)
    assert bool(found.obstacles) == (exit_code == 1)


@pytest.mark.parametrize("limit", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_images_needed_is_the_smallest_number_that_passes(limit: float) -> None:
    needed = images_needed(limit)
    assert needed is not None
    assert wilson(0, needed)[1] <= limit + 1e-9
    assert needed == 1 or wilson(0, needed - 1)[1] > limit


def test_a_weakened_gate_passes_what_was_accepted_and_nothing_else() -> None:
    few = judged(0.1, BARE, row(0, 8), accepted=(Accepted.FEW_IMAGES,))
    assert few.passed
    one = judged(0.1, BARE, row(0, 1), accepted=(Accepted.FEW_IMAGES,))
    assert not one.passed
    assert judged(0.1, BARE, row(0, 1), accepted=(Accepted.FEW_IMAGES, Accepted.INCONCLUSIVE)).passed
    naive = BARE, row(0, 64, simulated_client="naive")
    assert judged(0.1, *naive, accepted=(Accepted.NOT_TESTED,)).passed
    assert not judged(0.1, *naive, accepted=(Accepted.FEW_IMAGES, Accepted.INCONCLUSIVE)).passed
    assert judged(0.1, BARE, row(8, 64), accepted=tuple(Accepted)).exit_code == 3
    assert judged(0.1, BARE, row(0, 64), failed(attack="dlg"), accepted=tuple(Accepted)).exit_code == 1


def test_the_undefended_update_counts_only_where_nothing_else_was_attacked() -> None:
    found = judged(0.05, BARE, row(4, 64), row(9, 64, attack="dlg"), row(0, 64, attack="gi"))
    assert [(one.row.attack, one.hits) for one in found.above] == [("dlg", 9)]
    assert [one.row.defence for one in found.counted] == ["dgp"]
    assert [one.hits for one in judged(0.5, row(0, defence="none + none"), BARE).above] == [32]
    assert judged(0.5, BARE, failed()).counted == ()


def test_attackers_who_know_secrets_never_count() -> None:
    found = judged(0.5, BARE, row(32, attack="wiig", **ORACLE), row(1))
    assert found.passed
    assert [one.row.attack for one in found.counted] == ["ig"]
    alone = judged(0.1, bare(0, attack="gi", **ORACLE))
    assert "Add an attack that knows no client secrets." in alone.obstacles[0]


def test_an_upper_bound_alone_passes_no_setting_whatever_is_accepted() -> None:
    told = row(32, defence="dropout", attack="wiig", **ORACLE)
    found = judged(0.2, row(0, health=AMBIGUOUS), told, BARE, accepted=(Accepted.NOT_TESTED,))
    assert found.exit_code == 1
    assert any("Only oracle attackers were run" in line for line in found.obstacles)


def batches(*hits: int, size: int) -> Row:
    """Clients with batches of a size, of which so many images each were recovered."""
    made = row(0, len(hits))
    for record, won in zip(made.trial.records, hits, strict=True):
        (image,) = record["per_image"]
        record["per_image"] = [{**image, "success": int(place < won)} for place in range(size)]
    return made


def test_all_images_of_few_clients_do_not_pass() -> None:
    alone = judged(0.1, batches(0, size=36), BARE)
    assert alone.exit_code == 1
    assert "only 1 client" in alone.obstacles[0]
    assert judged(0.1, batches(*[0] * 8, size=8), BARE).passed
    assert judged(0.1, batches(0, size=36), BARE, accepted=(Accepted.FEW_IMAGES,)).passed


def test_copies_of_an_image_count_as_one() -> None:
    copied = row(0, 40)
    for place, record in enumerate(copied.trial.records):
        record["per_image"][0]["copy_of"] = place // 4
    assert judged(0.1, row(0, 40), BARE).passed
    assert not judged(0.1, copied, BARE).passed
