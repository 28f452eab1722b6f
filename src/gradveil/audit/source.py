"""Whose updates an audit attacks. Simulated clients here; those of a training and recorded ones say what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.audit.config import RunConfig
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors
from gradveil.data import Dataset
from gradveil.federated.standing import Standing


class Source:
    """Simulated clients who all start from the same weights; the images belong to them in order."""

    simulated: bool = True
    """Whether updates are made here, from images that are at hand."""

    @property
    def scored(self) -> bool:
        """Whether what comes back can be compared with the truth."""
        return True

    def held(self) -> Tensors:
        """Name what results depend on beside the settings, for the hash of a run."""
        return {}

    def images(self, public: Dataset | None, victims: Dataset, needed: int | None) -> dict[str, str | None]:
        """Say what the files hold that public images and so many of the victims' come from."""
        return {"public": public.identity() if public else None, "victims": victims.identity(needed)}

    def received(self, client: Client) -> Tensors:
        """Return what a client is known to have received beside the run's weights, under its model's names."""
        return {}

    def places(self, number: int, size: int, seed: int) -> Tensor:
        """Return the places [B] of a victim's images."""
        return torch.arange(number * size, (number + 1) * size)

    def owner(self, number: int) -> int:
        """Say which client a victim is."""
        return number

    def together(self, numbers: range, first: int) -> Iterator[range]:
        """Divide victims into those that one attack can look at together; `first` is the run's first victim."""
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
        """Say why these victims can't be clients of this kind."""
        yield from ()

    def attack_problems(self, attack: Attack, spec: NoiseSpec) -> Iterator[Problem]:
        """Say why an attack that believes in clients who draw this can't be made on these victims."""
        yield from ()
