"""Sources of target clients: simulated ones, and those of a training.

The clients of the training are the target clients. They hold the training images, and what a defence keeps from round
to round (residuals, moments) is what those very images left there. Public are the test images alone: an attacker who
knew training images would know somebody's secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.protocol import Active, Attack
from gradveil.audit.attack_selection import UNDEFENDED, has_control, undefended
from gradveil.audit.audit_config import RunConfig
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import listing
from gradveil.core.noise import NoiseSpec
from gradveil.core.private_files import read_json, unreadable
from gradveil.core.tree import Tensors
from gradveil.data import Dataset
from gradveil.federated.training_config import Rounds, TrainConfig, TrainDataConfig
from gradveil.federated.training_run import identity, trial_file
from gradveil.federated.training_setup import TrainingSetting, TrainingTrial, open_setting
from gradveil.federated.training_state import Standing, unpack_standing


class Source:
    """Simulated clients who all start from the same weights; the images belong to them in order."""

    simulated: bool = True
    """Whether updates are made here, from images that are at hand."""

    @property
    def scored(self) -> bool:
        """Whether what comes back can be compared with the truth."""
        return True

    def recorded_defence(self, number: int) -> str | None:
        """Return the defence that a target's update was recorded with; None where none was recorded."""
        return None

    def held(self) -> Tensors:
        """Name what results depend on beside the settings, for the hash of a run."""
        return {}

    def images(self, public: Dataset | None, target_clients: Dataset, needed: int | None) -> dict[str, str | None]:
        """Say what the files hold that public images and so many of the target clients' come from."""
        return {"public": public.identity() if public else None, "target_clients": target_clients.identity(needed)}

    def received(self, client: Client) -> Tensors:
        """Return what a client is known to have received beside the run's weights, under its model's names."""
        return {}

    def places(self, number: int, size: int, seed: int) -> Tensor:
        """Return the places [B] of a target client's images."""
        return torch.arange(number * size, (number + 1) * size)

    def owner(self, number: int) -> int:
        """Say which client a target client is."""
        return number

    def together(self, numbers: range, first: int) -> Iterator[range]:
        """Divide targets into those that one attack can look at together; `first` is the run's first target."""
        yield numbers

    def kept(self, defence: str, seed: int, stage: int | None) -> bytes:
        """Return what a worker has to be sent of where the clients stand."""
        return b""

    def standing(self, content: bytes, defence: str, seed: int) -> Standing | None:
        """Say where the clients stand, from what was sent; None where they start afresh."""
        return None

    def facts(self, defence: str, seed: int, stage: int | None) -> dict[str, Any] | None:
        """Say what there is to tell of the training that came before."""
        return None

    def client_problems(
        self, config: RunConfig, index: int, client: Client, where: str, defence: str
    ) -> Iterator[Problem]:
        """Say why these target clients can't be clients of this kind."""
        yield from ()

    def attack_problems(self, attack: Attack, spec: NoiseSpec) -> Iterator[Problem]:
        """Say why an attack that believes in clients who draw this can't be made on these target clients."""
        yield from ()


_AGAIN = "give the command of the audit again: it trains what is missing"


