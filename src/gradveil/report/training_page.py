"""The page of a training: costs of every defence in accuracy, bytes and time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.core.formatting import percent, plural, size
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
from gradveil.report.method import facts
from gradveil.report.page import frame, render, section
from gradveil.report.pictures import data_uri
from gradveil.report.plots import training_curves
from gradveil.report.table import as_csv, table_body
from gradveil.report.training_paper_table import accuracy_text
from gradveil.report.training_table import COLUMNS, ROUNDS, round_rows, training_rows


def training_page(folder: Path) -> str:
    """Render the training in a run directory as HTML. Every text of it is escaped."""
    shown = context(load_training(folder))
    sections = [
        section("costs", "Cost", "Cost of each defence"),
        *([section("curves", "Curves", "Round by round")] if shown["data"]["lines"] else []),
        section("proven", "Guarantees", "Formal guarantees"),
        section("table", "Trainings", "All trainings"),
        section("method", "Method", "Method", "training_method"),
    ]
    return render("training.html.j2", sections, shown)


def context(training: StoredTraining) -> dict[str, Any]:
    """Return the values that the template shows."""
    groups, config = group_trainings(training.trials), training.config
    curves = training_curves(groups)
    return {
        **frame(training.info, "Federated training", config.name, training.info["config"]),
        **opening(groups, training),
        "failed": [pair for pair in training.trials if status(pair[1]) == FAILED],
        "unfinished": sum(summary is None for _, summary in training.trials),
        "no_progress": no_progress(groups),
        "groups": groups,
        "accuracy_text": accuracy_text,
        "seeds": config.seeds,
        "shares": _shares(groups),
        "proofs": proofs(groups),
        "validated": any(point["loss"] is not None for line in curves for point in line["points"]),
        **_table(training),
        "facts": facts(training.info, ()),
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
        "without_result": (),
        "exports": [
            (label, suffix, data_uri(text.encode(), "text/csv;charset=utf-8")) for label, suffix, text in texts
        ],
    }


def opening(groups: Sequence[TrainingGroup], training: StoredTraining) -> dict[str, str]:
    """Return the headline, the cheapest defence and the number of finished trainings, in sentences."""
    done = sum(status(summary) in SUCCESSFUL for _, summary in training.trials)
    length = f"{plural(training.config.rounds, 'round')}, {plural(len(training.config.seeds), 'seed')}"
    return {
        "headline": headline(groups),
        "cheapest": _cheapest(*_compared(groups)),
        "basis": f"{setting_title(training.config)}, {length}; {done} of {len(training.trials)} trainings finished",
    }


def _compared(groups: Sequence[TrainingGroup]) -> tuple[list[TrainingGroup], TrainingGroup | None]:
    """Choose the defences and the undefended training that have numbers to compare: none that diverged."""
    converged = [group for group in groups if group.values("accuracy") and not group.diverged]
    undefended = next((group for group in converged if group.name == "none"), None)
    return [group for group in converged if group.name not in ("none", "central")], undefended


def headline(groups: Sequence[TrainingGroup]) -> str:
    """Compare the most accurate defence with no defence, or say that nothing can be compared yet."""
    if stuck := no_progress(groups):
        return stuck
    defended, undefended = _compared(groups)
    bare = "" if undefended is None else f"{accuracy_text(undefended)} without a defence"
    if not defended:
        return f"Accuracy: {bare}." if bare else "No training has a result yet."
    best = max(defended, key=lambda group: group.mean("accuracy") or 0.0)
    several = f"Of {len(defended)} defences, {best.name} is the most accurate: "
    known = several if len(defended) > 1 else f"{best.name}: "
    return f"{known}{accuracy_text(best)}{', against ' + bare if bare else ''}."


def _cheapest(defended: Sequence[TrainingGroup], undefended: TrainingGroup | None) -> str:
    if not defended:
        return ""
    cheapest = min(defended, key=lambda group: group.mean("bytes_up") or 0.0)
    sent, bare = cheapest.mean("bytes_up"), undefended.mean("bytes_up") if undefended else None
    share = f", {percent(sent / bare)} of those without a defence" if sent is not None and bare else ""
    return f"Fewest bytes per round: {cheapest.name}, {size(sent)}{share}."


def _shares(groups: Sequence[TrainingGroup]) -> dict[str, dict[str, float]]:
    """Scale the bars of the table: every mean as a share of the largest."""
    result: dict[str, dict[str, float]] = {}
    for key in ("bytes_up", "bytes_down", "seconds"):
        means = {group.name: value for group in groups if (value := group.mean(key)) is not None}
        largest = max(means.values(), default=0.0)
        result[key] = {name: value / largest if largest else 0.0 for name, value in means.items()}
    return result
