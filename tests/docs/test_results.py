"""The tables of the page that were recorded as files print what was recorded."""

import csv
import json
import re
from pathlib import Path

import pytest
from benchmarks.table_recovery import markdown, written

from gradveil.metrics.statistics import wilson

HERE = Path(__file__).parents[2]


def tables(heading: str) -> list[list[list[str]]]:
    """Read the tables of a section, each without its head: rows of texts."""
    page = (HERE / "docs/results.md").read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = [block.splitlines()[2:] for block in page.split("\n\n") if block.startswith("|")]
    return [[[trial.strip(" *") for trial in line.strip("|").split("|")] for line in block] for block in blocks]


def records(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / "benchmarks/results" / name).read_text("utf-8").splitlines()))


def test_what_guessing_recovers_is_what_was_recorded():
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in records("guess-baselines.csv"):
        rate = 100 * float(row["expected"])
        fewest = f"{row['beyond'] or '–'} ({row['beyond_of_ten'] or '–'})"
        found.setdefault((row["batch"], row["images"]), {})[row["data"]] = f"{rate:.{int(rate < 9.5)}f}%: {fewest}"
    expected = [[*where, row["mnist"], row["cifar10"], row["digits"]] for where, row in found.items()]
    assert tables("What guessing recovers")[0] == expected


def test_recoveries_are_what_was_recorded():
    for row in records("recoveries.csv"):
        cell = f"{row['recovered']} of {row['images']}†?, {float(row['ssim']):.2f} "
        lines = [" | ".join(line) + " " for table in tables(row["section"]) for line in table]
        assert any(re.search(cell, line) for line in lines), row


def test_ats_in_batches_is_what_was_recorded():
    page = tables("ATS undone in batches")[0]
    rows = records("ats-batches.csv")
    counts = ("recovered", "identified", "recovered_as_trained_on", "identified_as_trained_on")
    for printed, row in zip(page, rows, strict=True):
        assert [cell.split(" ")[0].rstrip("†*") for cell in printed[2:6]] == [row[count] for count in counts]
        assert printed[6] == f"{float(row['ssim_mean']):.2f}"
        assert printed[7].startswith(row["verdict"])


def test_every_recorded_file_states_what_its_values_depend_on():
    folder = HERE / "benchmarks/results"
    rows = [
        line.split("|") for line in (folder / "README.md").read_text("utf-8").splitlines() if line.startswith("| `")
    ]
    kinds = {name.strip(" `"): kind.strip() for _, name, kind, _ in rows}
    assert kinds.keys() == {file.name for file in folder.iterdir() if file.is_file()} - {"README.md"}
    assert set(kinds.values()) <= {"drawn", "timing"}


def test_the_shares_under_error_feedback_are_what_was_recorded():
    page = (HERE / "docs/explanation/guarantees.md").read_text("utf-8").partition("### Error feedback")[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    rounds = lines[0][1:]
    with (HERE / "benchmarks/results/feedback-residual.csv").open() as file:
        recorded = {(row["defence"], row["round"]): row for row in csv.DictReader(file)}
    columns = {
        "`dgp`: γ of P": ("dgp", "gamma"),
        "`adgp`: γ of P": ("adgp", "gamma"),
        "largest ‖g‖² so far": ("dgp", "largest_gradient_squared"),
        "Lemma 1, γ of round 1": ("dgp", "lemma_1_with_first_gamma"),
        "Lemma 1, γ of this round": ("dgp", "lemma_1_with_this_gamma"),
        "Theorem 2: mean ‖∇l‖²": ("dgp", "theorem_2_left"),
        "its bound, γ of this round": ("dgp", "theorem_2_right"),
    }
    shown = {line[0]: line[1:] for line in lines}
    for title, (defence, name) in columns.items():
        for number, cell in zip(rounds, shown[title], strict=True):
            near = 0.35 if "e" in cell else 0.1  # one digit, or two
            assert float(cell) == pytest.approx(float(recorded[defence, number][name]), rel=near)
    last = [recorded["dgp", number] for number in rounds]
    assert [float(row["gamma"]) for row in last] == sorted(float(row["gamma"]) for row in last)
    assert float(last[-1]["residual_squared"]) > float(last[-1]["lemma_1_with_first_gamma"])


def test_audits_of_epsilon_are_what_was_recorded():
    with (HERE / "benchmarks/results/epsilon-audit.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (HERE / "docs/explanation/guarantees.md").read_text("utf-8").partition("benchmarks/epsilon_audit.py")[2]
    for row in rows:
        claimed = "" if row["sigma"] == row["promised_sigma"] else f", claims that of {row['promised_sigma']}"
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row['sigma']}{claimed} |")]
        assert f"| {row['claimed']} |" in line
        assert f"{row['median']} ({row['least']} to {row['most']})" in line


def test_recovered_texts_are_those_of_the_records():
    page = (HERE / "docs/results.md").read_text("utf-8").partition("\n## Text\n")[2]
    lines = (HERE / "benchmarks/results/text-recovery.jsonl").read_text("utf-8").splitlines()
    for row in map(json.loads, lines):
        names = {1.0: "100%", 0.0: "0%"}
        keys = ("tokens", "recall") if "exact" in row else ("first_1", "first_10", "first_100")
        shares = " | ".join(names.get(row[key], f"{100 * row[key]:.1f}%") for key in keys)
        assert f"| {shares} |" in page


RECOVERIES = {"## Rows of tables": "table-recovery.csv", "### Sentences behind defences": "text-defences.csv"}
_FIRST = "german-credit", "tabular-mlp"


@pytest.mark.parametrize("file", ["table-recovery.csv", "text-defences.csv"])
def test_limits_of_recovery_start_from_one_guess_of_the_data_and_the_batch(file: str):
    guesses = dict[tuple[str, str], set[str]]()
    for row in records(file):
        if row["guess"]:
            guesses.setdefault((row["data"], row["batch"]), set()).add(row["guess"])
    assert guesses
    assert all(len(found) == 1 for found in guesses.values()), guesses


def test_a_setting_that_is_measured_again_replaces_its_rows_alone(tmp_path: Path):
    file, rows = HERE / "benchmarks/results/table-recovery.csv", records("table-recovery.csv")
    output = tmp_path / file.name
    output.write_bytes(file.read_bytes())
    again = [row for row in rows if row["batch"] == "8" and (row["data"], row["model"]) == _FIRST]
    written(output, again)
    assert output.read_bytes() == file.read_bytes()
    written(output, [{**again[0], "seconds": "1.0"}])
    assert len(output.read_text("utf-8").splitlines()) == 1 + len(rows) - len(again) + 1


@pytest.mark.parametrize("heading", RECOVERIES)
def test_recovered_rows_and_sentences_are_what_was_recorded(heading: str):
    page = (HERE / "docs/results.md").read_text("utf-8").partition(f"\n{heading}\n")[2]
    lines = re.split("\n##+ ", page)[0].splitlines()
    assert [line for line in lines if line.startswith("|")] == markdown(records(RECOVERIES[heading]))


@pytest.mark.parametrize("file", RECOVERIES.values())
def test_no_recorded_rate_exceeds_what_is_proven(file: str):
    proven = [row for row in records(file) if row["bound_one"]]
    assert proven
    for row in proven:
        low, _ = wilson(int(row["identifiable"]), int(row["rows"]))
        assert low <= float(row["bound_one"])  # a sampled training may have the smaller limit: it counts the sampling
        assert float(row["epsilon_at_least"] or 0) <= float(row["epsilon_one"] or 0)
