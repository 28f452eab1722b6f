"""What was recorded of defences, rounds, clients at once and the wire is what the page prints."""

import csv
import json
import re
from pathlib import Path

import pytest

from gradveil.federated.parallel_clients import MOST_EXAMPLES

HERE = Path(__file__).parents[2]
NAMES = {
    "none": "none",
    "Gaussian noise": "gaussian(0.01)",
    "top-k 20%, error feedback": "topk(0.2, feedback=true)",
    "AdaDefense stand-in": "standin",
    "DGP, error feedback": "dgp(feedback=true)",
    "DGC": "dgc",
    "DP-SGD": "dp(clip=1, sigma=0.01)",
    "optimal noise, 10 probes": "optimal-noise(std=0.01)",
    "optimal noise, cheaper": "optimal-noise(std=0.01, probes=64, of=example, every=3, memory=0.5)",
}


def test_memory_of_defences_is_what_was_recorded():
    recorded = json.loads((HERE / "benchmarks/results/cpu-2-cores-defence-cost.json").read_text("utf-8"))["results"]
    peaks = {(row["model"], row["defence"]): row["peak_bytes"] for row in recorded}
    page = (HERE / "docs/performance.md").read_text("utf-8")
    rows = {
        trials[0]: trials[1:]
        for line in page.splitlines()
        if line.startswith("|") and len(trials := [trial.strip() for trial in line.strip("|").split("|")]) == 5
    }
    for name, defence in NAMES.items():
        for column, model in ((1, "scheliga-cnn"), (3, "resnet18")):
            assert rows[name][column] == f"{round(peaks[model, defence] / 2**20):,} MiB", (name, model)


def test_what_the_engine_adds_to_a_loop_by_hand_is_what_was_recorded():
    page = (HERE / "docs/performance.md").read_text("utf-8").partition("## A round of training")[2]
    alone, whole = page.partition("That is training and averaging alone.")[::2]
    for file, key, told in (("engine", "ratio", alone), ("engine-whole-rounds", "whole_round_ratio", whole)):
        recorded = json.loads((HERE / f"benchmarks/results/cpu-2-cores-{file}.json").read_text("utf-8"))["results"]
        for row, name in zip(recorded, ("the Scheliga CNN", "LeNetZhu", r"ResNet-18"), strict=True):
            assert re.search(rf"{row[key]:.2f}x\s+for\s+{name}", told), (file, name)
            assert row["ratio"] < 1.1, "the aim"


def test_a_round_in_a_flower_simulation_is_what_was_recorded():
    recorded = json.loads((HERE / "benchmarks/results/cpu-2-cores-flower.json").read_text("utf-8"))["results"]
    page = (HERE / "docs/performance.md").read_text("utf-8")
    for row in recorded:
        times = [
            f"{1000 * row[key]:.0f} ms" for key in ("engine_seconds", "engine_seconds_all_threads", "flower_seconds")
        ]
        assert " | ".join([*times, f"{row['flower_over_engine']:.1f}x"]) in page
        assert row["flower_over_engine"] >= 2, "the aim"


def test_what_knowing_more_costs_is_what_was_recorded_and_no_more_than_allowed():
    """Joint optimisation at most 1.5 of the plain attack's iterations, four local steps at most 7."""
    page = (HERE / "docs/performance.md").read_text("utf-8")
    told = page.partition("## What knowing more costs")[2].partition("## ")[0]
    words = {
        "cpu-2-cores-attack-cost": {
            "dropout: DIA": "dropout masks optimised {}x", "PRECODE: VBIA": "PRECODE's noise {}x",
            "CVB: VBIA": "CVB's noise {}x", "pruning: mask read off": "masks read off {}x",
            "local training, T = 4": "costs {} times",
        },
        "cpu-2-cores-attack-cost-resnet18": {
            "DP-SGD: CDIA": "{}x", "pruning: mask read off": "masks read off {}x", "CVB: VBIA": "CVB's noise {}x",
        },
    }  # fmt: skip
    for file, cases in words.items():
        recorded = json.loads((HERE / f"benchmarks/results/{file}.json").read_text("utf-8"))["cases"]
        assert set(recorded) == set(cases)
        for case, said in cases.items():
            found, digits = recorded[case], 1 if "times" in said else 2
            ratio, low, high = (f"{found[key]:.{digits}f}" for key in ("ratio", "low", "high"))
            assert re.search(rf"{re.escape(said.format(ratio))}[^()]*\({low} to {high}\)", told), (file, case)
            assert found["ratio"] <= found["allowed"] == (7 if case.startswith("local") else 1.5), "the aim"


