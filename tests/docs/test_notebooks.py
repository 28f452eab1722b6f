"""The notebooks run from the first cell to the last, and are committed with what they print."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.docs.test_pages import DOCS, ROOT

NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
SHORT = {"ITERATIONS": 5, "TARGETS": 2, "ROUNDS": 1}
"""Values of the parameter cell in a test."""


def cells(notebook: Path) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_outputs(notebook: Path) -> None:
    outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells(notebook))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_parameters_of_a_notebook_are_those_that_the_test_shortens(notebook: Path) -> None:
    (parameters,) = (cell for cell in cells(notebook) if "parameters" in cell["metadata"].get("tags", []))
    assert set(re.findall(r"^(\w+) = \d+", "".join(parameters["source"]), re.MULTILINE)) <= set(SHORT)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own machinery
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the environment is older than pyproject.toml: make")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(notebook, as_version=4)
    for cell in book.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = re.sub(r"^(\w+) = \d+", lambda line: f"{line[1]} = {SHORT[line[1]]}", cell.source, flags=re.M)
    resources = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(book, timeout=600, resources=resources, kernel_name="python3").execute()
    assert [cell.execution_count for cell in done.cells if cell.cell_type == "code"] == list(
        range(1, len(cells(notebook)) + 1)
    )
