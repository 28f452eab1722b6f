"""The papers' passive attacks, as settings of the one loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradveil.attacks.inversion import Inversion
from gradveil.attacks.knowledge import Infer, Optimise, Sample
from gradveil.attacks.objective import OBJECTIVES
from gradveil.attacks.optimise import Descent, Plateau, Steps
from gradveil.attacks.steps import LBFGS, Adam
from gradveil.core.allowed import Choice, Range
from gradveil.core.arguments import Argument, Entry
from gradveil.core.errors import fail
from gradveil.core.grammar import read

# Whoever sends the parameters knows the architecture, not its noise: a naive attacker draws it as a client would.
_OWN_DRAWS = {"model.*": Sample()}


SETTINGS = (
    Argument("iterations", Range(1, integer=True, optional=True), None),
    Argument("restarts", Range(1, integer=True, optional=True), None),
    Argument("lr", Range(0, low_open=True, optional=True), None),
    Argument("sign", Choice(("plain", "signed", "soft", None)), None),
    Argument("tv", Range(0, optional=True), None),
    Argument("l2", Range(0, optional=True), None),
    Argument("objective", Choice((*OBJECTIVES, None)), None),
    Argument("labels", Choice(("given", "idlg", "restore", "joint", None)), None),
    Argument("belief", Choice(("naive", "full", None)), None),
    Argument("start", Choice(("normal", "uniform", None)), None),
    Argument("tolerance", Range(0, optional=True), None),
    Argument("patience", Range(1, integer=True, optional=True), None),
    Argument("keep", Choice(("best", "last", None)), None),
    Argument("report", Range(1, integer=True, optional=True), None),
)
"""What a run file may change about any of these attacks; none means the preset's own."""

_OF_STEPPER = ("lr", "sign")
_OF_DESCENT = ("iterations", "tolerance", "patience", "keep", "report")


@dataclass(frozen=True)
class AttackEntry(Entry):
    """One named attack. Calling it with settings builds the attack, named by its canonical text."""

    arguments: tuple[Argument, ...] = SETTINGS

    def __call__(self, **values: Any) -> Inversion:
        """Build the attack; every unknown or impossible setting is refused at once."""
        given = {name: value for name, value in self.filled(values).items() if value is not None}
        attack: Inversion = self.factory()
        descent = replace(attack.descent, **{n: given.pop(n) for n in _OF_DESCENT if n in given})
        if "sign" in given and not isinstance(descent.stepper, Adam):
            raise fail(f"{self.name}.sign", "is a setting of Adam, this attack uses L-BFGS", "leave it out")
        stepping = {name: given.pop(name) for name in _OF_STEPPER if name in given}
        descent = replace(descent, stepper=replace(descent.stepper, **stepping))
        return replace(attack, name=self.text(values), descent=descent, **given)

    def make(self) -> Inversion:
        """Build the attack with the preset's own settings."""
        return self()


def dlg() -> Inversion:
    """Deep leakage from gradients: inputs and soft labels together, l2 distance, L-BFGS."""
    return Inversion(
        "dlg",
        objective="l2",
        descent=Descent(LBFGS(lr=1.0), iterations=15_000, tolerance=1e-6, patience=2000),
        restarts=4,
        box=False,
        labels="joint",
        knowledge=_OWN_DRAWS,
    )


def idlg() -> Inversion:
    """Improved DLG: the label is read off the last layer, then the inputs are optimised."""
    return replace(dlg(), name="idlg", labels="idlg")


def ig() -> Inversion:
    """Inverting gradients: cosine distance, total variation, signed Adam in the box, steps at 3/8, 5/8, 7/8."""
    return Inversion(
        "ig",
        objective="cosine",
        tv=1e-4,
        descent=Descent(Adam(lr=0.1, sign="signed"), Steps(), iterations=24_000),
        knowledge=_OWN_DRAWS,
    )


def ig_scheliga() -> Inversion:
    """Inverting gradients as set in "Combining Stochastic Defenses": TV 0.01, plateau 400, at most 20,000 steps."""
    return Inversion(
        "ig-scheliga",
        objective="cosine",
        tv=0.01,
        descent=Descent(
            Adam(lr=1.0, sign="signed"), Plateau(patience=400), iterations=20_000, tolerance=1e-5, patience=4000
        ),
        knowledge=_OWN_DRAWS,
    )


def cdia() -> Inversion:
    """CDIA, the combined targeted attack: what the defence hides is read off the update, else optimised.

    Masks of pruned entries come from the zeros; dropout masks (kept near their rate) and bottleneck noise are optimised
    with the inputs; additive noise is taken as zero, its mean. Against an undefended client this is `ig-scheliga`.
    """
    return replace(
        ig_scheliga(),
        name="cdia",
        belief="full",
        knowledge={
            "model.*.mask": Optimise(weight=1e-4),
            "model.*": Optimise(),
            "send.*mask.*": Infer(),
            "step.*mask.*": Infer(),
        },
    )


def sapag() -> Inversion:
    """SAPAG: a Gaussian kernel over each layer's difference, L-BFGS."""
    return Inversion(
        "sapag",
        objective="sapag",
        descent=Descent(LBFGS(lr=1.0), iterations=2000, tolerance=1e-9, patience=500),
        restarts=4,
        labels="restore",
        knowledge=_OWN_DRAWS,
    )


def gi() -> Inversion:
    """GradInversion without its BatchNorm prior and group consistency: l2 matching, TV and l2 priors, Adam.

    The step size falls in steps, where the paper warms up and follows a cosine.
    """
    return Inversion(
        "gi",
        objective="l2",
        tv=1e-4,
        l2=1e-6,
        descent=Descent(Adam(lr=0.1), Steps(), iterations=20_000),
        labels="restore",
        knowledge=_OWN_DRAWS,
    )


ATTACKS: dict[str, AttackEntry] = {
    entry.name: entry
    for entry in (
        AttackEntry("dlg", dlg, "inputs and labels by L-BFGS on the l2 distance", "Zhu, Liu, Han, NeurIPS 2019"),
        AttackEntry("idlg", idlg, "DLG with the label read off the last layer", "Zhao, Mopuri, Bilen, 2020"),
        AttackEntry("ig", ig, "cosine distance, total variation, signed Adam", "Geiping et al., NeurIPS 2020"),
        AttackEntry(
            "ig-scheliga", ig_scheliga, "IG with TV 0.01 and a plateau schedule", "Scheliga, Mäder, Seeland, 2023"
        ),
        AttackEntry(
            "cdia", cdia, "IG that believes in the defence: masks inferred, noise optimised", "Scheliga et al., 2023"
        ),
        AttackEntry("sapag", sapag, "Gaussian kernel distance a layer", "Wang et al., 2020"),
        AttackEntry("gi", gi, "l2 distance with TV and l2 priors, labels restored", "Yin et al., CVPR 2021"),
    )
}


def make_attack(text: str) -> Inversion:
    """Build an attack from its name and settings.

    >>> make_attack("ig(iterations=500, restarts=2)").descent.iterations
    500
    """
    built = [attack for _, attack in read(text, ATTACKS, "attack")]
    if len(built) != 1:
        raise fail("attack", f"'{text}' names {len(built)} attacks", "list several attacks as separate texts")
    return built[0]
