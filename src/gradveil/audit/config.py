"""What a run file says: the settings of an audit, with their meaning, limits and defaults."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradveil.client import Local

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


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
    public: Count | None = 2000
    """How many public images are read (bundled data are read whole)."""
    gallery: Count | None = 1000
    """How many images of the victims' split are read: the identification metric searches the victim among them."""


class ModelConfig(Section):
    """Which model: a short name or `pkg.module:factory`, and its options."""

    name: Name
    options: dict[str, Any] = Field(default_factory=dict)
    prepare: bool = False
    """Replace what cannot be attacked as it is: BatchNorm in training mode, hidden dropout, in-place operations."""
    batchnorm: Literal["batch_statistics", "frozen", "group"] = "batch_statistics"
    """What `prepare` makes of BatchNorm."""


class LocalConfig(Section):
    """Local training: T optimiser steps instead of one gradient."""

    lr: Annotated[float, Field(gt=0)]
    batch: Count | None = None
    """Examples in each step; None for all that the client has."""
    steps: Count | None = None
    epochs: Count | None = None
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _one_length(self) -> LocalConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs exactly one of steps and epochs")
        return self

    def build(self, examples: int) -> Local:
        """Return the client's local training for this many examples."""
        settings = self.model_dump()
        return Local(**{**settings, "batch": self.batch or examples})


class ClientConfig(Section):
    """One kind of client: how many examples its update is made from, and how it trains."""

    batch: Count = 1
    """Examples of each client."""
    members: Count = 1
    """Clients whose updates are summed before the server sees them; each has `batch` examples."""
    local: LocalConfig | None = None
    trainable: Annotated[list[str], Field(min_length=1)] | None = None
    """Patterns of the parameters that are trained and sent; None for all."""

    @property
    def title(self) -> str:
        """Say in a few words how it trains."""
        summed = f", sum of {self.members}" if self.members > 1 else ""
        if self.local is None:
            return f"gradient{summed}"
        length = f"T={self.local.steps}" if self.local.steps else f"epochs={self.local.epochs}"
        return f"local {length} {self.local.optimiser} lr={self.local.lr:g}{summed}"

    @property
    def examples(self) -> int:
        """Count the examples that one observed update is made from."""
        return self.batch * self.members

    @model_validator(mode="after")
    def _steps_fit(self) -> ClientConfig:
        if self.local and self.local.batch and self.local.batch > self.batch:
            raise ValueError(f"has {self.batch} examples but local.batch takes {self.local.batch} a step")
        return self


class RunConfig(Section):
    """A run: every client, defended by every defence, attacked by every attack, with every seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: DataConfig
    model: ModelConfig
    client: Annotated[list[ClientConfig], Field(min_length=1)] = [ClientConfig()]
    defences: Annotated[list[Name], Field(min_length=1)] = ["none"]
    attacks: Annotated[list[Name], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    victims: Count = 32
    first_victim: Annotated[int, Field(ge=0)] = 0
    threshold: Annotated[float, Field(gt=-1, lt=1)] = 0.5
    """SSIM above which an image counts as recovered."""
    rounds: Count = 1
    """Rounds that the attacker watches. The victims are the clients of one federation, every one in every round, each
    with the same examples; the last round is the one that `attack(rounds=last)` looks at."""
    server_lr: Annotated[float, Field(ge=0)] | None = None
    """What the mean update is multiplied by between rounds; None for 1 (local training) or 0.1 (gradients)."""
    lpips: Literal["alex", "vgg"] | None = None
    """Score LPIPS with this network too (needs the extra `perceptual`); None leaves it out."""
    iterations: Count | None = None
    """Iterations of every attack whose own text does not say it; None for what the attack's authors used."""
    restarts: Count | None = None
    budget: Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*[smh]?\s*$")] | None = None
    """What all attacks on one defence may spend together: victim-iterations (64000) or working time (90s, 10m, 2h)."""
    images: bool = True
    """Keep truths and reconstructions, which are private images; False keeps scores only."""
    precision: Literal["float32", "float64"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = "cpu"

    @model_validator(mode="before")
    @classmethod
    def _one_client(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("client"), dict):
            return {**value, "client": [value["client"]]}
        return value

    @property
    def images_needed(self) -> int:
        """Count the images of the victims' split that the largest client needs."""
        return (self.first_victim + self.victims) * max(client.examples for client in self.client)

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain values."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Hash every setting: two runs with equal digests give the same records."""
        return digest(self.resolved())


def digest(value: Any) -> str:
    """Hash plain values (SHA-256 of their canonical JSON)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
