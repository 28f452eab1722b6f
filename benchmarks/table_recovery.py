"""Rows or sentences recovered from one gradient, what DP-SGD proves about it, and what it costs in accuracy.

    python -m benchmarks.table_recovery --data-dir FOLDER --output FILE
    python -m benchmarks.table_recovery --data-dir FOLDER --output FILE --data movie-reviews --batch 1

German credit and census income, a perceptron with embeddings and a residual network, 32 rows in updates of 1, 8 and 32;
film reviews, a small encoder, 32 sentences. The noise of DP-SGD is that of some epsilons for a training of two clients,
whose accuracy is measured too. Audits and trainings lie below `--runs`; give the command again, and finished ones are
read, unfinished ones go on. Rows of settings that are not asked for stay in the file.
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
from typing import Any, NamedTuple

from gradveil.audit.defence_costs import joined
from gradveil.audit.findings import findings_of
from gradveil.audit.run_directory import load_run
from gradveil.audit.verdict import Verdict
from gradveil.data import DATA_DIR
from gradveil.federated.training_run import load_training
from gradveil.theory.accounting import Participation, epsilon, multiplier

EXAMPLES, CANARIES, DELTA = 32, 1000, 1e-5
NUMBERS = (
    *("duration_in_month", "credit_amount", "age_in_years", "present_residence_since"),
    "installment_rate_in_percentage_of_disposable_income",
    "number_of_existing_credits_at_this_bank",
    "number_of_people_being_liable_to_provide_maintenance_for",
)


class Study(NamedTuple):
    """What a data set is audited and trained with."""

    data: dict[str, Any]
    models: dict[str, dict[str, Any]]
    public: int
    """Examples to train on."""
    batch: int
    """How many of a client's examples are in a step on average."""
    rounds: int
    local: dict[str, Any]
    defences: tuple[str, ...]
    """Those without a formal guarantee."""
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    sigmas: tuple[float, ...] = ()
    """Noise that promises nothing useful, where attacks begin to work."""
    noisy: str = "adaptive"
    """The attack against DP-SGD."""


_ROWS: dict[str, Any] = {
    "models": {"tabular-mlp": {"embedding": 8}, "tabular-resnet": {}},
    "rounds": 20,
    "local": {"lr": 0.5},
    "defences": ("none", "prune(0.9)", "gaussian(1e-2)"),
    # A quarter of the work of the search against the others, since the noise, which it simulates, drowns it.
    "noisy": "tableak(iterations=200, restarts=2)",
}
DATA = {
    "german-credit": Study({"columns": dict.fromkeys(NUMBERS, "number"), "public": 800}, public=800, batch=50, **_ROWS),
    "census-income": Study({"public": 1600}, public=1600, batch=100, **_ROWS),
    "movie-reviews": Study(
        {},
        {"small-encoder": {"width": 64, "depth": 1}},
        public=8605,
        batch=200,
        rounds=10,
        local={"lr": 0.003, "optimiser": "adam"},
        defences=("none", "prune(0.9)", "dgp", "sign", "gaussian(1e-2)"),
        epsilons=(1.0, 3.0, 8.0, 50.0),
        sigmas=(0.1, 0.03, 1e-2, 1e-4),
    ),
}
MODELS = sorted({model for study in DATA.values() for model in study.models})
CLIENTS = 2


