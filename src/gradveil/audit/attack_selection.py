"""Attackers of a run.

What each knows, expansion of `adaptive` and `malicious`, the undefended control, the list of trials.

The table of attackers (`gradveil.audit.attackers`) chooses them by what a defence does: those who only look
(`adaptive`), and those who change the model that is sent (`malicious`). Those that depend on the update come to a run
once it is open.

A low rate against a defence means something only if the attack works without it. The control shows that, on few clients
and with otherwise equal settings. Recorded updates have none: they are what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Literal, NamedTuple

from gradveil.attacks.attack_catalogue import ALL_ATTACKS, make_attack
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import Known
from gradveil.attacks.learned import Learned
from gradveil.attacks.protocol import Active, Attack, traits
from gradveil.audit.attackers.attacker_table import aimed_by
from gradveil.audit.audit_config import AUTO, RunConfig
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.formatting import listing
from gradveil.core.user_code import users
from gradveil.data.registry import kind_of
from gradveil.defences import entries, parse
from gradveil.runs.run_folder import digest

Attacker = Literal["undefended", "naive", "aware", "adaptive", "active", "informed"]
"""Whose attack a trial is. See `attacker`."""

ATTACKERS: dict[str, tuple[str, str]] = {
    "undefended": ("no defence", "there is no defence to know"),
    "naive": ("ignores the defence", "inverts the update as if nothing had been done to it"),
    "aware": (
        "knows the architecture",
        "inverts the update as if nothing had been done to it, but leaves out the layers that the noise of a "
        "bottleneck in the model reaches",
    ),
    "adaptive": (
        "knows the defence",
        "simulates the defence; its random values were not handed over, but sampled, optimised, inferred or left out",
    ),
    "active": (
        "changed the model",
        "sent a model that makes updates give examples away: a malicious server, where the others only watch; a client "
        "that looks at what it is sent can refuse it",
    ),
    "informed": (
        "knows client secrets",
        "was handed random values or statistics of the batch that only the client knows: an upper bound, not a verdict",
    ),
}
"""Short and long description of every kind of attacker."""

POSITIONS = {
    "known": "the true value was handed over by the audit",
    "optimise": "found together with the examples",
    "sample": "drawn afresh from its public law",
    "infer": "read off what was sent",
    "neutral": "taken to be off",
}
"""What an attacker can do about a tensor that it does not see."""


def undefended(defence: str) -> bool:
    """Say whether a defence does nothing, however that was written.

    >>> undefended("none"), undefended(" None + none()"), undefended("dp"), undefended("an object's name")
    (True, True, False, False)
    """
    try:
        return not defence or all(entry.name == "none" for entry in entries(defence))
    except GradveilError:
        return False


def attacker(attack: Attack, defence: str, changes: Sequence[str], bare: bool, secrets: Sequence[str]) -> Attacker:
    """Classify the attack of a trial: by what it was granted, whether it changes the model, and what it simulates.

    `changes` are the slots that the simulated defence fills; `bare` tells that the attacked client has none, which may
    be another one where its update was recorded.

    >>> attacker(make_attack("cdia"), "dgp", ["send"], False, []), attacker(make_attack("ig"), "none", [], False, [])
    ('adaptive', 'naive')
    >>> attacker(make_attack("pig"), "cvb", ["model"], False, []), attacker(make_attack("rob"), "none", [], True, [])
    ('aware', 'active')
    """
    if secrets:
        return "informed"
    if isinstance(attack, Active):
        return "active"
    if not changes:
        return "undefended" if bare else "naive"
    if attack.simulated_client == "full":
        return "adaptive"
    return "aware" if _sidesteps(attack, defence) else "naive"


def _sidesteps(attack: Attack, defence: str) -> bool:
    """Whether an attack leaves out the layers behind a bottleneck, and the defence is or has one."""
    aims = (make_attack(text) for text in aimed_at(defence))
    return _ignores_noise(attack) and any(map(_ignores_noise, aims))


def _ignores_noise(attack: Attack) -> bool:
    return traits(attack).ignore == "stochastic"


Method = Literal["search", "learned", "closed form", "custom"]
"""The way an attack finds images: it searches, learns from examples, solves equations, or does not say."""


def method(attack: Attack) -> Method:
    """Classify how an attack finds images; a custom one that asks for public images is taken to learn from them.

    >>> [method(make_attack(text)) for text in ("ig", "learned", "analytic(prior=public)", "rob")]
    ['search', 'learned', 'closed form', 'closed form']
    """
    if isinstance(attack, Inversion):
        return "search"
    if isinstance(attack, Learned) or (users(attack) and "public" in attack.knowledge):
        return "learned"
    return "custom" if users(attack) else "closed form"


WORDS = ADAPTIVE, MALICIOUS = "adaptive", "malicious"
"""The words of a run file for all attackers that aim at each defence: servers that are curious, or malicious."""


def aimed_at(defence: str, kind: str = "images") -> list[str]:
    """List the attackers of a curious server that aim at a defence of examples of a kind, whatever the update is.

    >>> aimed_at("dropout")
    ['portfolio', 'learned', 'dia']
    """
    return aimed_by("curious", defence, kind)


def planted_for(defence: str, kind: str = "images") -> list[str]:
    """List what a malicious server sends clients with a defence, as attacks in texts."""
    return aimed_by("malicious", defence, kind)


_AIMED: Mapping[str, Callable[[str, str], list[str]]] = {ADAPTIVE: aimed_at, MALICIOUS: planted_for}


class Aim(NamedTuple):
    """An entry of a run's attacks: the attack, and the only defence that it is run on."""

    attack: str
    defence: str | None = None
    """None for every defence."""

    def meets(self, defence: str) -> bool:
        """Return whether the attack is run on this defence."""
        return self.defence is None or canonical(self.defence) == canonical(defence)


