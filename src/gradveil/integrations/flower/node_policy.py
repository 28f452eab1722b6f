"""Demands of a SuperNode's operator on the app that runs there, in the node's `--node-config`.

Flower installs the app that a run's submitter ships: defence, guard, epsilon and training name come from there. Each
demand is compared with the app's request before anything is trained; an app that requests less is refused.

    gradveil-require    "dp" (a formal guarantee per example or per client), "example-dp" or "user-dp"
    gradveil-epsilon    the largest `epsilon` that the app may set; an app without a limit is refused
    gradveil-delta      the largest `delta` of that limit (default: 1e-5)
    gradveil-training   the name of the training under which privacy is counted
    gradveil-guard      the mildest policy of the guard: "warn" or "refuse"

This checks apps that use Gradveil. Code that does not call Gradveil is not stopped by it: see
docs/explanation/trust.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Allowed, Choice, collect
from gradveil.core.types import Batch
from gradveil.defences.guarantees import NOTHING, examine
from gradveil.federated.model_inspection import Policy
from gradveil.integrations.flower.client_memory import FOLDER, IDENTITY
from gradveil.integrations.flower.privacy_budget import Limit
from gradveil.theory.accounting import POSITIVE, PROBABILITY

_PREFIX = "gradveil-"
_STRICTNESS = ("ignore", "warn", "refuse")
_UNITS = {"dp": ("example", "client"), "example-dp": ("example",), "user-dp": ("client",)}
_ALLOWED: dict[str, Allowed] = {
    "gradveil-require": Choice(tuple(_UNITS)),
    "gradveil-epsilon": POSITIVE,
    "gradveil-delta": PROBABILITY,
    "gradveil-guard": Choice(_STRICTNESS[1:]),
}
_TRAINING = "gradveil-training"
_KNOWN = {IDENTITY, FOLDER, _TRAINING, *_ALLOWED}
_ASK = "change the app, or the node's configuration"


@dataclass(frozen=True)
class AppRequest:
    """Client, data and privacy settings of an app in one round."""

    client: Client
    batch: Batch
    limit: Limit
    guard: Policy
    training: str | None
    key: Key | None
    folder: Path | str | None
    unprotected: str | None = None
    """Records that the app sends without noise in addition to the update."""


def check_demands(context: Context, request: AppRequest) -> None:
    """Refuse an app that promises less than the node's operator demands."""
    demands = {name: value for name, value in context.node_config.items() if name.startswith(_PREFIX)}
    if not demands.keys() - {IDENTITY, FOLDER}:
        return
    remedy = f"use {', '.join(sorted(_KNOWN))}"
    problems = [Problem(f"node-config.{name}", "is unknown", remedy) for name in sorted(demands.keys() - _KNOWN)]
    checks = ((name, allowed, demands[name]) for name, allowed in _ALLOWED.items() if name in demands)
    refuse([*problems, *collect("node-config", checks)])
    refuse(list(_unmet(demands, request)))


def _unmet(demands: Mapping[str, Any], request: AppRequest) -> Iterator[Problem]:
    """Yield each demand that the app does not meet."""
    if request.key is not None:
        yield Problem("key", "replaces the client's own randomness, and the node has demands", "leave the key out")
    if request.folder is not None:
        problem = "replaces the node's folder, and with it the count of privacy spent"
        yield Problem("folder", problem, f"leave it out: the node's operator sets {FOLDER}")
    if (name := demands.get(_TRAINING)) is not None and request.training != name:
        yield Problem("training", f"is {request.training!r}, and the node demands {name!r}", _ASK)
    if (mildest := demands.get("gradveil-guard")) and _STRICTNESS.index(request.guard) < _STRICTNESS.index(mildest):
        yield Problem("guard", f"is {request.guard!r}, and the node demands {mildest!r}", _ASK)
    if "gradveil-epsilon" in demands or "gradveil-delta" in demands:
        yield from _limit(demands, request.limit)
    if "gradveil-require" in demands or "gradveil-epsilon" in demands:
        yield from _guarantee(str(demands.get("gradveil-require", "dp")), request)


def _limit(demands: Mapping[str, Any], limit: Limit) -> Iterator[Problem]:
    most = demands.get("gradveil-epsilon")
    if limit.epsilon is None or (most is not None and limit.epsilon > most):
        demanded = "a limit" if most is None else f"a limit of at most {most:g}"
        yield Problem("privacy.epsilon", f"is {limit.epsilon}, and the node demands {demanded}", _ASK)
    if limit.delta > (most := demands.get("gradveil-delta", 1e-5)):
        yield Problem("privacy.delta", f"is {limit.delta:g}, and the node demands at most {most:g}", _ASK)


def _guarantee(required: str, request: AppRequest) -> Iterator[Problem]:
    privacy = examine(request.client, request.batch)
    units = {mechanism.unit for mechanism in privacy.sound}
    if request.unprotected is not None or not units & set(_UNITS[required]):
        why = f"{NOTHING}: {request.unprotected}" if request.unprotected is not None else privacy.promise()
        yield Problem("defence", f"does not give the guarantee '{required}' that the node demands ({why})", _ASK)
