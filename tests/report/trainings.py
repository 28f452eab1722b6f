"""Real trainings, as short as can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradveil.audit.run_file import read_training
from gradveil.federated.training_run import TRAINING_RUN, describe, run
from gradveil.federated.training_setup import open_setting

FEW = ["data.public=80", "data.gallery=40", "data.size=16", "clients=3", "model.name=lenet-zhu", "local.batch=16"]
DP, TOPK, LOST = "dp(clip=1, sigma=2)", "topk(0.1)", "gaussian(1e38)"


def trained(folder: Path, *settings: str, **overrides: Any) -> Path:
    setting = open_setting(read_training("digits", {"rounds": 2, **overrides}, [*FEW, *settings]))
    with TRAINING_RUN.opened(folder, describe(setting.config, "gradveil train digits")):
        run(setting, folder, lambda trial, record, status: None)
    return folder


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
