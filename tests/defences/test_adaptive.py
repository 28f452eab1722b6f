"""Every defence names the attackers that aim at it, and `adaptive` in a run stands for them."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Known
from gradveil.attacks.protocol import Active
from gradveil.audit.attack_selection import aimed_at, attacks_against, pairs, planted_for, trials
from gradveil.audit.attackers.attacker_table import aimed_by
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.defences import DEFENCES, Gaussian, chain
from gradveil.defences.entry import DefenceEntry
from tests.audit.runs import config

UNKNOWN = [
    "portfolio(simulated_client=naive)",
    "portfolio(undo_entries=true)",
    'portfolio(objective="layerwise-cosine")',
    'portfolio(objective="signs")',
]


def granted_secrets(attack):
    """List the secrets that an attack has to be granted."""
    return [name for name, how in attack.knowledge.items() if isinstance(how, Known) and name != "public"]


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_has_an_adaptive_attack(name):
    attacks = [make_attack(text) for text in aimed_by("curious", DEFENCES[name])]
    assert attacks, f"{name} names no attacker that aims at it"
    if DEFENCES[name].changes:
        knows = [attack.simulated_client == "full" and not granted_secrets(attack) for attack in attacks]
        assert any(knows), f"whoever aims at {name} ignores it, or is told its secrets"


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_has_a_malicious_server(name):
    assert all(isinstance(make_attack(text), Active) for text in aimed_by("malicious", DEFENCES[name]))
    assert not [text for text in aimed_by("curious", DEFENCES[name]) if isinstance(make_attack(text), Active)]
    names = {text.partition("(")[0] for text in aimed_by("malicious", DEFENCES[name])}
    assert names == (set() if DEFENCES[name].kind == "texts" else {"rob", "curious", "fishing", "steering"})


def test_decoys_apply_to_defences_that_cut_large_entries():
    for text, wanted in (("dgp", 2), ("adgp", 2), ("prune(0.9)", 0), ("cvb + dgp", 2), ("an object + dgp", 2)):
        assert sum("decoys" in attack for attack in planted_for(text)) == wanted, text
    assert planted_for("an object's own name") == planted_for("none")


def entry(name, adaptive=(), traits=()):
    return DefenceEntry(
        name=name, factory=lambda: DEFENCES["sign"](), description="", citation="", changes=("send",),
        guarantee="none", cost="", adaptive=adaptive, traits=traits,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [("step",), ("send",), ("batch", "send")])
def test_factory_result_fills_the_slot_of_its_entry(changes):
    mine = replace(entry("mine", ("ig",)), factory=lambda: Gaussian(0.1), changes=changes)
    if len(changes) == 1:
        assert getattr(mine(), changes[0]) == chain(own=Gaussian(0.1))
    else:
        with pytest.raises(GradveilError, match="returned Gaussian, not a defence -> return a Defence"):
            mine()


def test_custom_entry_has_the_attacks_of_its_traits(monkeypatch):
    monkeypatch.setitem(DEFENCES, "mine", entry("mine", traits=("zeros entries", "zeros by size")))
    assert aimed_at("mine") == aimed_at("prune(0.5)")
    monkeypatch.setitem(DEFENCES, "mine", entry("mine"))
    assert aimed_at("mine") == ["portfolio", "learned"]


@pytest.mark.parametrize("adaptive", [("ig",), ("pig", "analytic"), ("wiig",)])
def test_custom_entry_has_adaptive_attacks(monkeypatch, adaptive):
    """Attackers who ignore it, or who are told its secrets, are not enough."""
    monkeypatch.setitem(DEFENCES, "mine", entry("mine", adaptive))
    assert aimed_at("mine") == [*adaptive, "portfolio", "learned"]
    assert ("portfolio", "mine") in pairs(config(attacks=["adaptive"], defences=["none", "mine"]))


def test_composition_with_an_object_has_the_attacks_of_its_known_parts():
    assert set(aimed_at("dropout + my own + prune(0.5)")) == {*aimed_at("dropout"), *aimed_at("prune(0.5)"), *UNKNOWN}
    assert {*aimed_at('ats(policy="3-1-7+43-18-18") + my own')} == {*aimed_at("ats"), "portfolio", *UNKNOWN, "learned"}


def test_dgp_has_attacks_with_and_without_the_order():
    """On the support that shows: angles, layer by layer, squares; and free or bound."""
    for name in ("dgp", "adgp"):
        aimed = [make_attack(text) for text in aimed_at(name) if text.startswith(("cdia", "portfolio"))]
        assert {(attack.objective, "send.*border.*" in attack.knowledge) for attack in aimed} == {
            ("cosine", False), ("cosine", True), ("layerwise-cosine", False), ("l2", True),
        }  # fmt: skip


def test_composition_has_the_attacks_of_its_parts():
    together = aimed_at("dp(sigma=1) + cvb")
    assert set(together) == {*aimed_at("dp"), *aimed_at("cvb")}
    assert len(together) == len(set(together))
    assert aimed_at("an object's own name") == ["portfolio", *UNKNOWN, "learned"]


def test_adaptive_expands_per_defence():
    run = config(attacks=["ig-scheliga", "adaptive"], defences=["none", "dgp", "dropout"])
    met = pairs(run)
    assert [text for text, defence in met if defence == "none"] == ["ig-scheliga", "portfolio"]
    assert {text for text, defence in met if defence == "dropout"} == {
        "ig-scheliga",
        "portfolio",
        "learned",
        "dia",
    }
    assert "learned" in {text for text, defence in met if defence == "dgp"}
    assert len(trials(run)) == len(met) == len({trial.id for trial in trials(run)})


def test_adaptive_does_not_repeat_a_named_attack():
    assert list(attacks_against(["dia", " Adaptive "], "dropout")) == [
        "dia",
        "portfolio",
        "learned",
    ]


def test_an_attack_on_one_defence_is_run_on_that_defence_only():
    run = config(attacks=["ig", "cdia on prune(ratio=0.90)", "adaptive on dropout"], defences=["prune(0.9)", "dropout"])
    assert [pair for pair in pairs(run) if pair[1] == "prune(0.9)"] == [("ig", "prune(0.9)"), ("cdia", "prune(0.9)")]
    assert {attack for attack, defence in pairs(run) if defence == "dropout"} > {"ig", "dia"}
    assert {trial.attack for trial in trials(run)} == {attack for attack, _ in pairs(run)}


def test_adaptive_without_public_data_has_no_learned_attack():
    assert "learned" not in attacks_against(["adaptive"], "dp", public=False)
    assert list(attacks_against(["adaptive"], "dp", public=False)) == ["portfolio"]


def test_adaptive_with_settings_raises():
    with pytest.raises(GradveilError, match="adaptive"):
        config(attacks=["adaptive(iterations=5)"])


def test_adaptive_and_malicious_combine():
    met = pairs(config(attacks=["malicious", "adaptive"], defences=["dgp"]))
    assert [text for text, _ in met] == [*planted_for("dgp"), *aimed_at("dgp")]


def test_malicious_server_uses_what_pruning_leaves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["audit", "faces", "--attack", "malicious", "--defence", "none", "--defence", "dgp", "--json"]
    words += ["--set", "data.size=32", "--set", "client.batch=4", "--target-clients", "1", "--workers", "1"]
    words += ["--set", "cost="]
    assert run([*words, "--iterations", "1"]) == 0
    rates = {(row["defence"], row["attack"]): row["asr"] for row in json.loads(capsys.readouterr().out)["trials"]}
    assert rates["none", "rob(bins=512)"] == 1.0
    assert rates["dgp", "rob(bins=512)"] < 1.0
    assert max(rate for (defence, _), rate in rates.items() if defence == "dgp") == 1.0
    with pytest.raises(GradveilError, match="malicious"):
        config(attacks=["malicious(bins=3)"])


def test_adaptive_expands_in_python():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 3))
    batch = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])
    result = gradveil.audit(model, batch, defences=["none", "prune(0.5)"], attacks=["ig", "adaptive"], iterations=2)
    tried = {(trial.info["attack"], trial.info["defence"]) for trial in result.trials}
    assert ("portfolio", "prune(0.5)") in tried
    assert ("ig", "none") in tried
