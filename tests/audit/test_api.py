"""`gradveil.audit` from Python: any module, any loss."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.audit import budgets
from gradveil.audit.api import Result, audit_model
from gradveil.audit.attackers import stopped_searches
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.defences import NONE, parse
from gradveil.defences.dp import Clip
from gradveil.nn.models import build

ATTACK = "ig(iterations=4)"


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return build("lenet-zhu", channels=1, size=16, classes=3, generator=generator)


def examples(count: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return inputs, torch.arange(count) % 3


def write_nothing(folder: Path, out: Path) -> Path:
    out.write_text(str(folder))
    return out


def draw_nothing(runs: Sequence[Path], kind: str, **choices: Any) -> tuple[str, dict[str, Any]]:
    assert all(run.is_dir() for run in runs)
    return kind, choices


def audited(**changes: Any) -> Result:
    given: dict[str, Any] = {"defences": ("none",), "attacks": (ATTACK,), "write_report": write_nothing}
    given |= {"draw_figure": draw_nothing, **changes}
    batch = given.pop("batch", examples())
    loss = given.pop("loss", nn.functional.cross_entropy)
    return audit_model(
        given.pop("model", None) or network(), batch, loss, given.pop("defences"), given.pop("attacks"), **given
    )


def test_the_package_offers_the_function_after_its_modules_were_imported() -> None:
    assert callable(gradveil.audit)
    result = gradveil.audit(network(), examples(), attacks=[ATTACK])
    assert [row["target_clients"] for row in result.summary()] == [2]


def test_local_training_and_aggregation_groups_are_arguments() -> None:
    local = gradveil.Local(lr=0.1, epochs=2, batch=1)
    result = audited(batch=examples(8), client_batch=2, local=local, members=2, attacks=["ig(iterations=2)"])
    (row,) = result.summary()
    assert (row["target_clients"], row["images"]) == (2, 8)
    assert result.trials[0].info["update"].startswith("the sum over 2 clients of local training (epochs=2")


def test_results_as_text_leave_no_empty_output_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *output: shown.append(output))
    assert "Verdict: " in str(audited(progress=False))
    assert "accuracy" in str(gradveil.train(network(), examples(8), examples(8), rounds=1, clients=2, progress=False))
    assert shown == []


def test_a_model_and_a_batch_of_ones_own(tmp_path: Path) -> None:
    result = audited(defences=("none", "prune(0.9)"), out=tmp_path / "run")
    assert [row["defence"] for row in result.summary()] == ["none", "prune(0.9)"]
    assert result.summary()[0]["model"] == "LeNetZhu" or result.summary()[0]["model"] == type(network()).__name__
    assert "prune(0.9)" in str(result)
    assert repr(result).startswith(f"Result({result.verdict!r}, trials=2, path=")
    assert result.path == tmp_path / "run"
    assert result.report(tmp_path / "page.html").read_text() == str(tmp_path / "run")


def test_a_run_is_opened_again_with_the_same_result(tmp_path: Path) -> None:
    whole = gradveil.audit(network(), examples(), defences=["none", "prune(0.9)"], attacks=[ATTACK], out=tmp_path / "a")
    again = gradveil.open_run(tmp_path / "a")
    assert isinstance(again, Result)
    assert str(again) == str(whole)
    assert again.summary() == whole.summary()
    assert again._repr_html_() == whole._repr_html_()
    assert again.report().is_file()
    with pytest.raises(GradveilError, match="is not a run directory"):
        gradveil.open_run(tmp_path)


def test_a_training_is_opened_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "clients": 2, "local": {"epochs": 1, "lr": 0.1, "batch": 2}}
    whole = gradveil.train(network(), examples(6, seed=2), examples(3), out=tmp_path / "t", **settings)
    again = gradveil.open_run(tmp_path / "t")
    assert isinstance(again, type(whole))
    assert (again.summaries, again.files) == (whole.summaries, whole.files)


def test_the_cost_in_accuracy_is_measured_from_python() -> None:
    cost = {"rounds": 1, "clients": 2, "local": {"epochs": 1, "lr": 0.1, "batch": 2}}
    result = audited(public=examples(8, seed=2), defences=("prune(0.9)",), cost=cost, control=False)
    assert set(result.costs) == {"none", "prune(ratio=0.9)"}
    assert result.costs["prune(ratio=0.9)"].rounds == 1
    many = {**cost, "clients": 8}
    for wrong, where in (
        ({**cost, "round": 1}, "cost.round"),
        ({**cost, "clients": 20}, "cost.clients"),
        (many, "cost.local.batch"),
    ):
        with pytest.raises(GradveilError) as caught:
            audited(public=examples(8, seed=2), cost=wrong)
        assert [problem.where for problem in caught.value.problems] == [where]
    with pytest.raises(GradveilError, match="public="):
        audited(cost=cost)


def test_a_baseline_without_public_examples_is_explained() -> None:
    assert "Baseline: without public examples" in str(audited(batch=examples(4)))
    assert "Baseline: " not in str(audited(batch=examples(4), public=examples(12, seed=2)))


def test_without_attacks_an_adaptive_search_and_closed_forms_are_tried() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Sigmoid(), nn.Linear(8, 3))
    result = audited(model=flat, attacks=None, defences=("none", "gaussian(1e-9)"), iterations=4)
    tried = {(row["defence"], row["attack"].partition("(")[0], row["attacker"]) for row in result.summary()}
    assert ("gaussian(1e-9)", "portfolio", "adaptive") in tried
    assert ("none", "analytic", "undefended") in tried
    assert {row["recovered"] for row in result.summary() if row["attack"] == "analytic"} == {2}
    search = {row["attack"].partition("(")[0] for row in audited(attacks=None, iterations=4).summary()}
    assert search == {"portfolio"}


def test_closed_forms_come_first_and_no_search_is_made_of_what_they_break(capsys: pytest.CaptureFixture[str]) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Sigmoid(), nn.Linear(8, 3))
    given: dict[str, Any] = {"model": flat, "batch": examples(8), "client_batch": 1, "iterations": 4, "progress": True}
    broken = audited(**given, attacks=None)
    assert broken.verdicts[0].level == "broken"
    assert [row["attack"].partition("(")[0] for row in broken.summary() if row["failed"] is None] == ["analytic"]
    assert "[1/2] analytic" in capsys.readouterr().err
    assert "Left out: portfolio" in str(broken)
    assert "attacks=['portfolio']" in str(broken)
    kept = audited(**given, attacks=None, defences=("none", "gaussian(10)"))
    assert {(row["defence"], row["attack"].partition("(")[0]) for row in kept.summary() if row["failed"] is None} == {
        (defence, attack) for defence in ("none", "gaussian(10)") for attack in ("analytic", "portfolio")
    }
    named = audited(**given, attacks=["cdia", "analytic"])
    assert all(row["failed"] is None for row in named.summary())


def test_a_result_has_its_verdict_table_and_pictures_in_a_notebook() -> None:
    result = gradveil.audit(network(), examples(), attacks=[ATTACK], defenses=["none", "prune(0.9)"])
    html = result._repr_html_()
    assert html is not None
    assert html.count("<img") == 6  # two truths, and two reconstructions of each setting
    assert "prune(0.9)" in html
    assert "<b>The only defence is not tested (prune(0.9)).</b>" in html
    assert audited(images=False)._repr_html_() is None, "nothing to render with"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(GradveilError) as caught:
        audited(device="cuda:99")
    assert [problem.where for problem in caught.value.problems] == ["device"]


def test_attacks_without_iterations_of_their_own_have_a_budget_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "AUTO_SECONDS", 1.0)
    monkeypatch.setattr(stopped_searches, "_SOON", 0)
    result = audited(attacks=("ig", ATTACK))
    limited, whole = result.trials
    assert result.config["budget"] == "auto"
    assert 0 < limited.info["budget_share"] < 1
    assert whole.info["budget_share"] is None
    assert [record["iterations"] for record in whole.records] == [4, 4]
    (line,) = [line for line in " ".join(str(result).split()).split(". ") if "Budget: " in line]
    assert "of the iterations that their authors use" in line
    assert "budget=None" in line
    assert "An hour on one target client does about" in " ".join(str(result).split())
    assert audited().config["budget"] is None
    assert audited(attacks=("ig",), iterations=3).config["budget"] is None
    assert audited(attacks=("ig",), iterations=3, budget="none").config["budget"] is None


def test_an_image_that_comes_back_in_closed_form_is_told_where_nobody_solves_for_it() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Sigmoid(), nn.Linear(8, 3))
    (warning,) = audited(model=flat).warnings
    assert (
        "closed form: the gradient of '1.bias' says what went into '1' -> attack it so: attacks=[\"analytic\"]"
        in warning
    )
    assert 'Not tested: one image comes back in closed form (attacks=["analytic"])' in str(audited(model=flat))
    assert audited(model=flat, attacks=("analytic",)).warnings == ()
    (warning,) = audited(model=flat, batch=examples(4), client_batch=2).warnings
    assert 'attacks=["unmix"]' in warning
    (warning,) = audited().warnings
    assert 'attacks=["r-gap"], defences=["none"]' in warning


def test_objects_serve_as_well_as_texts() -> None:
    by_object = audited(defences=(NONE, parse("prune(0.9)")), attacks=(make_attack(ATTACK),))
    by_text = audited(defences=("none", "prune(0.9)"))
    for a, b in zip(by_object.summary(), by_text.summary(), strict=True):
        assert (a["ssim_mean"], a["distance"]) == (b["ssim_mean"], b["distance"])


def test_examples_are_grouped_into_clients() -> None:
    result = audited(batch=examples(4), client_batch=2)
    (row,) = result.summary()
    assert (row["target_clients"], row["images"]) == (2, 4)
    assert [record["index"] for record in result.trials[0].records] == [0, 2]


def test_any_loss() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        hot = (targets.unsqueeze(-1) == torch.arange(outputs.shape[-1])).to(outputs.dtype)
        return (torch.softmax(outputs, -1) - hot).square().sum(-1)

    first, second = audited(), audited(loss=squares)
    assert first.trials[0].info["health"] != second.trials[0].info["health"]


def test_the_callers_model_stays_as_it_is() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audited(model=model, precision="float64", defences=("dropout(0.5)",))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bounds_that_are_read_off_the_batch_are_a_grant() -> None:
    inputs, targets = examples()
    measured = audited(batch=(inputs * 4 - 2, targets))
    assert "bounds: the least and greatest value of the batch" in measured.trials[0].info["grants"]
    for given in ({"bounds": (-2.0, 2.0)}, {"mean": [0.5], "std": [0.25]}):
        told = audited(batch=(inputs * 4 - 2, targets), **given)
        assert told.trials[0].info["grants"] == ["targets: the true labels"]
        truth = told.trials[0].images()
        assert truth is not None
        torch.testing.assert_close(truth["truth"][:, 0], inputs, rtol=0, atol=1e-5)


def test_all_problems_are_raised_at_once() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 3))
    inputs, targets = examples()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(GradveilError) as caught:
        audited(model=model, batch=(inputs, targets), defences=("nonsense",), attacks=("idg", ATTACK, ATTACK))
    said = str(caught.value)
    for part in ("NaN", "defences[0]", "attacks[0]", "attacks[2]", "is the same as"):
        assert part in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": (torch.zeros(2, 1, 16, 16), torch.tensor([0, 9]))}, "beyond 2: 9"),
        ({"batch": (torch.rand(2, 3, 16, 16), torch.tensor([0, 1]))}, "channels"),
        ({"batch": (torch.rand(2, 16), torch.tensor([0, 1]))}, "inputs of shape"),
        ({"batch": (torch.rand(2, 1, 16, 16).double(), torch.tensor([0, 1]))}, "inputs.to\\(torch.float32\\)"),
        ({"bounds": "unit", "batch": (torch.full((2, 1, 16, 16), 3.0), torch.tensor([0, 1]))}, "outside"),
        ({"bounds": (1.0, 1.0)}, "low < high"),
        ({"bounds": (0.0, float("inf"))}, "low < high"),
        ({"bounds": "unit", "mean": [0.5]}, "bounds: are given beside mean"),
        ({"mean": []}, "mean: is \\[\\]"),
        ({"std": [float("nan")]}, "std: is \\[nan\\]"),
        ({"out": 3}, "out: is 3 -> give the path of a folder"),
        ({"prepare": "yes"}, "prepare: is 'yes' -> give True or False"),
        ({"progress": 1}, "progress: is 1 -> give True or False"),
        ({"client_batch": True}, "client_batch: is True"),
        ({"model": lambda x: x}, "model: is function -> give a torch.nn.Module"),
        ({"model": nn.Linear}, "model: is the class Linear -> give"),
        ({"model": nn.Linear(2, 2, device="meta")}, "model: lies on the meta device"),
        ({"loss": "mse"}, "loss: is 'mse' -> give a function"),
        ({"loss": nn.CrossEntropyLoss}, "loss: is the class CrossEntropyLoss -> give"),
        ({"loss": lambda outputs, targets: 3}, "loss: returns int, not a tensor"),
        ({"loss": nn.functional.mse_loss}, "loss: fails: RuntimeError: The size of tensor"),
        ({"batch": (torch.rand(2, 1, 16, 16).to_sparse(), torch.tensor([0, 1]))}, "layout torch.sparse_coo"),
        ({"batch": (torch.rand(0, 1, 16, 16), torch.zeros(0).long())}, "batch.inputs: is empty"),
        ({"batch": (torch.rand(2, 1, 16, 16), torch.tensor([0.0, 1.0]))}, "batch.targets: has shape .* torch.float32"),
        ({"batch": (torch.rand(2, 1, 16, 16), torch.tensor([[0], [1]]))}, "batch.targets: has shape \\(2, 1\\)"),
        ({"batch": (torch.rand(2, 1, 16, 16), torch.tensor([0, 1, 2]))}, "batch.targets: has shape \\(3,\\) for 2"),
        ({"batch": (torch.rand(2, 1, 16, 16), torch.eye(3)[:2])}, "targets are torch.float32"),
        ({"batch": (torch.ones(4, 1, 16, 16), torch.tensor([0, 1, 2, 9]))}, "batch.targets: .* beyond 2: 9"),
        ({"attacks": ()}, "are empty"),
        ({"client_batch": 3}, "images"),
        ({"threshold": 2.0}, "threshold"),
        ({"colour": 2}, "colour: is not a setting"),
        ({"client_batch": 0}, "client_batch: is 0"),
        ({"client_batch": "2"}, "client_batch: is '2' -> give a whole number"),
        ({"members": 0}, "members: is 0 -> give at least 1"),
        ({"local": {"lr": -1.0, "steps": 1}}, "local.lr: is -1"),
        ({"local": gradveil.Local(lr=0.1, steps=1, batch=2)}, "client_batch: has 1 examples but local.batch takes 2"),
        ({"attacks": ["adaptve"]}, "did you mean 'adaptive'"),
        ({"seed": -1}, "^seed: is -1 -> give at least 0"),
        ({"precision": "half"}, "precision: is 'half' -> allowed: 'float32' or 'float64'"),
        ({"device": "tpu"}, "device: is 'tpu'"),
        ({"iterations": "many"}, "iterations: is 'many' -> give a whole number"),
        ({"bounds": (0,)}, "bounds: is .* -> give 'unit'"),
        ({"mean": 0.5}, "mean: is 0.5 -> give a list"),
        ({"batch": torch.zeros(2, 1, 16, 16)}, "batch: is Tensor -> give"),
        ({"data": {"name": "faces"}}, "data: is no setting here"),
        ({"defences": ["dp", "dp(clip=20)"]}, r"defences\[1\]: 'dp\(clip=20\)' is the same as 'dp'"),
        ({"defences": ["dp", parse("dp")]}, r"defences\[1\]: 'dp' is the same as 'dp'"),
        ({"attacks": [3]}, r"attacks\[0\]: is 3"),
        ({"defences": [None]}, r"defences\[0\]: is None"),
    ],
)
def test_wrong_use_is_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        audited(**change)


class Odd(nn.Module):
    """A model that misbehaves in the way that is asked for."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(256, 3), output

    def forward(self, inputs: Tensor) -> Any:
        return self.output(self.layer(inputs.flatten(1)))


