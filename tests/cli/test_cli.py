"""The command line: exit codes, output, and errors without tracebacks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from rich.console import Console

import gradveil
from gradveil.audit import audit_run, budgets
from gradveil.audit.gate import gate
from gradveil.audit.run_directory import Run, load_run
from gradveil.cli import main
from gradveil.cli.app import run
from gradveil.cli.audit_output import above_table
from gradveil.core.errors import INTERRUPTED, GradveilError
from tests.cli.small_run import audit
from tests.report.trials import row


def test_audit_writes_a_run_and_its_report(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit() == 0
    out, err = capsys.readouterr()
    assert "prune(0.9)" in out
    assert out.startswith("Verdict: The only defence is not tested (prune(0.9)).")
    assert "runs/small/report.html" in out
    assert "2 trials of 2 target clients" in err
    assert "[2/2]" in err
    assert (small / "runs/small/report.html").read_text().startswith("<!")


def test_options_win_over_the_file(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--target-clients",
        "1",
        "--defence",
        "none",
        "--seed",
        "3",
        "--set",
        "data.size=20",
        "--no-images",
        "--json",
    ]
    assert audit(*words, "--out", "here") == 0
    (row,) = json.loads(capsys.readouterr().out)["trials"]
    assert (row["target_clients"], row["defence"], row["seed"]) == (1, "none", 3)
    info = json.loads((small / "here/run.json").read_text())
    assert info["config"]["data"]["size"] == 20
    assert info["command"].startswith("gradveil audit small.toml --target-clients 1 --defence none --seed 3")
    assert not list((small / "here").rglob("*.safetensors"))


def test_attacks_on_a_defence_share_a_budget(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        audit("--defence", "none", "--attack", "ig", "--attack", "gi(restarts=1)", "--budget", "24", "--explain") == 0
    )
    trials = load_run(small / "runs/small").trials
    assert [[record["iterations"] for record in trial.records] for trial in trials] == [[6, 6], [6, 6]]
    assert "share 24 target-iterations" in " ".join(capsys.readouterr().out.split())
    assert audit("--budget", "a lot") == 2


def test_custom_models_have_a_budget_by_default(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = "import torch\n\ndef net(channels, size, classes):\n    flat = torch.nn.Flatten()\n"
    (small / "net_of_cost.py").write_text(
        net + "    return torch.nn.Sequential(flat, torch.nn.Linear(channels * size * size, classes))\n"
    )
    monkeypatch.syspath_prepend(small)
    monkeypatch.setattr(budgets, "AUTO_SECONDS", 1.0)
    words = ["--defense", "none", "--set", "model.name=net_of_cost:net"]

    def ran(*more: str) -> tuple[str | None, float | None]:
        assert audit(*words, *more, "--fresh", "--out", str(small / "out")) == 0
        run = load_run(small / "out")
        return run.info["config"]["budget"], run.trials[0].info["budget_share"]

    budget, share = ran("--attack", "ig")
    assert budget == "auto"
    assert share is not None
    assert ran("--attack", "ig(iterations=4)") == (None, None)
    assert ran("--attack", "ig", "--iterations", "3", "--budget", "none") == (None, None)


def test_the_run_names_no_folder_of_this_machine(small: Path) -> None:
    assert audit("--out", str(small / "out"), "--data-dir", str(small)) == 0
    texts = [file.read_text() for file in (small / "out").rglob("*.json")]
    assert texts
    assert not any(str(small) in text for text in texts)


class InterruptedPipe(io.StringIO):
    """Somebody presses Ctrl-C while a line is on its way into the pipe."""

    def flush(self) -> None:
        if "[1/2]" in self.getvalue() and not self.getvalue().count("Stopped."):
            raise KeyboardInterrupt


@pytest.mark.usefixtures("small")
def test_interrupt_prints_the_command_to_continue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gradveil", "audit", "small.toml", "--fresh"])
    pipe = InterruptedPipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert audit() == 130
    lines = pipe.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines if "[1/2]" in line] == [
        "[1/2] ig(iterations=4) against none, seed 0"
    ]
    assert lines[-2:] == [
        "Stopped. Finished trials are kept in runs/small. To go on, run the same command again:",
        "  gradveil audit small.toml",
    ]


def test_fail_above_is_a_gate(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--set", "threshold=-0.99", "--fail-above", "0.5") == 3
    err = capsys.readouterr().err
    assert "--fail-above 50%: failed. 1 of 1 setting is above it." in err
    (line,) = [line for line in err.splitlines() if line.startswith("prune(0.9)")]
    assert line.split()[-6:-2] == ["2/2", "100%", "recovered", "34.2–100%"]
    assert "runs/small/report.html" in err
    assert audit("--out", "other", "--fail-above", "0.1") == 1
    err = capsys.readouterr().err
    assert "--fail-above 10%: not shown." in err
    assert "prune(0.9) (gradient) is not tested." in err
    assert "To show 10% takes 35 images per setting with none recovered." in err
    weaker = ["--accept", "few-images", "--accept", "not-tested"]
    assert audit("--out", "other", "--fail-above", "0.1", *weaker) == 0
    err = capsys.readouterr().err
    assert "--fail-above 10%: passed." in err
    assert "Weakened by --accept few-images (the measured rate counts" in err
    assert audit("--accept", "few-images") == 2
    assert audit("--out", "bare", "--defence", "none", "--set", "threshold=-0.99", "--fail-above", "0.5") == 3


def test_audit_and_summary_write_the_same_files_for_ci(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--sarif", "ci.sarif", "--junit", "ci.xml", "--fail-above", "0.5"]
    assert audit("--set", "threshold=-0.99", *files) == 3
    cases, (result,) = (
        (small / "ci.xml").read_text(),
        json.loads((small / "ci.sarif").read_text())["runs"][0]["results"],
    )
    assert 'failures="1" errors="0" skipped="1"' in cases
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "small.toml"
    assert run(["summary", "runs/small", *files]) == 3
    assert "--fail-above 50%: failed." in capsys.readouterr().err
    assert (small / "ci.xml").read_text() == cases
    (again,) = json.loads((small / "ci.sarif").read_text())["runs"][0]["results"]
    assert again.pop("locations") != result.pop("locations")  # the report, since a summary has no run file
    assert again == result
    assert run(["summary", "runs/small", "--junit", "-"]) == 0
    assert "<testsuites" in capsys.readouterr().out
    assert run(["summary", "runs/small", "--fail-above", "1"]) == 1


@pytest.mark.usefixtures("small")
def test_files_for_ci_that_cannot_be_written_stop_an_audit_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--sarif", "nowhere/a.sarif", "--junit", "nowhere/a.xml") == 2
    err = capsys.readouterr().err
    assert "--sarif: 'nowhere' is not a folder" in err
    assert "--junit: 'nowhere' is not a folder" in err
    assert not Path("runs").exists()


def test_trials_above_the_gate_say_where_they_stand() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    trials = [each.trial for each in (row(8, trained=20, seed=1), row(1, trained=0, simulated_client="naive"))]
    console.print(above_table(gate(Run({"trials": []}, trials), 0.01).above))
    assert [" ".join(line.split()) for line in console.export_text().splitlines()] == [
        "defence verdict attack seed client round attacker images 95% CI baseline",
        "dgp LEAKS ig 1 gradient 20 knows the defence 8/32 25% recovered 13.3–42.1% 0% recovered",
        "dgp LEAKS ig 0 gradient 0 ignores the defence 1/32 3.1% recovered 0.6–15.7% 0% recovered",
    ]


@pytest.mark.usefixtures("small")
def test_failed_trial_does_not_pass_the_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(audit_run, "recover", broken)
    assert audit("--fail-above", "1") == 1
    err = capsys.readouterr().err
    assert "--fail-above 100%: not shown." in err
    assert err.count("failed: MemoryError: too large") == 4
    monkeypatch.undo()


def test_report(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit()
    assert run(["report", "runs/small", "--out", "page.html"]) == 0
    assert "page.html" in capsys.readouterr().out
    assert (small / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["audit", "facs"], "did you mean 'faces'"),
        (["audit", "small.toml", "--attack", "idg"], "'idg'"),
        (["audit", "small.toml", "--target-clients", "0"], "give at least 1"),
        (["audit", "small.toml", "--set", "x"], "is not key=value"),
        (["audit", "small.toml", "--target-clients", "many"], "--target-clients"),
        (["audit", "small.toml", "--fail-above", "2"], "--fail-above"),
        (["audit", "small.toml", "--device", "cuda:77"], "is not available"),
        (["audit"], "RUN"),
        (["summary", "nowhere"], "is not a run directory"),
        (["report", "nowhere"], "is not a run directory"),
        (["check", "--model", "lenet", "--data", "faces"], "did you mean 'lenet-zhu'"),
        (["check", "--model", "lenet-zhu", "--data", "face"], "did you mean 'faces'"),
        (["list", "colours"], "colours"),
        (["nonsense"], "nonsense"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_use_exits_with_2_and_no_traceback(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert "Traceback" not in out + err


@pytest.mark.usefixtures("small")
def test_all_problems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "small.toml", "--target-clients", "0", "--attack", "idg", "--set", "data.siz=3"]) == 2
    err = capsys.readouterr().err
    assert "3 problems:" in err
    assert "did you mean 'size'?" in err


def test_debug_shows_the_error() -> None:
    with pytest.raises(GradveilError, match="bundled run"):
        run(["audit", "facs"], debug=True)


def test_check_finds_nothing_in_a_good_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--model", "lenet-zhu", "--data", "faces"]) == 0
    assert "can be audited" in capsys.readouterr().out


def test_check_finds_problems(small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (small / "users_net_of_check.py").write_text(
        "import torch\n\n\ndef net(channels, size, classes):\n"
        "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * size * size, classes))\n"
        "    torch.nn.init.constant_(model[1].bias, float('nan'))\n    return model\n"
    )
    monkeypatch.syspath_prepend(small)
    assert run(["check", "--model", "users_net_of_check:net", "--data", "faces", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)
    assert any(problem["severity"] == "error" and "NaN" in problem["what"] for problem in problems)


def test_output_of_a_users_model_is_not_in_the_result(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "users_talking_net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def forward(self, x):\n"
        "        print('shape', x.shape)\n        return super().forward(x)\n\n\ndef net(channels, size, classes):\n"
        "    return Net(nn.Flatten(), nn.Linear(channels * size * size, classes))\n"
    )
    monkeypatch.syspath_prepend(small)
    for words in (["audit", "small.toml", "--workers", "1"], ["check", "small.toml"]):
        assert run([*words, "--set", "model.name=users_talking_net:net", "--json"]) == 0
        out, err = capsys.readouterr()
        assert isinstance(json.loads(out), dict if words[0] == "audit" else list)
        assert "shape" in err


def test_script_that_is_no_module_is_reported(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "users_script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--lr', '1'])\n")
    monkeypatch.syspath_prepend(small)
    assert run(["check", "--model", "users_script:net", "--data", "faces"]) == 2
    assert "importing 'users_script' raised SystemExit: 2" in capsys.readouterr().err


def test_check_names_the_layer_of_a_path(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "users_numbered_net.py").write_text(
        "from torch import nn\n\n\ndef net(channels, classes):\n"
        "    model = nn.Sequential(nn.Conv2d(channels, 2, 5), nn.BatchNorm2d(2), nn.Flatten())\n"
        "    model.append(nn.Linear(2 * 28 * 28, classes))\n"
        "    nn.init.constant_(model[0].bias, float('inf'))\n    return model\n"
    )
    monkeypatch.syspath_prepend(small)
    assert run(["check", "--model", "users_numbered_net:net", "--data", "faces"]) == 1
    out = capsys.readouterr().out
    assert "error: module '1' (BatchNorm2d): BatchNorm2d in training mode" in out
    assert "error: parameter '0.bias': holds NaN or infinity" in out
    assert run(["check", "--model", "users_numbered_net:net", "--data", "faces", "--json"]) == 1
    assert "1" in {problem["where"] for problem in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("command", ["", "audit", "report", "summary", "list", "check", "account", "bound"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Exit codes" in out if not command else "Examples" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"gradveil {gradveil.__version__}"


@pytest.mark.processes
def test_the_module_is_the_command() -> None:
    words = [sys.executable, "-m", "gradveil", "audit", "facs"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "did you mean 'faces'" in done.stderr
    debug = subprocess.run([*words, "--debug"], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" in debug.stderr


def test_ctrl_c_is_quiet_during_imports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Impatient(MetaPathFinder):
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname == "gradveil.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "gradveil.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "Interrupted.\n")
