"""Trainings as a run file says them."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.audit.run_file import read_training
from gradveil.core.errors import GradveilError
from gradveil.federated.engine import Federation, train
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.training_groups import group_trainings
from gradveil.federated.training_run import (
    TRAINING_RUN,
    describe,
    identity,
    load_summaries,
    load_training,
    run,
    summarise,
)
from gradveil.federated.training_setup import open_setting, trials
from gradveil.federated.training_state import load_standing
from gradveil.nn.weight_files import read_weights

FEW = ["data.public=80", "data.gallery=40", "data.size=16", "clients=3", "model.name=lenet-zhu", "local.batch=8"]


def config(*settings, **overrides):
    return read_training("digits", {"rounds": 2, "defences": ["none"], **overrides}, [*FEW, *settings])


def trained(folder, setting, info=None, fresh=False):
    seen = []
    with TRAINING_RUN.opened(folder, info or describe(setting.config, "command"), fresh):
        summaries = run(setting, folder, lambda trial, record, status: seen.append((trial.title, record.number)))
    return summaries, seen


def timeless(summary):
    """A summary without what the clock decides."""
    clock = {"seconds": 0, "client_seconds": 0}
    return {**summary, **clock, "curve": [{**point, **clock} for point in summary["curve"]]}


PARTITIONS = {
    "iid": [],
    "dirichlet": [],
    "pathological": [],
    "column": ["partition.column=label"],
    "flwr": ["partition.partitioner=LinearPartitioner"],
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_hands_assign_each_image_once(kind):
    setting = open_setting(config(f"partition.kind={kind}", "validation=0.2", "local.batch=1", *PARTITIONS[kind]))
    shares = setting.federation(trials(setting.config)[0]).shares
    images = torch.cat([b.inputs for share in shares for b in (share.train, share.validation) if b is not None])
    everything = setting.data.public.inputs
    assert len(images) == len(everything)
    assert torch.equal(images.flatten(1).sum(1).sort().values, everything.flatten(1).sum(1).sort().values)
    for share in shares:
        whole = len(share.train.targets) + len(share.validation.targets)
        assert len(share.validation.targets) == round(0.2 * whole)
    if kind == "column":
        owners = [set(share.train.targets.tolist()) for share in shares]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 10
    if kind == "pathological":
        assert max(len(share.train.targets.unique()) for share in shares) <= 10


def test_federation_depends_on_the_seed_not_the_defence():
    setting = open_setting(config(defences=["none", "dgp"], seeds=[0, 1]))
    plain, pruned, other, _ = (setting.federation(trial) for trial in trials(setting.config))
    assert torch.equal(plain.shares[1].train.inputs, pruned.shares[1].train.inputs)
    assert not torch.equal(plain.shares[1].train.inputs[:5], other.shares[1].train.inputs[:5])
    weights = [experiment.client.params() for experiment in (plain, pruned, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(torch.equal(weights[0][name], weights[2][name]) for name in weights[0] if "weight" in name)
    assert plain.chosen(3) == pruned.chosen(3)


def test_training_on_private_images_measures_them():
    """The images that an audit attacks: a training's loss is then theirs."""
    setting = open_setting(config("data.train_on=private"))
    federation = setting.federation(trials(setting.config)[0])
    trained_on = torch.cat([share.train.inputs for share in federation.shares])
    held = {image.numpy().tobytes() for image in federation.test.inputs}
    assert len(held) == 40
    assert {image.numpy().tobytes() for image in trained_on} <= held
    usual = config()
    assert usual.digest() != setting.config.digest()
    assert "train_on" not in usual.resolved()["data"]
    with pytest.raises(GradveilError, match=r"partition\.column"):
        open_setting(config("data.train_on=private", "partition.kind=column", "partition.column=label"))


def test_central_training_has_all_examples():
    setting = open_setting(config("central=true", "participation=0.5", "absent=0.2"))
    central, federated = (setting.federation(trial) for trial in trials(setting.config))
    assert len(central.shares) == 1
    assert len(central.shares[0].train.targets) == sum(len(share.train.targets) for share in federated.shares)
    assert len(central.shares[0].validation.targets) == sum(len(s.validation.targets) for s in federated.shares)
    assert central.chosen(1) == ((0,), ())


