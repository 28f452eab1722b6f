"""The assurance statement: what a privacy officer needs to know before signing, and what nobody examined.

It restates a run for one defence in one setting, and adds no claim: numbers are those of verdict, records and
guarantee; what was not measured is listed as such. An audit never shows that data are anonymous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from gradveil.assurance.threat_letters import NOT_RUN, THREAT_MODELS, labels_given, letter_of
from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import canonical
from gradveil.audit.baselines import interval_of, risk_of
from gradveil.audit.defence_costs import Costs, DefenceCost
from gradveil.audit.error_bound import recovery_sentence
from gradveil.audit.findings import Findings, findings_of
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import NEEDLESS, Run, results_digest
from gradveil.audit.threat_model import untried
from gradveil.audit.verdict import LEVELS, Level, Verdict, eligible
from gradveil.core.errors import fail
from gradveil.core.formatting import interval, listing, number, percent, plural
from gradveil.core.release import __version__
from gradveil.metrics import risk
from gradveil.theory.accounting import Participation, epsilon

SCHEMA = "gradveil.assurance/1"
"""The schema of the statement as JSON."""

NOT_EXAMINED = (
    "the released model and its answers: Gradveil examines updates in training",
    "membership and property inference",
    "metadata, timing and other side channels",
    "collusion of the server with clients",
)
"""What no audit of updates covers."""

RENEWAL = (
    "another model, or other layers that are trained",
    "a smaller batch or fewer local steps than audited",
    "more rounds than covered",
    "other settings of the defence, or other software",
    "a stronger published attack",
)
"""Changes after which the statement has to be made again."""


@dataclass(frozen=True)
class LetterResult:
    """The strongest attack that was run for one letter; without an attack, the letter was not run."""

    letter: str
    name: str
    knows: str
    attack: str | None = None
    identifiable: int | None = None
    images: int | None = None
    low: float | None = None
    high: float | None = None
    budget: str = ""
    attack_check: str = ""
    undefended: str = ""
    """The same attack without the defence."""
    labels_given: bool = False
    """Whether the attack was given the true labels of the target's examples."""
    why_not: str = ""
    """Why the letter was not run."""

    @property
    def was_run(self) -> bool:
        """Whether any attack with this knowledge finished."""
        return self.attack is not None


@dataclass(frozen=True)
class RiskNumber:
    """The risk of one criterion over its control, after WP29 Opinion 05/2014; None where it was not measured."""

    criterion: str
    meaning: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    control: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Formal:
    """The formal guarantee of the defence."""

    guarantee: str
    epsilon: Mapping[str, float]
    """Epsilon per unit of privacy."""
    delta: float | None
    accountant: str
    covers: str
    neighbours: str
    trust: str
    limits: tuple[str, ...]
    """Proven limits of recovery, in sentences."""
    bounds: tuple[Mapping[str, Any], ...]
    unbiased_error: float | None
    """Mean squared error per pixel; None for other data than images."""
    audited: str
    """Lower bound of epsilon by an audit of the code."""


@dataclass(frozen=True)
class Assurance:
    """The statement on one defence in one setting."""

    schema: str
    title: str
    system: Mapping[str, str]
    level: str
    verdict: str
    finding: str
    worst: str
    attackers: tuple[LetterResult, ...]
    oracle: str
    """Attacks beyond H, which know client secrets; empty where none was run."""
    controls: Mapping[str, str]
    risks: tuple[RiskNumber, ...]
    formal: Formal
    utility: str
    not_examined: tuple[str, ...]
    renewal: tuple[str, ...]
    provenance: Mapping[str, str]
    signature: Mapping[str, str | None] = field(
        default_factory=lambda: dict.fromkeys(("assessed_by", "date", "valid_until", "signature"))
    )

    def plain(self) -> dict[str, Any]:
        """Return the fields as one plain object."""
        return asdict(self)


def assurance_of(
    run: Run, defence: str | None = None, costs: Costs | None = None, audited: Sequence[Mapping[str, Any]] = ()
) -> Assurance:
    """Make the statement of a run, on `defence` or the recommended one; `audited` are results of `audit-epsilon`."""
    result = findings_of(run, costs)
    verdict = _chosen(result.verdicts, defence, result.recommendation and result.recommendation.defence)
    config = run.info.get("config") or {}
    cost = result.cost(verdict.defence)
    best, rows = verdict.best, result.finished
    low, high = verdict.interval
    controls = {
        "best guess, no update": percent(verdict.baseline),
        "mismatch control": percent(
            best.control("wrong_target_client", "identifiable")
            if best.control("wrong_target_client", "identifiable") is not None
            else best.control("wrong_target_client")
        ),
        "attack, no defence": _undefended(best, rows) or "not run",
    }
    title = "no defence" if verdict.undefended else verdict.defence
    return Assurance(
        SCHEMA,
        title,
        _system(run, verdict, config),
        LEVELS[verdict.level][0],
        f"{title}: {LEVELS[verdict.level][1]}.",
        f"The strongest attack identified and recovered {verdict.identifiable} of {best.counted(verdict.images)} "
        f"({percent(verdict.rate)}, 95% interval {interval(low, high)}). Other attacks may do better.",
        _worst(best),
        tuple(_attackers(verdict, rows)),
        _oracle(verdict),
        controls,
        tuple(_risks(verdict, config)),
        _formal(verdict, config, cost, audited),
        _utility(cost, verdict),
        (*_not_examined(verdict, config, rows), *_unfinished(result)),
        RENEWAL,
        _provenance(run),
    )


