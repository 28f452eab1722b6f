"""How far a reader has to go: the calls between `gradveil audit` and its first gradient, and those to a user's model.

python benchmarks/reading_paths.py

A small audit attacks one image for five iterations. A profiler notes the library's functions on the stack whenever
PyTorch differentiates or the user's model runs. Comprehensions and lambdas belong to the function that holds them.

Checks of the user's model also differentiate. The walk to the first gradient leaves them out (`CHECKS`); the calls of
the model's `forward` are counted for the attack alone (`ATTACK`) and for the whole command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.cli.app import run

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "gradveil"
MODULE = "benchmarks.reading_paths"
"""This file, as the audit imports the model from it."""
START = "cli/audit_command.py:audit"
"""The first frame of the walk."""
ATTACK = "audit/audit_run.py:work"
"""The frame that makes and attacks an update; checks before it run the model too."""
CHECKS = ("nn/check/", "gradients/per_client.py:obstacle")
"""Parts of frames that check a model before it is used."""
ITERATIONS = 5
MOST = {"frames": 12, "files": 9, "attack_paths": 9, "command_paths": 18}
"""Measured values, which a test holds as upper bounds. Targets: 12 frames in 9 files, and 8 paths of the attack."""
GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.func.grad, torch.func.vjp)

Frames = tuple[str, ...]
"""Functions of the library as `file:function`, the caller first."""


class SmallModel(nn.Module):
    """A user's model: one convolution and one linear layer."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        """Make both layers."""
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten())
        self.head = nn.Linear(4 * ((size - 1) // 2) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        return self.head(self.body(x))


@dataclass
class Walks:
    """The stacks that a profiler noted: at the gradients, and at the calls of a model."""

    gradients: list[Frames] = field(default_factory=list[Frames])
    forwards: Counter[Frames] = field(default_factory=Counter[Frames])

    @property
    def to_first_gradient(self) -> Frames:
        """The frames from `gradveil audit` to the first gradient after the checks."""
        checks = (any(check in frame for frame in each for check in CHECKS) for each in self.gradients)
        frames = next(each for each, is_check in zip(self.gradients, checks, strict=True) if not is_check)
        return frames[frames.index(START) :]

    @property
    def of_attack(self) -> dict[Frames, int]:
        """The calls of the model's `forward` while an update is made and attacked."""
        return {path: calls for path, calls in self.forwards.items() if ATTACK in path}


def library_frames(frame: FrameType | None) -> Frames:
    """List the functions of the library that are on the stack."""
    frames: list[str] = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(SOURCE) and not frame.f_code.co_name.startswith("<"):
            frames.append(f"{path.relative_to(SOURCE).as_posix()}:{name.rpartition('<locals>.')[2]}")
        frame = frame.f_back
    return tuple(reversed(frames))


@contextmanager
def recorded(model: CodeType) -> Iterator[Walks]:
    """Note the stack at every gradient and at every call of a model's `forward`."""
    walks = Walks()
    gradients = {function.__code__ for function in GRADIENTS}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        if frame.f_code in gradients:
            walks.gradients.append(library_frames(frame))
        elif frame.f_code is model:
            walks.forwards[library_frames(frame)] += 1

    sys.setprofile(profile)
    try:
        yield walks
    finally:
        sys.setprofile(None)


def measure() -> Walks:
    """Audit `SmallModel` without a defence, and note the walks."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "small.toml"
        file.write_text(
            f'name = "small"\ntarget_clients = 1\nattacks = ["ig(iterations={ITERATIONS})"]\ndefences = ["none"]\n'
            f'data = {{name = "digits", size = 16}}\nmodel = {{name = "{MODULE}:SmallModel"}}\n'
        )
        # Run as a script, this file is `__main__`, and the audit imports it once more.
        sys.path.insert(0, str(ROOT))
        try:
            model = import_module(MODULE).SmallModel
            with recorded(model.forward.__code__) as walks, redirect_stdout(sys.stderr):
                code = run(["audit", str(file), "--workers", "1", "--out", str(Path(folder) / "run")])
        finally:
            sys.path.remove(str(ROOT))
    if code != 0:
        raise SystemExit(f"the audit ended with {code}")
    return walks


def report(walks: Walks) -> dict[str, Any]:
    """Return the numbers and the lists behind them."""
    walk = walks.to_first_gradient
    return {
        "frames": len(walk),
        "files": len({frame.partition(":")[0] for frame in walk}),
        "attack_paths": len(walks.of_attack),
        "command_paths": len(walks.forwards),
        "to_first_gradient": walk,
        "calls_of_forward": [
            {"calls": calls, "in_attack": path in walks.of_attack, "path": path}
            for path, calls in walks.forwards.most_common()
        ],
    }


def main() -> None:
    """Print the numbers and the frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    as_json = parser.parse_args().json
    found = report(measure())
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"From gradveil audit to the first gradient: {found['frames']} frames in {found['files']} files")
    print("\n".join(f"  {frame}" for frame in found["to_first_gradient"]))
    paths = found["calls_of_forward"]
    for title, in_attack in ((f"in an attack of {ITERATIONS} iterations", True), ("before and after it", False)):
        chosen = [each for each in paths if each["in_attack"] is in_attack]
        print(f"Paths to the model's forward {title}: {len(chosen)}")
        for each in chosen:
            path = each["path"]
            start = path.index(ATTACK) + 1 if in_attack else path.index(START) + 1
            print(f"  {each['calls']} x {' > '.join(path[start:])}")


if __name__ == "__main__":
    main()
