"""A malicious server in an audit: whose attack it is, what was sent, who would see it, and where there is none."""

from pathlib import Path

import pytest

from gradveil.attacks.malicious.planted_block import Imprint
from gradveil.audit.grants import active_facts, received
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.run_file import read
from gradveil.audit.threat_model import threat_model
from gradveil.audit.verdict import price, verdicts
from gradveil.core.errors import GradveilError
from gradveil.report.method import bounds
from tests.audit.recording import record, simulated, watching
from tests.audit.runs import config, execute

SMALL = {"client": {"batch": 4}, "defences": ["none", "prune(0.5)", "gaussian(0.01)"]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[Row]:
    chosen = config(**SMALL, attacks=["rob(bins=32)", "curious", "fishing(iterations=2)", "ig(iterations=2)"])
    run, _ = execute(chosen, tmp_path_factory.mktemp("active"))
    return [Row(place, trial) for place, trial in enumerate(run.trials)]


def test_only_who_changes_the_model_is_malicious(rows):
    kinds = {(row.attack.partition("(")[0], row.defence): row.attacker for row in rows}
    for defence in SMALL["defences"]:
        assert kinds["rob", defence] == kinds["curious", defence] == kinds["fishing", defence] == "active"
        assert kinds["ig", defence] == ("undefended" if defence == "none" else "naive")


def test_what_was_planted_is_told_and_whether_a_guard_finds_it(rows):
    for row in rows:
        if row.attacker == "active":
            families = {"rob": "imprint in measure", "curious": "trap in measure", "fishing": "fishing in head"}
            assert f"{families[row.attack.partition('(')[0]]}.weight" in row.info["guard"]
            assert not any("not finite" in told for told in row.info["guard"])
            assert ("block of" in row.info["planted"]) is ("fishing" not in row.attack)
        else:
            assert "planted" not in row.info
    (verdict,) = [v for v in verdicts(rows) if v.best.defence == "gaussian(0.01)"]
    assert verdict.sentence.startswith("A malicious server, which changes the model that it sends, recovers")
    notes = " ".join(verdict.notes)
    assert "a client's guard finds it: " in notes
    assert "A server that leaves the model as it is recovers 0 of 8 at most (ig(iterations=2))." in notes
    told = threat_model(rows, {})
    assert told.startswith("An honest-but-curious server keeps")
    assert "a malicious server sends a model with an imprint block of 32 bins before the first layer (rob)" in told
    alone = threat_model([row for row in rows if row.planted], {})
    assert alone.startswith("A malicious server sends a model of its own making")
    assert "honest-but-curious" not in alone
    assert "It sends a model with an imprint block of 32 bins before the first layer (rob)" in alone


def test_of_several_rounds_the_first_is_read_whose_block_is_as_it_was_planted(tmp_path):
    chosen = config(defences=["none"], attacks=["rob"], rounds=2, server_lr=10.0)
    run, _ = execute(chosen, tmp_path)
    rows = [Row(place, trial) for place, trial in enumerate(run.trials)]
    assert rows[0].asr == 1
    assert "every attack uses the first one" in threat_model(rows, {})


def test_who_changes_the_model_in_every_round_is_let_and_shares_the_budget(tmp_path):
    chosen = config(
        defences=["none"],
        attacks=["fishing(iterations=50)"],
        rounds=2,
        client={"batch": 4},
        budget="40",
        target_clients=2,
    )
    run, _ = execute(chosen, tmp_path)
    (trial,) = run.trials
    for told in trial.records:  # the classes of both rounds are all there are
        assert sorted(told["predicted"]) == sorted(told["label"])
        assert told["iterations"] == 10
    row = Row(0, trial)
    assert row.info["grants"] == []
    assert row.info["row_iterations"] <= 40
    assert "every attack uses all of them" in threat_model([row], {})


def test_how_many_target_clients_lost_an_image_is_told_where_not_all_came_back(rows):
    told = [verdict for row in rows if row.attacker == "active" for verdict in verdicts([row])]
    parts = [verdict for verdict in told if 0 < verdict.best.recovered < verdict.best.images]
    assert parts
    for verdict in told:
        said = f"It recovers at least one image of {verdict.best.exposed} of 2 target clients."
        assert (said in verdict.notes) is (verdict in parts)


def test_images_come_back_and_are_scored_as_any(rows):
    asr = {(row.attack, row.defence): row.asr for row in rows}
    assert asr["rob(bins=32)", "none"] >= 0.75
    assert asr["ig(iterations=2)", "none"] == 0


def test_bytes_are_compared_with_those_of_the_same_model(rows):
    for row in (row for row in rows if row.defence == "prune(0.5)"):
        (plain,) = {r.info["bytes_sent"] for r in rows if r.undefended and r.attack == row.attack}
        assert price(row, rows).plain == plain


def test_a_bound_is_of_the_model_that_was_sent(rows):
    said = [text for _, text in bounds(rows) if "lower mean squared error" in text]
    assert any("from the model that the malicious server sends" in text for text in said)
    assert any("malicious" not in text for text in said)


def test_an_attack_of_ones_own_that_crafts_no_client_is_named() -> None:
    class Mine(Imprint):
        def craft(self, client, knowledge, key):
            return None

    experiment = open_experiment(config(defences=["none"], attacks=["rob"]))
    with pytest.raises(GradveilError, match=r"attack rob: craft\(\) returned nothing"):
        received(experiment, Mine(), experiment.undefended(0, 0), 0)


def test_a_change_that_its_attack_does_not_name_is_told_all_the_same() -> None:
    class Mute(Imprint):
        def planted(self) -> str:
            return ""

    experiment = open_experiment(config(defences=["none"], attacks=["rob"]))
    told = active_facts(Mute(), received(experiment, Mute(), experiment.undefended(0, 0), 0))
    assert told["planted"] == "something that it does not name"


def test_recorded_updates_and_trained_clients_are_of_the_honest_model(tmp_path: Path):
    record(simulated(), tmp_path, truth=True)
    with pytest.raises(GradveilError, match="recorded of the model as it was"):
        open_experiment(watching(tmp_path, attacks=["rob"]))
    plan = {"clients": 2, "rounds": 1, "images": 40, "batch": 4}
    with pytest.raises(GradveilError, match="of a training keep is of the model as it was"):
        open_experiment(config(defences=["none"], attacks=["rob"], train=plan))


@pytest.mark.parametrize(("data", "kind"), [("census", "rows"), ("reviews", "texts")])
def test_malicious_server_without_an_attack_on_a_kind_is_refused(data, kind):
    settings = {"attacks": ["malicious"], "iterations": None, "restarts": None}
    with pytest.raises(GradveilError) as caught:
        open_experiment(read(data, settings))
    assert [problem.where for problem in caught.value.problems] == ["attacks"]
    assert f"no attack on {kind}" in caught.value.problems[0].what
