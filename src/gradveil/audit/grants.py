"""Side information of an attack, granted by name; and what a malicious server sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Infer, Knowledge, Known, Neutral, Optimise, Sample
from gradveil.attacks.protocol import Active, Attack, Persistent, traits
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import Truth, plain_name
from gradveil.client import Client, layer_statistics
from gradveil.core.errors import fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.core.user_code import users
from gradveil.federated.model_inspection import inspect

_WAYS: dict[type, str] = {Known: "known", Optimise: "optimise", Sample: "sample", Infer: "infer", Neutral: "neutral"}
_LABELS = {"given": "known", "joint": "optimise", "idlg": "infer", "unique": "infer", "restore": "infer"}


def grant(
    experiment: Experiment, attack: Attack, simulated_client: Client, params: Tensors, truth: Truth
) -> tuple[Knowledge, list[str], list[str]]:
    """Grant an attack what its protocol says it knows; list all grants in words, and name those that are secrets.

    `params` are those of the round that it looks at. Labels, public images, and the range of the data are part of the
    stated threat model: what only the client knows (random tensors, statistics of the batch) is a secret, and makes
    the result an upper bound.
    """
    own = simulated_client.noise_spec(params, first(truth))
    secret = {name: value for name, value in truth.noise.items() if plain_name(name) in own}
    secret |= _statistics(attack, simulated_client, params, truth)
    pinned = simulated_client.intermediates(params)
    grants: list[str] = []
    secrets: list[str] = []
    tensors: dict[str, How] = {}
    targets: Tensor | None = None
    if told(attack)["targets"] == "known":
        targets = truth.raw.targets
        grants.append("targets: the true labels")
    for pattern, way in attack.knowledge.items():
        if pattern in ("targets", "public"):
            continue
        if isinstance(way, Known) and way.value is None:
            matching = [name for name in secret if fnmatchcase(plain_name(name), pattern)]
            read_off = [name for name in pinned if any(fnmatchcase(name, earlier) for earlier in tensors)]
            aimed = [name for name in pinned if fnmatchcase(name, pattern) and not _any_of_slot(name, pattern)]
            if not matching and any(name not in read_off for name in aimed):
                remedy = "let the attack infer it from what was sent, or recompute it"
                raise fail(f"attack {attack.name}, {pattern}", "is an intermediate, which nobody can be told", remedy)
            for name in matching:
                tensors.setdefault(name, Known(secret[name]))
                grants.append(f"{name}: its true value")
                secrets.append(name)
        else:
            tensors[pattern] = way
    known, told_openly = openly(experiment, attack, simulated_client)
    return replace(known, tensors=tensors, targets=targets), [*grants, *told_openly], secrets


def openly(experiment: Experiment, attack: Attack, simulated_client: Client) -> tuple[Knowledge, list[str]]:
    """Tell an attack what is no secret of the clients: what images look like, and public ones if it asks for them."""
    grants = list[str]()
    public: Batch | None = None
    if "public" in attack.knowledge and experiment.public is not None:
        public = Batch(
            experiment.public.inputs.to(experiment.config.device, experiment.dtype), experiment.public.targets
        )
        some = f"{len(experiment.public)} {experiment.space.words.plural}"
        grants.append(f"public: {some} of the same kind, none of a target client")
    if simulated_client.domain is not None and simulated_client.domain.public is not None and simulated_client.batch:
        grants.append(
            f"public: the {len(simulated_client.domain.public)} images that the defence mixes with, not which it drew"
        )
    return Knowledge(experiment.space, experiment.classes, public=public), grants


def _any_of_slot(name: str, pattern: str) -> bool:
    """Whether a pattern asks for whatever is random in the slot of a name, and not for this name or such names.

    >>> _any_of_slot("send.clip.scale", "*"), _any_of_slot("send.clip.scale", "send.*scale*")
    (True, False)
    """
    return fnmatchcase(f"{name.partition('.')[0]}.", pattern)


def _statistics(attack: Attack, simulated_client: Client, params: Tensors, truth: Truth) -> Tensors:
    """Compute what an attack may be told of the batch that passed through the normalisation layers.

    A simulated client without the batch's defence takes its images as they went in.
    """
    if not any(pattern.startswith("statistics.") for pattern in attack.knowledge):
        return {}
    drawn = truth.last if looks_at_last(attack) else truth.noise
    noise = {name: drawn[name] for name in simulated_client.noise_spec(params, first(truth))}
    batch = truth.raw if attack.simulated_client == "full" else truth.transformed
    with torch.no_grad():
        return {f"statistics.{n}": v for n, v in layer_statistics(simulated_client, params, batch, noise).items()}


def looks_at_last(attack: Attack) -> bool:
    """Whether an attack looks at the last of the observed rounds alone, as those without the setting do."""
    return traits(attack).rounds in ("last", None)


def rounds_used(attack: Attack, watched: int) -> list[int] | None:
    """List the observed rounds that an attack uses, counted from 0; None where an attack of the user's own says none.

    One that looks at a single round may still follow what a client keeps through those before it.
    """
    every = list(range(watched))
    if watched == 1 or isinstance(attack, Persistent):
        return every
    # Our own attacks without the setting solve for the round they see last.
    which = traits(attack).rounds or ("" if users(attack) else "last")
    return {"first": every[:1], "last": every[-1:], "all": every}.get(which)


def first(truth: Truth) -> Batch:
    """Return the first target client's batch: one that has the shapes of all."""
    return Batch(truth.raw.inputs[0], truth.raw.targets[0])


