"""How long a search takes to reach a quality: processor seconds a target client to a mean SSIM of 0.6, 0.8 and 0.9.

    python -m benchmarks.time_to_quality --data-dir FOLDER --peer PEERS/bin/python [--output FILE]

Compared are Gradveil's `portfolio` with its first setting, its closed form `r-gap`, and two presets of the published
`breaching` package (`sh benchmarks/peer_environment.sh PEERS`): the attack of "inverting gradients" and `modern`.
Target clients are the first test images of CIFAR-10, one image an update, on the small network of the studies,
untrained; labels are known. Every contender is a process with one thread that waits while another works. Each is
asked for more and more iterations, since step sizes fall with the budget; the seconds to a quality are those of the
first run whose mean SSIM reaches it. Breaching attacks one client after the other; Gradveil all at once. `--batch 8`
compares updates of eight images.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from loops import CLASSES, SHAPE, model_of, peer_package  # noqa: E402 - the peer's environment has no package of ours

MODEL = "scheliga-cnn"
QUALITIES = (0.6, 0.8, 0.9)
CONTENDERS = ("gradveil portfolio", "gradveil r-gap", "breaching invertinggradients", "breaching modern")
COLUMNS = ("contender", "target_clients", "batch", "iterations", "seconds", "ssim", "recovered", "images", "date")
COLUMNS += ("machine", "torch", "seed")

Clients = tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]
"""Images [V, B, C, H, W] in units of the model, labels [V, B], and the mean and deviation of the pixels."""
Attack = Callable[[int], Tensor]
"""iterations -> reconstructions [V, B, C, H, W]."""


def read_clients(file: Path) -> Clients:
    """Read the target clients that the parent wrote."""
    with np.load(file) as held:
        images, labels = torch.from_numpy(held["images"]), torch.from_numpy(held["labels"])
        return images, labels, tuple(held["mean"].tolist()), tuple(held["std"].tolist())


def ours(name: str, clients: Clients) -> Attack:
    """Set up an attack of Gradveil on all target clients at once."""
    from dataclasses import replace

    from gradveil.attacks.attack_catalogue import make_attack
    from gradveil.attacks.knowledge import Knowledge
    from gradveil.attacks.protocol import Observation
    from gradveil.client import Client
    from gradveil.core.freed_memory import keep_freed_memory
    from gradveil.core.noise import Key
    from gradveil.core.types import Batch
    from gradveil.spaces import ImageSpace

    keep_freed_memory()
    images, labels, mean, std = clients
    client = Client(model_of(MODEL))
    params = client.params()
    with torch.no_grad():
        sent, _ = client.updates(params, Batch(images, labels), {}, {})
    seen = Observation(params=params, update=sent, examples=images.shape[1], target_clients=tuple(range(len(images))))
    knowledge = Knowledge(ImageSpace(SHAPE, mean, std), CLASSES, targets=labels)
    made: Any = make_attack(name)
    plans: dict[int, tuple[int, ...]] = {}

    def attack(iterations: int) -> Tensor:
        if name == "r-gap":
            return made([seen], client, knowledge, Key(0)).inputs
        descent = replace(made.descent, iterations=iterations)
        some = replace(made, variants=(), descent=descent)
        if not plans:
            plans[0] = some.plan([seen], client, knowledge, Key(0))
        return some([seen], client, knowledge, Key(0), plan=plans[0]).inputs

    return attack


def theirs(preset: str, clients: Clients) -> Attack:
    """Set up a preset of breaching, which attacks one target client after the other."""
    peer = peer_package()
    images, labels, mean, std = clients
    model, loss, settings = model_of(MODEL), nn.CrossEntropyLoss(), peer.get_attack_config(preset)
    facts = SimpleNamespace(shape=SHAPE, modality="vision", mean=mean, std=std, classes=CLASSES, task="classification")
    weights = list(model.parameters())
    payload = [{"parameters": [w.detach() for w in weights], "buffers": list(model.buffers()), "metadata": facts}]

    def attack(iterations: int) -> Tensor:
        settings.optim.max_iterations = iterations
        settings.optim.callback = iterations
        attacker = peer.attacks.prepare_attack(model, loss, settings)
        found = []
        for batch, classes in zip(images, labels, strict=True):
            sent = torch.autograd.grad(loss(model(batch), classes), weights)
            known = {"num_data_points": len(batch), "labels": classes, "local_hyperparams": None}
            shared = [{"gradients": sent, "buffers": None, "metadata": known}]
            found.append(attacker.reconstruct(payload, shared, {})[0]["data"].detach())
        return torch.stack(found)

    return attack


def serve(contender: str, folder: Path) -> None:
    """Answer numbers of iterations with the processor seconds that they took, until the input ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    answers, sys.stdout = sys.stdout, sys.stderr
    owner, name = contender.split()
    attack = (ours if owner == "gradveil" else theirs)(name, read_clients(folder / "clients.npz"))
    for line in sys.stdin:
        began = time.process_time()
        images = attack(int(line))
        seconds = time.process_time() - began
        np.save(folder / f"{owner}-{name}.npy", images.float().numpy())
        print(json.dumps(seconds), file=answers, flush=True)


