"""The wheel is small, holds all data files, and works in an environment and a folder of its own."""

import json
import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.conftest import ROOT, Installed

pytestmark = pytest.mark.processes


def test_wheel_has_little_beside_its_modules(installed: Installed) -> None:
    """The modules are 1.2 MB of it; data that would not go unnoticed belongs in benchmarks/ or in a user's cache."""
    assert installed.wheel.stat().st_size < 1_500_000
    with ZipFile(installed.wheel) as wheel:
        beside = sum(file.compress_size for file in wheel.infolist() if not file.filename.endswith(".py"))
    assert beside < 200_000


def required(name: str) -> set[str]:
    """Return the installed distributions that one needs, itself too, without its extras."""
    left, known = [name], set[str]()
    while left:
        if (one := re.sub(r"[-_.]+", "-", left.pop()).lower()) not in known:
            known.add(one)
            plain = (text for text in metadata.requires(one) or () if "extra ==" not in text and ";" not in text)
            left += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in plain]
    return known


def test_a_plain_installation_without_torch_is_at_most_300_megabytes() -> None:
    """Without torch and what it brings along; with compiled bytecode, as pip leaves it."""
    sizes = {}
    for name in required("gradveil") - required("torch"):
        files = metadata.distribution(name).files or ()
        sizes[name] = sum(path.stat().st_size for each in files if (path := Path(str(each.locate()))).is_file())
    assert {"numpy", "scipy", "pydantic", "typer"} <= set(sizes)
    assert sum(sizes.values()) <= 300e6


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
