"""Settings of data, model and training in a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from gradveil.client import Local
from gradveil.data import DATASETS
from gradveil.data.registry import kind_of
from gradveil.federated.aggregate import Server
from gradveil.federated.parallel_clients import Together
from gradveil.nn.models.text_library import is_type
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
_LATER = {**dict.fromkeys((*_COLUMNS, "columns", "person", "tokenizer", "tokens")), "train_on": "auxiliary"}
"""Settings of data that runs from before them do not have, with their defaults."""


class Section(BaseModel):
    """A table of a run file: unknown keys are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    """The images. The folder of their files is set by `--data-dir` or GRADVEIL_DATA."""

    name: Name
    """A bundled name, `folder:PATH`, a Parquet file, a Hugging Face name, or `unseen` for recorded updates."""
    size: Annotated[int, Field(ge=7)] | None = 32
    """Side of the images in pixels after resizing. SSIM needs at least 7; below 11, its window is smaller."""
    channels: Literal[1, 3] | None = None
    """Colour channels. None keeps those of the data."""
    normalise: Literal["dataset", "none"] = "dataset"
    """Subtract the mean and divide by the standard deviation of the data, or leave pixels in [0, 1]."""
    mean: Annotated[list[float], Field(min_length=1)] | None = None
    """Mean of each channel, instead of the one of the data. Needs `std`."""
    std: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None
    """Standard deviation of each channel. Needs `mean`."""
    classes: Count | None = None
    """Number of classes. Only for the data `unseen`."""
    public: Count | None = 2000
    """Number of auxiliary images to read. Bundled data are read whole."""
    gallery: Count | None = 1000
    """Number of private images to read. Identification searches among them."""
    image_column: Name | None = None
    """Column with the images, of a Parquet file or Hugging Face data with unusual names."""
    label_column: Name | None = None
    """Column with the labels."""
    tokenizer: Name | None = None
    """For texts: a tokenizer of transformers, `hf:NAME` of your cache or a folder. None: that of a model with a
    tokenizer, else a vocabulary that is learned from the public texts."""
    tokens: Annotated[int, Field(ge=3)] | None = None
    """For texts: their most tokens, 32 by default. Longer texts are cut."""
    columns: dict[str, Literal["number", "category"]] | None = None
    """Kinds of a table's columns, by name: `{ age = "number" }`. Those of the others follow from their values."""
    person: Name | None = None
    """Column of a table that names the person of each row. Models do not read it; the
    [assurance statement](../how-to/sign-off.md) says whether an attack links rows of one person."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit later settings that are not set, so that runs from before them keep their hash."""
        return {key: value for key, value in written(self).items() if key not in _LATER or value != _LATER[key]}

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together")
        if self.classes is not None and self.name != UNSEEN:
            raise ValueError(f"the data '{self.name}' have their own classes; remove this setting")
        if kind_of(self.name) != "texts" and (self.tokenizer or self.tokens):
            raise ValueError(f"tokenizer and tokens are for texts, and the data '{self.name}' are none; remove them")
        columns = [key for key in _COLUMNS if getattr(self, key) is not None]
        bundled = self.name in DATASETS and DATASETS[self.name].bundled
        if columns and (bundled or self.name == UNSEEN or self.name.startswith("folder:")):
            raise ValueError(f"{columns[0]} is for Parquet files and Hugging Face data; remove it")
        return self


class ModelConfig(Section):
    """Which model: a short name, one of a library (`hf:vit`) or `pkg.module:factory`, and its options."""

    name: Name
    """A name of `gradveil list models`, or `pkg.module:factory`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's factory."""
    prepare: bool = False
    """Replace layers that cannot be audited, in a copy: BatchNorm, dropout in functions, in-place operations."""
    batchnorm: Literal["batch_statistics", "frozen", "group"] = "batch_statistics"
    """Replacement of BatchNorm by `prepare`."""
    weights: Name | None = None
    """A safetensors file with parameters, looked for in the working directory, then in the data folder. None: the seed
    draws initial weights."""


def with_tokenizer(settings: Any) -> Any:
    """Return the settings of a run; texts for a model that has a tokenizer take that one, if they name none."""
    data, model = (settings.get(key) for key in ("data", "model")) if isinstance(settings, dict) else (None, None)
    if not (isinstance(data, dict) and isinstance(model, dict)) or data.get("tokenizer") is not None:
        return settings
    name, texts = model.get("name"), isinstance(data.get("name"), str) and kind_of(data["name"]) == "texts"
    if not (texts and isinstance(name, str) and name.startswith("hf:")) or is_type(name):
        return settings
    return {**settings, "data": {**data, "tokenizer": name}}


class LocalConfig(Section):
    """Local training: T optimiser steps instead of one gradient."""

    lr: Annotated[float, Field(gt=0)]
    """Step size."""
    batch: Count | None = None
    """Examples per step. None: all examples of the client; in a training, as many as the smallest client has. An epoch
    leaves out examples that fill no batch."""
    steps: Count | None = None
    """Number of steps. Exactly one of `steps` and `epochs` is needed."""
    epochs: Count | None = None
    """Number of epochs."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Optimiser of the client. It starts again in every round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of `sgd`."""
    nesterov: bool = False
    """Use Nesterov's step. Needs `momentum`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay."""
    sampling: Literal["batches", "poisson"] = "batches"
    """`batches`: shuffled batches of fixed size. `poisson`: each example is in each step with the same probability,
    `batch` of them on average, as the accounting of DP-SGD assumes."""

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


UNNAMED: dict[str, Any] = {"rounds": 20, "local": {"lr": 0.1, "epochs": 1, "batch": 8}}
"""How clients train where nobody says it."""


