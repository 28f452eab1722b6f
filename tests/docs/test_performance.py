"""The recorded memory of defences, and gain of clients at once, are what the page prints."""

import json
from pathlib import Path

from gradveil.federated.together import MOST_EXAMPLES

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
        cells[0]: cells[1:]
        for line in page.splitlines()
        if line.startswith("|") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
    }
    for name, defence in NAMES.items():
        for column, model in ((1, "scheliga-cnn"), (3, "resnet18")):
            assert rows[name][column] == f"{round(peaks[model, defence] / 2**20):,} MiB", (name, model)


CLIENTS = {"LeNetZhu": "lenet-zhu", "Scheliga CNN": "scheliga-cnn", "MNIST-Conv": "mnist-conv", "CNN6": "cnn6"}
DEFENCES = {"none": "none", "DP-SGD": "dp(clip=1, sigma=0.1)", "DGP, error feedback": "dgp(feedback=true)"}


def test_gain_of_clients_at_once_is_what_was_recorded_and_backs_the_rule():
    file = HERE / "benchmarks/results/cpu-2-cores-clients-together.json"
    recorded = json.loads(file.read_text("utf-8"))["rows"]
    page = (HERE / "docs/performance.md").read_text("utf-8").partition("### Clients of a round at once")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    printed = {(CLIENTS[row[0]], DEFENCES[row[1]]): row[2:] for row in rows if row[0] in CLIENTS}
    assert len(printed) == 12
    for (model, defence), told in printed.items():
        mine = [row for row in recorded if (row["model"], row["defence"]) == (model, defence)]
        assert told == [
            ", ".join(f"{row['ratio']:.2f}" for row in mine if row["batch"] == batch) for batch in (4, 8, 16, 32, 64)
        ]
    assert min(row["ratio"] for row in recorded if row["batch"] <= MOST_EXAMPLES) > 0.99
