"""The page of an audit: verdict, pictures and recommendation first, then costs, details, trials and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.assurance.statement import assurance_of
from gradveil.audit.attack_check import STATES, descent, examine
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.defence_costs import Costs, costs_of
from gradveil.audit.findings import Findings, accuracies, findings, headline, hits, undone
from gradveil.audit.result_rows import BASELINES, Row
from gradveil.audit.run_directory import Run
from gradveil.audit.threat_model import scope, threat_model, untried
from gradveil.audit.verdict import Verdict
from gradveil.core.formatting import interval, listing, plural
from gradveil.core.space import ExampleWords
from gradveil.federated.training_groups import proven
from gradveil.report import method, pareto, plots, trial_table
from gradveil.report.defence_lines import defence_tables
from gradveil.report.exhibits import Exhibit, exhibits, halls, leading_setting, most_telling
from gradveil.report.identical_trials import KINDS, identical, named, short_names
from gradveil.report.legend import legend
from gradveil.report.marked_sentences import marked_sentences
from gradveil.report.opening_examples import opening_examples
from gradveil.report.page import PageSection, frame, render, section
from gradveil.report.pictures import OUTCOMES, Picture, data_uri, picture_uri, pictures_of, room_of_each
from gradveil.report.shown_rows import RowTable, shown_rows
from gradveil.report.table import table_body

_FUNCTIONS = {
    "headline": headline,
    "hits": hits,
    "interval": interval,
    "descent": descent,
    "examine": examine,
    "proven": proven,
    "identical": identical,
    "named": named,
    "marked_sentences": marked_sentences,
}
_TERMS = {
    "states": STATES,
    "baselines": BASELINES,
    "trained_on": trial_table.TRAINED_ON,
    "attackers_of": {"undefended": "–", **KINDS},
}
_ACROSS = 6
"""Private images on the first screen."""


def audit_page(run: Run, costs: Costs | None = None) -> str:
    """Render an audit as HTML. Every text of the run is escaped. `costs` replaces what its own trainings say."""
    shown = context(run, costs)
    return render("audit.html.j2", sections(shown), shown)


def sections(shown: Mapping[str, Any]) -> list[PageSection]:
    """Choose the sections of the page: recorded updates without ground truth have no verdict."""
    rows, is_scored = shown["rows"], bool(shown["rows"]) or not shown["guesses"]
    every = (
        (shown["recorded"], section("observed", "Records", "Recorded updates")),
        (is_scored, section("defences", "Defences", "Defences")),
        (shown["fronts"], section("front", "Cost", "Leak against cost")),
        (rows, section("pictures", *_titles(shown["words"]))),
        (rows, section("details", "Details", "Details of each defence")),
        (shown["statement"], section("assurance", "Assurance", "Assurance")),
        (is_scored, section("table", "Trials", "All trials")),
        (True, section("method", "Method", "Method", "audit_method")),
        (shown["legend"], section("legend", "Legend", "Legend")),
    )
    return [each for is_shown, each in every if is_shown]


def _titles(words: ExampleWords) -> tuple[str, str]:
    """Name the section of private examples and reconstructions, for the menu and in full."""
    short = "Pictures" if words.drawn else words.plural.capitalize()
    return short, f"Private {words.plural} and reconstructions"


def context(run: Run, costs: Costs | None = None) -> dict[str, Any]:
    """Return the values that the template shows."""
    failed = [trial for trial in run.trials if trial.broken]
    finished = [trial for trial in run.trials if trial.failed is None]
    empty = [trial for trial in run.trials if trial.failed is not None]
    costs = costs_of(run) if costs is None else costs
    result = findings([*finished, *empty], costs, str(run.info.get("command", "")), undone(run))
    every = result.finished
    rows = [row for row in every if row.trial.unscored is None]
    unscored = [row for row in every if row.trial.unscored is not None]
    config = run.info.get("config") or {}
    progress = plots.progress_charts(result.verdicts)
    fronts = pareto.charts(result.verdicts, empty, config, costs)
    thresholds = sorted({float(trial.info.get("threshold", 0.5)) for trial in finished})
    room = room_of_each(rows)
    pictures = {row.number: found for row in rows if (found := pictures_of(row, room)) is not None}
    names = short_names(every)
    shown = exhibits(result.verdicts, pictures, names)
    row_tables = shown_rows(shown)
    return {
        **frame(run.info, "Gradient inversion audit", run.info.get("name") or "audit", config, _hardware(run.info)),
        **_opening(run, result, config, shown, row_tables),
        **_TERMS,
        **_FUNCTIONS,
        "recorded": any("observed" in row.info for row in every),
        "guesses": guesses(unscored),
        "notes": notes(every),
        "thresholds": thresholds,
        "verdicts": result.verdicts,
        "tables": defence_tables(shown, result),
        "table_notes": [*result.checks(), *accuracies(result, config)],
        "exhibits": shown,
        "halls": halls(shown),
        "row_tables": row_tables,
        "has_sentences": any(row.info.get("sentences") for row in rows),
        "pictures": pictures,
        "names": names,
        "control": result.control,
        "rows": rows,
        **_table(rows, result.verdicts),
        "statuses": method.statuses(every, len(failed)),
        "missing": method.missing([t.info for t in run.trials], [r for row in rows for r in row.trial.records]),
        "budget": progress,
        "words": every[0].words if every else ExampleWords(),
        **pareto.section(fronts, rows),
        "statement": assurance_of(run, costs=costs) if result.verdicts else None,
        "legend": legend(result, thresholds),
        **method.section(run.info, every, rows),
        "data": {"curves": plots.curves(progress, rows), "fronts": plots.fronts(fronts, rows)},
    }


def _opening(
    run: Run, result: Findings, config: Mapping[str, Any], shown: Sequence[Exhibit], tables: Sequence[RowTable]
) -> dict[str, Any]:
    """Return what the first screen shows: the verdict, the most telling examples, the recommendation, the basis."""
    setting = leading_setting(result.verdicts)
    here = [each for each in shown if each.verdict.setting == setting]
    advice = result.recommendation
    telling = most_telling(here, advice and advice.defence)
    settings = {entry.setting for entry in result.entries}
    with_pictures = [each for each in telling if each.pictures is not None]
    first = with_pictures[0].pictures if with_pictures else None
    same = [each for each in telling if each.pictures and first and each.pictures.truth_digest == first.truth_digest]
    judged = [row for row in result.finished if not row.is_control]
    return {
        "verdict": result.sentence,
        "opening": telling,
        "opening_setting": setting.title() if setting and len(settings) > 1 else "",
        "opening_truths": first.truths[:_ACROSS] if first else (),
        "opening_examples": opening_examples(telling, tables),
        "opening_same": [each.row.number for each in same],
        "across": _ACROSS,
        "others": [each.name for each in here if each not in telling],
        "recommendation": advice,
        "basis": _basis(result.finished),
        "not_tested": listing(name for name, _ in untried(judged, config)),
        "threat": threat_model(result.finished, config),
        "scope": scope(judged, config),
        "warnings": run.info.get("warnings", []),
        "untried": run.info.get("untried", []),
        **_status(run, result),
    }


def _status(run: Run, result: Findings) -> dict[str, Any]:
    """Count the trials without a result."""
    planned = run.info.get("trials") or ()
    return {
        "planned": len(planned),
        "unfinished": max(0, len(planned) - len(run.trials)),
        "failed": sum(trial.broken for trial in run.trials),
        "done": len(result.rows),
        "without_result": trial_table.without_result(run.trials, planned),
    }


def _basis(rows: Sequence[Row]) -> str:
    """Describe in a line what the verdict rests on."""
    if not rows:
        return "no trial has finished"
    settings = dict.fromkeys(row.setting.title() for row in rows)
    title = next(iter(settings)) if len(settings) == 1 else f"{len(settings)} settings"
    labels = all(any(grant.startswith("targets:") for grant in row.info.get("grants", ())) for row in rows)
    images, attacks = max(row.images for row in rows), len({row.attack for row in rows if not row.is_control})
    counted = [plural(images, f"private {rows[0].words.noun}")] if images else []
    facts = [title, *(["labels known to the attacker"] if labels else []), *counted, plural(attacks, "attack")]
    return ", ".join(facts)


def _hardware(info: Mapping[str, Any]) -> str:
    machine = info.get("machine") or {}
    cores = f"{machine['cores']} cores" if machine.get("cores") else None
    return ", ".join(str(part) for part in (machine.get("cpu"), cores, machine.get("device")) if part)


def _table(rows: Sequence[Row], judged: Sequence[Verdict]) -> dict[str, Any]:
    """Return the table of all trials and its CSV."""
    columns = trial_table.columns(rows, judged)
    csv = data_uri(trial_table.trials_as_csv(rows, columns).encode(), "text/csv;charset=utf-8")
    return {
        "table_label": "Scores, controls, costs and attack check of every trial",
        "columns": columns,
        "body": table_body(trial_table.ranked(rows), columns),
        "sorted_by": "asr",
        "unbounded": trial_table.unbounded(rows),
        "exports": [("Download CSV", "", csv)],
    }


def guesses(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the reconstructions without a ground truth: pictures, labels, objectives."""
    return [
        {
            "defence": row.defence,
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "descent": descent(row),
            "target_clients": [
                {
                    "name": f"client {observed['client']}, round {observed['round']}",
                    "labels": record["predicted"],
                    "objectives": (record["initial"], record["objective"]),
                    "texts": [text for text in record.get("reconstructions", ()) if text],
                }
                for observed, record in zip(row.info["observed"], row.trial.records, strict=True)
            ],
            "pictures": _guessed(row),
        }
        for row in rows
    ]


def _guessed(row: Row) -> list[Picture]:
    """Encode the reconstructions of a trial without ground truth, in the order of the target clients."""
    images = (row.trial.images() or {}).get("reconstruction")
    if images is None:
        return []
    found = list[Picture]()
    room = room_of_each([row])
    batch = images.shape[1]
    for place, image in enumerate(images.flatten(0, 1)[:room]):
        record, observed = row.trial.records[place // batch], row.info["observed"][place // batch]
        name = f"client {observed['client']}, round {observed['round']}"
        caption = "diverged" if record["objective"] is None else OUTCOMES["unknown"]
        alt = f"Reconstruction for {name}, assumed {row.defence}, by {row.attack}: {caption}"
        found.append(Picture(picture_uri(image), alt, name, "diverged" if record["objective"] is None else ""))
    return found


def notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the facts of the records that contradict a simulated client or that it assumes, each with that client."""
    return list(dict.fromkeys((row.defence, note) for row in rows for note in row.info.get("notes", ())))
