"""Leak against cost in the report of an audit that follows a training."""

from __future__ import annotations

import csv
import io
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial, load_run
from gradveil.audit.verdict import verdicts
from gradveil.cli.app import run as command
from gradveil.federated.training_groups import proven
from gradveil.metrics import wilson
from gradveil.report import audit_page
from gradveil.report.audit_page import context
from gradveil.report.method import guarantees
from gradveil.report.pareto import AXES, ParetoChart, Spot, charts, front_of, fronts_by_defence
from gradveil.report.plots import fronts
from tests.audit.test_training import RUN
from tests.report.parsed_page import read
from tests.report.trials import row

ACCURACY, BYTES, _ = AXES
SECRET = {"knowledge": {"send.*": "known"}, "grants": ["send.noise: its true value"]}


def trial(won: int, accuracy: float, sent: float, seconds: float = 1.0, stage: int = 4, **change: Any) -> Row:
    """A defence that leaks so many of 32 images after so many rounds, and what its training costs."""
    facts = {"round": stage, "accuracy": accuracy / (2 if stage == 0 else 1), "final_accuracy": accuracy}
    costs = {"bytes_up": sent, "bytes_down": 2 * sent, "seconds": 9.0, "client_seconds": seconds}
    return row(won, trained=stage, training=facts | costs, **{"defence": "dgp", **change})


def bare(won: int = 32, **change: Any) -> Row:
    return trial(won, 0.9, 100.0, defence="none", simulated_client="naive", **change)


def chart(*rows: Row) -> ParetoChart:
    numbered = [Row(number, each.trial) for number, each in enumerate(rows)]
    (drawn,) = charts(verdicts(numbered), (), {})
    return drawn


def spot(drawn: ParetoChart, name: str) -> Spot:
    return next(each for each in drawn.worst.spots if each.name == name)


def test_a_defence_stands_where_it_leaks_most_and_every_round_has_its_view() -> None:
    drawn = chart(bare(stage=0), bare(20, stage=4), trial(3, 0.8, 50, stage=0), trial(9, 0.8, 50, stage=4))
    assert [view.title for view in drawn.views] == ["Worst round", "Untrained", "After 4 rounds"]
    assert [(each.name, each.stage, each.rate) for each in drawn.worst.spots] == [
        ("No defence", 0, 1.0),
        ("dgp", 4, 9 / 32),
    ]
    assert [each.rate for each in drawn.views[1].spots] == [1.0, 3 / 32]
    assert drawn.trail(spot(drawn, "dgp")) == ["9.4% untrained", "28.1% after 4 rounds"]


def test_cost_is_of_the_whole_training_at_every_stage() -> None:
    drawn = chart(bare(stage=0), bare(stage=4))
    assert [each.costs["accuracy"][0] for view in drawn.views for each in view.spots] == [0.9] * 3
    older = [trial(1, 0.8, 50, stage=stage) for stage in (0, 4)]
    for each in older:
        del each.trial.info["training"]["final_accuracy"]
    assert spot(chart(*older), "dgp").costs["accuracy"] == (0.8, 0.8, 0.8)


def test_sentences_name_members_and_dominated_defences() -> None:
    drawn = chart(
        bare(),
        trial(8, 0.8, 50, defence="dgp"),
        trial(8, 0.7, 40, defence="prune"),
        trial(0, 0.5, 120, defence="dp"),
        trial(12, 0.6, 60, 3.0, defence="clip"),
    )
    members = {axis.key: drawn.worst.members[axis.key] for axis in AXES}
    assert members["accuracy"] == {"No defence", "dgp", "dp"}
    assert members["bytes"] == {"prune", "dp"}
    assert drawn.worst.sentence(ACCURACY) == (
        "On the front: No defence, dgp and dp. Dominated: prune and clip, by dgp."
    )
    assert "No defence, dgp and clip, by prune" in drawn.worst.sentence(BYTES)
    assert drawn.overall == "Dominated in leak, accuracy, bytes and time at once: clip, by dgp and prune."
    assert "once" in chart(bare()).overall


def test_member_that_may_leak_more_is_named() -> None:
    """An attacker who ignores the defence shows no protection by failing."""
    drawn = chart(bare(), trial(2, 0.8, 50, simulated_client="naive", knowledge={}))
    assert "may leak more than measured: dgp" in drawn.worst.sentence(BYTES)
    assert "flatter" not in chart(bare(), trial(2, 0.8, 50)).worst.sentence(BYTES)


def test_equal_defences_share_the_front() -> None:
    drawn = chart(trial(8, 0.8, 50, defence="dgp"), trial(8, 0.8, 50, defence="prune"))
    assert all(drawn.worst.members[axis.key] == {"dgp", "prune"} for axis in AXES)
    assert drawn.worst.sentence(BYTES) == "On the front: dgp and prune. No defence is dominated."


