"""A paper's table from runs: pooled over seeds, inconclusive values marked, different settings never mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradveil.audit.run_directory import Run, Trial, load_run
from gradveil.cli.app import run as command
from gradveil.core.errors import GradveilError
from gradveil.metrics import wilson
from gradveil.report.choices import TableChoices
from gradveil.report.paper_table import PaperTable, as_latex, as_markdown, matrices
from tests.audit.runs import config, execute
from tests.report.trials import recorded


def trial(defence: str, attack: str, recovered: int, of: int = 4, seed: int = 0, **more: object) -> Trial:
    info: dict[str, object] = {"model": "net", "data": "mnist", "client": "gradient", "batch": 1, "round": 0}
    info |= {
        "seed": seed,
        "defence": defence,
        "attack": attack,
        "threshold": 0.5,
        "simulated_client": "full",
        "knowledge": {},
    }
    info |= {"health": {"objective": 0.1, "objective_initial": 1.0, "objective_truth": 0.1, "diverged": 0.0}}
    info |= {
        "controls": {"mean_image": {"asr": 0.0}, "class_image": {"asr": 0.25}, "wrong_target_client": {"asr": 0.0}}
    }
    images = [{"ssim": 0.9 if i < recovered else 0.1, "success": int(i < recovered)} for i in range(of)]
    records = [{"target_client": i, "status": "budget", "per_image": [image]} for i, image in enumerate(images)]
    return Trial(recorded({**info, **more}), records)


def run(*trials: Trial, name: str = "a", weights: str | None = None, **settings: object) -> Run:
    return Run({"trials": [], "config": settings, "weights": weights}, [*trials], Path(name))


def sheets(*runs: Run) -> list[PaperTable]:
    return [table.sheet() for table in matrices(runs)]


def lines(*runs: Run) -> list[str]:
    return as_markdown(sheets(*runs)).splitlines()


def test_seeds_are_pooled_and_the_strongest_is_bold():
    both = run(
        trial("none", "ig", 4),
        trial("none", "ig", 4, seed=1),
        trial("prune(ratio=0.9)", "ig", 0),
        trial("prune(ratio=0.9)", "ig", 1, seed=1),
        trial("prune(ratio=0.9)", "cdia", 2),
        trial("prune(ratio=0.9)", "cdia", 3, seed=1),
    )
    caption, _, head, _, none, pruned, *_ = lines(both)
    assert caption.startswith("net on mnist, one gradient of 1 image: share of images identifiable (recovered, with an")
    assert "8 images over 2 seeds, each attack run counted separately, unless noted" in caption
    assert caption.endswith("Baseline: a guess that sees no update is expected to make 25% identifiable.")
    assert head == "| defence | verdict | `ig` | `cdia` |"
    low, high = wilson(8, 8)
    assert none == f"| `none` | broken | 100% ({100 * low:.1f}–100%), 0.90 ± 0.00 |  |", (low, high)
    assert "| 12.5% (" in pruned
    assert "| **62.5%** (" in pruned
    assert ", 0.60 ± 0.39 |" in pruned


def test_doubtful_attacks_are_marked_and_explained():
    short = {"objective": 0.5, "objective_initial": 1.0, "objective_truth": 0.01, "diverged": 0.0}
    informed = {"knowledge": {"send.noise": "known"}, "grants": ["send.noise: its true value"]}
    table = lines(run(trial("dp", "ig", 0, health=short), trial("dp", "wiig", 4, **informed), trial("dp", "cdia", 1)))
    row = next(line for line in table if line.startswith("| `dp`"))
    first, second, third = row.split("|")[3:6]
    assert "0%†" in first
    assert "100%‡" in second
    assert "**25%**" in third, "an informed attack is no threat"
    assert table[-1].startswith("† the attack is under-optimised or suspect")
    assert "‡ knows secrets of the client" in table[-1]


def test_malicious_server_is_marked():
    both = run(trial("dp", "rob", 4, planted="an imprint block"), trial("dp", "cdia", 1))
    assert "| **100%**§ (" in lines(both)[4]
    assert lines(both)[-1].endswith("§ a malicious server, which changes the model that it sends.")
    assert "\\textbf{100\\%}$^\\S$" in as_latex(sheets(both))


def test_failed_entry_is_named_and_missing_entry_is_empty():
    broken = trial("dp", "ig", 0)
    broken = replace(broken, info={**broken.info, "failed": "out of memory"}, records=[])
    half = replace(broken, info={**broken.info, "defence": "none"})
    table = lines(run(broken, trial("none", "cdia", 4), half, trial("none", "ig", 2, of=2, seed=1)))
    assert "| `dp` | not tested | failed |  |" in table
    none = next(line for line in table if line.startswith("| `none`"))
    assert "2 images, a seed failed" in none


def test_each_setting_has_a_table_and_runs_join_where_they_do_not_overlap():
    one, two = run(trial("none", "ig", 4)), run(trial("dp", "ig", 0), trial("dp", "ig", 0, data="cifar10"), name="b")
    assert [table.setting.data for table in matrices([one, two])] == ["mnist", "cifar10"]
    assert matrices([one, two])[0].defences == ("none", "dp")
    with pytest.raises(GradveilError, match="b: has 'ig' against 'none' with seed 0, and so has a"):
        matrices([one, run(trial("none", "ig", 3), name="b")])


def test_trials_of_other_images_or_weights_are_never_pooled():
    small, large = (
        run(trial("none", "ig", 4 * seed, seed=seed), name=str(seed), data={"name": "mnist", "size": 16 * (1 + seed)})
        for seed in (0, 1)
    )
    assert [table.caption().partition(": ")[0] for table in matrices([small, large])] == [
        "net on mnist, one gradient of 1 image (data.size = 16)",
        "net on mnist, one gradient of 1 image (data.size = 32)",
    ]
    of_file = {"name": "net", "weights": "w.safetensors"}
    one, other = (run(trial("none", "ig", 4, seed=ord(w)), name=w, weights=20 * w, model=of_file) for w in "ab")
    assert [table.caption().partition(": ")[0].partition(" (")[2] for table in matrices([one, other])] == [
        'initial weights = "aaaaaaaaaaaa")',
        'initial weights = "bbbbbbbbbbbb")',
    ]
    assert len(matrices([one, replace(other, info={**other.info, "weights": 20 * "a"})])) == 1
    here, there = (replace(one, info={**one.info, "images": {"public": 16 * w, "target_clients": w}}) for w in "ab")
    other = replace(there, trials=[*run(trial("none", "ig", 4, seed=9)).trials])
    assert [table.caption().partition(": ")[0].partition(" (")[2] for table in matrices([here, other])] == [
        'images = "aaaaaaaaaaaa/a")',
        'images = "bbbbbbbbbbbb/b")',
    ]
    tested = replace(other, info={**here.info, "images": {"public": 16 * "a", "target_clients": "b"}})
    assert len(matrices([here, tested])) == 2


def test_runs_with_different_thresholds_are_rejected():
    with pytest.raises(GradveilError, match=r"threshold: is 0.5 in a and 0.9 in b"):
        matrices([run(trial("none", "ig", 4)), run(trial("dp", "ig", 0, threshold=0.9), name="b")])


def test_latex_reads_every_character_as_itself():
    text = as_latex(sheets(run(trial('mine:half_of("a|b")', "ig", 1), trial("none", "ig", 4))))
    assert "mine:half\\_of(``a\\textbar{}b'') & inconclusive & 25\\% (4.6--69.9\\%), 0.30 $\\pm$ 0.35 \\\\" in text
    assert text.count("\\begin{") == text.count("\\end{") == 2
    assert "a\\|b" in as_markdown(sheets(run(trial('mine:half_of("a|b")', "ig", 1))))


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    execute(config(), folder)
    assert command(["summary", str(folder), "--markdown", "-", "--latex", str(tmp_path / "t.tex")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lenet-zhu on faces, one gradient of 1 image")
    assert "| `gaussian(std=0.01)` |" in out or "| `gaussian(0.01)` |" in out
    assert (tmp_path / "t.tex").read_text().startswith("% needs \\usepackage{booktabs}\n\\begin{table}")
    assert len(load_run(folder).trials) == 2
    assert command(["summary", str(folder), str(folder), "--json"]) == 0
    assert f'"run": "{folder}"' in capsys.readouterr().out


def test_choices_apply_to_the_table():
    both = run(trial("none", "ig", 4), trial("dgp(top=0.1)", "ig", 1), trial("dgp(top=0.1)", "cdia", 2))
    words: dict[str, object] = {"labels": {"dgp": r"DGP, $k=0.1$", "cdia": "CDIA"}, "order": ["dgp", "cdia"]}
    words |= {"metrics": ["recovered", "ssim", "images"], "headers": {"defence": "Method"}}
    (table,) = matrices([both], TableChoices(**words))  # pyright: ignore[reportArgumentType]
    head, _, first, second = as_markdown([table.sheet()]).splitlines()[2:6]
    assert head == "| Method | CDIA | `ig` |"
    assert first == "| DGP, $k=0.1$ | **50%** (15–85%), 0.50 ± 0.40, 4 | 25% (4.6–69.9%), 0.30 ± 0.35, 4 |"
    assert second.startswith("| `none` |  | 100%")
    assert "DGP, $k=0.1$ &" in as_latex([table.sheet()])
    assert "share of images recovered with its 95% interval, mean SSIM with" in table.caption()
    (table,) = matrices([both], TableChoices(attacks=["ig"], defences=["dgp"], headers={"caption": "One."}))
    caption, *lines = as_markdown([table.sheet()]).splitlines()
    assert lines[:2] == ["", "| defence | verdict | `ig` |"]
    assert caption.startswith("One. Recovered: an SSIM above 0.5; 4 images unless noted. Baseline: ")
    (table,) = matrices([both], TableChoices(metrics=["psnr"], headers={"caption": "One."}))
    assert table.caption() == "One. 4 images unless noted."


def test_wrong_choices_of_a_table_are_raised_at_once():
    wrong = TableChoices(labels={"dp": "DP"}, order=["soteria"], metrics=["fid"], headers={"attack": "Attack"})
    with pytest.raises(GradveilError) as caught:
        matrices([run(trial("none", "ig", 4))], wrong)
    assert {problem.where for problem in caught.value.problems} == {"label", "order", "metric", "header"}


def test_choices_without_a_table_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command(["summary", str(tmp_path), "--metric", "ssim", "--order", "none"]) == 2
    assert "--metric and --order: shape tables" in capsys.readouterr().err
