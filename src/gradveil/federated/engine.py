"""Rounds of federated learning in one process, with the clients that audits attack and a server.

All randomness of a round is addressed by the seed, the client and the round, so an interrupted and resumed training
ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradveil.client import Client, ClientTask, announced, drawn_update, proposer, scheduled, speakers, takes_turns
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, all_finite, stack, tmap
from gradveil.core.types import Batch
from gradveil.defences.error_feedback import residual_of
from gradveil.federated.aggregate import Server
from gradveil.federated.held_back import Compressed, held_back
from gradveil.federated.parallel_clients import Together, compute
from gradveil.federated.training_state import RoundResult, Standing, Status
from gradveil.federated.update_records import UpdateRecorder
from gradveil.nn.stochastic import bottleneck_noise
from gradveil.wire.codec import encoded_size

_EVALUATED = 500
"""Number of examples per evaluation batch."""


@dataclass(frozen=True)
class ClientShare:
    """One client's training and validation examples."""

    train: Batch
    validation: Batch | None = None


@dataclass(frozen=True)
class Federation:
    """A federation: a client, the examples of each of its copies, and a server."""

    client: Client
    shares: Sequence[ClientShare]
    test: Batch
    server: Server = field(default_factory=Server)
    key: Key = field(default_factory=lambda: Key(0))
    batch: int | None = None
    """Examples per gradient of a client without local training, drawn each round; None for all its examples."""
    participation: float = 1.0
    """Share of the clients that the server draws at random each round; at least one client."""
    absent: float = 0.0
    """Probability that a chosen client does not answer."""
    patience: int | None = None
    """Stop after this many answered rounds without a lower validation loss; None for never."""
    recorder: UpdateRecorder | None = None
    """Records updates for an audit, without any effect on the training."""
    pace: tuple[tuple[int, float], ...] = ()
    """(n, f): after n rounds the step size is multiplied by f: the clients' step size, or the server's if clients send
    gradients."""
    evaluation_noise: bool = False
    """Draw the noise of bottlenecks while the model is evaluated; other randomness is off there."""
    together: Together = "auto"
    """Whether the clients of a round compute at once, which changes only rounding: see `parallel_clients.groups`."""

    def __post_init__(self) -> None:
        """Refuse invalid settings, all at once."""
        checks = (
            ("shares", f"are {len(self.shares)}", "give at least one client's examples", len(self.shares) > 0),
            ("participation", f"is {self.participation}", "a share in (0, 1]", 0 < self.participation <= 1),
            ("absent", f"is {self.absent}", "give a probability in [0, 1)", 0 <= self.absent < 1),
            ("patience", f"is {self.patience}", "give at least 1", self.patience is None or self.patience >= 1),
            ("batch", f"is {self.batch}", "give at least 1", self.batch is None or self.batch >= 1),
            ("pace", f"is {self.pace}", "give factors above 0", all(factor > 0 for _, factor in self.pace)),
        )
        problems = [Problem(name, problem, remedy) for name, problem, remedy, ok in checks if not ok]
        held: list[tuple[str, Batch | None]] = [("test", self.test)]
        for i, share in enumerate(self.shares):
            held += [(f"shares[{i}].train", share.train), (f"shares[{i}].validation", share.validation)]
        problems += [
            Problem(name, "holds no examples", "give at least one, or leave it out")
            for name, batch in held
            if batch is not None and len(batch.targets) == 0
        ]
        if self.patience is not None and all(share.validation is None for share in self.shares):
            remedy = "let clients keep validation examples, or leave patience out"
            problems.append(Problem("patience", "has no validation loss to wait for", remedy))
        wanted, selected = speakers(self.client), self._selected_count() if not problems else 0
        if not problems and selected < wanted:
            problem = (
                f"selects {selected} of {len(self.shares)} clients per round, but {wanted} must send public messages"
            )
            remedy = "use more clients, raise participation, or need fewer messages (adgp: voters)"
            problems.append(Problem("participation", problem, remedy))
        refuse(problems)

    def _selected_count(self) -> int:
        """Count the clients that are chosen for a round."""
        return max(1, round(self.participation * len(self.shares)))

    def start(self) -> Standing:
        """Return the state of the training before the first round."""
        params = self.client.params()
        sent = {name: params[name] for name in self.client.trained()}
        return Standing(params, self.server.init(sent), start=self.evaluate(params, self.test, 0))

    def chosen(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the clients of a round: those that answer, and those that were selected and do not."""
        key, count = self.key.child(Stream.ROUND, number), len(self.shares)
        some = self._selected_count()
        order = torch.randperm(count, generator=key.child(Stream.SELECTED).generator())[:some].sort().values.tolist()
        missing = torch.rand(some, generator=key.child(Stream.ABSENT).generator()) < self.absent
        answers = tuple(client for client, away in zip(order, missing.tolist(), strict=True) if not away)
        return answers, tuple(client for client in order if client not in answers)

    def local_update(
        self, standing: Standing, client: int, number: int, copy: Client | None = None
    ) -> tuple[Tensors, Tensors]:
        """Compute one client's update in a round, and its next state; `copy` is a client with the round's messages."""
        here = copy or scheduled(self.client, number - 1)
        return drawn_update(here, standing.params, *self.task(standing, client, number, here))

    def task(self, standing: Standing, client: int, number: int, here: Client) -> ClientTask:
        """Return one client's task in a round: its examples, the address of its draws and its state."""
        key = self.key.child(Stream.CLIENT, client, Stream.ROUND, number)
        state = standing.clients.get(client)
        state = here.init(standing.params) if state is None else state
        return ClientTask(self._examples(client, key), key, state)

    def round(self, standing: Standing) -> Standing:
        """Run one round with its step size."""
        number = len(standing.records) + 1
        return self.at(number)._round(standing, number)

    def at(self, number: int) -> Federation:
        """Return the federation with the step size of a round."""
        factor = max(((after, f) for after, f in self.pace if after < number), default=(0, 1.0))[1]
        local = self.client.local
        if factor == 1.0:
            return self
        if local is None:
            return replace(self, server=replace(self.server, lr=factor * self.server.lr))
        lr = factor * local.lr
        recorder = self.recorder
        if recorder is not None and recorder.local is not None:  # readers of a record simulate the round's step size
            recorder = replace(recorder, local=recorder.local.model_copy(update={"lr": lr}))
        return replace(self, client=replace(self.client, local=replace(local, lr=lr)), recorder=recorder)

    def _round(self, standing: Standing, number: int) -> Standing:
        began = time.perf_counter()
        answers, absent = self.chosen(number)
        updates: dict[int, Tensors] = {}
        clients = dict(standing.clients)
        refused: list[int] = []
        worked: list[float] = []
        with torch.no_grad():
            current, spoken = self.announced(standing, answers, number)
            tasks = {client: self.task(standing, client, number, current) for client in answers}
            results = {sent.client: sent for sent in compute(current, standing.params, tasks, self.together)}
            for client in answers:
                _, update, clients[client], seconds = results[client]
                worked.append(seconds)
                if bool(all_finite(update)):
                    updates[client] = update
                    self._record_update(standing, client, number, update, current)
                else:
                    refused.append(client)
            params, server, mean, moved = standing.params, standing.server, standing.mean, 0
            if updates:
                examples = {client: len(self.shares[client].train.targets) for client in updates}
                mean, server = self.server.mean(updates, examples, server)
                params, server = self.server.step(params, mean, server)
                moved = encoded_size({name: params[name] - standing.params[name] for name in mean}, current.messages)
        selected = {*answers, *absent}
        up = spoken + sum(encoded_size(update, current.messages) for update in updates.values())
        down = len(selected) * _bits(current.messages) + self._sent_down(selected, standing)
        record = self._record(number, tuple(updates), absent, params, (up, down), began)
        client_seconds = sum(worked) / len(worked) if worked else None
        wanted = speakers(self.client) if answers else 0
        spoke = (min(wanted, len(answers)), wanted) if wanted else None
        held = held_back(self._compressed(standing, updates, clients))
        record = replace(record, client_seconds=client_seconds, refused=tuple(refused), spoke=spoke, held_back=held)
        after = replace(standing, params=params, server=server, clients=clients, mean=mean, moved=moved)
        return self._judged(after, record, standing)

    def _compressed(
        self, standing: Standing, updates: Mapping[int, Tensors], after: Mapping[int, Tensors]
    ) -> Iterator[Compressed]:
        """Yield what each client sent and its residuals, if its defence ends with error feedback."""
        for client, sent in updates.items():
            now = residual_of(self.client.send, after[client])
            if now is None or self.client.members > 1:
                return
            before = residual_of(self.client.send, standing.clients.get(client, {}))
            yield Compressed(sent, before or tmap(torch.zeros_like, now), now)

    def announced(self, standing: Standing, answers: Sequence[int], number: int) -> tuple[Client, int]:
        """Return the client of a round with its public messages, and the bytes that clients sent to make them."""
        speaking = self.speaking(answers, number)
        speaker = proposer(scheduled(self.client, number - 1))
        proposals = [self.local_update(standing, client, number, speaker)[0] for client in speaking]
        return announced(self.client, stack(proposals), standing.mean, number - 1), sum(map(_bits, proposals))

    def speaking(self, answers: Sequence[int], number: int) -> list[int]:
        """Choose the clients that speak before a round, of those that answer: at random, or in turn."""
        count = min(speakers(self.client), len(answers))
        if takes_turns(self.client):
            return [answers[(number - 1 + i) % len(answers)] for i in range(count)]
        draw = self.key.child(Stream.ROUND, number).child(Stream.SPEAKERS).generator()
        return [answers[i] for i in torch.randperm(len(answers), generator=draw)[:count].tolist()]

    def _record_update(self, standing: Standing, client: int, number: int, update: Tensors, current: Client) -> None:
        if self.recorder is not None and self.recorder.wants(number, str(client)):
            made_from = self._examples(client, self.key.child(Stream.CLIENT, client, Stream.ROUND, number))
            count = len(made_from.targets)
            self.recorder.write(number, str(client), standing.params, update, count, current.messages, made_from)

    def _examples(self, client: int, key: Key) -> Batch:
        train = self.shares[client].train
        if self.client.local is not None or self.batch is None:
            return train
        some = torch.randperm(len(train.targets), generator=key.child(Stream.EXAMPLES).generator())[: self.batch]
        return Batch(train.inputs[some], train.targets[some])

    def _record(
        self,
        number: int,
        answers: tuple[int, ...],
        absent: tuple[int, ...],
        params: Tensors,
        exchanged: tuple[int, int],
        began: float,
    ) -> RoundResult:
        loss, accuracy = self.evaluate(params, self.test, number)
        validation = [share.validation for share in self.shares if share.validation is not None]
        evaluations = [self.evaluate(params, batch, number, i) for i, batch in enumerate(validation, start=1)]
        losses, shares = ([row[i] for row in evaluations] for i in (0, 1))
        return RoundResult(
            number,
            answers,
            absent,
            accuracy,
            loss,
            sum(losses) / len(losses) if losses else None,
            sum(shares) / len(shares) if shares else None,
            *exchanged,
            time.perf_counter() - began,
        )

    def _sent_down(self, clients: set[int], before: Standing) -> int:
        """Count the server's bytes: the last change for clients of the last round, all parameters for the others."""
        last = before.records[-1] if before.records else None
        current = clients & {*last.clients, *last.refused, *last.absent} if last else set[int]()
        new = len(clients - current)
        return len(current) * before.moved + (new * encoded_size(before.params) if new else 0)

    def _judged(self, after: Standing, record: RoundResult, before: Standing) -> Standing:
        """Keep the best parameters, and set the status of the training."""
        records = (*before.records, record)
        nothing = bool(record.refused) and not record.clients
        if nothing or not bool(all_finite(after.params)):
            best = before.final if before.best_round else {}
            return replace(after, records=records, best=best, status="diverged")
        lowest = before.records[before.best_round - 1].validation_loss if before.best_round else None
        loss = record.validation_loss
        # A NaN loss counts as worse than any: otherwise no later loss could be lower.
        if loss is None or lowest is None or (math.isfinite(loss) and not lowest <= loss):
            return replace(after, records=records, best={}, best_round=record.number)
        # A round without answers changes nothing, and does not count towards patience.
        waited = sum(bool(earlier.clients or earlier.refused) for earlier in records[before.best_round :])
        status: Status = "stopped early" if self.patience is not None and waited >= self.patience else "running"
        return replace(after, records=records, best=before.final, status=status)

    def evaluate(self, params: Tensors, batch: Batch, number: int, place: int = 0) -> tuple[float, float]:
        """Return the mean loss and the accuracy after a round, with the randomness of the model switched off.

        With `evaluation_noise` bottlenecks draw theirs. `place` numbers the batches of a round.
        """
        key = self.key.child(Stream.EVALUATION, number, place)
        loss = right = 0.0
        objective = self.client.objective
        training = objective.model.training
        objective.model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(batch.targets), _EVALUATED):
                    inputs, targets = (value[start : start + _EVALUATED] for value in batch)
                    outputs = objective.outputs(params, inputs, self._noise(inputs, key.child(start)), checked=True)
                    value = objective.loss(outputs, targets)
                    loss += float(value.sum() if value.ndim else value * len(targets))
                    right += float((outputs.argmax(-1) == targets).sum())
        finally:
            objective.model.train(training)
        return loss / len(batch.targets), right / len(batch.targets)

    def _noise(self, inputs: Tensor, key: Key) -> Tensors:
        """Draw the noise that is kept in an evaluation."""
        if not self.evaluation_noise:
            return {}
        return bottleneck_noise(self.client.model, inputs).to(inputs.dtype).sample(key, inputs.device)


def train(
    federation: Federation,
    rounds: int,
    standing: Standing | None = None,
    keep: Callable[[Standing], None] | None = None,
) -> Standing:
    """Run up to `rounds` rounds, or until the training stops early. `keep` is called after every round."""
    standing = _ended(standing or federation.start(), rounds)
    while standing.status == "running":
        standing = _ended(federation.round(standing), rounds)
        if keep is not None:
            keep(standing)
    return standing


def _ended(standing: Standing, rounds: int) -> Standing:
    """Mark a running training as finished once it has had its rounds; a stopped one keeps its status."""
    over = standing.status == "running" and len(standing.records) >= rounds
    return replace(standing, status="finished") if over else standing


def _bits(masks: Mapping[str, Tensor]) -> int:
    """Count the bytes of public messages: one bit per entry."""
    return sum(-(-value.numel() // 8) for value in masks.values())
