"""A bad run file is refused with every key, its problem and the allowed values at once."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from gradveil.attacks.attack_catalogue import ATTACKS
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import name
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import bundled, of_papers, read, read_training, resolve, with_defaults
from gradveil.core.errors import GradveilError
from gradveil.defences import DEFENCES
from gradveil.federated.training_config import TrainConfig
from tests.audit.runs import config, settings

LOCAL = {"lr": 0.1, "steps": 2}

# (changes of a good run, key that is named, words of the message, words of the remedy)
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"target_client": 3}, "target_client", "is not a setting", "did you mean 'target_clients'?"),
    ({"clients": 3}, "clients", "is a setting of gradveil train", "[cost]"),
    ({"zzz": 3}, "zzz", "is not a setting", "allowed here: name, data, model"),
    ({"target_clients": 0}, "target_clients", "is 0", "give at least 1"),
    ({"target_clients": "4"}, "target_clients", "is '4'", "give a whole number"),
    ({"target_clients": 2.5}, "target_clients", "is 2.5", "give a whole number"),
    ({"target_clients": True}, "target_clients", "is True", "give a whole number"),
    ({"first_target_client": -1}, "first_target_client", "is -1", "give at least 0"),
    ({"attacks": []}, "attacks", "is empty", "give at least 1"),
    ({"attacks": "ig"}, "attacks", "is 'ig'", "give a list"),
    ({"attacks": [1]}, "attacks[0]", "is 1", "give a string in quotes"),
    ({"attacks": ["idg"]}, "attacks[0]", "'idg'", "did you mean"),
    ({"attacks": ["ig", "ig"]}, "attacks[1]", "'ig' is the same as attacks[0] 'ig'", "remove one"),
    ({"attacks": ["ig", "IG( )"]}, "attacks[1]", "'IG( )' is the same as attacks[0] 'ig'", "remove one"),
    ({"attacks": ["ig(tv=1, l2=2)", "ig(l2=2., tv=1)"]}, "attacks[1]", "is the same as attacks[0]", "remove one"),
    ({"attacks": ["ig", "ig(iterations=9)"], "iterations": 9}, "attacks[1]", "is the same as attacks[0]", ""),
    ({"attacks": ["ig("]}, "attacks[0]", "ig(", ""),
    ({"attacks": ["ig(steps=3)"]}, "attacks[0]", "steps", "iterations"),
    ({"attacks": ["ig on dgp"]}, "attacks[0]", "'dgp', and the run has no such defence", "none and gaussian(0.01)"),
    ({"attacks": ["ig", "ig on none"]}, "attacks[1]", "is the same as attacks[0] 'ig'", "remove one"),
    ({"attacks": ["idg on none"]}, "attacks[0]", "'idg'", "did you mean"),
    ({"defences": []}, "defences", "is empty", "give at least 1"),
    ({"defences": ["none", "gausian(0.1)"]}, "defences[1]", "gausian", "gaussian"),
    ({"defences": ["prune(1.5)"]}, "defences[0]", "1.5", ""),
    ({"defences": ["prune(0.9"]}, "defences[0]", "", ""),
    (
        {"defences": ["prune(0.9)", "prune(ratio=0.9)"]},
        "defences[1]",
        "'prune(ratio=0.9)' is the same as defences[0] 'prune(0.9)'",
        "remove one",
    ),
    ({"defences": ["none", "None"]}, "defences[1]", "'None' is the same as defences[0] 'none'", "remove one"),
    ({"defences": ["dp", "Dropout", " dp( clip=20)"]}, "defences[2]", "is the same as defences[0] 'dp'", "remove one"),
    ({"defences": ["none + dp", "dp"]}, "defences[1]", "is the same as defences[0]", "remove one"),
    ({"defences": [""]}, "defences[0]", "is empty", "give a name"),
    ({"seeds": []}, "seeds", "is empty", "give at least 1"),
    ({"seeds": [0, 0]}, "seeds", "holds a seed twice", "give each once"),
    ({"seeds": [-1]}, "seeds[0]", "is -1", "give at least 0"),
    ({"seeds": 3}, "seeds", "is 3", "give a list"),
    ({"privacy": {"steps": 5, "rate": 2.0}}, "privacy.rate", "is 2.0", "give at most 1"),
    ({"threshold": 1.5}, "threshold", "is 1.5", "1"),
    ({"threshold": float("nan")}, "threshold", "is nan", ""),
    ({"threshold": -1}, "threshold", "is -1", "above -1"),
    ({"iterations": 0}, "iterations", "is 0", "give at least 1"),
    ({"restarts": 0}, "restarts", "is 0", "give at least 1"),
    ({"images": "no"}, "images", "is 'no'", "give true or false"),
    ({"precision": "float16"}, "precision", "is 'float16'", "'float32' or 'float64'"),
    ({"device": "tpu"}, "device", "is 'tpu'", "cpu|cuda"),
    ({"name": "a/b"}, "name", "is 'a/b'", "match"),
    ({"data": {"name": "face", "size": 16}}, "data.name", "no data set is called 'face'", "did you mean 'faces'?"),
    ({"data": {"name": "faces", "size": 6}}, "data.size", "is 6", "give at least 7: images are compared"),
    ({"data": {"name": "faces", "channels": 2}}, "data.channels", "is 2", "1 or 3"),
    ({"data": {"name": "faces", "normalise": "yes"}}, "data.normalise", "is 'yes'", "'dataset' or 'none'"),
    ({"data": {"name": "faces", "image_column": "scan"}}, "data", "image_column is for Parquet files", ""),
    ({"data": {"name": "folder:x", "label_column": "class"}}, "data", "label_column is for Parquet files", ""),
    ({"data": {"size": 32}}, "data.name", "is missing", 'name = "faces"'),
    ({"data": {"name": "faces", "dir": "x"}}, "data.dir", "is not a setting", "allowed here: name, size"),
    ({"data": "faces"}, "data", "is 'faces'", "give a table"),
    ({"model": {"name": "lenet"}}, "model.name", "no model is called 'lenet'", "did you mean 'lenet-zhu'"),
    ({"model": {"name": "my.nets.make"}}, "model.name", "no model is called", "did you mean 'my.nets:make'?"),
    ({"model": {"name": ""}}, "model.name", "is empty", "give a name"),
    ({"model": {"name": "lenet-zhu", "options": 1}}, "model.options", "is 1", "give a table"),
    ({"client": {"batch": 0}}, "client.batch", "is 0", "give at least 1"),
    ({"client": {"size": 2}}, "client.size", "is not a setting", "allowed here: batch, members, local, trainable"),
    ({"client": [{}, {"batch": 0}]}, "client[1].batch", "is 0", "give at least 1"),
    ({"client": []}, "client", "is empty", "give at least 1"),
    ({"client": {"trainable": []}}, "client.trainable", "is empty", "give at least 1"),
    ({"client": {"local": {"steps": 2}}}, "client.local.lr", "is missing", "lr = 0.1"),
    ({"client": {"local": {"lr": 0.0, "steps": 2}}}, "client.local.lr", "is 0.0", "above 0"),
    ({"client": {"local": {"lr": 0.1}}}, "client.local", "exactly one of steps and epochs", ""),
    ({"client": {"local": {**LOCAL, "epochs": 1}}}, "client.local", "exactly one of steps and epochs", ""),
    ({"client": {"local": {**LOCAL, "momentum": 1.0}}}, "client.local.momentum", "is 1.0", "below 1"),
    ({"client": {"local": {**LOCAL, "optimiser": "lion"}}}, "client.local.optimiser", "is 'lion'", "'sgd' or 'adam'"),
    ({"client": {"local": {**LOCAL, "batch": 4}}}, "client", "local.batch takes 4", ""),
]

# The same for what only shows when data and model are there.
BAD_EXPERIMENTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"target_clients": 500}, "target_clients", "'faces' has 50", "at most 50 target clients"),
    ({"target_clients": 30, "client": {"batch": 4}}, "target_clients", "need 120 images", "at most 12 target clients"),
    ({"client": {"batch": 400}}, "target_clients", "'faces' has 50 for ", "client.batch: one update of at most 50"),
    ({"target_clients": 4, "first_target_client": 99}, "target_clients", "from number 99", "lower target clients"),
    (
        {"data": {"name": "faces", "size": 1_000_000}},
        "data: size",
        "images take 800,000 GB",
        "lower it, or read fewer images",
    ),
    ({"device": "cuda:99"}, "device", "is not available", "choose cpu"),
    ({"model": {"name": "lenet-zhu", "options": {"width": 3}}}, "model.width", "is not an option", "allowed"),
    ({"model": {"name": "no_such_module:net"}}, "model no_such_module:net", "there is no module", "PYTHONPATH"),
    ({"client": {"trainable": ["tail.*"]}}, "defences[0] 'none', client", "matches no parameter", "parameters: "),
    ({"data": {"name": "patches"}, "client": {"local": LOCAL}}, "client.local", "mean nothing", "choose data"),
    ({"data": {"name": "parquet:nowhere"}}, "data: nowhere", "is not there", "check the path"),
]


@pytest.mark.parametrize(("changes", "where", "what", "remedy"), BAD)
def test_bad_settings_are_named(changes: dict[str, Any], where: str, what: str, remedy: str) -> None:
    with pytest.raises(GradveilError) as caught:
        resolve(settings(**changes))
    assert [problem.where for problem in caught.value.problems] == [where]
    assert what in caught.value.problems[0].what
    assert remedy in caught.value.problems[0].remedy


@pytest.mark.parametrize("name", ["scans", "./scans"])
def test_a_path_for_a_name_is_told_how_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "train.parquet").touch()
    with pytest.raises(GradveilError, match=f"no data set is called '{name}' -> of your own: 'folder:{name}'; known: "):
        resolve(settings(data={"name": name}))


@pytest.mark.parametrize("name", ["notes.csv", "texts:notes.csv", "notes.parquet", "hf:owner/name"])
def test_a_file_of_ones_own_is_a_name_of_data(name: str) -> None:
    assert resolve(settings(data={"name": name})).data.name == name


@pytest.mark.parametrize("name", ["notes.csv", "net.py"])
def test_data_or_a_model_in_place_of_a_run_file_is_told_where_it_belongs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text,label")
    section = "[data] name" if name == "notes.csv" else '[model] name = "net:'
    with pytest.raises(GradveilError, match=f"is no run file -> .*{re.escape(section)}"):
        read(str(tmp_path / name))


@pytest.mark.parametrize(("first", "model"), [("age,ill", "tabular-mlp"), ("text,label", "small-encoder")])
def test_a_table_in_place_of_a_run_file_is_told_a_model_that_fits(first: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text(f"{first}\n1,0\n2,1\n")
    for reads, command in ((read, "audit"), (read_training, "train")):
        with pytest.raises(GradveilError, match=f"gradveil {command} .*notes.csv --model {model}"):
            reads(str(tmp_path / "notes.csv"))


def test_columns_of_any_name_are_read_and_runs_without_them_stay_the_same_runs(tmp_path: Path) -> None:
    drawn = torch.randint(256, (8, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encoded = [_png(image.numpy()) for image in drawn]
    pq.write_table(pa.table({"scan": encoded, "finding": [n % 2 for n in range(8)]}), tmp_path / "test.parquet")
    data = {"name": f"parquet:{tmp_path}", "size": 16}
    with pytest.raises(GradveilError, match=r"has no image column .*set data.image_column to one of: scan, finding"):
        open_experiment(config(data=data))
    named = config(data={**data, "image_column": "scan", "label_column": "finding"})
    assert len(open_experiment(named).private) == 2
    assert named.digest() != config(data=data).digest()
    assert named.resolved()["data"]["image_column"] == "scan"
    assert not {"image_column", "label_column"} & config(data=data).resolved()["data"].keys()


def _png(pixels: object) -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_what_is_shown_stays_what_was_written() -> None:
    found = resolve(settings(defences=["None", "prune( ratio = 0.9 )", "Dropout"], attacks=["IG(iterations=6)"]))
    assert (found.defences, found.attacks) == (["None", "prune( ratio = 0.9 )", "Dropout"], ["IG(iterations=6)"])


def test_order_of_a_chain_is_no_repetition() -> None:
    assert resolve(settings(defences=["cvb + dropout", "dropout + cvb"]))


def test_there_are_thirty_distinct_bad_inputs() -> None:
    assert len({str(case) for case in [*BAD, *BAD_EXPERIMENTS]}) >= 30


@pytest.mark.parametrize(("changes", "where", "what", "remedy"), BAD_EXPERIMENTS)
def test_bad_scenes_are_named(changes: dict[str, Any], where: str, what: str, remedy: str) -> None:
    with pytest.raises(GradveilError) as caught:
        open_experiment(config(**changes))
    problem = next(problem for problem in caught.value.problems if problem.where == where)
    assert what in problem.what
    assert remedy in problem.remedy


def test_every_problem_is_reported_at_once() -> None:
    changes = {"target_clients": 0, "attacks": ["idg"], "data": {"name": "face"}, "seeds": ["a"], "x": 1}
    with pytest.raises(GradveilError) as caught:
        resolve(settings(**changes))
    assert {p.where for p in caught.value.problems} == {"target_clients", "attacks[0]", "data.name", "seeds[0]", "x"}


def test_syntax_errors_say_the_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('name = "a"\ntarget_clients = = 3\n')
    with pytest.raises(GradveilError, match="line 2"):
        read(str(file))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GradveilError, match="UTF-8"):
        read(str(file))


def test_an_unknown_run_suggests_a_bundled_one() -> None:
    with pytest.raises(GradveilError, match="did you mean 'faces'"):
        read("facs")


@pytest.mark.parametrize("kind", [RunConfig, TrainConfig])
def test_papers_runs_are_read_by_name(kind: type[RunConfig] | type[TrainConfig]) -> None:
    reader, other = (read, read_training) if kind is RunConfig else (read_training, read)
    runs = list(of_papers(kind))
    assert runs
    for run in runs:
        assert reader(run).defences
        with pytest.raises(GradveilError, match=f"-> gradveil (train|audit) {run}"):
            other(run)


def test_a_papers_unknown_run_suggests_the_nearest() -> None:
    with pytest.raises(GradveilError, match="did you mean 'deep-leakage/faces'"):
        read("deep-leakage/face")


@pytest.mark.parametrize("name", bundled())
def test_bundled_runs_are_good(name: str) -> None:
    found = read(name)
    assert found.name == name
    assert "none" in found.defences
    assert bundled()[name].startswith("# ")


def test_options_win_over_the_file() -> None:
    given = ("client.batch=2", "data.normalise=none", 'defences=["none"]')
    found = read("faces", {"target_clients": 3, "seeds": None}, given)
    assert (found.target_clients, found.seeds, found.client[0].batch) == (3, [0], 2)
    assert (found.data.normalise, found.defences) == ("none", ["none"])


AIMED = ["ig(iterations=5)", "cdia on none", "r-gap on prune( ratio = 0.9 )"]


@pytest.mark.parametrize(
    ("overrides", "given", "left"),
    [
        ({}, (), AIMED),
        ({"defences": ["none"]}, (), AIMED[:2]),
        ({"defences": ["prune(0.9)", "dgp"]}, (), [AIMED[0], AIMED[2]]),
        ({}, ('defences=["dgp"]',), AIMED[:1]),
    ],
)
def test_attacks_on_defences_that_options_replace_are_left_out(
    overrides: dict[str, Any], given: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "aimed.toml"
    lines = f"attacks = {AIMED}\ndefences = ['none', 'prune(0.9)']\n"
    file.write_text(lines + "data = {name = 'faces'}\nmodel = {name = 'lenet-zhu'}\n")
    assert read(str(file), overrides, given).attacks == left


def test_an_option_that_aims_at_a_missing_defence_is_refused() -> None:
    with pytest.raises(GradveilError, match=r"attacks\[0\].*'dropout', and the run has no such defence"):
        read("faces", {"attacks": ["ig on dropout"]})


@pytest.mark.parametrize("setting", ["target_clients", "=3", "client..batch=2", "target_clients.x=2"])
def test_bad_options_are_refused(setting: str) -> None:
    with pytest.raises(GradveilError, match="--set"):
        read("faces", {}, (setting,))


def test_the_name_is_the_files_where_none_is_given(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(bundled()["faces"].replace('name = "faces"\ntarget_clients', "target_clients"))
    assert read(str(file)).name == "study"


@pytest.mark.parametrize(("text", "value"), [(".1", 0.1), ("1.", 1.0), ("-.5e-1", -0.05), ("1e-3", 1e-3)])
def test_numbers_are_read_however_they_are_written(text: str, value: float) -> None:
    assert read("faces", None, [f"server_lr={text.lstrip('-')}"]).server_lr == abs(value)


def test_digest_depends_on_every_setting_but_those_that_grow() -> None:
    assert config().digest() == config().digest() == config(seeds=[0, 1]).digest() == config(defences=["none"]).digest()
    changes: list[dict[str, Any]] = [{}, {"target_clients": 3}, {"precision": "float64"}, {"images": False}]
    assert len({config(**change).digest() for change in changes}) == 4


def test_run_settings_are_defaults_of_attacks() -> None:
    assert with_defaults("ig", None, None) == "ig"
    assert with_defaults("ig", 5, 2) == "ig(iterations=5, restarts=2)"
    assert with_defaults(" ig( iterations = 9 ) ", 5, 2) == "ig(iterations = 9, restarts=2)"
    assert with_defaults("ig()", 5, None) == "ig(iterations=5)"
    experiment = open_experiment(config(iterations=7, attacks=["ig", "gi(iterations=3)"]))
    assert [attack.descent.iterations for attack in experiment.attacks.values()] == [7, 3]


def test_titles_are_found_however_a_name_is_written() -> None:
    experiment = open_experiment(config(attacks=["IG_Scheliga (iterations=2)"], defences=["None", "Dropout"]))
    first, second = (name(experiment, trial) for trial in trials(experiment.config))
    assert first.attack_title == ATTACKS["ig-scheliga"].description
    assert ATTACKS["ig-scheliga"].citation in first.citations
    assert second.defence_title == DEFENCES["dropout"].description


@pytest.mark.parametrize(
    ("overrides", "settings", "told"),
    [
        (
            {"iterations": 60},
            [],
            "--iterations 60: changes nothing: every attack sets its own iterations, such as 'ig-s",
        ),
        (
            {},
            ["iterations=60"],
            "--set iterations=60: .* -> leave it out, or take iterations out of an attack$",
        ),
        ({"attacks": ["ig(restarts=2, tv=0.1)"]}, ["restarts = 4"], "take restarts out of an attack$"),
        ({"attacks": ["analytic"], "restarts": 2}, [], "--restarts 2: changes nothing: no attack takes restarts -> "),
    ],
)
def test_numbers_that_no_attack_would_take_are_refused(overrides: Any, settings: list[str], told: str) -> None:
    with pytest.raises(GradveilError, match=told):
        read("digits", overrides, settings)


@pytest.mark.parametrize("attacks", [["ig(iterations=5)", "cdia"], ["ig(iterations=5)", "adaptive"]])
def test_numbers_that_some_attack_takes_are_its_own(attacks: list[str]) -> None:
    assert read("digits", {"attacks": attacks, "iterations": 60}).iterations == 60
