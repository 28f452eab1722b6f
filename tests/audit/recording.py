"""What clients sent, recorded as an app records it, and runs that attack the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recorded.recorded_updates import settled
from gradveil.core.types import Batch
from gradveil.federated.update_records import UpdateRecorder
from tests.audit.runs import config, execute

UNSEEN: dict[str, Any] = {"name": "unseen", "size": 16, "channels": 1, "classes": 2}
FOUND = "ig(labels=restore, iterations=6, report=2)"


def simulated(**changes: Any) -> Experiment:
    return open_experiment(config(**{"defences": ["none"], "attacks": [FOUND], **changes}))


def record(experiment: Experiment, folder: Path, sent: Any = None, number: int = 1, **settings: Any) -> Experiment:
    """Record what the clients of a simulated audit send, in its first trial; `sent` changes each update."""
    trial = trials(experiment.config)[0]
    client = experiment.client(trial.client, trial.defence, trial.seed)
    seen, truth = observe(experiment, trial, client, range(experiment.config.target_clients))
    local = experiment.config.client[0].local
    said = {"defence": trial.defence, "local": local, "sends": "difference" if local else "gradient", **settings}
    recorder = UpdateRecorder(folder, rounds=None, **said)
    for v in seen[0].target_clients:
        update = {name: value[v] for name, value in seen[0].update.items()}
        own = Batch(truth.raw.inputs[v], truth.raw.targets[v])
        recorder.write(number, str(v), seen[0].params, sent(update) if sent else update, len(own.targets), truth=own)
    return experiment


def watching(folder: Path, **changes: Any) -> RunConfig:
    """The small run, with recorded updates in the place of simulated ones."""
    plain = config(**{"attacks": [FOUND], "observed": {"folder": str(folder)}, **changes}).resolved()
    left = {"client", "defences", "target_clients"} - changes.keys()
    return settled(RunConfig.model_validate({key: value for key, value in plain.items() if key not in left}))


def notes(folder: Path, tmp_path: Path, **changes: Any) -> str:
    run, _ = execute(watching(folder, **changes), tmp_path / "run")
    return "\n".join(run.trials[0].info["notes"])
