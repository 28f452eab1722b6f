"""The scene of an audit: whose images, which model, which client. The only place that knows the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.presets import make_attack
from gradveil.audit.adaptive import attacks_against
from gradveil.audit.config import RunConfig
from gradveil.audit.guessing import Guessing
from gradveil.audit.obstacles import model_problems, obstacles
from gradveil.audit.reader import with_defaults
from gradveil.audit.records import observed_images, open_observed
from gradveil.audit.source import Source
from gradveil.audit.training import training_of, training_setting
from gradveil.audit.undefended import UNDEFENDED
from gradveil.client import Client, cross_entropy, summed
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain, Loss
from gradveil.data import DATASETS, Dataset, located
from gradveil.defences import Defence, parse
from gradveil.federated.opening import device_problems, initial_model, open_images
from gradveil.federated.standing import Standing
from gradveil.nn.paths import called, count_classes
from gradveil.nn.weights import put_weights, read_weights

_ABSENT: Mapping[str, Defence] = {UNDEFENDED: parse(UNDEFENDED)}
"""Defences that a run need not ask for: its control has none."""


@dataclass(frozen=True)
class Scene:
    """Everything that the cells of a run share."""

    config: RunConfig
    victims: Dataset
    public: Dataset | None
    model: Callable[[int], nn.Module]
    """seed -> the undefended model with its initial weights."""
    defences: Mapping[str, Defence]
    attacks: Mapping[str, Attack]
    loss: Loss = cross_entropy
    facts: tuple[str, ...] = field(default=())
    """What every attack is told beyond the protocol, each named in the records."""
    prepared: tuple[str, ...] = ()
    """What was changed in the model so that it can be audited."""
    source: Source = field(default_factory=Source)
    """Whose updates are attacked: of simulated clients, of a training's, or recorded ones."""
    weights: Tensors = field(default_factory=dict[str, Tensor])
    """Trained parameters: of the undefended model, or of a defended one that has more; empty for initial ones."""
    unfit: Mapping[tuple[int, str, str], str] = field(default_factory=dict[tuple[int, str, str], str])
    """(client, defence, attack) -> why the attack does not apply there: such cells are told, and not attacked."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of model, data and attack."""
        return torch.float64 if self.config.precision == "float64" else torch.float32

    @property
    def held(self) -> Tensors:
        """What results depend on beside the settings: trained weights, what was recorded."""
        return {**self.weights, **self.source.held()}

    @property
    def images(self) -> dict[str, str | None]:
        """Say what the files of the data hold, as far as it is attacked or known to attackers."""
        gallery = self.config.data.gallery
        # A defence before which others speak may need more images: it may come, and changes no cell that is there.
        needed = None if gallery is None else max(gallery, self.config.images_needed)
        return self.source.images(self.public, self.victims, needed)

    def client(self, index: int, defence: str, seed: int, standing: Standing | None = None) -> Client:
        """Build a defended client, on the run's device and in its precision; `standing` says what it has learned."""
        chosen = self.defences[defence] if defence in self.defences else _ABSENT[defence]
        defended = chosen(self.undefended(index, seed), Key(seed, (Stream.MODEL,)))
        put_weights(defended.model, standing.params if standing else self.weights)
        defended.model.to(self.config.device, self.dtype)
        after = any(slot is not None and slot.needs_public for slot in (defended.step, defended.send))
        if self.public is None and after:
            raise fail("data", "has no public images, to which this defence fits its noise", "choose data that has")
        if self.public is not None and (after or any(transform.needs_public for transform in defended.batch)):
            public, labels = self.public.inputs.to(self.config.device, self.dtype), self.public.targets
            domain = replace(self.domain, public=public, labels=labels.to(self.config.device))
            return replace(defended, domain=domain)
        return defended

    def undefended(self, index: int, seed: int) -> Client:
        """Build the client without a defence, on the run's device and in its precision."""
        settings = self.config.client[index]
        plain = Client(
            self.model(seed),
            self.loss,
            local=settings.local.build(settings.batch) if settings.local else None,
            trainable=tuple(settings.trainable) if settings.trainable else None,
            domain=self.domain,
        )
        put_weights(plain.model, self.weights)
        plain.model.to(self.config.device, self.dtype)
        return summed(plain, settings.members)

    @property
    def domain(self) -> Domain:
        """What everybody knows of the examples, and their batch defences ask."""
        lower, upper = (bound.to(self.config.device, self.dtype) for bound in self.victims.bounds)
        return Domain(lower, upper, self.classes)

    @cached_property
    def guessing(self) -> Guessing | None:
        """What an attacker reaches that only guesses; None without auxiliary data."""
        if self.public is None or len(self.public) < 2:
            return None
        targets = len(set(self.victims.targets.tolist()))
        images = max(client.examples for client in self.config.client) * self.config.victims
        return Guessing(self.public, self.config.threshold, min(targets, images))

    @cached_property
    def guessing_trained(self) -> dict[tuple[int, str], Guessing]:
        """The same for what a batch defence makes of images, by client and defence; `audit.trained` fills it."""
        return {}

    @cached_property
    def classes(self) -> int:
        """How many classes there are to who sees the model, which may have more outputs than the data have labels."""
        net = self.model(self.config.seeds[0]).to("cpu", self.dtype)
        return count_classes(net, self.victims.inputs[:1].to(self.dtype), len(self.victims.classes))

    def examples(self, index: int, numbers: Sequence[int], seed: int | None = None) -> Tensor:
        """Return the places [V, B] of the victims' examples, as a seed deals them; None stands for the run's first."""
        size, first = self.config.client[index].examples, self.config.first_victim
        dealt = self.config.seeds[0] if seed is None else seed
        return torch.stack([self.source.places(first + number, size, dealt) for number in numbers])

    def batch(self, places: Tensor) -> Batch:
        """Return the examples at these places [V, B] in the model's space."""
        inputs = self.victims.inputs[places].to(self.config.device, self.dtype)
        return Batch(inputs, self.victims.targets[places].to(self.config.device))

    def pixels(self, inputs: Tensor) -> Tensor:
        """Map what a model sees to pixels in [0, 1], on the CPU."""
        return self.victims.denormalise(inputs.detach().cpu().to(torch.float64))


