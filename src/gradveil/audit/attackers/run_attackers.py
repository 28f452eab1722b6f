"""The table of attackers applied to an open run: what `adaptive` adds, what was not tried and why, known weaknesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.protocol import Attack, CanRefuse, traits
from gradveil.audit.attack_selection import (
    ADAPTIVE,
    MALICIOUS,
    UNDEFENDED,
    general_attacks,
    has_control,
    is_same_attack,
    met,
    undefended,
    without_aim,
)
from gradveil.audit.attackers.attacker_table import RULES, Rule, Server, aims_at, excludes, is_unknown, parts_of
from gradveil.audit.attackers.update_facts import UpdateFacts
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.experiment import Experiment
from gradveil.audit.run_file import with_defaults
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.formatting import listing
from gradveil.core.user_code import users
from gradveil.defences.entry import Trait
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.weight_files import put_weights

Unfit = dict[tuple[int, str, str], str]
"""(client, defence, attack) -> why the attack does not apply there."""


ADAPTIVE_OPTION = f"--attack {ADAPTIVE}"
"""How to try what applies."""


@dataclass(frozen=True)
class Decision:
    """What the table decides of an attack in a run."""

    attack: str
    """Its text, with the settings that the run needs."""
    rule: Rule
    defences: tuple[str, ...]
    """The only defences that it is for, if the row is for some; else empty."""
    reason: str
    """Why it does not apply; empty where it does."""
    tried: bool
    """Whether the run has it, or one like it."""
    unfit: Unfit
    """Where else it does not apply."""
    weak: Mapping[int, str]
    """client -> what its update shows, where the row is for it."""

    @property
    def texts(self) -> list[str]:
        """The entries of a run's attacks that add it."""
        return [f"{self.attack} on {defence}" for defence in self.defences] or [self.attack]

    @property
    def name(self) -> str:
        """Its text, with the defences that it is for."""
        return f"{self.attack} on {listing(self.defences)}" if self.defences else self.attack

    @property
    def standing(self) -> str:
        """Return whether the attack applies, and why, in words."""
        if self.reason:
            return f"does not apply, since {self.reason}"
        return f"applies ({ADAPTIVE_OPTION}): {self.rule.why}"


def decide(experiment: Experiment, attacks: Iterable[str] | None = None) -> list[Decision]:
    """Decide for every row that looks at updates whether it applies to this run, in the order of the table.

    Rows of a malicious server are decided only where the attacks, by default those of the run's configuration, have the
    word for them.
    """
    malicious = MALICIOUS in _words(experiment.config.attacks if attacks is None else attacks)
    clients = _Clients(experiment)
    facts = [_facts(experiment, index) for index in range(len(experiment.config.client))]
    kind = experiment.space.words.kind
    rules = [rule for rule in RULES if rule.seen and kind in rule.kinds and (malicious or rule.server == "curious")]
    return [_decision(experiment, rule, text, facts, clients) for rule in rules for text in rule.attacks]


def attackers_of(facts: UpdateFacts, defence: str, client: Client) -> list[str]:
    """List the attacks of the table, and those of the defence's own package, on one update of a defended client."""
    named = [text for _, texts in parts_of(defence) for text in texts]
    kind = facts.domain.space.words.kind
    rules = (rule for rule in RULES if rule.server == "curious" and kind in rule.kinds)
    fit = (rule for rule in rules if _does(rule, defence, client) and not facts.lacks(rule))
    return list(dict.fromkeys((*named, *(text for rule in fit for text in rule.attacks))))


def _facts(experiment: Experiment, index: int) -> UpdateFacts:
    """Take the facts of what one of a run's clients sends."""
    slots = ((getattr(d, "step", None), getattr(d, "send", None)) for d in experiment.defences.values())
    seed = experiment.config.seeds[0]
    defended = experiment.client(index, next(iter(experiment.defences)), seed)
    put_weights(defended.model, experiment.source.received(defended))
    return UpdateFacts(
        experiment.undefended(index, seed),
        experiment.config.client[index].examples,
        experiment.domain,
        public=None if experiment.public is None else len(experiment.public),
        changed=any(slot is not None for both in slots for slot in both),
        statistics=bool(running_statistics(defended.model)),
    )


def _words(attacks: Iterable[str]) -> set[str]:
    return {text.strip().lower() for text in without_aim(attacks)}


Choice = Callable[[Decision], bool]
"""Whether an attack that applies to a run joins it."""


def every(_decision: Decision) -> bool:
    """Let every attack join: what `adaptive` expands to."""
    return True


def quick(decision: Decision) -> bool:
    """Let closed forms of any update join, which take seconds: what a run without named attacks has."""
    return bool(decision.rule.weakness) and not decision.rule.undisturbed


def planted(decision: Decision) -> bool:
    """Let attacks of a server that changes the model join: what `malicious` expands to."""
    return decision.rule.server == "malicious"