def test_sizes_on_the_wire_are_what_was_recorded():
    models = json.loads((HERE / "benchmarks/results/cpu-2-cores-wire.json").read_text("utf-8"))["models"]
    page = (HERE / "docs/performance.md").read_text("utf-8").partition("## Bytes on the wire")[2]
    names = {"0.01": "1%", "0.1": "10%", "0.2": "20%", "0.38": "38%, the worst", "0.5": "50%", "0.9": "90%", "1": "all"}
    for share, name in names.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        trials = [trial.strip() for trial in row.strip("|").split("|")]
        kinds = [models["resnet18"]["sizes"][share][kind] for kind in ("float32", "float16", "float32 deflated")]
        assert trials[1::2] == [f"{kind['of_bound']:.3f}" for kind in kinds]
        assert all(kind["encode_ms"] + kind["decode_ms"] <= 250 for kind in kinds), "the aim"
    kept = [size for model in models.values() for share, size in model["sizes"].items() if 0.01 <= float(share) <= 0.5]
    assert max(size[kind]["of_bound"] for size in kept for kind in ("float32", "float16", "bfloat16")) < 1.1, "the aim"


def test_the_bytes_of_a_round_are_what_was_counted():
    names = {"resnet18": "ResNet-18", "vgg13": "VGG-13", "lenet-zhu": "LeNet"}
    page = (HERE / "docs/performance.md").read_text("utf-8").partition("## Bytes on the wire")[2]
    table = {line.split("|")[1].strip(): line.strip("|").split("|") for line in page.splitlines() if line[:1] == "|"}
    with (HERE / "benchmarks/results/round-bytes.csv").open() as file:
        counted = [row for row in csv.DictReader(file) if (row["updates"], row["values"]) == ("independent", "float32")]
    assert len(counted) == 9
    for row in counted:
        cells = [cell.strip() for cell in table[f"{names[row['model']]}, {row['method']}"]]
        assert float(cells[4]) == pytest.approx(float(row["together"]), rel=2e-3)
        assert float(cells[5]) == float(row["printed"])
        assert float(cells[6].rstrip("%")) == pytest.approx(100 * float(row["union"]), abs=0.06)
        for cell, way in zip(cells[1:3], ("up", "down"), strict=True):
            assert sum(map(float, cell.split("+"))) == pytest.approx(float(row[way]), rel=3e-3)
        if row["method"] == "dense":
            assert cells[7].startswith("agrees")
            assert float(row["together"]) == pytest.approx(float(row["printed"]), rel=1e-3)


CLIENTS = {"LeNetZhu": "lenet-zhu", "Scheliga CNN": "scheliga-cnn", "MNIST-Conv": "mnist-conv", "CNN6": "cnn6"}
DEFENCES = {"none": "none", "DP-SGD": "dp(clip=1, sigma=0.1)", "DGP, error feedback": "dgp(feedback=true)"}


def test_gain_of_clients_at_once_is_what_was_recorded_and_backs_the_rule():
    file = HERE / "benchmarks/results/cpu-2-cores-clients-together.json"
    recorded = json.loads(file.read_text("utf-8"))["rows"]
    page = (HERE / "docs/performance.md").read_text("utf-8").partition("### Clients of a round at once")[2]
    rows = [[trial.strip() for trial in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    printed = {(CLIENTS[row[0]], DEFENCES[row[1]]): row[2:] for row in rows if row[0] in CLIENTS}
    assert len(printed) == 12
    for (model, defence), told in printed.items():
        mine = [row for row in recorded if (row["model"], row["defence"]) == (model, defence)]
        assert told == [
            ", ".join(f"{row['ratio']:.2f}" for row in mine if row["batch"] == batch) for batch in (4, 8, 16, 32, 64)
        ]
    assert min(row["ratio"] for row in recorded if row["batch"] <= MOST_EXAMPLES) > 0.99
