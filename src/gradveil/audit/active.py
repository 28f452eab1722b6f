"""The malicious server: what it sends in the place of the honest model, and what a client's guard says of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradveil.attacks.base import Active, Attack, Persistent
from gradveil.audit.granted import openly
from gradveil.audit.scene import Scene
from gradveil.client import Client
from gradveil.core.errors import fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.federated.guard import inspect


def received(scene: Scene, attack: Attack, client: Client, seed: int) -> Client:
    """Return the client after it took the model that this attacker sends; a curious one sends the honest model."""
    if not isinstance(attack, Active):
        return client
    knowledge, _ = openly(scene, attack, client)
    made: Any = attack.craft(client, knowledge, Key(seed, (Stream.ATTACK,)).child(Stream.CRAFT))
    if not isinstance(made, Client):
        what = f"craft() returned {'nothing' if made is None else type(made).__name__}"
        raise fail(f"attack {attack.name}", what, "return the client: dataclasses.replace(client, model=...)")
    return made


def resent(scene: Scene, attack: Attack, client: Client) -> Callable[[int], Tensors] | None:
    """Return what says which parameters the server sends in a later round, if it changes them anew; None if not."""
    if not isinstance(attack, Persistent):
        return None
    knowledge, _ = openly(scene, attack, client)
    return lambda number: attack.resend(client, knowledge, number)


def active_facts(attack: Attack, client: Client) -> dict[str, Any]:
    """Say what was put into the model, and what the guard of a client finds in it; nothing of a curious server."""
    if not isinstance(attack, Active):
        return {}
    received = {**client.params(), **dict(client.model.named_buffers()), **client.buffers}
    found = [f"{finding.family} in {finding.where}" for finding in inspect(client.model, received)]
    return {"planted": attack.planted() or "something that it does not name", "guard": found}