def test_informed_attacks_do_not_count() -> None:
    informed = trial(32, 0.8, 50, attack="dia", **SECRET)
    drawn = chart(bare(), trial(4, 0.8, 50), informed)
    assert spot(drawn, "dgp").rate == 4 / 32
    alone = chart(bare(), informed)
    assert spot(alone, "dgp").is_bound
    assert alone.worst.members["bytes"] == {"No defence"}
    assert alone.worst.dominated["bytes"] == {}
    assert "Upper bounds, not compared: dgp." in alone.worst.sentence(BYTES)
    rows = [Row(0, bare().trial), Row(1, informed.trial)]
    fronts = fronts_by_defence(verdicts(rows))
    assert [front_of(each, fronts) for each in rows] == ["accuracy, bytes, seconds", "upper bound"]


def test_the_leak_is_the_share_of_images_recovered_and_identified() -> None:
    (each,) = chart(trial(8, 0.8, 50, identified=False)).worst.spots
    assert (each.rate, each.bounds) == (0.0, wilson(0, 32))


def test_seeds_are_averaged_and_their_intervals_reach_over_all() -> None:
    drawn = chart(
        trial(4, 0.8, 50, 1.0, seed=0), trial(12, 0.6, 70, 2.0, seed=1), trial(8, 0.8, 50, 1.0, seed=0, attack="x")
    )
    (each,) = drawn.worst.spots
    assert each.rates == [8 / 32, 12 / 32]
    assert each.rate == 10 / 32
    assert each.bounds[0] < wilson(8, 32)[0], "corrected for three attacks"
    assert each.bounds[1] == wilson(12, 32)[1]
    assert each.costs == {"accuracy": (0.7, 0.6, 0.8), "bytes": (60, 50, 70), "seconds": (1.5, 1.0, 2.0)}


def test_script_data_agree_with_the_sentences() -> None:
    rows = [bare(stage=0), bare(stage=4), trial(3, 0.8, 50, stage=0), trial(9, 0.8, 50, stage=4)]
    numbered = [Row(number, each.trial) for number, each in enumerate(rows)]
    drawn = charts(verdicts(numbered), (), {})
    (data,) = fronts(drawn, numbered)
    worst = {each["name"]: each for each in data["views"][0]["spots"]}
    assert worst["dgp"]["front"] == {"accuracy": True, "bytes": True, "seconds": True}
    assert worst["No defence"]["front"] == {"accuracy": True, "bytes": False, "seconds": False}
    assert worst["dgp"]["trail"] == [[0.0, 3 / 32], [1.0, 9 / 32]]
    assert data["views"][1]["spots"][0]["trail"] == []
    assert data["views"][0]["sentences"]["bytes"] == drawn[0].worst.sentence(BYTES)
    assert (worst["No defence"]["undefended"], worst["dgp"]["undefended"]) == (True, False)


def test_defence_without_a_rate_at_some_round_is_not_compared() -> None:
    drawn = chart(bare(stage=0), bare(stage=4), trial(0, 0.8, 10, stage=0))
    assert not spot(drawn, "dgp").is_complete
    assert drawn.worst.members["bytes"] == {"No defence"}
    assert "Without a rate at some round, not compared: dgp." in drawn.worst.sentence(BYTES)
    assert drawn.views[1].members["bytes"] == {"dgp"}


def test_a_failed_attack_leaves_the_rate_in_doubt() -> None:
    info = trial(0, 0.8, 50, attack="dia").trial.info
    done = [Row(0, bare().trial), Row(1, trial(2, 0.8, 50).trial)]
    doubtful = [charts(verdicts(done), failed, {})[0] for failed in ((), (Trial(info | {"failed": "boom"}, []),))]
    assert [spot(each, "dgp").may_leak_more for each in doubtful] == [False, True]


def test_unknown_cost_is_left_out() -> None:
    rows = [bare(), trial(8, 0.9, 50)]
    for each in rows:
        del each.trial.info["training"]["client_seconds"]
    drawn = chart(*rows)
    assert drawn.overall == "Dominated in leak, accuracy and bytes at once: No defence, by dgp."
    assert [axis.key for axis in drawn.axes] == ["accuracy", "bytes"]


def test_guarantee_is_of_the_training_unless_another_is_planned() -> None:
    private = trial(3, 0.8, 50, defence="dp", guarantee="differential privacy of each example")
    private.trial.info["training"] |= {"epsilon": {"example": 2.5}, "guarantee": "epsilon 2.5 of each example (...)"}
    assert proven(private.info) == "epsilon 2.5 of each example"
    assert guarantees([private]) == [("dp", "epsilon 2.5 of each example (...)")]
    private.trial.info["epsilon"] = {"example": 1.25}
    assert proven(private.info) == "epsilon 1.25 of each example"
    assert guarantees([private]) == [("dp", "differential privacy of each example")]


def test_settings_are_compared_within_themselves() -> None:
    rows = [bare(), trial(4, 0.8, 50), bare(batch=2), trial(2, 0.8, 50, batch=2)]
    numbered = [Row(number, each.trial) for number, each in enumerate(rows)]
    assert [drawn.setting.batch for drawn in charts(verdicts(numbered), (), {})] == [1, 2]


