"""The GitHub Action: its inputs reach the command as words, and its job ends as the gate does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.conftest import ROOT

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples/github-workflow.yml").read_text("utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
(AUDIT,) = (step for step in STEPS if step.get("id") == "audit")


def test_no_input_is_pasted_into_a_script() -> None:
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 3
    assert not [script for script in scripts if "${{" in script]
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)


def test_every_input_is_used_and_every_one_of_the_example_exists() -> None:
    used = set(re.findall(r"inputs\.([\w-]+)", str(STEPS)))
    assert used == set(ACTION["inputs"])
    (step,) = (step for step in EXAMPLE["jobs"]["audit"]["steps"] if "gradveil" in step["uses"])
    required = {name for name, given in ACTION["inputs"].items() if given.get("required")}
    assert required <= set(step["with"]) <= set(ACTION["inputs"])


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs/how-to/gate-ci.md").read_text("utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block in (ROOT / "examples/github-workflow.yml").read_text("utf-8")


def test_the_job_ends_with_the_exit_code_of_the_audit() -> None:
    assert STEPS[-1]["env"] == {"CODE": "${{ steps.audit.outputs.exit-code }}"}
    for code in (0, 1, 3):
        done = subprocess.run(
            ["bash", "-e", "-c", STEPS[-1]["run"]], env={**os.environ, "CODE": str(code)}, check=False
        )
        assert done.returncode == code


def audited(folder: Path, **env: str) -> tuple[str, dict[str, str]]:
    """Run the audit step in a folder, as a runner does."""
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "FAIL_ABOVE": "0.5", "RUN": "", "ARGS": "", "IMAGES": "false", **files, **env}
    words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", AUDIT["run"]]
    done = subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = (folder / "GITHUB_OUTPUT").read_text().splitlines()
    return done.stdout, dict(line.split("=", 1) for line in lines)


def test_lines_of_args_are_words_whatever_they_hold(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin/gradveil"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n')
    stand_in.chmod(0o755)
    said, outputs = audited(
        tmp_path, RUN="a run.toml", ARGS="--defence=dp(clip=1, sigma=2)\n\n--set=a=$(touch pwned); b\n"
    )
    words = said.splitlines()
    assert words[:4] == ["audit", "a run.toml", "--fail-above", "0.5"]
    assert words[-3:] == ["--no-images", "--defence=dp(clip=1, sigma=2)", "--set=a=$(touch pwned); b"]
    assert not (tmp_path / "pwned").exists()
    assert outputs == {"exit-code": "3", "folder": "gradveil-audit"}
    said, _ = audited(tmp_path, ARGS="--observed=updates", IMAGES="true")
    assert said.splitlines()[1] == "--fail-above"
    assert "--no-images" not in said


@pytest.mark.processes
def test_the_audit_step_writes_report_files_and_summary(tmp_path: Path) -> None:
    assert shutil.which("gradveil", path=str(Path(sys.executable).parent))
    args = "--target-clients=1\n--iterations=2\n--attack=ig\n--defence=none\n--set=threshold=-0.99\n--workers=1"
    _, outputs = audited(tmp_path, RUN="faces", ARGS=args)
    assert outputs["exit-code"] == "3"
    folder = tmp_path / outputs["folder"]
    for name in ("run/report.html", "gradveil.sarif", "gradveil.xml"):
        assert (folder / name).stat().st_size > 300
    assert "`none` |" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
