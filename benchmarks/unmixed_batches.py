"""How many images of a batch come back from the gradient of a fully connected first layer.

    python benchmarks/unmixed_batches.py batches --data-dir FOLDER [--output FILE]
    python benchmarks/unmixed_batches.py noise --data-dir FOLDER [--output FILE]
    python benchmarks/unmixed_batches.py defences --data-dir FOLDER [--output FILE]
    python benchmarks/unmixed_batches.py searches --data-dir FOLDER [--output FILE]

CIFAR-10, an untrained MLP 3072-512-512-10. Updates of up to 32 images hold the first test images, larger ones training
images. `batches` has sums of clients and local epochs too, `noise` Gaussian noise in units of the gradient's root mean
square, `defences` one setting or more of every defence, `searches` other attackers of `adaptive`, with labels.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, in_words
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch, Domain
from gradveil.data import DATA_DIR, load
from gradveil.defences import parse
from gradveil.nn.models import build
from gradveil.spaces import ImageSpace

IMAGES, PUBLIC = 32, 2000
SEEDS = (0, 1)
NOISES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
DEFENCES = (
    *("none", "clip(1)", "clip-example(1)", "gaussian(1e-4)", "gaussian(1e-3)", "gaussian(1e-2)", "laplace(1e-3)"),
    *("dp", "dp(clip=1, sigma=0.01)", "fed-cdp", "user-dp", "prune(0.5)", "prune(0.9)", "topk(0.1)"),
    *(
        "dgp",
        "dgp(top=0.2, bottom=0.6)",
        "adgp",
        "sign",
        "ternary",
        "quantise",
        "quantise(bits=4)",
        "minmax(0.8)",
        "dgc",
    ),
    *("standin", "optimal-noise(1e-3)", "optimal-prune(0.8)", "soteria", "outpost", "label-smoothing", "mixup"),
    *("instahide", "ats", "dropout", "precode", "cvb", "keylock", "svdefense", "dcs"),
)
SEARCHES = (("none", ("ig-scheliga",)), ("gaussian(1e-3)", ("cdia",)), ("prune(0.9)", ("cdia",)), ("sign", ("cdia",)))
"""(defence, attackers): the best of those that `adaptive` had."""


@dataclass(frozen=True)
class Setting:
    """Updates to attack."""

    batch: int
    normalised: bool = True
    seed: int = 0
    defence: str = "none"
    noise: float = 0.0
    local: Local | None = None
    members: int = 1
    attack: str = "unmix"
    activation: str = "relu"


def settings(what: str, iterations: int, defences: tuple[str, ...]) -> Iterator[Setting]:
    """List the settings of a part of the benchmark."""
    epochs = Local(batch=8, lr=0.05, epochs=2)
    if what == "batches":
        for normalised in (False, True):
            for seed in SEEDS:
                for batch in (8, 32, 64, 128):
                    yield Setting(batch, normalised, seed)
                yield Setting(32, normalised, seed, local=epochs)
                yield Setting(32, normalised, seed, members=4)
                yield Setting(32, normalised, seed, activation="sigmoid")
                yield Setting(32, normalised, seed, activation="gelu")
    elif what == "noise":
        for normalised in (False, True):
            for noise in NOISES:
                for batch in (8, 32, 64, 128, 256) if normalised else (8, 32):
                    yield Setting(batch, normalised, noise=noise)
    elif what == "defences":
        for defence in defences:
            for batch in (8, 32):
                yield Setting(batch, defence=defence)
    else:
        for defence, attacks in SEARCHES:
            for attack in attacks:
                for batch in (8, 32):
                    yield Setting(batch, defence=defence, attack=f"{attack}(iterations={iterations})")


def measured(setting: Setting, splits: Any) -> dict[str, Any]:
    """Attack updates of one setting; count what comes back."""
    source = splits.private if setting.batch <= IMAGES else splits.public
    clients = max(1, IMAGES // setting.batch)
    space = splits.private.space
    shape = (clients, setting.batch, *space.shape)
    count = clients * setting.batch
    inputs, targets = source.inputs[:count].view(shape), source.targets[:count].view(shape[:2])
    if not setting.normalised:
        inputs, space = space.view(inputs), ImageSpace(space.shape)
    net = build(
        "mlp",
        channels=space.shape[0],
        size=space.shape[1],
        classes=10,
        activation=setting.activation,
        generator=Key(setting.seed, ("net",)).generator(),
    )
    public = splits.public.inputs if setting.normalised else splits.public.views
    domain = Domain(space, 10, public[-IMAGES:])
    client = Client(net, local=setting.local, members=setting.members, domain=domain)
    client = parse(setting.defence)(client, Key(setting.seed, ("defence",)))
    params, batch = client.params(), Batch(inputs, targets)
    spec = client.noise_spec(params, Batch(inputs[0], targets[0]))
    drawn = [spec.sample(Key(setting.seed, ("client",)).child(number)) for number in range(clients)]
    state = {name: value.expand(clients, *value.shape) for name, value in client.init(params).items()}
    sent = {
        n: v.detach() for n, v in client.updates(params, batch, stack(drawn) if len(spec) else {}, state)[0].items()
    }
    if setting.noise:
        first = next(iter(sent))
        size = setting.noise * sent[first].square().mean().sqrt()
        generator = Key(setting.seed, ("noise",)).generator()
        sent = {n: v + size * torch.randn(v.shape, generator=generator) for n, v in sent.items()}
    attack = make_attack(setting.attack)
    simulated = client if attack.simulated_client == "full" else client.undefended_update()
    known = Knowledge(space, 10, tensors=attack.knowledge)
    known = known if setting.attack.startswith("unmix") else replace(known, targets=targets)
    began = time.perf_counter()
    found = attack(
        [Observation(params, sent, setting.batch, tuple(range(clients)))], simulated, known, Key(setting.seed)
    )
    seconds = time.perf_counter() - began
    truth = space.view(inputs)
    _, matched = space.match(space.view(found.inputs), truth)
    scores = space.scores(matched, truth)
    ssim, psnr = scores["ssim"], scores["psnr"]
    return {
        "images": ssim.numel(),
        "recovered": int((ssim > 0.5).sum()),
        "ssim": round(float(ssim.mean()), 4),
        "psnr_median": round(float(psnr.median()), 2),
        "above_20_db": int((psnr > 20).sum()),
        "above_60_db": int((psnr > 60).sum()),
        "remarks": "; ".join(in_words(found.remarks)),
        "seconds": round(seconds, 2),
    }


def rows(what: str, folder: Path, iterations: int, defences: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row per setting; what does not apply to this model says why."""
    splits = load("cifar10", data_dir=folder, limit_public=PUBLIC, limit_private=IMAGES)
    for setting in settings(what, iterations, defences):
        local = "" if setting.local is None else f"{setting.local.epochs} epochs of {setting.local.batch}"
        facts = {
            "attack": setting.attack,
            "batch": setting.batch,
            "inputs": "normalised" if setting.normalised else "[0, 1]",
            "activation": setting.activation,
            "seed": setting.seed,
            "defence": setting.defence,
            "noise": setting.noise,
            "local": local,
            "members": setting.members,
        }
        try:
            result = measured(setting, splits)
        except GradveilError as error:
            words = "; ".join(problem.what for problem in error.problems)
            result = dict.fromkeys(RESULTS, "") | {"remarks": f"does not apply: {words}"}
        yield facts | result


