"""A client mod that defends what an app sends after training by itself."""

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
from gradveil.integrations.flower.answer import NO_MESSAGES, look, needs_messages, prepared, spend
from gradveil.integrations.flower.client_memory import LOG, Answer, Memory, opened
from gradveil.integrations.flower.flower_records import (
    COUNT,
    MARK,
    Question,
    Told,
    encoded,
    is_mean,
    number_of_examples,
    only_arrays,
    tensors,
    trained,
)
from gradveil.integrations.flower.node_policy import Asked, obey
from gradveil.integrations.flower.privacy_budget import Charge, Limit
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.weight_files import is_statistic
from gradveil.wire.codec import Layout

Statistics = Literal["refuse", "keep", "send"]
"""What is done with running statistics that training changed."""
_STATISTICS = Choice(get_args(Statistics))
_SENT = "running statistics are sent beside it, undefended"
_HELPER = "call gradveil.integrations.flower.answer(...) in train(): it runs every defence"


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
    """Return a mod that defends what `train()` sends: `@app.train(mods=[protect("topk(0.1, feedback=true)")])`.

    The update is the parameters received minus those returned. Defences of the model, the batch or single gradients
    cannot be applied to it and are refused; `answer` has a place for them. Mods that stand before this one see the
    encoded update, those after it what the app returned.

    Running statistics of BatchNorm layers are means over private examples. If `train()` changed them, `"refuse"` sends
    nothing, `"keep"` leaves them out (the server's stay as they are), and `"send"` sends them, **undefended**.

    Where a formal guarantee holds, the round is counted before the app runs, and a training that fails is no message to
    the server: an app that raises, replies with an error, or returns what is not finite or does not fit, counts as an
    update of zeros, to which the noise is added. The log has the cause. Such a reply says beside the update what the
    last one said, and one example if there was none. `metrics` says it from the start (`{"num-examples": 512}`): then
    every reply has those alone, and nothing that the app tells.

    The guard inspects the weights that came. A mod has no examples, and so cannot measure what an update shows of them
    as `answer` does: what only that look catches passes here. `model` names the last layer and the embeddings; without
    it names and shapes do. `trainable`, `guard`, `folder`, `key`, `training`, `epsilon` and `delta` are as in `answer`
    and `Client`.
    """
    found = parse(defence) if isinstance(defence, str) else defence
    said = (("guard", POLICY, guard), ("statistics", _STATISTICS, statistics))
    refuse([*collect("protect", said), *_out_of_place(found), *_uncounted(metrics)])
    if key is None:
        refuse([*_priced_late(found)])
    limit = Limit.of(epsilon, delta, training, key)
    limit.provable(examine(Client(_small(), send=found.send), _FEW))
    return _Protect(found.send, model, trainable, statistics, metrics, guard, folder, key, training, limit)


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
        """Let the app train, and send its update defended; other messages pass."""
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        question = Question.of(message)
        params = trained(question.received, self.trainable)
        client = Client(_holder(params), send=self.send)
        self._obey(context, client)
        with opened(context, self.folder, self.training) as memory:
            if (before := memory.repeated(question)) is not None:
                return question.reply(before.sent, before.told)
            with torch.no_grad():
                state = memory.state(client, params)
            here, charge = self._prepared(question, client, params, memory)
            look(self.model, question.number, question.received, params, memory, self.guard)
            promised = charge is not None and bool(charge.epsilon)
            last = memory.previous(question.number) if promised else None
            spend(charge)
            now = _Defending(question, params, memory.key(question.number, self.key), here.send, state)
            try:
                done = self._defended(now, _trained(message, context, call_next), promised)
            except FOREIGN as error:
                if promised:
                    # Noise of its own: what failed may be a sum with the noise that was drawn before.
                    anew = replace(now, key=memory.key(question.number, None))
                    done = self._idle(anew, last, f"{type(error).__name__}: {error}")
                elif isinstance(error, _AppError):
                    return error.reply
                else:
                    raise
            memory.keep(question, done.sent, done.told, client, done.state)
            return question.reply(done.sent, done.told)

    def _obey(self, context: Context, client: Client) -> None:
        """Refuse to train for less than the node's operator demands."""
        sent = _SENT if self.statistics == "send" else None
        asked = (client, _examples(1), self.limit, self.guard, self.training, self.key, self.folder, sent)
        obey(context, Asked(*asked))

    def _prepared(
        self, question: Question, client: Client, params: Tensors, memory: Memory
    ) -> tuple[Client, Charge | None]:
        """Return the client as it answers, and what that costs: the same for any number of examples."""
        if self.send is None:
            return client, None
        beside = _SENT if self._means(question.received, params) else None
        here = scheduled(client, question.number - 1)
        return prepared(memory, client, here, _examples(1), self.limit, self.key, beside)

    def _defended(self, now: _Defending, reply: Message, promised: bool) -> _Outgoing:
        """Apply the transform to the update that an app has made."""
        received, params = now.question.received, now.params
        returned = _returned(reply, received)
        told = _told(reply) if self.metrics is None else _metrics(self.metrics)
        rest = self._rest(received, returned, params, promised)
        update = {name: value - returned[name] for name, value in params.items()}
        if promised and not all_finite(update):
            raise fail("update", "is not finite", "lower the step size, or look at the examples")
        if now.send is None:
            return _Outgoing(encoded(update | rest), told, now.state)
        update, state = now.sent(update, _count(told))
        return _Outgoing(encoded(update | rest), told, state)

    def _idle(self, now: _Defending, last: tuple[Answer, int] | None, why: str) -> _Outgoing:
        """Let an update of zeros take the place of one that could not be made; only the log has the cause."""
        LOG.error("the update cannot be computed, and counts as zeros: %s", why)
        told = _metrics({COUNT: 1} if self.metrics is None else self.metrics)
        if last is not None and self.metrics is None:
            told = last[0].told
        zeros = {name: torch.zeros_like(value) for name, value in now.params.items()}
        update, state = now.sent(zeros, _examples(number_of_examples(told.values()) or 1))
        return _Outgoing(encoded(update), told, state)

    def _rest(self, received: Tensors, returned: Tensors, params: Tensors, promised: bool) -> Tensors:
        """Return the statistics to be sent; refuse what changed and may not be sent.

        Whether something changed depends on the examples. Where a guarantee is `promised`, it is left out, and only the
        log has it: an error would be a message to the server which no noise covers.
        """
        changed = [name for name in received if name not in params and not torch.equal(received[name], returned[name])]
        problems = [
            Problem(f"arrays.{name}", "was changed, and is not among what is trained", "name it in `trainable`")
            for name in changed
            if not is_statistic(name)
        ]
        if self.statistics == "refuse":
            what = "was changed: it is a mean over private examples, which no defence of the update covers"
            remedy = "say statistics='keep' (the server's stay) or 'send' (undefended), or normalise without them"
            problems += [Problem(f"arrays.{name}", what, remedy) for name in changed if is_statistic(name)]
        if promised:
            for problem in problems:
                LOG.warning("%s", replace(problem, remedy=f"it is left out; {problem.remedy}"))
        else:
            refuse(problems)
        # All or none: the server tells from the encoding alone which of the two it is.
        return {name: received[name] - returned[name] for name in self._means(received, params)}

    def _means(self, received: Tensors, params: Tensors) -> list[str]:
        """Name the statistics that are sent."""
        if self.statistics != "send":
            return []
        return [name for name, value in received.items() if name not in params and is_mean(name, value)]


