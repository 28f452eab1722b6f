"""Noise that optimal noise gives each layer over a training (Figure 14 of the paper on optimal defences).

    python benchmarks/optimal_noise_layers.py [--rounds 192] [--clients 1]

The training is `optimal-defenses/train-published` with `optimal-noise(std=1e-5, clamp=1)`, as in the authors' program.
Printed for each weight: the mean over its entries of t_i / s, where t_i^2 are the variances and s^2 their mean over all
entries, averaged over clients and the last ten rounds. The program takes g_i without its absolute value and looks at
the last client alone; here |g_i|, and the first `--clients` of four.
"""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path
from statistics import fmean

import torch

from gradveil.audit.run_file import read_training
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.data import DATA_DIR
from gradveil.defences import OptimalNoise
from gradveil.federated.engine import Federation
from gradveil.federated.training_setup import open_setting, trials
from gradveil.federated.training_state import Standing
from gradveil.gradients.objective import mean_gradient
from gradveil.theory.input_jacobian import squared_row_norms

DEFENCE, STD, CLAMP = "optimal-noise(std=1e-5, clamp=1)", 1e-5, 1.0
REMEMBERED, SHOWN = 10, 16


def main() -> None:
    """Train, and print the noise of each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=192)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, help=f"folder of data files (or {DATA_DIR})")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    config = read_training("optimal-defenses/train-published", {"defences": [DEFENCE]}, [])
    setting = open_setting(config, options.data_dir)
    federation = setting.federation(trials(config)[0])
    standing, recent = federation.start(), deque[dict[str, float]](maxlen=REMEMBERED)
    weights = [name for name in federation.client.trained() if name.endswith("weight")]
    print("round  accuracy  " + "  ".join(f"{name:>24}" for name in weights))
    for number in range(1, options.rounds + 1):
        of_clients = [relative(federation, standing, client, number) for client in range(options.clients)]
        recent.append({name: fmean(each[name] for each in of_clients) for name in weights})
        standing = federation.round(standing)
        if number % SHOWN == 0 or number == 1:
            means = [fmean(each[name] for each in recent) for name in weights]
            accuracy = standing.records[-1].accuracy
            print(f"{number:5}  {accuracy:8.2%}  " + "  ".join(f"{mean:24.3f}" for mean in means), flush=True)


def relative(federation: Federation, standing: Standing, client: int, number: int) -> dict[str, float]:
    """Compute the mean standard deviation of each parameter, relative to the root of the mean variance."""
    batch = federation.task(standing, client, number, federation.client).batch
    noise = OptimalNoise(STD, clamp=CLAMP)
    probe = noise.directions(batch).sample(Key(0, ("layers", client, number)))["probe"]

    def gradient(examples: Batch) -> Tensors:
        return mean_gradient(federation.client.objective, standing.params, {}, examples, {})

    scales = noise.scales(gradient(batch), squared_row_norms(gradient, batch, probe))
    return {name: float(value.mean()) / STD for name, value in scales.items()}


if __name__ == "__main__":
    main()
