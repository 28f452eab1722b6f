"""Rows of tables recovered from one gradient, what DP-SGD proves about it, and what it costs in accuracy.

    python benchmarks/table_recovery.py --data-dir FOLDER --runs runs/tables --output FILE

German credit and census income, a perceptron with embeddings and a residual network, 32 rows in updates of 1, 8 and 32.
The noise of DP-SGD is that of epsilon 1, 3 and 8 for a training of two clients, whose accuracy is measured too. Audits
and trainings lie below `--runs`; give the command again, and finished ones are read, unfinished ones go on.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from gradveil.audit.defence_costs import joined
from gradveil.audit.findings import findings_of
from gradveil.audit.run_directory import load_run
from gradveil.audit.verdict import Verdict
from gradveil.data import DATA_DIR
from gradveil.federated.training_run import load_training
from gradveil.theory.accounting import Participation, multiplier

ROWS, CANARIES, DELTA = 32, 1000, 1e-5
EPSILONS = (1.0, 3.0, 8.0)
DEFENCES = ("none", "prune(0.9)", "gaussian(1e-2)")
"""Those without a formal guarantee."""
NOISY = "tableak(iterations=200, restarts=2)"
"""The search against DP-SGD, which it simulates: a quarter of the work of the others, since its noise drowns it."""
MODELS = {"tabular-mlp": {"embedding": 8}, "tabular-resnet": {}}
NUMBERS = (
    *("duration_in_month", "credit_amount", "age_in_years", "present_residence_since"),
    "installment_rate_in_percentage_of_disposable_income",
    "number_of_existing_credits_at_this_bank",
    "number_of_people_being_liable_to_provide_maintenance_for",
)
DATA: dict[str, dict[str, Any]] = {
    "german-credit": {"columns": dict.fromkeys(NUMBERS, "number"), "public": 800, "batch": 50},
    "census-income": {"columns": None, "public": 1600, "batch": 100},
}
"""Kinds of columns, the rows to train on, and how many of a client's rows are in a step on average."""
CLIENTS, ROUNDS = 2, 20


COLUMNS = (
    *("data", "model", "rows per update", "defence", "ε of the training", "accuracy", "cells right (guess)"),
    *("rows recovered, exact, of 32", "limit, one update", "limit, training", "ε of one update", "found at least"),
)
"""Columns of the table of `markdown`."""