def choice_of_texts(attacks: Iterable[str], searches_first: bool = False) -> Choice | None:
    """Return which attacks join those of these entries of a run: what their words expand to; None for none."""
    words = _words(attacks)
    word = every if ADAPTIVE in words else planted if MALICIOUS in words else None
    return word or (quick if searches_first else None)


def choice_of(config: RunConfig) -> Choice | None:
    """Return which attacks on this run's updates join those that it names; None for none."""
    return choice_of_texts(config.attacks, config.searches_first)


def widened(
    experiment: Experiment, decisions: Sequence[Decision], joins: Choice = every
) -> tuple[Experiment, list[Decision], list[str]]:
    """Add what this run's updates give besides; return the decisions then, and what was added and why."""
    new = [each for each in decisions if not each.reason and not each.tried and joins(each)]
    words: Mapping[Server, str] = {"curious": ADAPTIVE if joins is every else "attacks", "malicious": MALICIOUS}
    told = [
        f"{words[rule.server]}: {listing(each.attack for each in added)} too, since {rule.why}"
        for rule, added in _by_rule(new)
    ]
    then = [each if each.reason or not joins(each) else replace(each, tried=True) for each in decisions]
    return replace(_with_attacks(experiment, new), until_broken=joins is quick), then, told


def untried(decisions: Sequence[Decision]) -> list[str]:
    """Say of every attack of the table that looks at updates, and was not tried, why not; equal reasons once."""
    reasons: dict[str, list[str]] = {}
    by_another_row = {each.attack for each in decisions if each.tried}
    for each in decisions:
        if each.attack not in by_another_row:
            reasons.setdefault(each.standing, []).append(each.name)
    return [f"{listing(names)}: {standing}" for standing, names in reasons.items()]


def closed_forms(experiment: Experiment, decisions: Sequence[Decision], *, called: bool = False) -> Iterator[Problem]:
    """Warn of clients whose update determines examples, where the run has no attack that finds them.

    The remedy names options, or arguments where the audit was `called` from Python.
    """
    several, bare = len(experiment.config.client) > 1, UNDEFENDED in experiment.defences
    for each in decisions:
        rule = each.rule
        if rule.weakness and not each.tried and (bare or not rule.undisturbed):
            remedy = _asked(rule.attacks[0], rule.undisturbed, called)
            for index, seen in each.weak.items():
                where = f"client[{index}]" if several else "client"
                fix = f"attack it so: {remedy}; {rule.ends}"
                text = experiment.space.words.told(rule.weakness)
                yield Problem(where, f"{text}: {seen}", fix, severity="warning")
    unknown = [defence for defence in experiment.defences if is_unknown(defence)]
    opposed = any(map(users, experiment.attacks.values()))
    if unknown and not (opposed and all(_has_general(experiment, defence) for defence in unknown)):
        missing = "attacks that know" if not opposed else "some general attacks on"
        what = f"{missing} {listing(unknown)} were not made: nothing says what a defence of your own does"
        both = [ADAPTIVE, *([] if opposed else ["package:Yours"])]
        asked = f"attacks={json.dumps(both)}" if called else " ".join(f"--attack {each}" for each in both)
        why = "it may leak what these miss" if opposed else "general attacks can miss what it leaks"
        yield Problem("defences", what, f"attack it so: {asked}; {why}", "warning")


def _has_general(experiment: Experiment, defence: str) -> bool:
    """Return whether a run makes all general attacks on a defence, or has found that they do not apply."""
    public, kind = experiment.public is not None, experiment.space.words.kind
    mine = {*met(experiment.config, defence), *(attack for _, name, attack in experiment.unfit if name == defence)}
    wanted = general_attacks(defence, public=public, kind=kind)
    return all(any(is_same_attack(text, other) for other in mine) for text in wanted)


def untested(warning: str) -> str:
    """Shorten a warning of a run to what it is of, with the option that tries it.

    >>> untested("client: one image may come back: a plain chain -> attack it so: --attack r-gap; a batch ends it")
    'one image may come back (--attack r-gap)'
    """
    cause, _, remedy = warning.partition(" -> ")
    what = cause.partition(": ")[2].partition(": ")[0]
    return f"{what} ({remedy.removeprefix('attack it so: ').partition(';')[0]})"


def _asked(attack: str, bare: bool, called: bool) -> str:
    if called:
        return f'attacks=["{attack}"]' + (f', defences=["{UNDEFENDED}"]' if bare else "")
    return f"--attack {attack}" + (f" --defence {UNDEFENDED}" if bare else "")


