"""A client mod that defends what an app sends after training by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from gradveil.client import Client, scheduled, steady
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Choice, collect
from gradveil.core.tree import Tensors, select, under
from gradveil.core.types import Batch, Transform
from gradveil.core.types import Context as Seen
from gradveil.defences import Defence, parse
from gradveil.defences.guarantees import examine, stages
from gradveil.defences.stage_probes import data_dependent
from gradveil.federated.model_inspection import POLICY, Policy
from gradveil.integrations.flower.answer import NO_MESSAGES, look, needs_messages, prepared, spend
from gradveil.integrations.flower.client_memory import LOG, Memory, opened
from gradveil.integrations.flower.flower_records import (
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
from gradveil.integrations.flower.privacy_budget import Limit, charged
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

    The guard inspects the weights that came. A mod has no examples, and so cannot measure what an update shows of them
    as `answer` does: what only that look catches passes here. `model` names the last layer and the embeddings; without
    it names and shapes do. `trainable`, `guard`, `folder`, `key`, `training`, `epsilon` and `delta` are as in `answer`
    and `Client`.
    """
    found = parse(defence) if isinstance(defence, str) else defence
    said = (("guard", POLICY, guard), ("statistics", _STATISTICS, statistics))
    refuse([*collect("protect", said), *_out_of_place(found)])
    limit = Limit.of(epsilon, delta, training, key)
    limit.provable(examine(Client(_small(), send=found.send), _FEW))
    return _Protect(found.send, model, trainable, statistics, guard, folder, key, training, limit)


@dataclass(frozen=True)
class _Protect:
    send: Transform | None
    model: nn.Module | None
    trainable: Sequence[str] | None
    statistics: Statistics
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
            if self.limit.epsilon is not None:  # before a training for nothing; how many examples it uses is told later
                charged(memory, client, _examples(1), self.limit)
            look(self.model, question.number, question.received, params, memory, self.guard)
            reply = _inside(message, context, call_next)
            if reply.has_error():
                return reply
            returned = _returned(reply, question.received)
            return self._defended(question, params, returned, _told(reply), memory, client, state)

    def _obey(self, context: Context, client: Client) -> None:
        """Refuse to train for less than the node's operator demands."""
        sent = _SENT if self.statistics == "send" else None
        asked = (client, _examples(1), self.limit, self.guard, self.training, self.key, self.folder, sent)
        obey(context, Asked(*asked))

    def _defended(
        self,
        question: Question,
        params: Tensors,
        returned: Tensors,
        told: Told,
        memory: Memory,
        client: Client,
        state: Tensors,
    ) -> Message:
        """Apply the transform to the update, keep its state, and reply."""
        rest = self._rest(question.received, returned, params, self._promises(client))
        update = {name: value - returned[name] for name, value in params.items()}
        with torch.no_grad():
            if self.send is not None:
                used = _count(told)
                beside = _SENT if rest else None
                here = scheduled(client, question.number - 1)
                here, charge = prepared(memory, client, here, used, self.limit, self.key, beside)
                spend(charge)
                assert here.send is not None
                spec = here.send.noise(params).under("send").to(next(iter(params.values())).dtype)
                noise = select(spec.sample(memory.key(question.number, self.key)), "send")
                update, after = here.send.apply(update, select(state, "send"), noise, Seen(params, used))
                state = steady(update, under("send", after), state)
        sent = encoded(update | rest)
        memory.keep(question, sent, told, client, state)
        return question.reply(sent, told)

    def _promises(self, client: Client) -> bool:
        return self.key is None and bool(examine(client, _FEW).sound)

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
        if self.statistics != "send":
            return {}
        # All or none: the server tells from the encoding alone which of the two it is.
        means = [name for name, value in received.items() if name not in params and is_mean(name, value)]
        return {name: received[name] - returned[name] for name in means}


def _inside(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let the app train on what its strategy sent: mods of Flower's refuse a message with more records than one."""
    content = message.content
    message.content = RecordDict({name: record for name, record in content.items() if name != MARK})
    try:
        return call_next(message, context)
    finally:
        message.content = content


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
