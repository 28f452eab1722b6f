"""The threat model in words: rounds, sums, budget, and what was given to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.audit_config import ClientConfig
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.audit.threat_model import scope, threat_model
from tests.audit.runs import config, execute
from tests.report.trials import recorded

LABELS = "targets: the true labels"


def row(attack: str, *grants: str, **change: Any) -> Row:
    """A trial without target clients."""
    info = {
        "model": "m",
        "data": "d",
        "client": "gradient",
        "batch": 1,
        "round": 0,
        "defence": "dp",
        "simulated_client": "full",
    }
    return Row(0, Trial(recorded(info | {"attack": attack, "grants": list(grants), "knowledge": {}} | change), []))


USED = {
    "ig": [4],
    "dia": [4],
    "learned": [4],
    "analytic": [4],
    "ig(rounds=first)": [0],
    "portfolio": [*range(5)],
}
"""The rounds that attacks used, as the trials' records have them."""


@pytest.mark.parametrize(
    ("attacks", "said"),
    [
        (["ig"], "It watches 5 rounds, and every attack uses the last one."),
        (["ig(rounds=first)"], "It watches 5 rounds, and every attack uses the first one."),
        (["ig", "learned", "analytic"], "It watches 5 rounds, and every attack uses the last one."),
        (
            ["ig", "portfolio", "dia", "ig(rounds=first)"],
            "It watches 5 rounds, used as follows: the last one by ig and dia; all of them by portfolio; "
            "the first one by ig(rounds=first).",
        ),
        (["ig", "my own attack"], "It watches 5 rounds, used as follows: the last one by ig."),
        (["my own attack"], "It watches 5 rounds. "),
    ],
)
def test_the_rounds_that_were_watched_and_used(attacks: list[str], said: str) -> None:
    assert said in threat_model([row(attack, round=4, rounds_used=USED.get(attack)) for attack in attacks], {})
    assert "It watches one round." in threat_model([row(attack) for attack in attacks], {})


def test_watching_rounds_is_not_using_them() -> None:
    assert "several rounds (rounds)" in scope([row("ig")], {})
    assert "more than one of the rounds watched" in scope([row("ig", round=4, rounds_used=[4])], {})
    assert "rounds" not in scope([row("portfolio", round=4, rounds_used=[*range(5)])], {})


@pytest.mark.parametrize(
    ("budget", "said"),
    [("64000", "share 64,000 target-iterations."), ("10m", "share 10 min 0 s of working time."), (None, "")],
)
def test_the_budget(budget: str | None, said: str) -> None:
    assert said in threat_model([row("ig")], {"budget": budget})
    assert ("share" in threat_model([row("ig")], {"budget": budget})) is (budget is not None)


def test_a_budget_that_was_too_small_for_one_iteration_is_told() -> None:
    short = [row(attack, seconds=1.2, target_iterations=8) for attack in ("ig", "cdia")]
    learned = row("learned", seconds=9.0, row_iterations=10**6, knowledge={"public": "known"})
    assert "took" not in threat_model(short, {"budget": "2s"})
    assert "on one defence they took 11 s of working time." in threat_model([*short, learned], {"budget": "2s"})
    assert "took" not in threat_model([*short, learned], {"budget": "16"})
    assert "in any case: on one defence they took 16 target-iterations." in threat_model(short, {"budget": "15"})
    student = row("learned", simulated=2394)
    assert "on one defence they took 2,402 target-iterations." in threat_model([short[0], student], {"budget": "400"})
    apart = [short[0], row("cdia", seconds=1.2, target_iterations=8, defence="clip(1)")]
    assert "took" not in threat_model(apart, {"budget": "8"})


def test_clients_of_other_settings_are_told_apart() -> None:
    """Rates are compared within a setting, which knows a client by its title."""
    local = {"lr": 0.1, "epochs": 2}
    others = ({"batch": 1}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 1e-3})
    clients = [
        {}, {"members": 2}, {"trainable": ["head.*"]}, {"trainable": ["head.*", "body.0.*"]}, {"local": local},
        *({"local": {**local, **other}} for other in (*others, {"sampling": "poisson"}, {"optimiser": "adam"})),
        {"local": local, "trainable": ["head.*"]},
    ]  # fmt: skip
    titles = [ClientConfig.model_validate({"batch": 2, **client}).title for client in clients]
    assert len(set(titles)) == len(titles), titles
    frozen = row("ig", update=ClientConfig(trainable=["head.*", "body.0.*"], members=2).update_of("image"))
    assert "the sum over 2 clients of one gradient of 1 image (of head.* body.0.* alone) each." in threat_model(
        [frozen], {}
    )


def test_a_run_of_two_clients_of_which_one_trains_less_judges_them_apart(tmp_path: Path) -> None:
    clients = [{"trainable": ["body.*"]}, {}]
    run, _ = execute(config(client=clients, defences=["none"], attacks=["ig(iterations=1)"]), tmp_path / "run")
    settings = {Row(place, trial).setting for place, trial in enumerate(run.trials)}
    assert len(settings) == 2


def test_what_was_given_and_to_whom() -> None:
    public = "public: 100 images of the same kind, none of a target client"
    eps = "model.eps: its true value"
    rows = [row("ig", LABELS), row("dlg"), row("learned(epochs=9)", LABELS, public), row("wiig", LABELS, eps)]
    said = threat_model(rows, {})
    assert "Handed over besides: the true labels (to ig, learned and wiig)." in said
    assert "Public data for learned: 100 images of the same kind, none of a target client." in said
    assert said.endswith("Only as an upper bound, wiig was told the true values of model.eps.")
    many = row("wiig", LABELS, *(f"round{i}.{eps}" for i in range(5)))
    told = threat_model([many], {})
    assert "Handed over besides: the true labels. Only" in told
    assert "wiig was told the true values of 5 random tensors or statistics." in told
    assert threat_model([row("dlg")], {}).endswith("Nothing else is given.")
    assert "Nothing" not in threat_model([row("learned", public)], {})


def test_a_run_of_sums_over_several_rounds_says_so(tmp_path: Path) -> None:
    wanted = config(attacks=["ig(iterations=1)", "cdia(iterations=1, rounds=all)"], defences=["none"], rounds=2)
    wanted = config(**{**wanted.resolved(), "client": {"batch": 1, "members": 2}, "target_clients": 2, "budget": "100"})
    run, _ = execute(wanted, tmp_path / "run")
    rows = [Row(number, trial) for number, trial in enumerate(run.trials)]
    said = threat_model(rows, run.info["config"])
    assert "what it receives: the sum over 2 clients of one gradient of 1 image each." in said
    assert "It watches 2 rounds, used as follows: the last one by ig; all of them by cdia." in said
    assert "All attacks on one defence that search or learn share 100 target-iterations." in said
