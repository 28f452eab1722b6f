"""Train a Gradveil client in a Flower app's `train()`, with every defence and its state on disk."""

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
from gradveil.integrations.flower.flower_records import Question, Records, decoded, encoded
from gradveil.integrations.flower.node_policy import AppRequest, check_demands
from gradveil.integrations.flower.own_update import OwnUpdate, log_finding
from gradveil.integrations.flower.privacy_budget import Charge, Limit, charged, check_fixed_key
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
    """Train a defended client on a batch from the received model, and reply with its update.

    The client's state (residuals, moments) is read from the node's disk and written back before the reply is made. If
    the server repeats a round with the same model, the client repeats its reply without computing anything. An older
    round, or another model for the same round, is refused. The reply carries `metrics` unchanged and `num-examples`;
    no defence covers them.
    All randomness comes from a secret that the operating system draws for this one reply, and noise with a formal
    guarantee lies on a grid (`gradveil.defences.deployed_noise`). A `key` is for repeatable tests and simulations: it
    draws as the engine does, and no privacy is promised or counted.

    `guard` is the policy for models that look manipulated (`gradveil.federated.model_inspection`), and for updates that
    single out far more examples than the batch does at honest models. `leak` is the policy for updates from which more
    than a quarter of the examples can be reconstructed (`gradveil.federated.update_inspection`). By default it warns,
    unless `guard` is "ignore". A reply with a formal guarantee is never refused for this: a refusal is a message that
    no noise covers. Such a reply is counted and stored before it is inspected, and the results and errors of the
    inspection go to the log. Nor does it report an update that cannot be computed. With a guarantee per client
    (`user-dp`) an update of zeros takes its place. With one per example (`dp`) a gradient of zeros replaces that of
    each example that fails. The noise is added to those, and the log has the cause.

    `folder` holds the client's files (default: the node's `gradveil-folder`, or `~/.gradveil/flower`). `training` keeps
    the state when a run is started again with another id. The ledger of the training counts the differential privacy
    spent, at this `delta`; a round that would exceed `epsilon` is refused.
    """
    refuse([*_wrong_arguments(client, batch)])
    leak = leak or ("ignore" if guard == "ignore" else "warn")
    refuse([*unsupported(client), *_unsupported_settings(message), *POLICY.problems("leak", leak)])
    batch = Batch(*batch)
    limit = Limit.of(epsilon, delta, training, key)
    check_demands(context, AppRequest(client, batch, limit, guard, training, key, folder))
    question = Question.of(message)
    params, buffers = _received(client, question)
    with opened(context, folder, training) as memory:
        if (before := memory.repeated(question)) is not None:
            return question.reply(before.sent, before.records)
        with torch.no_grad():
            state = memory.state(client, params)
        here = scheduled(replace(client, buffers={**client.buffers, **buffers}), question.number - 1)
        here, charge = prepared(memory, client, here, batch, limit, key)
        trained = {name: params[name] for name in client.trained()}
        inspect_received(client.model, question.number, params | buffers, trained, memory, guard)
        with torch.no_grad():
            task = ClientTask(batch, memory.key(question.number, key), state)
            last = memory.previous(question.number) if (guard, leak) != ("ignore", "ignore") else None
            previous = None if last is None else last[0].received
            before = None if last is None else decoded(last[0].sent, trained, last[0].received)
            own_update = OwnUpdate(here, params, task, previous, before, guard, leak)
            records: Records = {"metrics": MetricRecord({"num-examples": len(batch.targets), **(metrics or {})})}
            # The reply is counted before it is computed, so that an error has been counted too. Where a guarantee
            # covers it, it is inspected only once it is stored: no finding can change it.
            spend(charge)
            update, state = own_update.private(charge.epsilon) if charge and charge.epsilon else own_update.checked()
            sent = encoded(update)
            memory.keep(question, sent, records, client, state)
            if charge and charge.epsilon:
                own_update.log_findings(update)
            return question.reply(sent, records)


def _wrong_arguments(client: object, batch: object) -> Iterator[Problem]:
    """Report arguments that are not a client and a pair of tensors."""
    if not isinstance(client, Client):
        remedy = "give gradveil.client.Client(net, local=Local(...)), or a defence of it"
        yield Problem("client", f"is {type(client).__name__}", remedy)
    parts = cast("Sequence[object]", batch) if isinstance(batch, tuple | list) else ()
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        kinds = f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        remedy = "give gradveil.core.types.Batch(images, labels): tensors of all the client's examples, "
        remedy += "torch.cat of a loader's batches"
        yield Problem("batch", f"is {type(batch).__name__}{kinds}", remedy)


