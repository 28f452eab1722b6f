"""The house as a whole: names that are said once, folders of a size that a reader can hold, no circles."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, SRC, Source, read

MOST_FILES = 28
"""Python files of one folder, `__init__.py` included."""


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle of imports, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports(sources: list[Source]) -> dict[str, set[str]]:
    """Map every module to the modules it imports at load, or for types alone; imports inside functions do not count."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in _at_load(source.tree):
            for name in [f"{node.module}.{alias.name}" for alias in node.names]:
                target = name if name in modules else node.module or ""
                if target in modules and target != source.module:
                    graph[source.module].add(target)
    return graph


def _at_load(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    for node in tree.body:
        inside = node.body if isinstance(node, ast.If) else [node]
        yield from (each for each in inside if isinstance(each, ast.ImportFrom))


def twice(names: Iterator[str]) -> list[str]:
    """Return the names that occur more than once.

    >>> twice(iter(["a", "b", "a"]))
    ['a']
    """
    return sorted(name for name, count in Counter(names).items() if count > 1)


def classes(sources: list[Source]) -> Iterator[str]:
    """Yield the names of the classes of all modules."""
    for source in sources:
        yield from (node.name for node in source.tree.body if isinstance(node, ast.ClassDef))


def test_imports_run_in_no_circle() -> None:
    assert circle(imports(read(SRC))) == []


def test_no_two_files_have_one_name() -> None:
    files = (path.name for path in SRC.rglob("*.py") if path.stem not in {"__init__", "__main__"})
    assert twice(files) == []


def test_no_two_classes_have_one_name() -> None:
    assert twice(classes(read(SRC))) == []


def test_folders_hold_at_most_28_files_and_are_not_empty() -> None:
    sizes = Counter(path.parent for path in SRC.rglob("*.py"))
    assert [str(folder) for folder, count in sizes.items() if count > MOST_FILES] == []
    alone = [folder for folder, count in sizes.items() if count == 1 and not any(_below(folder))]
    assert [str(folder) for folder in alone] == []


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*/*.py"))


def test_the_map_for_contributors_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    assert [name for name in named if not (SRC / "gradveil" / name).is_file()] == []


def test_old_paths_are_translated_to_files_that_exist() -> None:
    rows = re.findall(
        r"\| `([\w/]+\.py)`.*\| `([\w/]+\.py)` \|", (ROOT / "docs/old-paths.md").read_text(encoding="utf-8")
    )
    assert len(rows) > 150
    assert [new for _, new in rows if not (SRC / "gradveil" / new).is_file()] == []


def test_every_folder_says_what_it_is_for() -> None:
    assert [source.module for source in read(SRC) if source.is_package and not ast.get_docstring(source.tree)] == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [({"a": {"b"}, "b": {"c"}}, []), ({"a": {"b"}, "b": {"a"}}, ["a", "b", "a"]), ({"a": {"a"}}, ["a", "a"])],
)
def test_a_circle_is_found_where_there_is_one(graph: dict[str, set[str]], found: list[str]) -> None:
    assert sorted(circle(graph)) == sorted(found)


def test_imports_for_types_alone_count_and_those_inside_functions_do_not() -> None:
    texts = {
        "gradveil.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradveil.b import x",
        "gradveil.b": "def f():\n    from gradveil.a import y",
    }
    assert imports([Source(name, text) for name, text in texts.items()]) == {"gradveil.a": {"gradveil.b"}}


MOST_PUBLIC = {"client/client.py:Client": 12, "core/types.py:Transform": 8}
"""Methods and properties of the classes that everything is built on: what somebody who writes one has to know."""


@pytest.mark.parametrize("where", MOST_PUBLIC)
def test_concepts_have_few_public_methods(where: str) -> None:
    path, name = where.split(":")
    tree = ast.parse((SRC / "gradveil" / path).read_text("utf-8"))
    (concept,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [each.name for each in concept.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
    assert len(methods) <= MOST_PUBLIC[where], methods