def test_central_training_ignores_the_server_optimiser():
    """It is what federation is measured by: neither a server's short steps nor its one huge batch may hold it back."""
    setting = open_setting(config("central=true", "server.optimiser=adam", "local.epochs=1", "local.batch="))
    central, federated = (setting.federation(trial) for trial in trials(setting.config))
    assert (central.server.optimiser, central.server.lr) == ("sgd", 1.0)
    assert federated.server.optimiser == "adam"
    assert central.client.local.batch == federated.client.local.batch
    assert central.client.local.batch <= min(len(share.train.targets) for share in federated.shares)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological"])
def test_local_batch_defaults_to_the_smallest_client(kind):
    plain = config(f"partition.kind={kind}")
    setting = open_setting(plain.model_copy(update={"local": LocalConfig(lr=0.01, epochs=1)}))
    experiment = setting.federation(trials(setting.config)[0])
    assert experiment.client.local.batch == min(len(share.train.targets) for share in experiment.shares)


def test_run_with_more_rounds_continues(tmp_path):
    short = open_setting(config())
    _, seen = trained(tmp_path / "a", short)
    assert seen == [("none", 1), ("none", 2)]
    longer = open_setting(config(rounds=3))
    summaries, seen = trained(tmp_path / "a", longer)
    assert seen == [("none", 3)]
    whole, _ = trained(tmp_path / "b", longer)
    assert timeless(summaries[0]) == timeless(whole[0])
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_run_resumes_with_another_value_of_together(tmp_path):
    """It changes nothing but rounding, as the number of threads does."""
    settings = ([], ["together=true"], ["together=false"])
    opened = [open_setting(config("local.batch=4", *more, rounds=2 + i)) for i, more in enumerate(settings)]
    assert [setting.federation(trials(setting.config)[0]).together for setting in opened] == ["auto", True, False]
    assert len({setting.config.digest() for setting in opened}) == 1
    for i, setting in enumerate(opened):
        (summary,), _ = trained(tmp_path / "a", setting)
        assert summary["rounds"] == 2 + i
    with pytest.raises(GradveilError, match="together"):
        config("together=maybe")


def test_run_failed_trial_has_a_status_and_others_finish(tmp_path, monkeypatch):
    setting = open_setting(config(defences=["none", "topk(0.1)"], rounds=2))
    rounds = Federation.round

    def fails(experiment, standing):
        if len(standing.records) == 1 and experiment.client.send is not None:
            raise MemoryError("no room")
        return rounds(experiment, standing)

    monkeypatch.setattr(Federation, "round", fails)
    summaries, _ = trained(tmp_path / "a", setting)
    assert [row["status"] for row in summaries] == ["finished", "failed"]
    assert summaries[0].get("failed") is None
    assert re.fullmatch(r"MemoryError: no room \(test_run\.py, line \d+\)", summaries[1]["failed"])
    bare, failed = group_trainings(load_training(tmp_path / "a").trials)
    assert [len(kind.completed) for kind in (bare, failed)] == [1, 0]
    assert failed.mean("accuracy") is None
    monkeypatch.undo()
    again, more = trained(tmp_path / "a", setting)
    assert more == [("topk(0.1)", 2)]
    assert timeless(again[1]) == timeless(trained(tmp_path / "b", setting)[0][1])


def test_run_reports_every_damaged_file_before_training(tmp_path):
    setting = open_setting(config(defences=["none", "topk(0.1)"], rounds=1))
    trained(tmp_path / "a", setting)
    for file in (tmp_path / "a" / "trials").glob("*.safetensors"):
        file.write_bytes(b"x")
    with pytest.raises(GradveilError) as caught:
        trained(tmp_path / "a", setting)
    assert len(caught.value.problems) == 2


def test_run_with_fewer_rounds_finishes_a_stopped_training(tmp_path):
    setting = open_setting(config(rounds=3))
    info, trial = describe(setting.config, "command"), trials(setting.config)[0]

    def stop(_, record, status):
        if record.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TRAINING_RUN.opened(tmp_path / "a", info):
        run(setting, tmp_path / "a", stop)
    file = tmp_path / "a" / "trials" / f"{trial.id}.safetensors"
    assert load_standing(file, identity(setting, trial)).status == "running"
    summaries, seen = trained(tmp_path / "a", open_setting(config(rounds=1)))
    assert [(row["status"], row["rounds"]) for row in summaries] == [("finished", 2)]
    assert seen == []
    summaries, seen = trained(tmp_path / "a", setting)
    assert (summaries[0]["status"], seen) == ("finished", [("none", 3)])