def plan(data: str) -> Participation:
    """Return how often an example takes part in the training, which has an epoch in each round."""
    study = DATA[data]
    held = study.public // CLIENTS
    return Participation(study.rounds * (held // study.batch), study.batch / held, DELTA)


def noises(data: str) -> dict[str, float]:
    """Return DP-SGD by its text, with the epsilon of the training."""
    wanted = {math.ceil(1000 * multiplier(each, plan(data))) / 1000: each for each in DATA[data].epsilons}
    wanted |= {sigma: float(f"{epsilon(sigma, plan(data)):.2g}") for sigma in DATA[data].sigmas}
    return {f"dp(clip=1, sigma={sigma})": each for sigma, each in wanted.items()}


def setting(data: str, model: str) -> dict[str, Any]:
    """Return what an audit and a training share."""
    study = DATA[data]
    return {
        "defences": [*study.defences, *noises(data)],
        "data": {"name": data} | study.data,
        "model": {"name": model} | ({"options": study.models[model]} if study.models[model] else {}),
    }


def training_file(data: str, model: str) -> dict[str, Any]:
    """Return the settings of a training."""
    study = DATA[data]
    local = {"epochs": 1, "batch": study.batch, **study.local, "sampling": "poisson"}
    whole = {"name": f"{data}-{model}", "clients": CLIENTS, "rounds": study.rounds, "delta": DELTA, "local": local}
    return whole | {"validation": 0.0} | setting(data, model)


def audit_file(data: str, model: str, batch: int) -> dict[str, Any]:
    """Return the settings of an audit."""
    study, searches = DATA[data], {"iterations": 500, "restarts": 3}
    attacks = [f"adaptive on {text}" for text in study.defences]
    return setting(data, model) | {
        "name": f"{data}-{model}-{batch}",
        "target_clients": EXAMPLES // batch,
        "attacks": [*attacks, *(f"{study.noisy} on {text}" for text in noises(data))],
        **(searches if study.noisy != "adaptive" else {}),
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
    wanted = noises(data)
    for verdict in found.verdicts:
        cost, text = found.cost(verdict.defence), "none" if verdict.undefended else verdict.defence
        promised = wanted.get(text)
        yield {
            "data": data,
            "model": model,
            "batch": batch,
            "defence": text,
            "epsilon": promised,
            **recovered(verdict),
            "accuracy": None if cost is None else round(cost.accuracy.value, 4),
            **proven(verdict, promised, bounds.get(text, {})),
        }


def recovered(verdict: Verdict) -> dict[str, Any]:
    """Return what the strongest attack recovered, and what guesses do."""
    best = verdict.best
    rows = [row for record in best.trial.records for row in record["per_image"]]
    controls, headline = best.info["controls"], best.info["examples"]["headline"]
    also = ("recall",) if headline == "tokens" else ()
    return {
        "attack": best.attack,
        "rows": len(rows),
        **{name: round(sum(row[name] for row in rows) / len(rows), 4) for name in (headline, *also)},
        f"{headline}_guess": round(max(each[f"{headline}_mean"] for each in controls.values()), 4),
        "recovered": sum(int(row["success"]) for row in rows),
        "exact": sum(int(row["exact"]) for row in rows),
        **({"identified": sum(int(row["identified"]) for row in rows)} if also else {}),
        "identifiable": verdict.identifiable,
        "recovered_guess": round(verdict.baseline, 4),
        "attack_check": verdict.health.label,
        "seconds": round(best.info["seconds"], 1),
    }


def proven(verdict: Verdict, promised: float | None, audit: Mapping[str, Any]) -> dict[str, Any]:
    """Return noise, epsilons and limits of recovery; nothing where there is no guarantee."""
    bounds = {each["of"]: each for each in verdict.best.info.get("recovery_bounds") or ()} if promised else {}
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
    return {key: None if value is None or not promised else float(f"{value:.4g}") for key, value in values.items()}


def written(output: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the rows of one setting into a file, in place of those that it has of it, in the order of the settings."""

    def setting(row: Mapping[str, Any]) -> tuple[int, int, int]:
        return list(DATA).index(row["data"]), MODELS.index(row["model"]), int(row["batch"])

    kept = list[Mapping[str, Any]]()
    if output.exists():
        with output.open() as stream:
            kept = [row for row in csv.DictReader(stream) if setting(row) != setting(rows[0])]
    with output.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=setting))


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Write records, as they are read from the file, as the lines of a table."""
    lines: list[str] = []
    for row in rows:
        scores = {"rows recovered, exact, of 32": f"{row['recovered']}, {row['exact']}"}
        if "cells" in row:
            scores = {"cells right (guess)": f"{_whole(row['cells'])} ({_whole(row['cells_guess'])})"} | scores
        else:
            found = f"{_whole(row['tokens'])} ({_whole(row['tokens_guess'])})"
            scores = {"tokens in place (guess)": found, "token recall": _whole(row["recall"])} | {
                "sentences recovered, exact, identified, of 32": f"{next(iter(scores.values()))}, {row['identified']}",
                "strongest attack": f"`{row['attack']}`",
            }
        cells = {
            "data": row["data"],
            "model": row["model"],
            "rows per update" if "cells" in row else "sentences per update": row["batch"],
            "defence": f"`{row['defence']}`",
            "ε of the training": f"{float(row['epsilon']):g}" if row["epsilon"] else "none",
            "accuracy": _share(row["accuracy"]),
            **scores,
            "limit, one update": _share(row["bound_one"]),
            "limit, training": _share(row["bound_training"]),
            "ε of one update": f"{float(row['epsilon_one']):.2f}" if row["epsilon_one"] else "–",
            "found at least": f"{float(row['epsilon_at_least']):.2f}" if row["epsilon_at_least"] else "–",
        }
        lines = lines or [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
        lines.append(f"| {' | '.join(cells.values())} |")
    return lines


def _whole(text: str) -> str:
    return f"{100 * float(text):.0f}%"


def _share(text: str) -> str:
    return f"{100 * float(text):.1f}%" if text else "–"


def main() -> None:
    """Measure all settings; write the rows of each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get(DATA_DIR, "."), help="folder with tables/NAME-train.parquet"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tables"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", nargs="+", choices=DATA, default=["german-credit", "census-income"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--no-training", action="store_true", help="leave the accuracies out")
    parser.add_argument("--table", action="store_true", help="print the records of the file as a table, and stop")
    options = parser.parse_args()
    if options.table:
        with options.output.open() as stream:
            print("\n".join(markdown(list(csv.DictReader(stream)))))
        return
    for data, model, batch in product(options.data, options.model, options.batch):
        if model in DATA[data].models:
            rows = records(data, model, batch, options.runs, options.data_dir, not options.no_training)
            written(options.output, list(rows))


if __name__ == "__main__":
    main()
