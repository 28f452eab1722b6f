"""The server's side: any strategy, inside `Protected`."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import held_out, make_client
from gradveil.integrations.flower import Protected

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and tell after each round how many digits that no client has are read rightly."""
    torch.manual_seed(0)  # every run starts from the same weights
    client, test = make_client(), held_out()

    def accuracy(_round: int, arrays: ArrayRecord) -> MetricRecord:
        client.model.load_state_dict(arrays.to_torch_state_dict())
        right = client.model(test.inputs).argmax(1) == test.targets
        return MetricRecord({"accuracy": float(right.float().mean())})

    strategy = Protected(FedAvg(fraction_evaluate=0.0))
    rounds = int(context.run_config["rounds"])
    strategy.start(grid, ArrayRecord(client.params()), num_rounds=rounds, evaluate_fn=accuracy)
