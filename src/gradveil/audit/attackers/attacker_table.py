"""What attacks whom: one table, from what an update is and what a defence does to it, to attacks.

`--attack adaptive` and `--attack malicious` expand to the rows that apply. A row says what it needs of the update
(`update`), what rules it out (`excludes`), what the defence has to do (`defence`) and why its attacks then are tried. A
composition is attacked by all that aim at one of its parts: each of them simulates the whole client. `FACTS` says what
is the matter where a row does not apply, in the words of `gradveil check` and of reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from gradveil.core.errors import GradveilError
from gradveil.defences import DEFENCES, entries
from gradveil.defences.entry import DefenceEntry, Trait

Server = Literal["curious", "malicious"]
"""Who attacks: a server that only looks, or one that changes the model it sends."""
Fact = Literal[
    "one example",
    "several examples",
    "local steps",
    "wide first layer",
    "shown input",
    "patches",
    "hidden layer",
    "chain",
    "solvable chain",
    "running statistics",
    "changed update",
    "public examples",
    "trained embeddings",
]
"""What can be so of a client's update."""

FACTS: dict[Fact, tuple[str, str]] = {
    "one example": ("an update is the gradient of one example", "an update holds several examples or local steps"),
    "several examples": ("an update holds several examples", "an update holds a single example"),
    "local steps": ("an update is the sum of several local steps", "an update is one gradient"),
    "wide first layer": (
        "the first layer is fully connected and has a row for every example",
        "the first layer is not fully connected, or has fewer rows than the update has examples",
    ),
    "shown input": (
        "the gradient of a layer and of its bias show what went into it",
        "no layer with a bias takes all pixels",
    ),
    "patches": ("the model cuts inputs into patches", "the model does not cut inputs into patches"),
    "hidden layer": (
        "an image reaches a hidden layer whose units have biases",
        "no image reaches a hidden layer with biases unchanged",
    ),
    "chain": (
        "the model is a plain chain of layers",
        "the model is not a plain chain of layers",
    ),
    "solvable chain": (
        "the equations of a chain of layers determine the input",
        "the model is not a chain of layers with enough equations",
    ),
    "running statistics": ("the model carries running statistics", "the model carries no running statistics"),
    "changed update": ("a defence changes updates", "no defence changes the update"),
    "public examples": (
        "public examples of that shape are given",
        "no public examples to learn a prior from are given",
    ),
    "trained embeddings": ("word embeddings are trained", "the word embeddings are frozen"),
}
"""What each fact says, and what is the case where it does not hold."""


@dataclass(frozen=True)
class Rule:
    """A row: attacks, and where they are tried."""

    attacks: tuple[str, ...]
    why: str
    """Why they are tried where the row applies; a clause."""
    update: tuple[Fact, ...] = ()
    """What has to be so of the update of one of the run's clients; those of which it is not are left out."""
    excludes: tuple[Fact, ...] = ()
    """What makes the row needless."""
    defence: Trait | None = None
    """What the defence, or a part of it, has to do; None for any, and for none."""
    unless: tuple[Trait, ...] = ()
    """What the same part must not do, since another row takes its place."""
    server: Server = "curious"
    unlabelled: str = ""
    """The setting that it needs where nobody knows labels."""
    weakness: str = ""
    """What a run without the attack has to warn of; empty where the row is not worth a warning."""
    ends: str = ""
    """What else ends the weakness."""
    kinds: tuple[str, ...] = ("images",)
    """The kinds of examples that the attacks are for."""
    undisturbed: bool = False
    """Whether the attack holds for nothing but the update itself: no warning where every client has a defence."""

    @property
    def seen(self) -> bool:
        """Whether the row depends on the update, which is known once data and model are there."""
        return bool(self.update)


_CLOSED = ("start=solved", "lr=0.01", "tv=0.0001")
"""A search that starts from the closed form, in steps that are small enough not to leave it at once."""
_NUMBERS = ("images", "rows")
"""The kinds of examples whose inputs are numbers, which equations can be solved for."""

