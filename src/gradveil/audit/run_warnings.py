"""Warnings about a run: differential privacy that does not hold, and metrics that give no score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from gradveil.audit.experiment import Experiment
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.types import Batch
from gradveil.defences.guarantees import examine
from gradveil.defences.privacy_warnings import one_update, suspicions
from gradveil.metrics import scored
from gradveil.theory.accounting import epsilon


def privacy_facts(experiment: Experiment, client: Client, batch: Batch) -> dict[str, Any]:
    """Say what is proven of a defended client; where the run tells of its training, as epsilons and with warnings."""
    settings = experiment.config.privacy
    training = settings.build() if settings else None
    privacy = examine(client, batch)
    return {
        "guarantee": privacy.promise(training),
        "epsilon": {each.unit: epsilon(each.multiplier, training) for each in privacy.sound if training},
        "mechanisms": [(each.unit, each.multiplier, asdict(one_update(client, batch, each))) for each in privacy.sound],
        "suspicions": [str(problem) for problem in suspicions(client, batch, training)] if training else [],
    }


def privacy_problems(experiment: Experiment) -> Iterator[Problem]:
    """Warn of every client and defence of a run whose differential privacy is void or worthless."""
    config = experiment.config
    training = config.privacy.build() if config.privacy else None
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = experiment.batch(experiment.examples(index, range(1)))
        for i, text in enumerate(experiment.defences):
            try:
                client = experiment.client(index, text, config.seeds[0])
                for p in suspicions(client, Batch(batch.inputs[0], batch.targets[0]), training):
                    yield replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}")
            except GradveilError as error:
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in error.problems)


def metric_problems(experiment: Experiment) -> Iterator[Problem]:
    """Try the metrics of a run on its first examples; warn of those that give no score."""
    batch = experiment.batch(experiment.examples(0, range(1)))
    truth = experiment.space.view(batch.inputs.cpu())
    for name in experiment.config.metrics:
        why = scored(name, 1 - truth, truth)
        if isinstance(why, str):
            yield Problem(f"metrics: {name}", why, "correct it, or leave it out: it gives no scores", "warning")