class _OwnError(Exception):
    """What nobody expects."""


TROUBLES = (RuntimeError("a"), KeyError("a"), OSError("a"), ImportError("a"), StopIteration(), _OwnError("a"))


def fails(error: Exception) -> Callable[..., Tensor]:
    def anything(*_: Tensor) -> Tensor:
        raise error

    return anything


def needs_two(outputs: Tensor) -> Tensor:
    assert len(outputs) == 2, "two please"
    return outputs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"model": Odd(fails(error))}, f"forward pass fails .*{type(error).__name__}") for error in TROUBLES),
        *(({"loss": fails(error)}, f"loss: fails: {type(error).__name__}") for error in TROUBLES),
        ({"model": Odd(needs_two)}, "forward pass fails for inputs of shape \\(1, 1, 16, 16\\).*two please"),
        ({"model": Odd(torch.squeeze)}, "model: returns outputs of shape \\(3,\\) for 1 examples"),
        ({"model": Odd(lambda outputs: (outputs, outputs))}, "model: returns tuple, not a tensor"),
        ({"model": Odd(lambda outputs: 3)}, "model: returns int, not a tensor"),
        ({"model": Odd(fails(ValueError())), "prepare": True}, "forward pass fails"),
    ],
)
def test_models_and_losses_that_fail_are_told_before_any_attack(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        audited(**change)


@pytest.mark.parametrize(
    "error", [_OwnError("my trouble"), OSError("my trouble"), MemoryError("my trouble"), SystemExit("my trouble")]
)
def test_an_attack_that_fails_on_one_defence_fails_its_trial_alone(error: BaseException) -> None:
    @dataclass(frozen=True)
    class Mine(Inversion):
        def __call__(self, observations: Any, simulated_client: Any, knowledge: Any, key: Any, *more: Any) -> Any:
            if any((value == 0).any() for value in observations[-1].update.values()):
                raise error
            return super().__call__(observations, simulated_client, knowledge, key, *more)

    attack = Mine("mine", descent=Descent(iterations=4))
    rows = audited(attacks=(attack,), defences=("none", "prune(0.9)")).summary()
    first, second = (row["failed"] for row in rows)
    assert first is None
    assert second.startswith(f"{type(error).__name__}: my trouble (test_api.py, line ")
    assert rows[0]["target_clients"] == 2


def changes_the_update(observations: Any, simulated_client: Any, knowledge: Any) -> None:
    next(iter(observations[-1].update.values())).mul_(2)


def changes_the_parameters(observations: Any, simulated_client: Any, knowledge: Any) -> None:
    observations[-1].params["head.weight"].zero_()


def changes_the_model(observations: Any, simulated_client: Any, knowledge: Any) -> None:
    with torch.no_grad():
        simulated_client.model.get_parameter("head.weight").zero_()


def draws_where_it_likes(observations: Any, simulated_client: Any, knowledge: Any) -> None:
    torch.rand(2)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (changes_the_update, "in place: '[a-z0-9.]+' of the update of round 0 -> make new tensors"),
        (changes_the_parameters, "in place: 'head.weight' of the params"),
        (changes_the_model, "in place: 'head.weight' of the params"),
        (draws_where_it_likes, ""),
    ],
)
def test_an_attack_that_changes_what_others_count_on_is_told(does: Any, said: str) -> None:
    @dataclass(frozen=True)
    class Mine(Inversion):
        def __call__(self, observations: Any, simulated_client: Any, knowledge: Any, key: Any, *more: Any) -> Any:
            does(observations, simulated_client, knowledge)
            return super().__call__(observations, simulated_client, knowledge, key, *more)

    result = audited(attacks=(Mine("mine", descent=Descent(iterations=4)),), defences=("none",))
    (row,), (trial,) = result.summary(), result.trials
    if said:
        assert re.search(f"attack mine: changes what it is handed {said}", row["failed"])
    else:
        assert row["failed"] is None
        assert any("it drew from torch's global generator" in remark for remark in trial.info["remarks"])
    (honest,) = audited(attacks=(Inversion("own", descent=Descent(iterations=4)),), defences=("none",)).trials
    assert not any("global generator" in remark for remark in honest.info["remarks"])