def _chosen(found: Sequence[Verdict], defence: str | None, recommended: str | None) -> Verdict:
    if not found:
        raise fail("assure", "the run has no verdict", "finish the audit: give its command again")
    names = list(dict.fromkeys(each.defence for each in found))
    if defence is not None and defence not in names:
        raise fail("--defence", f"{defence!r} is not in this run", f"give one of: {', '.join(names)}")
    wanted = defence or recommended
    mine = [each for each in found if each.defence == wanted]
    mine = mine or [each for each in found if not each.undefended] or list(found)
    # Of several settings the worst one speaks; one that nobody could judge is worse than one that held.
    return max(mine, key=lambda each: (_BADNESS.index(each.level), each.rate))


_BADNESS: tuple[Level, ...] = ("not broken", "inconclusive", "not tested", "leaks", "broken")


def _system(run: Run, verdict: Verdict, config: Mapping[str, Any]) -> dict[str, str]:
    setting, info = verdict.setting, verdict.best.info
    private = plural(verdict.images, f"private {verdict.best.words.noun}")
    weights = "trained weights" if (config.get("model") or {}).get("weights") or setting.trained else "initial weights"
    title = str(info.get("defence_title") or "")
    return {
        "model": f"{setting.model}, {weights}",
        "data": setting.data,
        "client": setting.update + (f", {setting.round + 1} rounds watched" if setting.round else ""),
        "defence": f"{verdict.defence}{f' ({title})' if title and title != verdict.defence else ''}",
        "audited": f"{private}, seed {listing(str(seed) for seed, _ in verdict.seeds)}",
    }


def _provenance(run: Run) -> dict[str, str]:
    info, machine = run.info, run.info.get("machine") or {}
    packages = info.get("packages") or {}
    facts = {
        "run": str(info.get("name") or ""),
        "audited": str(info.get("created") or "")[:16].replace("T", " ") + " UTC",
        "settings (SHA-256)": str(info.get("config_hash") or "")[:16],
        "weights (SHA-256)": str(info.get("weights") or "")[:16],
        "results (SHA-256)": results_digest(run)[:16],
        "software": f"gradveil {info.get('gradveil')}, torch {packages.get('torch', '?')}",
        "statement by": f"gradveil {__version__}",
        "machine": ", ".join(str(machine[key]) for key in ("cpu", "device") if machine.get(key)),
        "command": str(info.get("command") or ""),
    }
    return {name: text for name, text in facts.items() if text}


def _attackers(verdict: Verdict, rows: Sequence[Row]) -> Iterator[LetterResult]:
    mine = [row for row in verdict.rows if row.seed == verdict.best.seed]
    for letter, model in THREAT_MODELS.items():
        here = [row for row in mine if letter_of(row) == letter]
        if not here:
            yield LetterResult(letter, *model, why_not=NOT_RUN[letter])
            continue
        best = max(here, key=lambda row: (row.identifiable, row.identified, row.asr, row.attacker == "adaptive"))
        low, high = interval_of(best, here)
        share = "" if best.budget_share is None else f", stopped at {percent(best.budget_share)}"
        yield LetterResult(
            letter,
            *model,
            best.attack,
            best.identifiable,
            best.images,
            low,
            high,
            _budget(best) + share,
            examine(best, rows).label,
            _undefended(best, rows),
            labels_given(best),
        )


def _budget(row: Row) -> str:
    steps, seconds = row.info.get("target_iterations") or 0, row.info.get("seconds") or 0.0
    each = f"{steps / len(row.trial.records):,.0f} iterations per client, " if steps else ""
    return f"{each}{number(seconds)} s"


def _undefended(best: Row, rows: Sequence[Row]) -> str:
    same = [row for row in rows if row.undefended and (row.attack, row.setting) == (best.attack, best.setting)]
    same = [row for row in same if row.images]
    if not same:
        return ""
    row = max(same, key=lambda each: each.identifiable / each.images)
    return f"{row.identifiable} of {row.images}"


