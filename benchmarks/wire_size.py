"""Bytes of encoded updates beside the information bound, the time that takes, and what a round of training sends.

    python benchmarks/wire_size.py [--rounds 5] [--output FILE]

The bound of k values of b bits at random places among P is P H(k/P) + k b bits. Sizes and times are of normal values
at random places in each tensor of a network; milliseconds are a processor's, of one thread. Rounds are of ten users,
whose updates are independent normal numbers, or the gradients of eight real images in the second round: everything
dense; each user's largest fifth of each layer (top-k); and the largest fifth within the 40% that are largest for one
user, who broadcasts where they are (ADGP). Their unit is that of the preprint's Table 3, whose dense rows are 8 bytes a
parameter: 2^20 bytes, up and down.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.tree import Tensors, tmap
from gradveil.data import load
from gradveil.defences.pruning import smallest_mask
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


def largest(value: Tensor, share: float) -> Tensor:
    """Mark the share of largest magnitude, at least one entry."""
    flat = value.abs().flatten()
    return ~smallest_mask(flat, flat.numel() - max(1, int(share * flat.numel()))).reshape(value.shape)


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


def traffic(raw: list[Tensors]) -> dict[str, Any]:
    """Count what one user sends and receives in a round, in units of 2^20 bytes."""
    mask = tmap(lambda v: largest(v, 0.4), raw[0])
    within = [{n: v * mask[n] for n, v in update.items()} for update in raw]
    sent = {
        "dense": (raw, None),
        "top-k": ([tmap(lambda v: v * largest(v, 0.2), update) for update in raw], None),
        "ADGP": ([tmap(lambda v: v * largest(v, 0.2), update) for update in within], mask),
    }
    found: dict[str, Any] = {}
    for method, (updates, shared) in sent.items():
        average = {n: torch.stack([update[n] for update in updates]).mean(0) for n in raw[0]}
        row: dict[str, float] = {}
        for kind, options in (("float32", {}), ("deflated", {"deflate": True})):
            up = mean(len(encode(update, mask=shared, **options)) for update in updates) / MIB
            down = len(encode(average, mask=shared, **options)) / MIB
            halved = tmap(Tensor.half, mask)
            places = inspect(encode(halved), Layout.of(halved)).entries if shared else ()
            broadcast = sum(entry.position_bytes for entry in places) / MIB
            parts = {"up": up, "down": down, "mask": broadcast, "together": up + down + broadcast}
            row |= {f"{kind} {part}": float(f"{value:.4g}") for part, value in parts.items()}
        found[method] = row
    return found


def main() -> None:
    """Measure, print tables, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": given.rounds,
        "models": {},
    }
    for name in MODELS:
        table = sizes(name, given.rounds)
        model = network(name)
        rounds = {"independent": traffic(independent(model)), "gradients": traffic(second_round(model))}
        facts["models"][name] = {"sizes": table, "rounds_in_2^20_bytes": rounds}
        print(f"\n{name}\n| density | kind | bytes | of bound | of dense | encode ms | decode ms |")
        print("|---" * 7 + "|")
        for density, kinds in table.items():
            for kind, row in kinds.items():
                rest = " | ".join(str(row[key]) for key in ("bytes", "of_bound", "of_dense", "encode_ms", "decode_ms"))
                print(f"| {density} | {kind} | {rest} |", flush=True)
        for updates, methods in rounds.items():
            for method, row in methods.items():
                print(f"{updates}, {method}: {row}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
