"""What a round takes in the engine and in a Flower simulation, the same clients doing the same: wall time, one run.

    python benchmarks/flower_speed.py [--clients 10] [--rounds 12] [--output FILE]

Both train the very same `Client` objects on the same examples with the same noise, undefended; Flower's clients reply
with plain arrays, which its FedAvg averages: no encoding, no checks, no files. Flower has as many one-thread workers as
the machine has cores, the engine one process, with one thread and with as many; the ratio is to the faster. The engine
counts bytes as encoded and evaluates eight images; Flower does neither. The first two rounds (Ray starts,
shapes are checked once) are shown by themselves; the rest gives the median and the quartiles. At the end both hold the
same parameters, or the comparison is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from gradveil.client import Client, Local, drawn_update
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation
from gradveil.nn.models import build

EXAMPLES, WARM = 320, 2
LOADS = {"one gradient": None, "one epoch": Local(batch=64, lr=0.01, epochs=1)}


def experiment(load: str, clients: int) -> Federation:
    """Set up clients of the small CNN with images of noise."""
    key = Key(0)
    net = build("scheliga-cnn", channels=1, size=32, classes=10, generator=key.child("model").generator())

    def images(number: int, count: int) -> Batch:
        generator = key.child("data", number).generator()
        inputs = torch.randn(count, 1, 32, 32, generator=generator)
        return Batch(inputs, torch.randint(10, (count,), generator=generator))

    shares = [ClientShare(images(i, EXAMPLES)) for i in range(clients)]
    # A long step on images of noise would amplify the last bits, in which the two may differ.
    server = Server(lr=1.0 if LOADS[load] else 0.05)
    return Federation(Client(net, local=LOADS[load]), shares, images(clients, 8), server, key.child("train"))


def by_engine(federation: Federation, rounds: int, threads: int) -> tuple[list[float], dict[str, Tensor]]:
    """Time the engine's rounds, with all that it does in one: bytes as encoded, records, a look at eight images."""
    torch.set_num_threads(threads)
    standing, spent = federation.start(), []
    for _ in range(rounds):
        start = time.perf_counter()
        standing = federation.round(standing)
        spent.append(time.perf_counter() - start)
    return spent, standing.params


def by_flower(load: str, clients: int, rounds: int, cores: int) -> tuple[list[float], dict[str, Tensor]]:
    """Time the rounds of a simulation, from one round's configuration to the next one's."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, found = ClientApp(), dict[str, Any]()
    known: dict[str, Federation] = {}

    @client.train()
    def train(message: Message, context: Any) -> Message:
        torch.set_num_threads(1)
        federation = known.get(load) or known.setdefault(load, experiment(load, clients))
        number, turn = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        params = {name: value.clone() for name, value in message.content["arrays"].to_torch_state_dict().items()}
        batch, key = federation.shares[number].train, federation.key.child("client", number, "round", turn)
        with torch.no_grad():
            sent, _ = drawn_update(federation.client, params, batch, key, {})
        after = ArrayRecord({name: params[name] - federation.server.lr * value for name, value in sent.items()})
        metrics = MetricRecord({"num-examples": len(batch.targets)})
        return Message(RecordDict({"arrays": after, "metrics": metrics}), reply_to=message)

    class Timed(FedAvg):
        """FedAvg that notes when each round begins."""

        def configure_train(self, server_round: int, *rest: Any) -> Any:
            found.setdefault("begun", []).append(time.perf_counter())
            return super().configure_train(server_round, *rest)

    server = ServerApp()

    @server.main()
    def main(grid: Any, _context: Any) -> None:
        strategy = Timed(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        start = ArrayRecord(experiment(load, clients).client.params())
        result = strategy.start(grid, start, num_rounds=rounds + 1)  # the last only ends the one before it
        found["arrays"] = None if result is None else result.arrays.to_torch_state_dict()

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": cores, "include_dashboard": False}}
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(server, client, clients, backend_config=backend)
    begun = found["begun"]
    return [after - before for before, after in itertools.pairwise(begun)], found["arrays"]


def compare(load: str, clients: int, rounds: int, cores: int) -> dict[str, Any]:
    """Time both, one after the other, and hold their parameters together."""
    theirs, their_params = by_flower(load, clients, rounds, cores)
    federation = experiment(load, clients)
    wide, _ = by_engine(federation, rounds, cores)
    ours, params = by_engine(federation, rounds + 1, 1)
    ours = ours[:rounds]
    apart = max(float((params[n] - v).abs().max() / v.abs().max()) for n, v in their_params.items())
    if not apart < 1e-4:
        raise SystemExit(f"{load}: the parameters differ by {apart:.1e}, so the two did not do the same")
    row = {
        "load": load,
        "engine_seconds": median(ours[WARM:]),
        "engine_quartiles": quantiles(ours[WARM:], n=4)[::2],
        "engine_seconds_all_threads": median(wide[WARM:]),
        "flower_seconds": median(theirs[WARM:]),
        "flower_quartiles": quantiles(theirs[WARM:], n=4)[::2],
        "first_rounds": {"engine": ours[:WARM], "flower": theirs[:WARM]},
        "largest_relative_difference": apart,
    }
    best = min(row["engine_seconds"], row["engine_seconds_all_threads"])
    return row | {"flower_over_engine": row["flower_seconds"] / best}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    results = []
    for load in options.loads:
        results.append(row := compare(load, options.clients, options.rounds, cores))
        print(
            f"{load:13} engine {1e3 * row['engine_seconds']:.0f} ms a round on one thread, "
            f"{1e3 * row['engine_seconds_all_threads']:.0f} on all, Flower {1e3 * row['flower_seconds']:.0f} ms: "
            f"{row['flower_over_engine']:.1f}x; parameters differ by {row['largest_relative_difference']:.0e}",
            flush=True,
        )
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {cores} cores",
        "torch": torch.__version__,
        "clients": options.clients,
        "rounds": options.rounds,
        "examples": EXAMPLES,
    }
    if options.output:
        options.output.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
