"""Measure what a defence costs a client: processor time of one defended gradient, in units of the undefended one.

    python benchmarks/defence_cost.py [--models resnet18 ...] [--defences dgp ...] [--rounds 5] [--output FILE]

A client computes the update of one batch of 64 images of noise, its random tensors drawn included. All defences take
turns in one process with one thread; a ratio is taken within a turn, and shown are the median over the turns and the
quartiles. The first turn, in which each shape is computed once in two ways, is left out. Peak memory is that of a
process of its own for each defence, beyond what it held before its first update (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import torch

from gradveil.client import Client
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.defences import parse
from gradveil.nn.models import build
from gradveil.spaces import ImageSpace

EXAMPLES = 64
PUBLIC = 1000
"""Public images, of which a defence that asks takes batches as large as the client's own."""
NETS: dict[str, tuple[str, int, dict[str, str]]] = {
    "scheliga-cnn": ("scheliga-cnn", 1, {}),
    "resnet18": ("resnet18", 3, {}),
    "resnet18-cifar": ("resnet18", 3, {"stem": "cifar"}),
}
"""What is built, its channels, and its options: on 32x32 images a stem for CIFAR makes a step ten times as long."""
DEFENCES = (
    "none",
    "gaussian(0.01)",
    "topk(0.2, feedback=true)",
    "dgp",
    "standin",
    "dgc",
    "dp(clip=1, sigma=0.01)",
    "soteria",
    "optimal-noise(std=0.01, layerwise=true)",
    "optimal-noise(std=0.01)",
    "optimal-noise(std=0.01, probes=32, of=example, memory=0.5)",
    "optimal-noise(std=0.01, form=global)",
    "optimal-prune(0.8)",
    "optimal-prune(0.8, probes=32, of=example, memory=0.5)",
)


def step(model: str, defence: str) -> Callable[[], object]:
    """Make a function that computes one defended update after the other: the state goes on."""
    key = Key(0)
    name, channels, options = NETS[model]
    net = build(name, channels=channels, size=32, classes=10, generator=key.child("model").generator(), **options)
    generator = key.child("data").generator()
    images = torch.randn(EXAMPLES, channels, 32, 32, generator=generator)
    public = torch.randn(PUBLIC, channels, 32, 32, generator=generator)
    client = parse(defence)(Client(net, domain=Domain(ImageSpace.between(-3, 3, (channels, 32, 32)), 10, public)), key)
    batch = Batch(images, torch.randint(10, (EXAMPLES,), generator=generator))
    params = client.params()
    state = client.init(params)
    spec = client.noise_spec(params, batch)
    count = 0

    def once() -> object:
        nonlocal state, count
        count += 1
        with torch.no_grad():
            sent, state = client.update(params, batch, spec.sample(key.child(count)), state)
        return sent

    return once


def peak(model: str, defence: str) -> int:
    """Measure in this process: bytes beyond what it held before its first update."""
    once = step(model, defence)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (Linux)
    before = _memory("VmRSS")
    for _ in range(2):
        once()
    return _memory("VmHWM") - before


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def measure(model: str, defences: list[str], rounds: int) -> list[dict[str, object]]:
    """Let all defences take turns."""
    steps = {defence: step(model, defence) for defence in dict.fromkeys(["none", *defences])}
    spent: dict[str, list[float]] = {defence: [] for defence in steps}
    for _ in range(rounds + 1):
        for defence, once in steps.items():
            start = time.process_time()
            once()
            spent[defence].append(time.process_time() - start)
    rows: list[dict[str, object]] = []
    for defence, times in spent.items():
        ratios = [a / b for a, b in zip(times[1:], spent["none"][1:], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        command = [sys.executable, __file__, "--peak", model, defence]
        memory = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(
            {
                "model": model,
                "defence": defence,
                "seconds": median(times[1:]),
                "ratio": median(ratios),
                "quartiles": [low, high],
                "peak_bytes": memory,
            }
        )
        print(
            f"{model:13} {defence:42} {median(times[1:]):8.3f} s {median(ratios):7.2f}x ({low:.2f} to {high:.2f}) "
            f"{memory / 2**20:7.0f} MiB",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "DEFENCE"), help="print the peak memory of one, in bytes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.peak:
        print(peak(*options.peak))
        return
    results = [row for model in options.models for row in measure(model, options.defences, options.rounds)]
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    if options.output:
        options.output.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