@dataclass(frozen=True)
class TrainingSource(Source):
    """Every defence's training with every seed, and the images of its clients that are attacked."""

    setting: TrainingSetting
    private: Dataset
    """The images of the clients who are attacked, and others of theirs among which a target client is searched for."""
    hands: dict[int, list[Tensor]]
    """Of each seed and client: the places of its images among these."""
    folder: Path | None = None
    """Where the trainings lie; None while nothing is looked up there."""

    @property
    def public(self) -> Dataset:
        """What an attacker may know of such images: test images, which no client holds."""
        return self.setting.data.private

    def images(self, public: Dataset | None, target_clients: Dataset, needed: int | None) -> dict[str, str | None]:
        """Say what the files hold that clients train on and are tested on: every seed has other targets of these."""
        return self.setting.data.identities()

    def owner(self, number: int) -> int:
        """Say which client a target is: where there are more targets than clients they hold several batches each."""
        return number % self.setting.config.clients

    def places(self, number: int, size: int, seed: int) -> Tensor:
        """Return the places [B] of a target client's images: a batch of those that its client trains on."""
        first = number // self.setting.config.clients * size
        return self.hands[seed][self.owner(number)][first : first + size]

    def kept(self, defence: str, seed: int, stage: int | None) -> bytes:
        """Read where a training stood after so many rounds, for whoever attacks its clients."""
        folder, trial = self._folder(), TrainingTrial(defence, seed)
        file = trial_file(folder, trial, stage or 0)
        try:
            return file.read_bytes()
        except FileNotFoundError as error:
            # It is trained before it is audited: what is missing was never reached, or was removed since.
            told = read_json(folder / "trials" / f"{trial.id}.json", _AGAIN)
            what = f"is missing: the training is {told['status']} after {told['rounds']} rounds"
            raise fail(str(file), what, _AGAIN) from error
        except OSError as error:
            raise unreadable(file, error) from error

    def standing(self, content: bytes, defence: str, seed: int) -> Standing:
        """Take up where a training stood; one that diverged has nothing to attack."""
        own = identity(self.setting, TrainingTrial(defence, seed))
        found = unpack_standing(content, own, f"the training of '{defence}'", self.setting.config.device)
        if found.status == "diverged":
            what = f"diverged in round {len(found.records)}"
            raise fail(f"the training of '{defence}', seed {seed}", what, "lower the learning rates")
        return found

    def facts(self, defence: str, seed: int, stage: int | None) -> dict[str, Any]:
        """Say how good the model was then and at the end, what a round costs on the average, and what is proven."""
        told = read_json(self._folder() / "trials" / f"{TrainingTrial(defence, seed).id}.json", _AGAIN)
        number = stage or 0
        then = told["curve"][number - 1] if number else told["start"]
        costs = ("bytes_up", "bytes_down", "seconds", "client_seconds")
        whole = {key: told[key] for key in (*costs, "guarantee", "epsilon", "delta")}
        good = {"accuracy": then["accuracy"], "loss": then["loss"], "final_accuracy": told["accuracy"]}
        return {"round": number, **good, **whole}

    def client_problems(
        self, config: RunConfig, index: int, client: Client, where: str, defence: str
    ) -> Iterator[Problem]:
        """Say why an audited client cannot take over from one of the training: it has to keep what that one keeps."""
        settings = config.client[index]
        plan = training_config(config)
        if settings.members > 1:
            yield Problem(f"{where}.members", "does not fit a training, whose clients send their own", "leave it out")
        if settings.trainable != plan.trainable:
            own, theirs = (listing(some) if some else "all" for some in (settings.trainable, plan.trainable))
            what = f"is {own}, and clients of the training send {theirs}"
            yield Problem(f"{where}.trainable", what, f"let {where}.trainable and train.trainable say the same")
        ways = plan.local, settings.local
        said = [local and local.model_dump(exclude={"batch", "steps", "epochs"}) for local in ways]
        kept = [name for name in client.init(client.params()) if not name.startswith("kept.")]
        if kept and said[0] != said[1]:
            what = "keeps something from round to round, and the audited client trains in another way than train's"
            yield Problem(f"{where}.local", f"'{defence}' {what}", f"let {where}.local and train.local say the same")

    def attack_problems(self, attack: Attack, spec: NoiseSpec) -> Iterator[Problem]:
        """Refuse to change models that clients have trained before."""
        if isinstance(attack, Active):
            what = "changes the model before it is sent, and what clients of a training keep is of the model as it was"
            yield Problem("train", what, "leave it out, or audit it without --train (model.weights takes trained ones)")

    def _folder(self) -> Path:
        assert self.folder is not None
        return self.folder


