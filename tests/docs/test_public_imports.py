"""Pages and examples import from the faces alone: `gradveil`, `gradveil.<folder>`, `gradveil.integrations.flower`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
SCRIPTS = [path for path in sorted((ROOT / "examples").rglob("*.py")) if ".venv" not in path.parts]
FACE = re.compile(r"gradveil(\.[a-z]+|\.integrations\.flower)?")


def imported(code: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of this library that code imports, each with the name it takes from it, or none."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "gradveil")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradveil":
            yield from ((node.module or "", alias.name) for alias in node.names)


def private(code: str) -> list[str]:
    """Return what code imports that no face offers.

    >>> private("from gradveil.attacks.inversion.descent import Descent; import gradveil.core.noise")
    ['gradveil.attacks.inversion.descent', 'gradveil.core.noise']
    >>> private("from gradveil.attacks import Descent, Descend; import gradveil as gv; from os import path")
    ['gradveil.attacks.Descend']
    """
    wrong: list[str] = []
    for module, name in imported(code):
        if not FACE.fullmatch(module):
            wrong.append(module)
        elif name and name not in getattr(import_module(module), "__all__", ()):
            wrong.append(f"{module}.{name}")
    return wrong


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_on_a_page_imports_from_faces_alone(page: Path) -> None:
    assert [wrong for block in blocks(page) for wrong in private(block)] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_example_imports_from_faces_alone(script: Path) -> None:
    assert private(script.read_text("utf-8")) == []


def test_pages_and_examples_are_found() -> None:
    assert sum(len(blocks(page)) for page in PAGES) > 10
    assert len(SCRIPTS) >= 3
