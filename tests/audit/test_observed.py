"""Recorded updates: attacked as simulated ones are, scored where that is possible, and what does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_run import describe
from gradveil.audit.display import result_table
from gradveil.audit.findings import findings
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recorded.recorded_attack import recover_observed
from gradveil.audit.recorded.recorded_updates import Observed
from gradveil.audit.result_rows import BASELINES
from gradveil.audit.run_directory import load_run
from gradveil.audit.trial import recover
from gradveil.core.errors import GradveilError
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.update_records import UpdateRecorder
from gradveil.metrics import ssim
from tests.audit.recording import UNSEEN, record, simulated, watching
from tests.audit.runs import config, execute, legend


def refused(pattern: str, folder: Path, **changes: Any) -> None:
    with pytest.raises(GradveilError, match=pattern):
        open_experiment(watching(folder, **changes))


@pytest.mark.parametrize("defence", ["none", "prune(0.9)"])
@pytest.mark.parametrize("local", [None, {"lr": 0.1, "steps": 1}])
def test_a_record_of_a_simulated_client_is_attacked_as_the_client_is(tmp_path: Path, defence: str, local: Any) -> None:
    experiment = simulated(defences=[defence], client={"batch": 2, "local": local})
    record(experiment, tmp_path, truth=True)
    watched = open_experiment(watching(tmp_path))
    one, other = (
        (recover(experiment, trials(experiment.config)[0], range(2), print)),
        (recover_observed(watched, trials(watched.config)[0], range(2), print)),
    )
    assert watched.config.defences == [defence]
    for name in ("inputs", "targets", "objective", "initial", "bytes_sent"):
        assert torch.equal(one.tensors[name], other.tensors[name]), name
    for name in ("at_truth", "distance", "cosine"):  # sums over a batch in another order
        torch.testing.assert_close(one.tensors[name], other.tensors[name].to(one.tensors[name]), atol=1e-6, rtol=1e-5)


def test_what_was_drawn_in_secret_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    record(simulated(defences=["gaussian(0.1)"]), tmp_path / "noise", truth=True)
    watched = open_experiment(
        watching(tmp_path / "noise", attacks=["ig(simulated_client=full, labels=restore, iterations=2)"])
    )
    found = recover_observed(watched, trials(watched.config)[0], range(2), print).tensors
    assert bool(found["at_truth"].isnan().all())
    assert bool((found["distance"] > 0.1).all())  # the update without a defence is determined by the examples
    record(simulated(client={"batch": 3, "local": {"lr": 0.1, "steps": 2, "batch": 1}}), tmp_path / "order", truth=True)
    watched = open_experiment(watching(tmp_path / "order"))
    found = recover_observed(watched, trials(watched.config)[0], range(2), print).tensors
    assert bool(found["distance"].isnan().all())


def test_an_image_comes_back_from_a_record_that_does_not_hold_it(tmp_path: Path) -> None:
    experiment = record(simulated(target_clients=1), tmp_path / "seen")
    quick = "ig(labels=restore, iterations=300)"
    mean, std = [list(values) for values in (experiment.private.mean, experiment.private.std)]
    told = watching(tmp_path / "seen", data={**UNSEEN, "mean": mean, "std": std}, attacks=[quick])
    run, _ = execute(told, tmp_path / "run")
    images = run.trials[0].images()
    assert images is not None
    assert images.keys() == {"reconstruction"}
    places = experiment.examples(0, range(1))
    assert float(ssim(images["reconstruction"].double(), experiment.private.views[places].double())) > 0.9
    assert run.trials[0].records[0]["predicted"] == experiment.private.targets[places[0]].tolist()


def test_without_the_truth_there_is_no_score_and_it_is_said(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen")
    run, display = execute(watching(tmp_path / "seen", data=UNSEEN), tmp_path / "run")
    trial = run.trials[0]
    assert trial.unscored is not None
    assert trial.failed is None
    assert display.finished[0].info["controls"] == {}
    assert not {"success", "ssim", "label", "per_image"} & trial.records[0].keys()
    assert trial.records[0]["objective"] < trial.records[0]["initial"]
    summary = findings(run.trials).trials[0]
    assert summary["asr"] is None
    assert summary["ssim_mean"] is None
    assert summary["attack_check"] == "no ground truth"
    console = Console(width=160, color_system=None)
    with console.capture() as shown:
        console.print(result_table(run.trials), legend(run.trials, run.info["config"]))
    assert "No score: the private examples were not recorded" in shown.get()
    assert "Recovered: SSIM" not in shown.get()
    assert load_run(tmp_path / "run").trials[0].records == trial.records


def test_with_the_truth_everything_is_scored(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen", truth=True)
    run, _ = execute(watching(tmp_path / "seen"), tmp_path / "run")
    assert run.trials[0].unscored is None
    assert {"wrong_target_client", *BASELINES} <= run.trials[0].info["controls"].keys()
    assert findings(run.trials).trials[0]["ssim_mean"] is not None
    assert [told["client"] for told in run.trials[0].info["observed"]] == ["0", "1"]


def test_updates_of_several_models_are_attacked_each_from_its_own(tmp_path: Path) -> None:
    for number, seed in ((1, 0), (2, 5)):
        record(simulated(seeds=[seed]), tmp_path / "seen", number=number, truth=True)
    watched = open_experiment(watching(tmp_path / "seen", attacks=["ig(labels=restore, tv=0, iterations=2)"]))
    assert isinstance(watched.source, Observed)
    assert list(watched.source.together(range(4), 0)) == [range(2), range(2, 4)]
    assert list(watched.source.together(range(1, 3), 0)) == [range(1, 2), range(2, 3)]
    assert list(watched.source.together(range(3), 1)) == [range(1), range(1, 3)]
    for some in (range(2), range(2, 4)):  # nothing but its own model explains an update
        found = recover_observed(watched, trials(watched.config)[0], some, print)
        assert bool((found.tensors["at_truth"] < 1e-6).all())
    run, _ = execute(watched.config, tmp_path / "run")
    assert len(run.trials[0].records) == 4
    assert [told["round"] for told in run.trials[0].info["observed"]] == [1, 1, 2, 2]


def test_the_run_is_filled_in_from_the_records_and_what_it_says_itself_wins(tmp_path: Path) -> None:
    local = LocalConfig(lr=0.1, steps=1, batch=3)
    record(simulated(client={"batch": 3, "local": {"lr": 0.1, "steps": 1, "batch": 3}}, target_clients=3), tmp_path)
    told = watching(tmp_path)
    assert (told.client[0].batch, told.client[0].local, told.defences, told.target_clients) == (3, local, ["none"], 3)
    other = {"batch": 2, "local": {"lr": 0.5, "epochs": 1}}
    told = watching(tmp_path, client=other, defences=["prune(0.5)", "dp"], target_clients=2, first_target_client=2)
    assert (told.client[0].batch, told.client[0].local) == (2, LocalConfig(lr=0.5, epochs=1))
    assert (told.defences, told.target_clients) == (["prune(0.5)", "dp"], 1)
    refused("first_target_client: is 3", tmp_path, first_target_client=3)


def test_records_that_do_not_go_together_are_refused_with_every_reason(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    record(simulated(), one)
    record(simulated(client={"batch": 3}, target_clients=1), one, number=2, run="other", defence="prune(0.5)")
    refused(r"(?s)updates of 2 trainings: '' \(none\) and 'other' \(prune\(0.5\)\).*1 and 3 examples", one)
    refused(r"1 and 3 examples.* -> choose clients of one number: --set 'observed.clients=\[", one)
    assert len(open_experiment(watching(one, observed={"folder": str(one), "runs": ["other"]})).private) == 3
    UpdateRecorder(two, sends="difference", defence="prume").write(1, "a", {"w": torch.ones(2)}, {"w": torch.ones(2)})
    refused("(?s)client.batch: is in no record.*client.local: is not known.*recorded defence 'prume'", two)
    refused("client.local: is given", one, client={"local": {"lr": 1.0, "steps": 1}}, observed={"folder": str(one)})
    refused("rounds: is more than 1", one, rounds=2)


def test_another_architecture_is_told_tensor_by_tensor(tmp_path: Path) -> None:
    record(simulated(), tmp_path)
    refused(r"recorded model, .*weight: is missing, the model has", tmp_path, model={"name": "cnn6"})
    refused(r"recorded model, .*: is \(2, \d+\), the model has \(7, \d+\)", tmp_path, data={**UNSEEN, "classes": 7})
    refused(r"data.channels: is not said", tmp_path, data={"name": "unseen", "classes": 7})
    frozen = {"trainable": ["*bias"]}
    refused("is sent, and not trained here", tmp_path, client=frozen)


def test_data_that_are_not_here_need_records(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="the data 'faces' have their own classes"):
        config(data={"name": "faces", "classes": 3})
    with pytest.raises(GradveilError, match=r"data\.name: 'unseen' are no data"):
        config(data=UNSEEN)
    with pytest.raises(GradveilError, match="mean and std go together"):
        config(data={"name": "faces", "mean": [0.5]})


def test_a_truth_outside_of_the_range_asks_for_mean_and_std(tmp_path: Path) -> None:
    record(simulated(), tmp_path, truth=True)
    refused(r"recorded truth: .*say data\.mean and data\.std", tmp_path, data=UNSEEN)
    refused(r"recorded truth of client '1', round 1: are \(1, 16, 16\), the run's images \(3, 16, 16\)", tmp_path,
            data={**UNSEEN, "channels": 3}, model={"name": "lenet-zhu"})  # fmt: skip


@pytest.mark.parametrize("attack", ["ig", "ig(order=told, labels=restore)", "cdia(labels=given)"])
def test_an_attack_that_wants_to_be_told_secrets_is_refused(tmp_path: Path, attack: str) -> None:
    record(simulated(client={"batch": 2, "local": {"lr": 0.1, "steps": 2, "batch": 1}}), tmp_path)
    refused("recorded", tmp_path, attacks=[attack])


def test_other_records_are_another_run(tmp_path: Path) -> None:
    hashes = set()
    for by in (1.0, 2.0):
        record(simulated(), tmp_path, lambda update, by=by: {name: by * value for name, value in update.items()})
        told = open_experiment(watching(tmp_path))
        hashes.add(describe(told.config, 1, "", told.held)["config_hash"])
    assert len(hashes) == 2


def test_the_truth_decides_scores_only(tmp_path: Path) -> None:
    """An attack finds the same whether or not the truth was recorded: it is never told."""
    found = []
    for truth in (False, True):
        record(simulated(), tmp_path / str(truth), truth=truth)
        watched = open_experiment(watching(tmp_path / str(truth)))
        found.append(recover_observed(watched, trials(watched.config)[0], range(2), print).tensors["inputs"])
    assert torch.equal(*found)