class Contender:
    """A process that attacks when it is asked to."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        """Start it."""
        self.name, self.file = name, folder / f"{name.replace(' ', '-')}.npy"
        self.reached = 0.0
        pipe = subprocess.PIPE
        command = [python, str(HERE / "time_to_quality.py"), "--serve", name, str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def attack(self, iterations: int) -> tuple[float, Tensor]:
        """Return the processor seconds and the reconstructions of a run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(iterations, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}")
        return float(answer), torch.from_numpy(np.load(self.file))

    def stop(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(options: argparse.Namespace, number: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each run on this number of target clients, all contenders in turn."""
    from gradveil.data import load

    size = options.batch
    data = load("cifar10", data_dir=options.data_dir, limit_public=1, limit_private=number * size).private
    images, labels = data.inputs.view(number, size, *SHAPE), data.targets.view(number, size)
    truth = data.space.view(images)
    with tempfile.TemporaryDirectory() as held, ExitStack() as stack:
        folder = Path(held)
        np.savez(folder / "clients.npz", images=images, labels=labels, mean=data.mean, std=data.std)
        started = []
        for name in options.contenders:
            if size > 1 and name == "gradveil r-gap":
                continue
            python = options.peer if name.startswith("breaching") else sys.executable
            if python:
                started.append(Contender(name, folder, python))
                stack.callback(started[-1].stop)
        for iterations in options.iterations:
            for contender in started:
                if contender.reached >= max(QUALITIES) or (contender.name.endswith("r-gap") and contender.reached):
                    continue
                seconds, found = contender.attack(iterations)
                scores = data.space.scores(data.space.match(data.space.view(found), truth)[1], truth)["ssim"]
                contender.reached = float(scores.mean())
                yield {
                    "contender": contender.name,
                    "target_clients": number,
                    "batch": size,
                    "iterations": 0 if contender.name.endswith("r-gap") else iterations,
                    "seconds": round(seconds, 3),
                    "ssim": round(contender.reached, 4),
                    "recovered": int((scores > 0.5).sum()),
                    "images": scores.numel(),
                }


def main() -> None:
    """Measure, print, write."""
    from benchmarks.guard_sweep import facts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the files of CIFAR-10")
    parser.add_argument("--peer", help="Python of the environment with the breaching package")
    parser.add_argument("--target-clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--batch", type=int, default=1, help="images an update")
    parser.add_argument("--iterations", nargs="+", type=int, default=[62, 125, 250, 500, 1000, 2000, 4000])
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS], choices=CONTENDERS)
    parser.add_argument("--output", type=Path, help="a CSV file, to which lines are appended")
    options = parser.parse_args()
    for number in options.target_clients:
        for line in measured(options, number):
            print(*(line[name] for name in COLUMNS[:8]), sep="\t", flush=True)
            if options.output:
                new = not options.output.exists()
                with options.output.open("a", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, [*COLUMNS], lineterminator="\n", extrasaction="ignore")
                    if new:
                        writer.writeheader()
                    writer.writerow({**line, **facts()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
