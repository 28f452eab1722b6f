"""Settings of an audit in a run file, with meaning, limits and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gradveil.core.formatting import plural
from gradveil.data.registry import kind_of
from gradveil.federated.training_config import (
    UNNAMED,
    Count,
    DataConfig,
    LocalConfig,
    ModelConfig,
    Name,
    Rounds,
    Section,
    with_tokenizer,
)
from gradveil.runs.run_folder import digest
from gradveil.spaces import TableSpace, TextSpace
from gradveil.theory.accounting import Participation

FREE = ("control", "cost")
"""Settings that a resumed run may change: they add trials or trainings or leave some out, and change no trial."""


class ClientConfig(Section):
    """One kind of client: how many examples its update is made from, and how it trains."""

    batch: Count = 1
    """Examples per client."""
    members: Count = 1
    """Clients in an aggregation group: the server sees only their sum."""
    local: LocalConfig | None = None
    """Local training. None: one gradient."""
    trainable: Annotated[list[str], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent. None: all."""

    @property
    def title(self) -> str:
        """Say in a few words how it trains: clients of other settings have other titles, and are judged apart."""
        only = f", only {' '.join(self.trainable)}" if self.trainable else ""
        summed = f", sum of {self.members}" if self.members > 1 else ""
        return f"{f'local {self.local.words(self.batch)}' if self.local else 'gradient'}{only}{summed}"

    def update_of(self, noun: str) -> str:
        """Describe what the server receives: what an update is computed from, and over how many clients it is summed.

        >>> ClientConfig().update_of("image")
        'one gradient of 1 image'
        >>> ClientConfig(batch=2, members=4, trainable=["head.*"]).update_of("image")
        'the sum over 4 clients of one gradient of 2 images (of head.* alone) each'
        """
        alone = f" (of {' '.join(self.trainable)} alone)" if self.trainable else ""
        trains = f"local training ({self.local.words(self.batch)}) on" if self.local else "one gradient of"
        one = f"{trains} {plural(self.batch, noun)}{alone}"
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
    """Share of the examples (for `user-dp`: of the clients) in each sum."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ of the reported ε. Choose it well below one over the number of examples."""
    sampling: Literal["poisson", "shuffled"] = "poisson"
    """`poisson`: each example is in a sum with probability `rate`. `shuffled`: batches of fixed size, without
    amplification."""
    accountant: Literal["pld", "rdp"] = "pld"
    """`pld` is nearly exact; most papers report `rdp`."""

    def build(self) -> Participation:
        """Return what the accountant is asked about."""
        return Participation(**self.model_dump())


AUTO = "auto"
"""The budget that is the default from Python and for custom models: a few minutes for the whole run."""
BUDGET = rf"^\s*({AUTO}|\d+(\.\d+)?\s*[smh]?)\s*$"
"""How a budget is written."""


FIRST_SEARCH = {"images": "portfolio", "rows": "tableak", "texts": "span-rank"}
"""The search of a run that names no attacks, by the kind of its examples: it simulates every defence."""
CHECKED_ATTACK = {"images": "ig", "rows": "adaptive", "texts": "adaptive"}
"""The attack whose needs `gradveil check` tests of a model with data, by the kind of the examples."""


class ObservedConfig(Section):
    """Recorded updates to attack instead of simulated ones, and which of them."""

    folder: Name
    """Folder with recorded updates, from `gradveil train --record`, an `UpdateRecorder` or the Flower mod."""
    runs: Annotated[list[str], Field(min_length=1)] | None = None
    """Runs to attack. None: all."""
    rounds: Annotated[list[int], Field(min_length=1)] | None = None
    """Rounds to attack. None: all."""
    clients: Annotated[list[str], Field(min_length=1)] | None = None
    """Clients to attack. None: all."""


