"""Updates that clients of a training sent, recorded on disk for attacks.

    DIR/recorded.json                              kind and format version of the directory
    DIR/models/<hash>.safetensors                  tensors that a server sent, once for all clients that trained on them
    DIR/round-<r>-client-<name>-<hash>.safetensors one update as it was sent, with a JSON of facts in its metadata

An update's file is written after the file of the model that it names. Each is written completely or not at all, and
only its owner can read it. Private examples are stored only with `truth=True`.
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
"""Kind and format version in a record's files; other versions are refused."""
RECORD = "recorded.json"
"""The file that marks a directory of recorded updates."""
_MODELS = "models"
_SENT = "sent"
_AGAIN = "record it again, or remove the file"
Sends = Literal["gradient", "difference"]
"""Meaning of an update: a gradient, or the parameters before local training minus those after."""
_SENDS = Choice(get_args(Sends))


class Facts(Section):
    """Facts about one recorded update, without its tensors."""

    kind: Literal["gradveil record"] = KIND
    version: Literal[2] = VERSION
    run: str = ""
    """The training that it belongs to, in a directory with several."""
    round: Annotated[int, Field(ge=0)]
    client: str
    """Name of the client that sent it."""
    examples: Count | None = None
    """Number of examples that it was computed from; None if unknown."""
    sends: Sends
    defence: str | None = None
    """The client's configured defence, as text; None if unknown."""
    local: LocalConfig | None = None
    """The client's local training; None for one gradient, or if unknown."""
    tensors: tuple[str, ...]
    """Names of the tensors in the update, whose encoding has only a digest of them."""
    model: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of the received model."""
    digest: str
    """Hash of the file's own tensors."""


@dataclass(frozen=True)
class Recorded:
    """One update as a client sent it, with the model that it was computed from."""

    facts: Facts
    received: Tensors
    """Tensors that the server sent: parameters, and possibly buffers."""
    update: Tensors
    """The update, decoded."""
    sent: bytes
    """The update as sent, encoded by `gradveil.wire`, with only a digest of the layout of `update`."""
    messages: Tensors = field(default_factory=dict[str, Tensor])
    """Public messages of the round."""
    truth: Batch | None = None
    """The private examples, if the recorder stored them."""


