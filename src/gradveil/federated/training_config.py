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
"""Settings that may differ between two calls of the same training."""
UNSEEN = "unseen"
"""Name of the data of recorded updates without images: only their shape and pixel range are known."""


_COLUMNS = ("image_column", "label_column")


class Section(BaseModel):
    """A table of a run file: unknown keys are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    """The images. The folder of their files is set by `--data-dir` or GRADVEIL_DATA."""

    name: Name
    size: Annotated[int, Field(ge=11)] | None = 32
    """Side length that images are resized to, in pixels (SSIM needs 11). Default: 32."""
    channels: Literal[1, 3] | None = None
    normalise: Literal["dataset", "none"] = "dataset"
    mean: Annotated[list[float], Field(min_length=1)] | None = None
    """With `std`: mean for the normalisation of inputs, one number or one per channel, instead of `normalise`."""
    std: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None
    classes: Count | None = None
    """Number of classes, for recorded updates without images (`unseen`)."""
    public: Count | None = 2000
    """Number of public images to read (bundled data are read completely)."""
    gallery: Count | None = 1000
    """Number of images of the targets' split to read: the gallery of the identification metric."""
    image_column: Name | None = None
    """Column with the images in a Parquet file or Hugging Face data, if it has no usual name."""
    label_column: Name | None = None
    """Column with the labels."""

    @model_serializer(mode="wrap")
    def _without_usual_columns(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit columns that are not set, so that runs from before these settings keep their hash."""
        return {key: value for key, value in written(self).items() if key not in _COLUMNS or value is not None}

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together")
        if self.classes is not None and self.name != UNSEEN:
            raise ValueError(f"the data '{self.name}' have their own classes; remove this setting")
        columns = [key for key in _COLUMNS if getattr(self, key) is not None]
        bundled = self.name in DATASETS and DATASETS[self.name].bundled
        if columns and (bundled or self.name == UNSEEN or self.name.startswith("folder:")):
            raise ValueError(f"{columns[0]} is for Parquet files and Hugging Face data; remove it")
        return self


class ModelConfig(Section):
    """The model: a short name or `pkg.module:factory`, and its options."""

    name: Name
    options: dict[str, Any] = Field(default_factory=dict)
    prepare: bool = False
    """Replace modules that cannot be attacked: BatchNorm in training mode, hidden dropout, in-place operations."""
    batchnorm: Literal["batch_statistics", "frozen", "group"] = "batch_statistics"
    """Replacement of BatchNorm by `prepare`."""
    weights: Name | None = None
    """Safetensors file with its parameters, or a file of `gradveil train`; None for weights drawn by the seed. It is
    searched in the current folder, then in the data folder."""


class LocalConfig(Section):
    """Local training: T optimiser steps instead of one gradient."""

    lr: Annotated[float, Field(gt=0)]
    batch: Count | None = None
    """Examples per step; None for all of the client's (in a training: as many as the smallest client has). An epoch
    drops the examples that do not fill a batch."""
    steps: Count | None = None
    epochs: Count | None = None
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    sampling: Literal["batches", "poisson"] = "batches"
    """`poisson`: each step draws each example independently, `batch` on average, as the accounting of DP-SGD assumes. A
    step then computes with all examples."""

    @model_validator(mode="after")
    def _one_length(self) -> LocalConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs exactly one of steps and epochs")
        return self

    def words(self, examples: int) -> str:
        """Describe the local training of a client with this number of examples.

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
    """The training and test images: all of them, unless a number is set."""

    public: Count | None = None
    """Number of training images to read."""
    gallery: Count | None = None
    """Number of test images to read."""


class PartitionConfig(Section):
    """Partition of the training images among the clients."""

    kind: Literal["iid", "dirichlet", "pathological", "column", "flwr"] = "iid"
    """`iid`: at random; `dirichlet`: random shares of each class; `pathological`: a few classes per client; `column`:
    examples with the same value of a column together; `flwr`: a partitioner of flwr-datasets."""
    concentration: Annotated[float, Field(gt=0)] = 0.5
    """For `dirichlet`: the smaller, the fewer classes per client."""
    classes: Count = 2
    """For `pathological`: number of classes (shards of one class each) per client."""
    column: Name | None = None
    """For `column`: the column of the data; `label` always exists. For `flwr`: a column that its options may name."""
    partitioner: Name | None = None
    """For `flwr`: name of the partitioner, such as DistributionPartitioner."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For `flwr`: arguments of the partitioner; `num_partitions` is `clients` by default."""
    shuffle: Annotated[int, Field(ge=0)] | Literal[False] = 42
    """For `flwr`: seed of the FederatedDataset's shuffle (42 is its default), or false."""

    @model_validator(mode="after")
    def _whole(self) -> PartitionConfig:
        if self.kind == "column" and self.column is None:
            raise ValueError("kind 'column' needs column: the name of a column, or 'label'")
        if self.kind == "flwr" and self.partitioner is None:
            raise ValueError("kind 'flwr' needs partitioner: a name such as IidPartitioner or ShardPartitioner")
        return self


class ServerConfig(Section):
    """Aggregation of the updates by the server."""

    optimiser: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    lr: Annotated[float, Field(gt=0)] | None = None
    """Step size; None for 1 (local training, FedAvg), 0.1 (gradients, FedSGD), or 0.03 for an adaptive optimiser
    (FedOpt)."""
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
    """Rounds of federated training: clients, local training, and the server."""

    clients: Count = 10
    rounds: Count
    partition: PartitionConfig = PartitionConfig()
    local: LocalConfig | None = None
    """Local training; None for one gradient per round."""
    batch: Count | None = None
    """Examples of a round's gradient without local training; None for all of the client's."""
    trainable: Annotated[list[Name], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent (`["head.*"]`); None for all that require a gradient."""
    server: ServerConfig = ServerConfig()
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round."""
    absent: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a chosen client does not answer."""


class PaceConfig(Section):
    """A change of the step size during the training."""

    after: Count
    """Number of rounds after which the change applies."""
    times: Annotated[float, Field(gt=0)]
    """Factor of the initial step size: of the clients' `local.lr`, or of the server's if clients send gradients."""


class TrainConfig(Rounds):
    """A training: every defence with every seed, and the same data in one place for comparison."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: TrainDataConfig
    model: ModelConfig
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of each client's examples that are validation examples."""
    patience: Count | None = None
    """Stop after this number of rounds without a lower mean validation loss."""
    pace: list[PaceConfig] = []
    """Changes of the step size; each entry applies until the next one does."""
    defences: Annotated[list[Name], Field(min_length=1)] = ["none"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    central: bool = False
    """Also train undefended on all data in one place, to show the cost of federation."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta of the reported epsilons; set it well below one over the number of examples."""
    together: Together = "auto"
    """Whether the clients of a round compute at once, in groups: `auto` if it is faster; false for one after the other.
    Only rounding differs."""
    precision: Literal["float32", "float64"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"

    @model_validator(mode="after")
    def _complete(self) -> TrainConfig:
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
        """Settings that may grow, or be turned on, without making another run."""
        return ("defences", "seeds", "central")

    def digest(self) -> str:
        """Hash the settings that rounds depend on: a longer training continues a shorter one, for any delta."""
        left_out = {*self.growing, *FREE}
        return digest({key: value for key, value in self.resolved().items() if key not in left_out})
