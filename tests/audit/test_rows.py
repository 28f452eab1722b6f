"""Audits of rows: closed forms, the search of TabLeak, what is refused, and the page."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from gradveil import audit, invert, train
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import load_run
from gradveil.audit.run_file import resolve
from gradveil.cli.app import app
from gradveil.core.errors import GradveilError
from gradveil.data import load, table
from gradveil.nn import build
from tests.report.parsed_page import read

RUN = """
name = "rows"
data = { name = "census" }
model = { name = "tabular-mlp" }
attacks = ["analytic"]
"""


def settings(**changes: Any) -> dict[str, Any]:
    return {"name": "rows", "data": {"name": "census"}, "model": {"name": "tabular-mlp"}, **changes}


def audited(folder: Path, *options: str) -> tuple[str, Any]:
    (folder / "rows.toml").write_text(RUN)
    command = ["audit", str(folder / "rows.toml"), "--no-control", "--workers", "1", "--out", str(folder / "run")]
    result = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output, load_run(folder / "run").trials


def test_single_rows_come_back_exactly_in_closed_form(tmp_path: Path) -> None:
    output, (trial,) = audited(tmp_path, "--attack", "analytic", "--set", "client.batch=1", "--target-clients", "8")
    scores = [each for record in trial.records for each in record["per_image"]]
    assert all(each["exact"] for each in scores)
    assert {"cells", "numbers", "categories"} <= set(scores[0])
    assert trial.info["update"] == "one gradient of 1 row"
    assert trial.info["threshold"] == 0.9
    assert "8/8" in output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "8 of 8 rows exact" in page
    assert "class_of_worker" in page
    first, below = read(page).text.split("Basis:", 1)
    truth = first[first.index("struck through") : first.index("No defence analytic")].split()
    assert "class_of_worker" in first
    assert truth[2] in first[first.index("No defence analytic") :]
    assert "and 12 more columns: see Rows" in first
    assert "The rows are private data" in below


def test_adaptive_attacks_rows_of_batches_by_a_search_and_a_closed_form(tmp_path: Path) -> None:
    short = ("--iterations", "150", "--set", "restarts=2", "--target-clients", "1", "--set", "client.batch=4")
    _, trials = audited(tmp_path, "--attack", "adaptive", *short)
    cells = {trial.info["preset"]: trial.records[0]["cells"] for trial in trials}
    assert set(cells) == {"unmix", "tableak"}
    assert cells["tableak"] > 0.8
    assert cells["unmix"] == 1
    info = next(trial.info for trial in trials if trial.info["preset"] == "tableak")
    assert info["surest"]["cells"] == 4 * 18 // 4
    assert info["surest"]["right"] >= cells["tableak"]
    assert all(0 <= column["certainty"] <= 1 for column in info["columns"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Certainty" in page


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"attacks": ["ig"]}, "pictures"),
        ({"attacks": ["analytic"], "defences": ["instahide"]}, "pictures"),
        ({"attacks": ["analytic"], "model": {"name": "lenet-zhu"}}, "channels"),
        ({"attacks": ["tableak"], "data": {"name": "faces"}, "model": {"name": "scheliga-cnn"}}, "columns"),
    ],
)
def test_what_needs_another_kind_of_examples_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(GradveilError, match=where):
        open_experiment(resolve(settings(target_clients=2, **changes)))


def test_a_table_from_python_is_audited_like_one_from_a_file() -> None:
    columns = {"age": [20.5 + i for i in range(80)], "sex": ["f", "m"] * 40, "ill": [0, 1] * 40}
    rows = table(columns, label="ill")
    model = build(
        "tabular-mlp",
        classes=2,
        generator=torch.Generator().manual_seed(0),
        example=rows.public.space.model_facts(),
    )
    result = audit(model, rows.private, attacks=["adaptive"], public=rows.public, target_clients=4, iterations=20)
    assert result.verdicts[0].identifiable == 4
    assert result.verdicts[0].best.words.noun == "row"


def vectors(count: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 10, generator=generator) * torch.arange(1, 11)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / 5)
    return inputs, torch.arange(count) % 2, model


@pytest.mark.parametrize("form", ["tensors", "arrays", "frame"])
def test_vectors_are_audited_as_rows(form: str) -> None:
    inputs, labels, model = vectors()
    columns = [f"c{place}" for place in range(10)]
    given = {
        "tensors": (inputs, labels),
        "arrays": (inputs.double().numpy(), labels.numpy()),
        "frame": (pd.DataFrame(inputs.numpy(), columns=pd.Index(columns)), labels),
    }[form]
    result = audit(model, given, attacks=["analytic"], defences=["none", "dp(clip=1, sigma=1)"], target_clients=8)
    levels = {verdict.defence: (verdict.level, verdict.identifiable) for verdict in result.verdicts}
    assert levels["none"] == ("broken", 8)
    assert levels["dp(clip=1, sigma=1)"][1] == 0
    info = result.trials[0].info
    assert [each["name"] for each in info["columns"]] == (
        columns if form == "frame" else [f"x{place}" for place in range(10)]
    )
    assert "bounds: the least and greatest value of each column of the batch" in info["grants"]
    assert f"{inputs[0, 0]:.4g}" in result.report().read_text()


def test_the_range_of_public_vectors_is_no_grant_and_a_search_keeps_to_it() -> None:
    inputs, labels, model = vectors()
    attacks = ["tableak(iterations=30, restarts=1)"]
    public = (inputs[4:], labels[4:])
    result = audit(model, (inputs[:4], labels[:4]), attacks=attacks, public=public, control=False)
    (trial,) = result.trials
    assert not any(str(grant).startswith("bounds:") for grant in trial.info["grants"])
    images = trial.images()
    assert images is not None
    answers = images["reconstruction"].flatten(0, -2)
    assert bool((answers <= inputs[4:].amax(0) + 1e-4).all())


def test_what_the_model_could_not_read_is_refused_with_a_remedy() -> None:
    inputs, labels, model = vectors()
    with pytest.raises(GradveilError, match=r"whole numbers.*inputs\.float\(\)"):
        audit(model, (inputs.long(), labels))
    with pytest.raises(GradveilError, match=r"neither images nor rows.*\[N, D\]"):
        audit(model, (inputs[:, None], labels))


@pytest.mark.parametrize("known", ["truth", "public", "bounds"])
def test_an_update_of_vectors_is_inverted(known: str) -> None:
    inputs, labels, model = vectors()
    loss = torch.nn.functional.cross_entropy(model(inputs[:1]), labels[:1])
    names = [name for name, _ in model.named_parameters()]
    update = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    given = {
        "truth": {"truth": inputs[:1].numpy()},
        "public": {"public": (2 * inputs[1:], labels[1:])},
        "bounds": {"shape": (10,), "bounds": (-30.0, 30.0)},
    }[known]
    found = invert(model, update, "analytic", **given)
    torch.testing.assert_close(found.images.float(), inputs[:1], rtol=1e-3, atol=1e-3)
    assert list(found.rows[0]) == [f"x{place}" for place in range(10)]
    assert (found.metrics.get("cells") == 1) == (known == "truth")


def test_vectors_are_trained_on() -> None:
    inputs, labels, model = vectors()
    result = train(model, (inputs[:30], labels[:30]), (inputs[30:], labels[30:]), rounds=1, clients=3)
    assert result.accuracy["none"] is not None


def test_an_update_of_rows_is_inverted_and_shown_by_column() -> None:
    rows = load("census")
    facts = rows.public.space.model_facts()
    model = build("tabular-mlp", classes=2, generator=torch.Generator().manual_seed(0), example=facts)
    few = rows.private.subset(range(4))
    loss = torch.nn.functional.cross_entropy(model(few.inputs), few.targets)
    names = [name for name, _ in model.named_parameters()]
    update = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    found = invert(model, update, "unmix", truth=few)
    assert found.metrics["cells"] == 1
    assert {row["age"] for row in found.rows} == {f"{age:.0f}" for age in few.views[:, 0]}
    assert "recovered, 100% of the cells right" in str(found)
    assert found.rows[0]["education"] in (found._repr_html_() or "")
    blind = invert(model, update, "tableak(iterations=2, restarts=1)", public=rows.public, labels=few.targets)
    assert len(blind.rows) == 4


@pytest.mark.parametrize("truth", [("--record-truth",), ()])
def test_recorded_updates_of_rows_are_attacked(tmp_path: Path, truth: tuple[str, ...]) -> None:
    seen, out = str(tmp_path / "seen"), str(tmp_path / "run")
    train = ["train", "census", "--rounds", "1", "--defence", "none", "--set", "local=", "--set", "batch=4"]
    record = ["--record", seen, "--record-client", "3", *truth, "--out", str(tmp_path / "training")]
    assert CliRunner().invoke(app, [*train, *record], catch_exceptions=False).exit_code == 0
    attack = ["audit", "census", "--observed", seen, "--attack", "unmix", "--defence", "none", "--no-control"]
    more = ["--set", "client.batch=4", "--workers", "1", "--out", out]
    assert CliRunner().invoke(app, [*attack, *more], catch_exceptions=False).exit_code == 0
    (trial,) = load_run(Path(out)).trials
    scores = [each.get("cells") for each in trial.records[0].get("per_image", ())]
    assert scores == ([1.0] * 4 if truth else [])
