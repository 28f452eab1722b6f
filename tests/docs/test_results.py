"""The tables of the page that were recorded as files print what was recorded."""

import json
from pathlib import Path

HERE = Path(__file__).parents[2]
UPDATES = {"none": "raw", "dp(clip=20, sigma=1e-3)": "DP-SGD", "prune(0.99)": "pruned 0.99"}
COLUMNS = ("1", "4", "16", "64", "4 distinct", "16 distinct", "64 distinct")


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def test_labels_of_a_batch_are_what_was_recorded():
    recorded = json.loads((HERE / "benchmarks/results/labels-cpu-2-cores.json").read_text("utf-8"))["results"]
    page = (HERE / "docs/results.md").read_text("utf-8").partition("## Labels of a batch")[2].partition("\n## ")[0]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "%" in line]
    printed = [[cell.strip(" ,") for cell in line.strip("|").split("|")] for line in lines]
    expected = []
    for row in recorded:
        if "found" not in row:  # what drawing evenly gives
            continue
        found, other = row["found"]["restore"], row["found"]["wrong batch"]
        weights = f"{row['steps']} steps, {100 * row['right']:.0f}% right" if row["steps"] else "untrained"
        floors = ", ".join(share(other[column]) for column in ("16", "64") if column in other)
        numbers = [share(found.get(column)) for column in COLUMNS]
        expected.append([f"{row['model']}, {row['data']}", weights, UPDATES[row["defence"]], *numbers, floors])
    assert printed == expected