RESULTS = ("images", "recovered", "ssim", "psnr_median", "above_20_db", "above_60_db", "remarks", "seconds")


def main() -> None:
    """Measure, and write a CSV file whose every line names its command, date and machine."""
    parser = argparse.ArgumentParser(description="Unmix batches.")
    parser.add_argument("what", choices=("batches", "noise", "defences", "searches"))
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--iterations", type=int, default=500, help="Iterations of a search.")
    parser.add_argument("--defence", action="append", help="A defence, in the place of all.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--machine", default=f"{platform.machine()}, torch {torch.__version__}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [word for defence in given.defence or () for word in ("--defence", defence)]
    told = shlex.join(["python", "benchmarks/unmixed_batches.py", given.what, *chosen])
    if given.what == "searches":
        told += f" --iterations {given.iterations}"
    facts = {"date": datetime.now(UTC).date().isoformat(), "machine": given.machine, "command": told}
    out = given.output.open("w", newline="") if given.output else sys.stdout
    writer: csv.DictWriter[str] | None = None
    for row in rows(given.what, given.data_dir, given.iterations, tuple(given.defence or DEFENCES)):
        if writer is None:
            writer = csv.DictWriter(out, [*row, *facts])
            writer.writeheader()
        writer.writerow(row | facts)
        out.flush()


if __name__ == "__main__":
    main()
