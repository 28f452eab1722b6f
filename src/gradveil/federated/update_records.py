"""Updates that left the clients of a training, kept on disk for attacks.

    DIR/recorded.json                              what the directory is, and the version of its form
    DIR/models/<hash>.safetensors                  the tensors that a server sent, once for all who trained on them
    DIR/round-<r>-client-<name>-<hash>.safetensors one update as it left, with a JSON of the facts in its metadata

An update's file is written after the model's that it names, each whole or not at all, and readable by the owner only.
Private examples are in it where the recorder was asked to keep them (`truth=True`), and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.private_files import DamagedError, read_json, unreadable, write_json, write_private
from gradveil.core.settings import Choice
from gradveil.core.tree import Tensors, select, under
from gradveil.core.types import Batch
from gradveil.federated.training_config import Count, LocalConfig, Section
from gradveil.nn.weight_files import fingerprint
from gradveil.wire.codec import Layout, decode, encode, inspect

KIND, VERSION = "gradveil record", 2
"""What a record's files say of themselves, and the version of their form; another is refused."""
RECORD = "recorded.json"
"""The file that marks a directory of recorded updates."""
_MODELS = "models"
_SENT = "sent"
_ANEW = "record it again, or remove the file"
Sends = Literal["gradient", "difference"]
"""What an update is: a gradient, or the parameters before local training minus those after."""
_SENDS = Choice(get_args(Sends))


class Facts(Section):
    """What is known of one recorded update beside its tensors."""

    kind: Literal["gradveil record"] = KIND
    version: Literal[2] = VERSION
    run: str = ""
    """Which training it belongs to, where one directory holds several."""
    round: Annotated[int, Field(ge=0)]
    client: str
    """Who sent it."""
    examples: Count | None = None
    """How many examples it was made from; None where nobody said."""
    sends: Sends
    defence: str | None = None
    """What the client was configured to do, in the grammar of defences; None where nobody said."""
    local: LocalConfig | None = None
    """How the client trained; None for one gradient, or where nobody said."""
    tensors: tuple[str, ...]
    """Names of the model's tensors that the update is of: its encoding has only a digest of them."""
    model: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of what the server sent."""
    digest: str
    """Hash of the file's own tensors."""


@dataclass(frozen=True)
class Recorded:
    """One update as it left a client, with what it was made from."""

    facts: Facts
    received: Tensors
    """What the server sent: parameters, and buffers where it sends them."""
    update: Tensors
    """The update, decoded."""
    sent: bytes
    """The update as it left: one block of `federated.wire`, which may have only a digest of the layout of `update`."""
    messages: Tensors = field(default_factory=dict[str, Tensor])
    """Public messages of the round."""
    truth: Batch | None = None
    """The private examples, if the recorder was asked to keep them."""