def test_run_epsilon_counts_trained_rounds(tmp_path):
    """What was sent stays sent: a summary that was written anew told the epsilon of the fewer rounds."""
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    private = {"defences": ["dp(clip=1, sigma=16)"]}
    (after_two,), _ = trained(tmp_path / "a", open_setting(config(rounds=2, **private)))
    (asked_for_one,), seen = trained(tmp_path / "a", open_setting(config(rounds=1, **private)))
    assert (asked_for_one["rounds"], seen) == (2, [])
    assert asked_for_one["epsilon"] == after_two["epsilon"]
    assert asked_for_one["guarantee"] == after_two["guarantee"]


def test_training_without_an_accountant_fails_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    private = {"defences": ["none", "dp(clip=1, sigma=17)"]}
    summaries, seen = trained(tmp_path / "a", open_setting(config(rounds=1, **private)))
    assert [row["status"] for row in summaries] == ["finished", "failed"]
    assert seen == [("none", 1)]
    assert 'pip install "gradveil[dp]"' in summaries[1]["failed"]


def test_run_epsilon_counts_planned_rounds(tmp_path):
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    private = {"defences": ["dp(clip=1, sigma=16)"]}
    (whole,), _ = trained(tmp_path / "a", open_setting(config(rounds=4, **private)))
    setting = open_setting(config(rounds=4, **private))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TRAINING_RUN.opened(tmp_path / "b", describe(setting.config, "command")):
        run(setting, tmp_path / "b", stop)
    (shorter,), seen = trained(tmp_path / "b", open_setting(config(rounds=2, **private)))
    assert (shorter["rounds"], [number for _, number in seen]) == (2, [2])
    assert shorter["epsilon"] == whole["epsilon"]
    (planned_so,), _ = trained(tmp_path / "c", open_setting(config(rounds=2, **private)))
    assert planned_so["epsilon"]["example"] < whole["epsilon"]["example"]


def test_identity_depends_on_initial_weights(tmp_path):
    opened = open_setting(config())
    trial = trials(opened.config)[0]
    with_weights = [replace(opened, weights={"w": torch.full((2,), value)}) for value in (0.0, 1.0)]
    assert len({identity(setting, trial) for setting in (opened, *with_weights)}) == 3


def test_run_with_other_settings_raises_until_fresh(tmp_path):
    trained(tmp_path / "a", open_setting(config(rounds=1)))
    other = open_setting(config("local.lr=0.5", rounds=1))
    with pytest.raises(GradveilError, match=r"local.lr \(.* there, 0.5 now\)"):
        trained(tmp_path / "a", other)
    _, seen = trained(tmp_path / "a", other, fresh=True)
    assert seen == [("none", 1)]


def test_run_grows_by_defences_seeds_and_central(tmp_path):
    """What is trained stays, and what is new is as in a training that had it from the start."""
    few, more = config(), config("central=true", defences=["clip(1)", "none"], seeds=[0, 1])
    trained(tmp_path / "a", open_setting(few))
    grown, seen = trained(tmp_path / "a", open_setting(more))
    assert sorted(set(seen)) == [(title, number) for title in ("central", "clip(1)", "none") for number in (1, 2)]
    assert len(seen) == 10, "five new trainings of two rounds"
    whole, _ = trained(tmp_path / "b", open_setting(more))
    assert [timeless(row) for row in grown] == [timeless(row) for row in whole]
    with pytest.raises(GradveilError, match="central") as caught:
        trained(tmp_path / "a", open_setting(few))
    assert "defences (without clip(1))" in str(caught.value)


@pytest.mark.parametrize("message", ["{}", '{"config": 3, "trials": []}', "[", '{"config": {}, "trials": []}'])
def test_run_with_a_damaged_file_raises_and_keeps_it(tmp_path, message):
    trained(tmp_path / "a", open_setting(config(rounds=1)))
    (tmp_path / "a" / "train.json").write_text(message)
    with pytest.raises(GradveilError, match="--fresh"):
        trained(tmp_path / "a", open_setting(config(rounds=1)))
    assert (tmp_path / "a" / "train.json").read_text() == message