class _Clients:
    """The clients that an attack simulates, by client, defence and what the attack believes; each is built once."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self._built = experiment, dict[tuple[int, str], Client]()

    def __call__(self, index: int, defence: str) -> Client:
        if (index, defence) not in self._built:
            self._built[index, defence] = self.experiment.client(index, defence, self.experiment.config.seeds[0])
        return self._built[index, defence]


def _decision(
    experiment: Experiment, rule: Rule, text: str, facts: Sequence[UpdateFacts], clients: _Clients
) -> Decision:
    """Decide whether an attack of a row applies, to which defences, and to which clients."""
    attack = _call(text, rule.unlabelled if not experiment.source.scored else "")
    tried = _has(experiment.attacks.values(), make_attack(attack))
    unmet = f"no defence of the run {rule.defence}" if rule.defence else f"every defence {' or '.join(rule.unless)}"
    if not any(rule.defence == _SHOWN or aims_at(rule, defence) for defence in experiment.defences):
        return Decision(attack, rule, (), unmet, tried, {}, {})
    lacks = {index: reason for index, known in enumerate(facts) if (reason := known.lacks(rule))}
    if len(lacks) == len(facts):
        return Decision(attack, rule, (), "; ".join(dict.fromkeys(lacks.values())), tried, {}, {})
    fit = [index for index in range(len(facts)) if index not in lacks]
    weak = {index: facts[index][rule.update[-1]].seen for index in fit}
    defences = [d for d in experiment.defences if _does(rule, d, clients(fit[0], d))]
    if not defences:
        return Decision(attack, rule, (), unmet, tried, {}, {})
    made, unfit = make_attack(attack), Unfit()
    control = [UNDEFENDED] if has_control(experiment.config) and UNDEFENDED not in defences else []
    for defence in (*defences, *control):
        for index, known in enumerate(facts):
            plain = undefended(defence)
            told = index in lacks or (plain and rule.defence is None)  # by the facts: those of the undefended client
            problems = "" if told else _problems(made, known, known.client if plain else clients(index, defence))
            if reason := lacks.get(index, problems):
                unfit[index, defence, attack] = reason
    applies = [d for d in defences if any((index, d, attack) not in unfit for index in range(len(facts)))]
    reason = "" if applies else "; ".join(dict.fromkeys(unfit.values()))
    only = tuple(applies) if rule.defence or len(defences) < len(experiment.defences) else ()
    return Decision(attack, rule, only, reason, tried, unfit if applies else {}, weak)


_SHOWN: Trait = "changes updates"
"""What shows in the client that a defence makes, whatever its name."""


def _does(rule: Rule, defence: str, client: Client) -> bool:
    """Whether a defence does what a row asks for."""
    changes = client.step is not None or client.send is not None
    if excludes(rule, defence) or (changes and _SHOWN in rule.unless):
        return False
    return changes if rule.defence == _SHOWN else aims_at(rule, defence)


def _problems(attack: Attack, known: UpdateFacts, client: Client) -> str:
    simulated = client if attack.simulated_client == "full" else client.undefended_update()
    found = attack.problems(known.prospect(simulated)) if isinstance(attack, CanRefuse) else ()
    return "; ".join(f"{problem.what} -> {problem.remedy}" for problem in found)


def _has(attacks: Collection[Attack], wanted: Attack) -> bool:
    """Whether one of these attacks does what is wanted: is of its kind, or pulls to running statistics as it does."""
    if _pulls(wanted):
        return any(map(_pulls, attacks))
    return any(type(attack) is type(wanted) and _aims(attack) == _aims(wanted) for attack in attacks)


def _pulls(attack: Attack) -> bool:
    return traits(attack).batchnorm > 0


def _aims(attack: Attack) -> tuple[object, ...]:
    """Return the settings by which two attacks of one kind are different ones."""
    known = traits(attack)
    return known.prior, known.start, known.objective


def _call(text: str, setting: str) -> str:
    """Add a setting to an attack's text, before its own.

    >>> _call("analytic", "labels=idlg"), _call("cdia(batchnorm=0.01)", "labels=restore"), _call("unmix", "")
    ('analytic(labels=idlg)', 'cdia(labels=restore, batchnorm=0.01)', 'unmix')
    """
    if not setting:
        return text
    name, _, rest = text.partition("(")
    return f"{name}({setting}, {rest}" if rest else f"{name}({setting})"


def _by_rule(decisions: Iterable[Decision]) -> Iterator[tuple[Rule, list[Decision]]]:
    groups: dict[int, list[Decision]] = {}
    for each in decisions:
        groups.setdefault(RULES.index(each.rule), []).append(each)
    yield from ((RULES[number], group) for number, group in groups.items())


def _with_attacks(experiment: Experiment, added: Sequence[Decision]) -> Experiment:
    """Add attacks to a run, and where they do not apply."""
    config, unfit = experiment.config, dict(experiment.unfit)
    made: dict[str, Attack] = {}
    for each in added:
        made[each.attack] = make_attack(with_defaults(each.attack, config.iterations, config.restarts))
        unfit |= each.unfit
    texts = [text for each in added for text in each.texts]
    config = config.model_copy(update={"attacks": [*config.attacks, *texts]})
    return replace(experiment, config=config, attacks={**experiment.attacks, **made}, unfit=unfit)
