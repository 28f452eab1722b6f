"""The scene of an audit: whose images, which model, which client. The only place that knows the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Active, Attack, Careful, Prospect
from gradveil.attacks.presets import make_attack
from gradveil.audit.adaptive import attacks_against
from gradveil.audit.config import RunConfig
from gradveil.audit.protocol import declared
from gradveil.audit.reader import with_defaults
from gradveil.audit.records import Observed, observed_images, open_observed, record_problems, withheld
from gradveil.audit.training import Training, client_problems, training_config, training_of
from gradveil.client import Client, cross_entropy, speakers
from gradveil.core.errors import UNFIT, GradveilError, Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain, Loss
from gradveil.data import DATASETS, Dataset, located
from gradveil.defences import Defence, parse
from gradveil.defences.contract import faults
from gradveil.federated.opening import device_problems, initial_model, open_images
from gradveil.federated.setting import open_setting
from gradveil.federated.standing import Standing
from gradveil.nn import surgery
from gradveil.nn.check import check
from gradveil.nn.paths import called, count_classes
from gradveil.nn.weights import misfits, put_weights, read_weights


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
    observed: Observed | None = None
    """Recorded updates to attack; None where the clients are simulated."""
    weights: Tensors = field(default_factory=dict[str, Tensor])
    """Trained parameters: of the undefended model, or of a defended one that has more; empty for initial ones."""
    training: Training | None = None
    """The training whose clients are the victims; None for clients who start from the same weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of model, data and attack."""
        return torch.float64 if self.config.precision == "float64" else torch.float32

    @property
    def held(self) -> Tensors:
        """What results depend on beside the settings: trained weights, what was recorded."""
        return {**self.weights, **(self.observed.held() if self.observed else {})}

    def client(self, index: int, defence: str, seed: int, standing: Standing | None = None) -> Client:
        """Build a defended client, on the run's device and in its precision; `standing` says what it has learned."""
        defended = self.defences[defence](self.undefended(index, seed), Key(seed, ("model",)))
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
            members=settings.members,
            domain=self.domain,
        )
        put_weights(plain.model, self.weights)
        plain.model.to(self.config.device, self.dtype)
        return plain

    @property
    def domain(self) -> Domain:
        """What everybody knows of the examples, and their batch defences ask."""
        lower, upper = (bound.to(self.config.device, self.dtype) for bound in self.victims.bounds)
        return Domain(lower, upper, self.classes)

    @cached_property
    def classes(self) -> int:
        """How many classes there are to who sees the model, which may have more outputs than the data have labels."""
        net = self.model(self.config.seeds[0]).to("cpu", self.dtype)
        return count_classes(net, self.victims.inputs[:1].to(self.dtype), len(self.victims.classes))

    def examples(self, index: int, numbers: Sequence[int], seed: int | None = None) -> Tensor:
        """Return the places [V, B] of the victims' examples: victim i owns examples i B to (i + 1) B.

        In a training a victim owns what its client was dealt, by the seed; None stands for the run's first.
        """
        size = self.config.client[index].examples
        if self.training is not None:
            dealt = self.config.seeds[0] if seed is None else seed
            return torch.stack([self.training.examples(self.config.first_victim + n, size, dealt) for n in numbers])
        first = torch.tensor([self.config.first_victim + number for number in numbers])
        return first[:, None] * size + torch.arange(size)

    def batch(self, places: Tensor) -> Batch:
        """Return the examples at these places [V, B] in the model's space."""
        inputs = self.victims.inputs[places].to(self.config.device, self.dtype)
        return Batch(inputs, self.victims.targets[places].to(self.config.device))

    def pixels(self, inputs: Tensor) -> Tensor:
        """Map what a model sees to pixels in [0, 1], on the CPU."""
        return self.victims.denormalise(inputs.detach().cpu().to(torch.float64))


