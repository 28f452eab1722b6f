"""The published inversion attacks as settings of the one optimisation loop.

The adaptive attacks are one descent (`ig_scheliga`) with different knowledge (Scheliga, Mäder, Seeland, "Combining
Stochastic Defenses to Resist Gradient Inversion" and "Dropout is NOT All You Need to Prevent Gradient Leakage").

The first of these papers names a layer-wise cosine in one place and a cosine in another, and Adam with step size 1. The
authors' programs for earlier papers compute one cosine over all layers and step with the gradient's sign. The presets
follow the programs; the text's reading is `objective="layerwise-cosine", sign=plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau, StepSchedule
from gradveil.attacks.inversion.image_sources import Relaxed, Trained, Untrained
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.inversion_settings import Variant
from gradveil.attacks.inversion.optimisers import LBFGS, Adam, RMSprop
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample
from gradveil.core.settings import Range

OWN_DRAWS: dict[str, How] = {"model.*.lock.*": Sample(every_iteration=False), "model.*": Sample()}
"""A non-adaptive attack draws the model's noise as a client does. It draws a lock once, since a client keeps it."""
MASKS: dict[str, How] = {"send.*mask.*": Infer(), "step.*mask.*": Infer()}
"""Masks of pruned entries, inferred from the zeros of the update."""
SHOWN: dict[str, How] = {**MASKS, "*.directions.*": Infer(), "*.loads.*": Infer()}
"""What an update shows of itself: masks, and of a layer of low rank what its rows span, with their coordinates."""
BORDERS: dict[str, How] = {"send.*border.*": Infer(), "step.*border.*": Infer()}
"""The bounds of pruned entries: the smallest (or largest) magnitude that was sent. Violations add to the objective."""
BATCHES: dict[str, How] = {
    "batch.*.partner": Sample(every_iteration=False),
    "batch.*.choice": Sample(every_iteration=False),
    "batch.*.public": Sample(every_iteration=False),
    "batch.*": Optimise(),
}
"""Numbers of a batch defence are optimised. Each restart guesses once which images were mixed in, and which policies
transformed them."""
PROXIES: dict[str, How] = {"step.*.proxy.*": Optimise(), "step.*.place": Optimise()}
"""Proxies that a defence adds are optimised. Where they started from only counts where its search is repeated."""
WHITENED: dict[str, How] = {"*.probe": Sample(every_iteration=False), "*.normal.*": Neutral()}
"""With `whiten` the attacker estimates the noise of each entry from other probes, and takes its value as zero."""
HELD = Optimise(weight=1.0, std=1.0)
"""Optimised additive noise, pulled to mean zero and to its own standard deviation, parameter by parameter."""
_DROPPED: dict[str, How] = {"model.*.mask": Optimise(weight=1e-4)}


def dlg() -> Inversion:
    """Deep leakage from gradients: inputs and soft labels together, l2 distance, L-BFGS."""
    return Inversion(
        "dlg",
        objective="l2",
        descent=Descent(LBFGS(lr=1.0), iterations=15_000, tolerance=1e-6, patience=2000),
        restarts=4,
        box=False,
        labels="joint",
        knowledge=OWN_DRAWS,
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
        descent=Descent(Adam(lr=0.1, sign="signed"), StepSchedule(), iterations=24_000),
        knowledge=OWN_DRAWS,
    )


def sapag() -> Inversion:
    """SAPAG: a Gaussian kernel over each layer's difference, L-BFGS."""
    return Inversion(
        "sapag",
        objective="sapag",
        descent=Descent(LBFGS(lr=1.0), iterations=2000, tolerance=1e-9, patience=500),
        restarts=4,
        labels="restore",
        knowledge=OWN_DRAWS,
    )


def sme() -> Inversion:
    """SME: cosine distance to one gradient at parameters between those before and after local training.

    The paper's settings: plain Adam, step size 1, TV 0.01, 1,000 iterations.
    """
    return Inversion(
        "sme",
        objective="cosine",
        tv=0.01,
        surrogate="line",
        descent=Descent(Adam(lr=1.0), StepSchedule(), iterations=1000),
        knowledge=OWN_DRAWS,
    )


