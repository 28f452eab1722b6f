"""Findings of a run for every surface, and their text: the verdict first, then one table of defences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from shlex import quote
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.audit.attack_check import PLAIN, STATES, State, coincidence, examine
from gradveil.audit.attack_selection import ATTACKERS, canonical
from gradveil.audit.attackers.attacker_table import is_unknown
from gradveil.audit.attackers.run_attackers import untested
from gradveil.audit.attackers.stopped_searches import stopped
from gradveil.audit.baselines import baseline, risk_of
from gradveil.audit.defence_costs import STUCK, Costs, DefenceCost, costs_of, largest_epsilon_of
from gradveil.audit.display import result_table
from gradveil.audit.error_bound import recovery_sentence
from gradveil.audit.recommendation import MissingVerdict, Recommendation, recommend
from gradveil.audit.result_rows import Row, TrialSetting, short_names, summarise, window_note
from gradveil.audit.run_directory import NEEDLESS, UNFIT, Run, Trial
from gradveil.audit.threat_model import scope, threat_model, untried
from gradveil.audit.verdict import LEVELS, Level, Verdict, verdicts
from gradveil.core.formatting import DASH, interval, listing, percent, plural, size
from gradveil.core.space import ExampleWords
from gradveil.defences.guarantees import NOTHING
from gradveil.defences.privacy_warnings import reservation
from gradveil.federated.training_groups import not_above, proven

SCHEMA = "gradveil.summary/1"
"""The schema of what `gradveil summary --json` prints."""
_TRAINED_ON = {"recovered_as_trained_on": "success_transformed", "identified_as_trained_on": "identified_transformed"}
"""Counts of images as a batch defence made them, and the flag of an image's scores; None where there is none."""
_NAMED = 3
"""More defences, or modules of a change, than these are counted in a sentence instead of named."""
_VERBS: Mapping[Level, tuple[str, str]] = {
    "broken": ("is broken", "are broken"),
    "leaks": ("leaks", "leak"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "not tested": ("is not tested", "are not tested"),
    "not broken": ("is not broken", "are not broken"),
}


@dataclass(frozen=True)
class Gap:
    """A defence in a setting that no trial has a score of."""

    setting: TrialSetting
    defence: str
    level: Level
    reasons: tuple[str, ...]
    undefended: bool

    @property
    def missing(self) -> MissingVerdict:
        """What a recommendation has to know of it."""
        return MissingVerdict(self.defence, self.level, self.undefended)


@dataclass(frozen=True)
class Findings:
    """Verdicts and gaps of a run, in its order."""

    rows: tuple[Row, ...] = field(repr=False)
    """Every trial, those that failed too."""
    costs: Costs = field(default_factory=dict[str, DefenceCost], repr=False)
    """What each defence costs in a training, by its canonical text; empty where nothing was trained."""
    command: str = ""
    """The command that made the run."""
    undone: int = 0
    """Trials of the run that are not done."""

    @cached_property
    def finished(self) -> list[Row]:
        """The trials that did not fail."""
        return [row for row in self.rows if row.trial.failed is None]

    @property
    def broken(self) -> list[Row]:
        """The trials that failed although their attack applies."""
        return [row for row in self.rows if row.trial.broken]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on every defence in every setting."""
        return verdicts([row for row in self.rows if not row.trial.broken and row.trial.unscored is None])

    @cached_property
    def gaps(self) -> list[Gap]:
        """The defences without a verdict."""
        judged = {(verdict.setting, verdict.defence) for verdict in self.verdicts}
        groups: dict[tuple[TrialSetting, str], list[Row]] = {}
        for row in self.rows:
            if not row.is_control and (row.setting, row.defence) not in judged:
                groups.setdefault((row.setting, row.defence), []).append(row)
        return [_gap(setting, defence, group) for (setting, defence), group in groups.items()]

    @property
    def entries(self) -> list[Verdict | Gap]:
        """Verdicts first, then gaps."""
        return [*self.verdicts, *self.gaps]

    @property
    def sentence(self) -> str:
        """The verdict on the whole run in a sentence."""
        return sentence_of([self])

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """The defence to use and what it costs, or what to try next; None without a defence, or without a result."""
        if not self.finished:
            return None
        gaps, failed = [gap.missing for gap in self.gaps], {row.defence for row in self.broken if not row.is_control}
        return recommend(self.verdicts, gaps, self.costs, self.command, failed, self.undone)

    def cost(self, defence: str) -> DefenceCost | None:
        """Look up what a defence costs in a training; None where it was not measured."""
        return self.costs.get(canonical(defence))

    @property
    def settings(self) -> list[dict[str, Any]]:
        """One plain object for each defence in each setting."""
        plain = [*map(_plain, self.verdicts), *map(_plain_gap, self.gaps)]
        found = [self.cost(each["defence"]) for each in plain]
        return [{**each, "cost": cost and cost.as_object()} for each, cost in zip(plain, found, strict=True)]

    @cached_property
    def trials(self) -> list[dict[str, Any]]:
        """One flat object for each trial, with the verdict on its defence; a control is no part of a verdict."""
        levels: dict[tuple[TrialSetting, str], Level] = {
            (each.setting, each.defence): each.level for each in self.entries
        }
        return [
            {**summarise(row.trial), **_of_trial(row, self.finished, levels.get((row.setting, row.defence)))}
            for row in self.rows
        ]

    def notes(self) -> Iterator[str]:
        """Give what the table does not show of a verdict, in a line: an undecided one, or a leak by another count."""
        groups: dict[tuple[Level, str], list[str]] = {}
        for each in self.entries:
            if reason := _unseen(each):
                groups.setdefault((each.level, reason), []).append(each.defence)
        for (level, reason), names in groups.items():
            yield f"{listing(dict.fromkeys(names))}: {LEVELS[level][0].lower()}. {reason}"

    def checks(self) -> Iterator[str]:
        """Say what an attack check that is no plain pass means for a defence that is not broken, and its basis."""
        names: dict[State, list[str]] = {}
        for each in self.verdicts:
            if each.level == "not broken" and each.health.state not in PLAIN:
                names.setdefault(each.health.state, []).append(each.defence)
        for state, some in names.items():
            label, meaning = STATES[state]
            words = self.finished[0].words.told(meaning)
            yield f"Attack check of {listing(dict.fromkeys(some))}: {label}, which means that {words}."
        yield from dict.fromkeys(words for each in self.verdicts for words in each.basis)

    @property
    def no_progress(self) -> str:
        """The trainings behind the accuracies that learned nothing, after the mark that they have; empty without."""
        entries = {each.defence: self.cost(each.defence) for each in self.entries if each.setting.trained is None}
        stuck = not_above({name: cost.chance for name, cost in entries.items() if cost and cost.chance})
        return f"{STUCK} {stuck}" if stuck else ""

    def reasons(self) -> Iterator[str]:
        """Give every reason of each verdict, in a line."""
        for each in self.entries:
            warning = f" {each.warning}" if isinstance(each, Verdict) and each.warning else ""
            yield f"{each.defence}: {LEVELS[each.level][0].lower()}. {' '.join(each.reasons)}{warning}"

    @property
    def guess(self) -> str:
        """Say what the best guess is expected to reach of the headline."""
        rates = sorted(baseline(row) for row in self.finished if row.images and not row.is_control)
        span = " to ".join(dict.fromkeys(percent(rate) for rate in (*rates[:1], *rates[-1:])))
        return f"Baseline: a guess that sees no update is expected to make {span} identifiable." if span else ""

    @property
    def control(self) -> str:
        """Report in a line what the control shows; empty where there is none."""
        mine = [row for row in self.rows if row.is_control]
        done = [row for row in mine if row.trial.failed is None]
        told = [f"{row.attack} recovers {row.recovered} of {row.images}" for row in done]
        told += [
            f"{row.attack} {UNFIT if row.trial.unfit else 'failed'}" for row in mine if row.trial.failed is not None
        ]
        return f"Control: {listing(dict.fromkeys(told))} without a defence." if told else ""


def findings(
    trials: Sequence[Trial], costs: Costs = MappingProxyType({}), command: str = "", undone: int = 0
) -> Findings:
    """Collect the findings of these trials, and of trainings with the same defences."""
    return Findings(tuple(Row(place, trial) for place, trial in enumerate(trials)), costs, command, undone)


def findings_of(run: Run, costs: Costs | None = None) -> Findings:
    """Collect the findings of a run on disk with those of its own trainings, unless `costs` tells of others."""
    own = costs_of(run) if costs is None else costs
    return findings(run.trials, own, str(run.info.get("command", "")), undone(run))


def undone(run: Run) -> int:
    """Count the planned trials of a run that are not there."""
    return len({*run.info.get("trials", ())} - {trial.info.get("trial") for trial in run.trials})


def hits(row: Row, flag: str) -> int | None:
    """Count the images whose scores have a flag set; None where they do not have it."""
    flags = [scores[flag] for _, _, scores in row.scores() if scores.get(flag) is not None]
    return sum(map(bool, flags)) if flags else None


def sentence_of(found: Sequence[Findings]) -> str:
    """Put the verdict on these runs into a sentence, and what is missing for a whole one."""
    failed, undone = sum(len(each.broken) for each in found), sum(each.undone for each in found)
    missing = [*([f"{plural(failed, 'trial')} failed"] if failed else []), *([f"{undone} not done"] if undone else [])]
    any_result = any(each.finished for each in found)
    return f"{_sentence(found)} Incomplete: {listing(missing)}." if missing and any_result else _sentence(found)


def _sentence(found: Sequence[Findings]) -> str:
    every = [entry for each in found for entry in each.entries]
    judged = (each for each in every if not each.undefended)
    defended: list[tuple[str, Level, bool]] = [(each.defence, each.level, _limited(each)) for each in judged]
    if defended:
        text = _counted(defended, several=len({each.setting for each in every}) > 1 or len(found) > 1)
        bare = {each.level for each in every if each.undefended}
        open_ended = all(level in ("inconclusive", "not tested") for _, level, _ in defended)
        return f"{text} Without a defence: broken." if open_ended and bare == {"broken"} else text
    if every:
        levels = listing(dict.fromkeys(LEVELS[each.level][0].lower() for each in every))
        return f"No defence was tested. Without a defence: {levels}."
    return "There is no verdict: no trial has finished."


def _unseen(entry: Verdict | Gap) -> str:
    """Give the reason of a verdict that its row of the table does not show; empty where it shows it."""
    if isinstance(entry, Gap):
        return " ".join(entry.reasons)
    if entry.level in ("inconclusive", "not tested"):
        shown = entry.reasons if is_unknown(entry.defence) else entry.reasons[:1]  # several things can be missing
        return " ".join((*shown, entry.warning)).strip()
    leak, plain = entry.leak, entry.interval[0] > entry.baseline and 2 * entry.rate >= 1
    if leak is None or plain or not entry.leaked or leak.criterion == "recovered as trained on":
        return ""
    return f"{entry.leaked}; guessing is expected to reach {leak.expected:.2g}."


def _other_count(entry: Verdict | Gap) -> str:
    """Write the count that leaks, where that is not the headline: for a column of its own."""
    leak = entry.leak if isinstance(entry, Verdict) and _unseen(entry) else None
    return f"{leak.observed}/{leak.images} {leak.criterion}" if leak else ""


def _gap(setting: TrialSetting, defence: str, group: Sequence[Row]) -> Gap:
    failed = dict.fromkeys(f"{row.attack} failed: {row.trial.failed}." for row in group if row.trial.broken)
    blind = dict.fromkeys(f"{row.trial.unscored}." for row in group if row.trial.failed is None and row.trial.unscored)
    unmet = "No attack of this run applies to it: add --attack adaptive."
    reasons = tuple(each[0].upper() + each[1:] for each in (*blind, *failed)) or (unmet,)
    return Gap(setting, defence, "inconclusive" if blind else "not tested", reasons, group[0].undefended)


def _limited(entry: Verdict | Gap) -> bool:
    return isinstance(entry, Verdict) and entry.limited


def _counted(defended: Sequence[tuple[str, Level, bool]], several: bool) -> str:
    """Count the defences of every level, the worst first; name them where they are few. The flag is of `limited` ones.

    >>> _counted([("dgp", "broken", False), ("prune(0.9)", "broken", False), ("dp", "leaks", False)], several=False)
    '2 of 3 defences are broken (dgp and prune(0.9)); 1 leaks (dp).'
    >>> _counted([("dgp", "not broken", True)], several=False)
    'The only defence is not broken within the budget (dgp).'
    """
    what = "defended setting" if several else "defence"
    told = list[str]()
    for level, limited in product(_VERBS, (False, True)):
        names = [name for name, *own in defended if own == [level, limited]]
        if names:
            count = "" if told else f" of {plural(len(defended), what)}"
            count = f"{len(names)}{count}" if len(defended) > 1 else f"The only {what}"
            unique = list(dict.fromkeys(names))
            named = f" ({listing(unique)})" if len(unique) <= _NAMED else ""
            within = " within the budget" if limited else ""
            told.append(f"{count} {_VERBS[level][len(names) > 1]}{within}{named}")
    return "; ".join(told) + "."


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        **_where(verdict.setting),
        "seed": verdict.best.seed,
        "defence": verdict.defence,
        "verdict": verdict.level,
        "recovered": verdict.recovered,
        "identified": verdict.identified,
        "identifiable": verdict.identifiable,
        **_trained_on(verdict.best),
        "images": verdict.images,
        "ci": list(verdict.interval),
        "baseline": verdict.baseline,
        "baselines": _baselines(verdict),
        "leak": verdict.leak and verdict.leak.plain(),
        "risk": verdict.risk._asdict(),
        "attack": verdict.best.attack,
        "attacker": verdict.best.attacker,
        "attack_check": verdict.health.state,
        "budget_share": verdict.best.budget_share,
        "reasons": list(verdict.reasons),
    }


def _baselines(verdict: Verdict) -> dict[str, float]:
    """Return the share of images that the best guess is expected to reach, by criterion."""
    mine = [test for test in verdict.tests if test.number == verdict.best.number]
    return {"identifiable": verdict.baseline} | {test.criterion: test.baseline for test in mine}


def _plain_gap(gap: Gap) -> dict[str, Any]:
    counts = ("seed", "recovered", "identified", "identifiable", *_TRAINED_ON, "images", "ci", "baseline", "baselines")
    none = (*counts, "leak", "risk", "attack", "attacker", "attack_check", "budget_share")
    told = {"defence": gap.defence, "verdict": gap.level, "reasons": list(gap.reasons)}
    return {**_where(gap.setting), **dict.fromkeys(none), **told}


def _trained_on(row: Row) -> dict[str, int | None]:
    return {name: hits(row, flag) for name, flag in _TRAINED_ON.items()}


def _where(setting: TrialSetting) -> dict[str, Any]:
    return {"setting": setting.title(), **setting._asdict()}


def _of_trial(row: Row, beside: Sequence[Row], level: Level | None) -> dict[str, Any]:
    """Name the attacker and the attack check of a trial, and its share of the verdict."""
    scored = row.trial.failed is None and row.images > 0
    risk = risk_of(row) if scored else None
    return {
        "verdict": None if row.is_control else level,
        "recovered": row.recovered if scored else None,
        "identified": row.identified if scored else None,
        "identifiable": row.identifiable if scored else None,
        **_trained_on(row),
        "baseline": baseline(row) if scored else None,
        "risk": risk.value if risk else None,
        "risk_low": risk.low if risk else None,
        "risk_high": risk.high if risk else None,
        "attacker": row.attacker if row.trial.failed is None else None,
        "attack_check": examine(row, beside).state if row.trial.failed is None else None,
    }


def explained(found: Findings) -> Iterator[str]:
    """Define the words of the verdict table, as far as they occur."""
    levels = {each.level for each in found.entries}
    for level, (label, meaning) in LEVELS.items():
        if level in levels:
            yield f"{label}: {meaning}."
    words = found.finished[0].words if found.finished else ExampleWords()
    some = words.plural
    yield f"Identifiable: {some} recovered and nearest to their own among all private {some}, with a 95% interval."
    yield f"Baseline: the share of identifiable {some} that the best guess, which sees no update, is expected to reach."
    yield "Risk: the rate beyond baseline and mismatch control, as a share of what was left to gain, with its interval."
    states = {examine(row, found.finished).state for row in found.finished}
    for state, (label, meaning) in STATES.items():
        if state in states:
            yield f"Attack check, {label}: {words.told(meaning)}."
    kinds = {row.attacker for row in found.finished} - {"undefended"}
    for kind, (short, _) in ATTACKERS.items():
        if kind in kinds:
            yield f"Attacker, {kind}: {short}."


_STYLES: Mapping[Level, str] = {
    "broken": "bold red",
    "leaks": "bold yellow",
    "inconclusive": "yellow",
    "not tested": "yellow",
    "not broken": "green",
}


NARROW, WIDE = 90, 116
"""Widths in characters: below the first, the table has no baseline and no bytes; from the second, room for the risk."""
_NUMBERS = ("identifiable", "95% CI", "baseline", "leak", "risk over baseline")


MORE = "Definitions and reasons: --explain. Every trial: --all."
"""The last line of the results, from the command that shows runs."""


def print_outcome(
    console: Console,
    found: Findings,
    config: Mapping[str, Any],
    *,
    every: bool = False,
    explain: bool = False,
    warnings: Sequence[str] = (),
    more: str = MORE,
) -> None:
    """Print the verdict, its table and at most a few lines; `explain` adds reasons and definitions, `every` each trial.

    `config` is the run's resolved configuration, `warnings` are its own, `more` names the place of the rest.
    """
    fixed = not console.is_terminal  # a pipe has no width: programs read whole lines
    narrow, wide = console.width < NARROW, console.width >= WIDE
    console.print(Text(f"Verdict: {found.sentence}", style="bold"), soft_wrap=fixed)
    if found.recommendation is not None:
        console.print(Text(f"Recommendation: {found.recommendation.text}"), soft_wrap=fixed)
    console.print()
    console.print(verdict_table(found, risk=(every or explain) and wide, narrow=narrow))
    if every or (found.finished and not found.verdicts):
        console.print()
        console.print(result_table([row.trial for row in found.rows]))
    lines = [*remarks_on(found, config, warnings)]
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=fixed)
    if explain:
        console.print()
        for line in (*details(found), *definitions(found, config)):
            console.print(Text(line, style="dim"), soft_wrap=fixed)
    if more and not (every and explain):
        console.print(Text(more, style="dim"), soft_wrap=fixed)


def verdict_table(found: Findings, *, risk: bool = False, narrow: bool = False) -> Table:
    """Lay the verdicts out: one row per defence, at its strongest trial by an attacker that knows no client secrets."""
    rows = found.entries
    clients = len({each.setting.client for each in rows}) > 1
    trained = any(each.setting.trained is not None for each in rows)
    accuracies = {id(verdict): _accuracy(found, verdict) for verdict in found.verdicts}
    accuracy = any(accuracies.values())
    leaked = any(map(_other_count, rows))
    left_out = {*(["baseline"] if narrow else []), *([] if risk else ["risk over baseline"])}
    left_out |= set() if leaked else {"leak"}
    shown = [title for title in _NUMBERS if title not in left_out]
    last = [*(["accuracy"] if accuracy else []), *([] if narrow else ["bytes"])]
    names = short_names(row.attack for row in found.rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("defence", *(("client",) if clients else ()), *(("round",) if trained else ())):
        table.add_column(title, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for title in shown:
        table.add_column(title, justify="right", no_wrap=title != "leak")
    table.add_column("strongest attack", overflow="fold")
    for title in last:
        table.add_column(title, justify="right", no_wrap=True)
    for each in rows:
        where = [each.defence, *([each.setting.client] if clients else [])]
        where += [str(each.setting.trained)] if trained else []
        label = Text(LEVELS[each.level][0].upper(), style=_STYLES[each.level])
        if isinstance(each, Gap):
            table.add_row(*where, label, *[DASH] * (len(shown) + 1 + len(last)))
            continue
        cells = dict(zip(_NUMBERS, headline(each), strict=True))
        cells |= {"accuracy": accuracies[id(each)] or DASH, "bytes": size(each.price.sent)}
        left, right = ([cells[title] for title in titles] for titles in (shown, last))
        table.add_row(*where, label, *left, Text(strongest(each, names)), *right)
    return table


def _accuracy(found: Findings, verdict: Verdict) -> str:
    """Write the accuracy of the model that was attacked, or of the training of its defence; empty without any."""
    if verdict.setting.trained is not None:
        then = verdict.best.summary["accuracy"]
        return "" if then is None else percent(then)
    cost = found.cost(verdict.defence)
    return cost.accuracy_words if cost else ""


def headline(verdict: Verdict) -> tuple[str, str, str, str, str]:
    """Write the numbers of a verdict: identifiable images, interval, baseline, the count that leaks, risk."""
    risk = verdict.risk
    return (
        f"{verdict.identifiable}/{verdict.images} {percent(verdict.rate):>5}",
        interval(*verdict.interval),
        percent(verdict.baseline),
        _other_count(verdict) or DASH,
        f"{percent(risk.value)} ({interval(risk.low, risk.high)})",
    )


def strongest(verdict: Verdict, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Name the attack that a verdict quotes, by its short name, and its attacker where there is a defence to know."""
    kind, attack = verdict.best.attacker, names.get(verdict.best.attack, verdict.best.attack)
    return attack if kind == "undefended" else f"{attack}, {kind}"


def remarks_on(found: Findings, config: Mapping[str, Any], warnings: Sequence[str] = ()) -> Iterator[str]:
    """Collect what the table does not show: reasons of undecided verdicts, failures, guarantees, what is not tested."""
    yield from found.notes()
    yield from found.checks()
    if explained := [*equal_counts(found), *accuracies(found, config)]:
        yield " ".join(explained)
    yield from trained_on(found)
    yield from failures(found)
    rows = found.finished
    doubts = dict.fromkeys(f"{row.defence}: {doubt}" for row in rows for doubt in row.info.get("suspicions", ()))
    yield from (f"Privacy warning: {doubt}." for doubt in doubts)
    changed = list(dict.fromkeys(change for row in found.rows for change in row.info.get("prepared", ())))
    if changed:
        yield f"Changed in the model: {'; '.join(map(briefly, changed))}."
    assumed = dict.fromkeys(note for row in rows if row.trial.unscored for note in row.info.get("notes", ()))
    if assumed:
        yield f"Assumed of the recorded updates: {'; '.join(assumed)}."
    yield from _unbounded_guesses(rows)
    yield from _left_out(found)
    yield from stopped(rows, config)
    yield from guaranteed(found)
    yield from recovery_limits(found)
    judged = [row for row in rows if not row.is_control]
    settings = [f"{name} ({setting})" for name, setting in untried(judged, config)]
    if missing := [*map(untested, warnings), *settings]:
        yield f"Not tested: {', '.join(missing)}."


def equal_counts(found: Findings) -> Iterator[str]:
    """Explain why rows with the same count have different intervals, where the numbers of attacks differ."""
    alike: dict[tuple[int, int], list[Verdict]] = {}
    for verdict in found.verdicts:
        alike.setdefault((verdict.identifiable, verdict.images), []).append(verdict)
    attacked = [{(verdict.interval, len(verdict.judged)) for verdict in same} for same in alike.values()]
    if any(len({ends for ends, _ in each}) > 1 < len({count for _, count in each}) for each in attacked):
        yield "95% CI: its lower end allows for the number of attacks on a row."


def accuracies(found: Findings, config: Mapping[str, Any]) -> Iterator[str]:
    """Say on which examples the accuracies were measured, and which trainings learned nothing."""
    costs = [found.cost(each.defence) for each in found.entries if each.setting.trained is None]
    tested = max((cost.accuracy.tested for cost in costs if cost is not None), default=0)
    if tested:
        some = found.finished[0].words.plural
        every = config.get("target_images", "test") == "test" and max(row.distinct for row in found.finished) >= tested
        which = f"the {tested} attacked {some}" if every else f"{tested} test {some}"
        yield f"Accuracy: of {which}, after a short training, with its 95% interval."
    if found.no_progress:
        yield found.no_progress


def _unbounded_guesses(rows: Sequence[Row]) -> Iterator[str]:
    """Explain a high baseline where no public examples say how many images a guess recovers."""
    known = {name for row in rows for _, _, scores in row.scores() for name in scores.get("expected") or ()}
    if "identified" in known and "identifiable" not in known:
        yield rows[0].words.told(
            "Baseline: without public examples, it is the chance to tell an image from the others of its class. "
            "public=(inputs, labels), of which none is private, lowers it."
        )


def _left_out(found: Findings) -> Iterator[str]:
    """Name in a line the searches that were not needed, and how to have them."""
    needless = [row for row in found.rows if (row.trial.failed or "").startswith(NEEDLESS)]
    if needless:
        which = listing(dict.fromkeys(f"{row.attack} on {row.defence}: {row.trial.failed}" for row in needless))
        names = dict.fromkeys(row.attack for row in needless)
        how = " ".join(f"--attack {quote(name)}" for name in names)
        how = f"attacks={[*names]}" if found.command.startswith("gradveil.audit(") else how
        yield f"Left out: {which}. Name the attack to have it: {how}."


def briefly(change: str) -> str:
    """Shorten the list of modules that a change to a model names.

    >>> briefly("BatchNorm replaced (frozen): modules 'a', 'b', 'c', 'd'"), briefly("made explicit: modules 'a', 'b'")
    ("BatchNorm replaced (frozen): 4 modules ('a', 'b', …)", "made explicit: modules 'a', 'b'")
    """
    what, modules, rest = change.partition(": modules ")
    names = rest.split(", ")
    return f"{what}: {len(names)} modules ({names[0]}, {names[1]}, …)" if modules and len(names) > _NAMED else change


def guaranteed(found: Findings) -> Iterator[str]:
    """Name in a line the defences with a formal guarantee; nothing where there is no defence."""
    proofs: dict[str, str] = {row.defence: _proven(found, row) for row in found.finished if not row.undefended}
    sound = [f"{name}, {proof}" for name, proof in proofs.items() if proof != NOTHING]
    if sound:
        only = "only " if len(sound) < len(proofs) else ""
        yield f"Formal guarantee: {only}{listing(sound)}."
    elif proofs:
        yield "Formal guarantee: none."


def recovery_limits(found: Findings) -> Iterator[str]:
    """State for each defence with a formal guarantee the largest probability of recovery, for any attacker."""
    rows = [row for row in found.finished if not row.undefended]
    limits = ((row.defence, bound) for row in rows for bound in row.info.get("recovery_bounds") or ())
    yield from dict.fromkeys(f"Proven of {name}: {recovery_sentence(bound)}." for name, bound in limits)


def _proven(found: Findings, row: Row) -> str:
    """Describe in a few words what is proven: of a planned training, or of the one behind the accuracy."""
    cost = found.cost(row.defence)
    doubt = reservation(largest_epsilon_of(row.info, cost))
    doubt = f" ({doubt})" if doubt else ""
    if row.info.get("epsilon") or cost is None or not cost.proof:
        return f"{proven(row.info)}{doubt}"
    return f"{cost.proven}{doubt} over the {plural(cost.rounds, 'round')} of training behind the accuracy"


def details(found: Findings) -> Iterator[str]:
    """Explain the verdicts: every reason, the control, and what spoils or limits the results."""
    yield from found.reasons()
    if found.control:
        yield found.control
    yield from conditions(found)


def trained_on(found: Findings) -> Iterator[str]:
    """Report how many of the images that a batch defence made, and the client trained on, came back."""
    for verdict in found.verdicts:
        mine = [test for test in verdict.tests if test.criterion == "recovered as trained on"]
        if mine:
            most = max(mine, key=lambda test: test.observed)
            yield (
                f"{verdict.defence}: {most.observed} of {most.images} {most.noun}s recovered as the client trained on "
                f"them ({most.attack}); guessing is expected to reach {most.expected:.2g}."
            )


def failures(found: Findings) -> Iterator[str]:
    """Name the trials that failed where others on the same defence did not: a gap names its own."""
    gaps = {(gap.setting, gap.defence) for gap in found.gaps}
    for row in found.rows:
        if row.trial.broken and not row.is_control and (row.setting, row.defence) not in gaps:
            yield f"{row.attack} against {row.defence}, seed {row.seed}, failed: {row.trial.failed}."


def conditions(found: Findings) -> Iterator[str]:
    """Name what spoils or limits the results: coincidences, guarantees, simulated clients, divergence."""
    rows = found.finished
    yield from (f"{row.attack} against {row.defence}: {alike}." for row in rows if (alike := coincidence(row)))
    for promise, names in _promises(rows).items():
        if promise in ("none", NOTHING):
            yield f"No formal guarantee: {listing(names)}."
        else:
            yield from (f"Formal guarantee of {name}: {_guarantee(found, name, promise)}." for name in names)
    yield from (f"Believed {row.defence}: {note}." for row, note in _notes(rows))
    diverged = sum(summarise(row.trial)["statuses"].get("diverged", 0) for row in rows)
    if diverged:
        whose = "1 target client's attack" if diverged == 1 else f"{diverged} target clients' attacks"
        yield f"{whose} diverged and count{'s' if diverged == 1 else ''} as failed."


def definitions(found: Findings, config: Mapping[str, Any]) -> Iterator[str]:
    """Define the threat model and the words and columns of the tables."""
    rows = found.finished
    threshold = next((row.info["threshold"] for row in rows if "threshold" in row.info), 0.5)
    yield scope([row for row in rows if not row.is_control], config)
    if rows:
        yield f"Threat model: {threat_model(rows, config)}"
    if any(row.images for row in rows):
        yield f"Recovered: {rows[0].words.recovered(threshold)}{window_note(rows[0].info)}."
    yield from explained(found)
    if any(row.attacker == "informed" for row in rows):
        yield "Rates of informed attackers are upper bounds, no part of a verdict."
    yield "Distance: of the sent update to the same model's without noise, clipping and pruning, relative."
    if any(row.setting.trained is not None for row in rows):
        yield "Round: of the training, after which clients were attacked. Accuracy: the model's then."


def _notes(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """List what contradicts the simulated client in a defence, or had to be assumed of it, once each."""
    said = {(row.defence, note): row for row in rows for note in row.info.get("notes", ())}
    return [(row, note) for (_, note), row in said.items()]


def _guarantee(found: Findings, defence: str, promise: str) -> str:
    """Give the guarantee of the training behind the accuracy, whose epsilon is the only one that goes with it."""
    cost = found.cost(defence)
    if cost is None or not cost.proof:
        return promise
    planned = any(row.defence == defence and row.info.get("epsilon") for row in found.finished)
    measured = f"{cost.proof}, for the {plural(cost.rounds, 'round')} of training behind the accuracy"
    return f"{promise}; {measured}" if planned else measured


def _promises(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Group the defences by what is proven of them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if not row.undefended and row.info.get("guarantee") and row.defence not in found.get(row.info["guarantee"], []):
            found.setdefault(str(row.info["guarantee"]), []).append(row.defence)
    return found