def open_scene(
    config: RunConfig, data_dir: Path | None = None, checked: bool = True, trained: Path | None = None
) -> Scene:
    """Load the data and build what a run needs; refuse with every problem at once.

    A worker leaves the checks out (`checked=False`): they were made before it was started. `trained` is the folder of
    the trainings that the run follows, if it does.
    """
    problems = list(device_problems(config.device, config.precision))
    problems += _bundled_problems(config)
    refuse(problems)
    defences = {text: parse(text, own=True) for text in config.defences}
    weights = read_weights(located(config.model.weights, data_dir)) if config.model.weights else {}
    source, public, victims = _source(config, others(defences.values()), data_dir, checked, trained)

    def model(seed: int) -> nn.Module:
        return initial_model(config.model, victims, seed)[0]

    scene = Scene(
        config,
        victims,
        public,
        model,
        defences,
        _attacks(config, source.scored),
        source=source,
        weights=weights,
    )
    if checked:
        scene = unobstructed(scene)
        net, done = initial_model(config.model, victims, config.seeds[0], compared=True)
        refuse([replace(p, where=f"model: {called(net, p.where)}") for p in model_problems(scene)])
        scene = replace(scene, prepared=tuple(done))
    return scene


def _source(
    config: RunConfig, speaking: int, data_dir: Path | None, checked: bool, trained: Path | None
) -> tuple[Source, Dataset | None, Dataset]:
    """Open what the run's victims are, with public examples and the victims'; so many speak before a round."""
    if config.observed:
        observed = open_observed(config, data_dir)
        return observed, *observed_images(config, data_dir, observed)
    if config.train is not None:
        setting = training_setting(config, data_dir, checked)
        training = training_of(setting, config, speaking, trained)
        return training, training.public.subset(range(len(training.public))[: config.data.public]), training.victims
    images = config.images_needed + speaking * max(client.examples for client in config.client)
    gallery = None if config.data.gallery is None else max(config.data.gallery, images)
    splits = open_images(config.data, data_dir, gallery)
    return Source(), splits.public, splits.victims


def unobstructed(scene: Scene) -> Scene:
    """Refuse what cannot be audited, with every problem at once; note where an attack does not apply."""
    found = obstacles(scene)
    refuse(found.problems)
    return replace(scene, unfit=found.unfit)


def others(defences: Iterable[Defence]) -> int:
    """Count the clients besides the victims who have to be there to speak before a round."""
    return max((defence.speakers() for defence in defences if isinstance(defence, Defence)), default=0)


def _attacks(config: RunConfig, labelled: bool) -> dict[str, Attack]:
    """Build every attack that meets a defence of the run; where nobody knows labels `adaptive` finds them."""
    texts = (text for defence in config.defences for text in attacks_against(config.attacks, defence))
    tuning = config.iterations, config.restarts
    found: dict[str, Attack] = {}
    for text in texts:
        attack = make_attack(with_defaults(text, *tuning), own=True)
        if not labelled and text not in config.attacks and getattr(attack, "labels", None) == "given":
            attack = make_attack(with_defaults(text, *tuning, labels="restore"))
        found[text] = attack
    return found


def _bundled_problems(config: RunConfig) -> Iterator[Problem]:
    entry = DATASETS.get(config.data.name)
    if entry is not None and not entry.task and config.client and any(client.local for client in config.client):
        what = f"the labels of '{config.data.name}' mean nothing, so there is nothing to train locally"
        yield Problem("client.local", what, "leave it out (one gradient), or choose data with a task: digits, faces")