@dataclass(frozen=True)
class UpdateRecorder:
    """Writes clients' updates into a directory, from any training loop and from several processes at once.

    `run`, `defence`, `local` and `sends` describe the clients' configuration. `rounds` and `clients` choose the
    recorded updates, None for all: each update takes as much space as the model.
    """

    folder: Path
    run: str = ""
    defence: str | None = None
    local: LocalConfig | None = None
    sends: Sends = "gradient"
    truth: bool = False
    """Also store the private examples, so that an audit can score reconstructions."""
    rounds: Collection[int] | None = (1,)
    clients: Collection[str] | None = None

    def __post_init__(self) -> None:
        """Refuse settings that would fail at the first update, or record other updates than intended."""
        problems = _SENDS.problems("record.sends", self.sends)
        for name, value, kind, wanted in (
            ("rounds", self.rounds, int, "rounds=(1,)"),
            ("clients", self.clients, str, "clients=('3',)"),
        ):
            listed = isinstance(value, Collection) and not isinstance(value, str | bytes)
            if value is not None and not (listed and all(isinstance(item, kind) for item in value)):
                remedy = f"list them, as in {wanted}, or set None for all"
                problems.append(Problem(f"record.{name}", f"is {value!r}", remedy))
        refuse(problems)

    def ready(self) -> None:
        """Create the directory if it does not exist; refuse one with other files."""
        try:
            self._ready()
        except OSError as error:
            remedy = "give the right to read and write there, or choose another folder for the record"
            raise fail(str(self.folder), f"cannot be used: {error.strerror}", remedy) from error

    def _ready(self) -> None:
        folder, mark = self.folder, self.folder / RECORD
        if not mark.is_file():
            names = {child.name for child in folder.iterdir()} if folder.is_dir() else set[str]()
            foreign = folder.exists() and (not folder.is_dir() or any(".tmp-" not in name for name in names))
            if foreign and not mark.is_file():  # the mark is written first: another process may have begun just now
                raise fail(str(folder), "is there and no record of updates", "choose another folder for the record")
            _make(folder)
            write_json(mark, {"kind": KIND, "version": VERSION})
        _marked(folder)
        _make(folder / _MODELS)

    def wants(self, number: int, client: str) -> bool:
        """Return whether this client's update in this round is recorded."""
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
        """Record one update, encoded or as tensors, and return its file; None if the update is not wanted.

        `tensors` names the tensors of the received model in encoded bytes, if not all; bytes have only a digest.
        An update of the same run, round and client is replaced: rounds are repeated after a kill.
        """
        if not self.wants(number, client):
            return None
        names = (tensors or received) if isinstance(update, bytes) else update
        known = Layout.of({name: received[name] for name in names if name in received})
        if not isinstance(update, bytes):
            refuse(known.differences(Layout.of(update)))
        encoded = update if isinstance(update, bytes) else encode(update, nonfinite="keep")
        inspect(encoded, known)
        self.ready()
        model = fingerprint(_owned(received))
        model_file = self.folder / _MODELS / f"{model}.safetensors"
        if not model_file.is_file():
            write_private(
                model_file, save(_owned(received), {"gradveil": json.dumps({"kind": KIND, "version": VERSION})})
            )
        held = {_SENT: torch.frombuffer(bytearray(encoded), dtype=torch.uint8), **under("messages", messages or {})}
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
        file = self.folder / _name(facts)
        write_private(file, save(held, {"gradveil": facts.model_dump_json()}))
        return file


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise fail(str(folder), f"cannot be made: {error.strerror}", "choose another folder") from error