SMALLEST = 11
"""Pixels a side: SSIM's window."""


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
    speaking, training = others(defences.values()), None
    observed = open_observed(config, data_dir) if config.observed else None
    if observed is not None:
        public, victims = observed_images(config, data_dir, observed)
    elif config.train is None:
        images = config.images_needed + speaking * max(client.examples for client in config.client)
        gallery = None if config.data.gallery is None else max(config.data.gallery, images)
        public, victims = open_images(config.data, data_dir, gallery)
    else:
        setting = open_setting(training_config(config), data_dir, checked)
        training = training_of(setting, config, speaking, trained)
        public, victims = training.public.subset(range(len(training.public))[: config.data.public]), training.victims

    def model(seed: int) -> nn.Module:
        return initial_model(config.model, victims, seed)[0]

    scene = Scene(
        config,
        victims,
        public,
        model,
        defences,
        _attacks(config),
        observed=observed,
        weights=weights,
        training=training,
    )
    if checked:
        # What is wrong whatever the defence is found once for each of them.
        refuse(list(dict.fromkeys(scene_problems(scene))))
        net, done = initial_model(config.model, victims, config.seeds[0])
        refuse([replace(p, where=f"model: {called(net, p.where)}") for p in model_problems(scene)])
        scene = replace(scene, prepared=tuple(done))
    return scene


def others(defences: Iterable[Defence]) -> int:
    """Count the clients besides the victims who have to be there to speak before a round."""
    return max((defence.speakers() for defence in defences if isinstance(defence, Defence)), default=0)


def _attacks(config: RunConfig) -> dict[str, Attack]:
    """Build every attack that meets a defence of the run."""
    texts = (text for defence in config.defences for text in attacks_against(config.attacks, defence))
    tuning = config.iterations, config.restarts
    return {text: make_attack(with_defaults(text, *tuning), own=True) for text in dict.fromkeys(texts)}


def model_problems(scene: Scene) -> list[Problem]:
    """Check the model on the first victim's examples: what would fail in every cell is told once, before the first."""
    settings = scene.config.model
    batch = scene.batch(scene.examples(0, range(1)))
    first = Batch(batch.inputs[0], batch.targets[0])
    model = scene.model(scene.config.seeds[0]).to(scene.config.device, scene.dtype)
    found = check(model, first, scene.loss, bounds=scene.victims.bounds, classes=len(scene.victims.classes))
    hint = "" if settings.prepare else "; or let it be done: --set model.prepare=true"
    return [replace(p, remedy=p.remedy + hint) if surgery.__name__ in p.remedy else p for p in found]


def scene_problems(scene: Scene) -> Iterator[Problem]:
    """Find out before the first cell what would stop a later one: sizes, models, defended clients."""
    config = scene.config
    available = len(scene.victims)
    if min(scene.victims.inputs.shape[-2:]) < SMALLEST:
        what = f"images are {' x '.join(str(side) for side in scene.victims.inputs.shape[-2:])} pixels"
        yield Problem("data.size", f"{what}, and SSIM needs {SMALLEST}", f"resize them to at least {SMALLEST} pixels")
    if config.images_needed > available:
        size = max(client.examples for client in config.client)
        what = f"{config.victims} victims from number {config.first_victim} with {size} examples each need "
        what += f"{config.images_needed} images, '{config.data.name}' has {available}"
        yield Problem(
            "victims", what, f"lower victims, first_victim or client.batch; at most {available // size} victims"
        )
        return
    try:
        scene.model(config.seeds[0])
    except GradveilError as error:
        yield from error.problems
        return
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = scene.batch(scene.examples(index, range(1)))
        first = Batch(batch.inputs[0], batch.targets[0])
        for i, text in enumerate(scene.defences):
            try:
                client = scene.client(index, text, config.seeds[0])
                yield from _weight_problems(scene, client, index)
                if scene.training is not None:
                    yield from client_problems(config, index, client, where)
                client.trained()
                found = list(faults(scene.defences[text], client, first))
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in found)
                if any(p.severity == "error" for p in found):
                    continue
                client.noise_spec(client.params(), first)
                if scene.observed is None:
                    yield from _speaker_problems(scene, index, client, f"defences[{i}] '{text}', {where}")
                else:
                    yield from record_problems(scene.observed, client)
                yield from _attack_problems(scene, index, text, client, where)
            except GradveilError as error:
                yield from (
                    Problem(f"defences[{i}] '{text}', {where}", f"{p.where}: {p.what}", p.remedy)
                    for p in error.problems
                )
            except UNFIT:  # asked what stands in its way, an attack looks at what the model does with images
                if not (found := model_problems(scene)):
                    raise
                yield from (replace(p, where=called(client.model, p.where)) for p in found)
                return