class CostPlan(Rounds):
    """Short trainings next to an audit, one per defence and seed: they measure what each defence costs in accuracy.

    Clients train on the auxiliary data, and the private images test the model: the clients that are attacked keep
    their initial weights.
    """

    rounds: Count = UNNAMED["rounds"]
    """Number of rounds."""
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
    """Name of the run; its directory is `runs/NAME`."""
    data: DataConfig
    """The images."""
    model: ModelConfig
    """The model."""
    client: Annotated[list[ClientConfig], Field(min_length=1)] = Field(default=[ClientConfig()])
    """One kind of client, or a list of kinds that are attacked separately."""
    defences: Annotated[list[Name], Field(min_length=1)] = Field(default=["none"])
    """Defences, or a paper's table: `PAPER/TABLE`."""
    attacks: Annotated[list[Name], Field(min_length=1)] = Field(default=[])
    """Attacks; `adaptive` and `malicious` expand to those registered for each defence. If left out: a search that
    simulates the client (`cdia`; of rows `tableak`, of texts `span-rank`), and the closed forms that apply."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(default=[0])
    """Seeds; every trial runs with every seed."""
    target_clients: Count = 32
    """Number of clients to attack."""
    first_target_client: Annotated[int, Field(ge=0)] = 0
    """Index of the first target client, in the order of the data."""
    target_images: Literal["test", "client"] = "test"
    """`test`: the target clients hold the first images of the test split. `client`: random training images that one of
    ten clients holds, drawn by the first seed."""
    threshold: Annotated[float, Field(gt=-1, le=1)] = 0.5
    """SSIM above which an image counts as recovered; of rows and texts, the share of cells or
    tokens with which one does (0.9)."""
    rounds: Count = 1
    """Rounds that the attacker observes. Every target client takes part in every round with the same examples."""
    server_lr: Annotated[float, Field(ge=0)] | None = None
    """Factor on the mean update between rounds. None: 1 for local training, 0.1 for gradients."""
    lpips: Literal["alex", "vgg"] | None = None
    """Network of the LPIPS score (needs the extra `perceptual`). None: no LPIPS."""
    metrics: list[Name] = Field(default=[])
    """Further scores: other readings of a score (`ssim_rescaled`, `mse_adadefense`), a metric of an installed
    package, or `pkg.module:name`."""
    iterations: Count | None = None
    """Iterations of every attack that does not set its own. None: as in the attack's paper."""
    restarts: Count | None = None
    """Restarts of every attack that does not set its own."""
    budget: Annotated[str, Field(pattern=BUDGET)] | None = None
    """Budget of all attacks on one defence together: target-iterations (64000) or time (90s, 10m, 2h). `auto`: a few
    minutes for the whole run, spent by attacks that set no iterations of their own; `none`: no limit."""
    privacy: PrivacyConfig | None = None
    """The planned training, for the ε of `dp`, `fed-cdp` and `user-dp` in the report."""
    observed: ObservedConfig | None = None
    """Recorded updates to attack instead of simulated ones. Model, client and defences are then assumptions of the
    attacks."""
    train: TrainPlan | None = None
    """Train with every defence first, and attack the clients of that training. Used with `--train`."""
    cost: CostPlan | None = None
    """Train with every defence as well, for its cost in accuracy; None leaves accuracy unknown. `train` measures it
    anyway."""
    control: bool = True
    """Add a short undefended control if no defence is `none`: it shows that the attacks work."""
    images: bool = True
    """Keep ground truths and reconstructions, which are private images. False: keep scores only."""
    precision: Literal["float32", "float64"] = "float32"
    """Floating-point precision."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"
    """cpu, cuda, cuda:1 or mps."""

    @property
    def stages(self) -> list[int | None]:
        """The rounds of the training after which clients are attacked; None stands for no training."""
        return [*self.train.stages] if self.train else [None]

    @property
    def trainings(self) -> CostPlan | None:
        """The plan of the run's trainings, whether their clients are attacked or not; None without any."""
        return self.train or self.cost

    @model_validator(mode="after")
    def _first_search(self) -> RunConfig:
        if not self.attacks:  # not by assignment, after which `attacks` would count as set
            vars(self)["attacks"] = [FIRST_SEARCH[kind_of(self.data.name)]]
        return self

    @property
    def searches_first(self) -> bool:
        """Whether the run names no attacks: closed forms that apply then join its search."""
        return "attacks" not in self.model_fields_set

    @model_validator(mode="after")
    def _images_of_one_kind(self) -> RunConfig:
        if self.target_images == "client" and (self.train or self.observed):
            what = "observed updates have their own" if self.observed else "clients of a training hold training images"
            raise ValueError(f"target_images is 'client', but {what}; remove target_images")
        return self

    @field_validator("budget", mode="before")
    @classmethod
    def _no_budget(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() == "none" else value

    @model_validator(mode="before")
    @classmethod
    def _threshold_of_the_kind(cls, value: Any) -> Any:
        """Take another default for rows and texts: their headline score is another one."""
        data: Any = value.get("data") if isinstance(value, dict) else None
        name: Any = data.get("name") if isinstance(data, dict) else getattr(data, "name", None)
        unset = isinstance(value, dict) and value.get("threshold") is None and isinstance(name, str)
        space = {"rows": TableSpace, "texts": TextSpace}.get(kind_of(name)) if unset else None
        return value if space is None else {**value, "threshold": space.threshold}

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, value: Any) -> Any:
        return with_tokenizer(value)

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
        # Digests of older runs know none of these.
        if self.target_images == "test":
            del plain["target_images"]
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
