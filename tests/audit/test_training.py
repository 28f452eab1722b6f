"""Audits of the clients of a training: their own images, what they have kept, and the parameters of the round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.audit.attack_selection import TrialAddress, trials
from gradveil.audit.audit_config import RunConfig, TrainPlan
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import Truth, observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import TRAINING
from gradveil.audit.run_file import read, resolve
from gradveil.audit.sources import TrainingSource, training_config
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.federated.training_run import TRAINING_RUN, describe
from gradveil.federated.training_run import run as run_training
from gradveil.federated.training_setup import TrainingTrial
from gradveil.federated.training_state import Standing
from tests.audit.runs import without_times

TOPK = "topk(0.1, feedback=true)"
PLAN = {"clients": 3, "rounds": 2, "images": 60, "batch": 4, "server": {"lr": 0.3}}
"""Three clients of twenty images, who send two updates each."""
HEAD = ("head.weight", "head.bias")


def config(defence: str = TOPK, plan: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return resolve(
        {
            "name": "trained",
            "data": {"name": "digits", "size": 16},
            "model": {"name": "lenet-zhu"},
            "attacks": ["ig(iterations=4)"],
            "defences": [defence],
            "target_clients": 4,
            "precision": "float64",
            "train": {**PLAN, **(plan or {})},
            "control": False,
            **changes,
        }
    )


def test_a_control_attacks_clients_of_a_training_without_a_defence() -> None:
    chosen = config(control=True)
    assert [(trial.trained, trial.control) for trial in trials(chosen)] == [
        (n, c) for c in (False, True) for n in (0, 1, 2)
    ]
    assert training_config(chosen).defences == [TOPK, "none"]
    assert training_config(config()).defences == [TOPK]


def trained(folder: Path, **changes: Any) -> tuple[Experiment, TrainingSource, list[tuple[str, int]]]:
    """Train what is missing, and say which rounds that were."""
    experiment, told = open_experiment(config(**changes)).following(folder), list[tuple[str, int]]()
    assert isinstance(experiment.source, TrainingSource)
    assert experiment.config.train is not None

    setting = experiment.source.setting
    with TRAINING_RUN.opened(folder, describe(setting.config, "command")):
        run_training(
            setting,
            folder,
            lambda trial, record, status: told.append((trial.title, record.number)),
            at=experiment.config.train.stages,
        )
    return experiment, experiment.source, told


def stood(training: TrainingSource, defence: str, number: int) -> Standing:
    return training.standing(training.kept(defence, 0, number), defence, 0)


def seen(experiment: Experiment, trial: TrialAddress) -> tuple[Any, Truth, Any]:
    assert isinstance(experiment.source, TrainingSource)
    standing = stood(experiment.source, trial.defence, trial.trained or 0)
    client = experiment.client(trial.client, trial.defence, trial.seed, standing)
    (watched,), truth = observe(experiment, trial, client, range(4), standing)
    return watched, truth, client


def pixels(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images.float()}


def test_clients_are_looked_at_untrained_early_and_late():
    assert [trial.trained for trial in trials(config())] == [0, 1, 2]
    assert [trial.trained for trial in trials(config(plan={"audit_at": [2, 0]}))] == [0, 2]
    assert [trial.trained for trial in trials(config(train=None))] == [None]
    assert len({trial.id for trial in trials(config())}) == 3


@pytest.mark.parametrize("only", [None, ["head.*"]])
@pytest.mark.parametrize("defence", ["none", TOPK, "standin(adam)"])
def test_a_client_sends_what_it_would_in_the_next_round_of_the_training(
    tmp_path: Path, defence: str, only: list[str] | None
):
    experiment, training, _ = trained(tmp_path, defence=defence, client={"trainable": only})
    federation = training.setting.federation(TrainingTrial(defence, 0))
    for trial in trials(experiment.config)[1:]:
        watched, truth, client = seen(experiment, trial)
        standing = stood(training, defence, trial.trained or 0)
        assert len(standing.records) == trial.trained
        assert all(torch.equal(standing.params[name], value) for name, value in client.params().items())
        for target_client, owner in enumerate([0, 1, 2, 0]):
            example = Batch(truth.raw.inputs[target_client], truth.raw.targets[target_client])
            assert pixels(example.inputs) <= pixels(federation.shares[owner].train.inputs)
            sent, _ = federation.client.update(standing.params, example, {}, standing.clients[owner])
            assert sent.keys() == (experiment.client(0, defence, 0).params().keys() if only is None else {*HEAD})
            for name, value in sent.items():
                torch.testing.assert_close(watched.update[name][target_client], value)
        assert len(pixels(truth.raw.inputs.flatten(0, 1))) == 4


def test_before_the_first_round_the_model_is_that_of_an_audit_without_training(tmp_path: Path):
    experiment, _, _ = trained(tmp_path)
    watched, _, _ = seen(experiment, trials(experiment.config)[0])
    plain = open_experiment(config(train=None)).client(0, TOPK, 0).params()
    assert all(torch.equal(value, plain[name]) for name, value in watched.params.items())


def test_attackers_are_given_no_image_that_a_client_trains_on(tmp_path: Path):
    experiment, training, _ = trained(tmp_path)
    assert experiment.public is not None
    shares = training.setting.federation(TrainingTrial(TOPK, 0)).shares
    held = set[bytes]().union(*(pixels(share.train.inputs) for share in shares))
    assert len(held) == 60
    assert pixels(experiment.private.inputs) <= held
    assert not pixels(experiment.public.inputs) & held


def test_what_is_announced_before_a_round_follows_from_the_training(tmp_path: Path):
    text = "adgp(0.2, selection=previous)"
    experiment, training, _ = trained(tmp_path, defence=text)
    first, late = trials(experiment.config)[0], trials(experiment.config)[2]
    assert seen(experiment, first)[0].messages == {}
    heard, _ = training.setting.federation(TrainingTrial(text, 0)).announced(stood(training, text, 2), (0, 1, 2), 3)
    watched = seen(experiment, late)[0]
    assert watched.messages.keys() == heard.messages.keys() != set()
    assert all(torch.equal(watched.messages[name], value) for name, value in heard.messages.items())


def test_what_a_client_drew_in_its_first_round_is_the_truth_in_later_ones(tmp_path: Path):
    experiment, _, _ = trained(tmp_path, defence="keylock(width=4)", attacks=["ig(iterations=2)"])
    _, truth, _ = seen(experiment, trials(experiment.config)[2])
    kept = {name.removeprefix("kept."): value for name, value in truth.state.items() if name.startswith("kept.model")}
    assert kept
    assert bool((truth.state["kept.joined"] == 1).all())
    for name, value in kept.items():
        assert torch.equal(truth.noise[name], value)
        assert not torch.equal(value[0], value[1])
        assert torch.equal(value[0], value[3])  # target clients 0 and 3 are the same client


def test_nothing_is_trained_twice_and_a_round_that_is_gone_is_made_again(tmp_path: Path):
    _, training, told = trained(tmp_path)
    assert told == [(TOPK, 1), (TOPK, 2)]
    assert trained(tmp_path)[2] == []
    kept = list((tmp_path / "trials").glob("*.round-*.safetensors"))
    assert len(kept) == 3
    for number, again in ((2, [2]), (1, [1, 2]), (0, [])):
        before = stood(training, TOPK, number)
        next(file for file in kept if f"round-{number}." in file.name).unlink()
        with pytest.raises(GradveilError, match="is missing"):
            stood(training, TOPK, number)
        assert trained(tmp_path)[2] == [(TOPK, n) for n in again]
        after = stood(training, TOPK, number)
        assert all(torch.equal(after.params[name], value) for name, value in before.params.items())


def test_a_training_that_diverged_is_told_and_not_attacked(tmp_path: Path):
    _, training, _ = trained(tmp_path, defence="none", precision="float32", plan={"server": {"lr": 1e300}})
    assert len(stood(training, "none", 0).records) == 0
    with pytest.raises(GradveilError, match="diverged"):
        stood(training, "none", 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan": {"audit_at": [3]}}, "audits after round 3, and there are 2"),
        ({"target_clients": 100}, "the smallest has 20"),
        ({"client": {"batch": 2, "members": 2}}, "client.members"),
        (
            {"client": {"batch": 2, "trainable": ["*weight"]}, "plan": {"trainable": ["head.*"]}},
            "client.trainable: is *weight, and clients of the training send head.*",
        ),
        ({"plan": {"trainable": ["head.*"]}}, "client.trainable: is all, and clients of the training send head.*"),
        (
            {"plan": {"batch": None, "local": {"lr": 0.1, "epochs": 1, "batch": 4}}},
            f"client.local: '{TOPK}' keeps something from round to round",
        ),
        ({"plan": {"cleints": 3}}, "train.cleints: is not a setting -> did you mean 'clients'"),
        ({"plan": {"images": 2}}, "clients"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(changes: dict[str, Any], told: str):
    with pytest.raises(GradveilError) as caught:
        open_experiment(config(**changes))
    assert told in str(caught.value)


def test_a_defence_that_keeps_nothing_may_be_trained_in_another_way():
    other = {"batch": None, "local": {"lr": 0.1, "epochs": 1, "batch": 4}}
    assert isinstance(open_experiment(config("topk(0.1)", plan=other)).source, TrainingSource)


def test_clients_train_as_the_audited_one_does_unless_the_plan_says_otherwise():
    own = {"batch": 4, "local": {"lr": 0.25, "steps": 2, "batch": 2}}
    local = training_config(config(client=own)).local
    assert local is not None
    assert (local.lr, local.steps) == (0.25, 2)
    other = training_config(config(client=own, plan={"local": {"lr": 0.5, "epochs": 1}})).local
    assert other is not None
    assert other.lr == 0.5


RUN = """
name = "little"
target_clients = 2
attacks = ["ig(iterations=4)"]
defences = ["none", "topk(0.1, feedback=true)"]
data = { name = "digits", size = 16 }
model = { name = "lenet-zhu" }
train = { clients = 3, rounds = 2, images = 60, batch = 4 }
"""


def test_a_plan_trains_only_where_that_is_asked_for(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text(RUN)
    assert read(str(file)).train is None
    assert read(str(file), train=True).train == TrainPlan(clients=3, rounds=2, images=60, batch=4)
    assert read("digits", train=True).train == TrainPlan()
    with pytest.raises(GradveilError, match="add --train"):
        read(str(file), {}, ["train.rounds=3"])


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"partition": {"concentration": 0.5}}, "^train.partition.concentration: has no effect"),
        ({"batch": 21}, "^train.batch: is 21, and the client with the most has 20 examples"),
        ({"clients": 61}, "^train.clients: 60 examples cannot give 61 clients"),
    ],
)
def test_what_is_wrong_with_a_plan_is_told_by_its_place_in_the_file(plan: dict[str, Any], told: str):
    with pytest.raises(GradveilError, match=told):
        open_experiment(config(plan=plan))


def test_the_command_trains_attacks_and_tells_accuracy_and_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "little.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    words = ["audit", "little.toml", "--train", "--json"]
    assert run([*words, "--workers", "1"]) == 0
    out, told = capsys.readouterr()
    assert "topk(0.1, feedback=true), seed 0: round 2 of 2, accuracy" in told
    assert "against none, seed 0, after 2 rounds" in told
    rows = json.loads(out)["trials"]
    wanted = [(defence, number) for defence in ("none", TOPK) for number in (0, 1, 2)]
    assert sorted((row["defence"], row["trained"]) for row in rows) == wanted
    bare = [row for row in rows if row["defence"] == "none"]
    (summary,) = (Path("runs/little") / TRAINING / "trials").glob("none-*.json")
    curve = json.loads(summary.read_text())
    assert [row["accuracy"] for row in bare] == [point["accuracy"] for point in (curve["start"], *curve["curve"])]
    assert {row["round_bytes_up"] for row in bare} == {curve["bytes_up"]}
    assert next(row["round_bytes_up"] for row in rows if row["defence"] == TOPK) < 0.3 * curve["bytes_up"]
    assert run([*words, "--fail-above", "0", "--accept", "not-tested", "--accept", "few-images"]) == 0
    assert "passed. Of 3 settings the least certain is" in capsys.readouterr().err
    assert run([*words, "--fail-above", "0"]) == 1
    assert "topk(0.1, feedback=true) (gradient, after 2 rounds) is not tested." in capsys.readouterr().err
    assert run(["summary", "runs/little", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "clients of a training, attacked before it, after 1 round and after 2 rounds" in " ".join(shown.split())
    assert "received" in shown
    words += ["--out", "runs/little"]
    assert run([*words, "--set", "train.rounds=3"]) == 2
    assert "train.rounds (2 there, 3 now)" in capsys.readouterr().err
    fewer = ["--set", "train.rounds=1", "--defence", "none", "--workers", "1"]
    assert run([*words, "--fresh", *fewer]) == 0
    assert [row["trained"] for row in json.loads(capsys.readouterr().out)["trials"]] == [0, 1]


@pytest.mark.processes
def test_processes_and_shares_attack_the_same_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With what they have kept. How many target clients are computed at once moves the last bits of what they send."""
    (tmp_path / "little.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    found = []
    for workers in ("1", "2"):
        words = [
            "--defence",
            TOPK,
            "--set",
            "train.audit_at=[2]",
            "--workers",
            workers,
            "--out",
            workers,
            "--no-control",
        ]
        assert run(["audit", "little.toml", "--train", "--json", *words]) == 0
        found.append(without_times(json.loads(capsys.readouterr().out)["trials"]))
    whole, divided = ({key: value for key, value in row.items() if "round_" not in key} for (row,) in found)
    sent = ("distance", "first_order_utility", "second_order_utility")
    assert [divided.pop(name) for name in sent] == pytest.approx([whole.pop(name) for name in sent], rel=1e-6)
    assert divided == whole