def gi() -> Inversion:
    """GradInversion: l2 matching with TV, l2 and BatchNorm priors, restarts pulled to their mean, Langevin noise.

    The BatchNorm prior takes the running statistics that the model carries (it is left out of a model that has none).
    """
    return Inversion(
        "gi",
        objective="l2",
        tv=1e-4,
        l2=1e-6,
        batchnorm=0.1,
        group=1e-4,
        langevin=0.01,
        restarts=4,
        descent=Descent(Adam(lr=0.1), Cosine(warmup=50), iterations=20_000),
        labels="unique",
        knowledge=OWN_DRAWS,
    )


def gi_strong() -> Inversion:
    """GradInversion with the true batch statistics of every BatchNorm layer: an upper bound."""
    return replace(gi(), name="gi-strong", knowledge={**OWN_DRAWS, "statistics.*": Known()})


def ig_scheliga() -> Inversion:
    """Inverting gradients as set in "Combining Stochastic Defenses": TV 0.01, plateau 400, at most 20,000 steps.

    On a transformer the total variation of 0.01 outweighs the cosine; the authors' earlier program has 1e-4 there.
    """
    return Inversion(
        "ig-scheliga",
        objective="cosine",
        tv=0.01,
        descent=Descent(
            Adam(lr=1.0, sign="signed"), Plateau(patience=400), iterations=20_000, tolerance=1e-5, patience=4000
        ),
        knowledge=OWN_DRAWS,
    )


def wiig() -> Inversion:
    """WIIG: an oracle that knows every random tensor: an upper bound, not a threat."""
    return _targeted("wiig", {**SHOWN, "*border.*": Neutral(), "*": Known()})


def gpia() -> Inversion:
    """GPIA: the simulated gradient is multiplied by the mask inferred from the zeros of the update."""
    return _targeted("gpia", {**SHOWN, **OWN_DRAWS})


def vbia() -> Inversion:
    """VBIA: a bottleneck's noise is optimised together with the inputs, from a draw of its law."""
    return _targeted("vbia", {"model.*.eps": Optimise(), **OWN_DRAWS})


def dpia() -> Inversion:
    """DPIA: additive noise is optimised with the inputs, its mean pulled to 0 and its standard deviation to a target.

    The paper prints neither the form nor the weight of this prior, and as its target sigma^2 tau^2, the variance of the
    noise. The default target is the standard deviation sigma tau; `noise_std` sets it in units of that, so that the
    printed one is `noise_std` = sigma tau: 0.02 for `dp(clip=20, sigma=1e-3)`. `noise_weight` sets the weight.
    """
    return _targeted("dpia", {**OWN_DRAWS, "step.*": HELD, "send.*": HELD})


def pig() -> Inversion:
    """PIG: layers that a bottleneck's noise reaches (its decoder and all later ones) are left out of the distance.

    The paper leaves out "the most stochastic" layers and names none; for CVB these are those of the authors' program.
    """
    return replace(_targeted("pig", OWN_DRAWS), simulated_client="naive", ignore="stochastic")


def dia() -> Inversion:
    """DIA: one mask per dropout layer is optimised together with the inputs, kept in [0, 1] and near its rate.

    Its settings are those of "Dropout is NOT All You Need". In "Combining Stochastic Defenses" it is `cdia`.
    """
    descent = Descent(
        Adam(lr=0.1, sign="signed"), Plateau(patience=800), iterations=20_000, tolerance=1e-5, patience=4000
    )
    return replace(_targeted("dia", {**_DROPPED, **OWN_DRAWS}), tv=1e-5, descent=descent)


