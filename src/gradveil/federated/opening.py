"""What audits and trainings open alike: the images, the device, and the model with its initial weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.types import Batch
from gradveil.data import Dataset, Splits, load
from gradveil.federated.config import DataConfig, ModelConfig
from gradveil.nn import surgery
from gradveil.nn.models import build
from gradveil.nn.paths import called


def open_images(config: DataConfig, data_dir: Path | None, gallery: int | None, column: str | None = None) -> Splits:
    """Load the data of a run, `gallery` images of the victims' split (None for all); errors say that it is the data."""
    try:
        return load(
            config.name,
            size=config.size,
            channels=config.channels,
            normalise=(tuple(config.mean), tuple(config.std)) if config.mean and config.std else config.normalise,
            data_dir=data_dir,
            limit_public=config.public,
            limit_victims=gallery,
            image_column=config.image_column,
            label_column=config.label_column,
            column=column,
        )
    except GradveilError as error:
        raise GradveilError(
            Problem(f"data: {p.where}", p.what, _COLUMN.sub(r"data.\1", p.remedy)) for p in error.problems
        ) from error


_COLUMN = re.compile(r"\b((image|label)_column)\b")
"""What `load` calls an argument is a setting of a run file here."""


def refuse_other_images(told: Mapping[str, str | None], here: Mapping[str, str | None]) -> None:
    """Refuse to work for a run on other images than it was started with, see `Dataset.identity`."""
    if told and dict(told) != dict(here):
        what = "stands for other images or labels here than where the run was started"
        raise fail("data.name", what, "give every machine the same files")


def initial_model(
    config: ModelConfig, images: Dataset, seed: int, compared: bool = False
) -> tuple[nn.Module, list[str]]:
    """Build a model for these images with the initial weights of a seed; return it with a list of changes.

    `compared` has `prepare` compare the model before and after its changes, on the first images.
    """
    net = build(
        config.name,
        channels=images.channels,
        size=images.inputs.shape[-1],
        classes=len(images.classes),
        generator=Key(seed, (Stream.MODEL,)).generator(),
        **config.options,
    )
    if not config.prepare:
        return net, []
    batch = Batch(images.inputs[:_COMPARED], images.targets[:_COMPARED]) if compared else None
    try:
        return surgery.prepare(net, batchnorm=config.batchnorm, batch=batch)
    except GradveilError as error:
        raise GradveilError(replace(p, where=f"model: {called(net, p.where)}") for p in error.problems) from None


_COMPARED = 4
"""Images on which a model is compared with its prepared copy."""


def device_problems(device: str, precision: str) -> Iterator[Problem]:
    """Say why a run cannot compute on this device."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        yield Problem(
            "device", f"'{device}' is not there: {found} CUDA devices are seen", "choose cpu, or another number"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        yield Problem("device", "'mps' is not available on this machine", "choose cpu")
    if kind == "mps" and precision == "float64":
        yield Problem("precision", "float64 does not exist on mps", "choose float32, or the device cpu")
