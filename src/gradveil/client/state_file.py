"""A client's state on disk: residuals, moments and momentum from round to round.

One safetensors file a client. Its metadata describe the client that the state belongs to, all that its update is made
of, and hold a digest of the tensors: the residual of one defence put into another, or a step's moments into those of a
gradient, would be garbage that no shape betrays.

What may change in the course of a training may change here: weights, buffers, examples, the loss, and what local
training is like (step size, length, batches), but not whether there is any, nor its optimiser.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.client.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.private_files import unreadable, write_private
from gradveil.core.tree import Tensors

KIND, VERSION = "gradveil client state", "2"
"""What a file of a client's state says of itself, and the version of its form."""
_ACCIDENTAL = re.compile(r" at 0x[0-9a-fA-F]+|(?<=\d)\.0(?![\d\w])")
"""What differs between equal settings: where something lies in memory, and how a whole number is written."""
_ANEW = "give the file that this client wrote, or let it start again: client.init(params)"


def save_state(file: Path | str, client: Client, state: Mapping[str, Tensor]) -> None:
    """Write the state of a client; the file is whole or not there, and only its owner may read it.

    State that is not this client's (other names, shapes or types than those of `init`), or not finite, is refused.
    """
    remedy = "give the state that this client's update returned"
    refuse([Problem("state", what, remedy) for what in (*_misfit(client, state), *_not_finite(state))])
    held = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    said = {"kind": KIND, "version": VERSION, "digest": _digest(held), "client": json.dumps(_described(client))}
    write_private(Path(file), save(held, metadata=said))


def load_state(file: Path | str, client: Client) -> Tensors:
    """Read the state of a client; a file that is damaged, foreign or another client's is refused with every reason."""
    said, held = _read(Path(file))
    if said.get("kind") != KIND:
        raise fail(str(file), f"is no {KIND}", _ANEW)
    if said.get("version") != VERSION:
        what = f"has version {said.get('version')} of the format, and version {VERSION} can be read"
        raise fail(str(file), what, "read it with the Gradveil that wrote it, or let the client start again")
    if said.get("digest") != _digest(held):
        raise fail(str(file), "is damaged: its tensors are not those that were written", _ANEW)
    other = list(_differences(_parsed(Path(file), said), _described(client))) or _misfit(client, held)
    other = other or _not_finite(held)
    refuse([Problem(str(file), what, _ANEW) for what in other])
    params = client.params()
    device = next(iter(params.values())).device
    # In the client's own order: sums over tensors have to round as they did before.
    return {name: held[name].to(device) for name in client.init(params)}


def _read(file: Path) -> tuple[dict[str, str], Tensors]:
    try:
        opened: Any = safe_open(file, framework="pt")
        with opened as held:
            return held.metadata() or {}, {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise fail(str(file), "is missing", _ANEW) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except SafetensorError as error:
        raise fail(str(file), f"is cut off, or no safetensors file: {error}", _ANEW) from error


def _described(client: Client) -> dict[str, Any]:
    """Describe what a state belongs to: the parameters and modules of the model, every slot, the members of a sum."""
    params = {name: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for name, p in client.params().items()}
    modules = {
        path or "the model": _ACCIDENTAL.sub("", f"{type(module).__name__}({module.extra_repr()})")
        for path, module in cast("Iterable[tuple[str, nn.Module]]", client.model.named_modules())
    }
    local = f"local steps of {client.local.optimiser}" if client.local else "one gradient"
    slots = {name: _ACCIDENTAL.sub("", repr(getattr(client, name))) for name in ("batch", "step", "send")}
    return {"params": params, "modules": modules, "local": local, **slots, "members": client.members}


def _parsed(file: Path, said: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(said.get("client", ""))
        parts = {name: dict(found[name]) for name in ("params", "modules")}
        return {**parts, **{name: found[name] for name in _PLAIN}}
    except (ValueError, KeyError, TypeError) as error:
        raise fail(str(file), "is damaged: it does not say whose state it is", _ANEW) from error


_PLAIN = {
    "batch": "another defence: batch",
    "step": "another defence: step",
    "send": "another defence: send",
    "local": "another kind of update: it",
    "members": "another sum of clients: members",
}
"""How each part of a description is called that is told whole."""


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Say how the client who wrote a state differs from the one who reads it."""
    for kind in ("params", "modules"):
        theirs, ours = there[kind], here[kind]
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if names:
            first, called = names[0], {"params": "parameters"}.get(kind, kind)
            many = f"{len(names)} {called} differ, the first '{first}'" if len(names) > 1 else f"'{first}' differs"
            yield (
                f"belongs to another model: of {len(theirs)} {called} there and {len(ours)} here {many}: "
                f"{theirs.get(first, 'none')} there, {ours.get(first, 'none')} here"
            )
    for name, called in _PLAIN.items():
        if there[name] != here[name]:
            yield f"belongs to {called} is {there[name]} there, {here[name]} here"


def _misfit(client: Client, state: Mapping[str, Tensor]) -> list[str]:
    """Say which tensors are not those of the client's state."""
    wanted = {name: (value.dtype, value.shape) for name, value in client.init(client.params()).items()}
    given = {name: (value.dtype, value.shape) for name, value in state.items()}
    names = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
    return [
        f"has '{name}' as {_shown(given.get(name))}, where {_shown(wanted.get(name))} is expected" for name in names
    ]


def _not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Say which tensors would make every later update NaN."""
    bad = {name: int((~value.isfinite()).sum()) for name, value in state.items()}
    return [f"has '{name}' with {count} values that are not finite" for name, count in bad.items() if count]


def _shown(kind: Any) -> str:
    return f"{str(kind[0]).removeprefix('torch.')} {list(kind[1])}" if kind else "nothing"


def _digest(held: Tensors) -> str:
    return hashlib.sha256(save(held)).hexdigest()
