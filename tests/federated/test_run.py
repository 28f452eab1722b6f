"""Trainings as a run file says them."""

import json
import re
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


def trained(folder, told, info=None, fresh=False):
    seen = []
    with TRAINING_RUN.opened(folder, info or describe(told.config, "command"), fresh):
        summaries = run(told, folder, lambda trial, record, status: seen.append((trial.title, record.number)))
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
def test_every_image_belongs_to_one_client_which_trains_on_it_or_keeps_it_apart(kind):
    told = open_setting(config(f"partition.kind={kind}", "validation=0.2", "local.batch=1", *PARTITIONS[kind]))
    shares = told.federation(trials(told.config)[0]).shares
    images = torch.cat([b.inputs for share in shares for b in (share.train, share.validation) if b is not None])
    everything = told.data.public.inputs
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


def test_the_seed_decides_data_weights_and_clients_and_the_defence_does_not():
    told = open_setting(config(defences=["none", "dgp"], seeds=[0, 1]))
    plain, pruned, other, _ = (told.federation(trial) for trial in trials(told.config))
    assert torch.equal(plain.shares[1].train.inputs, pruned.shares[1].train.inputs)
    assert not torch.equal(plain.shares[1].train.inputs[:5], other.shares[1].train.inputs[:5])
    weights = [experiment.client.params() for experiment in (plain, pruned, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(torch.equal(weights[0][name], weights[2][name]) for name in weights[0] if "weight" in name)
    assert plain.chosen(3) == pruned.chosen(3)


def test_central_training_has_all_examples_in_one_hand():
    told = open_setting(config("central=true", "participation=0.5", "absent=0.2"))
    central, federated = (told.federation(trial) for trial in trials(told.config))
    assert len(central.shares) == 1
    assert len(central.shares[0].train.targets) == sum(len(share.train.targets) for share in federated.shares)
    assert len(central.shares[0].validation.targets) == sum(len(s.validation.targets) for s in federated.shares)
    assert central.chosen(1) == ((0,), ())


def test_central_training_is_what_a_client_does_on_all_examples_whatever_the_server():
    """It is what federation is measured by: neither a server's short steps nor its one huge batch may hold it back."""
    told = open_setting(config("central=true", "server.optimiser=adam", "local.epochs=1", "local.batch="))
    central, federated = (told.federation(trial) for trial in trials(told.config))
    assert (central.server.optimiser, central.server.lr) == ("sgd", 1.0)
    assert federated.server.optimiser == "adam"
    assert central.client.local.batch == federated.client.local.batch
    assert central.client.local.batch <= min(len(share.train.targets) for share in federated.shares)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological"])
def test_local_steps_without_a_batch_take_what_the_smallest_client_has(kind):
    plain = config(f"partition.kind={kind}")
    told = open_setting(plain.model_copy(update={"local": LocalConfig(lr=0.01, epochs=1)}))
    experiment = told.federation(trials(told.config)[0])
    assert experiment.client.local.batch == min(len(share.train.targets) for share in experiment.shares)


def test_a_longer_training_goes_on_where_a_shorter_one_ended(tmp_path):
    short = open_setting(config())
    _, seen = trained(tmp_path / "a", short)
    assert seen == [("none", 1), ("none", 2)]
    longer = open_setting(config(rounds=3))
    summaries, seen = trained(tmp_path / "a", longer)
    assert seen == [("none", 3)]
    whole, _ = trained(tmp_path / "b", longer)
    assert timeless(summaries[0]) == timeless(whole[0])
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_training_goes_on_with_clients_at_once_or_one_after_the_other(tmp_path):
    """It changes nothing but rounding, as the number of threads does."""
    settings = ([], ["together=true"], ["together=false"])
    told = [open_setting(config("local.batch=4", *more, rounds=2 + i)) for i, more in enumerate(settings)]
    assert [setting.federation(trials(setting.config)[0]).together for setting in told] == ["auto", True, False]
    assert len({setting.config.digest() for setting in told}) == 1
    for i, setting in enumerate(told):
        (summary,), _ = trained(tmp_path / "a", setting)
        assert summary["rounds"] == 2 + i
    with pytest.raises(GradveilError, match="together"):
        config("together=maybe")


def test_a_training_that_fails_is_a_status_and_the_others_are_done(tmp_path, monkeypatch):
    told = open_setting(config(defences=["none", "topk(0.1)"], rounds=2))
    rounds = Federation.round

    def fails(experiment, standing):
        if len(standing.records) == 1 and experiment.client.send is not None:
            raise MemoryError("no room")
        return rounds(experiment, standing)

    monkeypatch.setattr(Federation, "round", fails)
    summaries, _ = trained(tmp_path / "a", told)
    assert [row["status"] for row in summaries] == ["finished", "failed"]
    assert summaries[0].get("failed") is None
    assert re.fullmatch(r"MemoryError: no room \(test_run\.py, line \d+\)", summaries[1]["failed"])
    bare, failed = group_trainings(load_training(tmp_path / "a").trials)
    assert [len(kind.completed) for kind in (bare, failed)] == [1, 0]
    assert failed.mean("accuracy") is None
    monkeypatch.undo()
    again, more = trained(tmp_path / "a", told)
    assert more == [("topk(0.1)", 2)]
    assert timeless(again[1]) == timeless(trained(tmp_path / "b", told)[0][1])


def test_every_damaged_file_is_told_before_the_first_round(tmp_path):
    told = open_setting(config(defences=["none", "topk(0.1)"], rounds=1))
    trained(tmp_path / "a", told)
    for file in (tmp_path / "a" / "trials").glob("*.safetensors"):
        file.write_bytes(b"x")
    with pytest.raises(GradveilError) as caught:
        trained(tmp_path / "a", told)
    assert len(caught.value.problems) == 2


def test_a_training_that_was_stopped_late_is_finished_when_fewer_rounds_are_asked_for(tmp_path):
    told = open_setting(config(rounds=3))
    info, trial = describe(told.config, "command"), trials(told.config)[0]

    def stop(_, record, status):
        if record.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TRAINING_RUN.opened(tmp_path / "a", info):
        run(told, tmp_path / "a", stop)
    file = tmp_path / "a" / "trials" / f"{trial.id}.safetensors"
    assert load_standing(file, identity(told, trial)).status == "running"
    summaries, seen = trained(tmp_path / "a", open_setting(config(rounds=1)))
    assert [(row["status"], row["rounds"]) for row in summaries] == [("finished", 2)]
    assert seen == []
    summaries, seen = trained(tmp_path / "a", told)
    assert (summaries[0]["status"], seen) == ("finished", [("none", 3)])


def test_rounds_that_were_trained_count_for_the_epsilon_where_fewer_are_asked_for(tmp_path):
    """What was sent stays sent: a summary that was written anew told the epsilon of the fewer rounds."""
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    private = {"defences": ["dp(clip=1, sigma=16)"]}
    (after_two,), _ = trained(tmp_path / "a", open_setting(config(rounds=2, **private)))
    (asked_for_one,), seen = trained(tmp_path / "a", open_setting(config(rounds=1, **private)))
    assert (asked_for_one["rounds"], seen) == (2, [])
    assert asked_for_one["epsilon"] == after_two["epsilon"]
    assert asked_for_one["guarantee"] == after_two["guarantee"]


def test_who_stops_earlier_than_was_planned_has_no_smaller_epsilon(tmp_path):
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    private = {"defences": ["dp(clip=1, sigma=16)"]}
    (whole,), _ = trained(tmp_path / "a", open_setting(config(rounds=4, **private)))
    told = open_setting(config(rounds=4, **private))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TRAINING_RUN.opened(tmp_path / "b", describe(told.config, "command")):
        run(told, tmp_path / "b", stop)
    (shorter,), seen = trained(tmp_path / "b", open_setting(config(rounds=2, **private)))
    assert (shorter["rounds"], [number for _, number in seen]) == (2, [2])
    assert shorter["epsilon"] == whole["epsilon"]
    (planned_so,), _ = trained(tmp_path / "c", open_setting(config(rounds=2, **private)))
    assert planned_so["epsilon"]["example"] < whole["epsilon"]["example"]


def test_weights_that_a_training_starts_from_are_part_of_what_its_files_belong_to(tmp_path):
    told = open_setting(config())
    trial = trials(told.config)[0]
    with_weights = [replace(told, weights={"w": torch.full((2,), value)}) for value in (0.0, 1.0)]
    assert len({identity(setting, trial) for setting in (told, *with_weights)}) == 3


def test_other_settings_are_refused_until_a_fresh_start(tmp_path):
    trained(tmp_path / "a", open_setting(config(rounds=1)))
    other = open_setting(config("local.lr=0.5", rounds=1))
    with pytest.raises(GradveilError, match=r"local.lr \(.* there, 0.5 now\)"):
        trained(tmp_path / "a", other)
    _, seen = trained(tmp_path / "a", other, fresh=True)
    assert seen == [("none", 1)]


def test_a_training_grows_by_defences_seeds_and_all_data_in_one_hand(tmp_path):
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


@pytest.mark.parametrize("said", ["{}", '{"config": 3, "trials": []}', "[", '{"config": {}, "trials": []}'])
def test_a_damaged_file_of_a_training_is_refused_and_stays(tmp_path, said):
    trained(tmp_path / "a", open_setting(config(rounds=1)))
    (tmp_path / "a" / "train.json").write_text(said)
    with pytest.raises(GradveilError, match="--fresh"):
        trained(tmp_path / "a", open_setting(config(rounds=1)))
    assert (tmp_path / "a" / "train.json").read_text() == said


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(GradveilError, match="holds other files"),
        TRAINING_RUN.opened(tmp_path, {"config_hash": ""}, fresh=True),
    ):
        pass
    assert (tmp_path / "thesis.tex").is_file()


@pytest.mark.parametrize("place", ["file/run", 300 * "a"])
def test_a_folder_that_cannot_be_made_is_a_message(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(GradveilError, match="cannot be made"):
        trained(tmp_path / place, open_setting(config(rounds=1)))


def test_summaries_tell_the_seeds_apart_and_together(tmp_path):
    told = open_setting(config(rounds=1, seeds=[0, 1], defences=["none", "topk(0.1)"]))
    summaries, _ = trained(tmp_path / "a", told)
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


def test_a_processs_slow_first_round_is_no_price_of_a_defence():
    """What torch and the checks of a shape take once is not what each round of this training takes."""
    told = open_setting(config(rounds=1))
    (trial,) = trials(told.config)
    standing = train(told.federation(trial), 1)
    (one,) = standing.records
    rounds = [replace(one, seconds=10 * own, client_seconds=own) for own in (0.6, 0.02, 0.01, 0.03)]
    for count, each in ((1, 0.6), (2, 0.02), (4, 0.02)):
        summary = summarise(trial, replace(standing, records=tuple(rounds[:count])), {})
        assert (summary["client_seconds"], summary["seconds"]) == (each, 10 * each)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["rounds=0"], "rounds: is 0"),
        (["local.lr=0"], "local.lr"),
        (["patience=3", "validation=0"], "^run: patience waits"),
        (["pace=[{after=3, times=0}]"], "pace"),
        (["pace=[{after=3, times=0.1}, {after=2, times=0.5}]"], "in order"),
        (["partition.kind=chess"], "partition.kind"),
        (["partition.concentration=0.5"], "concentration: changes nothing where partition.kind is 'iid'"),
        (["partition.kind=dirichlet", "partition.classes=2"], "classes: changes nothing"),
        (["server.tau=0.1"], "server.tau: changes nothing where server.optimiser is 'sgd'"),
        (["server.optimiser=adagrad", "server.beta2=0.9"], "server.beta2: changes nothing"),
        (["batch=4"], "batch: changes nothing where clients train locally"),
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
        (["device=cuda:77"], "device: 'cuda:77' is not there"),
    ],
)
def test_bad_settings_are_told_before_the_first_round(settings, told):
    with pytest.raises(GradveilError, match=told):
        open_setting(config(*settings))