RULES: tuple[Rule, ...] = (
    # What a defence does: the search that suits it, and what else reads its traces.
    Rule(
        ("portfolio",),
        "a search that simulates the client: it infers, optimises or averages out what is random",
        unless=("mixes", "locks"),
    ),
    Rule(
        ("portfolio(restarts=4)",),
        "coefficients and signs are optimised with the images, partners are guessed: each restart guesses again",
        defence="mixes",
    ),
    Rule(
        ("cdia(rounds=all, lr=0.1)",),
        "the client keeps its secret key over the rounds, so all rounds have to fit one key",
        defence="locks",
    ),
    Rule(
        (
            "portfolio(simulated_client=naive)",
            "portfolio(undo_entries=true)",
            'portfolio(objective="layerwise-cosine")',
            'portfolio(objective="signs")',
        ),
        "nothing says what the defence does: it is ignored, its map of entries is undone, layers are weighed alike, or "
        "signs are compared, which factors on entries leave as they are",
        defence="is unknown",
    ),
    Rule(
        ('portfolio(objective="layerwise-cosine")',),
        "the zeros show the mask; few entries of a layer are left, so layers are compared one by one too",
        defence="zeros entries",
    ),
    Rule(
        ("learned",),
        "a network learns to undo whatever the defence does to public examples",
        defence="anything",
        unless=("adds proxies",),
    ),
    Rule(
        ("portfolio(pruned=ordered)",),
        "the smallest and the largest entry that was sent bound what was not",
        defence="zeros by size",
    ),
    Rule(
        ("cdia(objective=l2, pruned=ordered, rounds=all)",),
        "where the largest are cut too, angles say little of the rest: a third way to compare, with the bounds",
        defence="zeros the largest",
    ),
    Rule(
        ("portfolio(objective=likelihood, tv=0.1)",),
        "how likely an entry is sent as it was is known, and zeros say that it was small",
        defence="draws entries",
    ),
    Rule(("cdia(undo=true)",), "the transforms are public, and can be undone", defence="transforms inputs"),
    Rule(
        ("portfolio(whiten=true)",),
        "the noise has a known covariance, by which entries are weighed",
        defence="shapes noise",
    ),
    Rule(
        ("right-angles",),
        "what is sent is as long as the gradient, and at a right angle to it: many rounds show its line",
        defence="turns gradients",
    ),
    Rule(("dia",), "the units that were dropped are found together with the examples", defence="drops units"),
    Rule(("pig",), "layers that the bottleneck's noise does not reach leak by themselves", defence="draws features"),
    # Rows: a search over probabilities of categories.
    Rule(
        ("tableak",),
        "a search that simulates the client, over probabilities of categories and bounded numbers",
        kinds=("rows",),
    ),
    # Texts: what the first layers' gradients span.
    Rule(
        ("span-rank", "span"),
        "the gradients of the first layers lie in the span of the words that were read",
        kinds=("texts",),
    ),
    Rule(
        ("embedding-search",),
        "spans decide nothing under noise, in wide batches and in adapters: all layers compare whole sentences",
        kinds=("texts",),
    ),
    Rule(
        ("embedding-rows",),
        "the rows of the word embedding's gradient are those of the words that were read",
        update=("trained embeddings",),
        kinds=("texts",),
    ),
    # What the update is: equations that determine the input.
    Rule(
        ("unmix",),
        "the gradient of the first layer is a mixture of the inputs, which can be separated without a search",
        update=("several examples", "wide first layer"),
        weakness="several examples may come back at once",
        ends="more examples an update than rows, or a convolution as the first layer, end it",
        kinds=_NUMBERS,
        unless=("adds proxies",),
    ),
    Rule(
        ("unmix",),
        "the first layer's gradient mixes the inputs with the proxies: both are separated, and then told apart",
        update=("wide first layer",),
        defence="adds proxies",
        weakness="examples may come back, separated from their proxies",
        ends="more examples and proxies an update than rows, or a convolution as the first layer, end it",
        kinds=_NUMBERS,
    ),
    Rule(
        ("analytic",),
        "the input is a quotient of two gradients",
        update=("one example", "shown input"),
        unlabelled="labels=idlg",
        weakness="one image comes back in closed form",
        ends="more examples an update or not sending that gradient ends it",
        kinds=_NUMBERS,
    ),
    Rule(
        ("analytic(prior=public)", f"cdia({', '.join(_CLOSED)})"),
        "the quotient is disturbed by the defence: public examples say what is likely, and a search starts there",
        update=("one example", "shown input", "changed update", "public examples"),
        unless=("adds proxies",),
        unlabelled="labels=idlg",
    ),
    Rule(
        (f'cdia({", ".join(_CLOSED)}, objective="tokenwise-cosine")',),
        "the quotient is disturbed, and every patch has a gradient of its own",
        update=("one example", "shown input", "patches", "changed update", "public examples"),
        unless=("adds proxies",),
        unlabelled="labels=idlg",
    ),
    Rule(
        ("r-gap",),
        "the equations of the layers are solved from the last to the first",
        update=("one example", "solvable chain"),
        excludes=("shown input",),
        unless=("changes updates", "drops units"),
        unlabelled="labels=idlg",
        weakness="one image may come back in closed form",
        ends="more examples an update or local steps end it",
        undisturbed=True,
        kinds=_NUMBERS,
    ),
    Rule(
        ("r-gap(labels=restore, simulated_client=full)",),
        "the gradient of each layer has known factors, which masks and noise leave overdetermined",
        update=("one example", "chain"),
        defence="changes updates",
        unless=("adds proxies",),
    ),
    Rule(
        ("sme",),
        "one gradient on the line between the parameters explains many steps, whatever their size and number",
        update=("local steps",),
        unlabelled="labels=restore",
    ),
    Rule(
        ("cdia(batchnorm=0.01)",),
        "the model carries running statistics, which say what activations were like in training",
        update=("running statistics",),
        unlabelled="labels=restore",
    ),
    # A server that changes the model.
    Rule(
        (
            "rob(bins=512)",
            "rob(bins=512, sparse=true)",
            "curious(rows=1024, share=0.03)",
            "fishing(simulated_client=full)",
            "steering(simulated_client=full)",
        ),
        "blocks whose rows are compared or stand alone, trap weights, and a last layer that favours one class",
        unless=("transforms inputs", "adds proxies"),
        server="malicious",
    ),
    Rule(
        ("rob(bins=512)", "rob(bins=512, sparse=true)", "curious(rows=1024, share=0.03)", "fishing", "steering"),
        "the same; the proxies' gradients come on top, and simulating their search would take too long",
        defence="adds proxies",
        server="malicious",
    ),
    Rule(
        (
            "rob(bins=512, undo=true)",
            "rob(bins=512, sparse=true, undo=true)",
            "curious(rows=1024, share=0.03, undo=true)",
            "fishing(simulated_client=full)",
            "steering(simulated_client=full)",
        ),
        "the same, which undo the public transforms of what they read",
        defence="transforms inputs",
        server="malicious",
    ),
    Rule(
        ("rob(bins=512, sparse=true, decoys=64)", "rob(bins=512, sparse=true, decoys=256)"),
        "rows with larger gradients for a client to cut in the place of those that show the images: few and many",
        defence="zeros the largest",
        server="malicious",
    ),
    Rule(
        ("quantile", "quantile(part=0.25)", "conv-imprint"),
        "a server that keeps the architecture: single examples open the units of a hidden layer, or its bins",
        update=("several examples", "hidden layer"),
        server="malicious",
    ),
)
"""The table. Attacks come in its order."""


