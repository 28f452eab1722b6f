"""Recorded updates as targets: which of them, their simulated client, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import Known
from gradveil.attacks.protocol import Active, Attack, traits
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.run_file import resolve
from gradveil.audit.sources import Source
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import listing, plural
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.data import Dataset
from gradveil.defences import parse
from gradveil.federated.training_config import UNSEEN
from gradveil.federated.training_setup import open_images
from gradveil.federated.update_records import Recorded, read_recorded
from gradveil.nn.weight_files import is_statistic, misfits, names_in_order, once, only_prefixed

_CHOOSE = 'choose some: --set \'observed.runs=["…"]\', observed.rounds=[1], observed.clients=["…"]'


@dataclass(frozen=True)
class Observed(Source):
    """The recorded updates that an audit attacks: target client i of the run is record i."""

    records: tuple[Recorded, ...]
    simulated = False

    @property
    def scored(self) -> bool:
        """Whether every record holds the private examples, so that what comes back can be scored."""
        return all(record.truth is not None for record in self.records)

    def together(self, numbers: range, first: int) -> Iterator[range]:
        """Divide targets into those that share a round, its model and its messages: an attack sees one of each."""
        start = numbers.start
        for number in numbers:
            one, following = (self.records[first + n] for n in (number, min(number + 1, numbers[-1])))
            same = (one.facts.model, one.facts.round) == (following.facts.model, following.facts.round)
            same = same and _equal(one.messages, following.messages)
            if number == numbers[-1] or not same:
                yield range(start, number + 1)
                start = number + 1

    def recorded_defence(self, number: int) -> str | None:
        """Return the defence that a target's update was recorded with; None where it was not recorded."""
        return self.records[number].facts.defence

    def held(self) -> Tensors:
        """Name what was recorded by its hashes."""
        return {f"{record.facts.digest}.{record.facts.model}": torch.zeros(0) for record in self.records}

    def received(self, client: Client) -> Tensors:
        """Return what was received with the first record."""
        return fitted(self.records[0], client).received

    def client_problems(
        self, config: RunConfig, index: int, client: Client, where: str, defence: str
    ) -> Iterator[Problem]:
        """Say what of the records does not fit the simulated client, each kind of misfit once."""
        told: set[str] = set()
        for record in self.records:
            try:
                fitted(record, client)
            except GradveilError as error:
                fresh = [problem for problem in error.problems if str(problem) not in told]
                told |= {str(problem) for problem in fresh}
                yield from fresh

    def attack_problems(self, attack: Attack, spec: NoiseSpec) -> Iterator[Problem]:
        """Refuse who asks for what no record holds (random values, labels without a truth), or changes the model."""
        if isinstance(attack, Active):
            what = "changes the model before it is sent, and these updates were recorded of the model as it was"
            yield Problem("observed", what, "leave it out, or audit a simulated client: without --observed")
        if traits(attack).labels == "given" and not self.scored:
            what = "is given, and the true labels were not recorded"
            yield Problem("labels", what, "let it find them: labels=restore (or idlg, unique, joint)")
        for pattern, way in attack.knowledge.items():
            asked = isinstance(way, Known) and way.value is None and pattern not in ("targets", "public")
            if asked and (pattern.startswith("statistics.") or any(fnmatchcase(name, pattern) for name in spec)):
                what = "is to be told, and what a client draws or computes in secret is not recorded"
                yield Problem(pattern, what, "choose an attack that samples, optimises or infers it")


def open_observed(config: RunConfig, data_dir: Path | None) -> Observed:
    """Read the records that a run names, from where the command runs or from the data folder."""
    chosen = config.observed
    assert chosen is not None
    folder = Path(chosen.folder).expanduser()
    if not folder.is_dir() and data_dir is not None:
        folder = data_dir / folder
    return Observed(tuple(read_recorded(folder, chosen.runs, chosen.rounds, chosen.clients)))


