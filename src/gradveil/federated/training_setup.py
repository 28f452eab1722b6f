"""Setup of a training: images, device, initial weights, and the federation of each trial."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.client import Client, usual_loss
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import listing, plural
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain, Loss, placed
from gradveil.data import Dataset, Splits, by_flower, dirichlet, grouped, iid, load, located, pathological
from gradveil.defences import Defence, parse
from gradveil.defences.user_defence import faults
from gradveil.federated.engine import ClientShare, Federation
from gradveil.federated.training_config import DataConfig, ModelConfig, ServerConfig, TrainConfig
from gradveil.nn import surgery
from gradveil.nn.check import check
from gradveil.nn.models import build
from gradveil.nn.module_paths import called, count_classes
from gradveil.nn.token_layout import TokenModel
from gradveil.nn.weight_files import misfits, put_weights, read_weights
from gradveil.runs.run_folder import digest


def open_images(
    config: DataConfig,
    data_dir: Path | None,
    gallery: int | None,
    column: str | None = None,
    client_seed: int | None = None,
) -> Splits:
    """Load the data of a run, with `gallery` images of the targets' split (None for all); errors name the data.

    With `client_seed` the targets' images are training images of one client, see `load`.
    """
    try:
        return load(
            config.name,
            size=config.size,
            channels=config.channels,
            normalise=(tuple(config.mean), tuple(config.std)) if config.mean and config.std else config.normalise,
            data_dir=data_dir,
            limit_public=config.public,
            limit_private=gallery,
            image_column=config.image_column,
            label_column=config.label_column,
            column=column,
            columns=config.columns,
            client_seed=client_seed,
            tokenizer=config.tokenizer,
            tokens=config.tokens,
            person=config.person,
        )
    except GradveilError as error:
        raise GradveilError(
            Problem(
                f"data.{p.where}" if p.where.startswith(("columns", "person")) else f"data: {p.where}",
                p.what,
                _COLUMN.sub(r"data.\1", p.remedy),
            )
            for p in error.problems
        ) from error


_COLUMN = re.compile(r"\b((image|label)_column)\b")
"""Arguments of `load` that are settings of a run file."""


def refuse_other_images(started: Mapping[str, str | None], loaded: Mapping[str, str | None]) -> None:
    """Refuse to continue a run with other images than it was started with, see `Dataset.identity`."""
    if started and dict(started) != dict(loaded):
        problem = "has other images or labels here than where the run was started"
        raise fail("data.name", problem, "use the same files on every machine")


def initial_model(
    config: ModelConfig, images: Dataset, seed: int, compared: bool = False
) -> tuple[nn.Module, list[str]]:
    """Build a model for these images with the initial weights of a seed; return it with a list of changes.

    With `compared`, `prepare` compares the model before and after its changes on the first images.
    """
    net = build(
        config.name,
        example=images.space.model_facts(),
        classes=len(images.classes),
        generator=Key(seed, (Stream.MODEL,)).generator(),
        **config.options,
    )
    if not config.prepare:
        return net, []
    batch = Batch(images.inputs[:_COMPARED], images.targets[:_COMPARED])
    try:
        return surgery.prepare(net, batchnorm=config.batchnorm, batch=batch, compare=compared)
    except GradveilError as error:
        raise GradveilError(replace(p, where=f"model: {called(net, p.where)}") for p in error.problems) from None


_COMPARED = 4
"""Number of images on which a model is compared with its prepared copy."""


def device_problems(device: str, precision: str) -> Iterator[Problem]:
    """List the reasons why a run cannot compute on this device."""
    kind, _, number = device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and not count:
        remedy = "choose cpu; a GPU needs its driver and a build of torch with CUDA"
        yield Problem("device", f"'{device}' is not available: torch sees no CUDA device", remedy)
    elif kind == "cuda" and int(number or 0) >= count:
        devices = listing(f"cuda:{index}" for index in range(count))
        yield Problem("device", f"'{device}' is not available: torch sees {devices}", "choose one of them, or cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        yield Problem("device", "'mps' is not available on this machine", "choose cpu")
    if kind == "mps" and precision == "float64":
        yield Problem("precision", "float64 does not exist on mps", "choose float32, or the device cpu")


def use_full_float32(device: str) -> None:
    """Let a GPU convolve float32 numbers as they are: unless told, torch lets it round them to 10 bits (TF32)."""
    if device.startswith("cuda"):
        torch.backends.cudnn.allow_tf32 = False


CENTRAL = "central"
"""Name of the training on all data in one place."""


@dataclass(frozen=True)
class TrainingTrial:
    """One training of a run: a defence with a seed, federated or with all data in one place."""

    defence: str
    seed: int
    central: bool = False

    @property
    def title(self) -> str:
        """The defence, or the name of the central training."""
        return CENTRAL if self.central else self.defence

    @property
    def id(self) -> str:
        """A readable file name that differs between trials."""
        words = re.sub(r"[^A-Za-z0-9]+", "-", self.title).strip("-")[:40]
        return f"{words}-{self.seed}-{digest([self.title, self.seed])[:8]}"


def trials(config: TrainConfig) -> list[TrainingTrial]:
    """List the trainings of a run, the first seed's first."""
    central = [("none", True)] if config.central else []
    kinds = [*central, *((defence, False) for defence in config.defences)]
    return [TrainingTrial(defence, seed, alone) for seed in config.seeds for defence, alone in kinds]