_AIM = re.compile(r"\s*([^()\s]+(?:\(.*?\))?)\s+on\s+(\S.*)", re.DOTALL)


def aim(text: str) -> Aim:
    """Split the text of an attack from that of the defence it is aimed at.

    >>> aim("r-gap on none"), aim("cdia(iterations=9)")
    (Aim(attack='r-gap', defence='none'), Aim(attack='cdia(iterations=9)', defence=None))
    >>> aim("learned(epochs=40) on dp(clip=1, sigma=2) + cvb").defence
    'dp(clip=1, sigma=2) + cvb'
    """
    match = _AIM.fullmatch(text)
    return Aim(match[1], match[2].rstrip()) if match else Aim(text)


@cache
def canonical(defence: str) -> str:
    """Return a defence's canonical text; of an object's name or custom code, the text itself."""
    try:
        return parse(defence).name
    except GradveilError:
        return defence.strip()


def without_aim(attacks: Iterable[str]) -> list[str]:
    """List the attacks of these entries, each once, without the defences that they are aimed at."""
    return list(dict.fromkeys(aim(text).attack for text in attacks))


def attacks_against(
    attacks: Iterable[str], defence: str, *, public: bool = True, kind: str = "images"
) -> Iterator[str]:
    """List the attacks that are run on this defence; its own attackers replace `adaptive` and `malicious`.

    Each attacker comes once, and is for examples of this kind. Without public data those that learn from such data are
    left out.

    >>> list(attacks_against(["ig", "r-gap on none"], "None")), list(attacks_against(["ig", "r-gap on none"], "dgp"))
    (['ig', 'r-gap'], ['ig'])
    """
    mine = [each.attack for each in map(aim, attacks) if each.meets(defence)]
    told = [text for text in mine if not stands_for_many(text)]
    known = {make_name(text) for text in told}
    for text in mine:
        if not stands_for_many(text):
            yield text
            continue
        for aimed in _AIMED[_word(text)](defence, kind):
            if make_name(aimed) not in known and (public or not _needs_public(aimed)):
                known.add(make_name(aimed))
                yield aimed


def general_attacks(defence: str, *, public: bool, kind: str) -> list[str]:
    """List what `adaptive` expands to for a defence, whatever the update is; without public examples nothing learns.

    >>> general_attacks("dropout", public=False, kind="images")
    ['portfolio', 'dia']
    """
    return [make_name(text) for text in attacks_against([ADAPTIVE], defence, public=public, kind=kind)]


def is_same_attack(one: str, other: str) -> bool:
    """Return whether two texts are of the same attack, but for how long it runs and how it weighs.

    >>> is_same_attack("portfolio", "portfolio(iterations=9, simulated_client=full)")
    True
    >>> is_same_attack("portfolio", "portfolio(simulated_client=naive)"), is_same_attack("portfolio", "mine:undo")
    (False, False)
    """
    if one.partition("(")[0] != other.partition("(")[0]:
        return False
    first, second = built(one), built(other)
    if first is None or second is None or first.simulated_client != second.simulated_client:
        return False
    aims = [(known.undo_entries, known.objective, known.rounds) for known in map(traits, (first, second))]
    return aims[0] == aims[1]


@cache
def built(text: str) -> Attack | None:
    """Build an attack of the catalogue; None for an object's name, or for settings that this version does not have."""
    try:
        return make_attack(text)
    except GradveilError:
        return None


_LENGTHS = frozenset({"iterations", "epochs"})


def open_ended(text: str, iterations: int | None) -> bool:
    """Whether neither an attack's text nor its run says how long it searches or learns: it takes what its authors used.

    >>> open_ended("ig", None), open_ended("ig", 500), open_ended("ig(iterations=9)", None), open_ended("learned", 500)
    (True, False, False, True)
    """
    name, _, inner = text.partition("(")
    entry = ALL_ATTACKS.get(name.strip())
    takes = _LENGTHS & {argument.name for argument in entry.arguments} if entry else _LENGTHS & set()
    said = {part.partition("=")[0].strip() for part in inner.split(",")}
    return bool(takes) and not takes & said and (iterations is None or "iterations" not in takes)


def auto_budget(attacks: Iterable[str], iterations: int | None) -> str | None:
    """Return the default budget of a run with these attacks: `auto` where one of them sets no length of its own."""
    return AUTO if any(stands_for_many(text) or open_ended(text, iterations) for text in attacks) else None