def _traits(entry: DefenceEntry) -> frozenset[Trait]:
    """Return what a defence of the catalogue does, with what follows from the slots that it fills."""
    changed: tuple[Trait, ...] = ("anything",) if entry.changes else ()
    updates: tuple[Trait, ...] = ("changes updates",) if {"step", "send"} & {*entry.changes} else ()
    said = entry.name in DEFENCES or entry.traits or entry.adaptive
    return frozenset((*entry.traits, *changed, *updates, *(() if said else _UNKNOWN)))


_UNKNOWN: frozenset[Trait] = frozenset(("anything", "is unknown"))
"""What is known of a defence that is in no catalogue, such as an object from Python, or of whose package says no more:
it changes something."""


Part = tuple[frozenset[Trait], tuple[str, ...]]
"""What a part of a defence does, and the attackers that its package names besides the table's."""


def parts_of(defence: str) -> list[Part]:
    """List the parts of a defence."""
    try:
        return [(_traits(entry), entry.adaptive) for entry in entries(defence)]
    except GradveilError:
        several = defence.split(" + ")
        return [known for part in several for known in parts_of(part)] if len(several) > 1 else [(_UNKNOWN, ())]


def aimed_by(server: Server, defence: str | DefenceEntry, kind: str | None = None) -> list[str]:
    """List the attacks of a server on a defence, or on any of an entry of the catalogue, whatever the update is.

    `kind` is that of the examples: without it, images, or what an entry is for.

    >>> aimed_by("curious", "dropout"), len(aimed_by("curious", "dropout + what an object is called"))
    (['portfolio', 'learned', 'dia'], 7)
    >>> aimed_by("malicious", "dropout")[0], len(aimed_by("malicious", "dgp")) - len(aimed_by("malicious", "dropout"))
    ('rob(bins=512)', 2)
    """
    parts = parts_of(defence) if isinstance(defence, str) else [(_traits(defence), defence.adaptive)]
    kind = kind or ("images" if isinstance(defence, str) else defence.kind)
    named = [text for _, texts in parts for text in texts if server == "curious"]
    chosen = (
        text
        for rule in RULES
        if rule.server == server
        and kind in rule.kinds
        and not rule.seen
        and any(_suits(rule, traits) for traits, _ in parts)
        for text in rule.attacks
    )
    return list(dict.fromkeys((*named, *chosen)))


