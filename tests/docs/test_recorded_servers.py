"""The tables of malicious servers and of local steps hold the recorded numbers."""

import csv
import re
from pathlib import Path

HERE = Path(__file__).parents[2]
PAGE = (HERE / "docs/explanation/server-inspection.md").read_text("utf-8")


def recorded(name):
    with (HERE / "benchmarks/results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(page, start):
    """Return the cells of the lines of a table that start so."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith(start)
    ]


def test_table_of_attacks_holds_what_was_recovered():
    lines = {
        (
            line["model"],
            re.sub("iterations=600(, )?", "", line["attack"]).replace("()", ""),
            line["data"],
            line["state"],
        ): line
        for line in recorded("hidden-servers.csv")
        if line["kind"] == "attack" and line["batch"] == "32"
    }
    table = PAGE.partition("## Attacks against the guard")[2].partition("## What passes")[0]
    rows = [row for row in cells(table, "| ") if row[1].startswith("`")]
    assert {row[0] for row in rows} == {model for model, *_ in lines}
    for model, attack, *results in rows:
        for data, cell in zip(("mnist", "cifar10"), results, strict=False):
            for state, part in zip(("fresh", "trained"), cell.split(", "), strict=True):
                line = lines[model, attack.strip("`"), data, state]
                wanted = "" if line["wanted"] == "32" else f" of {line['wanted']}"
                assert part == f"{line['recovered']} → {line['refusing_malice']}{wanted}"


def test_table_of_honest_federations_holds_what_was_recorded():
    lines = [line for line in recorded("hidden-servers.csv") if line["kind"] == "honest"]
    rows = [row for row in cells(PAGE, "| MNIST |") + cells(PAGE, "| CIFAR-10 |") if len(row) == 6]
    assert {line["rounds"] for line in lines} == {"200"}
    names = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
    told = {
        (
            names[line["data"]],
            line["model"],
            line["state"],
            str(200 * int(line["guards"])),
            line["alarms"],
            line["leak"],
        )
        for line in lines
    }
    assert {tuple(row) for row in rows} <= told
    assert {row[:3] for row in told} == {tuple(row[:3]) for row in rows}


def test_table_of_local_steps_holds_the_scores():
    page = (HERE / "docs/results.md").read_text("utf-8").partition("## Many local steps")[2].partition("\n## ")[0]
    for line in recorded("local-steps.csv"):
        if line["images"] == "8" or line["client"] == "0":
            assert f"{float(line['ssim']):.2f} ({float(line['seconds']):.1f} s" in page
