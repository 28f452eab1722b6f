"""The recorded memory of defences is what the page prints."""

import json
from pathlib import Path

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
