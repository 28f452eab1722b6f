"""The experiment of an audit: private images, model and client. The only place that knows the ground truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks.protocol import Attack
from gradveil.audit.attack_selection import UNDEFENDED
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.baselines import Guessing
from gradveil.audit.sources import Source, TrainingSource
from gradveil.client import Client, usual_loss
from gradveil.core.chain import Chain
from gradveil.core.errors import fail, refuse
from gradveil.core.noise import Key
from gradveil.core.space import Space
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain, Loss, placed
from gradveil.data import Dataset
from gradveil.defences import Defence, parse
from gradveil.federated.training_setup import TrainingSetting, use_full_float32
from gradveil.federated.training_state import Standing
from gradveil.nn.module_paths import count_classes
from gradveil.nn.weight_files import put_weights

_ABSENT: Mapping[str, Defence] = {UNDEFENDED: parse(UNDEFENDED)}
"""Defences that a run need not ask for: its control has none."""


@dataclass(frozen=True)
class Experiment:
    """Everything that the trials of a run share."""

    config: RunConfig
    private: Dataset
    public: Dataset | None
    model: Callable[[int], nn.Module]
    """seed -> the undefended model with its initial weights."""
    defences: Mapping[str, Defence]
    attacks: Mapping[str, Attack]
    loss: Loss | None = None
    """The caller's loss; None for the usual one of the model."""
    facts: tuple[str, ...] = field(default=())
    """What every attack is told beyond the protocol, each named in the records."""
    prepared: tuple[str, ...] = ()
    """What was changed in the model so that it can be audited."""
    source: Source = field(default_factory=Source)
    """Whose updates are attacked: of simulated clients, of a training's, or recorded ones."""
    weights: Tensors = field(default_factory=dict[str, Tensor])
    """Trained parameters: of the undefended model, or of a defended one that has more; empty for initial ones."""
    cost: TrainingSetting | None = None
    """The trainings that measure what each defence costs in accuracy; None where it is not measured, or by `source`."""
    unfit: Mapping[tuple[int, str, str], str] = field(default_factory=dict[tuple[int, str, str], str])
    """(client, defence, attack) -> why the attack does not apply there: such trials are told, and not attacked."""
    expanded: frozenset[str] = frozenset()
    """The attacks of the configuration that stand for `adaptive` or `malicious`, and were not named one by one."""
    until_broken: bool = False
    """Whether searches are left out where a closed form breaks the defence: of runs whose attacks nobody named."""

    def __post_init__(self) -> None:
        """Set the process to the run's precision: a worker has an experiment of its own."""
        use_full_float32(self.config.device)

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
        # A defence before which others speak may need more images: it may come, and changes no trial that is there.
        needed = None if gallery is None else max(gallery, self.config.images_needed)
        return self.source.images(self.public, self.private, needed)

    def following(self, folder: Path) -> Experiment:
        """Return the experiment with the folder of the trainings that it attacks, if it attacks any."""
        source = self.source
        return replace(self, source=replace(source, folder=folder)) if isinstance(source, TrainingSource) else self

    def defence(self, text: str) -> Defence:
        """Look up a defence of the run, or that of its control."""
        return self.defences[text] if text in self.defences else _ABSENT[text]

    def client(self, index: int, defence: str, seed: int, standing: Standing | None = None) -> Client:
        """Build a defended client, on the run's device and in its precision; `standing` says what it has learned."""
        defended = self.defence(defence)(self.undefended(index, seed), Key(seed, (Stream.MODEL,)))
        put_weights(defended.model, standing.params if standing else self.weights)
        defended.model.to(self.config.device, self.dtype)
        after = any(slot is not None and slot.needs_public for slot in (defended.step, defended.send))
        stages = [stage for slot in (defended.step, defended.send) if isinstance(slot, Chain) for _, stage in slot]
        refuse(
            [each for stage in stages if stage.needs for each in self.space.unmet(f"defence {defence}", stage.needs)]
        )
        if self.public is None and after:
            raise fail("data", "has no public images, to which this defence fits its noise", "choose data that has")
        if self.public is not None and (after or any(transform.needs_public for transform in defended.batch)):
            public, labels = placed(self.public.inputs, self.config.device, self.dtype), self.public.targets
            domain = replace(self.domain, public=public, labels=labels.to(self.config.device))
            return replace(defended, domain=domain)
        return defended

    def undefended(self, index: int, seed: int) -> Client:
        """Build the client without a defence, on the run's device and in its precision."""
        settings = self.config.client[index]
        net = self.model(seed)
        plain = Client(
            net,
            self.loss or usual_loss(net),
            local=settings.local.build(settings.batch) if settings.local else None,
            trainable=tuple(settings.trainable) if settings.trainable else None,
            domain=self.domain,
        )
        put_weights(plain.model, self.weights)
        plain.model.to(self.config.device, self.dtype)
        return replace(plain, members=settings.members)

    @property
    def domain(self) -> Domain:
        """What everybody knows of the examples, and their batch defences ask."""
        return Domain(self.space, self.classes)

    @property
    def space(self) -> Space:
        """What one example is."""
        return self.private.space

    @cached_property
    def guessing(self) -> Guessing | None:
        """What an attacker reaches that only guesses; None without auxiliary data."""
        if self.public is None or len(self.public) < 2:
            return None
        targets = len(set(self.private.targets.tolist()))
        images = max(client.examples for client in self.config.client) * self.config.target_clients
        return Guessing(self.public, self.config.threshold, min(targets, images))

    @cached_property
    def private_guessing(self) -> Guessing | None:
        """What guesses with the other private images reach, for audits without auxiliary data; None for one image."""
        if len(self.private) < 2 or self.config.threshold >= self.space.exactly:
            return None
        return Guessing(self.private, self.config.threshold, len(set(self.private.targets.tolist())))

    @cached_property
    def guessing_trained(self) -> dict[tuple[int, str], Guessing]:
        """The same for what a batch defence makes of images, by client and defence: `score.trained_on` fills it."""
        return {}

    @cached_property
    def leaks(self) -> dict[tuple[Any, ...], tuple[Tensors, str | None]]:
        """What updates tell of the target clients, whoever only looks at them; `audit.trial` fills it."""
        return {}

    @cached_property
    def classes(self) -> int:
        """How many classes there are to who sees the model, which may have more outputs than the data have labels."""
        net = self.model(self.config.seeds[0]).to("cpu", self.dtype)
        return count_classes(net, placed(self.private.inputs[:1], "cpu", self.dtype), len(self.private.classes))

    def examples(self, index: int, numbers: Sequence[int], seed: int | None = None) -> Tensor:
        """Return the places [V, B] of the targets' examples, as a seed deals them; None stands for the run's first."""
        size, first = self.config.client[index].examples, self.config.first_target_client
        dealt = self.config.seeds[0] if seed is None else seed
        return torch.stack([self.source.places(first + number, size, dealt) for number in numbers])

    def batch(self, places: Tensor) -> Batch:
        """Return the examples at these places [V, B] in the model's space."""
        inputs = placed(self.private.inputs[places], self.config.device, self.dtype)
        return Batch(inputs, self.private.targets[places].to(self.config.device))

    def views(self, inputs: Tensor) -> Tensor:
        """Turn what a model takes into what people see, on the CPU."""
        return self.space.view(placed(inputs.detach(), "cpu", torch.float64))
