"""Settings of the optimisation attack, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.image_sources import Images, Pixels
from gradveil.attacks.knowledge import How
from gradveil.attacks.labels import Labels
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse


@dataclass(frozen=True)
class InversionSettings:
    """Settings of the one optimisation attack. `name` is what reports call it."""

    name: str
    objective: str = "cosine"
    tv: float = 0.0
    l2: float = 0.0
    descent: Descent = field(default_factory=Descent)
    restarts: int = 1
    start: Literal["normal", "uniform", "solved"] = "normal"
    """What images look like at first; `solved`: the first restart starts from the first layer's equations, solved."""
    box: bool = True
    labels: Labels = "given"
    simulated_client: Literal["naive", "full"] = "naive"
    knowledge: Mapping[str, How] = field(default_factory=dict)
    images: Images = field(default_factory=Pixels)
    """What is searched: pixels, the weights of a generator, or what a generator draws from."""
    rounds: Literal["first", "last", "all"] = "last"
    """Which of the observed rounds are attacked; all of them share the target client's examples."""
    ignore: Literal["nothing", "stochastic"] = "nothing"
    """Leave the layers out of the distance that a bottleneck's noise reaches."""
    batchnorm: float = 0.0
    """Weight of the BatchNorm prior: statistics of the inputs against the running ones, or the true ones if granted."""
    group: float = 0.0
    """Weight of the pull to the mean of a target client's restarts."""
    register: bool = False
    """Shift the restarts onto each other before their mean is taken."""
    langevin: float = 0.0
    """Standard deviation of the noise added to the inputs after each step, in units of the step size."""
    whiten: bool = False
    """Compare in units of the additive noise that the simulated client would have added to each entry."""
    subtract: bool = False
    """Take additive noise that is known off what was sent, where the images make no difference to what it adds."""
    undo: bool = False
    """Search what the client trained on, without its batch defence, and then undo that by its public transforms."""
    step_size: float | None = None
    """The local step size that the attacker believes in; None for the client's own, which servers usually set."""

    @property
    def together(self) -> bool:
        """Whether the restarts of a target client look at each other, so that they must be worked on at once."""
        return self.restarts > 1 and (self.group > 0 or self.descent.halving or self.evolves)

    @property
    def evolves(self) -> bool:
        """Whether the restarts of a target client are the candidates of one population."""
        return isinstance(self.descent.stepper, CMAES)

    @property
    def coupled(self) -> Descent:
        """The descent, with the restarts as its population if it has one."""
        stepper = self.descent.stepper
        if not isinstance(stepper, CMAES):
            return self.descent
        return replace(self.descent, stepper=replace(stepper, population=self.restarts))

    def __post_init__(self) -> None:
        """Refuse what has no meaning together."""
        problems: list[Problem] = []
        if not isinstance(self.images, Pixels):
            what = "is for attacks that search pixels, this one has a generator draw them"
            given = (("start", self.start != "normal"), ("langevin", self.langevin > 0))
            problems += [Problem(f"{self.name}.{setting}", what, "leave it out") for setting, wrong in given if wrong]
        if self.evolves and self.descent.halving:
            what = "lets restarts go, and these are one population: its generations would have no size"
            problems.append(Problem(f"{self.name}.halving", what, "leave it out"))
        if self.evolves and self.restarts == 1:
            what = "is 1, and restarts are the candidates of a population here"
            problems.append(Problem(f"{self.name}.restarts", what, "give at least 2, better 50"))
        if self.undo and self.simulated_client == "naive":
            what = "undoes a batch defence, and this attacker ignores the defence"
            problems.append(Problem(f"{self.name}.undo", what, "set simulated_client=full"))
        refuse(problems)

    @property
    def solver(self) -> Analytic | None:
        """The closed form that the first restart starts from, if it does; who knows the defence weighs it by that."""
        if self.start != "solved":
            return None
        prior = "public" if self.simulated_client == "full" and "public" in self.knowledge else "none"
        return Analytic(labels="restore" if self.labels == "joint" else self.labels, prior=prior)

    def believed(self, client: Client) -> Client:
        """Return the client with what the attacker guesses of its local training; without a defence that is undone."""
        client = replace(client, batch=()) if self.undo else client
        if self.step_size is None or client.local is None:
            return client
        return replace(client, local=replace(client.local, lr=self.step_size))

    def points(self) -> list[int]:
        """List the iterations after which the best images so far are noted: 1/2, 1/4, … of the budget, seven times."""
        return sorted({self.descent.iterations >> halving for halving in range(1, 8)} - {0})