def _oracle(verdict: Verdict) -> str:
    known = [row for row in verdict.rows if letter_of(row) is None]
    if not known:
        return ""
    best = max(known, key=lambda row: row.identifiable)
    return f"Beyond H, an attack that was handed client secrets: {best.identifiable} of {best.images} ({best.attack})."


def _worst(row: Row) -> str:
    every = [(scores.get(row.words.headline) or 0.0, client, scores) for client, _, scores in row.scores()]
    score, client, scores = max(every, key=lambda entry: entry[0])
    outcome = "recovered" if scores.get("success") else "not recovered"
    named = scores.get("identified")
    singled = "" if named is None else ", identified" if named else ", not identified"
    return f"client {client}, {row.words.metric} {score:.2f}, {outcome}{singled}"


def _risks(verdict: Verdict, config: Mapping[str, Any]) -> Iterator[RiskNumber]:
    best = verdict.best
    meanings = {
        "singling out": "isolate a record that belongs to one person",
        "linkability": "link two records of one person",
        "inference": "deduce an attribute of a person",
    }
    value, low, high = risk_of(best)
    control = max(verdict.baseline, best.control("wrong_target_client", "identifiable") or 0.0)
    yield RiskNumber(
        "singling out",
        meanings["singling out"],
        value,
        low,
        high,
        control,
        f"{best.words.plural} recovered and identified",
    )
    yield _linkability(best, config, meanings["linkability"])
    if best.info.get("columns"):
        yield _inferred_cell(best, meanings["inference"])
        return
    inferred = [row for row in eligible(verdict.rows) if row.info["knowledge"].get("targets") not in ("known",)]
    known = [row for row in inferred if all(record.get("label_accuracy") is not None for record in row.trial.records)]
    if not known:
        yield RiskNumber("inference", meanings["inference"], note="not measured: labels were given to every attack")
        return
    row = max(known, key=_labels)
    labels = [label for record in row.trial.records for label in record.get("label") or ()]
    floor = max(Counter(labels).values()) / len(labels) if labels else 1.0
    if floor == 1:
        yield RiskNumber("inference", meanings["inference"], note="not measured: all labels are the same")
        return
    value, low, high = risk(round(_labels(row) * row.images), row.images, floor)
    yield RiskNumber("inference", meanings["inference"], value, low, high, floor, "labels; no other attribute")


def _linkability(row: Row, config: Mapping[str, Any], meaning: str) -> RiskNumber:
    """Return the risk that the record nearest to a reconstruction, its own aside, is of the same person.

    The control is the same with the persons of the records permuted.
    """
    known = [scores for _, _, scores in row.scores() if "linked" in scores]
    if known:
        linked, control = sum(scores["linked"] for scores in known), fmean(s["linked_by_chance"] for s in known)
        note = f"nearest other record is of the same person: {linked} of {len(known)}; control: persons permuted"
        return RiskNumber("linkability", meaning, *risk(linked, len(known), control), control, note)
    if person := (config.get("data") or {}).get("person"):
        why = f"no attacked person of column '{person}' has another record"
    elif row.info.get("columns"):
        why = "no column was declared to name persons (data.person)"
    else:
        why = "the data, as the run reads them, name no persons"
    return RiskNumber("linkability", meaning, note=f"not assessed: {why}")


def _inferred_cell(row: Row, meaning: str) -> RiskNumber:
    """Return the risk of the most exposed column, over what the rest of a true row gives away of it."""
    risks = [
        (risk(round(column["right"] * row.images), row.images, floor), floor, column["name"])
        for column in row.info["columns"]
        if (floor := max(column["usual"], column.get("inferred", 0.0))) < 1
    ]
    if not risks:
        return RiskNumber("inference", meaning, note="not measured: every column follows from the others")
    (value, low, high), floor, name = max(risks, key=lambda each: each[0].value)
    which = (
        f"column '{name}', the most exposed of {len(risks)}" if value else f"no column of {len(risks)} above control"
    )
    note = f"{which}; control: a constant, or a linear model that knows the rest of the row"
    return RiskNumber("inference", meaning, value, low, high, floor, note)


def _labels(row: Row) -> float:
    every = [float(record["label_accuracy"]) for record in row.trial.records]
    return sum(every) / len(every)


