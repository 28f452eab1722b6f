"""The clients of a federation that the engine can train as well, and a server that waits before the third round."""

import os
import time
from pathlib import Path

import torch
from flwr.app import MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file

from gradveil.integrations.flower import Protected, answer
from gradveil.integrations.flower.records import record, tensors
from tests.federated.scenes import federation

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
    return answer(message, context, ENGINE.client, batch, key=key)


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


@server.main()
def main(grid, _context):
    strategy = Protected(Waiting(fraction_evaluate=0.0))
    result = strategy.start(grid, record(ENGINE.client.params()), num_rounds=3)
    assert not strategy.refusals
    save_file(tensors(result.arrays), folder() / "final.part")
    (folder() / "final.part").rename(folder() / "final.safetensors")
