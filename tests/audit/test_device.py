"""Whatever the device, an audit attacks with tensors of that device and finds the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

DATA = {"name": "digits", "size": 16, "public": 40, "gallery": 20}
IMAGES = {"data": DATA, "model": {"name": "lenet-zhu"}, "client": {"batch": 2}, "target_clients": 2, "iterations": 3}
ROWS = {"data": {"name": "census"}, "model": {"name": "tabular-mlp"}, "client": {"batch": 4}, "iterations": 3}
TEXTS = {"data": {"name": "reviews"}, "model": {"name": "small-encoder", "options": {"width": 48}}}
RUNS: dict[str, dict[str, Any]] = {
    "noise and clips": IMAGES
    | {"attacks": ["ig", "cdia", "learned(epochs=1)"], "defences": ["dp", "gaussian(0.01)", "mixup"]},
    "pruning and bottlenecks": IMAGES
    | {
        "attacks": ["cdia(rounds=all)", "gi(labels=restore)", "learned(epochs=1)"],
        "defences": ["dgp", "precode", "none"],
        "rounds": 2,
    },
    "malicious servers and others": IMAGES
    | {
        "attacks": ["rob(bins=16)", "curious(rows=16)", "averaging", "dlg"],
        "defences": ["minmax(0.5)"],
        "rounds": 2,
    },
    "pruning in one round": IMAGES | {"client": {}, "attacks": ["ig"], "defences": ["dgp", "topk(0.1)", "dgc"]},
    "rows": ROWS | {"attacks": ["tableak", "unmix"], "defences": ["none"]},
    "texts": TEXTS | {"attacks": ["embedding-rows", "embedding-search(steps=2)"], "defences": ["none"]},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What came back of each run on either device, from one process: it takes long to start."""
    runs = {name: {"name": "r", "target_clients": 1} | settings for name, settings in RUNS.items()}
    words = [sys.executable, "-m", "tests.fake_device", json.dumps(runs)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="needs torch 2.10 or later"
)
@pytest.mark.parametrize("name", RUNS)
def test_an_audit_finds_the_same_on_another_device(name: str, found: dict[str, Any]) -> None:
    here, there = found[name]["here"], found[name]["there"]
    assert here
    assert here.keys() == there.keys()
    for trial, images in here.items():
        assert not isinstance(images, str), f"{trial}: {images}"
        assert not isinstance(there[trial], str), f"{trial}, elsewhere: {there[trial]}"
        # Planted units are read as quotients of small differences, whose rounding differs between processors.
        torch.testing.assert_close(torch.tensor(there[trial]), torch.tensor(images), rtol=0, atol=1e-3)
