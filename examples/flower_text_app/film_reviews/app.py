"""Both sides: clients call `answer`, the server wraps its strategy in `Protected`."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Generator

from gradveil.client import Client, Local
from gradveil.core import Batch
from gradveil.data import Splits, iid, load
from gradveil.defences import parse
from gradveil.integrations.flower import Protected, answer
from gradveil.nn import build

DEFENCE = "dp(clip=1, sigma=1)"

client_app = ClientApp()
server_app = ServerApp()


def protected(texts: Splits) -> Client:
    """Build a small encoder whose clients clip the gradient of every sentence and add noise in every step."""
    facts = texts.public.space.model_facts()
    net = build("small-encoder", classes=2, generator=Generator().manual_seed(0), example=facts, width=32, depth=1)
    return parse(DEFENCE)(Client(net, local=Local(batch=22, lr=0.003, epochs=1, optimiser="adam", sampling="poisson")))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one round with this client's share of the public sentences."""
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    texts = load(str(context.run_config["texts"]))
    part = iid(len(texts.public), clients, Generator().manual_seed(0))[number]
    return answer(message, context, protected(texts), Batch(texts.public.inputs[part], texts.public.targets[part]))


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print after each round the accuracy on sentences that no client has."""
    texts = load(str(context.run_config["texts"]))
    client, test = protected(texts), texts.private

    def accuracy(_round: int, arrays: ArrayRecord) -> MetricRecord:
        client.model.load_state_dict(arrays.to_torch_state_dict())
        right = client.model(test.inputs).argmax(1) == test.targets
        return MetricRecord({"accuracy": float(right.float().mean())})

    strategy = Protected(FedAvg(fraction_evaluate=0.0))
    rounds = int(context.run_config["rounds"])
    strategy.start(grid, ArrayRecord(client.params()), num_rounds=rounds, evaluate_fn=accuracy)
