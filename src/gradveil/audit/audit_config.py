"""Settings of an audit in a run file, with meaning, limits and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gradveil.core.formatting import plural
from gradveil.federated.training_config import (
    Count,
    DataConfig,
    LocalConfig,
    ModelConfig,
    Name,
    Rounds,
    Section,
)
from gradveil.runs.run_folder import digest
from gradveil.theory.accounting import Participation

FREE = ("control", "cost")
"""Settings that a resumed run may change: they add trials or trainings or leave some out, and change no trial."""


class ClientConfig(Section):
    """One kind of client: how many examples its update is made from, and how it trains."""

    batch: Count = 1
    """Examples of each client."""
    members: Count = 1
    """Clients whose updates are summed before the server sees them; each has `batch` examples."""
    local: LocalConfig | None = None
    trainable: Annotated[list[str], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent; None for all."""

    @property
    def title(self) -> str:
        """Say in a few words how it trains: clients of other settings have other titles, and are judged apart."""
        only = f", only {' '.join(self.trainable)}" if self.trainable else ""
        summed = f", sum of {self.members}" if self.members > 1 else ""
        return f"{f'local {self.local.words(self.batch)}' if self.local else 'gradient'}{only}{summed}"

    @property
    def words(self) -> str:
        """Describe what the server receives: what an update is computed from, and over how many clients it is summed.

        >>> ClientConfig().words
        'one gradient of 1 image'
        >>> ClientConfig(batch=2, members=4, trainable=["head.*"]).words
        'the sum over 4 clients of one gradient of 2 images (of head.* alone) each'
        """
        alone = f" (of {' '.join(self.trainable)} alone)" if self.trainable else ""
        trains = f"local training ({self.local.words(self.batch)}) on" if self.local else "one gradient of"
        one = f"{trains} {plural(self.batch, 'image')}{alone}"
        return f"the sum over {self.members} clients of {one} each" if self.members > 1 else one

    @property
    def examples(self) -> int:
        """Count the examples that one observed update is made from."""
        return self.batch * self.members

    @model_validator(mode="after")
    def _steps_fit(self) -> ClientConfig:
        if self.local and self.local.batch and self.local.batch > self.batch:
            raise ValueError(f"has {self.batch} examples but local.batch takes {self.local.batch} a step")
        return self


class PrivacyConfig(Section):
    """The training that is planned, for epsilons: how often an example (for `user-dp`, a client) is in a noisy sum."""

    steps: Count
    """Noisy sums in the whole training: steps of DP-SGD, or rounds of `user-dp`."""
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the examples (of the clients) that is in each sum."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    sampling: Literal["poisson", "shuffled"] = "poisson"
    """`poisson`: each is in a sum with probability `rate`; `shuffled`: batches of fixed size, not amplified."""
    accountant: Literal["pld", "rdp"] = "pld"

    def build(self) -> Participation:
        """Return what the accountant is asked about."""
        return Participation(**self.model_dump())


BUDGET = r"^\s*\d+(\.\d+)?\s*[smh]?\s*$"
"""How a budget is written."""


class ObservedConfig(Section):
    """Recorded updates to attack instead of simulated ones, and which of them."""

    folder: Name
    """Where they were recorded: what `gradveil train --record`, a `Recorder` or the Flower mod wrote."""
    runs: Annotated[list[str], Field(min_length=1)] | None = None
    rounds: Annotated[list[int], Field(min_length=1)] | None = None
    clients: Annotated[list[str], Field(min_length=1)] | None = None


class CostPlan(Rounds):
    """Short trainings next to an audit, one per defence and seed: they measure what each defence costs in accuracy.

    Clients train on the auxiliary data, and the private images test the model: the clients that are attacked keep
    their initial weights.
    """

    rounds: Count = 20
    images: Count | None = None
    """How many training images are read and dealt to the clients; None for all."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of the epsilons of these trainings; None for that of `privacy`, or 1e-5."""


