"""The files of a Flower client: its state, and its last answer.

    <folder>/<identity>/training-<name>     which runs it had, the last one at the end

The name is the client's own. A server that could say it would choose whose residuals it is sent.

    <folder>/<identity>/run-<id>/answer-<round>         what it received and sent (`gradveil.core.private_files`)
    <folder>/<identity>/run-<id>/state-<round>          its state after that (`gradveil.client.state_file`)
    <folder>/<identity>/training-<name>                 which runs are one training, where the app says so
    <folder>/_ledgers/<identity>/<name>                 what differential privacy it has spent (`federated.ledger`)

Flower's own `Context.state` does not survive the end of a SuperNode. The state's file is written last: a round counts
as answered once it is there, whole. Everything is readable by its owner only, the folders that are made for it too.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ConfigRecord, Context, MetricRecord
from torch import Tensor

from gradveil.client import Client, load_state, save_state
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Address, Key
from gradveil.core.private_files import (
    DamagedError,
    locked,
    make_private,
    read_json,
    seal,
    sync,
    unreadable,
    unseal,
    write_json,
    write_private,
)
from gradveil.core.secure_noise import SecretKey
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, select, under
from gradveil.federated.privacy_ledger import FOLDER as DEFAULT
from gradveil.federated.privacy_ledger import file_name, place
from gradveil.integrations.flower.flower_records import Question, Told

LOG = logging.getLogger("flwr.gradveil")
"""Flower's console shows what is written here."""

KIND, VERSION = "gradveil training", 1
"""What a training's file says of itself, and the version of its form."""
_RUN = re.compile(r"run-[0-9]+")


def named(training: str) -> str:
    """Check a training's name: it is part of a file's."""
    return file_name("training", training)


def continued(home: Path, training: str, run: str, *, gone: bool = False) -> Path | None:
    """Enter a run as the last of its training; return the state that the runs before have left, if any.

    A run that another one has followed is refused: it would go on with a state that is no longer the client's. One
    whose own folder is `gone` goes on without what it has left there, and the log warns of it.
    """
    file = home / f"training-{named(training)}"
    runs = _runs(file) if file.exists() else []
    if run in runs[:-1]:
        what = f"is over: training '{training}' has gone on in {runs[-1]}"
        raise fail(run, what, "stop it, or give the other run's training another name")
    if run in runs and gone:
        LOG.warning("%s is missing, where training '%s' had its state: what was there is lost", home / run, training)
    if run not in runs:
        runs.append(run)
        write_json(file, {"kind": KIND, "version": VERSION, "runs": runs})
    if states(home / run):
        return None
    for before in reversed(runs[:-1]):
        if not (home / before).is_dir():
            remedy = f"put it back, or remove {file}: the training then starts with an empty state"
            raise fail(str(home / before), f"is missing, where training '{training}' has its state", remedy)
        if left := states(home / before):
            return home / before / f"state-{max(left)}"
    return None


def states(folder: Path) -> list[int]:
    """List the rounds after which a run has left a state."""
    return [int(file.name.removeprefix("state-")) for file in folder.glob("state-*") if "." not in file.name]


def _runs(file: Path) -> list[str]:
    remedy = "put a copy back, or remove it: the training then starts with an empty state"
    said: Any = read_json(file, remedy)
    told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    runs: Any = told.get("runs")
    form = (told.get("kind"), told.get("version"))
    if form != (KIND, VERSION) or not isinstance(runs, list) or not runs:
        raise DamagedError(Problem(str(file), f"is no {KIND} of version {VERSION}", remedy))
    found = [str(run) for run in cast("list[Any]", runs)]
    # A name leads to a folder beside this file, and nowhere else.
    if not all(_RUN.fullmatch(run) for run in found) or len(set(found)) < len(found):
        raise DamagedError(Problem(str(file), "names no runs, or one twice", remedy))
    return found


IDENTITY, FOLDER = "gradveil-identity", "gradveil-folder"
"""Keys of a SuperNode's `--node-config`: its name, which has to stay the same, and where it keeps its files."""
_TRUST = "ask who runs the server: two answers to one round give away more than one"


@dataclass(frozen=True)
class Answer:
    """What was received and sent in one round."""

    received: Tensors
    sent: bytes
    told: Told


