"""Figures for papers: every kind is drawn from real runs, with the choices that were made, in equal bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import gradveil
from gradveil.audit.audit_config import RunConfig
from gradveil.cli.app import run as command
from gradveil.core.errors import GradveilError
from gradveil.report.choices import Choices
from gradveil.report.figures import draw_figure
from tests.audit.runs import config, execute
from tests.report.runs import failed_trial, played, trained, write_run

AUDITED = ("grid", "pareto", "curve", "layers")
DP = "dp(clip=1, sigma=2)"


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two target clients, three defences, two attacks."""
    folder = tmp_path_factory.mktemp("figures") / "audit"
    attacks = ["ig(iterations=8)", "cdia(iterations=8)"]
    execute(config(defences=["none", "gaussian(0.01)", DP], attacks=attacks), folder)
    return folder


def texts(figure: Any) -> list[str]:
    """Every text of a figure: titles, axes, labels, legend."""
    from matplotlib.text import Text

    return [artist.get_text() for artist in figure.findobj(Text) if artist.get_text()]


def problems(*runs: Path, **choices: Any) -> dict[str, str]:
    with pytest.raises(GradveilError) as caught:
        draw_figure(runs, **choices)
    return {problem.where: problem.what for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("kind", "format"),
    [(kind, "svg") for kind in AUDITED] + [(kind, format) for kind in ("grid", "curve") for format in ("pdf", "png")],
)
def test_equal_runs_give_equal_bytes(audit: Path, tmp_path: Path, kind: str, format: str) -> None:
    one, two = tmp_path / f"one.{format}", tmp_path / f"two.{format}"
    for file in (one, two):
        draw_figure([audit], kind, out=file, dpi=60)
    assert one.read_bytes() == two.read_bytes()
    start = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}[format]
    assert one.read_bytes().startswith(start)
    if format == "pdf":
        assert b"/FontFile2" in one.read_bytes(), "text is embedded as Type 42, not as pictures"
        assert b"CreationDate" not in one.read_bytes()


