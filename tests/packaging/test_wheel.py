"""The wheel is small, holds all data files, and works in an environment and a folder of its own."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, Installed

pytestmark = pytest.mark.processes


def test_wheel_is_at_most_a_fifth_above_one_megabyte(installed: Installed) -> None:
    assert installed.wheel.stat().st_size <= 1.2 * 2**20


def test_wheel_holds_every_committed_file_of_the_package(installed: Installed) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = zipfile.ZipFile(installed.wheel).namelist()
    missing = {line.removeprefix("src/") for line in listed.split() if (ROOT / line).is_file()} - set(names)
    assert not missing
    assert not [name for name in names if name.split("/")[0] not in ("gradveil", names[-1].split("/")[0])]


def test_installed_commands_need_no_checkout(installed: Installed, tmp_path: Path) -> None:
    where = installed.run("python", "-c", "import gradveil; print(gradveil.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(where).is_relative_to(installed.bin.parent)
    papers = json.loads(installed.run("gradveil", "list", "papers", "--json", cwd=tmp_path).stdout)
    commands = [command for paper in papers for command in paper["runs"]]
    assert "gradveil audit deep-leakage/faces" in commands
    small = ["--target-clients", "1", "--iterations", "2", "--set", "attacks=['ig']", "--no-control", "--workers", "1"]
    done = installed.run("gradveil", "audit", "deep-leakage/faces", *small, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "none" in done.stdout
    done = installed.run("gradveil", "report", "run", "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
