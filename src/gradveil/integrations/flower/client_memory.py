"""The files of a Flower client: its state, and its last answer.

    <folder>/<identity>/run-<id>/answer-<round>  received model and sent update (`gradveil.core.private_files`)
    <folder>/<identity>/run-<id>/state-<round>   state after that round (`gradveil.client.state_file`)
    <folder>/<identity>/training-<name>          runs of one training, the last one at the end
    <folder>/_ledgers/<identity>/<name>          differential privacy spent (`gradveil.federated.privacy_ledger`)

The client's owner chooses the identity. A server that chose it could choose whose residuals it is sent. Flower's own
`Context.state` does not survive the end of a SuperNode. The state file is written last: a round counts as answered once
that file is complete. All files and folders are readable by their owner only.
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
from gradveil.federated.privacy_ledger import file_name, ledger_file
from gradveil.integrations.flower.flower_records import Question, Records

LOG = logging.getLogger("flwr.gradveil")
"""Logger whose messages Flower's console shows."""

KIND, VERSION = "gradveil training", 1
"""Kind and format version in a training's file."""
_RUN = re.compile(r"run-[0-9]+")


def named(training: str) -> str:
    """Check a training's name, which becomes part of a file name."""
    return file_name("training", training)


def continued(home: Path, training: str, run: str, *, missing: bool = False) -> Path | None:
    """Enter a run as the last of its training; return the state file of the runs before it, if any.

    A run that another one has followed is refused: it would continue with an outdated state. If the run's own folder is
    `missing`, the run continues without the state that was there, and the log has a warning.
    """
    file = home / f"training-{named(training)}"
    runs = _runs(file) if file.exists() else []
    if run in runs[:-1]:
        problem = f"is over: training '{training}' has continued in {runs[-1]}"
        raise fail(run, problem, "stop it, or give the other run's training another name")
    if run in runs and missing:
        LOG.warning("%s is missing: the state of training '%s' in it is lost", home / run, training)
    if run not in runs:
        runs.append(run)
        write_json(file, {"kind": KIND, "version": VERSION, "runs": runs})
    if states(home / run):
        return None
    for before in reversed(runs[:-1]):
        if not (home / before).is_dir():
            remedy = f"put it back, or remove {file}: the training then starts with an empty state"
            raise fail(str(home / before), f"is missing: it holds the state of training '{training}'", remedy)
        if rounds := states(home / before):
            return home / before / f"state-{max(rounds)}"
    return None


def states(folder: Path) -> list[int]:
    """List the rounds after which a run has stored its state."""
    return [int(file.name.removeprefix("state-")) for file in folder.glob("state-*") if "." not in file.name]


def _runs(file: Path) -> list[str]:
    remedy = "put a copy back, or remove it: the training then starts with an empty state"
    content: Any = read_json(file, remedy)
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    entries: Any = fields.get("runs")
    form = (fields.get("kind"), fields.get("version"))
    if form != (KIND, VERSION) or not isinstance(entries, list) or not entries:
        raise DamagedError(Problem(str(file), f"is no {KIND} of version {VERSION}", remedy))
    runs = [str(run) for run in cast("list[Any]", entries)]
    # A name is checked because it becomes a path: it may lead only to a folder next to this file.
    if not all(_RUN.fullmatch(run) for run in runs) or len(set(runs)) < len(runs):
        raise DamagedError(Problem(str(file), "names no runs, or one twice", remedy))
    return runs


IDENTITY, FOLDER = "gradveil-identity", "gradveil-folder"
"""Keys of a SuperNode's `--node-config`: its name, which must stay the same, and the folder of its files."""
_TRUST = "ask the server's operator: two answers to one round reveal more than one"


@dataclass(frozen=True)
class Answer:
    """Received model, sent update and records of one round."""

    received: Tensors
    sent: bytes
    records: Records


