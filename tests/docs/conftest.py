"""The hook of the documentation, for the tests of its pages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def hook(monkeypatch):
    """The hook that writes tables and pages; of MkDocs it needs types only."""
    for name in ("config.defaults", "structure.files"):
        stand_in = ModuleType(f"mkdocs.{name}")
        vars(stand_in).update(MkDocsConfig=object, File=object, Files=object)
        monkeypatch.setitem(sys.modules, f"mkdocs.{name}", stand_in)
    spec = importlib.util.spec_from_file_location("pages_of_docs", DOCS / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
