"""The training of a run file gives DP defences an epsilon, heuristics none; `check` and the report warn."""

import json
from pathlib import Path

import pytest

from gradveil.audit.result_rows import summarise
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.federated.training_groups import proven
from gradveil.report import audit_page
from gradveil.theory.accounting import Participation, epsilon
from tests.audit.runs import config, execute, legend

DEFENCES = [
    "none",
    "dp(clip=1, sigma=2)",
    "fed-cdp(clip=1, sigma=4)",
    "user-dp(clip=1, sigma=2)",
    "prune(0.9)",
    "gaussian(0.01)",
    "dp(clip=1, sigma=2) + optimal-prune(0.5)",
    "optimal-noise(0.1, clamp=1)",
]
PRIVATE = DEFENCES[1:4]
TRAINING = {"steps": 1000, "rate": 0.01}


def test_without_a_training_no_epsilon_is_told(tmp_path: Path) -> None:
    found, _ = execute(config(defences=["dp(clip=1, sigma=1)", "prune(0.9)"]), tmp_path / "run")
    private, heuristic = (trial.info for trial in found.trials)
    assert private["epsilon"] == heuristic["epsilon"] == {}
    assert private["guarantee"].startswith("differential privacy of each example (noise multiplier 1)")
    assert heuristic["guarantee"] == proven(heuristic) == "no formal guarantee"


class TestWithATraining:
    @pytest.fixture(autouse=True)
    def _accountant(self) -> None:
        pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

    def test_epsilon_stands_beside_private_defences_only(self, tmp_path: Path) -> None:
        chosen = config(defences=DEFENCES, privacy=TRAINING, attacks=["ig(iterations=2)"])
        found, _ = execute(chosen, tmp_path / "run")
        facts = {trial.info["defence"]: trial.info for trial in found.trials}
        assert {name for name, info in facts.items() if info["epsilon"]} == set(PRIVATE)
        wanted = epsilon(2.0, Participation(**TRAINING))
        assert facts["dp(clip=1, sigma=2)"]["epsilon"] == {"example": pytest.approx(wanted)}
        assert facts["user-dp(clip=1, sigma=2)"]["epsilon"] == {"client": pytest.approx(wanted)}
        assert facts["fed-cdp(clip=1, sigma=4)"]["epsilon"]["example"] > wanted
        html, told = audit_page(found), legend(found.trials)
        for name, info in facts.items():
            short = proven(info)
            assert short.startswith("epsilon ") == (name in PRIVATE), name
            assert ("epsilon" in info["guarantee"]) == (name in PRIVATE), name
            assert name == "none" or short in html
            assert summarise(next(c for c in found.trials if c.info is info))["guarantee"] == info["guarantee"]
        assert "No formal guarantee: prune(0.9), gaussian(0.01) and optimal-noise(0.1, clamp=1)." in told
        assert "uses the data again" in told
        assert told.count("Privacy warning: fed-cdp(clip=1, sigma=4): noise: the noise is scaled") == 1
        assert "fed-cdp(clip=1, sigma=4): noise: the noise is scaled to a sensitivity of 1" in html

    def test_check_warns_and_does_not_fail(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["check", "--model", "lenet-zhu", "--data", "faces", "--size", "16", "--set", "client.batch=1"]
        for defence in ("dp", *DEFENCES):
            words += ["--defence", defence]
        assert run([*words, "--json"]) == 0
        told = [(p["where"], p["what"]) for p in json.loads(capsys.readouterr().out) if p["severity"] == "warning"]
        defences = [where.partition("'")[2].partition("'")[0] for where, what in told if "closed form" not in what]
        assert defences == ["dp", "fed-cdp(clip=1, sigma=4)", "dp(clip=1, sigma=2) + optimal-prune(0.5)"]
        said = [what for _, what in told]
        assert "epsilon of one update alone" in said[0]
        assert "sensitivity" in said[1]
        assert "uses the data again" in said[2]
        sound = [*words[:9], "--defence", "dp(clip=1, sigma=1)", "--set"]
        assert run([*sound, "privacy.steps=100000"]) == 0
        assert "epsilon of a training of 100,000 sums" in capsys.readouterr().out
        assert run([*sound, "privacy={steps=1000, rate=0.01}"]) == 0
        assert "warning" not in capsys.readouterr().out


def test_every_mistake_in_the_training_is_told() -> None:
    wrong = {"rate": 1.5, "delta": 0, "sampling": "fixed", "step": 3}
    with pytest.raises(GradveilError) as found:
        config(privacy=wrong)
    told = {p.where: (p.what, p.remedy) for p in found.value.problems}
    assert set(told) == {f"privacy.{name}" for name in ("steps", "rate", "delta", "sampling", "step")}
    assert told["privacy.step"] == ("is not a setting", "did you mean 'steps'?")
