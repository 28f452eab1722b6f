"""What clients sent, recorded as an app records it, and runs that attack the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradveil.audit.cell import cells
from gradveil.audit.config import RunConfig
from gradveil.audit.records import settled
from gradveil.audit.rounds import observe
from gradveil.audit.scene import Scene, open_scene
from gradveil.core.types import Batch
from gradveil.federated.recorded import Recorder
from tests.audit.runs import config, execute

UNSEEN: dict[str, Any] = {"name": "unseen", "size": 16, "channels": 1, "classes": 2}
FOUND = "ig(labels=restore, iterations=6, report=2)"


def simulated(**changes: Any) -> Scene:
    return open_scene(config(**{"defences": ["none"], "attacks": [FOUND], **changes}))


def record(scene: Scene, folder: Path, sent: Any = None, number: int = 1, **settings: Any) -> Scene:
    """Record what the clients of a simulated audit send, in its first cell; `sent` changes each update."""
    cell = cells(scene.config)[0]
    client = scene.client(cell.client, cell.defence, cell.seed)
    seen, truth = observe(scene, cell, client, range(scene.config.victims))
    local = scene.config.client[0].local
    said = {"defence": cell.defence, "local": local, "sends": "difference" if local else "gradient", **settings}
    recorder = Recorder(folder, rounds=None, **said)
    for v in seen[0].victims:
        update = {name: value[v] for name, value in seen[0].update.items()}
        own = Batch(truth.raw.inputs[v], truth.raw.targets[v])
        recorder.write(number, str(v), seen[0].params, sent(update) if sent else update, len(own.targets), truth=own)
    return scene


def watching(folder: Path, **changes: Any) -> RunConfig:
    """The small run, with recorded updates in the place of simulated ones."""
    plain = config(**{"attacks": [FOUND], "observed": {"folder": str(folder)}, **changes}).resolved()
    left = {"client", "defences", "victims"} - changes.keys()
    return settled(RunConfig.model_validate({key: value for key, value in plain.items() if key not in left}))


def notes(folder: Path, tmp_path: Path, **changes: Any) -> str:
    run, _ = execute(watching(folder, **changes), tmp_path / "run")
    return "\n".join(run.cells[0].info["notes"])
