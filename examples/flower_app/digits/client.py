"""The client's side: `answer` trains, defends, keeps the client's state and replies."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from digits.task import examples, make_client
from gradveil.integrations.flower import answer

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one round."""
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return answer(message, context, make_client(), examples(number, clients))
