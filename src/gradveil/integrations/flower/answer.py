"""A Gradveil client in a Flower app's `train()`: every defence, state on disk, packed replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from flwr.app import Context, Message, MetricRecord
from torch import Tensor, nn

from gradveil.client import Client, ClientTask, scheduled
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, HasMessages, Transform
from gradveil.defences.deployed_noise import deployed
from gradveil.federated.model_inspection import POLICY, Policy, guarded
from gradveil.integrations.flower.client_memory import LOG, Memory, opened
from gradveil.integrations.flower.flower_records import Question, Told, decoded, encoded
from gradveil.integrations.flower.node_policy import Asked, obey
from gradveil.integrations.flower.own_look import OwnUpdate, tell
from gradveil.integrations.flower.privacy_budget import Charge, Limit, charged, uncounted
from gradveil.wire.codec import Layout


def answer(
    message: Message,
    context: Context,
    client: Client,
    batch: Batch,
    *,
    metrics: Mapping[str, int | float] | None = None,
    guard: Policy = "warn",
    leak: Policy | None = None,
    folder: Path | str | None = None,
    key: Key | None = None,
    training: str | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
) -> Message:
    """Train a defended client on a batch from the received model, and reply with what it sends.

    Its state (residuals, moments) comes from the node's disk and goes back there before the reply is made. A round that
    is asked again with the same model gets the same reply, and nothing is computed; an older round, or another model,
    is refused. `metrics` go with the reply beside `num-examples`, as they are: no defence covers them.
    Whatever it draws comes from a secret that the operating system gives for this one answer, and noise that proves
    something is put on a grid (`gradveil.defences.deployed_noise`). A `key` is for tests and simulations that have to
    be repeatable: it draws as the engine does, and no privacy is promised or counted.

    `guard` says what happens if the model looks manipulated (`gradveil.federated.model_inspection`), or if the update
    singles out far more examples than the batch does at honest models; `leak` what happens if more than a quarter of
    the examples can be read from what would be sent (`gradveil.federated.update_inspection`): by default a warning,
    unless the guard ignores. A reply with a formal guarantee is never refused for that: a refusal is a message which no
    noise covers. There the look comes after the reply is counted and stored, and what it finds or fails at goes to the
    log. What cannot be computed there is no message either. With a guarantee of the whole client (`user-dp`) an update
    of zeros takes its place, with one of single examples (`dp`) a gradient of zeros that of each example which fails,
    and the noise is added to that. The log has the cause.

    `folder` is the place of the client's files (default: the node's `gradveil-folder`, or `~/.gradveil/flower`).
    `training` lets the state follow when a run is started again with another id. The ledger of the training counts the
    differential privacy spent, at this `delta`; a round that would bring it above `epsilon` is refused.
    """
    refuse([*_misused(client, batch)])
    leak = leak or ("ignore" if guard == "ignore" else "warn")
    refuse([*unsupported(client), *_unheard(message), *POLICY.problems("leak", leak)])
    batch = Batch(*batch)
    limit = Limit.of(epsilon, delta, training, key)
    obey(context, Asked(client, batch, limit, guard, training, key, folder))
    question = Question.of(message)
    params, buffers = _fitted(client, question)
    with opened(context, folder, training) as memory:
        if (before := memory.repeated(question)) is not None:
            return question.reply(before.sent, before.told)
        with torch.no_grad():
            state = memory.state(client, params)
        here = scheduled(replace(client, buffers={**client.buffers, **buffers}), question.number - 1)
        here, charge = prepared(memory, client, here, batch, limit, key)
        mine = {name: params[name] for name in client.trained()}
        look(client.model, question.number, params | buffers, mine, memory, guard)
        with torch.no_grad():
            task = ClientTask(batch, memory.key(question.number, key), state)
            last = memory.previous(question.number) if (guard, leak) != ("ignore", "ignore") else None
            previous = None if last is None else last[0].received
            before = None if last is None else decoded(last[0].sent, mine, last[0].received)
            own = OwnUpdate(here, params, task, previous, before, guard, leak)
            told = {"metrics": MetricRecord({"num-examples": len(batch.targets), **(metrics or {})})}
            return _answered(question, memory, client, own, charge, told)


def _answered(
    question: Question, memory: Memory, client: Client, own: OwnUpdate, charge: Charge | None, told: Told
) -> Message:
    """Count the reply, compute it and store it; where a guarantee covers it, look at it only then.

    It is counted before anything of the examples is computed: whatever comes of it, an error too, has been counted.
    """
    spend(charge)
    update, state = own.private(charge.epsilon) if charge and charge.epsilon else own.judged()
    sent = encoded(update)
    memory.keep(question, sent, told, client, state)
    if charge and charge.epsilon:
        own.told(update)
    return question.reply(sent, told)


def _misused(client: object, batch: object) -> Iterator[Problem]:
    """Say what else was given than a client and a pair of tensors."""
    if not isinstance(client, Client):
        remedy = "give gradveil.client.Client(net, local=Local(...)), or a defence of it"
        yield Problem("client", f"is {type(client).__name__}", remedy)
    parts = cast("Sequence[object]", batch) if isinstance(batch, tuple | list) else ()
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        kinds = f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        remedy = "give gradveil.core.types.Batch(images, labels): tensors of all the client's examples, "
        remedy += "torch.cat of what a loader gives"
        yield Problem("batch", f"is {type(batch).__name__}{kinds}", remedy)


def prepared(
    memory: Memory,
    client: Client,
    here: Client,
    batch: Batch,
    limit: Limit,
    key: Key | None,
    beside: str | None = None,
) -> tuple[Client, Charge | None]:
    """Return the client as it answers, and what its answer costs; `here` is the client as it is in this round.

    With a fixed key it is the simulated one, and costs nothing because nothing is promised.
    """
    if key is not None:
        uncounted(memory)
        return here, None
    found = deployed(here, batch)
    return found.client, charged(memory, client, batch, limit, beside or found.without)


def spend(charge: Charge | None) -> None:
    """Write down and report what the reply costs that is about to be made."""
    if charge is not None:
        charge.keep()
        LOG.info("%s", charge)


def look(
    model: nn.Module | None,
    number: int,
    received: Tensors,
    trained: Mapping[str, Tensor],
    memory: Memory,
    guard: Policy,
) -> None:
    """Look for manipulation in what the server sent in round `number`, also by the last round that was answered.

    That may be rounds ago, or in the run that this one continues: a server chooses whom it asks and when a run ends,
    and could leave a client out before it jumps.
    """
    previous: Tensors | None = None
    sent: Tensors | None = None
    rounds = 1
    if guard != "ignore" and (found := memory.previous(number)) is not None:
        before, rounds = found
        previous = {name: value for name, value in before.received.items() if name in trained}
        sent = decoded(before.sent, trained, before.received)
    cpu = {name: value.cpu() for name, value in received.items()}
    guarded(model, cpu, guard, tell, previous, sent, rounds)


def unsupported(client: Client) -> list[Problem]:
    """List what a Flower round cannot do for a client."""
    problems: list[Problem] = []
    if client.members > 1:
        remedy = "let every node answer for itself"
        problems.append(Problem("client.members", f"is {client.members}, and a node is one client", remedy))
    params = client.params()
    if needs_messages(client.send, {name: params[name] for name in client.trained()}):
        problems.append(Problem("client.send", *NO_MESSAGES))
    return problems


NO_MESSAGES = (
    "needs public messages before each round, which Flower's rounds have no place for",
    "choose a defence without them, such as topk or dgp; gradveil train runs this one",
)
"""What is wrong with such a transform, and what to do."""


_WISHES = {
    "proximal-mu": "a proximal term in the loss (FedProx)",
    "clipping_norm": "an update that a client mod of Flower's clips (differential privacy on the client's side)",
}
"""What strategies ask of clients in their configuration, and `answer` does not do."""


def _unheard(message: Message) -> Iterator[Problem]:
    """Find what the server's strategy counts on, and would not get: it would take the reply for something else."""
    for config in message.content.config_records.values():
        for name, what in _WISHES.items():
            if config.get(name):
                remedy = "let the server choose another strategy, or train by yourself behind protect(...)"
                yield Problem(f"message.config.{name}", f"asks for {what}, and answer(...) has none", remedy)


_START = "let the server start from ArrayRecord(client.params()): the same client, defence included, on both sides"


def needs_messages(send: Transform | None, sent: Mapping[str, Tensor]) -> bool:
    """Whether a transform waits for messages of the round: somebody has to speak, or the last mean makes them."""
    return isinstance(send, HasMessages) and (send.speakers() > 0 or bool(send.announce({}, sent, 1)))


def _fitted(client: Client, question: Question) -> tuple[Tensors, Tensors]:
    """Part what was received into the client's parameters and its model's buffers; refuse what does not fit."""
    own, received = client.params(), question.received
    buffers = dict(client.model.named_buffers())
    extra = {name: value for name, value in received.items() if name in buffers and name not in own}
    wanted = Layout.of({**own, **{name: buffers[name] for name in extra}})
    found = wanted.differences(Layout.of(received))
    refuse([Problem(f"arrays{p.where.removeprefix('update')}", p.what, _START) for p in found])
    device = next(iter(own.values())).device
    return (
        {name: received[name].to(device) for name in own},
        {name: value.to(device) for name, value in extra.items()},
    )