def is_unknown(defence: str) -> bool:
    """Return whether nothing says what a part of a defence does, so that only general attacks are made on it.

    >>> is_unknown("dropout + dp(clip=1, sigma=1)"), is_unknown("an object's name")
    (False, True)
    """
    return any("is unknown" in traits for traits, _ in parts_of(defence))


def excludes(rule: Rule, defence: str) -> bool:
    """Return whether a part of a defence does what a row must not meet."""
    return any(traits & {*rule.unless} for traits, _ in parts_of(defence))


def aims_at(rule: Rule, defence: str) -> bool:
    """Return whether a row is for this defence, whatever the update is."""
    return any(_suits(rule, traits) for traits, _ in parts_of(defence))


def _suits(rule: Rule, traits: frozenset[Trait]) -> bool:
    return (rule.defence is None or rule.defence in traits) and not traits & {*rule.unless}


def condition(rule: Rule) -> str:
    """Say in words where a row applies.

    >>> print(condition(RULES[0]))
    any update; any defence that neither mixes nor locks
    """
    update = " and ".join((*(FACTS[f][0] for f in rule.update), *(f"not: {FACTS[f][0]}" for f in rule.excludes)))
    does = f"a defence that {rule.defence}" if rule.defence else "any defence"
    if rule.defence == "anything":
        does = "any defence but none"
    if rule.unless:
        does += f" that neither {' nor '.join(rule.unless)}" if rule.unless[1:] else f", unless it {rule.unless[0]}"
    kinds = "" if "images" in rule.kinds else f" of {' or '.join(rule.kinds)}"
    return f"{update or 'any update'}{kinds}; {does}"


def as_markdown() -> Iterator[str]:
    """Yield the lines of the table for a page of the documentation."""
    yield "| server | update | defence | attacks | why |"
    yield "|---|---|---|---|---|"
    for rule in RULES:
        update, _, does = condition(rule).partition("; ")
        yield f"| {rule.server} | {update} | {does} | {', '.join(f'`{t}`' for t in rule.attacks)} | {rule.why} |"


assert {*FACTS} == {*get_args(Fact)}
