"""What `import gradveil` and its folders offer: every name is there, said once for types and once for use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module

import pytest

import gradveil
from tests.architecture.source import SRC, Source, read

PROMISED = {
    *("audit", "train", "invert", "Client", "Local", "Defence", "chain", "parse", "Knowledge", "Observation", "Key"),
    *("GradveilError", "__version__", "audit_epsilon", "open_run"),
}
FACES = [source for source in read(SRC) if source.is_package]


def table(source: Source) -> dict[str, str]:
    """Read the names that a package imports when they are asked for, with their modules."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and source.name(node.func).endswith("lazy_names"):
            return ast.literal_eval(node.args[1])
    return {}


def for_types(source: Source) -> dict[str, str]:
    """Read what a package imports for types from this library, with the modules."""
    blocks = [node for node in source.tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_package_offers_what_users_need() -> None:
    assert set(gradveil.__all__) == PROMISED
    assert set(dir(gradveil)) >= PROMISED
    assert [name for name in PROMISED if getattr(gradveil, name, None) is None] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Klient"):
        gradveil.Klient  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("source", FACES, ids=lambda source: source.module)
def test_every_name_of_a_face_is_there(source: Source) -> None:
    face = import_module(source.module)
    names = getattr(face, "__all__", [])
    assert [name for name in names if not hasattr(face, name)] == []
    assert set(names) <= set(dir(face))


@pytest.mark.parametrize("source", [face for face in FACES if table(face)], ids=lambda source: source.module)
def test_names_for_types_are_those_for_use(source: Source) -> None:
    lazy, typed = table(source), for_types(source)
    assert lazy == {name: module for name, module in typed.items() if name in lazy}
    assert set(lazy) <= set(import_module(source.module).__all__)
    assert list(lazy) == sorted(lazy)


@pytest.mark.parametrize("source", [face for face in FACES if table(face)], ids=lambda source: source.module)
def test_no_name_of_a_face_is_that_of_a_module_in_it(source: Source) -> None:
    """Whichever was imported last would have the name."""
    beside = {face.module for face in read(SRC)}
    assert [name for name in table(source) if f"{source.module}.{name}" in beside] == []


def test_importing_gradveil_imports_no_attack_and_no_training() -> None:
    heavy = "[m for m in sys.modules if m.startswith(('gradveil.attacks', 'gradveil.federated', 'gradveil.defences'))]"
    code = f"import sys, gradveil; print({heavy})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
