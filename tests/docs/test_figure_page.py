"""The commands and the code of the page on figures and tables run, with attacks and trainings cut short."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gradveil.cli.app import run

PAGE = (Path(__file__).parents[2] / "docs/how-to/figures-and-tables.md").read_text("utf-8")
SHORT = {"--target-clients": "2", "--iterations": "4", "--rounds": "2"}


def commands() -> list[list[str]]:
    """Every command of the page, its numbers of iterations, rounds and target clients made small."""
    lines = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    words = [shlex.split(line) for line in lines]
    return [[SHORT.get(before, word) for before, word in zip(["", *line], line, strict=False)] for line in words]


def test_the_commands_of_the_page_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written: list[str] = []
    for program, *words in commands():
        assert program == "gradveil"
        targets = ["0-1" if word == "0-3" else word for word in words]
        more = ["--workers", "1"] if words[0] in ("audit", "train") else []
        assert run([*targets, *more]) == 0, words
        written += [words[words.index(key) + 1] for key in ("--out", "--latex", "--markdown") if key in words]
    assert len(written) > 6
    assert [name for name in written if name != "-" and not Path(name).exists()] == []


def test_the_code_of_the_page_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block.replace("iterations=60", "iterations=4"), "figures-and-tables.md", "exec"), {})
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png"]
