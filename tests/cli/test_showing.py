"""An audit of a model that shows what goes into it says so, unless it attacks it so: then every image comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.audit.attackers.run_attackers import decide, widened
from gradveil.audit.experiment import Experiment
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.cli.app import run
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.federated.update_records import UpdateRecorder
from gradveil.nn.models import build

WORDS = [
    "audit",
    "faces",
    "--set",
    "model.name=vit",
    "--set",
    "model.options={width=64, blocks=1, heads=4}",
    "--set",
    "data.size=16",
    "--target-clients",
    "1",
    "--workers",
    "1",
]
WORDS += ["--no-control", "--set", "cost="]
VIT = {"name": "vit", "options": {"width": 64, "blocks": 1, "heads": 4}}
CONTINUED = "cdia(start=solved, lr=0.01, tv=0.0001)"
BY_TOKEN = 'cdia(start=solved, lr=0.01, tv=0.0001, objective="tokenwise-cosine")'
MODEL = ["--defence", "dropout(0.25)", "--defence", "precode", "--defence", "cvb"]


def whole() -> nn.Module:
    """Take all pixels at once."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 8), nn.Sigmoid(), nn.Linear(8, 40))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_closed_form_attack_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "--defence", "none", "--attack", "ig(iterations=1)", "--json"]) == 0
    err = capsys.readouterr().err
    assert "warning: client: one image comes back in closed form" in err
    assert "--attack analytic" in err
    (folder,) = Path("runs").iterdir()
    warning = "client: one image comes back in closed form"
    assert warning in (folder / "report.html").read_text(encoding="utf-8"), "the page has the warning too"
    assert run([*WORDS, "--defence", "none", "--attack", "ig(iterations=1)", "--attack", "analytic"]) == 0
    assert warning not in (folder / "report.html").read_text(encoding="utf-8"), "the suggested attack runs"


def test_the_attack_recovers_behind_every_model_defence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, *MODEL, "--attack", "analytic", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "closed form" not in err
    rows = json.loads(out)["trials"]
    assert [row["asr"] for row in rows] == [1.0] * 3
    assert min(row["ssim_mean"] for row in rows) > 0.99


def with_added(**settings: object) -> Experiment:
    """A run of this model, with the attacks in closed form."""
    raw = {"name": "r", "data": {"name": "faces", "size": 16}, "model": VIT, "target_clients": 1}
    experiment = open_experiment(resolve(raw | {"attacks": ["ig"]} | settings), checked=False)
    return widened(experiment, decide(experiment))[0]


def added(**settings: object) -> list[str]:
    """What comes to the attacks of a run of this model."""
    return [*with_added(**settings).config.attacks[1:]]


def test_adaptive_attacks_in_closed_form_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--defence", "prune(0.5)", "--attack", "adaptive", "--iterations", "1", "--budget", "64", "--json"]
    assert run([*words, "--set", "data.public=12"]) == 0
    out, err = capsys.readouterr()
    for names in ("analytic", f"analytic(prior=public) and {CONTINUED}", BY_TOKEN):
        assert f"adaptive: {names} too, since" in err
    assert "warning: client" not in err
    attacks = [row["attack"] for row in json.loads(out)["trials"]]
    assert attacks[-4:] == ["analytic", "analytic(prior=public)", CONTINUED, BY_TOKEN]
    assert len(attacks) > 4, "the attackers of the table are still there"


def test_closed_form_attacks_meet_only_clients_that_reveal_images() -> None:
    assert added() == ["analytic"]
    assert added(defences=["none", "gaussian(0.1)"]) == ["analytic", "analytic(prior=public)", CONTINUED, BY_TOKEN]
    whole = {"model": {"name": "tests.cli.test_showing:whole"}, "defences": ["gaussian(0.1)"]}
    assert added(**whole)[2:] == [CONTINUED, f"{ESTIMATE} on gaussian(0.1)"], "no patches"
    assert added(defences=["dropout(0.25)"]) == ["analytic"]
    assert added(client=[{"batch": 2}]) == []
    several = with_added(client=[{"batch": 1}, {"batch": 2}])
    assert (several.config.attacks[1:], [*several.unfit]) == (["analytic"], [(1, "none", "analytic")])
    assert added(model={"name": "lenet-zhu"}) == ["r-gap"]


ESTIMATE = "r-gap(labels=restore, simulated_client=full)"
CHAIN = {"name": "scheliga-cnn"}


def test_chains_of_layers_are_solved_where_a_defence_leaves_them_one() -> None:
    sized = {"data": {"name": "faces", "size": 32}}
    assert added(model=CHAIN, **sized) == ["r-gap"]
    assert added(model=CHAIN, **sized, defences=["none", "prune(0.9)"]) == [
        "r-gap on none",
        f"{ESTIMATE} on prune(0.9)",
    ]
    some = with_added(model=CHAIN, **sized, defences=["none", "precode"])
    assert some.config.attacks[1:] == ["r-gap"]
    assert [*some.unfit] == [(0, "precode", "r-gap")]
    assert added(model=CHAIN, **sized, defences=["cvb", "precode"]) == []
    assert added(model=CHAIN, **sized, client=[{"local": {"lr": 0.1, "steps": 2}}]) == []
    assert added(model={"name": "convnet"}, **sized) == [], "pooling is no step back"