def settled(config: RunConfig, data_dir: Path | None = None) -> RunConfig:
    """Fill in what a run file leaves to the records: who sends what, from how many examples, with which defence.

    What the run says itself is what its attackers believe; where it says nothing, they know what was recorded.
    """
    records = open_observed(config, data_dir).records
    problems: list[Problem] = []
    if config.rounds > 1:
        problems.append(Problem("rounds", "is more than 1, and records are of single rounds", "leave it out"))
    if len(config.client) > 1:
        problems.append(Problem("client", "lists several kinds, and the records were sent by one", "give one"))
    said = config.client[0].model_fields_set
    runs = dict.fromkeys((record.facts.run, record.facts.defence) for record in records)
    if len(runs) > 1:
        named = listing(f"'{run}' ({defence or 'defence unknown'})" for run, defence in runs)
        problems.append(Problem("observed", f"holds updates of {len(runs)} trainings: {named}", _CHOOSE))
    client: dict[str, Any] = config.client[0].model_dump(mode="json")
    wrong: list[Problem] = []
    if "batch" not in said:
        client["batch"], wrong = _examples(records, config.client[0].members)
        problems += wrong
    if "local" not in said:
        local = records[0].facts.local
        client["local"] = None if local is None else local.model_dump(mode="json")
        if not wrong and local and local.batch and local.batch > client["batch"]:
            what = f"is {client['batch']}, and the recorded clients take {plural(local.batch, 'example')} a step"
            remedy = "leave it out (--set client.batch=): the records say it; or say client.local, too"
            problems.append(Problem("client.batch", what, remedy))
    problems += _sent_otherwise(records, client["local"] is not None)
    defences = config.defences
    if "defences" not in config.model_fields_set:
        defences = [records[0].facts.defence or "none"]
        problems += _unreadable(defences[0])
    refuse(problems)
    there = len(records) - config.first_target_client
    if there < 1:
        what = f"is {config.first_target_client}, and the first of {plural(len(records), 'chosen record')} is 0"
        raise fail("first_target_client", what, "lower it")
    target_clients = min(config.target_clients, there) if "target_clients" in config.model_fields_set else there
    changes = {"client": [client], "defences": defences, "target_clients": target_clients}
    return resolve({**config.model_dump(mode="json"), **changes}, names=False)


def _examples(records: Sequence[Recorded], members: int) -> tuple[int, list[Problem]]:
    """Say of how many examples each update is made."""
    counts = sorted({record.facts.examples or 0 for record in records})
    if counts[0] == 0:
        remedy = "guess: --set client.batch=8"
        return 1, [Problem("client.batch", "is in no record: nobody said how many examples were used", remedy)]
    if len(counts) > 1:
        what = f"differs from record to record ({listing(map(str, counts))} examples), and an attack needs one number"
        alike = [[each.facts.client for each in records if each.facts.examples == count] for count in counts]
        most = ", ".join(f'"{client}"' for client in dict.fromkeys(max(alike, key=len)))
        remedy = f"choose clients of one number: --set 'observed.clients=[{most}]'; or assume it: --set client.batch="
        return 1, [Problem("client.batch", what, f"{remedy}{counts[-1]}")]
    if counts[0] % members:
        return 1, [Problem("client.members", f"do not divide {counts[0]} recorded examples", "change them")]
    return counts[0] // members, []


def _sent_otherwise(records: Sequence[Recorded], local: bool) -> Iterator[Problem]:
    """Tell a gradient that is taken for local training, and the other way round."""
    kinds = {record.facts.sends for record in records}
    if len(kinds) > 1:
        yield Problem("observed", "holds gradients and differences of parameters", _CHOOSE)
    elif kinds == {"difference"} and not local:
        what = "is not known, and what was sent is a difference of parameters: it is no gradient without a step size"
        remedy = "say how the clients train: --set client.local.lr=0.1 --set client.local.steps=1 (or epochs, batch)"
        yield Problem("client.local", what, remedy)
    elif kinds == {"gradient"} and local:
        yield Problem("client.local", "is given, and what was sent is recorded as one gradient", "leave it out")


def _unreadable(defence: str) -> Iterator[Problem]:
    try:
        parse(defence)
    except GradveilError as error:
        remedy = "say what to believe: --defence TEXT; or use the version of Gradveil that recorded it"
        yield from (Problem(f"recorded defence '{defence}'", f"{p.where}: {p.what}", remedy) for p in error.problems)