def prepared(
    memory: Memory,
    client: Client,
    here: Client,
    batch: Batch,
    limit: Limit,
    key: Key | None,
    unprotected: str | None = None,
) -> tuple[Client, Charge | None]:
    """Return the deployed client and the privacy that its reply spends; `here` is the client of this round.

    With a fixed key it is the simulated client, which promises nothing and spends nothing.
    """
    if key is not None:
        check_fixed_key(memory)
        return here, None
    deployment = deployed(here, batch)
    return deployment.client, charged(memory, client, batch, limit, unprotected or deployment.without)


def spend(charge: Charge | None) -> None:
    """Record and log the privacy that the next reply spends."""
    if charge is not None:
        charge.keep()
        LOG.info("%s", charge)


def inspect_received(
    model: nn.Module | None,
    number: int,
    received: Tensors,
    trained: Mapping[str, Tensor],
    memory: Memory,
    guard: Policy,
) -> None:
    """Inspect the model of round `number` for manipulation, and compare it with the last round that was answered.

    That round may be long ago, or in the run that this one continues: a server chooses which clients it asks and when
    a run ends, so it could leave a client out before the model jumps.
    """
    previous: Tensors | None = None
    sent: Tensors | None = None
    rounds = 1
    if guard != "ignore" and (last := memory.previous(number)) is not None:
        before, rounds = last
        previous = {name: value for name, value in before.received.items() if name in trained}
        sent = decoded(before.sent, trained, before.received)
    cpu = {name: value.cpu() for name, value in received.items()}
    guarded(model, cpu, guard, log_finding, previous, sent, rounds)


def unsupported(client: Client) -> list[Problem]:
    """List the features of a client that Flower rounds do not support."""
    problems: list[Problem] = []
    if client.members > 1:
        remedy = "start one node per client"
        problems.append(Problem("client.members", f"is {client.members}, and a node is one client", remedy))
    params = client.params()
    if needs_messages(client.send, {name: params[name] for name in client.trained()}):
        problems.append(Problem("client.send", *NO_MESSAGES))
    return problems


NO_MESSAGES = (
    "needs public messages before each round, which Flower's rounds do not have",
    "choose a defence without them, such as topk or dgp, or use gradveil train",
)
"""Problem and fix for such a transform."""


_UNSUPPORTED_SETTINGS = {
    "proximal-mu": "a proximal term in the loss (FedProx)",
    "clipping_norm": "an update that one of Flower's client mods clips (client-side differential privacy)",
}
"""Settings that strategies send to clients and `answer` does not support."""


def _unsupported_settings(message: Message) -> Iterator[Problem]:
    """Report settings that the server's strategy relies on: it would misinterpret the reply."""
    for config in message.content.config_records.values():
        for name, feature in _UNSUPPORTED_SETTINGS.items():
            if config.get(name):
                remedy = "choose another strategy on the server, or train in the app behind protect(...)"
                yield Problem(f"message.config.{name}", f"asks for {feature}, and answer(...) has none", remedy)


_START = "start the server from ArrayRecord(client.params()): the same client, defence included, on both sides"


def needs_messages(send: Transform | None, sent: Mapping[str, Tensor]) -> bool:
    """Return whether a transform needs public messages, from clients or computed from the last mean."""
    return isinstance(send, HasMessages) and (send.speakers() > 0 or bool(send.announce({}, sent, 1)))


def _received(client: Client, question: Question) -> tuple[Tensors, Tensors]:
    """Split the received arrays into the client's parameters and its model's buffers; refuse arrays that do not fit."""
    params, received = client.params(), question.received
    buffers = dict(client.model.named_buffers())
    extra = {name: value for name, value in received.items() if name in buffers and name not in params}
    expected = Layout.of({**params, **{name: buffers[name] for name in extra}})
    differences = expected.differences(Layout.of(received))
    refuse([Problem(f"arrays{p.where.removeprefix('update')}", p.what, _START) for p in differences])
    device = next(iter(params.values())).device
    return (
        {name: received[name].to(device) for name in params},
        {name: value.to(device) for name, value in extra.items()},
    )