def test_attack_that_does_not_apply_has_a_reason_and_others_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "audit",
        "faces",
        "--set",
        "model.name=lenet-zhu",
        "--set",
        "data.size=16",
        "--target-clients",
        "2",
        "--json",
    ]
    words += ["--workers", "1", "--attack", "r-gap", "--set", "cost="]
    assert run([*words, "--defence", "precode"]) == 2
    assert "attack 'r-gap' on 'precode', client: " in capsys.readouterr().err
    words += ["--defence", "none", "--defence", "precode"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    bare, behind = json.loads(out)["trials"]
    assert (bare["asr"], bare["failed"]) == (1.0, None)
    assert (behind["asr"], behind["statuses"]) == (None, {"does not apply": 1})
    assert behind["failed"] in err
    assert "r-gap against precode, seed 0: does not apply: " in err
    assert behind["failed"] in Path("runs/faces/report.html").read_text().replace("&gt;", ">").replace("&#39;", "'")
    assert run([*words, "--fail-above", "1"]) == 1
    assert "precode (gradient) is not tested. No attack of this run applies to it" in capsys.readouterr().err
    accepted = [f"--accept={what}" for what in ("few-images", "inconclusive", "not-tested")]
    assert run([*words, "--attack", "ig(iterations=1)", "--fail-above", "1", *accepted]) == 0
    capsys.readouterr()
    assert run(["summary", "runs/faces", "--markdown", "-"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\| `precode` \| not tested \|.*does not apply \|", out)
    assert "To go on" not in err, "nothing is left to be done"


def test_chain_warning_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "faces", "--set", "model.name=lenet-zhu", "--target-clients", "1", "--workers", "1", "--json"]
    words += ["--set", "cost=", "--set", "data.size=16"]
    for name in ("ig(iterations=1)", "r-gap"):
        assert run([*words, "--defence", "none", "--attack", name, "--out", name[:2]]) == 0
    out, err = capsys.readouterr()
    assert err.count("warning: client: one image may come back in closed form: the model is a plain chain of ") == 1
    assert "--attack r-gap --defence none" in err
    row = json.loads(out[out.rindex("\n{") :])["trials"][0]
    assert row["attack"] == "r-gap"
    assert row["asr"] == 1.0
    assert run([*words, "--defence", "prune(0.9)", "--attack", "ig(iterations=1)", "--out", "pruned"]) == 0
    assert "closed form" not in capsys.readouterr().err


def test_the_search_among_them_takes_the_iterations_of_the_run() -> None:
    assert with_added(defences=["gaussian(0.1)"], iterations=7).attacks[CONTINUED].descent.iterations == 7


def passed(norm: str = "batch") -> nn.Module:
    """A small net with BatchNorm through which images have passed."""
    net = build("lenet-zhu", channels=1, size=16, classes=2, norm=norm, generator=Key(0).generator())
    net(torch.rand(8, 1, 16, 16, generator=Key(1).generator()))
    return net


def test_adaptive_pulls_to_running_statistics_where_the_model_carries_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(passed().state_dict(), tmp_path / "weights.safetensors")
    model = ["--set", "model.name=lenet-zhu", "--set", 'model.options={norm="batch"}', "--set", "model.prepare=true"]
    few = ["--target-clients", "1", "--iterations", "2", "--workers", "1", "--attack", "adaptive", "--json"]
    few += ["--set", "cost="]
    words = ["audit", "faces", *model, "--set", "data.size=16", "--set", "client.batch=2", *few, "--defence", "none"]
    weights = ["--set", f"model.weights={tmp_path / 'weights.safetensors'}"]
    assert run([*words, *weights, "--out", "trained"]) == 0
    out, err = capsys.readouterr()
    assert "adaptive: cdia(batchnorm=0.01) too, since the model carries running statistics" in err
    assert json.loads(out)["trials"][-1]["attack"] == "cdia(batchnorm=0.01)"
    (info,) = (json.loads(p.read_text()) for p in Path("trained").glob("trials/*cdia-batchnorm*/trial.json"))
    assert info["remarks"] == []
    fresh = {"name": "lenet-zhu", "options": {"norm": "batch"}, "prepare": True}
    trained = fresh | {"weights": str(tmp_path / "weights.safetensors")}
    assert added(model=trained, client=[{"batch": 2}]) == ["cdia(batchnorm=0.01)"]
    assert added(model=fresh, client=[{"batch": 2}]) == []
    assert added(model=trained, client=[{"batch": 2}], attacks=["cdia(batchnorm=0.1)"]) == []


def test_recorded_running_statistics_are_pulled_to_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = passed()
    inputs, targets = torch.rand(2, 1, 16, 16, generator=Key(2).generator()), torch.tensor([0, 1])
    nn.functional.cross_entropy(net(inputs), targets).backward()
    update = {name: value.grad for name, value in net.named_parameters() if value.grad is not None}
    UpdateRecorder(tmp_path / "seen", truth=True).write(
        1, "a", net.state_dict(), update, 2, truth=Batch(inputs, targets)
    )
    model = ["--set", "model.name=lenet-zhu", "--set", 'model.options={norm="batch"}', "--set", "model.prepare=true"]
    data = [word for fact in ("channels=1", "size=16", "classes=2") for word in ("--set", f"data.{fact}")]
    few = ["--iterations", "2", "--workers", "1", "--attack", "adaptive", "--json"]
    assert run(["audit", "--observed", str(tmp_path / "seen"), *model, *data, *few]) == 0
    out, err = capsys.readouterr()
    assert "adaptive: cdia(batchnorm=0.01) too" in err
    assert json.loads(out)["trials"][-1]["attack"] == "cdia(batchnorm=0.01)"