def plan(data: str) -> Participation:
    """Return how often a row takes part in the training, which has an epoch in each round."""
    held, batch = DATA[data]["public"] // CLIENTS, DATA[data]["batch"]
    return Participation(ROUNDS * (held // batch), batch / held, DELTA)


def setting(data: str, model: str) -> dict[str, Any]:
    """Return what an audit and a training share."""
    sigmas = [math.ceil(1000 * multiplier(epsilon, plan(data))) / 1000 for epsilon in EPSILONS]
    noises = [f"dp(clip=1, sigma={sigma})" for sigma in sigmas]
    columns = DATA[data]["columns"]
    return {
        "defences": [*DEFENCES, *noises],
        "data": {"name": data, "public": DATA[data]["public"]} | ({"columns": columns} if columns else {}),
        "model": {"name": model} | ({"options": MODELS[model]} if MODELS[model] else {}),
    }


def training_file(data: str, model: str) -> dict[str, Any]:
    """Return the settings of a training."""
    local = {"epochs": 1, "batch": DATA[data]["batch"], "lr": 0.5, "sampling": "poisson"}
    whole = {"name": f"{data}-{model}", "clients": CLIENTS, "rounds": ROUNDS, "delta": DELTA, "local": local}
    return whole | {"validation": 0.0} | setting(data, model)


def audit_file(data: str, model: str, batch: int) -> dict[str, Any]:
    """Return the settings of an audit."""
    shared = setting(data, model)
    noisy = [text for text in shared["defences"] if text not in DEFENCES]
    return shared | {
        "name": f"{data}-{model}-{batch}",
        "target_clients": ROWS // batch,
        "attacks": [*(f"adaptive on {text}" for text in DEFENCES), *(f"{NOISY} on {text}" for text in noisy)],
        "iterations": 500,
        "restarts": 3,
        "client": {"batch": batch},
        "privacy": {"steps": plan(data).steps, "rate": plan(data).rate, "delta": DELTA},
    }


def toml(settings: Mapping[str, Any]) -> str:
    """Write settings as TOML; every value as an inline table or a JSON value, which TOML shares."""
    return "\n".join(f"{key} = {_value(value)}" for key, value in settings.items()) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def done(command: str, settings: Mapping[str, Any], runs: Path, data_dir: Path) -> Path:
    """Run or resume an audit or a training; return its run directory."""
    folder = runs / f"{command}-{settings['name']}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.toml"
    file.write_text(toml(settings))
    workers = ["--workers", "1"] if command == "audit" else ["--threads", "1"]
    out = ["--data-dir", str(data_dir), "--out", str(folder / "run"), *workers]
    subprocess.run([sys.executable, "-m", "gradveil", command, str(file), *out], check=True)
    return folder


def bounded(folder: Path, data_dir: Path) -> list[dict[str, Any]]:
    """Audit the epsilons of a run by canaries, or read the audit that is there."""
    file, command = (
        folder / "epsilon.json",
        [sys.executable, "-m", "gradveil", "audit-epsilon", str(folder / "run.toml")],
    )
    if not file.exists():
        options = ["--data-dir", str(data_dir), "--canaries", str(CANARIES), "--delta", str(DELTA), "--json"]
        file.write_text(subprocess.run([*command, *options], check=False, stdout=subprocess.PIPE, text=True).stdout)
    return json.loads(file.read_text())


def records(
    data: str, model: str, batch: int, runs: Path, data_dir: Path, trained: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield a record for each defence; without the trainings there are no accuracies."""
    trainings = [load_training(done("train", training_file(data, model), runs, data_dir) / "run")] if trained else []
    folder = done("audit", audit_file(data, model, batch), runs, data_dir)
    run = load_run(folder / "run")
    found = findings_of(run, joined([run], trainings)[0])
    bounds = {each["defence"]: each for each in bounded(folder, data_dir)}
    wanted = dict(zip(run.info["config"]["defences"], (*(None for _ in DEFENCES), *EPSILONS), strict=True))
    for verdict in found.verdicts:
        cost, text = found.cost(verdict.defence), "none" if verdict.undefended else verdict.defence
        epsilon = wanted[text]
        yield {
            "data": data,
            "model": model,
            "batch": batch,
            "defence": text,
            "epsilon": epsilon,
            **recovered(verdict),
            "accuracy": None if cost is None else round(cost.accuracy.value, 4),
            **proven(verdict, epsilon, bounds.get(text, {})),
        }


def recovered(verdict: Verdict) -> dict[str, Any]:
    """Return what the strongest attack recovered, and what guesses do."""
    best = verdict.best
    rows = [row for record in best.trial.records for row in record["per_image"]]
    controls = best.info["controls"]
    return {
        "attack": best.attack,
        "rows": len(rows),
        "cells": round(sum(row["cells"] for row in rows) / len(rows), 4),
        "cells_guess": round(max(each["cells_mean"] for each in controls.values()), 4),
        "recovered": sum(int(row["success"]) for row in rows),
        "exact": sum(int(row["exact"]) for row in rows),
        "identifiable": verdict.identifiable,
        "recovered_guess": round(verdict.baseline, 4),
        "attack_check": verdict.health.label,
        "seconds": round(best.info["seconds"], 1),
    }


def proven(verdict: Verdict, epsilon: float | None, audit: Mapping[str, Any]) -> dict[str, Any]:
    """Return noise, epsilons and limits of recovery; nothing where there is no guarantee."""
    bounds = {each["of"]: each for each in verdict.best.info.get("recovery_bounds") or ()} if epsilon else {}
    one, whole = bounds.get("watched", {}), bounds.get("planned", {})
    values = {
        "sigma": one.get("noise"),
        "guess": one.get("guess"),
        "bound_one": one.get("bound"),
        "bound_training": whole.get("bound"),
        "epsilon_one": audit.get("claimed"),
        "epsilon_at_least": audit.get("at_least"),
        "canaries": audit.get("canaries_in_one_run"),
    }
    return {key: None if value is None or not epsilon else float(f"{value:.4g}") for key, value in values.items()}


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Write records, as they are read from the file, as the lines of a table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        accuracy = f"{100 * float(row['accuracy']):.1f}%" if row["accuracy"] else "–"
        cells = (
            *(row["data"], row["model"], row["batch"], f"`{row['defence']}`"),
            f"{float(row['epsilon']):g}" if row["epsilon"] else "none",
            accuracy,
            f"{100 * float(row['cells']):.0f}% ({100 * float(row['cells_guess']):.0f}%)",
            f"{row['recovered']}, {row['exact']}",
            _share(row["bound_one"]),
            _share(row["bound_training"]),
            f"{float(row['epsilon_one']):.2f}" if row["epsilon_one"] else "–",
            f"{float(row['epsilon_at_least']):.2f}" if row["epsilon_at_least"] else "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _share(text: str) -> str:
    return f"{100 * float(text):.1f}%" if text else "–"


def main() -> None:
    """Measure all settings; rewrite the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get(DATA_DIR, "."), help="folder with tables/NAME-train.parquet"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tables"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--no-training", action="store_true", help="leave the accuracies out")
    parser.add_argument("--table", action="store_true", help="print the records of the file as a table, and stop")
    options = parser.parse_args()
    if options.table:
        with options.output.open() as stream:
            print("\n".join(markdown(list(csv.DictReader(stream)))))
        return
    rows = list[dict[str, Any]]()
    for data, model, batch in product(options.data, options.model, options.batch):
        rows += records(data, model, batch, options.runs, options.data_dir, not options.no_training)
        with options.output.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