class Memory:
    """One client's files of one run. Use `opened`, which holds them for this process alone."""

    def __init__(self, folder: Path, ledger: Path | None, to_create: str, before: Path | None = None) -> None:
        """Look at what there is; `before` is the state that an earlier run of the training has left."""
        self.folder = folder
        self._before = before
        self.last = max(states(folder), default=0)
        """The last round that was answered; 0 before the first."""
        self.ledger = ledger
        """Where the privacy is counted that was spent, if its owner has made it; None for a run without a name."""
        self.to_create = to_create
        """The command that makes the ledger."""

    @property
    def fresh(self) -> bool:
        """Whether nothing has been answered, neither in this run nor in one that it continues."""
        return not self.last and self._before is None

    def key(self, number: int, own: Key | None) -> Address:
        """Draw a new secret for the noise of an answer; or address a round's noise below `own`, which is no secret."""
        if own is None:
            return SecretKey()
        if self._before is not None:
            remedy = "leave the key or the training's name out: without a key every answer has noise of its own"
            raise fail("key", "gives this run the noise of an earlier one of the training", remedy)
        return own.child(Stream.ROUND, number)

    def repeated(self, question: Question) -> Answer | None:
        """Return what was sent, where the last round is asked again; an older one, or another model, is refused."""
        if question.number > self.last:
            return None
        if question.number < self.last:
            raise fail("message", f"asks for round {question.number}, and {self.last} has been answered", _TRUST)
        before = _read_answer(self.folder / f"answer-{self.last}", f"wait for round {self.last + 1}")
        same = before.received.keys() == question.received.keys() and all(
            value.dtype == (now := question.received[name]).dtype and torch.equal(value, now)
            for name, value in before.received.items()
        )
        if not same:
            raise fail("message", f"asks for round {self.last} again, with another model than before", _TRUST)
        return before

    def previous(self, number: int) -> tuple[Answer, int] | None:
        """Return what was received and sent before round `number`, and how many rounds ago; None before the first.

        That may have been in the run before. How far that run went on without this client nobody knows here: rounds are
        those of this run.
        """
        remedy = "put a copy of it back, or let the guard ignore"
        if self.last:
            file, rounds = self.folder / f"answer-{self.last}", number - self.last
            return (_read_answer(file, remedy), rounds) if rounds > 0 else None
        if self._before is None:
            return None
        return _read_answer(self._before.with_name(self._before.name.replace("state-", "answer-")), remedy), number

    def state(self, client: Client, params: Tensors) -> Tensors:
        """Return the client's state: after its last round, here or in the run before, or before its first."""
        file = self.folder / f"state-{self.last}" if self.last else self._before
        if file is not None and not self.last:
            LOG.info("goes on with the state of an earlier run: %s", file)
        return client.init(params) if file is None else load_state(file, client)

    def keep(
        self,
        question: Question,
        sent: bytes,
        told: Told,
        client: Client,
        state: Mapping[str, Tensor],
    ) -> None:
        """Write what this round leaves behind, and remove what the last one did."""
        own = {name: value.contiguous() for name, value in under("received", question.received).items()}
        own["sent"] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        write_private(self.folder / f"answer-{question.number}", seal(own, {"told": _write_told(told)}))
        save_state(self.folder / f"state-{question.number}", client, state)
        sync(self.folder)
        for kind in ("answer", "state"):
            (self.folder / f"{kind}-{self.last}").unlink(missing_ok=True)
        self.last = question.number


def _read_answer(file: Path, remedy: str) -> Answer:
    try:
        found, said = unseal(file.read_bytes(), str(file), remedy)
        return Answer(select(found, "received"), bytes(found["sent"].numpy()), _read_told(said["told"]))
    except FileNotFoundError as error:
        raise fail(str(file), "is missing", remedy) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise fail(str(file), f"is no answer: {error}", remedy) from error


@contextmanager
def opened(context: Context, folder: Path | str | None, training: str | None = None) -> Generator[Memory]:
    """Open the files of the client that this node is, for this process alone.

    `training` names what several runs belong to; without it each run is for itself.
    """
    folder, name = _folder(context, folder), identity(context)
    if training is not None:
        named(training)
    home = folder / name
    own = home / f"run-{int(context.run_id)}"
    gone = not own.is_dir()
    try:
        make_private(own)
    except OSError as error:
        remedy = f"let the node write there, or name another folder: --node-config '{FOLDER}=\"...\"'"
        raise fail(str(own), f"cannot be made: {error.strerror}", remedy) from error
    with locked(home, f"give every SuperNode a {IDENTITY} of its own"):
        if training is None:
            yield Memory(own, None, "")
        else:
            command = ["gradveil", "ledger", "create", "--identity", name, "--training", training]
            command += ["--folder", str(folder)]
            before = continued(home, training, own.name, gone=gone)
            yield Memory(own, place(folder, name, training), shlex.join(command), before)


def identity(context: Context) -> str:
    """Say who this client is, by what its owner told the SuperNode: its name, else its number among partitions.

    A node's id does not serve: a SuperNode without authentication keys has another one each time it starts.
    """
    config = context.node_config
    if IDENTITY in config:
        return file_name(f"node-config.{IDENTITY}", str(config[IDENTITY]))
    if "partition-id" in config:
        return f"partition-{int(config['partition-id'])}"
    remedy = f"start the SuperNode with --node-config '{IDENTITY}=\"hospital-a\"'"
    raise fail("node-config", "does not say who this client is, so that its state could not be found again", remedy)


def _write_told(told: Told) -> str:
    """Write records as JSON, which has no bytes: theirs are written in hexadecimal, and marked."""
    kinds = {name: [isinstance(values, MetricRecord), dict(values)] for name, values in told.items()}
    return json.dumps(kinds, default=lambda value: {"hex": bytes(value).hex()})


def _read_told(text: str) -> Told:
    kinds = json.loads(text, object_hook=lambda found: bytes.fromhex(found["hex"]) if set(found) == {"hex"} else found)
    return {name: (MetricRecord if numbers else ConfigRecord)(values) for name, (numbers, values) in kinds.items()}


def _folder(context: Context, folder: Path | str | None) -> Path:
    return Path(folder or str(context.node_config.get(FOLDER, DEFAULT))).expanduser()