def stands_for_many(text: str) -> bool:
    """Whether a text stands for attackers of each defence: `adaptive`, `malicious`."""
    return _word(text) in _AIMED


def make_own(text: str) -> Attack:
    """Read an attack, which may be custom code; an unknown one may be meant for `adaptive` or `malicious`."""
    try:
        return make_attack(text, own=True)
    except GradveilError:
        if near := get_close_matches(_word(text), _AIMED, n=1, cutoff=0.8):
            raise fail("attack", f"unknown attack '{text}'", f"did you mean '{near[0]}'?") from None
        raise


def _word(text: str) -> str:
    return aim(text).attack.strip().lower()


def make_name(text: str) -> str:
    """Return an attack's canonical text; of an object's name, the name itself."""
    try:
        return str(make_attack(text).name)
    except GradveilError:
        return text


def _needs_public(text: str) -> bool:
    return isinstance(make_attack(text).knowledge.get("public"), Known)


UNDEFENDED = "none"
"""The defence of a control."""
CLIENTS = 8
"""Clients that a control attacks at most."""


def has_control(config: RunConfig) -> bool:
    """Decide whether a run adds a control by itself."""
    return config.control and config.observed is None and not any(undefended(text) for text in config.defences)


def control_attacks(config: RunConfig) -> list[str]:
    """List the attacks of a control: every attack that meets a defence of the run.

    Knowledge of a defence makes no difference without one: an adaptive attacker is then a non-adaptive one.
    """
    if not has_control(config):
        return []
    return list(dict.fromkeys(text for defence in config.defences for text in met(config, defence)))


def met(config: RunConfig, defence: str) -> list[str]:
    """List the attacks of a run on one of its defences."""
    return list(attacks_against(config.attacks, defence, kind=kind_of(config.data.name)))


def first_met(config: RunConfig, attack: str) -> str:
    """Return the first defence that an attack meets: its control has the budget that it has there.

    The first one stays the same when a resumed run has more defences.
    """
    return next(text for text in config.defences if attack in met(config, text))


def target_clients(clients: int, control: bool) -> int:
    """Count the clients that a trial attacks, of so many in the run.

    >>> target_clients(32, False), target_clients(32, True), target_clients(2, True)
    (32, 8, 2)
    """
    return min(clients, CLIENTS) if control else clients


@dataclass(frozen=True)
class TrialAddress:
    """The address of a trial within a run."""

    id: str
    client: int
    defence: str
    attack: str
    seed: int
    trained: int | None = None
    """The round of the training after which the client is attacked; None where nothing is trained."""
    control: bool = False
    """Whether it is the undefended control of a run that asks for no undefended client."""

    @property
    def meeting(self) -> tuple[int, str, str]:
        """Who meets whom, whatever the seed and the round: client, defence, attack."""
        return self.client, self.defence, self.attack

    def clients(self, whole: int) -> int:
        """Count the clients that are attacked, of so many in the run."""
        return target_clients(whole, self.control)


def trials(config: RunConfig) -> list[TrialAddress]:
    """List the trials of a run: seeds, rounds of the training, clients, attacks, defences (the last runs fastest).

    The undefended control comes last.
    """
    places = [
        (seed, stage, index) for seed in config.seeds for stage in config.stages for index in range(len(config.client))
    ]
    return [
        TrialAddress(
            _name(config, seed, index, defence, attack, stage, control), index, defence, attack, seed, stage, control
        )
        for control, those in (
            (False, pairs(config)),
            (True, [(text, UNDEFENDED) for text in control_attacks(config)]),
        )
        for seed, stage, index in places
        for attack, defence in those
    ]


def pairs(config: RunConfig) -> list[tuple[str, str]]:
    """List which attack meets which defence: all with all, and `adaptive` with the attackers of each defence."""
    against = {defence: met(config, defence) for defence in config.defences}
    every = dict.fromkeys(text for texts in against.values() for text in texts)
    return [(text, defence) for text in every for defence, texts in against.items() if text in texts]


def nothing_to_try(attacks: Iterable[object], kind: str) -> Problem:
    """Say that these attacks of a run stand for none: nobody has published a malicious server for every kind."""
    what = f"{listing(map(str, attacks))} stands for no attack on {kind}"
    return Problem("attacks", what, f"choose {ADAPTIVE}, or name an attack on {kind}")


def _name(config: RunConfig, seed: int, index: int, defence: str, attack: str, stage: int | None, control: bool) -> str:
    whole = config.resolved()
    shared = ("data", "model", "client", "precision", "rounds", "server_lr", "budget", "observed")
    after = [] if stage is None else [stage, {k: v for k, v in whole["train"].items() if k != "audit_at"}]
    after += ["control"] * control
    secret = digest([{k: whole[k] for k in shared}, seed, index, defence, attack, *after])
    where = f"{config.model.name}-{config.data.name}-s{seed}-r{config.rounds - 1}"
    where += "" if stage is None else f"-t{stage}"
    where += f"-c{index}" if len(config.client) > 1 else ""
    against = "control" if control else defence
    return "--".join([*(_slug(part) for part in (where, against, attack)), secret[:7]])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:48] or "x"