def test_run_in_a_folder_of_other_files_raises(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(GradveilError, match="holds other files"),
        TRAINING_RUN.opened(tmp_path, {"config_hash": ""}, fresh=True),
    ):
        pass
    assert (tmp_path / "thesis.tex").is_file()


@pytest.mark.parametrize("position", ["file/run", 300 * "a"])
def test_run_in_an_impossible_folder_raises(tmp_path, position):
    (tmp_path / "file").touch()
    with pytest.raises(GradveilError, match="cannot be made"):
        trained(tmp_path / position, open_setting(config(rounds=1)))


def test_summaries_list_each_seed(tmp_path):
    setting = open_setting(config(rounds=1, seeds=[0, 1], defences=["none", "topk(0.1)"]))
    summaries, _ = trained(tmp_path / "a", setting)
    assert [(row["defence"], row["seed"]) for row in summaries] == [
        ("none", 0),
        ("topk(0.1)", 0),
        ("none", 1),
        ("topk(0.1)", 1),
    ]
    bare, sparse = group_trainings(load_training(tmp_path / "a").trials)
    assert [len(kind.completed) for kind in (bare, sparse)] == [2, 2]
    assert bare.mean("accuracy") == pytest.approx((summaries[0]["accuracy"] + summaries[2]["accuracy"]) / 2)
    assert bare.deviation is not None
    assert (sparse.mean("bytes_up") or 0) < 0.3 * (bare.mean("bytes_up") or 0)
    read = load_summaries(tmp_path / "a")
    assert [len(row["curve"]) for row in read] == [1, 1, 1, 1]
    assert "NaN" not in json.dumps(read)


def test_summary_seconds_are_medians():
    """What torch and the checks of a shape take once is not what each round of this training takes."""
    setting = open_setting(config(rounds=1))
    (trial,) = trials(setting.config)
    standing = train(setting.federation(trial), 1)
    (one,) = standing.records
    rounds = [replace(one, seconds=10 * duration, client_seconds=duration) for duration in (0.6, 0.02, 0.01, 0.03)]
    for count, each in ((1, 0.6), (2, 0.02), (4, 0.02)):
        summary = summarise(trial, replace(standing, records=tuple(rounds[:count])), {})
        assert (summary["client_seconds"], summary["seconds"]) == (each, 10 * each)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["rounds=0"], "rounds: is 0"),
        (["local.lr=0"], "local.lr"),
        (["patience=3", "validation=0"], "^run: patience waits"),
        (["pace=[{after=3, times=0}]"], "pace"),
        (["pace=[{after=3, times=0.1}, {after=2, times=0.5}]"], "in order"),
        (["partition.kind=chess"], "partition.kind"),
        (["partition.concentration=0.5"], "partition.concentration: has no effect"),
        (["partition.kind=dirichlet", "partition.classes=2"], "partition.classes: has no effect"),
        (["server.tau=0.1"], "server.tau: has no effect"),
        (["server.optimiser=adagrad", "server.beta2=0.9"], "server.beta2: has no effect"),
        (["batch=4"], "batch: has no effect"),
        (["local=", "batch=50"], "batch: is 50, and the client with the most has 24 examples to train on"),
        (["local.optimiser=sgd", "local.nesterov=true"], "no momentum to look ahead with"),
        (["local.optimiser=adam", "local.momentum=0.9"], "mean nothing to 'adam'"),
        (["server.optimiser=lion"], "server.optimiser"),
        (["client=3"], "did you mean 'clients'"),
        (["model.name=lenet"], "model.name"),
        (["clients=200"], "clients"),
        (["partition.kind=column"], "needs column"),
        (["partition.kind=column", "partition.column=writer"], "column 'writer'"),
        (["partition.kind=column", "partition.column=label", "clients=11"], "10 different values"),
        (["partition.kind=flwr"], "needs partitioner"),
        (["partition.kind=flwr", "partition.partitioner=Iid"], "choose among"),
        (["local.batch=70"], "local.batch"),
        (["data.name=patches"], "mean nothing"),
        (["participation=0"], "participation"),
        (["validation=0.99"], "validation: is 0.99"),
        (["device=cuda:77"], "device: 'cuda:77'"),
    ],
)
def test_open_setting_with_invalid_settings_raises(settings, problem):
    with pytest.raises(GradveilError, match=problem):
        open_setting(config(*settings))


