"""The wheel, built from the source distribution and installed where no checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_PARTS = ("src", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")


class Installed(NamedTuple):
    """An installed wheel."""

    wheel: Path
    bin: Path

    def run(self, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program of its environment."""
        return _run([str(self.bin / words[0]), *words[1:]], cwd, **env)


def _run(words: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "GRADVEIL_DATA")}
    return subprocess.run(words, cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=300, check=False)


def _built(kind: str, source: Path, out: Path) -> Path:
    """Build `kind` (sdist or wheel) of a source tree, without an environment of its own: nothing is downloaded."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = _run([sys.executable, "-c", code], source)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build an sdist of a copy, a wheel of the sdist, and install that next to the packages of this environment."""
    home = tmp_path_factory.mktemp("packaging")
    checkout, out = home / "checkout", home / "dist"
    checkout.mkdir()
    out.mkdir()
    for part in _PARTS:
        if (ROOT / part).is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / part, checkout / part, ignore=skipped)
        else:
            shutil.copy(ROOT / part, checkout / part)
    with tarfile.open(_built("sdist", checkout, out)) as archive:
        archive.extractall(home / "unpacked", filter="data")
    (unpacked,) = (home / "unpacked").iterdir()
    wheel = _built("wheel", unpacked, out)
    venv.create(home / "env", with_pip=False)
    (purelib,) = (home / "env").glob("lib/python*/site-packages")
    words = ["-m", "pip", "--disable-pip-version-check", "--python", str(home / "env/bin/python"), "install", "-q"]
    done = _run([sys.executable, *words, "--no-deps", "--no-index", str(wheel)], home)
    assert done.returncode == 0, done.stderr
    # A line of a .pth file adds a folder without reading the .pth files in it: the checkout of an editable installation
    # stays out.
    (purelib / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(wheel, home / "env/bin")