def test_a_setting_without_a_value_is_left_out():
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


def test_pace_makes_another_training():
    plain, slower = config(), config("pace=[{after=3, times=0.1}]")
    assert plain.digest() != slower.digest()
    assert plain.digest() == config(rounds=7, delta=1e-7, seeds=[5]).digest(), "which these do not"
    assert open_setting(slower).federation(trials(slower)[0]).pace == ((3, 0.1),)


def test_every_defence_that_does_not_fit_is_told_at_once():
    with pytest.raises(GradveilError) as caught:
        open_setting(config(defences=["none", 'dropout(0.2, where="nowhere")', 'cvb(position="nowhere")']))
    assert len(caught.value.problems) >= 2


def test_a_model_that_has_to_be_prepared_is_told_by_module_and_how():
    with pytest.raises(GradveilError, match=r"model: module '1' \(BatchNorm2d\): .*--set model\.prepare=true"):
        open_setting(config(f"model.name={__name__}:normed"))
    open_setting(config(f"model.name={__name__}:normed", "model.prepare=true", "model.batchnorm=group"))


def normed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, classes))


def test_training_can_start_from_weights_in_a_file_such_as_an_earlier_training(tmp_path):
    plain = open_setting(config())
    trained(tmp_path / "first", plain)
    (file,) = (tmp_path / "first" / "trials").glob("*.safetensors")
    told = open_setting(config(f"model.weights={file}"))
    start = told.federation(trials(told.config)[0]).client.params()
    ended = read_weights(file)
    assert all(torch.equal(value, ended[name]) for name, value in start.items())
    hashes = {describe(told.config, "", weights)["config_hash"] for weights in ({}, told.weights, plain.weights)}
    assert len(hashes) == 2
    save_file({"w": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(GradveilError, match="is missing, the model has"):
        open_setting(config(f"model.weights={tmp_path / 'other.safetensors'}"))


def test_a_training_has_no_public_images_to_mix_with():
    with pytest.raises(GradveilError, match="mixes with public images, and there are none"):
        open_setting(config(defences=["instahide(mix=public)"], rounds=1))


@pytest.mark.parametrize("text", ["mixup", "label-smoothing", "ats"])
def test_batch_defences_know_the_domain(text):
    told = open_setting(config(defences=[text], rounds=1))
    federation = told.federation(trials(told.config)[0])
    after = federation.round(federation.start())
    assert after.status == "running"


@pytest.mark.parametrize("defence", ["none", "topk(0.5, feedback=true)", "dp(clip=1, sigma=0.01)", "standin", "adgp"])
@pytest.mark.parametrize("setting", [[], ["server.optimiser=adam"], ["local=", "batch=4"]])
def test_what_is_not_trained_stays_as_it_was_and_is_not_sent(defence, setting):
    head = open_setting(config('trainable=["head.*"]', *setting, defences=[defence], rounds=2))
    whole = open_setting(config(*setting, defences=[defence], rounds=2))
    (trial,) = trials(head.config)
    federation = head.federation(trial)
    start, end = federation.client.params(), train(federation, 2)
    moved = {name for name, value in end.params.items() if not torch.equal(value, start[name])}
    assert moved == {"head.weight", "head.bias"}
    assert end.mean.keys() == moved
    assert end.records[1].bytes_up < 0.6 * train(whole.federation(trial), 2).records[1].bytes_up


def test_a_pattern_that_matches_nothing_is_told_with_the_parameters():
    with pytest.raises(
        GradveilError, match=r"^trainable: 'tail\.\*' matches no parameter -> .* head\.weight, head\.bias$"
    ):
        open_setting(config('trainable=["tail.*"]'))


def test_a_training_of_another_format_is_refused(tmp_path):
    (tmp_path / "train.json").write_text('{"format": 2, "config": {}, "trials": ["a"]}')
    with pytest.raises(GradveilError, match="has format 2, this version reads 3"):
        load_training(tmp_path)