@dataclass(frozen=True)
class TrainingSetting:
    """The config, data and weights that all trainings of a run share."""

    config: TrainConfig
    data: Splits
    weights: Tensors = field(default_factory=dict[str, Tensor])
    """Initial weights, if the run names a file; empty for weights drawn by the seed."""
    model: nn.Module | None = None
    """The caller's model with its weights; None if the run builds one for each seed."""
    defences: Mapping[str, Defence] = field(default_factory=dict[str, Defence])
    """Defences that the caller passes as objects, by name; all others are parsed."""
    loss: Loss | None = None
    """The caller's loss; None for the usual one of the model."""
    note: str = ""
    """What was chosen where the run does not say it, in a sentence."""
    _built: dict[int, nn.Module] = field(default_factory=dict[int, nn.Module], init=False, repr=False, compare=False)
    """The initial models, by seed: drawing and preparing one takes longer than copying it."""

    def __post_init__(self) -> None:
        """Set the process to the run's precision: a worker has a setting of its own."""
        use_full_float32(self.config.device)

    def defence(self, text: str) -> Defence:
        """Return the defence that the run names by this text."""
        return self.defences[text] if text in self.defences else parse(text, own=True)

    def initial(self, seed: int, compared: bool = False) -> nn.Module:
        """Build the undefended model of a seed, or copy the caller's; `compared` as for `initial_model`."""
        if self.model is not None:
            return copy.deepcopy(self.model)
        if compared or seed not in self._built:
            self._built[seed] = initial_model(self.config.model, self.data.public, seed, compared)[0]
        return copy.deepcopy(self._built[seed])

    def federation(self, trial: TrainingTrial) -> Federation:
        """Build one training: the same seed gives every defence the same data, weights and choice of clients."""
        config, key = self.config, Key(trial.seed)
        client = self.defence(trial.defence)(self.plain(trial.seed), key.child(Stream.MODEL))
        client.model.to(config.device, self.dtype)
        # Central training uses the local steps as they are: a server optimiser is part of the federation.
        server = ServerConfig() if trial.central and config.local else config.server
        return Federation(
            client,
            self._shares(trial),
            self._batch(self.data.private),
            server.build(config.local is not None),
            key.child(Stream.TRAINING),
            config.batch,
            1.0 if trial.central else config.participation,
            0.0 if trial.central else config.absent,
            config.patience,
            pace=tuple((entry.after, entry.times) for entry in config.pace),
            evaluation_noise=config.evaluation_noise,
            together=config.together,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The precision of model, data and updates."""
        return torch.float64 if self.config.precision == "float64" else torch.float32

    def plain(self, seed: int) -> Client:
        """Build the undefended client; central training has local batches of the same size as the clients."""
        config, images = self.config, self.data.public
        net = self.initial(seed)
        if self.weights:
            refuse(misfits(net, self.weights, f"model.weights '{config.model.weights}'"))
            put_weights(net, self.weights)
        smallest = min(len(train) for train, _ in self.hands(seed))
        domain = Domain(images.space, count_classes(net, images.inputs[:1], len(images.classes)))
        local = config.local.build(smallest) if config.local else None
        trainable = tuple(config.trainable) if config.trainable else None
        return Client(net, self.loss or usual_loss(net), local=local, trainable=trainable, domain=domain)

    def hands(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Partition the training images: for each client the indices of its training and its validation images."""
        config, images = self.config, self.data.public
        key = Key(seed, (Stream.PARTITION,))
        kind, generator = config.partition, key.generator()
        if kind.kind == "iid":
            parts = iid(len(images), config.clients, generator)
        elif kind.kind == "dirichlet":
            parts = dirichlet(images.targets, config.clients, kind.concentration, generator, at_least=self._at_least())
        elif kind.kind == "column":
            parts = grouped(images.column, config.clients, generator)
        elif kind.kind == "flwr":
            name = kind.partitioner or ""
            parts = by_flower(images, config.clients, name, kind.options, kind.column, kind.shuffle)
        else:
            parts = pathological(images.targets, config.clients, kind.classes, generator)
        return [self._parted(part, key.child(Stream.VALIDATION, i)) for i, part in enumerate(parts)]

    def _shares(self, trial: TrainingTrial) -> list[ClientShare]:
        shares = [self._share(*hand) for hand in self.hands(trial.seed)]
        if not trial.central:
            return shares
        validation = [share.validation for share in shares if share.validation is not None]
        return [ClientShare(_joined([share.train for share in shares]), _joined(validation) if validation else None)]

    def _parted(self, indices: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        held = round(self.config.validation * len(indices))
        if held == len(indices):
            problem = f"leaves a client with {len(indices)} examples none to train on"
            raise fail("validation", f"is {self.config.validation:g} and {problem}", "lower it, or take fewer clients")
        order = torch.randperm(len(indices), generator=key.generator())
        return indices[order[held:].sort().values], indices[order[:held].sort().values]

    def _share(self, train_on: Tensor, keep: Tensor) -> ClientShare:
        images = self.data.public
        return ClientShare(
            self._batch(images.subset(train_on)), self._batch(images.subset(keep)) if len(keep) else None
        )

    def within_data(self) -> TrainingSetting:
        """Train among fewer clients where the run does not say how many, and a step would take more than each has."""
        config, there, local = self.config, len(self.data.public), self.config.local
        if "clients" in config.model_fields_set or config.partition.kind != "iid":
            return self
        step = (local.batch if local else config.batch) or 1
        for count in range(config.clients, 0, -1):
            held = there // count
            if held - round(config.validation * held) < step:
                continue
            words = self.data.public.space.words
            told = (
                f"'{config.data.name}' has {plural(there, words.noun)} to train on, and a step of a client takes {step}"
            )
            note = f"{plural(count, 'client')} instead of {config.clients}: {told}"
            fewer = replace(self, config=config.model_copy(update={"clients": count}), note=note)
            return fewer if count < config.clients else self
        return self

    def _at_least(self) -> int:
        local = self.config.local
        wanted = (local.batch or 1) if local else 1
        return max(2, round(wanted / (1 - self.config.validation)) + 1)

    def _batch(self, images: Dataset) -> Batch:
        return Batch(placed(images.inputs, self.config.device, self.dtype), images.targets.to(self.config.device))


def open_setting(
    config: TrainConfig, data_dir: Path | None = None, checked: bool = True, model_checked: bool = False
) -> TrainingSetting:
    """Load the data and check everything a run needs; raise with every problem at once.

    Workers skip the checks (`checked=False`), which were done before they were started; a run on the data and model of
    another skips the model's (`model_checked=True`).
    """
    refuse(list(device_problems(config.device, config.precision)))
    data = open_images(config.data, data_dir, config.data.gallery, config.partition.column)
    data = data._replace(public=data.private) if config.data.train_on == "private" else data
    weights = read_weights(located(config.model.weights, data_dir)) if config.model.weights else {}
    setting = TrainingSetting(config, data, weights).within_data()
    refuse(list(setting_problems(setting, model_checked)) if checked else [])
    return setting


_ADAPTIVE = ("adam", "yogi", "adagrad")
_COUNTS_FOR = {
    "partition": {
        "concentration": ("dirichlet",),
        "classes": ("pathological",),
        "column": ("column", "flwr"),
        "partitioner": ("flwr",),
        "options": ("flwr",),
        "shuffle": ("flwr",),
    },
    "server": {"beta1": _ADAPTIVE, "beta2": _ADAPTIVE[:2], "tau": _ADAPTIVE, "corrected": _ADAPTIVE[:1]},
}
"""Settings that have an effect only for some kinds of their table."""


def _without_effect(config: TrainConfig) -> Iterator[Problem]:
    """Report settings that were made and have no effect."""
    for section, decides, chosen in (
        (config.partition, "partition.kind", config.partition.kind),
        (config.server, "server.optimiser", config.server.optimiser),
    ):
        table = decides.partition(".")[0]
        for key, kinds in _COUNTS_FOR[table].items():
            if key in section.model_fields_set and chosen not in kinds:
                problem = f"has no effect with {decides} '{chosen}': it is for {listing(kinds)}"
                yield Problem(f"{table}.{key}", problem, f"set {decides} = '{kinds[0]}', or remove it")
    if config.partition.column is not None and config.data.train_on == "private":
        problem = "is read from the auxiliary images, and clients train on the private ones"
        yield Problem("partition.column", problem, "remove it, or data.train_on")
    if config.batch is not None and config.local is not None:
        problem = "has no effect with local training: it is for one gradient per round"
        yield Problem("batch", problem, "set local.batch, or remove it")


def setting_problems(setting: TrainingSetting, model_checked: bool = False) -> Iterator[Problem]:
    """Check everything a run needs, and yield each problem; `model_checked` leaves the model itself out."""
    config, images = setting.config, setting.data.public
    yield from _without_effect(config)
    if not images.task:
        yield Problem("data.name", f"the labels of '{config.data.name}' mean nothing", "choose data with a task")
        return
    try:
        most = max(len(train) for train, _ in setting.hands(config.seeds[0]))
        least = min(len(train) for train, _ in setting.hands(config.seeds[0]))
        if config.local is not None and (config.local.batch or 1) > least:
            who = f"the smallest of {plural(config.clients, 'client')} has {plural(least, 'example')}"
            remedy = f"make it at most {least}, or give each more: fewer than {config.clients} clients"
            yield Problem("local.batch", f"is {config.local.batch}, and {who}", remedy)
            return
        if config.batch is not None and config.batch > most:
            problem = f"is {config.batch}, and the client with the most has {most} examples to train on"
            yield Problem("batch", problem, "lower it, or remove it: a gradient then uses all examples of a client")
        setting.initial(config.seeds[0], compared=not model_checked)
        plain = setting.plain(config.seeds[0])
        plain.trained()
        if isinstance(plain.model, TokenModel) and plain.model.layout.predicts_words:
            problem = "predicts words, and a training compares how many examples get their class"
            remedy = "choose a classifier, such as small-encoder; an audit without a training takes language models"
            yield Problem("model.name", problem, remedy)
            return
    except GradveilError as error:
        yield from (replace(p, where=p.where.removeprefix("client.")) for p in error.problems)
        return
    for i, trial in enumerate(trials(config.model_copy(update={"seeds": config.seeds[:1]}))):
        where = CENTRAL if trial.central else f"defences[{i - config.central}] '{trial.defence}'"
        try:
            federation = setting.federation(trial)
            smallest = min(federation.shares, key=lambda share: len(share.train.targets)).train
            few = Batch(smallest.inputs[:2], smallest.targets[:2])
            refuse(list(faults(setting.defence(trial.defence), federation.client, few)))
            federation.client.noise_spec(federation.client.params(), smallest)
            if i == 0 and not model_checked:
                model = plain.model.to(config.device, setting.dtype)
                limits, classes = images.space.bounds(few.inputs), len(images.classes)
                problems = check(model, few, federation.client.loss, bounds=limits, classes=classes)
                yield from (_of_model(problem, model, config) for problem in problems)
        except GradveilError as error:
            yield from (Problem(f"{where}: {p.where}", p.what, p.remedy) for p in error.problems)


def _of_model(problem: Problem, model: nn.Module, config: TrainConfig) -> Problem:
    """Name the model in a problem, and offer `model.prepare` where it is the fix."""
    hint = "; or let it be done: --set model.prepare=true"
    hint = hint if surgery.is_named_in(problem.remedy) and not config.model.prepare else ""
    return replace(problem, where=f"model: {called(model, problem.where)}", remedy=problem.remedy + hint)


def _joined(batches: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))
