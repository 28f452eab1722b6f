"""What an update is worth and what pruning leaves out: as in plain autograd, and only where it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil.audit.attack_selection import trials
from gradveil.audit.result_rows import summarise
from gradveil.audit.trial import left_out, pruned, recover, worth
from gradveil.cli.run_results import as_csv
from gradveil.core.tree import tmap
from gradveil.defences import parse
from gradveil.report import audit_page
from gradveil.theory.gradient_pruning import gamma, least_gamma
from tests.audit.runs import config, execute
from tests.audit.test_trial import Recorder, experiment_with
from tests.laws.cases import CLIENTS

DEFENCES = ["none", "dgp(feedback=false)", "dgp", "prune(0.9)", "gaussian(0.1)", "clip(norm=0.5) + dgp"]


@pytest.mark.parametrize("defence", DEFENCES)
def test_facts_are_those_of_the_raw_gradient(defence: str):
    attack = Recorder()
    experiment = experiment_with(attack, defences=[defence])
    address = trials(experiment.config)[0]
    found = recover(experiment, address, range(2), lambda step: None)
    seen = attack.calls[0]["seen"][-1]
    batch, model = experiment.batch(experiment.examples(0, range(2))), experiment.undefended(0, 0).model
    for v in range(2):
        loss = torch.nn.functional.cross_entropy(model(batch.inputs[v]), batch.targets[v])
        g = dict(zip(seen.params, torch.autograd.grad(loss, [*model.parameters()]), strict=True))
        sent = {name: value[v] for name, value in seen.update.items()}
        length = sum(float((value**2).sum()) for value in g.values())
        first = sum(float((g[name] * sent[name]).sum()) for name in g) / length
        assert float(found.tensors["first_order_utility"][v]) == pytest.approx(first, rel=1e-4)
        assert float(found.tensors["second_order_utility"][v]) == pytest.approx(-(first**2), rel=1e-4)
        if defence in ("dgp(feedback=false)", "dgp", "prune(0.9)"):
            told = left_out(found.tensors["distance"][v], found.facts["pruned"])
            assert told is not None
            assert told["gamma"] == pytest.approx(float(gamma(g, sent)), rel=1e-4) == pytest.approx(1 - first, rel=1e-4)
            cosine = float(found.tensors["cosine"][v])
            assert told["worst"] == pytest.approx(1 - cosine, rel=1e-4)
            assert told["worst"] < told["promised"] == pytest.approx(told["gamma"] ** 0.5)
        else:
            assert found.facts["pruned"] is None


def test_it_is_told_where_a_client_prunes_and_does_nothing_else():
    client = CLIENTS["gradient"]
    printed, least = least_gamma(0.05, 0.75)
    for text in ("dgp", "dgp(feedback=false)"):
        assert pruned(parse(text)(client)) == {"least": least, "gamma_1_assumed": printed}, text
    for text in ("prune(0.5)", "topk(0.2)", "dropout + prune(0.5)", "adgp", "optimal-prune(0.5)"):
        assert pruned(parse(text)(client)) == {}, text
    noisy = ("gaussian(1)", "dgp + gaussian(1)", "dp + dgp", "optimal-prune(0.5, std=0.1)")
    for text in ("none", "mixup + dgp", "dgc", *noisy):
        assert pruned(parse(text)(client)) is None, text


@pytest.mark.parametrize("defence", ["dgp", "adgp", "topk(0.2, feedback=true)", "dgp(feedback=false)"])
def test_with_feedback_the_share_of_update_and_residual_is_measured_round_by_round(defence: str):
    attack = Recorder()
    experiment = experiment_with(attack, defences=[defence], rounds=3)
    facts = recover(experiment, trials(experiment.config)[0], range(2), lambda step: None).facts
    held = facts["held_back"]
    if defence == "dgp(feedback=false)":
        assert held == []
        return
    assert len(held) == 3
    assert all(0 < each["gamma"] < 1 for each in held)
    assert all(each["residual"] > 0 for each in held)
    told = left_out(torch.ones(2), facts["pruned"], held)
    assert told is not None
    assert (told["gamma"], told["residual"]) == (held[2]["gamma"], held[2]["residual"])
    assert "worst" not in told


def test_the_error_of_proposition_1_stands_beside_the_measured_one(tmp_path: Path):
    chosen = config(attacks=["ig(iterations=2)", "cdia(iterations=2)"], defences=["dgp", "prune(0.5)"])
    found, _ = execute(chosen, tmp_path / "run")
    rows = {(row["defence"], row["attack"].partition("(")[0]): row for row in map(summarise, found.trials)}
    assert rows["dgp", "ig"]["mse_taylor"] == rows["dgp", "cdia"]["mse_taylor"] > 0
    records = next(trial.records for trial in found.trials if trial.info["defence"] == "dgp")
    below = sum(record["mse"] < record["mse_taylor"] for record in records)
    assert rows["dgp", "ig"]["below_taylor"] == below
    assert rows["prune(0.5)", "ig"]["below_taylor"] is None
    html = audit_page(found)
    assert html.count("Proposition 1 of Xue et al. 2024") >= 1
    assert 'data-key="mse_taylor"' in html


def test_noise_lowers_the_second_order_utility():
    experiment = experiment_with(Recorder(), defences=["gaussian(0.5)"], target_clients=16)
    tensors = recover(experiment, trials(experiment.config)[0], range(16), lambda step: None).tensors
    first, second = tensors["first_order_utility"], tensors["second_order_utility"]
    assert float(second.mean()) < -(float(first.mean()) ** 2) - 0.5 * float(first.var())


def test_summary_table_and_verdict_tell_it(tmp_path: Path):
    chosen = config(attacks=["ig(iterations=2)"], defences=["none", "dgp", "gaussian(0.1)", "prune(0.5)"])
    found, _ = execute(chosen, tmp_path / "run")
    rows = {row["defence"]: row for row in map(summarise, found.trials)}
    assert rows["none"]["first_order_utility"] == pytest.approx(1)
    assert rows["none"]["second_order_utility"] == pytest.approx(-1)
    assert rows["dgp"]["gamma_1"] == pytest.approx(1 - rows["dgp"]["first_order_utility"], rel=1e-4)
    assert rows["gaussian(0.1)"]["gamma_1"] is None
    head = as_csv([*rows.values()]).splitlines()[0].split(",")
    assert {"first_order_utility", "second_order_utility", "gamma_1", "cosine_worst", "cosine_promised"} <= {*head}
    records = found.trials[1].records
    assert [record["first_order_utility"] for record in records] == pytest.approx(
        [1 - record["distance"] ** 2 for record in records], rel=1e-4
    )
    html = audit_page(found)
    assert html.count("<dt>first-order utility</dt>") == 3
    told = "of the update's energy (gamma_1; for whole numbers of entries at least 20%, of which Assumption 1 of "
    assert html.count(told + "Xue et al. 2024 says more than 0.0358%)") == 1
    assert html.count("of the update's energy (gamma_1)") == 1
    assert rows["dgp"]["gamma_1_assumed"] == pytest.approx(3.583e-4, rel=1e-3)
    assert rows["dgp"]["gamma_1_assumed"] < rows["dgp"]["gamma_1_least"] == pytest.approx(0.2)
    assert rows["prune(0.5)"]["gamma_1_assumed"] is None
    assert {"gamma_1_assumed", "gamma_1_least"} <= {*head}
    assert all(f'data-key="{key}"' in html for key in ("first_order_utility", "gamma_1", "cosine_worst"))


def test_an_update_of_zeros_is_worth_no_number():
    raw = {"w": torch.tensor([[0.0, 0.0], [3.0, 4.0]])}
    found = worth(tmap(lambda value: 2 * value, raw), raw)["first_order_utility"]
    assert found[0].isnan()
    assert float(found[1]) == 2