def cdia() -> Inversion:
    """CDIA, the combined targeted attack: secrets of the defence are inferred from the update, or else optimised.

    Masks of pruned entries are inferred from zeros, the directions of a low rank from the rows. Dropout masks (kept
    near their rate), bottleneck noise and the numbers by which images are mixed or transformed are optimised with the
    inputs. Additive noise is taken as zero, its mean. Against an undefended client this is `ig-scheliga`.
    """
    return _targeted("cdia", {**_DROPPED, "model.*": Optimise(), **BATCHES, **PROXIES, **SHOWN})


def portfolio() -> Inversion:
    """Portfolio: CDIA's knowledge of all rounds, plain Adam, and variation of colour differences too.

    No single setting wins against every defence, so several are tried on clients that the attacker simulates with
    public images; without such images it takes the first. A variation that falls during the search finds more in
    few iterations than a small one; behind noise a large one finds more. Large steps that shrink to nothing by the
    last iteration find in a hundred iterations what small ones find in three hundred. In batches, the last layer's
    inputs are unmixed where no noise hides them, and images are drawn to them.
    """
    plain = Adam(lr=0.5)
    descent = Descent(plain, Cosine(warmup=50), iterations=4000, tolerance=1e-5, patience=2000)
    variants = (
        Variant(0.03, plain),
        Variant(0.1, plain, tv_end=0.003),
        Variant(0.1, plain),
        Variant(0.01, Adam(lr=1.0, sign="signed")),
    )
    known = {**cdia().knowledge, "public": Sample(every_iteration=False)}
    return replace(
        cdia(),
        name="portfolio",
        tv=variants[0].tv,
        tv_over="colours",
        features=0.03,
        rounds="all",
        descent=descent,
        variants=variants,
        knowledge=known,
    )


def tableak() -> Inversion:
    """TabLeak for rows of tables: categories as softmax, numbers between public bounds, 30 restarts that are pooled.

    One cosine over all layers without a prior, 1,500 steps of 0.06 by the gradient's sign. The defence is simulated
    with CDIA's knowledge of it; against an undefended client it is the published attack.
    """
    return Inversion(
        "tableak",
        objective="cosine",
        descent=Descent(Adam(lr=0.06, sign="signed"), iterations=1500),
        restarts=30,
        box=False,
        images=Relaxed(),
        pool=True,
        simulated_client="full",
        knowledge=cdia().knowledge,
    )


def _targeted(name: str, knowledge: Mapping[str, How]) -> Inversion:
    return replace(ig_scheliga(), name=name, simulated_client="full", knowledge=dict(knowledge))


def grnn() -> Inversion:
    """GRNN: a generator is fitted to each update, and draws its images and labels from fixed latent numbers.

    Squared distance and its root, total variation 1e-3, RMSprop of step size 1e-4 and momentum 0.99, 1,000 iterations.
    """
    return Inversion(
        "grnn",
        objective="l2-and-norm",
        tv=1e-3,
        descent=Descent(RMSprop(lr=1e-4, momentum=0.99), iterations=1000),
        labels="joint",
        images=Untrained(latent=128),
        knowledge=OWN_DRAWS,
    )


def gias() -> Inversion:
    """GIAS: the latent numbers of a generator are searched, then the generator's weights, separately for each row."""
    return Inversion(
        "gias",
        objective="cosine",
        tv=1e-4,
        descent=Descent(Adam(lr=0.1), iterations=2000),
        restarts=4,
        images=Trained(tuned=0.5),
        knowledge={"public": Known(), **OWN_DRAWS},
    )


def ggl(population: Annotated[int, Range(2, integer=True), "Candidates of one generation."] = 50) -> Inversion:
    """GGL: CMA-ES searches the latent numbers of a generator (500 generations of 50), and the defence is simulated.

    Clips are those of the client, masks are inferred from the zeros, the label from the last layer.
    """
    return Inversion(
        "ggl",
        objective="l2",
        descent=Descent(CMAES(), iterations=500),
        restarts=population,
        images=Trained(),
        labels="idlg",
        simulated_client="full",
        knowledge={"public": Known(), **SHOWN, **OWN_DRAWS},
    )