class _AppError(Exception):
    """An app has replied with an error."""

    def __init__(self, reply: Message) -> None:
        super().__init__(reply.error.reason)
        self.reply = reply


@dataclass(frozen=True)
class _Outgoing:
    """What is sent in a round, and what is kept of it."""

    sent: bytes
    told: Told
    state: Tensors


@dataclass(frozen=True)
class _Defending:
    """What an update of one round is defended with."""

    question: Question
    params: Tensors
    key: Address
    send: Transform | None
    state: Tensors

    def sent(self, update: Tensors, used: Batch) -> tuple[Tensors, Tensors]:
        """Apply the transform to an update; return the next state too."""
        assert self.send is not None
        with torch.no_grad():
            spec = self.send.noise(self.params).under("send").to(next(iter(self.params.values())).dtype)
            noise = select(spec.sample(self.key), "send")
            update, after = self.send.apply(update, select(self.state, "send"), noise, Seen(self.params, used))
            return update, finite_or_before(update, under("send", after), self.state)


def _trained(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let the app train on what its strategy sent: mods of Flower's refuse a message with more records than one."""
    content = message.content
    message.content = RecordDict({name: record for name, record in content.items() if name != MARK})
    try:
        reply = call_next(message, context)
    finally:
        message.content = content
    if reply.has_error():
        raise _AppError(reply)
    return reply


def _out_of_place(defence: Defence) -> Iterator[Problem]:
    """Say what a defence does that cannot be done to an update."""
    where = f"protect '{defence.name}'"
    slots = (("model", defence.model), ("batch", defence.batch), ("single gradients", defence.step))
    for what, slot in slots:
        if slot:
            yield Problem(where, f"acts on the {what}, and a mod sees the finished update only", _HELPER)
    layer = _small()
    params = {name: value.detach() for name, value in layer.named_parameters()}
    if needs_messages(defence.send, params):
        yield Problem(where, *NO_MESSAGES)
    for name, stage in stages(defence.send):
        if data_dependent(stage, Client(layer), _FEW):
            yield Problem(where, f"looks at the examples in its stage '{name}', and a mod has none", _HELPER)


def _uncounted(metrics: Mapping[str, int | float] | None) -> Iterator[Problem]:
    """Refuse metrics for every reply that say nothing of the number of examples."""
    if metrics is not None and number_of_examples(_metrics(metrics).values()) is None:
        yield Problem("protect.metrics", f"has no '{COUNT}'", f"say how many examples a training uses: '{COUNT}'")


def _priced_late(defence: Defence) -> Iterator[Problem]:
    """Refuse noise whose privacy depends on what the app tells after its training: it is counted before."""
    client = Client(_small(), send=defence.send)
    one = Batch(*(value[:1] for value in _FEW))
    if examine(client, one) != examine(client, _FEW):
        what = "divides its noise by the number of examples, which an app tells when it has trained: too late to count"
        yield Problem(f"protect '{defence.name}'", what, "give the noise of the mean: Gaussian(std, on='mean')")


_FEW = Batch(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
"""What a defence is tried with when an app is loaded."""


def _small() -> nn.Module:
    """Build a model to try a defence with."""
    with drawing_from(Key(0).generator()):  # of its own: an app that seeds torch's has to find it as it left it
        return nn.Linear(2, 2)


def _returned(reply: Message, received: Tensors) -> Tensors:
    """Read what the app returned, in the dtypes of what it received; another model is refused."""
    found = tensors(only_arrays(reply.content, "reply")[1])
    found = {name: value.to(received[name].dtype) if name in received else value for name, value in found.items()}
    refuse(Layout.of(received).differences(Layout.of(found)))
    return found


def _told(reply: Message) -> Told:
    """Return what the app replied beside the model."""
    content = reply.content
    return {**content.metric_records, **content.config_records}


def _metrics(values: Mapping[str, int | float]) -> Told:
    return {"metrics": MetricRecord(dict(values))}


def _count(told: Told) -> Batch:
    """Stand in for the batch that a mod does not see: it has the right number of examples, and nothing in them."""
    count = number_of_examples(told.values())
    if count is None:
        raise fail("reply.metrics", "does not say how many examples were used", "put 'num-examples' into the metrics")
    return _examples(count)


def _examples(count: int) -> Batch:
    return Batch(torch.zeros(count, 0), torch.zeros(count, 0))


def _holder(params: Tensors) -> nn.Module:
    """Build a module that has these parameters and computes nothing: a state says which parameters it belongs to."""
    root = nn.Module()
    for name, value in params.items():
        place = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(value))
    return root