def test_a_model_that_holds_a_lock_is_audited() -> None:
    model = network()
    model.lock = threading.Lock()
    for prepare in (False, True):
        assert [row["failed"] for row in audited(model=model, prepare=prepare).summary()] == [None]


def test_wrong_arguments_names_and_settings_are_told_together() -> None:
    with pytest.raises(GradveilError) as caught:
        audited(loss=3, client_batch=0, attacks=("idg",), defences=("nonsense",), prepare=1, device="tpu")
    wanted = {"loss", "client_batch", "attacks[0]", "defences[0]", "prepare", "device"}
    assert sorted(problem.where for problem in caught.value.problems) == sorted(wanted)
    with pytest.raises(GradveilError) as caught:
        audited(batch=(torch.rand(2, 1, 16, 16).double(), torch.tensor([0, 1])), threshold=3.0, attacks=("idg",))
    assert {problem.where for problem in caught.value.problems} == {"batch.inputs", "threshold", "attacks[0]"}


def test_classes_and_bare_transforms_are_told_what_to_make_of_them() -> None:
    class Mine(Inversion):
        name = "mine"

    with pytest.raises(GradveilError) as caught:
        audited(attacks=(Mine,), defences=(Clip, Clip(1.0)))
    assert [problem.remedy for problem in caught.value.problems] == [
        "make one of the class: Mine(...)",
        "make one of the class: Clip(...)",
        "give a defence that holds it: Defence('mine', send=chain(mine=mine))",
    ]