class TrainDataConfig(DataConfig):
    """The training and test images: all of them, unless a number is set."""

    public: Count | None = None
    """Number of training images to read."""
    gallery: Count | None = None
    """Number of test images to read."""
    train_on: Literal["auxiliary", "private"] = "auxiliary"
    """`private`: train on the test images, which an audit attacks. Loss and accuracy are then those of the training."""


class PartitionConfig(Section):
    """Partition of the training images among the clients."""

    kind: Literal["iid", "dirichlet", "pathological", "column", "flwr"] = "iid"
    """`iid`: at random. `dirichlet`: random shares of each class. `pathological`: a few classes per client. `column`:
    examples with the same value of a column stay together. `flwr`: a partitioner of flwr-datasets."""
    concentration: Annotated[float, Field(gt=0)] = 0.5
    """For `dirichlet`: the smaller, the fewer classes per client."""
    classes: Count = 2
    """For `pathological`: shards of one class per client."""
    column: Name | None = None
    """For `column`: a column of the data, or `label`. For `flwr`: a column that `options` may name."""
    partitioner: Name | None = None
    """For `flwr`: name of the partitioner, such as ShardPartitioner."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For `flwr`: arguments of the partitioner. `num_partitions` is `clients` by default."""
    shuffle: Annotated[int, Field(ge=0)] | Literal[False] = 42
    """For `flwr`: seed of its FederatedDataset, or false."""

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
    """`sgd` averages (FedAvg, or FedAvgM with momentum); the others are FedAdam, FedYogi and FedAdagrad."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Step size of the server. None: 1 for local training, 0.1 for gradients, 0.03 for FedAdam, FedYogi, FedAdagrad."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of `sgd`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment, for FedOpt."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the second moment, for FedAdam and FedYogi."""
    tau: Annotated[float, Field(gt=0)] = 1e-3
    """Constant in the denominator, for FedOpt."""
    weights: Literal["examples", "uniform", "angles"] = "examples"
    """Weights of the mean: numbers of examples, equal, or by angles (FedAdp)."""
    corrected: bool = False
    """Correct the moments for their start at zero, as Adam does and FedAdam does not. For `adam`."""

    @model_serializer(mode="wrap")
    def _without_later_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the later setting where it is not set, so that runs from before it keep their hash."""
        return {key: value for key, value in written(self).items() if key != "corrected" or value}

    def build(self, local: bool) -> Server:
        """Return the server for clients that train locally, or send gradients."""
        usual = 0.03 if self.optimiser != "sgd" else 1.0 if local else 0.1
        lr = usual if self.lr is None else self.lr
        betas = self.beta1, self.beta2
        return Server(self.optimiser, lr, self.momentum, betas, self.tau, self.weights, self.corrected)


class Rounds(Section):
    """Rounds of federated training: clients, local training, and the server."""

    clients: Count = 10
    """Number of clients."""
    rounds: Count
    """Number of rounds."""
    partition: PartitionConfig = PartitionConfig()
    """How the training images are shared among the clients."""
    local: LocalConfig | None = None
    """Local training. None: one gradient per round (FedSGD)."""
    batch: Count | None = None
    """Examples per gradient where there is no local training. None: all examples of the client."""
    trainable: Annotated[list[Name], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent, such as `["head.*"]`. None: all."""
    server: ServerConfig = ServerConfig()
    """How the server uses the updates."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round."""
    absent: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a chosen client does not answer."""


class PaceConfig(Section):
    """A change of the step size during the training."""

    after: Count
    """Number of rounds with the earlier step size."""
    times: Annotated[float, Field(gt=0)]
    """Factor on the first step size: `local.lr`, or the step size of the server where clients send gradients."""


class TrainConfig(Rounds):
    """A training: every defence with every seed, and the same data in one place for comparison."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its directory is `runs/NAME`."""
    data: TrainDataConfig
    """The images."""
    model: ModelConfig
    """The model."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of its examples that each client keeps apart for the validation loss."""
    patience: Count | None = None
    """Stop after this many rounds without a lower mean validation loss. None: train all rounds."""
    pace: list[PaceConfig] = []
    """Changes of the step size; each counts until the next one."""
    evaluation_noise: bool = False
    """Draw the noise of bottlenecks (PRECODE, CVB) for validation and test losses and accuracies too, as published
    programs do. False: the mean takes its place."""
    defences: Annotated[list[Name], Field(min_length=1)] = ["none"]
    """Defences, or a paper's table: `PAPER/TABLE`."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    """Seeds; every defence is trained with every seed."""
    central: bool = False
    """Also train, undefended, with all data at one client: shows what federation costs."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ of the reported ε. Choose it well below one over the number of examples."""
    together: Together = "auto"
    """Compute the clients of a round in groups: `auto` where it is faster, true wherever possible, or false. It changes
    only rounding."""
    precision: Literal["float32", "float64"] = "float32"
    """Floating-point precision."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"
    """cpu, cuda, cuda:1 or mps."""

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, value: Any) -> Any:
        return with_tokenizer(value)

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
        plain = self.model_dump(mode="json")
        if not self.evaluation_noise:
            del plain["evaluation_noise"]  # trainings from before this setting keep their hash
        return plain

    @property
    def growing(self) -> tuple[str, ...]:
        """Settings that may grow, or be turned on, without making another run."""
        return ("defences", "seeds", "central")

    def digest(self) -> str:
        """Hash the settings that rounds depend on: a longer training continues a shorter one, for any delta."""
        left_out = {*self.growing, *FREE}
        return digest({key: value for key, value in self.resolved().items() if key not in left_out})
