"""`gradveil check`: a model with its data, options, client and defence, or a whole run file; nothing is attacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.attacks.inversion import inversion
from gradveil.cli.app import run
from gradveil.core.noise import Key
from gradveil.nn.models import build

RUN = """
name = "study"
target_clients = 2
attacks = ["ig(iterations=4)"]
defences = ["none", "prune(0.9)"]
data = { name = "faces", size = 16 }
model = { name = "lenet-zhu" }
client = [{ batch = 1 }, { batch = 2, local = { lr = 0.1, steps = 2 } }]
"""
ATTACKS = """
class Wrong:
    name, simulated_client, knowledge = "wrong", "half", {}

    def __call__(self, *given):
        raise AssertionError("attacked")
"""
NET = """
import torch

def net(channels, size, classes, hidden=4, drop=0.0, broken=False):
    layers = [torch.nn.Linear(channels * size * size, hidden), torch.nn.Dropout(drop), torch.nn.Linear(hidden, classes)]
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    if broken:
        torch.nn.init.constant_(model[3].bias, float("nan"))
    return model
"""
ALONE = ["check", "--model", "lenet-zhu", "--data", "faces", "--size", "16"]


@pytest.fixture(autouse=True)
def nothing_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion.Inversion, "__call__", lambda *_: pytest.fail("attacked"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "study.toml").write_text(RUN)
    (tmp_path / "net_to_check.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    code = run([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_file_is_checked_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "study.toml"]) == 0
    expected = "can be audited with faces, in the run 'study': 2 clients, 2 defences, 1 attack, 2 target clients"
    assert expected in capsys.readouterr().out
    assert [child.name for child in folder.iterdir() if child.is_dir() and child.name != "__pycache__"] == []


def test_equal_problems_of_layers_are_one_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--model", "resnet20", "--data", "faces"]
    assert run(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error: 19 BatchNorm2d layers (body.stem.norm, body.layer1.block0.residual.first.norm, ")
    assert sum(line.startswith("    -> ") for line in lines) == 1
    assert run([*words, "--verbose"]) == 1
    assert sum(line.startswith("    -> ") for line in capsys.readouterr().out.splitlines()) == 19
    assert len(found(capsys, *words)[1]) == 19


def test_metrics_of_a_run_are_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metrics_to_check.py").write_text(
        "def whole(candidate, truth):\n    return (candidate - truth).abs().mean()\n"
    )
    metrics = '["ssim_rescaled", "metrics_to_check:whole"]'
    exit_code, problems = found(capsys, "check", "study.toml", "--set", f"metrics={metrics}")
    assert exit_code == 0
    assert [(each["where"], each["severity"]) for each in problems if each["where"].startswith("metrics")] == [
        ("metrics: metrics_to_check:whole", "warning")
    ]


@pytest.mark.usefixtures("folder")
def test_options_win_over_the_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "study.toml", "--model", "net_to_check:net", "--defence", "gaussian(0.1)"]
    code, problems = found(capsys, *words, "--set", "model.options.broken=true")
    assert code == 1
    assert any("NaN" in problem["what"] for problem in problems)
    assert run([*words, "--size", "20", "--data", "digits", "--budget", "5m"]) == 0
    assert "net_to_check:net can be audited with digits" in capsys.readouterr().out
    assert run([*words, "--iterations", "10"]) == 2
    assert "--iterations 10: changes nothing" in capsys.readouterr().err
    assert run([*words, "--iterations", "10", "--restarts", "2", "--attack", "ig"]) == 0


@pytest.mark.usefixtures("folder")
def test_problems_of_the_experiment_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--set", "target_clients=90"), ("--target-clients", "90")):
        code, problems = found(capsys, "check", "study.toml", *words)
        assert (code, problems[0]["where"]) == (1, "target_clients")
    clients = 'client=[{trainable=["tail.*"]}, {trainable=["tail"]}]'
    code, problems = found(capsys, "check", "study.toml", "--set", clients)
    tried = ("defences[0] 'none'", "defences[1] 'prune(0.9)'")
    wanted = [f"{defence}, client[{i}]" for i in range(2) for defence in tried]
    assert (code, [problem["where"] for problem in problems]) == (1, wanted)


def test_attacks_are_checked_without_running_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "attacks_to_check.py").write_text(ATTACKS)
    for words in (("study.toml",), ("--model", "net_to_check:net", "--data", "faces")):
        code, problems = found(capsys, "check", *words, "--attack", "attacks_to_check:Wrong", "--defence", "none")
        assert code == 1
        assert {(each["where"].rsplit(": ")[-1], each["what"]) for each in problems} == {
            ("simulated_client", "is 'half'")
        }
    assert run(["check", "study.toml", "--attack", "attacks_to_check:Wrong(steps=2)"]) == 2
    assert "'steps'" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_model_alone_takes_options_client_and_defence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--model", "net_to_check:net", "--data", "faces"]
    assert run([*words, "--set", "model.options.hidden=2"]) == 0
    capsys.readouterr()
    code, problems = found(capsys, *words, "--set", "model.options.drop=0.5")
    assert (code, problems[0]["where"], "global generator" in problems[0]["what"]) == (1, "2", True)
    assert "model.prepare=true" in problems[0]["remedy"]
    assert run([*words, "--set", "model.options.drop=0.5"]) == 1
    assert "error: module '2' (Dropout): " in capsys.readouterr().out
    assert run([*words, "--set", "model.options.drop=0.5", "--prepare"]) == 0
    assert run([*ALONE, "--set", "client.local.lr=0.1", "--set", "client.local.steps=2"]) == 0
    capsys.readouterr()
    code, problems = found(capsys, *ALONE, "--defence", "none", "--defence", "cvb(position=nope)")
    assert (code, [problem["where"] for problem in problems]) == (1, ["defences[1] 'cvb(position=nope)', client"])
    code, problems = found(capsys, *ALONE, "--set", 'client.trainable=["tail.*"]')
    assert (code, "matches no parameter" in problems[0]["what"]) == (1, True)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (("--model", "net_to_check:net", "--batch", "1"), "'1.bias' says what went into '1'"),
        (("--model", "net_to_check:net", "--batch", "2"), None),
        (("--model", "vit", "--batch", "1"), "'body.tokens.position' says what went into 'body.tokens.embed'"),
        (
            ("--model", "lenet-zhu", "--batch", "1"),
            "may come back in closed form: the model is a plain chain of 4 layers",
        ),
        (("--model", "lenet-zhu", "--batch", "1", "--defence", "gaussian(0.1)"), None),
    ],
)
def test_models_that_show_an_image_are_warned_of(
    words: tuple[str, ...], shows: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, problems = found(capsys, "check", *words, "--data", "faces", "--size", "16")
    warnings = [p["what"] for p in problems if p["severity"] == "warning" and "closed form" in p["what"]]
    assert code == 0
    assert [shows in what for what in warnings] == ([True] if shows else [])


def test_warnings_are_shown_and_stop_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = NET.replace("    return model\n", "    model[1].bias.requires_grad_(False)\n    return model\n")
    (folder / "frozen_to_check.py").write_text(frozen)
    assert run(["check", "--model", "frozen_to_check:net", "--data", "faces"]) == 0
    out = capsys.readouterr().out
    assert "warning: parameter '1.bias': has requires_grad=False" in out
    assert "No errors: frozen_to_check:net can be audited with faces" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check"], "--model: is missing"),
        (["check", "--model", "lenet-zhu"], "--data: is missing"),
        (["check", "studi.toml"], "is neither a file nor a bundled run"),
        (["check", "study.toml", "--set", "target_clients=0"], "target_clients: is 0"),
        (["check", "study.toml", "--set", "model.options.classes=3"], "model.options.classes: is no option"),
        (["check", "study.toml", "--defence", "gausian(1)"], "gaussian"),
        (["check", "study.toml", "--data", "parquet:nowhere"], "is not there"),
        ([*ALONE, "--set", "model.options.width=3"], "model.width: is not an option"),
        ([*ALONE, "--set", "x"], "is not key=value"),
        (["check", "--model", "lenet-zhu", "--data", "faces", "--size", "6"], "data.size: is 6 -> give at least 7"),
        (["check", "--model", "no_such:net", "--data", "faces"], "there is no module"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_use_exits_with_2(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert expected in " ".join(err.split())
    assert "Traceback" not in out + err


def test_defences_that_cannot_be_read_hide_no_problem_of_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "defences_to_check.py").write_text(
        "import torch\nfrom gradveil.core import Stage, Transform\n\n"
        "class Drawing(Transform):\n    stage = Stage.NOISE\n"
        "    def apply(self, update, state, noise, context):\n"
        "        return {name: value + torch.randn_like(value) for name, value in update.items()}, state\n\n"
        "class Bare(Transform):\n    def apply(self, update, state, noise, context):\n        return update, state\n"
    )
    names = ("nowhere:x", "prune(0.9)", "defences_to_check:Drawing", "defences_to_check:Bare")
    assert run([*ALONE, *(word for name in names for word in ("--defence", name))]) == 2
    told = capsys.readouterr().err
    assert "3 problems" in told
    assert "defences[0]: " in told
    assert "defences[2] 'defences_to_check:Drawing', client: send.Drawing: apply returns different" in told
    assert "defences_to_check:Bare: has no stage" in told
    assert "own" not in told.replace("unknown", "")


def test_a_received_model_is_looked_at_for_traces_of_manipulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = build("lenet-zhu", channels=1, size=16, classes=2, generator=Key(5).generator())
    honest = {name: value.detach().clone() for name, value in net.named_parameters()}
    fished = {name: value.clone() for name, value in honest.items()}
    head = next(name for name in reversed(fished) if name.endswith("weight"))
    fished[head][0] = 0
    save_file(honest, tmp_path / "honest.safetensors")
    save_file(fished, tmp_path / "fished.safetensors")
    save_file({head: torch.zeros(3)}, tmp_path / "other.safetensors")
    assert run([*ALONE, "--received", str(tmp_path / "honest.safetensors")]) == 0
    output = capsys.readouterr().out
    assert "No problems" in output
    assert f"No trace of manipulation in {tmp_path / 'honest.safetensors'}" in output
    normed = build("lenet-zhu", channels=1, size=16, classes=2, norm="batch", generator=Key(5).generator())
    save_file(normed.state_dict(), tmp_path / "normed.safetensors")
    batchnorm = ["--set", 'model.options={norm="batch"}', "--received", str(tmp_path / "normed.safetensors")]
    assert run([*ALONE, *batchnorm]) == 1  # it can't be audited as it is, which is no trace of anybody
    assert "No trace of manipulation" in capsys.readouterr().out
    assert run([*ALONE, "--received", str(tmp_path / "fished.safetensors")]) == 1
    assert "fishing: 1 of 2 classes have no weights" in " ".join(capsys.readouterr().out.split())
    files = ["--received", str(tmp_path / "honest.safetensors"), "--previous", str(tmp_path / "fished.safetensors")]
    assert run([*ALONE, *files]) == 0
    for wrong, expected in (
        (["--received", str(tmp_path / "other.safetensors")], "is missing, the model has"),
        (["--received", str(tmp_path / "nothing.safetensors")], "cannot be read"),
        (["--previous", str(tmp_path / "honest.safetensors")], "add --received"),
    ):
        capsys.readouterr()
        assert run([*ALONE, *wrong]) == 2
        assert expected in " ".join(capsys.readouterr().err.split())


class Normed(nn.Module):
    """A model that is evaluated with the running statistics that came."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.first(x.flatten(1)))))

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("prepared", [False, True])
def test_running_statistics_that_came_are_looked_at(
    prepared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the model is prepared to do without them: they are what the server sent."""
    received = {name: value.clone() for name, value in Normed().state_dict().items()}
    received["norm.running_mean"] += 1e4  # a mean is what the data are
    words = ["check", "--model", "tests.cli.test_check:Normed", "--data", "faces", "--size", "16"]
    words += ["--set", "model.prepare=true", "--set", "model.batchnorm=group"] if prepared else []
    save_file(received, tmp_path / "honest.safetensors")
    files = ["--received", str(tmp_path / "honest.safetensors"), "--previous", str(tmp_path / "before.safetensors")]
    save_file(Normed().state_dict() | {n: v for n, v in received.items() if n.endswith(("weight", "bias"))}, files[-1])
    assert run([*words, *files]) == 0
    received["norm.running_var"][3] = float("nan")
    save_file(received, tmp_path / "broken.safetensors")
    capsys.readouterr()
    assert run([*words, "--received", str(tmp_path / "broken.safetensors")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "norm.running_var" in out
    assert "not finite: holds NaN" in out
    if not prepared:
        save_file(received | {"norm.running_mean": torch.zeros(3)}, tmp_path / "other.safetensors")
        assert run([*words, "--received", str(tmp_path / "other.safetensors")]) == 2
        assert "norm.running_mean: is (3,), the model has (8,)" in " ".join(capsys.readouterr().err.split())