def _owned(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy to the CPU: safetensors refuses views of one storage."""
    return {n: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}


def _name(facts: Facts) -> str:
    client = re.sub(r"[^A-Za-z0-9]+", "-", facts.client).strip("-")[:40]
    suffix = hashlib.sha256(json.dumps([facts.run, facts.round, facts.client]).encode()).hexdigest()[:8]
    return f"round-{facts.round}-client-{client}-{suffix}.safetensors"


def read_recorded(
    folder: Path,
    runs: Collection[str] | None = None,
    rounds: Collection[int] | None = None,
    clients: Collection[str] | None = None,
) -> list[Recorded]:
    """Read the recorded updates of these runs, rounds and clients, in that order; raise for all damaged files at once.

    Files are not trusted: their form, their hashes, and the fit of an update to its model are checked.
    """
    _marked(folder)
    problems: list[Problem] = []
    models: dict[str, Tensors] = {}
    chosen: list[Recorded] = []
    stored: list[Facts] = []
    for file in sorted(folder.glob("round-*.safetensors")):
        try:
            facts, tensors = _read(file)
            stored.append(facts)
            wanted = ((runs, facts.run), (rounds, facts.round), (clients, facts.client))
            if all(choice is None or value in choice for choice, value in wanted):
                if facts.model not in models:
                    models[facts.model] = _read_model(folder / _MODELS / f"{facts.model}.safetensors", facts.model)
                chosen.append(_checked(file, facts, tensors, models[facts.model]))
        except GradveilError as error:
            problems += error.problems
    refuse(problems)
    if not chosen:
        first = ", ".join(f"round {facts.round} of client {_shown(facts.client)}" for facts in stored[:8])
        problem = f"has none of the requested updates; its first are: {first}" if stored else "is empty"
        raise fail(str(folder), problem, "choose others, or record some: gradveil train --record DIR")
    return sorted(chosen, key=lambda item: (item.facts.run, item.facts.round, _natural(item.facts.client)))


def _marked(folder: Path) -> None:
    """Refuse a directory that is no record, or one of another version."""
    if not (folder / RECORD).is_file():
        remedy = "give the folder that was recorded into: gradveil train --record DIR, or the Flower mod's"
        raise fail(str(folder), f"is no record of updates (it has no {RECORD})", remedy)
    content = read_json(folder / RECORD, "put a copy of the file back")
    kind, version = (content.get("kind"), content.get("version")) if isinstance(content, dict) else (None, None)
    if kind != KIND or version != VERSION:
        problem = (
            f"is {_shown(str(kind))}, version {_shown(str(version))}; this program reads {KIND}, version {VERSION}"
        )
        raise fail(str(folder / RECORD), problem, "use the version of Gradveil that wrote it")


def _read(file: Path) -> tuple[Facts, Tensors]:
    text, tensors = _opened(file)
    try:
        facts = Facts.model_validate_json(text)
    except ValidationError as error:
        mismatches = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:3]
        )
        raise DamagedError(
            Problem(str(file), f"is no recorded update of version {VERSION}: {mismatches}", _AGAIN)
        ) from error
    if facts.digest != fingerprint(tensors):
        raise DamagedError(Problem(str(file), "is damaged: its tensors are not those that were written", _AGAIN))
    return facts, tensors


def _read_model(file: Path, name: str) -> Tensors:
    _, tensors = _opened(file)
    if fingerprint(tensors) != name:
        raise DamagedError(Problem(str(file), "is damaged: its tensors are not those that were written", _AGAIN))
    return tensors


def _opened(file: Path) -> tuple[str, Tensors]:
    try:
        opened: Any = safe_open(file, "pt")
        with opened as held:
            text = (held.metadata() or {}).get("gradveil", "")
            return text, {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DamagedError(Problem(str(file), "is missing", _AGAIN)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except SafetensorError as error:
        raise DamagedError(Problem(str(file), f"is damaged: {error}", _AGAIN)) from error


def _checked(file: Path, facts: Facts, tensors: Tensors, received: Tensors) -> Recorded:
    """Build a record, after checking that the update fits the model that it names."""
    problems = [
        Problem(f"{file}, received {_shown(name)}", "has values that are not finite", "leave this record out")
        for name, value in received.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    held = tensors.get(_SENT)
    if held is None or held.dtype != torch.uint8 or held.ndim != 1:
        raise DamagedError([*problems, Problem(str(file), "holds no encoded update", _AGAIN)])
    sent, update = held.numpy().tobytes(), dict[str, Tensor]()
    try:
        update = decode(sent, Layout.of({name: received[name] for name in facts.tensors if name in received}))
    except GradveilError as error:
        problems += [Problem(f"{file}, {p.where}", p.what, p.remedy) for p in error.problems]
    truth = select(tensors, "truth")
    problems += [Problem(f"{file}, truth", problem, _AGAIN) for problem in _truth_problems(truth, facts)]
    refuse(problems)
    examples = Batch(truth["inputs"], truth["targets"]) if truth else None
    return Recorded(facts, received, update, sent, select(tensors, "messages"), examples)


def _truth_problems(truth: Mapping[str, Tensor], facts: Facts) -> list[str]:
    if not truth:
        return []
    if truth.keys() != {"inputs", "targets"}:
        return [f"holds {', '.join(map(_shown, truth))}, not inputs and targets"]
    inputs, targets = truth["inputs"], truth["targets"]
    pictures, others = inputs.ndim == 4 and inputs.is_floating_point(), inputs.ndim == 2  # rows, or numbers of tokens
    problems = [] if pictures or others else [f"has inputs {inputs.dtype} {inputs.shape}"]
    if inputs.ndim and (len(inputs) != facts.examples or tuple(targets.shape) != (len(inputs),)):
        problems.append(f"has {len(inputs)} inputs, targets {tuple(targets.shape)}, and {facts.examples} examples")
    return problems


def _shown(name: str) -> str:
    """Escape control characters of an untrusted name, and shorten it."""
    text = repr(name)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def _natural(name: str) -> tuple[int, int, str]:
    """Return a sort key by which client 10 comes after client 9."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
