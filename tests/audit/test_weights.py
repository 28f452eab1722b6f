"""Audits of trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradveil.audit.audit_run import describe
from gradveil.audit.preflight import open_experiment
from gradveil.core.errors import GradveilError
from tests.audit.runs import config

NET = {"name": "lenet-zhu"}


def experiment(file: Path | str | None, *defences: str, data_dir: Path | None = None):
    model = {**NET, "weights": str(file)} if file else NET
    return open_experiment(config(model=model, defences=list(defences or ["none"])), data_dir)


def moved(client, by: float) -> dict[str, torch.Tensor]:
    return {name: value + by for name, value in client.params().items()}


def test_clients_start_from_the_weights_of_the_file_with_every_seed_and_defence(tmp_path: Path):
    trained = moved(experiment(None).client(0, "none", 0), 0.25)
    save_file(trained, tmp_path / "net.safetensors")
    told = experiment(tmp_path / "net.safetensors", "none", "prune(0.9)", "precode(k=4)")
    for defence in ("none", "prune(0.9)", "precode(k=4)"):
        for seed in (0, 5):
            params = told.client(0, defence, seed).params()
            assert all(torch.equal(params[name], value) for name, value in trained.items() if name in params)
    new = {name for name in told.client(0, "precode(k=4)", 0).params() if name not in trained}
    assert new


def test_weights_of_a_defended_model_fit_that_defence_alone(tmp_path: Path):
    trained = moved(experiment(None, "precode(k=4)").client(0, "precode(k=4)", 0), 0.25)
    save_file(trained, tmp_path / "net.safetensors")
    params = experiment(tmp_path / "net.safetensors", "precode(k=4)").client(0, "precode(k=4)", 3).params()
    assert all(torch.equal(params[name], value) for name, value in trained.items())


def test_weights_that_fit_nothing_are_told_before_the_first_trial(tmp_path: Path):
    save_file({"w": torch.zeros(2)}, tmp_path / "net.safetensors")
    with pytest.raises(GradveilError, match=r"model\.weights .*is missing, the model has"):
        experiment(tmp_path / "net.safetensors", "prune(0.9)")
    with pytest.raises(GradveilError, match="nothing: is no file here or in the data folder"):
        experiment("nothing")


def test_the_data_folder_is_looked_in_too(tmp_path: Path):
    trained = moved(experiment(None).client(0, "none", 0), 0.25)
    save_file(trained, tmp_path / "net.safetensors")
    assert experiment("net.safetensors", data_dir=tmp_path).weights.keys() == trained.keys()


def test_other_weights_in_the_same_file_are_another_run(tmp_path: Path):
    hashes = set()
    for by in (0.0, 0.5):
        save_file(moved(experiment(None).client(0, "none", 0), by), tmp_path / "net.safetensors")
        told = experiment(tmp_path / "net.safetensors")
        hashes.add(describe(told.config, 1, "", told.weights)["config_hash"])
    assert len(hashes) == 2
