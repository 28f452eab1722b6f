"""The differential privacy of what a run audits: promises for its records, and warnings for `check` and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gradveil.audit.scene import Scene
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.types import Batch
from gradveil.core.words import number
from gradveil.defences.lint import suspicions
from gradveil.defences.privacy import NOTHING, examine
from gradveil.theory.accounting import epsilon


def privacy_facts(scene: Scene, client: Client, batch: Batch) -> dict[str, Any]:
    """Say what is proven of a defended client; where the run tells of its training, as epsilons and with warnings."""
    settings = scene.config.privacy
    training = settings.build() if settings else None
    privacy = examine(client, batch)
    sound = () if training is None else privacy.sound
    return {
        "guarantee": privacy.promise(training),
        "epsilon": {each.unit: epsilon(each.multiplier, training) for each in sound if training},
        "suspicions": [str(problem) for problem in suspicions(client, batch, training)] if training else [],
    }


def proven(info: Mapping[str, Any]) -> str:
    """Say in a few words what is proven of a cell's defence: of the planned training, or else of the one audited.

    >>> proven({"epsilon": {"example": 1.8282}}), proven({"guarantee": "no formal guarantee: 'a' looks ..."})
    ('epsilon 1.83 of each example', 'no formal guarantee')
    >>> proven({"epsilon": {"client": 8800112.3}})
    'epsilon 8.8e+06 of each client'
    """
    epsilons = info.get("epsilon") or (info.get("training") or {}).get("epsilon") or {}
    # Digits of a number that promises nothing would look like precision.
    said = {unit: number(value) if value < 1e4 else f"{value:.2g}" for unit, value in epsilons.items()}
    found = [f"epsilon {value} of each {unit}" for unit, value in said.items()]
    if found:
        return ", ".join(found)
    told = str(info.get("guarantee") or "none")
    return NOTHING if told == "none" or told.startswith(NOTHING) else told


def privacy_problems(scene: Scene) -> Iterator[Problem]:
    """Warn of every client and defence of a run whose differential privacy is void or worthless."""
    config = scene.config
    training = config.privacy.build() if config.privacy else None
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = scene.batch(scene.examples(index, range(1)))
        for i, text in enumerate(scene.defences):
            try:
                client = scene.client(index, text, config.seeds[0])
                for p in suspicions(client, Batch(batch.inputs[0], batch.targets[0]), training):
                    yield replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}")
            except GradveilError as error:
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in error.problems)
