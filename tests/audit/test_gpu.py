"""On a CUDA device, an audit finds what it finds on the CPU; skipped where there is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from tests.fake_device import attacked

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IMAGES = {"data": {"name": "digits", "size": 32, "public": 40, "gallery": 20}, "model": {"name": "scheliga-cnn"}}
PERCEPTRON = IMAGES | {"model": {"name": "mlp"}}
ROWS = {"data": {"name": "census"}, "model": {"name": "tabular-mlp"}, "client": {"batch": 4}}
TEXTS = {"data": {"name": "reviews"}, "model": {"name": "small-encoder", "options": {"width": 96}}, "iterations": None}
ATTACKS: dict[str, dict[str, Any]] = {
    "searches": IMAGES | {"attacks": ["dlg", "ig", "cdia", "portfolio", "sapag", "gi"], "defences": ["none"]},
    "local training": IMAGES
    | {
        "attacks": ["ig(simulated_client=full)", "sme"],
        "defences": ["none"],
        "client": {"batch": 2, "local": {"epochs": 2, "lr": 0.1}},
    },
    "closed forms": PERCEPTRON | {"attacks": ["analytic", "r-gap"], "defences": ["none"]},
    "generators": IMAGES | {"attacks": ["grnn", "gias(lessons=20)", "ggl", "learned(epochs=1)"], "defences": ["none"]},
    "malicious servers": PERCEPTRON
    | {"attacks": ["rob(bins=16)", "curious(rows=16)", "quantile"], "defences": ["none"], "client": {"batch": 4}},
    "noise and clips": IMAGES
    | {
        "attacks": ["cdia"],
        "defences": ["dp(clip=20, sigma=1e-3)", "fed-cdp", "optimal-noise(0.005)", "svt(gamma=1, noise_var=10)"],
    },
    "pruning": IMAGES
    | {"attacks": ["cdia"], "defences": ["prune(0.9)", "dgp", "adgp", "optimal-prune(0.8)", "soteria", "outpost"]},
    "models and coarser numbers": IMAGES
    | {
        "attacks": ["cdia"],
        "defences": ["precode", "cvb", "dropout(0.25)", "keylock", "sign", "quantise(bits=3)", "standin", "censor"],
    },
    "rows": ROWS | {"attacks": ["tableak"], "defences": ["none", "gaussian(1e-3)"]},
    "unmixed rows": ROWS | {"attacks": ["unmix"], "defences": ["none"]},  # behind noise the last bit of a sum decides
    "texts": TEXTS
    | {
        "attacks": ["span", "span-rank", "embedding-rows", "embedding-search(steps=2)"],
        "defences": ["none", "gaussian(1e-3)"],
    },
}
BITS_OF_NOISE = 1e-6
"""Sums are added in another order on a GPU; in float64, few iterations keep this far together."""
TRAINED = 1e-3
"""Generators train in float32 first: twenty steps make 4e-6 of a rounding, hundreds make all of it."""


@pytest.mark.parametrize("name", ATTACKS)
def test_an_audit_finds_the_same_on_a_gpu(name: str) -> None:
    settings = {"name": "r", "target_clients": 2, "iterations": 3, "precision": "float64"} | ATTACKS[name]
    here = attacked(resolve(settings))
    there = attacked(resolve(settings | {"device": "cuda"}))
    assert here.keys() == there.keys()
    for trial, images in here.items():
        assert not isinstance(images, str), f"{trial}: {images}"
        assert not isinstance(there[trial], str), f"{trial}, on the GPU: {there[trial]}"
        found, expected = torch.tensor(there[trial]), torch.tensor(images)
        assert math.isfinite(found.double().sum().item()), trial
        torch.testing.assert_close(
            found,
            expected,
            rtol=0,
            atol=TRAINED if name == "generators" else BITS_OF_NOISE,
            msg=lambda text, t=trial: f"{t}: {text}",
        )


@pytest.mark.parametrize("attack", [None, "cdia(iterations=3)", "learned(epochs=1)"])
def test_one_update_on_a_gpu_is_inverted(attack: str | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)).cuda()
    truth, labels = torch.rand(1, 3, 8, 8), torch.tensor([3])
    nn.functional.cross_entropy(net(truth.cuda()), labels.cuda()).backward()
    sent = {name: parameter.grad for name, parameter in net.named_parameters()}
    public = torch.rand(20, 3, 8, 8), torch.arange(20) % 10
    found = gv.invert(net, sent, attack, labels=labels, truth=truth, public=public, bounds=(0, 1))
    assert found.images.isfinite().all()
    if attack is None:
        torch.testing.assert_close(found.images.cpu(), truth, rtol=0, atol=1e-3)


def test_a_gpu_convolves_in_float32_as_a_cpu_does() -> None:
    settings = {"name": "r", "target_clients": 2, "attacks": ["ig"], "defences": ["none"]} | IMAGES
    sent = []
    for changes in ({"precision": "float64"}, {"device": "cuda"}):
        experiment = open_experiment(resolve(settings | changes))
        client, batch = experiment.client(0, "none", 0), experiment.batch(torch.tensor([[0], [1]]))
        with torch.no_grad():
            update, _ = client.updates(client.params(), batch, {}, {})
        sent.append(torch.cat([value.double().flatten().cpu() for value in update.values()]))
    exact, found = sent
    assert (found - exact).norm() / exact.norm() < 1e-5