@dataclass(frozen=True)
class UpdateRecorder:
    """Writes what leaves clients into a directory; any training loop can use it, several processes at once.

    `run`, `defence`, `local` and `sends` say what the clients are configured as. `rounds` and `clients` choose what is
    kept, None for all: a round of a large model takes as much room as the model for each client.
    """

    folder: Path
    run: str = ""
    defence: str | None = None
    local: LocalConfig | None = None
    sends: Sends = "gradient"
    truth: bool = False
    """Keep the private examples too, so that an audit can score what it recovers."""
    rounds: Collection[int] | None = (1,)
    clients: Collection[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what would stop a training when its first update is to be recorded, or record others than is meant."""
        problems = _SENDS.problems("record.sends", self.sends)
        for name, value, kind, wanted in (
            ("rounds", self.rounds, int, "rounds=(1,)"),
            ("clients", self.clients, str, "clients=('3',)"),
        ):
            listed = isinstance(value, Collection) and not isinstance(value, str | bytes)
            if value is not None and not (listed and all(isinstance(one, kind) for one in value)):
                remedy = f"list them, as in {wanted}, or say None for all"
                problems.append(Problem(f"record.{name}", f"is {value!r}", remedy))
        refuse(problems)

    def ready(self) -> None:
        """Make the directory, if it is not there; refuse one that holds other things."""
        try:
            self._ready()
        except OSError as error:
            remedy = "give the right to read and write there, or choose another folder for the record"
            raise fail(str(self.folder), f"cannot be used: {error.strerror}", remedy) from error

    def _ready(self) -> None:
        folder, mark = self.folder, self.folder / RECORD
        if not mark.is_file():
            there = {child.name for child in folder.iterdir()} if folder.is_dir() else set[str]()
            others = folder.exists() and (not folder.is_dir() or {name for name in there if ".tmp-" not in name})
            if others and not mark.is_file():  # the mark is made first: another process may just have begun
                raise fail(str(folder), "is there and no record of updates", "choose another folder for the record")
            _make(folder)
            write_json(mark, {"kind": KIND, "version": VERSION})
        _marked(folder)
        _make(folder / _MODELS)

    def wants(self, number: int, client: str) -> bool:
        """Say whether what this client sends in this round is kept."""
        return (self.rounds is None or number in self.rounds) and (self.clients is None or client in self.clients)

    def write(
        self,
        number: int,
        client: str,
        received: Mapping[str, Tensor],
        update: Mapping[str, Tensor] | bytes,
        examples: int | None = None,
        messages: Mapping[str, Tensor] | None = None,
        truth: Batch | None = None,
        tensors: Collection[str] | None = None,
    ) -> Path | None:
        """Keep one update, given as it left or as tensors, which are then encoded without loss; None if not wanted.

        `tensors` names the tensors of the received model that encoded bytes are of, if not all: bytes hold a digest.
        The same run, round and client again replaces what was there: a round that is repeated after a kill.
        """
        if not self.wants(number, client):
            return None
        names = (tensors or received) if isinstance(update, bytes) else update
        known = Layout.of({name: received[name] for name in names if name in received})
        if not isinstance(update, bytes):
            refuse(known.differences(Layout.of(update)))
        block = update if isinstance(update, bytes) else encode(update, nonfinite="keep")
        inspect(block, known)
        self.ready()
        model = fingerprint(_owned(received))
        file = self.folder / _MODELS / f"{model}.safetensors"
        if not file.is_file():
            write_private(file, save(_owned(received), {"gradveil": json.dumps({"kind": KIND, "version": VERSION})}))
        held = {_SENT: torch.frombuffer(bytearray(block), dtype=torch.uint8), **under("messages", messages or {})}
        if self.truth and truth is not None:
            held |= {"truth.inputs": truth.inputs, "truth.targets": truth.targets}
        held = _owned(held)
        facts = Facts(
            run=self.run,
            round=number,
            client=client,
            examples=examples,
            sends=self.sends,
            defence=self.defence,
            local=self.local,
            tensors=tuple(known),
            model=model,
            digest=fingerprint(held),
        )
        place = self.folder / _name(facts)
        write_private(place, save(held, {"gradveil": facts.model_dump_json()}))
        return place


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise fail(str(folder), f"cannot be made: {error.strerror}", "choose another folder") from error


def _owned(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy to the CPU: views of one storage are not written."""
    return {n: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}


def _name(facts: Facts) -> str:
    said = re.sub(r"[^A-Za-z0-9]+", "-", facts.client).strip("-")[:40]
    own = hashlib.sha256(json.dumps([facts.run, facts.round, facts.client]).encode()).hexdigest()[:8]
    return f"round-{facts.round}-client-{said}-{own}.safetensors"


def read_recorded(
    folder: Path,
    runs: Collection[str] | None = None,
    rounds: Collection[int] | None = None,
    clients: Collection[str] | None = None,
) -> list[Recorded]:
    """Read the recorded updates of these runs, rounds and clients, in that order; refuse with every damaged file.

    Nothing in a file is believed before it was compared: its form, its hashes, the update with the model it names.
    """
    _marked(folder)
    problems: list[Problem] = []
    models: dict[str, Tensors] = {}
    chosen: list[Recorded] = []
    found: list[Facts] = []
    for file in sorted(folder.glob("round-*.safetensors")):
        try:
            facts, tensors = _read(file)
            found.append(facts)
            wanted = ((runs, facts.run), (rounds, facts.round), (clients, facts.client))
            if all(some is None or own in some for some, own in wanted):
                if facts.model not in models:
                    models[facts.model] = _read_model(folder / _MODELS / f"{facts.model}.safetensors", facts.model)
                chosen.append(_checked(file, facts, tensors, models[facts.model]))
        except GradveilError as error:
            problems += error.problems
    refuse(problems)
    if not chosen:
        there = ", ".join(f"round {facts.round} of client {_shown(facts.client)}" for facts in found[:8])
        what = f"holds none of the updates that were asked for; the first there are: {there}" if found else "is empty"
        raise fail(str(folder), what, "choose others, or record some: gradveil train --record DIR")
    return sorted(chosen, key=lambda one: (one.facts.run, one.facts.round, _natural(one.facts.client)))


def _marked(folder: Path) -> None:
    """Refuse a directory that is no record, or one of another version."""
    if not (folder / RECORD).is_file():
        remedy = "give the folder that was recorded into: gradveil train --record DIR, or the Flower mod's"
        raise fail(str(folder), f"is no record of updates (it has no {RECORD})", remedy)
    said = read_json(folder / RECORD, "put a copy of the file back")
    kind, version = (said.get("kind"), said.get("version")) if isinstance(said, dict) else (None, None)
    if kind != KIND or version != VERSION:
        what = f"says {_shown(str(kind))}, version {_shown(str(version))}; this program reads {KIND}, version {VERSION}"
        raise fail(str(folder / RECORD), what, "use the version of Gradveil that wrote it")


def _read(file: Path) -> tuple[Facts, Tensors]:
    said, tensors = _opened(file)
    try:
        facts = Facts.model_validate_json(said)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:3])
        raise DamagedError(Problem(str(file), f"is no recorded update of version {VERSION}: {told}", _ANEW)) from error
    if facts.digest != fingerprint(tensors):
        raise DamagedError(Problem(str(file), "is damaged: its tensors are not those that were written", _ANEW))
    return facts, tensors


