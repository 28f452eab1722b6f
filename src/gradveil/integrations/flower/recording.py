"""A client mod that records what leaves any Flower app, for `gradveil audit --observed`."""

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
    """Return a mod that records what leaves: `ClientApp(mods=[record("/data/seen"), protect("topk(0.1)")])`.

    Put it first: it then stands outside of all others and sees what they make of the update, an encoded one or plain
    arrays (of which the update is the parameters received minus those returned). It changes nothing, and where it
    cannot record it says so in Flower's log and lets the reply pass.

    `defence` and `local` say what the app is configured as, for the attackers who will be told; `sends="gradient"`
    where `answer` sends the gradient of a client without local training. `rounds` and `clients` (their names, else
    partition or node numbers) choose what is kept, None for all. Private images are recorded only if `truth` is given.
    `trainable` has the patterns of `Client.trainable` and `protect`, where not all parameters are trained.
    """
    kept = UpdateRecorder(
        Path(folder).expanduser(),
        defence=defence,
        local=local,
        sends=sends,
        truth=truth is not None,
        rounds=rounds,
        clients=clients,
    )
    return _ModState(kept, truth, trainable)


@dataclass(frozen=True)
class _ModState:
    recorder: UpdateRecorder
    truth: Truth | None
    trainable: Sequence[str] | None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass everything on, and keep what answers a message for training."""
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
        number, client = _number(message), _who(context)
        if not self.recorder.wants(number, client):
            return
        here = replace(self.recorder, run=str(context.run_id))
        batch = None if self.truth is None else _told(self.truth, message, context)
        sent = _sent(only_arrays(reply.content, "reply")[1], received)
        names = self._names(sent, received) if isinstance(sent, bytes) else None
        count = number_of_examples(reply.content.metric_records.values(), COUNT, "num_examples")
        place = here.write(number, client, received, sent, count, truth=batch, tensors=names)
        LOG.info("recorded what left client %s in round %d: %s", client, number, place)

    def _names(self, sent: bytes, received: Tensors) -> list[str]:
        """Say what of the model an encoded update is of; its encoding has a digest of that."""
        layout = layout_of(sent, trained(received, self.trainable), received)
        if not fits(sent, layout):
            remedy = "tell record(...) which parameters are trained: trainable=[...], as for the client"
            raise fail("reply", "is of other tensors than those that are trained", remedy)
        return list(layout)


def _told(truth: Truth, message: Message, context: Context) -> Batch:
    """Ask the app for its private examples; whatever goes wrong there is no reason to stop a training."""
    try:
        return Batch(*truth(message, context))
    except FOREIGN as error:
        what = f"raised {type(error).__name__}: {error}"
        raise fail("truth", what, "let it return the inputs and the targets of this reply") from error


def _sent(arrays: ArrayRecord, received: Mapping[str, Tensor]) -> Tensors | bytes:
    """Return the encoded update as it is, or what plain arrays change of the received ones."""
    packed = arrays.get(PACKED)
    if packed is not None and packed.stype == STYPE:
        return packed.data
    returned = tensors(arrays)
    if problems := Layout.of(received).differences(Layout.of(returned)):
        raise fail("reply", f"holds other arrays than were received: {problems[0]}", "record before arrays are changed")
    return {name: value - returned[name] for name, value in received.items() if value.is_floating_point()}


def _number(message: Message) -> int:
    """Say which round it is: by Gradveil's mark, by the configuration that strategies send, by the message's group."""
    content = message.content.config_records
    found = [content[MARK].get("round")] if MARK in content else []
    found += [config.get(name) for config in content.values() for name in ("server-round", "server_round", "round")]
    numbers = [value for value in found if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    group = message.metadata.group_id
    if numbers:
        return numbers[0]
    if group.isdecimal():
        return int(group)
    raise fail("message", "does not say which round it is", "let the strategy send 'server-round' in its configuration")


def _who(context: Context) -> str:
    config = context.node_config
    return str(config.get(IDENTITY, config.get("partition-id", context.node_id)))