def test_a_class_of_any_name_can_be_audited() -> None:
    class _Net(Odd):
        pass

    assert audited(model=_Net(lambda outputs: outputs)).summary()[0]["model"] == "_Net"


@pytest.mark.parametrize(("progress", "said"), [({}, True), ({"progress": True}, True), ({"progress": False}, False)])
def test_progress_is_told_where_it_is_wanted(
    progress: dict[str, bool], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    audited(**progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("1 trial of 2 target clients" in err, "[1/1]" in err) == (said, said)
    gradveil.train(network(), examples(8), examples(8), rounds=1, clients=2, **progress)
    assert ("round 1 of 1" in capsys.readouterr().err) == said


def test_too_few_examples_for_the_best_verdict_are_told_before_the_first_trial(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for defences, told in ((["none"], False), (["prune(0.5)"], True)):
        audited(defences=defences, control=False)
        lines = capsys.readouterr().err.splitlines()
        assert [number for number, line in enumerate(lines) if "at least 8 are needed" in line] == [1] * told


def test_the_first_line_says_who_is_told_the_labels(capsys: pytest.CaptureFixture[str]) -> None:
    given, restored = "ig(iterations=1)", "ig(iterations=1, labels=restore)"
    for attacks, told in (
        ([given], "labels known:"),
        ([restored], "labels unknown:"),
        ([given, restored], "labels known to 1 of 2 attacks:"),
    ):
        audited(attacks=attacks, control=False)
        assert told in capsys.readouterr().err.splitlines()[0]


def test_a_result_is_as_wide_in_a_pipe_as_on_the_command_line() -> None:
    assert max(map(len, str(audited(defences=["dp(clip=1, sigma=1)"])).splitlines())) <= 120


def test_damaged_trials_are_made_anew_with_a_warning(tmp_path: Path) -> None:
    first = audited(out=tmp_path / "run")
    (file,) = (tmp_path / "run").glob("trials/*/records.json")
    file.write_text("[3]")
    with pytest.warns(UserWarning, match=r"Damaged, its trial is done again: .*records\.json: \[0\] is 3"):
        again = audited(out=tmp_path / "run", progress=False)
    assert again.summary()[0]["ssim_mean"] == first.summary()[0]["ssim_mean"]


def test_other_weights_are_another_run(tmp_path: Path) -> None:
    audited(out=tmp_path / "run")
    assert len(audited(out=tmp_path / "run").trials) == 1
    other = network()
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    with pytest.raises(GradveilError, match="weights_and_batch"):
        audited(model=other, out=tmp_path / "run")


def test_temporary_results_vanish_with_the_result() -> None:
    result = audited()
    path = result.path
    assert path.is_dir()
    del result
    gc.collect()
    assert not path.exists()


def test_plot_passes_its_choices_and_the_run_on() -> None:
    assert audited().plot("curve", metric="ssim", size="double") == ("curve", {"metric": "ssim", "size": "double"})


def linear_audit(inputs: Tensor) -> Result:
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 10))
    return audited(
        model=net, batch=(inputs, torch.arange(len(inputs))), attacks=["analytic"], defences=["none", "clip(1)"]
    )


def test_exact_copies_leak_without_public_images_even_if_each_class_has_one_image() -> None:
    result = linear_audit(load("patches").private.views[:8])
    assert {verdict.defence: verdict.level for verdict in result.verdicts} == {"none": "broken", "clip(1)": "broken"}
    assert repr(result.verdicts[0]).endswith("'broken', 8 of 8 identifiable)")
    assert result.recommendation is not None
    assert result.recommendation.defence is None


def test_exact_copies_of_images_that_are_alike_prove_nothing_without_public_images() -> None:
    inputs = (load("patches").private.views[:1] + 0.01 * torch.rand(8, 1, 1, 1)).clamp(0, 1)
    assert not {"broken", "leaks"} & {verdict.level for verdict in linear_audit(inputs).verdicts}