def test_config_setting_without_a_value_is_removed():
    assert config("local=", "local.batch=4", "local.lr=0.1", "local.steps=3").local == LocalConfig(
        lr=0.1, batch=4, steps=3
    )
    assert config("local.epochs=", "local.steps=2").local == config().local.model_copy(
        update={"epochs": None, "steps": 2}
    )
    plain = config("local=", "batch=4")
    assert (plain.local, plain.batch) == (None, 4)
    with pytest.raises(GradveilError, match=r"--set patience=: leaves 'patience' out, and it is not set here"):
        config("patience=")


def test_identity_depends_on_pace():
    plain, slower = config(), config("pace=[{after=3, times=0.1}]")
    assert plain.digest() != slower.digest()
    assert plain.digest() == config(rounds=7, delta=1e-7, seeds=[5]).digest(), "which these do not"
    assert open_setting(slower).federation(trials(slower)[0]).pace == ((3, 0.1),)


def test_open_setting_reports_every_unsuitable_defence():
    with pytest.raises(GradveilError) as caught:
        open_setting(config(defences=["none", 'dropout(0.2, where="nowhere")', 'cvb(position="nowhere")']))
    assert len(caught.value.problems) >= 2


def test_open_setting_names_modules_to_prepare():
    with pytest.raises(GradveilError, match=r"model: module '1' \(BatchNorm2d\): .*--set model\.prepare=true"):
        open_setting(config(f"model.name={__name__}:normed"))
    open_setting(config(f"model.name={__name__}:normed", "model.prepare=true", "model.batchnorm=group"))


def normed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, classes))


def test_run_starts_from_weights_of_an_earlier_training(tmp_path):
    plain = open_setting(config())
    trained(tmp_path / "first", plain)
    (file,) = (tmp_path / "first" / "trials").glob("*.safetensors")
    setting = open_setting(config(f"model.weights={file}"))
    start = setting.federation(trials(setting.config)[0]).client.params()
    ended = read_weights(file)
    assert all(torch.equal(value, ended[name]) for name, value in start.items())
    hashes = {describe(setting.config, "", weights)["config_hash"] for weights in ({}, setting.weights, plain.weights)}
    assert len(hashes) == 2
    save_file({"w": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(GradveilError, match="is missing, the model has"):
        open_setting(config(f"model.weights={tmp_path / 'other.safetensors'}"))


def test_open_setting_of_a_defence_with_public_images_raises():
    with pytest.raises(GradveilError, match="mixes with public images, and there are none"):
        open_setting(config(defences=["instahide(mix=public)"], rounds=1))


@pytest.mark.parametrize("text", ["mixup", "label-smoothing", "ats"])
def test_federation_passes_the_domain_to_batch_defences(text):
    setting = open_setting(config(defences=[text], rounds=1))
    federation = setting.federation(trials(setting.config)[0])
    after = federation.round(federation.start())
    assert after.status == "running"


@pytest.mark.parametrize("defence", ["none", "topk(0.5, feedback=true)", "dp(clip=1, sigma=0.01)", "standin", "adgp"])
@pytest.mark.parametrize("setting", [[], ["server.optimiser=adam"], ["local=", "batch=4"]])
def test_federation_neither_changes_nor_sends_frozen_parameters(defence, setting):
    head = open_setting(config('trainable=["head.*"]', *setting, defences=[defence], rounds=2))
    whole = open_setting(config(*setting, defences=[defence], rounds=2))
    (trial,) = trials(head.config)
    federation = head.federation(trial)
    start, end = federation.client.params(), train(federation, 2)
    moved = {name for name, value in end.params.items() if not torch.equal(value, start[name])}
    assert moved == {"head.weight", "head.bias"}
    assert end.mean.keys() == moved
    assert end.records[1].bytes_up < 0.6 * train(whole.federation(trial), 2).records[1].bytes_up


def test_open_setting_with_an_unknown_pattern_lists_the_parameters():
    with pytest.raises(
        GradveilError, match=r"^trainable: 'tail\.\*' matches no parameter -> .* head\.weight, head\.bias$"
    ):
        open_setting(config('trainable=["tail.*"]'))


def test_load_training_of_another_format_raises(tmp_path):
    (tmp_path / "train.json").write_text('{"format": 2, "config": {}, "trials": ["a"]}')
    with pytest.raises(GradveilError, match="has format 2, this version reads 3"):
        load_training(tmp_path)
