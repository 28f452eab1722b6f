"""The code on the documentation's pages runs, is as short as promised, and does what the page says."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def execute(page):
    space: dict = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), space)
    return space


@pytest.mark.parametrize("page", ["how-to/write-a-defence.md", "how-to/write-an-attack.md", "how-to/write-a-metric.md"])
def test_adding_one_takes_at_most_thirty_lines(page):
    for block in blocks(page)[:-1]:
        assert len([line for line in block.splitlines() if line.strip()]) <= 30


def test_a_defence_of_the_page_meets_naive_and_knowing_attackers():
    trials = {(c["defence"], c["attack"]): c for c in execute("how-to/write-a-defence.md")["result"].summary()}
    assert {name for name, _ in trials} == {"none", "sign-bits", "gaussian(std=0.01) + sign-bits"}
    assert all(trial["failed"] is None for trial in trials.values())
    naive, knowing = (trials["sign-bits", f"{name}(iterations=300)"] for name in ("ig", "cdia"))
    assert knowing["distance"] == naive["distance"] > 0.1


def test_attacks_of_the_page_recover_and_pruning_changes_that():
    trials = {(c["defence"], c["attack"]): c for c in execute("how-to/write-an-attack.md")["result"].summary()}
    assert all(trial["failed"] is None for trial in trials.values())
    assert trials["none", "first-layer"]["psnr_mean"] > 40
    assert trials["prune(0.9)", "first-layer"]["psnr_mean"] < 30
    assert trials["none", "patient"]["label_accuracy"] == 1.0
    assert trials["none", "from-mean"]["label_accuracy"] == 1.0
    assert trials["none", "from-mean"]["attack_check"] != "suspect"
    assert trials["none", "from-mean"]["psnr_mean"] > trials["prune(0.9)", "from-mean"]["psnr_mean"]


def test_a_metric_of_the_page_is_scored(monkeypatch):
    """The page's function is imported as `mine:edges`, as a user's file is."""
    mine = ModuleType("mine")
    exec(blocks("how-to/write-a-metric.md")[0], vars(mine))
    monkeypatch.setitem(sys.modules, "mine", mine)
    trials = {trial["defence"]: trial for trial in execute("how-to/write-a-metric.md")["result"].summary()}
    assert all(trial["failed"] is None for trial in trials.values())
    assert 1 >= trials["none"]["mine:edges_mean"] > trials["prune(0.9)"]["mine:edges_mean"]


def test_the_reference_has_functions_classes_and_tables(monkeypatch):
    """The hook runs without importing the library; of MkDocs it needs types only."""
    for name in ("config.defaults", "structure.files"):
        stand_in = ModuleType(f"mkdocs.{name}")
        vars(stand_in).update(MkDocsConfig=object, File=object, Files=object)
        monkeypatch.setitem(sys.modules, f"mkdocs.{name}", stand_in)
    spec = importlib.util.spec_from_file_location("pages_of_docs", DOCS / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.reference()["attacks"]
    assert "### make_attack\n\n```python\nmake_attack(text: str, own: bool=False) -> Any\n```\n\nBuild an" in page
    assert '\n| `rounds` | one of: first, last, all, none | `"last"` | Observed rounds that are attacked' in page
    assert "\n| `ratio` | a number in [0, 1) | required | Share of entries that are" in hook.reference()["defences"]
    assert "### STATUSES\n\n```python\nSTATUSES: tuple[Status, ...] = ('converged', 'stalled'" in page
    assert "```\n\nEvery attack that a run file" in page
    assert "### _" not in page


def test_the_training_of_the_page_says_what_a_defence_costs(capsys):
    space: dict = {"__name__": "docs"}
    (first,) = (block for block in blocks("how-to/train-with-defences.md") if "gv.train(" in block)
    exec(compile(first, "how-to/train-with-defences.md", "exec"), space)
    assert space["result"].accuracy["none"] > 0.5
    assert space["result"].bytes["prune(0.9)"] < space["result"].bytes["none"]
    assert "prune(0.9)" in capsys.readouterr().out


def test_the_update_of_the_readme_is_inverted():
    code = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text("utf-8"), re.DOTALL)
    space: dict = {"__name__": "docs"}
    setup = code[0].partition("result = ")[0]
    for block in (setup, code[1]):
        exec(compile(block, "README.md", "exec"), space)
    assert space["found"].images.shape == (1, 1, 32, 32)
    assert space["found"].metrics["psnr"] > 10
