"""Flower in one process: real messages, apps and strategies, and a grid that calls the apps."""

from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from torch import nn

from gradveil.cli.app import run
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.privacy_ledger import place
from gradveil.integrations.flower import answer
from gradveil.integrations.flower.flower_records import MARK, mark, record, unpacked
from tests.federated.small_federations import blobs

RUN = 77
BATCH = Batch(torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([0, 1, 1]))


def context(number: int = 0, run: int = RUN, **config) -> Context:
    """What Flower hands to the app of node `number + 1`."""
    return Context(run, number + 1, {"partition-id": number, **config}, RecordDict(), {})


def copied(content: RecordDict) -> RecordDict:
    """What arrives at the other side of a wire."""
    return recorddict_from_proto(recorddict_to_proto(content))


class Loopback(Grid):
    """A grid of one app on so many nodes, which answer at once; each has its number as partition-id."""

    def __init__(self, app: ClientApp, nodes: int, **config):
        self.contexts = {number + 1: context(number, **config) for number in range(nodes)}
        self.app = app
        self.errors: list[str] = []
        self.bytes_up = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self.ask(message) for message in messages]

    def ask(self, message: Message) -> Message:
        own = Message(copied(message.content), message.metadata.dst_node_id, message.metadata.message_type)
        try:
            reply = self.app(own, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            self.errors.append(str(error))
            return Message(Error(0, str(error)), reply_to=own)
        reply.content = copied(reply.content)
        self.bytes_up += sum(len(a.data) for record in reply.content.array_records.values() for a in record.values())
        return reply

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def set_run(self, run) -> None: ...
    @property
    def run(self): ...
    def create_message(self, *args, **settings): ...
    def push_messages(self, messages): ...
    def pull_messages(self, message_ids): ...


def examples(context: Context) -> Batch:
    """The examples of a node: those that a client of `tests.federated.small_federations.federation` has."""
    number = int(context.node_config["partition-id"])
    return blobs(20 + number, 10 + number)


def helping(client: Client, folder: Path, **settings) -> ClientApp:
    """An app whose `train()` is one call; `key` is that of the engine, below which each client has its own."""
    app, key, dtype = ClientApp(), settings.pop("key", None), settings.pop("dtype", torch.float64)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = key and key.child("client", int(context.node_config["partition-id"]))
        inputs, targets = examples(context)
        batch = Batch(inputs.to(dtype), targets)
        return answer(message, context, client, batch, folder=folder, key=own, **settings)

    return app


def client(text="user-dp(clip=1, sigma=0.1) + topk(0.3, feedback=true)", model=None, **settings) -> Client:
    net = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for i, parameter in enumerate(net.parameters()):
        nn.init.normal_(parameter.data, generator=Key(i).generator())
    return parse(text)(Client(net, **settings))


def asked(number, of, shift=0.0) -> Message:
    arrays = record({name: value + shift for name, value in of.params().items()})
    return Message(RecordDict({"arrays": arrays, MARK: mark(number)}), dst_node_id=1, message_type="train")


def ledger(folder: Path, node: int = 0, training: str = "lungs") -> Path:
    """The ledger of a node for a training, made as its owner makes it."""
    words = ["--identity", f"partition-{node}", "--training", training, "--folder", str(folder)]
    assert run(["ledger", "create", *words]) == 0
    return place(folder, f"partition-{node}", training)


def bits(reply) -> bytes:
    return unpacked(copied(reply.content))
