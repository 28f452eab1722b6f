"""Bytes of encoded updates beside the information bound, the time that takes, and what a round of training sends.

    python benchmarks/wire_size.py [--rounds 5] [--output FILE]
    python benchmarks/wire_size.py --traffic benchmarks/results/round-bytes.csv

The bound of k values of b bits at random places among P is P H(k/P) + k b bits. Sizes and times are of normal values
at random places in each tensor of a network; milliseconds are a processor's, of one thread. `--traffic` counts rounds
of ten users, whose updates are independent normal numbers, or the gradients of eight real images in the second round:
everything dense; each user's largest fifth of each layer (`topk(0.2)`); and `adgp`, whose mask of two fifths one user
broadcasts, each user without its own top 5%. The unit is that of the preprint's Table 3, whose dense rows are 8 bytes
a parameter: 2^20 bytes, up and down.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.tree import Tensors, select, tmap
from gradveil.core.types import Batch, Context
from gradveil.data import load
from gradveil.defences import Pruning, parse
from gradveil.nn.models import build
from gradveil.wire.codec import Layout, decode, encode, inspect

MODELS = ("lenet-zhu", "resnet18", "vgg13")
DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.38, 0.5, 0.9, 1.0)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"values": torch.float16},
    "bfloat16": {"values": torch.bfloat16},
    "float32 deflated": {"deflate": True},
}
USERS, IMAGES, LR = 10, 8, 0.1
MIB = 2**20
NO_CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
PRINTED = {
    "dense": (0.1207, 85.2506, 71.8385),
    "top-k": (0.0493, 43.7979, 34.9625),
    "ADGP": (0.0424, 27.3067, 22.9697),
}
"""Table 3 of the preprint, for LeNet, ResNet-18 and VGG-13, in units of 2^20 bytes."""


def network(name: str) -> nn.Module:
    """Build a network of the table for 3x32x32 images of ten classes."""
    options = {"stem": "cifar"} if name == "resnet18" else {}
    return build(name, channels=3, size=32, classes=10, generator=torch.Generator().manual_seed(0), **options)


def entropy(share: float) -> float:
    """Compute the binary entropy in bits."""
    return 0.0 if share in (0, 1) else -(share * math.log2(share) + (1 - share) * math.log2(1 - share))


def measured(update: Mapping[str, Tensor], rounds: int, options: Mapping[str, Any]) -> dict[str, float]:
    """Encode and decode one update; its bytes, the bound, and the median seconds."""
    layout = Layout.of(update)
    entries, kept = sum(v.numel() for v in update.values()), sum(int(v.count_nonzero()) for v in update.values())
    width = options.get("values", torch.float32).itemsize
    encoding, decoding = [], []
    data = b""
    for _ in range(rounds):
        began = time.process_time()
        data = encode(update, **options)
        between = time.process_time()
        decode(data, layout)
        encoding.append(between - began)
        decoding.append(time.process_time() - between)
    bound = (entries * entropy(kept / entries) + 8 * width * kept) / 8
    dense = entries * width
    return {
        "bytes": len(data),
        "header": inspect(data, layout).start + 4,
        "of_bound": round(len(data) / bound, 4),
        "of_dense": round(len(data) / dense, 4),
        "encode_ms": round(1e3 * median(encoding), 1),
        "decode_ms": round(1e3 * median(decoding), 1),
    }


def sizes(name: str, rounds: int) -> dict[str, Any]:
    """Measure every density and kind of values on one network."""
    generator = torch.Generator().manual_seed(1)
    shapes = {n: p.shape for n, p in network(name).named_parameters()}
    whole = {n: 0.01 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    found: dict[str, Any] = {}
    for density in DENSITIES:
        update = tmap(lambda v, d=density: v * (torch.rand(v.shape, generator=generator) < d), whole)
        found[f"{density:g}"] = {kind: measured(update, rounds, options) for kind, options in KINDS.items()}
    return found


def gradients(model: nn.Module) -> list[Tensors]:
    """Compute one gradient a user."""
    data = load("patches").private
    names, params = zip(*model.named_parameters(), strict=True)
    users = []
    for user in range(USERS):
        chosen = slice(user * IMAGES, (user + 1) * IMAGES)
        loss = nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen])
        users.append(dict(zip(names, torch.autograd.grad(loss, params), strict=True)))
    return users


def second_round(model: nn.Module) -> list[Tensors]:
    """Compute gradients after one step: norms that start at zero keep many of a fresh ResNet's at zero."""
    raw = gradients(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= LR * torch.stack([update[name] for update in raw]).mean(0)
    return gradients(model)


def independent(model: nn.Module) -> list[Tensors]:
    """Draw normal updates, as unlike each other as can be and without a zero."""
    generator = torch.Generator().manual_seed(2)
    return [{n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()} for _ in range(USERS)]


def pruned(transform: Pruning, update: Tensors, messages: Tensors) -> Tensors:
    """Apply a defence of the library to one user's update, without error feedback."""
    return transform.apply(update, {}, {}, replace(NO_CONTEXT, messages=messages))[0]


def traffic(raw: list[Tensors], options: Mapping[str, Any]) -> dict[str, Any]:
    """Count what one user sends and receives in a round, in units of 2^20 bytes, and the share of entries in the mean.

    Values and places are told apart where bytes are not deflated. The mask is what one user of ADGP broadcasts.
    """
    aligned = parse("adgp(feedback=false)").send.stages[0][1]
    spoken = aligned.proposal(raw[0], {}, {}, NO_CONTEXT)
    public = aligned.announce({name: mask[None] for name, mask in spoken.items()}, {}, 0)
    mask = select(public, "mask")
    ways: dict[str, tuple[Pruning | None, Tensors | None]] = {
        "dense": (None, None),
        "top-k": (parse("topk(0.2)").send.stages[0][1], None),
        "ADGP": (aligned, mask),
    }
    found: dict[str, Any] = {}
    for method, (transform, shared) in ways.items():
        average, ups, kept = tmap(torch.zeros_like, raw[0]), 0, 0
        for update in raw:
            sent = update if transform is None else pruned(transform, update, public)
            ups += len(encode(sent, mask=shared, **options))
            kept += sum(int(value.count_nonzero()) for value in sent.values())
            average = tmap(lambda total, value: total + value / USERS, average, sent)
        entries = sum(value.numel() for value in average.values())
        union = sum(int(value.count_nonzero()) for value in average.values())
        up, down = ups / USERS, len(encode(average, mask=shared, **options))
        halved = tmap(Tensor.half, mask)
        places = inspect(encode(halved), Layout.of(halved)).entries if shared else ()
        broadcast = sum(entry.position_bytes for entry in places)
        parts = {"up": up, "down": down, "mask": broadcast, "together": up + down + broadcast}
        if not options.get("deflate"):
            parts |= {"up values": 4 * kept / USERS, "down values": 4 * union}
            parts |= {"up places": up - parts["up values"], "down places": down - parts["down values"]}
        row = {name: float(f"{value / MIB:.4g}") for name, value in parts.items()}
        found[method] = row | {"union": float(f"{union / entries:.4g}")}
    return found


def rounds_of(name: str) -> Iterator[dict[str, Any]]:
    """Count a round of a network, a line for each kind of updates, values and method."""
    model = network(name)
    for updates, raw in (("independent", independent(model)), ("gradients", second_round(model))):
        for values in ("float32", "float32 deflated"):
            for method, row in traffic(raw, KINDS[values]).items():
                printed = PRINTED[method][MODELS.index(name)]
                yield {"model": name, "updates": updates, "values": values, "method": method, **row, "printed": printed}


def main() -> None:
    """Measure, print tables, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file of sizes and times")
    parser.add_argument("--traffic", type=Path, help="count rounds of training only, into this CSV file")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.traffic:
        lines = [line for name in given.models for line in rounds_of(name)]
        with given.traffic.open("w", newline="") as file:
            names = [*dict.fromkeys(key for line in lines for key in line if key != "printed"), "printed"]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        print(given.traffic.read_text())
        return
    facts: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": given.rounds,
        "models": {},
    }
    for name in given.models:
        table = sizes(name, given.rounds)
        facts["models"][name] = {"sizes": table}
        print(f"\n{name}\n| density | kind | bytes | of bound | of dense | encode ms | decode ms |")
        print("|---" * 7 + "|")
        for density, kinds in table.items():
            for kind, row in kinds.items():
                rest = " | ".join(str(row[key]) for key in ("bytes", "of_bound", "of_dense", "encode_ms", "decode_ms"))
                print(f"| {density} | {kind} | {rest} |", flush=True)
    if given.output:
        given.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