def test_figure_keeps_the_width_of_a_column_and_pyplot_out(audit: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules  # another test of the process may have imported it
    for kind in AUDITED[1:]:
        assert draw_figure([audit], kind, size="single").get_figwidth() == 3.4
        assert tuple(draw_figure([audit], kind, size="5x2").get_size_inches()) == (5.0, 2.0)
    assert draw_figure([audit], "grid").get_figwidth() <= 3.4
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize("kind", AUDITED)
def test_labels_order_and_selection_apply(audit: Path, kind: str) -> None:
    chosen = draw_figure([audit], kind, labels={"dp": "DP-SGD", "gaussian": "Noise"}, order=[DP, "gaussian"])
    shown = texts(chosen)
    assert shown.index("DP-SGD") < shown.index("Noise")
    if kind != "layers":  # without a defence there is no noise
        assert shown.index("Noise") < shown.index("No defence")
    one = texts(draw_figure([audit], kind, defences=[DP]))
    assert "No defence" not in one
    assert any(text.startswith("dp(") for text in one)


def test_axes_are_named_by_metric_or_by_header(audit: Path) -> None:
    shown = texts(draw_figure([audit], "pareto", metric="recovered", against="distance", title="Leak"))
    assert {"Recovered images (%)", "Update distortion", "Leak"} <= {*shown}
    shown = texts(draw_figure([audit], "curve", against="seconds", headers={"y": "Quality"}))
    assert {"Seconds per target client", "Quality"} <= {*shown}
    assert "Noise / update" in texts(draw_figure([audit], "layers", metric="ratio", against="parameter"))


def test_grid_shows_chosen_targets_with_their_scores(audit: Path) -> None:
    def pictures(**choices: Any) -> tuple[int, list[str]]:
        figure = draw_figure([audit], "grid", **choices)
        return len(figure.axes[0].images), texts(figure)

    assert pictures()[0] == 2 * 4, "the ground truth and three defences"
    assert pictures(targets=[1], attacks=["ig", "cdia"])[0] == 1 + 6
    assert pictures()[1].count("SSIM") == 3
    assert "−0.00" not in pictures()[1]
    assert pictures(metric="none")[1] == ["Ground truth", "No defence", "gaussian(0.01)", "dp(clip=1, sigma=2)"]
    assert "recovered and identified" in pictures(metric="outcome")[1]
    assert "Original" in pictures(headers={"truth": "Original"})[1]


def test_noise_per_layer_is_what_the_defence_adds(audit: Path) -> None:
    (axes,) = draw_figure([audit], "layers", defences=["gaussian"]).axes
    noise, update = axes.lines
    assert noise.get_ydata() == pytest.approx([0.01] * len(noise.get_ydata()), rel=0.2)
    assert min(update.get_ydata()) > 0
    (axes,) = draw_figure([audit], "layers", defences=["dp"]).axes
    assert axes.lines[0].get_ydata() == pytest.approx([2.0] * len(noise.get_ydata()), rel=0.2)


def test_pareto_joins_an_audit_with_a_training(audit: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = problems(audit, runs[0], kind="pareto")
    assert "data.name is 'digits', and 'faces' in the audit" in wrong[str(runs[0])]
    settings = {"data": {"name": "digits", "size": 16}, "defences": ["none", DP], "attacks": ["ig(iterations=2)"]}
    execute(config(**settings), tmp_path / "audit")
    shown = texts(draw_figure([tmp_path / "audit", runs[0]], "pareto"))
    assert "Test accuracy (%)" in shown
    assert "hollow: may leak more" in shown
    drawn = draw_figure([tmp_path / "audit", runs[0]], "pareto")
    fills = [handle.get_markerfacecolor() for handle in drawn.legends[0].legend_handles]
    assert fills == ["white"] * 3, "two points, and the line that explains them"
    assert "Bytes sent per round" in texts(draw_figure([tmp_path / "audit", runs[0]], "pareto", against="bytes"))


def test_pareto_rejects_a_training_on_data_of_another_size(runs: tuple[Path, Path], tmp_path: Path) -> None:
    settings = {"data": {"name": "digits", "size": 20}, "defences": ["none", DP], "attacks": ["ig(iterations=2)"]}
    execute(config(**settings), tmp_path / "audit")
    wrong = problems(tmp_path / "audit", runs[0], kind="pareto")
    assert "data.size is 16, and 20 in the audit" in wrong[str(runs[0])]


def test_pareto_of_an_audit_with_training_takes_the_worst_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trained(played(target_clients=4, seeds=(0, 1))), images=False)
    (axes,) = draw_figure([folder], "pareto").axes
    assert axes.get_xlabel() == "Test accuracy (%)"
    assert len(axes.containers) == 7, "a point for each defence, not one for each round"


def test_trainings_have_curves_only(runs: tuple[Path, Path]) -> None:
    assert {"Test accuracy (%)", "Round"} <= {*texts(draw_figure([*runs], "curve"))}
    assert "Bytes sent by all clients" in texts(draw_figure([runs[0]], "curve", against="bytes"))
    for kind in ("grid", "layers"):
        assert "these are trainings" in problems(runs[0], kind=kind)["kind"]


def test_everything_wrong_is_raised_at_once(audit: Path, tmp_path: Path) -> None:
    wrong = problems(
        *[audit],
        **{"kind": "curve", "metric": "psnr", "against": "rounds", "defences": ["dgp"], "labels": {"idlg": "iDLG"}},
        **{"size": "wide", "font": "mono", "dpi": 0, "seeds": [9], "targets": [0], "headers": {"z": "Z"}},
        **{"out": tmp_path / "figure.jpg"},
    )
    keys = {"metric", "against", "defence", "label", "size", "font", "dpi", "seed", "targets", "header", "out"}
    assert wrong.keys() == keys


@pytest.mark.parametrize(
    ("choices", "where"),
    [
        ({"kind": "bars"}, "kind"),
        ({"kind": "pareto", "against": "accuracy"}, "against"),
        ({"kind": "grid", "targets": [7]}, "targets"),
        ({"kind": "grid", "metric": "lpips"}, "metric"),
        ({"kind": "layers", "defences": ["none"]}, "layers"),
        ({"kind": "grid", "defences": ["none"], "attacks": ["ig"], "seeds": [0], "out": "."}, "out"),
        ({"kind": "grid", "out": "a.pdf", "format": "svg"}, "format"),
    ],
)
def test_wrong_choice_is_rejected_by_its_name(audit: Path, choices: dict[str, Any], where: str) -> None:
    assert [*problems(audit, **choices)] == [where]


def test_grid_without_pictures_is_rejected(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", played(target_clients=2)[:2], images=False)
    assert "kept none" in problems(folder, kind="grid")["grid"]


def test_figures_of_rows_speak_of_rows_and_have_no_pictures(tmp_path: Path) -> None:
    data = {"name": "census", "public": 200, "gallery": 60}
    rows = {"data": data, "model": {"name": "tabular-mlp"}, "client": [{"batch": 2}]}
    settings = {**rows, "target_clients": 1, "attacks": ["tableak(iterations=4, restarts=2)"], "defences": ["none"]}
    execute(RunConfig(name="rows", **settings), tmp_path / "run")
    assert "Mean cells right" in texts(draw_figure([tmp_path / "run"], kind="curve"))
    assert "Identifiable rows (%)" in texts(draw_figure([tmp_path / "run"], kind="pareto", against="bytes"))
    assert problems(tmp_path / "run", kind="grid") == {"grid": "shows pictures, and these runs attack rows"}


def test_selection_without_a_trial_is_rejected(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [failed_trial("out of memory")])
    assert [*problems(folder, kind="curve")] == ["selection"]


def test_missing_extra_names_the_command(audit: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(["figure", str(audit)]) == 2
    assert 'pip install "gradveil[plot]"' in capsys.readouterr().err


def test_command_writes_the_file(audit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "faces.svg"
    words = [
        "--kind",
        "grid",
        "--targets",
        "0-1",
        "--label",
        f"{DP}=DP, $\\sigma=2$",
        "--order",
        "dp",
        "--out",
        str(out),
    ]
    assert command(["figure", str(audit), *words]) == 0
    assert capsys.readouterr().out == f"Figure: {out}\n"
    assert out.stat().st_mode & 0o077 == 0, "it shows private images"
    assert command(["figure", str(audit), "--targets", "x", "--label", "dgp", "--header", "=", "--size", "0"]) == 2
    told = capsys.readouterr().err
    assert [key for key in ("targets", "label", "header", "size") if f"\n  {key}: " not in told] == []


def test_result_plots_into_own_axes_and_in_a_notebook(tmp_path: Path) -> None:
    import torch
    from matplotlib.figure import Figure

    from gradveil.nn.models import build

    model = build("lenet-zhu", channels=1, size=16, classes=4, generator=torch.Generator().manual_seed(0))
    batch = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    result = gradveil.audit(model, batch, attacks=["ig(iterations=4)"], bounds="unit", progress=False)
    own = Figure()
    left, right = own.subplots(1, 2)
    assert result.plot("curve", ax=left) is own
    assert result.plot("grid", ax=right) is own
    assert left.get_ylabel() == "Mean SSIM"
    assert len(right.images) == 4
    assert vars(result.plot(out=tmp_path / "grid.pdf", dpi=50))["_repr_png_"]().startswith(b"\x89PNG")
    assert (tmp_path / "grid.pdf").is_file()


def test_names_mean_texts_with_or_without_settings() -> None:
    choices = Choices(defences=["dp"], order=["b", "dp(clip=1)"], labels={"dp": "DP", "dp(clip=2)": "Two"})
    assert [choices.label(text) for text in ("dp(clip=1)", "dp(clip=2)", "dgp")] == ["DP", "Two", "dgp"]
    assert choices.sort(["a", "dp(clip=1)", "b"]) == ["b", "dp(clip=1)", "a"]
    assert [choices.shows_defence(text) for text in ("dp(clip=1)", "dgp", "dp + cvb")] == [True, False, False]
