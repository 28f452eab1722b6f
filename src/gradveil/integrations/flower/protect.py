"""A client mod that defends the update of an app that trains on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from gradveil.client import Client, finite_or_before, scheduled
from gradveil.core.errors import FOREIGN, Problem, fail, refuse
from gradveil.core.noise import Address, Key
from gradveil.core.settings import Choice, collect
from gradveil.core.tree import Tensors, all_finite, select, under
from gradveil.core.types import Batch, Transform
from gradveil.core.types import Context as Seen
from gradveil.defences import Defence, parse
from gradveil.defences.guarantees import examine, stages
from gradveil.defences.stage_probes import data_dependent
from gradveil.federated.model_inspection import POLICY, Policy
from gradveil.integrations.flower.answer import NO_MESSAGES, inspect_received, needs_messages, prepared, spend
from gradveil.integrations.flower.client_memory import LOG, Answer, Memory, opened
from gradveil.integrations.flower.flower_records import (
    COUNT,
    MARK,
    Question,
    Records,
    encoded,
    is_mean,
    number_of_examples,
    only_arrays,
    tensors,
    trained,
)
from gradveil.integrations.flower.node_policy import AppRequest, check_demands
from gradveil.integrations.flower.privacy_budget import Charge, Limit
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.weight_files import is_statistic
from gradveil.wire.codec import Layout

Statistics = Literal["refuse", "keep", "send"]
"""Treatment of running statistics that training changed."""
_STATISTICS = Choice(get_args(Statistics))
_UNDEFENDED = "running statistics are sent without a defence"
_USE_ANSWER = "call gradveil.integrations.flower.answer(...) in train(): it runs every defence"


def protect(
    defence: str | Defence,
    model: nn.Module | None = None,
    *,
    trainable: Sequence[str] | None = None,
    statistics: Statistics = "refuse",
    metrics: Mapping[str, int | float] | None = None,
    guard: Policy = "warn",
    folder: Path | str | None = None,
    key: Key | None = None,
    training: str | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
) -> Mod:
    """Return a mod that defends the update of `train()`: `@app.train(mods=[protect("topk(0.1, feedback=true)")])`.

    The update is the parameters received minus those returned. Defences of the model, the batch or single gradients
    cannot be applied to it and are refused; use `answer` for them. Mods before this one see the encoded update, mods
    after it the arrays that the app returned.

    Running statistics of BatchNorm layers are means over private examples. If `train()` changed them, `"refuse"` sends
    nothing, `"keep"` leaves them out (the server's stay as they are), and `"send"` sends them, **undefended**.

    With a formal guarantee, the round is counted before the app runs, and a failed training does not reach the server:
    if the app raises, replies with an error, or returns arrays that are not finite or do not fit, its update counts as
    zeros, to which the noise is added. The log has the cause. Such a reply repeats the metrics of the last reply, or
    reports one example if there was none. With `metrics` (`{"num-examples": 512}`) every reply has those metrics alone,
    and none of the app's.

    The guard inspects the received weights. A mod has no examples, so unlike `answer` it cannot measure which examples
    an update exposes. `model` tells the guard the last layer and the embeddings; without it the guard guesses them from
    names and shapes. `trainable`, `guard`, `folder`, `key`, `training`, `epsilon` and `delta` are as in `answer` and
    `Client`.
    """
    parsed = parse(defence) if isinstance(defence, str) else defence
    choices = (("guard", POLICY, guard), ("statistics", _STATISTICS, statistics))
    refuse([*collect("protect", choices), *_unsupported(parsed), *_without_count(metrics)])
    if key is None:
        refuse([*_counted_too_late(parsed)])
    limit = Limit.of(epsilon, delta, training, key)
    limit.provable(examine(Client(_small(), send=parsed.send), _FEW))
    return _Protect(parsed.send, model, trainable, statistics, metrics, guard, folder, key, training, limit)


@dataclass(frozen=True)
class _Protect:
    send: Transform | None
    model: nn.Module | None
    trainable: Sequence[str] | None
    statistics: Statistics
    metrics: Mapping[str, int | float] | None
    guard: Policy
    folder: Path | str | None
    key: Key | None
    training: str | None
    limit: Limit

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the app train, and send its update defended; other messages pass unchanged."""
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        question = Question.of(message)
        params = trained(question.received, self.trainable)
        client = Client(_holder(params), send=self.send)
        unprotected = _UNDEFENDED if self.statistics == "send" else None
        request = (client, _examples(1), self.limit, self.guard, self.training, self.key, self.folder, unprotected)
        check_demands(context, AppRequest(*request))
        with opened(context, self.folder, self.training) as memory:
            if (before := memory.repeated(question)) is not None:
                return question.reply(before.sent, before.records)
            with torch.no_grad():
                state = memory.state(client, params)
            here, charge = self._prepared(question, client, params, memory)
            inspect_received(self.model, question.number, question.received, params, memory, self.guard)
            promised = charge is not None and bool(charge.epsilon)
            last = memory.previous(question.number) if promised else None
            spend(charge)
            defending = _Defending(question, params, memory.key(question.number, self.key), here.send, state)
            try:
                done = self._defended(defending, _trained(message, context, call_next), promised)
            except FOREIGN as error:
                if promised:
                    # New noise: the computation that failed may contain the noise that was drawn before.
                    fresh = replace(defending, key=memory.key(question.number, None))
                    done = self._idle(fresh, last, f"{type(error).__name__}: {error}")
                elif isinstance(error, _AppError):
                    return error.reply
                else:
                    raise
            memory.keep(question, done.sent, done.records, client, done.state)
            return question.reply(done.sent, done.records)

    def _prepared(
        self, question: Question, client: Client, params: Tensors, memory: Memory
    ) -> tuple[Client, Charge | None]:
        """Return the deployed client and the privacy that its reply spends: the same for any number of examples."""
        if self.send is None:
            return client, None
        unprotected = _UNDEFENDED if self._means(question.received, params) else None
        here = scheduled(client, question.number - 1)
        return prepared(memory, client, here, _examples(1), self.limit, self.key, unprotected)

    def _defended(self, defending: _Defending, reply: Message, promised: bool) -> _Outgoing:
        """Apply the transform to the app's update."""
        received, params = defending.question.received, defending.params
        returned = _returned(reply, received)
        content = reply.content
        records = (
            {**content.metric_records, **content.config_records} if self.metrics is None else _metrics(self.metrics)
        )
        rest = self._rest(received, returned, params, promised)
        update = {name: value - returned[name] for name, value in params.items()}
        if promised and not all_finite(update):
            raise fail("update", "is not finite", "lower the step size, or look at the examples")
        if defending.send is None:
            return _Outgoing(encoded(update | rest), records, defending.state)
        count = number_of_examples(records.values())
        if count is None:
            remedy = "put 'num-examples' into the metrics"
            raise fail("reply.metrics", "does not give the number of examples that were used", remedy)
        update, state = defending.sent(update, _examples(count))
        return _Outgoing(encoded(update | rest), records, state)

    def _idle(self, defending: _Defending, last: tuple[Answer, int] | None, why: str) -> _Outgoing:
        """Replace an update that could not be computed by zeros; only the log has the cause."""
        LOG.error("the update cannot be computed, and counts as zeros: %s", why)
        records = _metrics({COUNT: 1} if self.metrics is None else self.metrics)
        if last is not None and self.metrics is None:
            records = last[0].records
        zeros = {name: torch.zeros_like(value) for name, value in defending.params.items()}
        update, state = defending.sent(zeros, _examples(number_of_examples(records.values()) or 1))
        return _Outgoing(encoded(update), records, state)

    def _rest(self, received: Tensors, returned: Tensors, params: Tensors, promised: bool) -> Tensors:
        """Return the statistics to send; refuse other arrays that changed.

        Whether an array changed depends on the examples. Where a guarantee is `promised`, such an array is left out and
        logged instead: an error would be a message to the server that no noise covers.
        """
        changed = [name for name in received if name not in params and not torch.equal(received[name], returned[name])]
        problems = [
            Problem(f"arrays.{name}", "was changed, but is not trained", "name it in `trainable`")
            for name in changed
            if not is_statistic(name)
        ]
        if self.statistics == "refuse":
            problem = "was changed: it is a mean over private examples, which no defence of the update covers"
            remedy = "set statistics='keep' (the server's stay) or 'send' (undefended), or normalise without them"
            problems += [Problem(f"arrays.{name}", problem, remedy) for name in changed if is_statistic(name)]
        if promised:
            for dropped in problems:
                LOG.warning("%s", replace(dropped, remedy=f"it is left out; {dropped.remedy}"))
        else:
            refuse(problems)
        # All or none: the server recognises which of the two from the encoding alone.
        return {name: received[name] - returned[name] for name in self._means(received, params)}

    def _means(self, received: Tensors, params: Tensors) -> list[str]:
        """List the statistics that are sent."""
        if self.statistics != "send":
            return []
        return [name for name, value in received.items() if name not in params and is_mean(name, value)]


class _AppError(Exception):
    """The app replied with an error."""

    def __init__(self, reply: Message) -> None:
        super().__init__(reply.error.reason)
        self.reply = reply


@dataclass(frozen=True)
class _Outgoing:
    """A reply, and the client's state after it."""

    sent: bytes
    records: Records
    state: Tensors


@dataclass(frozen=True)
class _Defending:
    """The defence of one round's update: parameters, key, transform and state."""

    question: Question
    params: Tensors
    key: Address
    send: Transform | None
    state: Tensors

    def sent(self, update: Tensors, used: Batch) -> tuple[Tensors, Tensors]:
        """Apply the transform to an update; return it with the next state."""
        assert self.send is not None
        with torch.no_grad():
            spec = self.send.noise(self.params).under("send").to(next(iter(self.params.values())).dtype)
            noise = select(spec.sample(self.key), "send")
            update, after = self.send.apply(update, select(self.state, "send"), noise, Seen(self.params, used))
            return update, finite_or_before(update, under("send", after), self.state)


def _trained(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let the app train on its strategy's message alone: Flower's own mods refuse a message with several records."""
    content = message.content
    message.content = RecordDict({name: record for name, record in content.items() if name != MARK})
    try:
        reply = call_next(message, context)
    finally:
        message.content = content
    if reply.has_error():
        raise _AppError(reply)
    return reply


def _unsupported(defence: Defence) -> Iterator[Problem]:
    """Report parts of a defence that cannot act on a finished update."""
    where = f"protect '{defence.name}'"
    slots = (("model", defence.model), ("batch", defence.batch), ("single gradients", defence.step))
    for target, slot in slots:
        if slot:
            yield Problem(where, f"acts on the {target}, but a mod sees only the finished update", _USE_ANSWER)
    layer = _small()
    params = {name: value.detach() for name, value in layer.named_parameters()}
    if needs_messages(defence.send, params):
        yield Problem(where, *NO_MESSAGES)
    for name, stage in stages(defence.send):
        if data_dependent(stage, Client(layer), _FEW):
            yield Problem(where, f"uses the examples in its stage '{name}', but a mod has none", _USE_ANSWER)


def _without_count(metrics: Mapping[str, int | float] | None) -> Iterator[Problem]:
    """Refuse metrics without the number of examples."""
    if metrics is not None and number_of_examples(_metrics(metrics).values()) is None:
        yield Problem("protect.metrics", f"has no '{COUNT}'", f"give the number of examples of a training: '{COUNT}'")


def _counted_too_late(defence: Defence) -> Iterator[Problem]:
    """Refuse noise whose privacy depends on metrics that the app reports after training: it is counted before."""
    client = Client(_small(), send=defence.send)
    one = Batch(*(value[:1] for value in _FEW))
    if examine(client, one) != examine(client, _FEW):
        problem = "divides its noise by the number of examples, which an app reports after training: too late to count"
        yield Problem(f"protect '{defence.name}'", problem, "give the noise of the mean: Gaussian(std, on='mean')")


_FEW = Batch(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
"""Examples on which a defence is tried when an app is loaded."""


def _small() -> nn.Module:
    """Build a model to try a defence with."""
    with drawing_from(Key(0).generator()):  # torch's own generator may be seeded by the app, and stays as it is
        return nn.Linear(2, 2)


def _returned(reply: Message, received: Tensors) -> Tensors:
    """Read the app's arrays in the dtypes of the received ones; another model is refused."""
    arrays = tensors(only_arrays(reply.content, "reply")[1])
    arrays = {name: value.to(received[name].dtype) if name in received else value for name, value in arrays.items()}
    refuse(Layout.of(received).differences(Layout.of(arrays)))
    return arrays


def _metrics(values: Mapping[str, int | float]) -> Records:
    return {"metrics": MetricRecord(dict(values))}


def _examples(count: int) -> Batch:
    """Stand in for the batch that a mod does not see: as many examples, without content."""
    return Batch(torch.zeros(count, 0), torch.zeros(count, 0))


def _holder(params: Tensors) -> nn.Module:
    """Build a module that has these parameters and computes nothing: a client's state is checked against them."""
    root = nn.Module()
    for name, value in params.items():
        module = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(value))
    return root
