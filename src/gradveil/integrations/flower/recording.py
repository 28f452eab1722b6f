"""A client mod that records the updates of any Flower app, for `gradveil audit --observed`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from gradveil.core.errors import FOREIGN, GradveilError, fail
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.update_records import Sends, UpdateRecorder
from gradveil.integrations.flower.answer import LOG
from gradveil.integrations.flower.client_memory import IDENTITY
from gradveil.integrations.flower.flower_records import (
    COUNT,
    MARK,
    PACKED,
    STYPE,
    layout_of,
    number_of_examples,
    only_arrays,
    tensors,
    trained,
)
from gradveil.wire.codec import Layout, fits

Truth = Callable[[Message, Context], tuple[Tensor, Tensor]]
"""(message, context) -> the inputs [B, C, H, W], as the model takes them, and the targets [B] of a reply."""


def record(
    folder: Path | str,
    *,
    defence: str | None = None,
    local: LocalConfig | None = None,
    sends: Sends = "difference",
    rounds: Collection[int] | None = (1,),
    clients: Collection[str] | None = None,
    truth: Truth | None = None,
    trainable: Sequence[str] | None = None,
) -> Mod:
    """Return a mod that records updates: `ClientApp(mods=[record("/data/seen"), protect("topk(0.1)")])`.

    Put it first, so that it sees the update after all other mods: an encoded update, or plain arrays (then the update
    is the parameters received minus those returned). It changes nothing. If it cannot record a reply, it logs a warning
    and lets the reply pass.

    `defence` and `local` describe the app's configuration, which attacks on the record may know. Set `sends="gradient"`
    if `answer` sends the gradient of a client without local training. `rounds` and `clients` (names, or partition or
    node numbers) choose which updates are kept; None keeps all. Private images are recorded only with `truth`.
    `trainable` has the patterns of `Client.trainable` and `protect`, where not all parameters are trained.
    """
    recorder = UpdateRecorder(
        Path(folder).expanduser(),
        defence=defence,
        local=local,
        sends=sends,
        truth=truth is not None,
        rounds=rounds,
        clients=clients,
    )
    return _ModState(recorder, truth, trainable)


@dataclass(frozen=True)
class _ModState:
    recorder: UpdateRecorder
    truth: Truth | None
    trainable: Sequence[str] | None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass every message on, and record the replies to training messages."""
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:
            # Read before the app may change it in place.
            received = tensors(only_arrays(message.content, "message")[1])
        except GradveilError as error:
            LOG.warning("not recorded: %s", error)
            return call_next(message, context)
        reply = call_next(message, context)
        if not reply.has_error():
            try:
                self._keep(message, context, received, reply)
            except GradveilError as error:
                LOG.warning("not recorded: %s", error)
        return reply

    def _keep(self, message: Message, context: Context, received: Tensors, reply: Message) -> None:
        config = context.node_config
        number, client = _number(message), str(config.get(IDENTITY, config.get("partition-id", context.node_id)))
        if not self.recorder.wants(number, client):
            return
        here = replace(self.recorder, run=str(context.run_id))
        batch = None if self.truth is None else _ground_truth(self.truth, message, context)
        sent = _sent(only_arrays(reply.content, "reply")[1], received)
        names = self._names(sent, received) if isinstance(sent, bytes) else None
        count = number_of_examples(reply.content.metric_records.values(), COUNT, "num_examples")
        file = here.write(number, client, received, sent, count, truth=batch, tensors=names)
        LOG.info("recorded the update of client %s in round %d: %s", client, number, file)

    def _names(self, sent: bytes, received: Tensors) -> list[str]:
        """List the tensors of an encoded update, which holds only a digest of them."""
        layout = layout_of(sent, trained(received, self.trainable), received)
        if not fits(sent, layout):
            remedy = "name the trained parameters: record(..., trainable=[...]), as for the client"
            raise fail("reply", "holds other tensors than the trained ones", remedy)
        return list(layout)


def _ground_truth(truth: Truth, message: Message, context: Context) -> Batch:
    """Ask the app for its private examples; no error of the app's may stop the training."""
    try:
        return Batch(*truth(message, context))
    except FOREIGN as error:
        problem = f"raised {type(error).__name__}: {error}"
        raise fail("truth", problem, "return the inputs and the targets of this reply") from error


def _sent(arrays: ArrayRecord, received: Mapping[str, Tensor]) -> Tensors | bytes:
    """Return the encoded update as it is, or the difference of the received and the returned arrays."""
    packed = arrays.get(PACKED)
    if packed is not None and packed.stype == STYPE:
        return packed.data
    returned = tensors(arrays)
    if problems := Layout.of(received).differences(Layout.of(returned)):
        raise fail(
            "reply", f"holds other arrays than were received: {problems[0]}", "record before mods that change arrays"
        )
    return {name: value - returned[name] for name, value in received.items() if value.is_floating_point()}


def _number(message: Message) -> int:
    """Read the number of the round from Gradveil's mark, the strategy's configuration or the message's group."""
    content = message.content.config_records
    candidates = [content[MARK].get("round")] if MARK in content else []
    candidates += [
        config.get(name) for config in content.values() for name in ("server-round", "server_round", "round")
    ]
    numbers = [value for value in candidates if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    group = message.metadata.group_id
    if numbers:
        return numbers[0]
    if group.isdecimal():
        return int(group)
    raise fail(
        "message", "does not give the number of the round", "let the strategy send 'server-round' in its configuration"
    )