def training_config(config: RunConfig) -> TrainConfig:
    """Write the training of an audit as a run file of `gradveil train` says it: all images train, none is kept apart.

    Where the plan does not say how clients train, or what, they do as the first of the run's clients does. A control
    attacks clients of a training without a defence, and without one no accuracy can be compared.
    """
    plan = config.trainings
    assert plan is not None
    shared = {name: getattr(plan, name) for name in Rounds.model_fields if name in {*plan.model_fields_set, "rounds"}}
    shared |= {name: getattr(plan, name) or getattr(config.client[0], name) for name in ("local", "trainable")}
    data = config.data.model_dump() | {"public": plan.images, "gallery": None}
    same = {name: getattr(config, name) for name in ("name", "model", "seeds", "precision", "device")}
    bare = not any(map(undefended, config.defences)) if config.train is None else has_control(config)
    same["defences"] = [*config.defences, *([UNDEFENDED] if bare else [])]
    if (delta := plan.delta or (config.privacy and config.privacy.delta)) is not None:
        shared["delta"] = delta
    return TrainConfig(**shared, **same, data=TrainDataConfig(**data), validation=0.0)


def training_setting(config: RunConfig, data_dir: Path | None, checked: bool) -> TrainingSetting:
    """Open the training of an audit; what is wrong with it is told by its place in the audit's run file."""
    table = "cost" if config.train is None else "train"
    try:
        return open_setting(training_config(config), data_dir, checked)
    except GradveilError as error:
        raise GradveilError(
            replace(p, where=f"{table}.{p.where}") if re.split(r"\W", p.where)[0] in Rounds.model_fields else p
            for p in error.problems
        ) from error


def cost_setting(config: RunConfig, data_dir: Path | None, checked: bool) -> TrainingSetting | None:
    """Open the trainings that measure accuracy next to an audit; None where it has none, or attacks their clients."""
    if config.cost is None or config.train is not None:
        return None
    try:
        return training_setting(config, data_dir, checked)
    except GradveilError as error:
        aside = "; or leave accuracies out: --set cost="
        raise GradveilError(replace(p, remedy=p.remedy + aside) for p in error.problems) from error


def training_of(setting: TrainingSetting, config: RunConfig, speakers: int) -> TrainingSource:
    """Deal the images as the training does, and keep those of the target clients and of who speaks before a round."""
    hands = {seed: [hand for hand, _ in setting.hands(seed)] for seed in config.seeds}
    people = config.first_target_client + config.target_clients + speakers
    turns, size = -(-people // len(hands[config.seeds[0]])), max(client.examples for client in config.client)
    refuse(list(_too_few(hands, config, people, turns * size)))
    wanted = {seed: [hand[: turns * size] for hand in dealt] for seed, dealt in hands.items()}
    needed = torch.cat([hand for dealt in wanted.values() for hand in dealt]).unique()
    images = setting.data.public
    rest = torch.ones(len(images), dtype=torch.bool)
    rest[needed] = False
    more = len(images) if config.data.gallery is None else max(0, config.data.gallery - len(needed))
    chosen = torch.cat([needed, rest.nonzero().flatten()[:more]])
    place = torch.empty(len(images), dtype=torch.long)
    place[chosen] = torch.arange(len(chosen))
    dealt = {seed: [place[hand] for hand in mine] for seed, mine in wanted.items()}
    return TrainingSource(setting, images.subset(chosen), dealt)


def _too_few(hands: dict[int, list[Tensor]], config: RunConfig, people: int, needed: int) -> Iterator[Problem]:
    """Find the client with too few images for its turns as a target client."""
    smallest = min(len(hand) for dealt in hands.values() for hand in dealt)
    if smallest < needed:
        clients = len(hands[config.seeds[0]])
        what = (
            f"{people} target clients, and who speaks before a round, are {clients} clients with {needed} images each;"
        )
        remedy = "lower target clients, first_target_client or client.batch, or raise train.images"
        yield Problem("target_clients", f"{what} the smallest has {smallest}", remedy)
