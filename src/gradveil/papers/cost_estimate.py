"""How long a run of a paper's table takes: from recorded seconds where there are some, else from a cost model.

The model multiplies counts with the seconds of `costs.toml`. An attack costs iterations x restarts x (a constant per
call + images x seconds of the network, and of a generator that is trained); one without iterations costs images x
seconds of the attack. A training costs rounds x images of a round x seconds of the network, and the test after each
round. Processor seconds are divided by the cores that can be busy: one per target client, or one per seed of a
training. Attacks that stop early take less. What other defences took in the same run, by the same attack, corrects the
model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.core.errors import GradveilError
from gradveil.core.formatting import DASH
from gradveil.federated.training_config import TrainConfig
from gradveil.papers.comparison import Measured
from gradveil.papers.table_run import RowRun
from gradveil.runs.pool import cores

START = 1.0
"""Seconds to read the data and to build the network."""
TESTED = 10_000
"""Images on which a training is tested after each round, at most."""
TEST_SHARE = 1 / 3
"""Cost of a test image in relation to a training image: no backward pass."""


@dataclass(frozen=True)
class CostEstimate:
    """Seconds of a table, and how much of it was measured."""

    seconds: float
    runs: int
    recorded: int
    """Runs whose seconds are recorded; the others come from the model."""

    @property
    def text(self) -> str:
        """The time; a tilde marks one that comes from the cost model, in part or whole."""
        mark = "" if self.recorded == self.runs else "~"
        return f"{mark}{rough(self.seconds)}" if self.runs else DASH


def rough(seconds: float) -> str:
    """Write a time span with one unit.

    >>> rough(42), rough(600), rough(9000), rough(400_000)
    ('42 s', '10 min', '2.5 h', '4.6 days')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.0f} s"


def estimate(runs: Iterable[RowRun], measured: Measured, workers: int | None = None) -> CostEstimate:
    """Estimate the time of runs on this machine."""
    every = list(runs)
    known = [_recorded(each, measured, workers) for each in every]
    model = [modelled(each, workers) for each in every]
    ratios: dict[tuple[str, str], list[float]] = {}
    for row, one, guess in zip(every, known, model, strict=True):
        if one is not None:
            ratios.setdefault((row.run, row.attack), []).append(one / guess)
    seconds = [
        one if one is not None else guess * median(ratios.get((row.run, row.attack), [1.0]))
        for row, one, guess in zip(every, known, model, strict=True)
    ]
    return CostEstimate(sum(seconds), len(every), sum(one is not None for one in known))


def _recorded(row: RowRun, measured: Measured, workers: int | None) -> float | None:
    record = measured.get((row.run, row.defence, row.attack))
    if record is None or record.scale != row.scale or record.seconds is None or record.status != "complete":
        return None
    busy = min(workers or cores(), max(record.count, 1))
    return START + record.seconds / busy


def modelled(row: RowRun, workers: int | None = None) -> float:
    """Return the seconds of a run by the cost model."""
    config, known = row.config(), costs()
    network = config.model.name
    busy = workers or cores()
    if isinstance(config, TrainConfig):
        stem = "-cifar-stem" if config.model.options.get("stem") == "cifar" else ""
        per_image = known["train"].get(f"{network}{stem}", known["train"]["other"])
        public = min(config.data.public or 50_000, 50_000)
        every = round(public * (1 - config.validation))
        if config.local is not None:
            images = every * (config.local.epochs or 1)
        else:
            images = config.clients * config.batch if config.batch else every
        tested = min(config.data.gallery or TESTED, TESTED)
        seconds = config.rounds * (images + TEST_SHARE * tested) * per_image * len(config.seeds)
        return START + seconds / min(busy, len(config.seeds))
    images = sum(client.batch or 1 for client in config.client) * config.target_clients
    name = row.attack.partition("(")[0]
    if name in known["closed_form"]:
        seconds = images * known["closed_form"][name]
    else:
        iterations, restarts = _length(row.attack)
        rate = known["attack"].get(network, known["attack"]["other"]) + known["generator"].get(name, 0.0)
        calls = -(-images // known["rows"]) * known["call"]
        each = (calls + images * rate) * known["factor"].get(name, 1)
        seconds = (config.iterations or iterations) * restarts * each
    return START + seconds * len(config.seeds) / min(busy, config.target_clients)


def _length(attack: str) -> tuple[int, int]:
    """Return the iterations and restarts of an attack's own settings."""
    try:
        made: Any = make_attack(attack)
    except GradveilError:
        return 1, 1
    descent = getattr(made, "descent", None)
    return getattr(descent, "iterations", 1), getattr(made, "restarts", 1) or 1


@cache
def costs() -> Mapping[str, Any]:
    """Read the measured seconds of the cost model."""
    return tomllib.loads((files("gradveil.papers") / "costs.toml").read_text("utf-8"))