class TrainPlan(CostPlan):
    """The training that is audited on its way (`gradveil audit --train`): at which rounds, and as `gradveil train`."""

    audit_at: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Rounds after which clients are attacked, 0: the untrained model; None for that, a quarter, and the end."""

    @property
    def stages(self) -> list[int]:
        """The rounds after which clients are attacked, in order.

        >>> TrainPlan(rounds=20).stages, TrainPlan(rounds=2).stages, TrainPlan(audit_at=[3, 0]).stages
        ([0, 5, 20], [0, 1, 2], [0, 3])
        """
        return sorted(set(self.audit_at or (0, max(1, self.rounds // 4), self.rounds)))

    @model_validator(mode="after")
    def _within_the_training(self) -> TrainPlan:
        if max(self.stages) > self.rounds:
            raise ValueError(f"audits after round {max(self.stages)}, and there are {self.rounds}")
        return self


class RunConfig(Section):
    """A run: every client, defended by every defence, attacked by every attack, with every seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: DataConfig
    model: ModelConfig
    client: Annotated[list[ClientConfig], Field(min_length=1)] = Field(default=[ClientConfig()])
    defences: Annotated[list[Name], Field(min_length=1)] = Field(default=["none"])
    attacks: Annotated[list[Name], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(default=[0])
    target_clients: Count = 32
    first_target_client: Annotated[int, Field(ge=0)] = 0
    threshold: Annotated[float, Field(gt=-1, lt=1)] = 0.5
    """SSIM above which an image counts as recovered."""
    rounds: Count = 1
    """Rounds that the attacker watches. The targets are the clients of one federation, every one in every round, each
    with the same examples; the last round is the one that `attack(rounds=last)` looks at."""
    server_lr: Annotated[float, Field(ge=0)] | None = None
    """What the mean update is multiplied by between rounds; None for 1 (local training) or 0.1 (gradients)."""
    lpips: Literal["alex", "vgg"] | None = None
    """Score LPIPS with this network too (needs the extra `perceptual`); None leaves it out."""
    metrics: list[Name] = Field(default=[])
    """More scores of each reconstruction, by name (`ssim_rescaled`), of an installed package, or `pkg.module:name`."""
    iterations: Count | None = None
    """Iterations of every attack whose own text does not say it; None for what the attack's authors used."""
    restarts: Count | None = None
    budget: Annotated[str, Field(pattern=BUDGET)] | None = None
    """What all attacks on one defence may spend together: target-iterations (64000) or working time (90s, 10m, 2h)."""
    privacy: PrivacyConfig | None = None
    """The planned training, for the epsilons of `dp`, `fed-cdp` and `user-dp` in the report; None tells none."""
    observed: ObservedConfig | None = None
    """Attack these recorded updates; model, client and defences are then what the attackers believe."""
    train: TrainPlan | None = None
    """Train with every defence first, and attack the clients of that training; None attacks initial weights."""
    cost: CostPlan | None = None
    """Train with every defence as well, for its cost in accuracy; None leaves accuracy unknown. `train` measures it
    anyway."""
    control: bool = True
    """Where no undefended client is asked for, attack a few without a defence too: they show that the attacks work."""
    images: bool = True
    """Keep truths and reconstructions, which are private images; False keeps scores only."""
    precision: Literal["float32", "float64"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"

    @property
    def stages(self) -> list[int | None]:
        """The rounds of the training after which clients are attacked; None stands for no training."""
        return [*self.train.stages] if self.train else [None]

    @property
    def trainings(self) -> CostPlan | None:
        """The plan of the run's trainings, whether their clients are attacked or not; None without any."""
        return self.train or self.cost

    @model_validator(mode="before")
    @classmethod
    def _one_client(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("client"), dict):
            return {**value, "client": [value["client"]]}
        return value

    @property
    def images_needed(self) -> int:
        """Count the images of the target clients' split that the largest client needs."""
        return (self.first_target_client + self.target_clients) * max(client.examples for client in self.client)

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain values."""
        plain = self.model_dump(mode="json")
        # Digests of older runs know neither of the two.
        if self.cost is None:
            del plain["cost"]
        if self.train is not None and self.train.delta is None:
            del plain["train"]["delta"]
        return plain

    @property
    def growing(self) -> tuple[str, ...]:
        """The lists that may get longer while a run stays the same (under a budget, by attacks that take none)."""
        return ("defences", "attacks", "seeds")

    def digest(self) -> str:
        """Hash every setting but the growing lists: two runs with equal digests give the same records for a trial.

        Whether there is a control changes no other trial.
        """
        left_out = {*self.growing, *FREE}
        return digest({key: value for key, value in self.resolved().items() if key not in left_out})
