"""What only shows something starts at once: help, version, list and completion load no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from typer.main import get_command

import gradveil
from gradveil.cli.app import app, run
from gradveil.cli.index import FILE
from gradveil.cli.make_index import text
from gradveil.core.errors import INTERRUPTED

HEAVY = {"torch", "scipy", "numpy", "pydantic", "sklearn", "skimage", "torchmetrics"}
LOADED = f"print(json.dumps(sorted({HEAVY} & set(sys.modules))), file=sys.stderr)"


def paths(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Walk through the words of every command."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*path, name))


SHOWN = [
    *((*path, "--help") for path in paths(get_command(app))),
    ("--version",),
    ("list",),
    ("list", "attacks"),
    ("list", "defences", "--json"),
    ("list", "feedback"),
    ("list", "dgq"),
]


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code where nothing lies on the path but what is installed."""
    source = str(Path(gradveil.__file__).parents[1])
    words = [sys.executable, "-P", "-c", f"import json, sys\n{code}"]
    given = {"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.processes
def test_showing_loads_nothing_heavy(tmp_path: Path) -> None:
    """In one process: what any of them loaded would still be there at the end."""
    code = "import gradveil\nfrom gradveil.cli.app import run\n"
    code += "".join(f"run({list(words)})\nassert not {HEAVY} & set(sys.modules), {list(words)}\n" for words in SHOWN)
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage: gradveil search ats" in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("gradveil sea", ["search"]),
        ("gradveil audit stu", ["study.toml"]),
        ("gradveil audit faces --attack ad", ["adaptive"]),
        ("gradveil train digits --defence dgp", ["dgp"]),
        ("gradveil check --model resnet2", ["resnet20"]),
        ("gradveil check --data face", ["faces"]),
    ],
)
def test_completion_of_commands_and_values_loads_nothing_heavy(
    tmp_path: Path, typed: str, completed: list[str]
) -> None:
    code = f"import atexit\nfrom gradveil.cli import main\natexit.register(lambda: {LOADED})\nmain()"
    words = {"_GRADVEIL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    (tmp_path / "study.toml").write_text("")
    done = python(code, tmp_path, **words)
    assert done.stdout.split() == completed
    assert json.loads(done.stderr) == []


@pytest.mark.processes
def test_late_imports_come_from_python_and_not_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the folder stands in for Python')")
    (tmp_path / "mine.py").write_text("raise ValueError('my own model was found')")
    words = ["gradveil", "check", "--model", "mine:make", "--data", "digits"]
    done = python(f"sys.argv = {words}\nfrom gradveil.cli import main\nmain()", tmp_path)
    assert "my own model was found" in done.stderr
    assert done.returncode == 2


@pytest.mark.processes
def test_the_name_audit_stays_the_function_and_work_needs_no_scipy_stats(tmp_path: Path) -> None:
    code = "import gradveil, inspect\nfrom gradveil import audit\nassert not 'torch' in sys.modules\n"
    code += "import gradveil.audit.api\nfrom gradveil.audit import api\n"
    code += "assert gradveil.audit is audit and inspect.isfunction(audit) and api.audit_model\nprint('kept')\n"
    # A tenth of the time that every worker process takes to start.
    code += "import gradveil.audit.audit_run, gradveil.federated.training_run\nprint('scipy.stats' in sys.modules)"
    assert python(code, tmp_path).stdout == "kept\nFalse\n"


def test_index_agrees_with_the_tables() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "python -m gradveil.cli.make_index"


def test_the_version_is_looked_up_and_other_names_are_refused() -> None:
    assert gradveil.__version__ == version("gradveil")
    with pytest.raises(AttributeError, match="no attribute 'audits'"):
        _ = gradveil.audits  # pyright: ignore[reportAttributeAccessIssue]


def test_a_wrong_word_for_accept_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "faces", "--fail-above", "0.1", "--accept", "few"]) == 2
    assert "'few' is not one of 'few-images'" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_ctrl_c_is_quiet_while_a_command_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "gradveil.cli.audit_steps", raising=False)
    monkeypatch.delattr("gradveil.cli.audit_steps", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    assert run(["audit", "faces-of-nobody"]) == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


class Impatient:
    """A finder of modules during which somebody presses Ctrl-C."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "gradveil.cli.audit_steps":
            raise KeyboardInterrupt
