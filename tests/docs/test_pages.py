"""The code on the documentation's pages runs, is as short as promised, and does what the page says."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil.data import load
from gradveil.defences import Defence, chain

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITE = ("how-to/write-a-defence.md", "how-to/write-an-attack.md", "how-to/write-a-metric.md")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def execute(page, iterations=None):
    """Run the code of a page, with fewer iterations where a number is given."""
    space: dict = {"__name__": "docs"}
    for block in blocks(page):
        code = block if iterations is None else re.sub(r"iterations=\d+", f"iterations={iterations}", block)
        exec(compile(code, page, "exec"), space)
    return space


@pytest.mark.parametrize("page", WRITE)
def test_adding_one_takes_at_most_thirty_lines(page):
    for block in blocks(page)[:-1]:
        assert len([line for line in block.splitlines() if line.strip()]) <= 30


def test_a_defence_of_the_page_meets_naive_and_knowing_attackers():
    page = execute("how-to/write-a-defence.md", iterations=10)
    result = page["result"]
    trials = {(c["defence"], c["attack"]): c for c in result.summary()}
    assert {name for name, _ in trials} == {"none", "sign-bits", "gaussian(std=0.01) + sign-bits"}
    assert all(trial["failed"] is None for trial in trials.values())
    naive, knowing = (trials["sign-bits", f"{name}(iterations=10)"] for name in ("ig", "cdia"))
    assert knowing["distance"] == naive["distance"] > 0.1
    given = page["net"], (page["target_clients"].inputs[:1], page["target_clients"].targets[:1])
    masked = gv.audit(
        *given, defences=[Defence("mask", send=chain(mask=page["RandomMask"]()))], attacks=["ig(iterations=2)"]
    )
    (trial,) = (trial for trial in masked.summary() if trial["defence"] == "mask")
    assert 0.8 < trial["distance"] < 1.2, "half of the entries, twice as large"


def test_attacks_of_the_page_recover_and_pruning_changes_that():
    result = execute("how-to/write-an-attack.md", iterations=60)["result"]
    trials = {(c["defence"], c["attack"]): c for c in result.summary()}
    assert all(trial["failed"] is None for trial in trials.values())
    assert trials["none", "first-layer"]["psnr_mean"] > 40
    assert trials["prune(0.9)", "first-layer"]["psnr_mean"] < 30
    assert trials["none", "patient"]["label_accuracy"] == 1.0
    assert trials["none", "from-mean"]["label_accuracy"] == 1.0
    assert trials["none", "from-mean"]["seconds"] > trials["none", "first-layer"]["seconds"] > 0
    assert trials["none", "from-mean"]["attack_check"] != "suspect"
    assert trials["none", "from-mean"]["psnr_mean"] > trials["prune(0.9)", "from-mean"]["psnr_mean"]


def test_the_attack_of_the_page_undoes_its_defence_and_a_search_does_not():
    page: dict = {"__name__": "docs"}
    for code in blocks("how-to/write-an-attack.md")[:-1]:  # the last one is the audit
        exec(code, page)
    public, targets = load("digits")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.Sigmoid(), nn.Linear(32, 10))
    searches = ["portfolio", "portfolio(simulated_client=naive)", 'portfolio(objective="layerwise-cosine")']
    searches += ['portfolio(objective="signs")']
    general = [*searches, "portfolio(undo_entries=true)", "learned(epochs=15)"]
    result = gv.audit(
        net,
        (targets.inputs[:8], targets.targets[:8]),
        defences=[Defence(f"steps(std={std})", send=chain(steps=page["Steps"](std))) for std in (1e-4, 1)],
        attacks=[page["OffSteps"](), *general],
        public=(public.inputs[:50], public.targets[:50]),
        mean=targets.mean,
        std=targets.std,
        iterations=15,
    )
    images = {(trial["defence"], trial["attack"]): trial["recovered"] for trial in result.summary()}
    assert images["steps(std=0.0001)", "off-steps"] >= 6
    assert images["steps(std=1)", "off-steps"] == 0
    assert not any(images["steps(std=0.0001)", each] for each in searches)
    levels = {verdict.defence: verdict.level for verdict in result.verdicts}
    assert levels["steps(std=0.0001)"] == "broken"
    assert levels["steps(std=1)"] == "not broken"


def test_a_metric_of_the_page_is_scored(monkeypatch):
    """The page's function is imported as `mine:edges`, as a user's file is."""
    mine = ModuleType("mine")
    exec(blocks("how-to/write-a-metric.md")[0], vars(mine))
    monkeypatch.setitem(sys.modules, "mine", mine)
    trials = {trial["defence"]: trial for trial in execute("how-to/write-a-metric.md")["result"].summary()}
    assert all(trial["failed"] is None for trial in trials.values())
    assert 1 >= trials["none"]["mine:edges_mean"] > trials["prune(0.9)"]["mine:edges_mean"]


def test_the_training_of_the_page_measures_the_cost_of_a_defence(capsys):
    result = execute("how-to/train-with-defences.md")["result"]
    assert result.accuracy["none"] > 0.5
    assert result.bytes["prune(0.9)"] < result.bytes["none"]
    assert "prune(0.9)" in capsys.readouterr().out


def test_pages_of_the_code_have_public_names_with_their_docstrings(hook):
    page = hook.api("gradveil.attacks")
    assert "## make_attack\n\n```python\nmake_attack(text: str, own: bool=False) -> Any\n```\n\nBuild an" in page
    assert "\n## _" not in page
    bare = [name for face in hook.FACES for name in re.findall(r"## ([\w.]+)\n\n(?=## |$)", hook.api(face))]
    assert bare == []


def test_tables_say_what_the_settings_allow(hook):
    tables = {name: make() for name, make in hook.TABLES.items()}
    assert '\n| `rounds` | one of: first, last, all, none | `"last"` | Observed rounds' in tables["attacks"]
    assert "\n| `ratio` | a number in [0, 1) | required | Share of entries that are" in tables["defences"]
    assert "\n| `threshold` | number above -1 to 1 | `0.5` | " in tables["audit"]
    assert "\n| `--fail-above RATE` |" in tables["commands"]
    assert "| `ssim` |" in tables["metrics"]


def test_every_key_of_a_run_file_has_a_meaning(hook):
    tables = ("audit", "client", "privacy", "observed", "train-plan", "training", "rounds", "data-table")
    tables += ("model-table", "local", "partition", "server", "pace")
    assert [line for name in tables for line in hook.TABLES[name]().splitlines() if line.endswith("|  |")] == []


def test_pages_ask_for_tables_that_exist(hook):
    asked = [name for page in DOCS.rglob("*.md") for name in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text())]
    assert sorted(asked) == sorted(hook.TABLES)


def test_a_notebook_becomes_a_page_with_pictures(hook):
    text, pictures = hook.notebook(DOCS / "tutorials/your-model.ipynb")
    assert text.startswith("# Attack your own model")
    assert "```text\nVerdict: " in text
    assert all(f"]({name})" in text and content.startswith(b"\x89PNG") for name, content in pictures.items())


def test_site_has_the_colours_and_fonts_of_the_report(hook):
    report = (ROOT / "src/gradveil/report/templates/style.css").read_text("utf-8")
    light, dark = re.search(r"--bg: light-dark\((#\w+), (#\w+)\)", report).groups()
    assert re.findall(r"--md-default-bg-color: (#\w+);", hook.colours()) == [light, dark]
    assert re.search(r"--sans: ([^;]+);", report)[1] in hook.colours()