def _weight_problems(scene: Scene, client: Client, index: int) -> Iterator[Problem]:
    """Say why trained weights fit neither this model nor the one without the defence."""
    plain = scene.undefended(index, scene.config.seeds[0]).model
    if scene.weights and misfits(plain, scene.weights, ""):
        yield from misfits(client.model, scene.weights, f"model.weights '{scene.config.model.weights}'")


def _speaker_problems(scene: Scene, index: int, client: Client, where: str) -> Iterator[Problem]:
    """Find out whether there are images for those who speak before a round: they are nobody's victims."""
    config, count = scene.config, speakers(client)
    needed = (config.first_victim + config.victims + count) * config.client[index].examples
    if count and needed > len(scene.victims):
        who = "one other client speaks" if count == 1 else f"{count} other clients speak"
        what = f"{who} before a round: with the victims that takes {needed} images, there are {len(scene.victims)}"
        yield Problem(where, what, "lower victims or client.batch, or let nobody speak (adgp: selection=previous)")


def _active_problems(scene: Scene) -> Iterator[Problem]:
    """Refuse to change models that clients have trained before, or whose updates were recorded."""
    if scene.observed is not None:
        what = "changes the model before it is sent, and these updates were recorded of the model as it was"
        yield Problem("observed", what, "leave it out, or audit a simulated client: without --observed")
    if scene.training is not None:
        what = "changes the model before it is sent, and what clients of a training keep is of the model as it was"
        yield Problem("train", what, "leave it out, or audit it without --train (model.weights takes trained ones)")


def _attack_problems(scene: Scene, index: int, defence: str, client: Client, where: str) -> Iterator[Problem]:
    """Ask the attacks on a defended client what stands in their way."""
    data, config = scene.victims, scene.config
    shape = (data.channels, int(data.inputs.shape[-2]), int(data.inputs.shape[-1]))
    facts = shape, config.client[index].examples, scene.classes, len(scene.public or ())
    for text in attacks_against(config.attacks, defence):
        attack = scene.attacks[text]
        belief = client if attack.belief == "full" else client.undefended_update()
        found = list(declared(attack))
        found += attack.problems(Prospect(belief, *facts)) if isinstance(attack, Careful) and not found else ()
        found += _active_problems(scene) if isinstance(attack, Active) else ()
        if scene.observed is not None:
            first = scene.batch(scene.examples(index, range(1)))
            spec = belief.noise_spec(belief.params(), Batch(first.inputs[0], first.targets[0]))
            found += withheld(attack, spec, scene.observed)
        aside = "" if text in config.attacks else "; or name the attacks that you want, in the place of adaptive"
        for p in found:
            yield Problem(f"attack '{text}' on '{defence}', {where}: {p.where}", p.what, p.remedy + aside)


def _bundled_problems(config: RunConfig) -> Iterator[Problem]:
    entry = DATASETS.get(config.data.name)
    if entry is not None and not entry.task and config.client and any(client.local for client in config.client):
        what = f"the labels of '{config.data.name}' mean nothing, so there is nothing to train locally"
        yield Problem("client.local", what, "leave it out (one gradient), or choose data with a task: digits, faces")
