"""The page of a training: costs of every defence in accuracy, bytes and time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.core.formatting import percent, plural, size
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.federated.training_groups import (
    SUCCESSFUL,
    TrainingGroup,
    group_trainings,
    no_progress,
    proofs,
    setting_title,
    status,
)
from gradveil.federated.training_run import FAILED, StoredTraining, load_training
from gradveil.report.page import card, frame, render, section
from gradveil.report.pictures import data_uri
from gradveil.report.plots import training_curves
from gradveil.report.table import as_csv, table_body
from gradveil.report.training_table import COLUMNS, ROUNDS, round_rows, training_rows


def training_page(folder: Path) -> str:
    """Render the training in a run directory as HTML. Every text of it is escaped."""
    shown = context(load_training(folder))
    sections = [
        section("costs", "Cost", "Cost of each defence"),
        *([section("curves", "Curves", "Round by round")] if shown["data"]["lines"] else []),
        section("proven", "Proven", "Formal guarantees"),
        section("table", "Table", "Every training"),
        section("method", "Method", "Method", "training_method"),
    ]
    return render("training.html.j2", sections, shown)


def context(training: StoredTraining) -> dict[str, Any]:
    """Return the values that the template shows."""
    groups, config = group_trainings(training.trials), training.config
    curves = training_curves(groups)
    return {
        **frame(training.info, "Federated training", config.name, training.info["config"]),
        "subtitle": setting_title(config),
        "cards": cards(groups, training),
        "failed": [pair for pair in training.trials if status(pair[1]) == FAILED],
        "unfinished": sum(summary is None for _, summary in training.trials),
        "no_progress": no_progress(groups),
        "groups": groups,
        "seeds": config.seeds,
        "shares": _shares(groups),
        "proofs": proofs(groups),
        "meaningless": MEANINGLESS,
        "validated": any(point["loss"] is not None for line in curves for point in line["points"]),
        **_table(training),
        "data": {"lines": curves},
    }


def _table(training: StoredTraining) -> dict[str, Any]:
    """Return the table of all trainings, its CSV, and the CSV of all rounds."""
    rows = list(training_rows(training.trials))
    texts = (
        ("Download CSV", "", as_csv(rows)),
        ("CSV of all rounds", "-rounds", as_csv(round_rows(training.trials), ROUNDS)),
    )
    return {
        "table_label": "Status, accuracy and costs of every training",
        "columns": COLUMNS,
        "body": table_body(rows, COLUMNS),
        "sorted_by": None,
        "unbounded": (),
        "missing": (),
        "statuses": "",
        "exports": [
            (label, suffix, data_uri(text.encode(), "text/csv;charset=utf-8")) for label, suffix, text in texts
        ],
    }


def cards(groups: Sequence[TrainingGroup], training: StoredTraining) -> list[dict[str, str]]:
    """Choose the key numbers: accuracy without a defence, the best and the cheapest defence, finished trainings."""
    result = []
    converged = [group for group in groups if group.values("accuracy") and not group.diverged]
    undefended = next((group for group in converged if group.name == "none"), None)
    defended = [group for group in converged if group.name not in ("none", "central")]
    if undefended is not None:
        accuracy = percent(undefended.mean("accuracy"))
        result.append(card("Accuracy without a defence", accuracy, _seeds(undefended)))
    if defended:
        best = max(defended, key=lambda group: group.mean("accuracy") or 0.0)
        detail = f"{best.name} · {_seeds(best)}"
        result.append(card("Most accurate defence", percent(best.mean("accuracy")), detail))
        cheapest = min(defended, key=lambda group: group.mean("bytes_up") or 0.0)
        share = _share(cheapest.mean("bytes_up"), undefended.mean("bytes_up") if undefended else None)
        result.append(card("Fewest bytes sent per round", size(cheapest.mean("bytes_up")), f"{cheapest.name}{share}"))
    done = sum(status(summary) in SUCCESSFUL for _, summary in training.trials)
    rounds = f"{plural(training.config.rounds, 'round')} each, {plural(len(training.config.seeds), 'seed')}"
    return [*result, card("Trainings finished", f"{done} of {len(training.trials)}", rounds)]


def _seeds(group: TrainingGroup) -> str:
    seeds = plural(len(group.values("accuracy")), "seed")
    return seeds if group.deviation is None else f"± {100 * group.deviation:.1f} points over {seeds}"


def _share(value: float | None, undefended: float | None) -> str:
    return f" · {percent(value / undefended)} of those without a defence" if value is not None and undefended else ""


def _shares(groups: Sequence[TrainingGroup]) -> dict[str, dict[str, float]]:
    """Scale the bars of the table: every mean as a share of the largest."""
    result: dict[str, dict[str, float]] = {}
    for key in ("bytes_up", "bytes_down", "seconds"):
        means = {group.name: value for group in groups if (value := group.mean(key)) is not None}
        largest = max(means.values(), default=0.0)
        result[key] = {name: value / largest if largest else 0.0 for name, value in means.items()}
    return result