def _formal(
    verdict: Verdict, config: Mapping[str, Any], cost: DefenceCost | None, audited: Sequence[Mapping[str, Any]]
) -> Formal:
    info, planned = verdict.best.info, config.get("privacy") or {}
    bounds = tuple(info.get("recovery_bounds") or ())
    epsilon = dict(info.get("epsilon") or {})
    steps = planned.get("steps")
    covers = f"{plural(steps, 'noisy sum')} of the planned training" if epsilon and steps else ""
    guarantee = str(info.get("guarantee") or "none")
    if not epsilon and cost is not None and cost.proof:
        guarantee, covers = cost.proof, f"{plural(cost.rounds, 'round')} of the training behind the accuracy"
    members = sorted({int(client.get("members") or 1) for client in config.get("client") or [{}]})
    seen = " or ".join(f"the sum of {count} clients" if count > 1 else "every single update" for count in members)
    return Formal(
        "none" if verdict.undefended else guarantee,
        epsilon,
        planned.get("delta") if epsilon else None,
        str(planned.get("accountant", "")) if epsilon else "",
        covers,
        _neighbours(bounds, planned),
        f"the server, which sees {seen}, is not trusted",
        tuple(f"{text[0].upper()}{text[1:]}." for text in map(recovery_sentence, bounds)),
        bounds,
        _unbiased(verdict.best, bounds),
        _audited(verdict.defence, audited),
    )


def _neighbours(bounds: Sequence[Mapping[str, Any]], planned: Mapping[str, Any]) -> str:
    """Name what neighbouring data sets differ in; of a client also the epsilon if its data are replaced.

    A server that sees single updates sees who sent one, so that only another update in its place hides anything. It
    moves a sum by twice the clip. Sampling is not counted.
    """
    units = list(dict.fromkeys(str(each["unit"]) for each in bounds))
    replaced = planned.get("sampling") == "shuffled"
    named = f"one {' or '.join(units)} {'replaced' if replaced else 'added or removed'}" if units else ""
    clients = [each for each in bounds if each["unit"] == "client"]
    if replaced or not clients:
        return named
    noise, releases = clients[-1]["noise"], clients[-1]["releases"]
    fixed = Participation(releases, 1.0, planned.get("delta") or Participation.delta, "shuffled", at_most=releases)
    of_them = f"of {plural(releases, 'release')}, sampling not counted"
    return f"{named}; with one client replaced, epsilon is at most {epsilon(noise, fixed):.4g} ({of_them})"


def _unbiased(best: Row, bounds: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the largest error that every attacker without bias has: each mechanism bounds what is watched."""
    if not best.words.has_prior:
        return None
    return max((each["mse_unbiased"] for each in bounds if each["of"] == "watched"), default=None)


def _audited(defence: str, audited: Sequence[Mapping[str, Any]]) -> str:
    mine = [each for each in audited if canonical(str(each.get("defence"))) == canonical(defence) and "claimed" in each]
    texts = [
        f"claimed {number(each['claimed'])} of each {each['unit']} for one update, the audit finds at least "
        f"{number(each['at_least'])} ({percent(each['confidence'])} confidence, delta {each['delta']:g}): "
        f"{'VIOLATED' if each['violated'] or each['at_least'] > each['claimed'] else 'consistent'}"
        for each in mine
    ]
    return "; ".join(texts) or "not audited"


def _utility(cost: DefenceCost | None, verdict: Verdict) -> str:
    share = verdict.price.share
    sent = f"; {number(share)} times the bytes of an update" if share is not None and not verdict.undefended else ""
    if cost is None:
        return f"accuracy not measured{sent}"
    plain = f" ({percent(cost.plain.value)} without a defence)" if cost.plain is not None else ""
    return f"accuracy {percent(cost.accuracy.value)}{plain}, {plural(cost.seeds, 'seed')}{sent}"


def _not_examined(verdict: Verdict, config: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    yield from NOT_EXAMINED
    judged = [row for row in rows if not row.is_control]
    if missing := [name for name, _ in untried(judged, config)]:
        yield f"in this audit: {', '.join(missing)}"
    yield f"more than {plural(verdict.setting.round + 1, 'round')} of updates from one client"
    if not verdict.undefended and verdict.best.info.get("recovery_bounds"):
        yield "the generator of deployed noise: the audit simulates it"


def _unfinished(result: Findings) -> Iterator[str]:
    """Name the trials that are missing: the strongest attack may be one of them."""
    if result.undone:
        yield f"{plural(result.undone, 'trial')} of this run that {'is' if result.undone == 1 else 'are'} not done"
    if failed := [f"{row.attack} on {row.defence}" for row in result.broken if not row.is_control]:
        yield f"{plural(len(failed), 'trial')} of this run that failed: {listing(dict.fromkeys(failed))}"
    needless = [row for row in result.rows if (row.trial.failed or "").startswith(NEEDLESS)]
    if needless:
        which = dict.fromkeys(f"{row.attack} on {row.defence}" for row in needless)
        yield f"searches that were left out, since closed forms broke the defence: {listing(which)}"
