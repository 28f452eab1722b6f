"""Sentences recovered from the gradients of low-rank adapters (LoRA) with a frozen base, by rank and batch.

    python benchmarks/adapter_recovery.py --rank 4 8 16 32 64 --batch 1 4

The model is the small encoder with random weights, the data are the bundled reviews. In the *first* round B is zero, so
that only the gradient of B says something; *later* B is drawn from N(0, 0.01^2), and the gradient of A does, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks import Knowledge, Observation, make_attack
from gradveil.client import Client
from gradveil.core import Batch, Key
from gradveil.data import load
from gradveil.metrics.statistics import wilson
from gradveil.nn.models import build

RESULTS = Path(__file__).parent / "results" / "adapter-recovery.jsonl"


def measured(rank: int, later: bool, batch: int, sentences: int, attack: str, width: int) -> dict[str, Any]:
    """Attack every batch of the first private sentences; return the rates."""
    data = load("reviews")
    space = data.private.space
    generator = torch.Generator().manual_seed(0)
    model = build("small-encoder", classes=2, generator=generator, example=space.model_facts(), lora=rank, width=width)
    if later:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.copy_(0.01 * torch.randn(value.shape, generator=generator))
    client = Client(model)
    params, public = client.params(), Batch(data.public.inputs, data.public.targets)
    known, scores, began = Knowledge(space, 2, public=public), [], time.perf_counter()
    for start in range(0, sentences, batch):
        chosen = torch.arange(start, start + batch)
        own = Batch(data.private.inputs[chosen], data.private.targets[chosen])
        update, _ = client.update(params, own, {}, {})
        seen = Observation(params, {name: value.unsqueeze(0) for name, value in update.items()}, batch, (0,))
        found = make_attack(attack)([seen], client, known, Key(0))
        truth = own.inputs.unsqueeze(0)
        scores.append(space.scores(space.match(found.inputs, truth)[1], truth))
    joined = {name: torch.cat([score[name].flatten() for score in scores]) for name in ("tokens", "recall", "exact")}
    exact = int(joined["exact"].sum())
    low, high = wilson(exact, sentences)
    return {
        "rank": rank, "round": "later" if later else "first", "batch": batch, "attack": attack, "width": width,
        "sentences": sentences, "exact": exact, "low": round(low, 3), "high": round(high, 3),
        "tokens": round(float(joined["tokens"].mean()), 3), "recall": round(float(joined["recall"].mean()), 3),
        "seconds": round((time.perf_counter() - began) * batch / sentences, 1),
    }  # fmt: skip


def main() -> None:
    """Measure every setting that the records lack, and append a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--attack", nargs="+", default=["span", "span-rank"])
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    keys = ("rank", "round", "batch", "attack", "width", "sentences")
    done = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    for batch in options.batch:
        for later in (False, True):
            for rank in options.rank:
                for attack in options.attack:
                    key = rank, "later" if later else "first", batch, attack, options.width, options.sentences
                    if key not in done:
                        line = json.dumps(measured(rank, later, batch, options.sentences, attack, options.width))
                        print(line, flush=True)
                        with RESULTS.open("a", encoding="utf-8") as file:
                            file.write(line + "\n")


if __name__ == "__main__":
    main()