def told(attack: Attack) -> dict[str, str]:
    """Say in one word how an attack knows each named tensor, the labels first."""
    ways = {pattern: _WAYS[type(way)] for pattern, way in attack.knowledge.items()}
    return {"targets": _LABELS.get(str(traits(attack).labels), "neutral"), **ways}


def ways(attack: Attack, client: Client, batch: Batch) -> dict[str, str]:
    """Say in one word how an attack knows each random tensor of a client's model or batch, "" where it says none."""
    names = {plain_name(name): "" for name in client.noise_spec(client.params(), batch)}
    return {
        name: next((_WAYS[type(way)] for pattern, way in attack.knowledge.items() if fnmatchcase(name, pattern)), "")
        for name in names
        if name.startswith(("model.", "batch."))
    }


def received(experiment: Experiment, attack: Attack, client: Client, seed: int) -> Client:
    """Return the client after it took the model that this attacker sends; a curious one sends the honest model."""
    if not isinstance(attack, Active):
        return client
    knowledge, _ = openly(experiment, attack, client)
    made: Any = attack.craft(client, knowledge, Key(seed, (Stream.ATTACK,)).child(Stream.CRAFT))
    if not isinstance(made, Client):
        what = f"craft() returned {'nothing' if made is None else type(made).__name__}"
        raise fail(f"attack {attack.name}", what, "return the client: dataclasses.replace(client, model=...)")
    return made


def resent(experiment: Experiment, attack: Attack, client: Client) -> Callable[[int], Tensors] | None:
    """Return what says which parameters the server sends in a later round, if it changes them anew; None if not."""
    if not isinstance(attack, Persistent):
        return None
    knowledge, _ = openly(experiment, attack, client)
    return lambda number: attack.resend(client, knowledge, number)


def active_facts(attack: Attack, client: Client) -> dict[str, Any]:
    """Say what was put into the model, and what the guard of a client finds in it; nothing of a curious server."""
    if not isinstance(attack, Active):
        return {}
    received = {**client.params(), **dict(client.model.named_buffers()), **client.buffers}
    found = [f"{finding.family} in {finding.where}" for finding in inspect(client.model, received)]
    return {"planted": attack.planted() or "something that it does not name", "guard": found}
