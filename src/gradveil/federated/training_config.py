"""Settings of data, model and training in a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from gradveil.client import Local
from gradveil.data import DATASETS
from gradveil.federated.aggregate import Server
from gradveil.federated.parallel_clients import Together
from gradveil.runs.run_folder import digest

Count = Annotated[int, Field(ge=1)]
"""A whole number of at least one."""
Name = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""


FREE = ("rounds", "delta", "together")
"""What of a training may be another from one call to the next."""
UNSEEN = "unseen"
"""The name of data that are not here: of recorded updates only what the images look like is known."""


_COLUMNS = ("image_column", "label_column")


class Section(BaseModel):
    """A table of a run file: unknown keys are refused, and a number is not a string."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    """Which images. Where files lie is no part of it: `--data-dir` (or GRADVEIL_DATA) says so."""

    name: Name
    size: Annotated[int, Field(ge=11)] | None = 32
    """Side the images are resized to, in pixels (SSIM needs 11); leave it out for 32."""
    channels: Literal[1, 3] | None = None
    normalise: Literal["dataset", "none"] = "dataset"
    mean: Annotated[list[float], Field(min_length=1)] | None = None
    """With `std`: what the model's inputs are normalised by, one number or one a channel, instead of `normalise`."""
    std: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None
    classes: Count | None = None
    """How many classes there are, for data that are not here (`unseen`)."""
    public: Count | None = 2000
    """How many public images are read (bundled data are read whole)."""
    gallery: Count | None = 1000
    """How many images of the targets' split are read: the identification metric searches the target among them."""
    image_column: Name | None = None
    """The column of a Parquet file, or of Hugging Face data, that holds the images, where it has no usual name."""
    label_column: Name | None = None
    """The column that holds the labels."""

    @model_serializer(mode="wrap")
    def _without_usual_columns(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out columns that nobody named: runs from before they could be named are the same runs."""
        return {key: value for key, value in written(self).items() if key not in _COLUMNS or value is not None}

    @model_validator(mode="after")
    def _what_is_said_of_it(self) -> DataConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together")
        if self.classes is not None and self.name != UNSEEN:
            raise ValueError(f"classes are said by the data '{self.name}' themselves; leave them out")
        said = [key for key in _COLUMNS if getattr(self, key) is not None]
        bundled = self.name in DATASETS and DATASETS[self.name].bundled
        if said and (bundled or self.name == UNSEEN or self.name.startswith("folder:")):
            raise ValueError(f"{said[0]} is for Parquet files and Hugging Face data; leave it out")
        return self


class ModelConfig(Section):
    """Which model: a short name or `pkg.module:factory`, and its options."""

    name: Name
    options: dict[str, Any] = Field(default_factory=dict)
    prepare: bool = False
    """Replace what cannot be attacked as it is: BatchNorm in training mode, hidden dropout, in-place operations."""
    batchnorm: Literal["batch_statistics", "frozen", "group"] = "batch_statistics"
    """What `prepare` makes of BatchNorm."""
    weights: Name | None = None
    """A safetensors file of its parameters, or one that `gradveil train` wrote; None for weights drawn by the seed.
    Looked for where the command runs, then in the data folder."""


class LocalConfig(Section):
    """Local training: T optimiser steps instead of one gradient."""

    lr: Annotated[float, Field(gt=0)]
    batch: Count | None = None
    """Examples in each step; None for all that the client has, and where clients train together for as many as the one
    with the fewest has. What an epoch leaves over for no whole batch is left out of it."""
    steps: Count | None = None
    epochs: Count | None = None
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    sampling: Literal["batches", "poisson"] = "batches"
    """`poisson`: each example is in each step by itself, `batch` of them on average; what DP-SGD's accounting takes for
    granted. A step then computes with all examples."""

    @model_validator(mode="after")
    def _one_length(self) -> LocalConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs exactly one of steps and epochs")
        return self

    def words(self, examples: int) -> str:
        """Describe in a few words how a client with so many examples trains.

        >>> LocalConfig(lr=0.1, steps=4).words(8), LocalConfig(lr=0.1, epochs=1, batch=2, momentum=0.9).words(8)
        ('T=4 sgd lr=0.1', 'epochs=1 sgd lr=0.1, batch=2, momentum=0.9')
        """
        length = f"T={self.steps}" if self.steps else f"epochs={self.epochs}"
        more = [f"batch={self.batch}"] if self.batch not in (None, examples) else []
        more += [f"momentum={self.momentum:g}"] if self.momentum else []
        more += ["Nesterov"] if self.nesterov else []
        more += [f"weight decay={self.weight_decay:g}"] if self.weight_decay else []
        more += ["Poisson"] if self.sampling == "poisson" else []
        return ", ".join([f"{length} {self.optimiser} lr={self.lr:g}", *more])

    def build(self, examples: int) -> Local:
        """Return the client's local training for this many examples."""
        settings = self.model_dump()
        return Local(**{**settings, "batch": self.batch or examples})


class TrainDataConfig(DataConfig):
    """Which images to train on and to test with: all of them, unless a number is given."""

    public: Count | None = None
    """How many training images are read."""
    gallery: Count | None = None
    """How many test images are read."""


class PartitionConfig(Section):
    """How the training images are shared among the clients."""

    kind: Literal["iid", "dirichlet", "pathological", "column", "flwr"] = "iid"
    """`iid` deals them at random; `dirichlet` gives each class random shares; `pathological` a few classes a client;
    `column` keeps the examples of one value of a column together; `flwr` asks a partitioner of flwr-datasets."""
    concentration: Annotated[float, Field(gt=0)] = 0.5
    """Of `dirichlet`: the smaller, the fewer classes a client sees."""
    classes: Count = 2
    """Of `pathological`: the classes (shards of one class each) that a client gets."""
    column: Name | None = None
    """Of `column`: the column of the data; `label` is always there. Of `flwr`: one that its options may name."""
    partitioner: Name | None = None
    """Of `flwr`: the name of the partitioner, say DistributionPartitioner."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of `flwr`: what the partitioner is given; `num_partitions` is `clients` unless it is said here."""
    shuffle: Annotated[int, Field(ge=0)] | Literal[False] = 42
    """Of `flwr`: the seed with which its FederatedDataset shuffles first (42 is its default), or false."""

    @model_validator(mode="after")
    def _whole(self) -> PartitionConfig:
        if self.kind == "column" and self.column is None:
            raise ValueError("kind 'column' needs column: the name of a column, or 'label'")
        if self.kind == "flwr" and self.partitioner is None:
            raise ValueError("kind 'flwr' needs partitioner: a name such as IidPartitioner or ShardPartitioner")
        return self


class ServerConfig(Section):
    """What the server does with the updates that arrive."""

    optimiser: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    lr: Annotated[float, Field(gt=0)] | None = None
    """Its step size; None for 1 (local training, FedAvg), 0.1 (gradients, FedSGD), or 0.03 where each coordinate has a
    step of its own (FedOpt)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3
    weights: Literal["examples", "uniform", "angles"] = "examples"

    def build(self, local: bool) -> Server:
        """Return the server for clients that train locally, or send gradients."""
        usual = 0.03 if self.optimiser != "sgd" else 1.0 if local else 0.1
        lr = usual if self.lr is None else self.lr
        return Server(self.optimiser, lr, self.momentum, (self.beta1, self.beta2), self.tau, self.weights)


class Rounds(Section):
    """How clients train together: who takes part, what each does, and what the server makes of it."""

    clients: Count = 10
    rounds: Count
    partition: PartitionConfig = PartitionConfig()
    local: LocalConfig | None = None
    """Local training; None for one gradient a round."""
    batch: Count | None = None
    """Examples of a round's gradient where there is no local training; None for all that the client has."""
    trainable: Annotated[list[Name], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent (`["head.*"]`); None for all that require a gradient."""
    server: ServerConfig = ServerConfig()
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round."""
    absent: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a chosen client does not answer."""


class PaceConfig(Section):
    """From when on steps are shorter, or longer, than at first."""

    after: Count
    """Rounds."""
    times: Annotated[float, Field(gt=0)]
    """What the first step size is multiplied by: the clients' `local.lr`, or where they send gradients the server's."""


class TrainConfig(Rounds):
    """A training: every defence with every seed, and the same data in one place for comparison."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: TrainDataConfig
    model: ModelConfig
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of each client's examples that it keeps apart, to say how well training goes."""
    patience: Count | None = None
    """Stop after so many rounds without a lower mean validation loss."""
    pace: list[PaceConfig] = []
    """How step sizes change in the course of the training; each entry counts until the next one's rounds are over."""
    defences: Annotated[list[Name], Field(min_length=1)] = ["none"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    central: bool = False
    """Train once more, undefended, with all data in one client's hands: what federation costs."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Of the epsilons that are told of private defences; well below one over the number of examples."""
    together: Together = "auto"
    """Whether the clients of a round compute at once, in groups: `auto` for where it is faster; false for one after the
    other. It changes nothing but rounding."""
    precision: Literal["float32", "float64"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"

    @model_validator(mode="after")
    def _something_to_wait_for(self) -> TrainConfig:
        if self.patience is not None and self.validation == 0:
            raise ValueError("patience waits for the validation loss, and validation is 0")
        rounds = [entry.after for entry in self.pace]
        if rounds != sorted(set(rounds)):
            raise ValueError(f"pace changes after rounds {rounds}: name each once, in order")
        return self

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain values."""
        return self.model_dump(mode="json")

    @property
    def growing(self) -> tuple[str, ...]:
        """What may get longer, or be turned on, while a run stays the same."""
        return ("defences", "seeds", "central")

    def digest(self) -> str:
        """Hash what the rounds depend on: a longer training goes on where a shorter one ended, for any delta."""
        left_out = {*self.growing, *FREE}
        return digest({key: value for key, value in self.resolved().items() if key not in left_out})
