"""Rounds of federated learning in one process, and what travels over the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.federated.aggregate import Server
    from gradveil.federated.engine import ClientShare, Federation, train
    from gradveil.federated.model_inspection import Finding, guarded, inspect
    from gradveil.federated.training_api import TrainResult
    from gradveil.federated.training_config import LocalConfig, PartitionConfig, ServerConfig, TrainConfig
    from gradveil.federated.training_run import StoredTraining, load_training
    from gradveil.federated.training_state import RoundResult, Standing, load_standing
    from gradveil.federated.update_inspection import Exposure, exposure, guarded_update
    from gradveil.federated.update_records import Facts, Recorded, UpdateRecorder, read_recorded
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ClientShare": "gradveil.federated.engine",
            "Exposure": "gradveil.federated.update_inspection",
            "Facts": "gradveil.federated.update_records",
            "Federation": "gradveil.federated.engine",
            "Finding": "gradveil.federated.model_inspection",
            "LocalConfig": "gradveil.federated.training_config",
            "PartitionConfig": "gradveil.federated.training_config",
            "Recorded": "gradveil.federated.update_records",
            "RoundResult": "gradveil.federated.training_state",
            "Server": "gradveil.federated.aggregate",
            "ServerConfig": "gradveil.federated.training_config",
            "Standing": "gradveil.federated.training_state",
            "StoredTraining": "gradveil.federated.training_run",
            "TrainConfig": "gradveil.federated.training_config",
            "TrainResult": "gradveil.federated.training_api",
            "UpdateRecorder": "gradveil.federated.update_records",
            "exposure": "gradveil.federated.update_inspection",
            "guarded": "gradveil.federated.model_inspection",
            "guarded_update": "gradveil.federated.update_inspection",
            "inspect": "gradveil.federated.model_inspection",
            "load_standing": "gradveil.federated.training_state",
            "load_training": "gradveil.federated.training_run",
            "read_recorded": "gradveil.federated.update_records",
            "train": "gradveil.federated.engine",
        },
    )

__all__ = [
    "ClientShare",
    "Exposure",
    "Facts",
    "Federation",
    "Finding",
    "LocalConfig",
    "PartitionConfig",
    "Recorded",
    "RoundResult",
    "Server",
    "ServerConfig",
    "Standing",
    "StoredTraining",
    "TrainConfig",
    "TrainResult",
    "UpdateRecorder",
    "exposure",
    "guarded",
    "guarded_update",
    "inspect",
    "load_standing",
    "load_training",
    "read_recorded",
    "train",
]