def observed_images(config: RunConfig, data_dir: Path | None, observed: Observed) -> tuple[Dataset | None, Dataset]:
    """Return the public examples, where there are any, and the target clients', in the records' order.

    Where the truth was not recorded random images stand in, or public rows or texts: they say the shapes, and nothing
    is compared with them.
    """
    data, public, kind = config.data, None, None
    if data.name == UNSEEN:
        shape, classes = _unseen(config)
        mean, std = tuple(data.mean or (0.0,)), tuple(data.std or (1.0,))
    else:
        splits = open_images(data, data_dir, 1)
        public, like = splits.public, splits.private
        shape, classes, mean, std = tuple(like.inputs.shape[1:]), like.classes, like.mean, like.std
        kind = like.example
    size = config.client[0].examples
    truths = [record.truth for record in observed.records if record.truth is not None]
    if observed.scored:
        refuse(list(_other_images(observed.records, shape, size)))
        inputs = torch.cat([truth.inputs for truth in truths])
        inputs = inputs.float() if inputs.is_floating_point() else inputs.long()
        targets = torch.cat([truth.targets for truth in truths]).long()
        try:
            return public, Dataset("recorded truth", inputs, targets, classes, mean, std, example=kind)
        except GradveilError as error:
            raise GradveilError(
                Problem(f"recorded truth: {p.where}", p.what, f"say data.mean and data.std; {p.remedy}")
                for p in error.problems
            ) from error
    count = len(observed.records) * size
    if kind is not None and public is not None:
        stand_ins = public.inputs[torch.arange(count) % len(public)]
        return public, Dataset(UNSEEN, stand_ins, torch.arange(count) % len(classes), classes, example=kind)
    pixels = torch.rand((count, *shape), generator=Key(0, (Stream.PLACEHOLDERS,)).generator())
    centre, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))
    stand_ins = Dataset(UNSEEN, (pixels - centre) / scale, torch.arange(count) % len(classes), classes, mean, std)
    return public, stand_ins


def _unseen(config: RunConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Say what images look like that are not here."""
    data = config.data
    given = {"channels": data.channels, "size": data.size, "classes": data.classes}
    problems = [
        Problem(f"data.{name}", f"is not said, and the data are '{UNSEEN}'", f"say it: --set data.{name}={example}")
        for (name, value), example in zip(given.items(), (3, 32, 10), strict=True)
        if value is None
    ]
    refuse(problems)
    assert data.channels is not None
    assert data.size is not None
    assert data.classes is not None
    return (data.channels, data.size, data.size), tuple(str(number) for number in range(max(data.classes, 2)))


def _other_images(records: Sequence[Recorded], shape: Sequence[int], size: int) -> Iterator[Problem]:
    for record in records:
        assert record.truth is not None
        where = f"recorded truth of client '{record.facts.client}', round {record.facts.round}"
        if tuple(record.truth.inputs.shape[1:]) != tuple(shape):
            what = f"are {tuple(record.truth.inputs.shape[1:])}, the run's images {tuple(shape)}"
            yield Problem(where, what, "correct data.name, data.size and data.channels")
        if len(record.truth.targets) != size:
            what = f"are {len(record.truth.targets)} examples, the run says {size}"
            yield Problem(where, what, f"leave client.batch out, or set it to {len(record.truth.targets)}")


@dataclass(frozen=True)
class FittedRecord:
    """A record under the names of a model: what was received, what was sent, and what of both is left out."""

    received: Tensors
    """Parameters, those buffers that the model has, and running statistics that a preparation may have taken out."""
    update: Tensors
    left_out: tuple[str, ...] = ()
    """What was sent besides parameters: buffers, which no attack reads."""


def fitted(record: Recorded, client: Client) -> FittedRecord:
    """Put a record under the names of a simulated client's model; refuse what does not fit, with every difference.

    Names that are numbers (as of Flower's `NumPyClient`) are positions in the model's `state_dict`.
    """
    model = client.model
    names = _names(record.received, model)
    received, sent = (
        once(model, {names.get(name, name): value for name, value in part.items()})
        for part in (record.received, record.update)
    )
    buffers, where = dict(model.named_buffers()), "recorded model"
    problems = misfits(model, received, where)
    params, trained = dict(model.named_parameters()), client.trained()
    remedy = "name the model that the app trains: model.name, model.options; or the defence that changes it"
    strange = [] if only_prefixed(problems, where) else [*received]
    strange = [name for name in strange if name not in params and name not in buffers and not is_statistic(name)]
    problems += [Problem(f"{where}, {name}", "is no parameter of the believed model", remedy) for name in strange]
    if not problems:
        problems += [
            Problem(f"recorded update, {name}", "is missing", "say what is trained: client.trainable = [...]")
            for name in trained
            if name not in sent
        ]
        more = [name for name in sent if name in params and name not in trained]
        remedy = "say what is trained: client.trainable = [...]"
        problems += [Problem(f"recorded update, {name}", "is sent, and not trained here", remedy) for name in more]
    refuse(problems)
    kept = {name: value for name, value in received.items() if name in params or name in buffers or is_statistic(name)}
    update = {name: sent[name] for name in trained}
    return FittedRecord(kept, update, tuple(name for name in sent if name not in params))


def _names(received: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, str]:
    """Give positions the names of the state dictionary, or of the parameters where there are as many of them."""
    if not all(name.isdecimal() for name in received):
        return {}
    for known in (names_in_order(model), list(model.state_dict()), [name for name, _ in model.named_parameters()]):
        if len(known) == len(received):
            return {str(place): name for place, name in enumerate(known)}
    return {}


def _equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
