"""Data of figures: the panels of audits and of trainings, selected and in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from gradveil.audit.attack_selection import canonical
from gradveil.audit.defence_costs import costs as joined_costs
from gradveil.audit.defence_costs import mismatches
from gradveil.audit.findings import Findings
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import RUN, Run, load_run
from gradveil.audit.verdict import Verdict
from gradveil.federated.training_groups import TrainingGroup
from gradveil.federated.training_run import StoredTraining, is_training, load_training
from gradveil.report.choices import Choices
from gradveil.report.paper_table import Matrix, matrices
from gradveil.report.pareto import Span, Spot, charts
from gradveil.report.training_paper_table import TrainingTable, training_tables

_PICTURES = 8
"""Pictures in a row of a grid if no targets are chosen."""


@dataclass(frozen=True)
class FigureChoices(Choices):
    """All choices of a figure."""

    metric: str | None = None
    against: str | None = None
    targets: Sequence[int] = ()
    seeds: Sequence[int] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    title: str | None = None
    width: float = 3.4
    height: float | None = None
    font: str = "sans"
    dpi: float = 300.0

    def header(self, key: str, text: str) -> str:
        """Return the text of an axis or a row."""
        return self.headers.get(key, text)


@dataclass(frozen=True)
class Runs:
    """The run directories of a figure."""

    audits: tuple[Run, ...]
    trainings: tuple[StoredTraining, ...]

    @cached_property
    def matrices(self) -> list[Matrix]:
        """The audits' trials by setting."""
        return matrices(self.audits)

    @cached_property
    def tables(self) -> list[TrainingTable]:
        """The trainings by setting."""
        return training_tables(self.trainings)

    @property
    def defences(self) -> list[str]:
        """The defences of all runs."""
        trained = [group.name for table in self.tables for group in table.groups]
        return list(dict.fromkeys([*(name for matrix in self.matrices for name in matrix.defences), *trained]))

    @property
    def attacks(self) -> list[str]:
        """The attacks of all runs."""
        return list(dict.fromkeys(name for matrix in self.matrices for name in matrix.attacks))

    @property
    def seeds(self) -> set[int]:
        """The seeds of all runs."""
        rows = {row.seed for matrix in self.matrices for row in matrix.findings.rows}
        return rows | {trial.seed for table in self.tables for trial, _ in table.trials}


def open_for_figure(folders: Sequence[Path]) -> Runs:
    """Read run directories, audits and trainings."""
    trainings = [folder for folder in folders if is_training(folder) and not (folder / RUN).is_file()]
    audits = [folder for folder in folders if folder not in trainings]
    return Runs(tuple(map(load_run, audits)), tuple(map(load_training, trainings)))


@dataclass(frozen=True)
class AuditPanel:
    """The trials of one setting that a figure shows."""

    title: str
    rows: tuple[Row, ...]
    """Finished and scored trials, without controls."""
    empty: tuple[Row, ...]
    """Trials without a result."""
    choices: FigureChoices

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each defence over the selected attacks, in the figure's order."""
        found = {verdict.defence: verdict for verdict in Findings((*self.rows, *self.empty)).verdicts}
        run_order = list(dict.fromkeys(row.defence for row in self.rows))
        return {name: found[name] for name in self.choices.sort(run_order) if name in found}


def audit_panels(runs: Runs, choices: FigureChoices) -> list[AuditPanel]:
    """Select the trials of each setting; settings without any are left out."""
    panels: list[AuditPanel] = []
    for matrix in runs.matrices:
        chosen = [
            row
            for row in matrix.findings.rows
            if not row.is_control
            and choices.shows_defence(row.defence)
            and choices.shows_attack(row.attack)
            and (not choices.seeds or row.seed in choices.seeds)
        ]
        done = [row for row in chosen if row.trial.failed is None and row.trial.unscored is None and row.images]
        if done:
            empty = tuple(row for row in chosen if row.trial.failed is not None)
            panels.append(AuditPanel(matrix.title, tuple(done), empty, choices))
    return panels


