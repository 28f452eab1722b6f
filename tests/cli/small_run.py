"""A run file that finishes in a second, and the command that runs it."""

from __future__ import annotations

from gradveil.cli.app import run

RUN = """
name = "small"
target_clients = 2
attacks = ["ig(iterations=4)"]
defences = ["none", "prune(0.9)"]
data = { name = "faces", size = 16 }
model = { name = "lenet-zhu" }
"""


def audit(*more: str) -> int:
    return run(["audit", "small.toml", "--workers", "1", *more])
