"""The tables of searches' quality, over seconds and with a denoiser, hold the recorded numbers."""

import csv
from pathlib import Path
from typing import Any

from benchmarks import strength_curves

HERE = Path(__file__).parents[2]


def recorded(name: str) -> list[dict[str, str]]:
    with (HERE / "benchmarks/results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows(page: str, start: str) -> list[list[str]]:
    lines = (HERE / "docs" / page).read_text("utf-8").partition(start)[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_table_of_seconds_to_a_quality_holds_the_runs() -> None:
    head, *lines = rows("performance.md", "## Time to a quality")
    searches = [run for run in recorded("time-to-quality.csv") if run["iterations"] != "0"]
    names = {"portfolio": "`portfolio`", "invertinggradients": "`breaching`, inverting gradients"}
    names["modern"] = "`breaching`, `modern`"
    for run in searches:
        clients, batch = run["target_clients"], run["batch"]
        who = clients if batch == "1" else f"{clients} with {batch} images each"
        (line,) = [line for line in lines if line[:2] == [names[run["contender"].split()[1]], who]]
        seconds = float(run["seconds"]) / int(clients)
        assert line[head.index(run["iterations"])] == f"{float(run['ssim']):.2f} ({seconds:.2f} s)"
    assert sum(bool(cell) for line in lines for cell in line[2:]) == len(searches)


def test_table_of_the_denoiser_holds_the_runs() -> None:
    head, *lines = rows("results.md", "### A denoiser as a prior")
    runs = recorded("denoiser-prior.csv")
    for run in runs:
        weights = [f"{name}={float(run[name]):g}" for name in ("tv", "denoise") if float(run[name])]
        (line,) = [line for line in lines if line[0] == f"`{run['defence']}`"]
        assert line[head.index(", ".join(weights))] == f"{float(run['ssim']):.2f}"
    assert 5 * len(lines) == len(runs)


def test_table_of_searches_holds_the_runs(hook: Any) -> None:
    head, _, *lines = [line.strip("| ").split(" | ") for line in hook.search_ablation().splitlines()]
    runs = recorded("search-ablation.csv")
    for run in runs:
        search = [f"`{run['model']}`", run["data"], run["iterations"], run["variant"]]
        (line,) = [line for line in lines if line[:4] == search]
        assert line[head.index(f"`{run['defence']}`")].strip() == f"{float(run['ssim']):.2f}"


def test_page_of_every_defence_shows_the_best_recorded_attack(hook: Any) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in hook.every_defence().splitlines()[2:]]
    runs = recorded("every-defence.csv")
    settings = [
        (f"`{run['defence']}`", f"`{run['model']}`", run["data"], str(int(run["images"]) // int(run["target_clients"])))
        for run in runs
    ]
    assert len(lines) == len(set(settings))
    for *setting, _, _, adaptive, best in lines:
        own = [run for run, its in zip(runs, settings, strict=True) if its == tuple(setting) and run["asr"]]
        known = [float(run["asr"]) for run in own if not run["attack"].startswith("ig-scheliga")]
        if not known:
            assert (adaptive, best) == ("not run", "")
            continue
        assert adaptive.startswith(f"{100 * max(known):.0f}% ")
        assert best.strip("`") in {run["attack"] for run in own}


def test_adaptive_finds_no_less_than_it_did_on_2026_11_24(hook: Any) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in hook.every_defence().splitlines()[2:]]
    rates = [[int(cell.partition("%")[0]) for cell in line[5:7]] for line in lines if line[5] != "not run"]
    assert all(now >= then for then, now in rates)
    assert sum(now > then for then, now in rates if then < 50) * 2 >= sum(then < 50 for then, _ in rates)


def test_page_of_weakest_settings_shows_the_best_recorded_attack(hook: Any) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in hook.weakest_settings().splitlines()[2:]]
    runs = recorded("weakest-settings.csv")
    assert {line[0] for line in lines} == {f"`{run['defence']}`" for run in runs}
    for defence, best, by in lines:
        own = [run for run in runs if f"`{run['defence']}`" == defence and run["asr"]]
        assert best.startswith(f"{100 * max(float(run['asr']) for run in own):.0f}% ")
        assert by.strip("`") in {run["attack"] for run in own}


def test_curves_hold_the_recorded_counts() -> None:
    counts = strength_curves.best_known()
    curves = {title: strength_curves.found(title, fit, counts) for title, fit in strength_curves.STRENGTHS.items()}
    assert len(curves) == 10
    assert all(len(points) >= 2 for points in curves.values())
    shown = sum(len(points) for points in curves.values())
    assert {run["defence"] for run in recorded("weakest-settings.csv")} <= {*counts}
    assert shown >= len({run["defence"] for run in recorded("weakest-settings.csv")})
    chains = [curve for title in strength_curves.CHAINS for curve in strength_curves.chains(title).values()]
    simple = [run for run in recorded("defended-layers.csv") if " + " not in run["defence"]]
    simple = [run for run in simple if not run["defence"].startswith("quantise")]
    assert sorted((count, images) for curve in chains for _, count, images in curve) == sorted(
        (int(run["recovered"]), int(run["images"])) for run in simple
    )