def joined_stages(panels: Sequence[AuditPanel]) -> list[AuditPanel]:
    """Join the panels that differ only in the rounds of training before the attack."""
    groups: dict[Any, list[AuditPanel]] = {}
    for panel in panels:
        groups.setdefault(panel.rows[0].setting._replace(trained=None), []).append(panel)
    return [
        replace(
            group[0],
            title=setting.title(),
            rows=tuple(row for panel in group for row in panel.rows),
            empty=tuple(row for panel in group for row in panel.empty),
        )
        if len(group) > 1
        else group[0]
        for setting, group in groups.items()
    ]


@dataclass(frozen=True)
class TrainingPanel:
    """The trainings of one setting that a figure shows."""

    title: str
    groups: tuple[TrainingGroup, ...]


def training_panels(runs: Runs, choices: FigureChoices) -> list[TrainingPanel]:
    """Select the trainings of each setting."""
    panels: list[TrainingPanel] = []
    for table in runs.tables:
        groups = {group.name: group for group in table.groups if choices.shows_defence(group.name) and group.completed}
        if choices.seeds:
            kept = {
                n: replace(g, trials=[p for p in g.trials if p[0].seed in choices.seeds]) for n, g in groups.items()
            }
            groups = {name: group for name, group in kept.items() if group.completed}
        if groups:
            panels.append(TrainingPanel(table.title, tuple(groups[name] for name in choices.sort(groups))))
    return panels


def target_numbers(panel: AuditPanel) -> list[int]:
    """Return the target clients that a grid shows: those chosen, or the first few."""
    every = list(dict.fromkeys(int(record["target_client"]) for row in panel.rows for record in row.trial.records))
    batch = max(row.setting.batch for row in panel.rows)
    return [*panel.choices.targets] or every[: max(1, _PICTURES // batch)]


def trainings_of(panel: AuditPanel, runs: Runs) -> list[StoredTraining]:
    """Find the trainings on the data and with the model of a panel."""
    trials = {id(row.trial) for row in panel.rows}
    owners = [run for run in runs.audits if any(id(trial) in trials for trial in run.trials)]
    return [each for each in runs.trainings if not any(any(mismatches(run, each)) for run in owners)]


def spots_of(panel: AuditPanel, trainings: Sequence[StoredTraining]) -> list[Spot]:
    """Return leak and costs of each defence: at its worst round of training, or with the costs of a training."""
    spots: dict[str, Spot]
    if any(row.setting.trained is not None for row in panel.rows):
        made = charts(Findings((*panel.rows, *panel.empty)).verdicts, [row.trial for row in panel.empty], {})
        spots = {spot.verdict.defence: spot for chart in made for spot in chart.worst.spots}
        spots = {n: replace(s, costs={**_update_costs(s.verdict), **s.costs}) for n, s in spots.items()}
    else:
        costs = joined_costs([trial for training in trainings for trial in training.trials])
        failed = {row.defence for row in panel.empty if row.trial.broken}
        spots = {
            name: Spot(verdict, {**_update_costs(verdict), **(cost.spans if cost else {})}, name in failed)
            for name, verdict in panel.verdicts.items()
            for cost in [costs.get(canonical(name))]
        }
    return [spots[name] for name in panel.choices.sort(spots)]


def _update_costs(verdict: Verdict) -> dict[str, Span]:
    """Return the costs of one update that every audit has, over the seeds."""
    rows = [row for _, row in verdict.seeds]
    keys = {"bytes": "bytes_sent", "distance": "distance", "utility": "first_order_utility"}
    values = {key: [row.info[name] for row in rows if row.info.get(name) is not None] for key, name in keys.items()}
    return {key: (fmean(each), min(each), max(each)) for key, each in values.items() if each}
