"""`gradveil train`: its table, its JSON, going on, and errors without tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradveil.audit.run_file import read_training
from gradveil.cli.app import run
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.training_run import load_training
from gradveil.federated.update_records import read_recorded

RUN = """
name = "little"
clients = 3
rounds = 1
defences = ["none", "topk(0.1)"]
data = { name = "digits", size = 16, public = 80, gallery = 40 }
model = { name = "lenet-zhu" }
local = { batch = 8, lr = 0.01, epochs = 1, optimiser = "adam" }
"""

STUDY = """
name = "study"
attacks = ["ig"]
rounds = 3
target_clients = 2
defences = ["none", "topk(0.1)"]
data = { name = "digits", size = 16 }
model = { name = "lenet-zhu" }
"""


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small run file, where the commands run."""
    (tmp_path / "little.toml").write_text(RUN)
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defences_stand_side_by_side(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "little.toml", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert "none, seed 0: round 1 of 1, accuracy" in err
    assert "gradveil report runs/little" in err
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:2] == ["defence", "accuracy"]
    assert [line[0] for line in lines[2:4]] == ["none", "topk(0.1)"]
    assert lines[3][3][0] in "+−"
    assert (little / "runs/little").stat().st_mode & 0o777 == 0o700


def test_a_second_call_does_nothing_again_and_more_rounds_go_on(
    little: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "little.toml", "--threads", "1", "--defence", "none", "--json", "--out", "here"]
    assert run(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(words) == 0
    again, progress = capsys.readouterr()
    assert json.loads(again) == first
    assert "round" not in progress
    assert run([*words, "--rounds", "2"]) == 0
    longer, progress = capsys.readouterr()
    assert "round 2 of 2" in progress
    assert "round 1 of 2" not in progress
    assert [point["number"] for point in json.loads(longer)[0]["curve"]] == [1, 2]
    assert json.loads(longer)[0]["curve"][0] == first[0]["curve"][0]


def test_guarantee_is_shown_next_to_the_cost(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "little.toml", "--threads", "1", "--defence", "none", "--defence", "dp(clip=1, sigma=4)"]
    assert run([*words, "--set", "delta=1e-6"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "finished no formal guarantee" in out
    assert "Proven of dp(clip=1, sigma=4): epsilon" in out
    assert "at delta 1e-06 of each example" in out
    assert run([*words, "--json"]) == 0
    bare, private = json.loads(capsys.readouterr().out)
    assert (bare["epsilon"], bare["guarantee"]) == ({}, "no formal guarantee")
    assert private["delta"] == 1e-5
    assert 1 < private["epsilon"]["example"] < 10


def test_the_run_file_of_an_audit_trains_as_its_cost_says(little: Path) -> None:
    plan = "clients = 3\nimages = 90\nlocal = { batch = 8, lr = 0.01, epochs = 1 }\n"
    (little / "study.toml").write_text(f"{STUDY}[cost]\n{plan}")
    config = read_training("study.toml")
    assert (config.rounds, config.clients, config.defences) == (20, 3, ["none", "topk(0.1)"])
    assert config.local == LocalConfig(batch=8, lr=0.01, epochs=1)
    assert read_training("study.toml", {"rounds": 2}).rounds == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.toml"], "bundled runs: census, digits, reviews"),
        (["little.toml", "--defence", "topk(2)"], "keep is 2"),
        (["little.toml", "--set", "clients=500"], "clients"),
        (["little.toml", "--set", "client=5"], "client: is a setting of gradveil audit"),
        (["study.toml"], "rounds: is missing"),
        (["little.toml", "--set", "local.batch=70"], "local.batch"),
        (["little.toml", "--set", "attacks=[]"], "attacks: is a setting of gradveil audit"),
        (
            ["little.toml", "--defence", "adgp(selection=vote)"],
            "participation: selects 3 of 3 clients per round, but 5 must send public messages",
        ),
    ],
)
def test_wrong_use_is_reported_without_a_traceback(
    little: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert run(["train", *words]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err
    assert not (little / "runs").exists()


def test_smaller_electorate_is_reported(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--defence", "adgp(selection=vote, voters=3)", "--set", "absent=0.4", "--rounds", "4", "--threads", "1"]
    assert run(["train", "little.toml", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    spoke = [record["spoke"] for record in json.loads(out)[0]["curve"]]
    short = [count for count, _ in filter(None, spoke) if count < 3]
    assert short
    assert all(f"only {count} of 3 clients spoke before it" in err for count in short)
    progress = (
        f"seed 0: in {len(short)} of 4 rounds fewer clients spoke than planned, at least once {min(short)}: too few to "
    )
    assert progress + "outvote a liar" in err


def test_rounds_without_answers_are_reported(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--defence", "none", "--set", "absent=0.9", "--rounds", "3", "--threads", "1"]
    assert run(["train", "little.toml", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    silent = sum(not record["clients"] for record in json.loads(out)[0]["curve"])
    assert silent
    assert err.count(", no client answered,") == silent
    assert f"seed 0: in {silent} of 3 rounds no client answered" in err


def test_a_training_that_diverges_is_a_status_and_an_exit_code(
    little: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--defence", "none", "--set", "local.lr=1e38", "--set", "local.optimiser=sgd", "--rounds", "3"]
    assert run(["train", "little.toml", *words]) == 1
    assert "diverged" in capsys.readouterr().out


def test_updates_are_recorded_as_configured(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "little.toml", "--threads", "1", "--record", "seen", "--record-client", "1"]
    assert run(words) == 0
    assert "2 recorded updates in seen" in capsys.readouterr().err
    seen = {one.facts.defence: one for one in read_recorded(little / "seen")}
    assert seen.keys() == {"none", "topk(0.1)"}
    for one in seen.values():
        assert (one.facts.client, one.facts.round, one.facts.sends) == ("1", 1, "difference")
        assert one.facts.local == LocalConfig(batch=8, lr=0.01, epochs=1, optimiser="adam")
        assert one.truth is None
    values = torch.cat([value.flatten() for value in seen["topk(0.1)"].update.values()])
    assert 0.85 < float((values == 0).double().mean()) < 0.95


def test_finished_training_reports_that_nothing_was_recorded(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "little.toml", "--threads", "1", "--defence", "none"]
    assert run(words) == 0
    assert run([*words, "--record", "seen"]) == 0
    assert "Nothing was recorded in seen" in capsys.readouterr().err
    assert run([*words, "--record-round", "1", "--record-truth"]) == 2
    progress = capsys.readouterr().err
    assert "--record-round: has nowhere to record to" in progress
    assert "--record-truth: has nowhere to record to" in progress
    assert run([*words, "--record", "other", "--record-round", "99", "--record-client", "99"]) == 2
    progress = capsys.readouterr().err
    assert "--record-round 99: is not there" in progress
    assert "--record-client 99: is not there" in progress
    assert not Path("other").exists()


@pytest.mark.processes
def test_worker_processes_give_the_result_of_one_process(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for count in ("1", "2"):
        words = ["--workers", count, "--threads", "1", "--out", count, "--record", f"sent-{count}", "--record-truth"]
        assert run(["train", "little.toml", *words, "--json"]) == 0
        out, err = capsys.readouterr()
        assert "6 recorded updates" in err
        rows = json.loads(out)
        for row in rows:
            for timed in (row, *row["curve"]):
                del timed["seconds"], timed["client_seconds"]
        found.append((rows, {file.name: file.read_bytes() for file in Path(f"sent-{count}").glob("round-*")}))
    assert found[0] == found[1]


OWN = """
from torch import nn

class Mean(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))
"""


@pytest.mark.parametrize("named", [["--model", "ownwords:Mean"], ["--set", "model.name=ownwords:Mean"]])
def test_a_model_of_ones_own_takes_no_options_of_the_bundled_one(
    named: list[str], little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (little / "ownwords.py").write_text(OWN)
    monkeypatch.syspath_prepend(little)
    arguments = ["--rounds", "1", "--defence", "none", "--set", "clients=2", "--threads", "1", "--out", "runs/own"]
    assert run(["train", "reviews", *named, *arguments]) == 0


def test_a_file_of_texts_and_a_model_are_a_run(
    little: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (little / "ownwords.py").write_text(OWN)
    monkeypatch.syspath_prepend(little)
    lines = [
        f"the {word} film was {word},{'good' if place % 2 else 'bad'}" for place, word in enumerate("abcdefghijkl")
    ]
    (little / "mydata.csv").write_text("\n".join(["text,label", *lines]))
    assert run(["audit", "mydata.csv", "--model", "ownwords:Mean", "--target-clients", "32"]) == 2
    assert "32 sentences, 'texts:mydata.csv' has 2 for" in (told := capsys.readouterr().err)
    assert "--target-clients 2" in told
    assert run(["audit", "mydata.csv"]) == 2
    assert "gradveil audit mydata.csv --model small-encoder" in capsys.readouterr().err
    assert run(["check", "--data", "mydata.csv", "--model", "ownwords:Mean", "--set", "client.batch=1"]) == 0


def test_a_table_and_a_model_are_a_training(little: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{20 + number},{number % 3},{number % 2}" for number in range(40)]
    (little / "people.csv").write_text("\n".join(["age,ward,ill", *rows]))
    words = ["train", "people.csv", "--model", "tabular-mlp", "--set", "data.label_column=ill", "--rounds", "1"]
    assert run([*words, "--workers", "1"]) == 0
    assert "3 clients instead of 10: 'people.csv' has 30 rows" in capsys.readouterr().err
    trained = load_training(Path("runs/train-tabular-mlp-people")).config
    assert (trained.clients, trained.local and trained.local.batch) == (3, 8)
    assert run([*words[:1], *words[2:], "--data", "people.csv", "--workers", "1"]) == 0
    assert "Resuming the run in runs/train-tabular-mlp-people" in capsys.readouterr().err
    assert run([*words, "--set", "clients=10"]) == 2
    assert "local.batch: is 8, and the smallest of 10 clients has 3 examples" in capsys.readouterr().err
    for given, place in ((["people.csv"], "people.csv: "), ([], "RUN: "), (["--data", "people.csv"], "--model: ")):
        assert run(["train", *given]) == 2
        told = capsys.readouterr().err
        assert place in told
        assert "gradveil train" in told


def test_options_of_the_command_line_are_kept_whatever_their_order() -> None:
    options = ["model.options.depth=2", 'model.name="small-decoder"']
    for settings in (options, options[::-1]):
        assert read_training("reviews", {}, settings).model.options == {"depth": 2}
    assert read_training("reviews", {}, ['model.name="small-encoder"']).model.options == {"width": 32, "depth": 1}
