"""Settings of the optimisation attack, and values derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from torch import nn

from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.distances import LIKELIHOOD, OBJECTIVES
from gradveil.attacks.inversion.image_sources import Images, Pixels
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.knowledge import How
from gradveil.attacks.labels import Labels
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.settings import Checked, Choice, Count, Range, Strength, TextValue

_WIDEST, _NARROWEST = 1.0, 0.1
"""Widths over which the law of what is sent is smoothed in the first and in the last iteration."""


@dataclass(frozen=True)
class Variant:
    """Settings that an inversion tries on simulated clients before it attacks."""

    tv: float
    stepper: Adam
    tv_end: float | None = None

    @property
    def last_tv(self) -> float:
        """The weight of the total variation at the last iteration."""
        return self.tv if self.tv_end is None else self.tv_end


@dataclass(frozen=True)
class InversionSettings(Checked):
    """Settings of the one optimisation attack. Reports show its `name`."""

    name: str
    objective: Annotated[
        str,
        Choice((*OBJECTIVES, LIKELIHOOD)),
        "Distance between the observed and the simulated update, or how unlikely the one is sent for the other.",
    ] = "cosine"
    tv: Annotated[Strength, "Weight of the images' total variation."] = 0.0
    tv_end: Annotated[
        float | None,
        Range(0, low_open=True, optional=True),
        "Weight of the total variation at the last iteration, reached by equal factors; none for tv itself.",
    ] = None
    tv_over: Annotated[
        Literal["channels", "colours"],
        "Total variation of each channel, or also of the differences between colour channels.",
    ] = "channels"
    l2: Annotated[Strength, "Weight of the images' mean square."] = 0.0
    denoise: Annotated[
        Strength, "Weight of the mean square that a denoiser, trained on public images, would remove from the images."
    ] = 0.0
    denoiser: Annotated[
        nn.Module | str | None,
        TextValue("a custom module, 'pkg.module:name'"),
        "Custom denoiser of images in [0, 1], given the noise's level, in place of one that is trained.",
    ] = None
    descent: Descent = field(default_factory=Descent)
    restarts: Annotated[Count, "Searches per target client, of which the best is kept."] = 1
    start: Annotated[
        Literal["normal", "uniform", "solved"], "First images: random, or the solution of the first layer's equations."
    ] = "normal"
    box: bool = True
    labels: Labels = "given"
    simulated_client: Annotated[
        Literal["naive", "full"], "Client that the attack simulates: without its defence, or with it."
    ] = "naive"
    knowledge: Mapping[str, How] = field(default_factory=dict)
    images: Images = field(default_factory=Pixels)
    """Search space: pixels, the weights of a generator, or its latent numbers."""
    rounds: Annotated[
        Literal["first", "last", "all"], "Observed rounds that are attacked; all share the client's examples."
    ] = "last"
    ignore: Annotated[
        Literal["nothing", "stochastic"], "Layers left out of the distance: those behind a bottleneck's noise."
    ] = "nothing"
    batchnorm: Annotated[
        Strength, "Weight of the difference to the model's running statistics, or the true ones if granted."
    ] = 0.0
    features: Annotated[
        Strength,
        "In batches: weight of the difference to the last layer's inputs, where its gradient tells them apart.",
    ] = 0.0
    group: Annotated[Strength, "Weight of the difference to the mean of a target client's restarts."] = 0.0
    register: Annotated[bool, "Shift the restarts onto each other before their mean is taken."] = False
    langevin: Annotated[Strength, "Standard deviation of the noise after each step, in units of the step size."] = 0.0
    whiten: Annotated[bool, "Compare in units of the additive noise that each entry gets from the client."] = False
    subtract: bool = False
    """Subtract known additive noise from the observed update, if its contribution does not depend on the images."""
    undo: Annotated[bool, "Search the images that the client trained on, then undo the batch defence."] = False
    undo_entries: Annotated[
        bool, "Undo a defence that maps each entry to another number, as simulated clients show it, and search then."
    ] = False
    median: Annotated[bool, "Take the median of 3x3 pixels over the images that are found."] = False
    pool: Annotated[bool, "Pool the restarts, matched to the best: medians of numbers, means of probabilities."] = False
    step_size: Annotated[
        float | None,
        Range(0, low_open=True, optional=True),
        "Local step size that the attacker assumes; none for the client's own.",
    ] = None

    surrogate: Annotated[
        Literal["none", "line"],
        "Parameters of one gradient in place of local steps: on the line between those before and after.",
    ] = "none"

    variants: tuple[Variant, ...] = ()
    """Settings of which the best on simulated clients is used, where there are public examples; else the first."""

    @property
    def needs(self) -> str:
        """What it needs of the examples, see `Space.offers`."""
        return "pictures" if self.tv or self.register or self.median else self.images.needs

    def with_variant(self, variant: Variant) -> Self:
        """Return the attack with a variant's settings, and nothing left to try."""
        descent = replace(self.descent, stepper=variant.stepper)
        return replace(self, tv=variant.tv, tv_end=variant.tv_end, descent=descent, variants=())

    def tv_at(self, iteration: int) -> float:
        """Return the weight of the total variation at an iteration.

        >>> from gradveil.attacks.attack_catalogue import make_attack
        >>> attack = make_attack("portfolio(tv=0.1, tv_end=0.001, iterations=3)")
        >>> [round(attack.tv_at(iteration), 4) for iteration in range(3)]
        [0.1, 0.01, 0.001]
        """
        if self.tv_end is None or not self.tv:
            return self.tv
        return self.tv * (self.tv_end / self.tv) ** (iteration / max(1, self.descent.iterations - 1))

    @property
    def relaxes(self) -> bool:
        """True if it optimises what the client's defence searches (proxies), in place of repeating that search."""
        return self.simulated_client == "full" and any(".proxy." in pattern for pattern in self.knowledge)

    @property
    def together(self) -> bool:
        """True if the restarts of a target client depend on each other, and must be in one chunk."""
        return self.restarts > 1 and (self.group > 0 or self.descent.halving or self.evolves)

    @property
    def evolves(self) -> bool:
        """True if the restarts of a target client are the candidates of one population."""
        return isinstance(self.descent.stepper, CMAES)

    @property
    def coupled(self) -> Descent:
        """The descent, with the number of restarts as its population size if it has one."""
        stepper = self.descent.stepper
        if self.objective == LIKELIHOOD:  # it grows while its law becomes narrower
            return replace(self.descent, keep="last")
        if not isinstance(stepper, CMAES):
            return self.descent
        return replace(self.descent, stepper=replace(stepper, population=self.restarts))

    def width_at(self, iteration: int) -> float:
        """Return the width over which the law of what is sent is smoothed at an iteration."""
        return _WIDEST * (_NARROWEST / _WIDEST) ** (iteration / max(1, self.descent.iterations - 1))

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse contradictory settings."""
        if not sound:
            return
        if not isinstance(self.images, Pixels):
            problem = "is for attacks that search pixels, but in this one a generator draws the images"
            conflicts = (("start", self.start != "normal"), ("langevin", self.langevin > 0))
            for setting in (setting for setting, is_set in conflicts if is_set):
                yield Problem(f"{self.name}.{setting}", problem, "leave it out")
        if self.tv_end is not None and not self.tv:
            yield Problem(f"{self.name}.tv_end", "is where the total variation ends, but tv is 0", "set tv too")
        if self.evolves and self.descent.halving:
            problem = "drops restarts, but these are a population, whose size must not change"
            yield Problem(f"{self.name}.halving", problem, "leave it out")
        if self.evolves and self.restarts == 1:
            problem = "is 1, but restarts are the candidates of a population here"
            yield Problem(f"{self.name}.restarts", problem, "give at least 2, better 50")
        if self.surrogate != "none" and self.whiten:
            problem = "weighs entries by noise of the client at the sent parameters, not on a line"
            yield Problem(f"{self.name}.whiten", problem, "leave it or surrogate out")
        if self.objective == LIKELIHOOD and (self.whiten or self.surrogate != "none" or self.evolves):
            problem = "compares no updates, as whiten, surrogate and populations do"
            yield Problem(f"{self.name}.objective", problem, "leave these out, or choose another objective")
        if self.undo and self.simulated_client == "naive":
            problem = "undoes a batch defence, but this attacker ignores the defence"
            yield Problem(f"{self.name}.undo", problem, "set simulated_client=full")
        if self.undo_entries and self.simulated_client == "naive":
            problem = "undoes what a defence does to entries, but this attacker ignores the defence"
            yield Problem(f"{self.name}.undo_entries", problem, "set simulated_client=full")

    @property
    def solver(self) -> Analytic | None:
        """The analytic attack from which the first restart starts, if any; adaptive attacks give it a prior."""
        if self.start != "solved":
            return None
        prior = "public" if self.simulated_client == "full" and "public" in self.knowledge else "none"
        return Analytic(labels="restore" if self.labels == "joint" else self.labels, prior=prior)

    def believed(self, client: Client) -> Client:
        """Return the client with the assumed step size, and without a batch defence that is undone.

        With a surrogate, it sends one gradient of all its examples, whatever its steps.
        """
        client = replace(client, batch=()) if self.undo else client
        if self.surrogate != "none":
            return replace(client, local=None)
        if self.step_size is None or client.local is None:
            return client
        return replace(client, local=replace(client.local, lr=self.step_size))

    def points(self) -> list[int]:
        """List the iterations after which the best images are recorded: 1/2, 1/4, … of the budget, seven times."""
        return sorted({self.descent.iterations >> halving for halving in range(1, 8)} - {0})
