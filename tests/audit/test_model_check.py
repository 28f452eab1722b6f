"""What would fail in every trial is told before the first one, with a remedy that works."""

import sys

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit.api import _one_thread
from gradveil.audit.findings import definitions
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.nn.models import MODELS, build
from tests.audit.runs import config, execute
from tests.nn.test_models import LIGHT


def experiment(model, size=32, **settings):
    config = {
        "name": "models",
        "data": {"name": "digits", "size": size},
        "model": {"name": model, **settings},
        "target_clients": 1,
        "defences": ["none"],
        "attacks": ["ig(iterations=1)"],
    }
    return open_experiment(resolve(config))


def network(name, size):
    return build(name, channels=1, size=size, classes=10, generator=Key(0).generator())


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if "channels" in entry.takes])
def test_every_model_is_accepted_or_its_remedy_works(name):
    size = 16 if name == "convnet" or name.startswith("resnet") else 32  # others need the larger images
    narrow = {"options": LIGHT.get(name, {})}
    if any(isinstance(module, torch.nn.BatchNorm2d) for module in network(name, size).modules()):
        with pytest.raises(GradveilError, match=r"model\.prepare=true"):
            experiment(name, size, **narrow)
        experiment(name, size, prepare=True, **narrow)
    else:
        assert experiment(name, size, **narrow).model(0).training


def test_batchnorm_in_training_mode_is_refused_before_any_trial():
    with pytest.raises(GradveilError, match=r"model: .*BatchNorm"):
        experiment("resnet20", 16)
    prepared = experiment("resnet20", 16, prepare=True, batchnorm="group").model(0)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in prepared.modules())


def test_images_too_small_to_score_are_refused_before_any_attack():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    batch = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])
    with pytest.raises(GradveilError, match="6 x 6 pixels, and SSIM needs 7"):
        gradveil.audit(net, batch, bounds="unit")


def test_small_images_are_scored_with_a_smaller_window_and_the_record_says_so():
    digits = load("digits", size=8)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    some = slice(0, 8)
    result = gradveil.audit(
        net,
        (digits.private.inputs[some], digits.private.targets[some]),
        public=(digits.public.inputs, digits.public.targets),
        mean=digits.private.mean,
        std=digits.private.std,
        attacks=["analytic"],
    )
    (row,) = result.findings.rows
    assert (row.identifiable, row.images) == (8, 8)
    assert row.info["ssim_window"] == 7
    assert "above 0.5, with a window of 7 pixels." in " ".join(definitions(result.findings, result.config))
    assert "above 0.5, with a window of 7 pixels." in result.report().read_text("utf-8")


def test_an_audit_from_python_uses_one_thread_and_gives_the_others_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with _one_thread("cpu"):
            inside = torch.get_num_threads()
        assert (inside, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


def test_an_interrupted_audit_leaves_no_private_images(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["gradveil.audit.audit_run"], "run", interrupt)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 3))
    batch = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])
    with pytest.raises(KeyboardInterrupt):
        gradveil.audit(net, batch, bounds="unit")
    # torch makes a folder for its compiler where it is first imported.
    assert [one for one in tmp_path.iterdir() if not one.name.startswith("torchinductor")] == []


def test_what_was_changed_in_the_model_is_recorded():
    assert experiment("resnet20", 16, prepare=True).prepared[0].startswith("BatchNorm replaced (batch_statistics): ")
    assert experiment("lenet-zhu", prepare=True).prepared == ()


def test_an_audit_from_python_prepares_a_copy():
    layers = torch.nn.Flatten(), torch.nn.Linear(256, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    net = torch.nn.Sequential(*layers)
    batch = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([2])
    given = {"attacks": ["ig(iterations=1)"], "bounds": "unit"}
    with pytest.raises(GradveilError, match="prepare=True"):
        gradveil.audit(net, batch, **given)
    result = gradveil.audit(net, batch, prepare=True, **given)
    assert result.trials[0].info["prepared"] == ["hidden dropout made explicit: module '2'"]
    assert result.summary()[0]["prepared"] == "hidden dropout made explicit: module '2'"
    assert "Changed in the model: hidden dropout made explicit: module '2'." in str(result)
    assert isinstance(net[2], torch.nn.Dropout)
    assert "hidden dropout made explicit" in result.report().read_text()


def test_a_model_may_have_more_outputs_than_the_data_have_classes(tmp_path):
    """As one for a thousand classes that is applied to two; whoever sees the model counts its outputs."""
    attacks = ["dlg(iterations=2)", "ig(iterations=2, labels=restore)", "learned(epochs=1, width=8, features=16)"]
    settings = {"client": {"batch": 2}, "defences": ["none", "label-smoothing(0.1)"]}
    made = config(model={"name": f"{__name__}:of_five"}, attacks=[*attacks, "analytic"], **settings)
    assert [trial.failed for trial in execute(made, tmp_path / "run")[0].trials] == [None] * 8


def of_five(channels: int, size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 8), nn.ReLU(), nn.Linear(8, 5))