def test_without_a_training_the_costs_are_those_of_an_update() -> None:
    rows = [row(3, distance=0.5, number=0), row(32, defence="none", simulated_client="naive", distance=0.0, number=1)]
    (drawn,) = charts(verdicts(rows), (), {})
    assert [axis.key for axis in drawn.axes] == ["bytes", "distortion"]
    assert spot(drawn, "dgp").costs == {"bytes": (10.0, 10.0, 10.0), "distortion": (0.5, 0.5, 0.5)}
    assert charts(verdicts([row(3, bytes_sent=None)]), (), {}) == []
    assert front_of(row(3), fronts_by_defence(verdicts([row(3)]))) is None


def test_defence_without_a_rate_has_a_reason() -> None:
    info = {key: value for key, value in trial(0, 0.5, 1).trial.info.items() if key != "training"}
    failed = Trial(info | {"defence": "clip", "failed": "diverged in round 2"}, [])
    done = [Row(0, bare().trial)]
    left_out = Trial(info | {"defence": "cvb", "failed": "is no plain chain", "unfit": True, "attack": "r-gap"}, [])
    other = Trial({**left_out.info, "attack": "analytic"}, [])
    (drawn,) = charts(verdicts(done), [failed, left_out, other], {"defences": ["none", "clip", "dp", "cvb"]})
    assert drawn.missing == (
        ("clip", "failed: diverged in round 2"),
        ("dp", "not done yet"),
        ("cvb", "no attack applies: r-gap and analytic"),
    )


def test_an_attack_that_does_not_apply_leaves_no_doubt() -> None:
    info = trial(0, 0.8, 50, attack="r-gap").trial.info
    done = [Row(0, bare().trial), Row(1, trial(2, 0.8, 50).trial)]
    (drawn,) = charts(verdicts(done), (Trial(info | {"failed": "is no plain chain", "unfit": True}, []),), {})
    assert not spot(drawn, "dgp").may_leak_more


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real audit that follows a training, with a defence whose training diverges."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "little.toml").write_text(RUN)
    words = ["--defence", "none", "--defence", "topk(0.1, feedback=true)", "--defence", "gaussian(1e38)"]
    out = folder / "run"
    assert command(["audit", str(folder / "little.toml"), "--train", "--workers", "1", *words, "--out", str(out)]) == 1
    return out


def test_the_page_of_a_real_audit_has_the_charts_the_table_and_the_csv(audited: Path) -> None:
    run = load_run(audited)
    html = audit_page(run)
    text = read(html).text
    assert [drawn.group(1) for drawn in re.finditer(r'data-cost="(\w+)"', html)] == ["accuracy", "bytes", "seconds"]
    assert all(title in text for title in ("Leak against cost", "Worst round", "Untrained", "After 2 rounds"))
    assert "On the front: " in text
    (drawn,) = context(run)["fronts"]
    stored = json.loads((audited / "training" / "trials").glob("topk*.json").__next__().read_text())
    sparse = spot(drawn, "topk(0.1, feedback=true)")
    assert sparse.costs["accuracy"][0] == stored["accuracy"]
    assert sparse.costs["bytes"][0] == stored["bytes_up"]
    assert sparse.costs["seconds"][0] == stored["client_seconds"]
    assert sparse.name in drawn.worst.members["bytes"]
    assert "no formal guarantee" in text
    (address,) = [a for a in read(html).addresses if a.startswith("data:text/csv")]
    with urllib.request.urlopen(address) as answer:
        rows = list(csv.DictReader(io.StringIO(answer.read().decode("utf-8"))))
    assert {row["pareto"] for row in rows if row["defence"] == sparse.name} == {
        front_of(sparse.verdict.best, fronts_by_defence(context(run)["verdicts"]))
    }
    assert {row["final_accuracy"] for row in rows if row["defence"] == sparse.name} == {str(stored["accuracy"])}


def test_diverged_training_has_a_reason_at_every_round(audited: Path) -> None:
    (drawn,) = context(load_run(audited))["fronts"]
    lost = {each.stage for each in drawn.stages.get("gaussian(1e38)", {}).values()}
    assert lost == {0}
    assert not spot(drawn, "gaussian(1e38)").is_complete
    assert drawn.trail(spot(drawn, "gaussian(1e38)"))[1:] == ["no rate after 1 round", "no rate after 2 rounds"]
    text = read(audit_page(load_run(audited))).text
    assert "no rate after 2 rounds" in text
    assert "diverged in round 1" in text


def test_summaries_name_the_fronts(audited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["summary", str(audited), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    fronts_by_name = fronts_by_defence(context(load_run(audited))["verdicts"])
    assert {row["pareto"] for row in rows if row["failed"] is None} == set(fronts_by_name.values())
    assert {row["pareto"] for row in rows if row["failed"] is not None} == {None}
    assert command(["summary", str(audited), "--csv", "-"]) == 0
    assert "pareto" in capsys.readouterr().out.splitlines()[0].split(",")