def _read_model(file: Path, name: str) -> Tensors:
    _, tensors = _opened(file)
    if fingerprint(tensors) != name:
        raise DamagedError(Problem(str(file), "is damaged: its tensors are not those that were written", _ANEW))
    return tensors


def _opened(file: Path) -> tuple[str, Tensors]:
    try:
        opened: Any = safe_open(file, "pt")
        with opened as held:
            said = (held.metadata() or {}).get("gradveil", "")
            return said, {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DamagedError(Problem(str(file), "is missing", _ANEW)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except SafetensorError as error:
        raise DamagedError(Problem(str(file), f"is damaged: {error}", _ANEW)) from error


def _checked(file: Path, facts: Facts, tensors: Tensors, received: Tensors) -> Recorded:
    """Put a record together, once the update fits the model it says it was made from."""
    problems = [
        Problem(f"{file}, received {_shown(name)}", "has values that are not finite", "leave this record out")
        for name, value in received.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    held = tensors.get(_SENT)
    if held is None or held.dtype != torch.uint8 or held.ndim != 1:
        raise DamagedError([*problems, Problem(str(file), "holds no encoded update", _ANEW)])
    sent, update = held.numpy().tobytes(), dict[str, Tensor]()
    try:
        update = decode(sent, Layout.of({name: received[name] for name in facts.tensors if name in received}))
    except GradveilError as error:
        problems += [Problem(f"{file}, {p.where}", p.what, p.remedy) for p in error.problems]
    truth = select(tensors, "truth")
    problems += [Problem(f"{file}, truth", what, _ANEW) for what in _wrong_truth(truth, facts)]
    refuse(problems)
    kept = Batch(truth["inputs"], truth["targets"]) if truth else None
    return Recorded(facts, received, update, sent, select(tensors, "messages"), kept)


def _wrong_truth(truth: Mapping[str, Tensor], facts: Facts) -> list[str]:
    if not truth:
        return []
    if truth.keys() != {"inputs", "targets"}:
        return [f"holds {', '.join(map(_shown, truth))}, not inputs and targets"]
    inputs, targets = truth["inputs"], truth["targets"]
    wrong = [] if inputs.ndim == 4 and inputs.is_floating_point() else [f"has inputs {inputs.dtype} {inputs.shape}"]
    if inputs.ndim and (len(inputs) != facts.examples or tuple(targets.shape) != (len(inputs),)):
        wrong.append(f"has {len(inputs)} inputs, targets {tuple(targets.shape)}, and {facts.examples} examples")
    return wrong


def _shown(name: str) -> str:
    """Write a stranger's name so that it can do no harm in a terminal."""
    text = repr(name)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def _natural(name: str) -> tuple[int, int, str]:
    """Sort numbers as numbers: client 10 comes after client 9."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
