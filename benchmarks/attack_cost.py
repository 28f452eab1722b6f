"""What knowing more costs: processor time of targeted attacks in units of the plain attack's, interleaved in one run.

    python benchmarks/attack_cost.py [--model scheliga-cnn] [--target-clients 32] [--rounds 7] [--output FILE]

Joint optimisation (dropout masks, bottleneck noise) is compared with the attack on the same model that leaves the
randomness alone; local training with T = 4 steps with the attack on one gradient that `vmap` computes, as it computes
the local steps. One thread, processor seconds, medians over the rounds with quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import torch
from loops import CLASSES, SHAPE, model_of, truth_of

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, Local, looped_updates
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.spaces import ImageSpace

CASES = {
    "dropout: DIA": ("dropout(0.25)", "dia", "gpia", None, 1.5),
    "PRECODE: VBIA": ("precode", "vbia", "gpia", None, 1.5),
    "CVB: VBIA": ("cvb", "vbia", "gpia", None, 1.5),
    "DP-SGD: CDIA": ("dp(clip=20, sigma=1e-3)", "cdia", "ig-scheliga", None, 1.5),
    "pruning: mask read off": ("prune(0.9)", "gpia", "ig-scheliga", None, 1.5),
    "local training, T = 4": ("none", "ig-scheliga", "ig-scheliga", Local(batch=1, lr=0.1, steps=4), 7.0),
}
"""Case -> defence, attack, the attack it is compared with, local training, and how often its cost is allowed."""


class Looped(Client):
    """A client whose gradients are always computed by `vmap` over the target clients."""

    def updates(self, *arguments):
        """Take the reference."""
        return looped_updates(self, *arguments)


def runner(
    model: str, defence: str, attack: str, target_clients: int, local: Local | None, looped: bool
) -> Callable[[int], float]:
    """Set up one attack; a function of the iterations to processor seconds."""
    kind = Looped if looped else Client
    client = parse(defence)(kind(model_of(model), local=local), Key(0))
    images, labels = truth_of(target_clients)
    params = client.params()
    spec = client.noise_spec(params, Batch(images[0], labels[0]))
    noise = stack([spec.sample(Key(1, (target_client,))) for target_client in range(target_clients)])
    state = {n: v.expand(target_clients, *v.shape) for n, v in client.init(params).items()}
    sent, _ = client.updates(params, Batch(images, labels), noise, state)
    seen = Observation(params, {n: v.detach() for n, v in sent.items()}, 1, tuple(range(target_clients)))
    tuned = make_attack(attack)
    simulated_client = client if tuned.simulated_client == "full" else client.undefended_update()
    # The same optimiser for both, and nothing drawn afresh: what is compared is the work of an iteration.
    tuned = replace(tuned, descent=make_attack("ig-scheliga").descent)
    tensors = {n: w for n, w in tuned.knowledge.items() if attack not in ("gpia", "ig-scheliga") or n != "model.*"}
    knowledge = Knowledge(ImageSpace(SHAPE), CLASSES, tensors=tensors, targets=labels)

    def run(iterations: int) -> float:
        short = replace(tuned, descent=replace(tuned.descent, iterations=iterations))
        began = time.process_time()
        short([seen], simulated_client, knowledge, Key(0), plan=(target_clients,))
        return time.process_time() - began

    return run


def main() -> None:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="scheliga-cnn", help="resnet18: give four target clients")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--target-clients", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print("| case | cost | quartiles | allowed |\n|---|---|---|---|")
    for case in given.cases:
        defence, attack, against, local, allowed = CASES[case]
        costly = runner(given.model, defence, attack, given.target_clients, local, looped=False)
        plain = runner(given.model, defence, against, given.target_clients, None, looped=local is not None)
        costly(2), plain(2)
        ratios = [costly(given.iterations) / plain(given.iterations) for _ in range(given.rounds)]
        low, _, high = quantiles(ratios, n=4)
        results[case] = {"ratio": median(ratios), "low": low, "high": high, "allowed": allowed}
        verdict = "" if median(ratios) <= allowed else " MISSED"
        print(f"| {case} | {median(ratios):.2f}x{verdict} | {low:.2f}-{high:.2f} | {allowed:g}x |", flush=True)
    if given.output:
        facts = {
            "model": given.model,
            "target_clients": given.target_clients,
            "iterations": given.iterations,
            "torch": torch.__version__,
        }
        text = json.dumps({**facts, "cores": os.cpu_count(), "cases": results}, indent=1)
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
