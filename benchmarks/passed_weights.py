"""Weights of a small CNN with BatchNorm through which data have passed, for attackers who use its running statistics.

    python benchmarks/passed_weights.py FILE [--data mnist] [--data-dir FOLDER] [--images 4000] [--lr 0.001]

Two passes of plain SGD over public images, 64 at a time. With the small default step the weights stay near their
initial values, as in the first rounds of a training: what has been learned is what activations look like.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.nn.models import build


def main() -> None:
    """Train, say how good it is, and write the state dictionary."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--data", default="mnist")
    options.add_argument("--data-dir", type=Path)
    options.add_argument("--images", type=int, default=4000)
    options.add_argument("--lr", type=float, default=0.001)
    given = options.parse_args()
    torch.set_num_threads(1)
    images = load(given.data, data_dir=given.data_dir, size=32, limit_public=given.images)
    public, key = images.public, Key(0, ("passed",))
    net = build(
        "scheliga-cnn",
        channels=public.channels,
        size=32,
        classes=len(public.classes),
        norm="batch",
        generator=key.child("model").generator(),
    )
    sgd, order = torch.optim.SGD(net.parameters(), given.lr), key.child("order").generator()
    for _ in range(2):
        for some in torch.randperm(len(public), generator=order).split(64):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(net(public.inputs[some].float()), public.targets[some]).backward()
            sgd.step()
    with torch.no_grad():
        right = net.eval()(images.private.inputs.float()).argmax(1) == images.private.targets
    print(f"{float(right.float().mean()):.1%} of {len(right)} test images are named rightly")
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, given.file)


if __name__ == "__main__":
    main()
