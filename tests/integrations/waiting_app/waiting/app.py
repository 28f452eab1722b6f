"""The clients of a federation that the engine can train as well, and two servers: one that waits, one that insists.

The first waits before the third round until the test says who takes part. The second asks whoever appears until both
clients have answered, and goes on until the test says that it is enough.
"""

import os
import time
from pathlib import Path

import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file

from gradveil.integrations.flower import Protected, answer
from gradveil.integrations.flower.flower_records import record, tensors
from tests.federated.small_federations import federation

torch.set_num_threads(1)
ENGINE = federation("dp(clip=1, sigma=1e-3) + topk(0.1, feedback=true)", clients=2, validation=False)

client = ClientApp()
server = ServerApp()


def folder() -> Path:
    """Where the test and the server leave each other files."""
    return Path(os.environ["GRADVEIL_TEST_FOLDER"])


@client.train()
def train(message, context):
    number = int(context.node_config["partition-id"])
    batch, key = ENGINE.shares[number].train, ENGINE.key.child("client", number)
    return answer(message, context, ENGINE.client, batch, key=key, metrics={"partition": number})


class Waiting(FedAvg):
    """From the third round on those take part whose ids the test has written down."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round < 3:
            return super().configure_train(server_round, arrays, config, grid)
        (folder() / "waiting").touch()
        while not (folder() / "nodes").exists():
            time.sleep(0.05)
        nodes = [int(node) for node in (folder() / "nodes").read_text().split()]
        while not set(nodes) <= set(grid.get_node_ids()):
            time.sleep(0.05)
        return self._construct_messages(RecordDict({"arrays": arrays, "config": config}), nodes, MessageType.TRAIN)


class Everyone(FedAvg):
    """All nodes that are there take part. FedAvg would wait for ever if one goes after it counted them."""

    def configure_train(self, server_round, arrays, config, grid):
        nodes = list(grid.get_node_ids())
        return self._construct_messages(RecordDict({"arrays": arrays, "config": config}), nodes, MessageType.TRAIN)


def insist(grid, strategy, number, arrays):
    """One reply of each client: nodes that appear are asked too, and those that failed are asked again."""
    question, waiting, result = set(), set(), {}
    while len(result) < 2:
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        present = {message.metadata.dst_node_id for message in messages}
        result = {client: reply for client, reply in result.items() if reply.metadata.src_node_id in present}
        new = [message for message in messages if message.metadata.dst_node_id not in question]
        waiting |= set(grid.push_messages(new))
        question |= {message.metadata.dst_node_id for message in new}
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            if reply.has_error():
                question.discard(reply.metadata.src_node_id)
            else:
                result[reply.content["metrics"]["partition"]] = reply
        time.sleep(0.2)
    return list(result.values())


def until_enough(grid, strategy, arrays):
    """Train until the test says that it is enough; return the parameters and the number of rounds."""
    number = 0
    while number < 2 or not (folder() / "enough").exists():
        number += 1
        replies = insist(grid, strategy, number, arrays)
        arrays, _ = strategy.aggregate_train(number, replies)
        (folder() / "rounds").write_text(str(number))
    return arrays, number


@server.main()
def main(grid, _context):
    start = record(ENGINE.client.params())
    if os.environ.get("GRADVEIL_TEST_SERVER") == "insists":
        strategy = Protected(Everyone(fraction_evaluate=0.0))
        arrays, number = until_enough(grid, strategy, start)
    else:
        strategy, number = Protected(Waiting(fraction_evaluate=0.0)), 3
        arrays = strategy.start(grid, start, num_rounds=number).arrays
    assert not strategy.refusals
    save_file({**tensors(arrays), "rounds": torch.tensor(number)}, folder() / "final.part")
    (folder() / "final.part").rename(folder() / "final.safetensors")
