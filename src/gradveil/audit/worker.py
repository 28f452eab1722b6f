"""A process that attacks shares of cells: settings and tasks come in as JSON lines, progress goes out as JSON lines.

Run by `gradveil.audit.pool` as `python -m gradveil.audit.worker`. Tensors go through safetensors files in the run
directory. The process ends when its input does, so that a killed parent leaves no orphan at work.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save

from gradveil.attacks.base import Progress
from gradveil.attacks.plan import keep_freed_memory
from gradveil.audit.cell import Recovered, cells
from gradveil.audit.config import RunConfig
from gradveil.audit.run import Task, attempt
from gradveil.audit.scene import Scene, open_scene
from gradveil.core.errors import GradveilError
from gradveil.core.files import plain, write_private


def main() -> None:
    """Serve tasks until the input ends."""
    keep_freed_memory()
    # What a user's model prints must not mix with the messages.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, lines), daemon=True).start()
    setting = json.loads(lines.get())
    config = RunConfig.model_validate(setting["config"])
    try:
        scene = open_scene(config, Path(setting["data_dir"]) if setting["data_dir"] else None, checked=False)
    except GradveilError as error:
        _tell(out, {"kind": "refused", "message": str(error)})
        return
    _tell(out, {"kind": "ready"})
    while True:
        _serve(scene, json.loads(lines.get()), out)


def _serve(scene: Scene, order: Mapping[str, Any], out: IO[str]) -> None:
    numbers = range(order["start"], order["stop"])
    task = Task(cells(scene.config)[order["cell"]], order["share"], numbers, Path(order["plan"]))

    def progress(step: Progress) -> None:
        _tell(out, {"kind": "progress", "step": asdict(step)})

    found = attempt(scene, task, progress)
    if isinstance(found, Recovered):
        folder = Path(order["folder"])
        write_private(folder / f"share-{task.share}.safetensors", save(found.tensors))
        text = json.dumps({"facts": found.facts, "statuses": found.statuses})
        write_private(folder / f"share-{task.share}.json", text.encode())
        _tell(out, {"kind": "done"})
    else:
        _tell(out, {"kind": "failed", "message": found})


def _listen(source: IO[str], lines: queue.Queue[str]) -> None:
    for line in source:
        lines.put(line)
    os._exit(0)


def _tell(out: IO[str], message: Mapping[str, Any]) -> None:
    out.write(json.dumps(plain(message)) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