class Memory:
    """One client's files of one run. Use `opened`, which locks them for this process."""

    def __init__(self, folder: Path, ledger: Path | None, to_create: str, before: Path | None = None) -> None:
        """Find the last round; `before` is the state file of an earlier run of the training."""
        self.folder = folder
        self._before = before
        self.last = max(states(folder), default=0)
        """The last round that was answered; 0 before the first."""
        self.ledger = ledger
        """Path of the privacy ledger, which its owner creates; None for a run outside of a training."""
        self.to_create = to_create
        """The command that creates the ledger."""

    @property
    def fresh(self) -> bool:
        """Whether no round has been answered, neither in this run nor in one that it continues."""
        return not self.last and self._before is None

    def key(self, number: int, fixed: Key | None) -> Address:
        """Return a new secret for the noise of an answer, or with a fixed key `fixed` the round's address below it."""
        if fixed is None:
            return SecretKey()
        if self._before is not None:
            remedy = "leave the key or the training's name out: without a key every answer has new noise"
            raise fail("key", "repeats the noise of an earlier run of the training", remedy)
        return fixed.child(Stream.ROUND, number)

    def repeated(self, question: Question) -> Answer | None:
        """Return the answer to repeat if the last round is asked again; refuse an older round or another model."""
        if question.number > self.last:
            return None
        if question.number < self.last:
            raise fail("message", f"asks for round {question.number}, but {self.last} has been answered", _TRUST)
        before = _read_answer(self.folder / f"answer-{self.last}", f"wait for round {self.last + 1}")
        same = before.received.keys() == question.received.keys() and all(
            value.dtype == (received := question.received[name]).dtype and torch.equal(value, received)
            for name, value in before.received.items()
        )
        if not same:
            raise fail("message", f"asks for round {self.last} again, with another model than before", _TRUST)
        return before

    def previous(self, number: int) -> tuple[Answer, int] | None:
        """Return the last answer before round `number`, and its distance in rounds; None before the first.

        The answer may be from an earlier run. How long that run continued without this client is not known, so only
        rounds of this run are counted.
        """
        remedy = "put a copy of it back, or set guard='ignore'"
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
            LOG.info("continuing with the state of an earlier run: %s", file)
        return client.init(params) if file is None else load_state(file, client)

    def keep(
        self,
        question: Question,
        sent: bytes,
        records: Records,
        client: Client,
        state: Mapping[str, Tensor],
    ) -> None:
        """Write this round's answer and state, and remove those of the last round."""
        held = {name: value.contiguous() for name, value in under("received", question.received).items()}
        held["sent"] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        write_private(self.folder / f"answer-{question.number}", seal(held, {"told": _write_records(records)}))
        save_state(self.folder / f"state-{question.number}", client, state)
        sync(self.folder)
        for kind in ("answer", "state"):
            (self.folder / f"{kind}-{self.last}").unlink(missing_ok=True)
        self.last = question.number


def _read_answer(file: Path, remedy: str) -> Answer:
    try:
        held, texts = unseal(file.read_bytes(), str(file), remedy)
        return Answer(select(held, "received"), bytes(held["sent"].numpy()), _read_records(texts["told"]))
    except FileNotFoundError as error:
        raise fail(str(file), "is missing", remedy) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise fail(str(file), f"is no answer: {error}", remedy) from error


@contextmanager
def opened(context: Context, folder: Path | str | None, training: str | None = None) -> Generator[Memory]:
    """Open and lock the files of this node's client. Runs with the same `training` share their state."""
    folder, name = Path(folder or str(context.node_config.get(FOLDER, DEFAULT))).expanduser(), identity(context)
    if training is not None:
        named(training)
    home = folder / name
    run = home / f"run-{int(context.run_id)}"
    missing = not run.is_dir()
    try:
        make_private(run)
    except OSError as error:
        remedy = f"let the node write there, or choose another folder: --node-config '{FOLDER}=\"...\"'"
        raise fail(str(run), f"cannot be created: {error.strerror}", remedy) from error
    with locked(home, f"give every SuperNode its own {IDENTITY}"):
        if training is None:
            yield Memory(run, None, "")
        else:
            command = ["gradveil", "ledger", "create", "--identity", name, "--training", training]
            command += ["--folder", str(folder)]
            before = continued(home, training, run.name, missing=missing)
            yield Memory(run, ledger_file(folder, name, training), shlex.join(command), before)


def identity(context: Context) -> str:
    """Return the client's name from its node's configuration, or its partition number.

    A node's id cannot identify a client: a SuperNode without authentication keys gets a new one at each start.
    """
    config = context.node_config
    if IDENTITY in config:
        return file_name(f"node-config.{IDENTITY}", str(config[IDENTITY]))
    if "partition-id" in config:
        return f"partition-{int(config['partition-id'])}"
    remedy = f"start the SuperNode with --node-config '{IDENTITY}=\"hospital-a\"'"
    raise fail("node-config", "does not name this client, so its state could not be found again", remedy)


def _write_records(records: Records) -> str:
    """Write records as JSON, which has no bytes: they are written as {"hex": ...}."""
    kinds = {name: [isinstance(values, MetricRecord), dict(values)] for name, values in records.items()}
    return json.dumps(kinds, default=lambda value: {"hex": bytes(value).hex()})


def _read_records(text: str) -> Records:
    kinds = json.loads(text, object_hook=lambda value: bytes.fromhex(value["hex"]) if set(value) == {"hex"} else value)
    return {name: (MetricRecord if numbers else ConfigRecord)(values) for name, (numbers, values) in kinds.items()}
