"""Draw how many images come back against the strength of defences, from the recorded measurements.

    python -m benchmarks.strength_curves [--folder docs/images]

`chain-defences.svg` shows `r-gap(simulated_client=full)` on three networks (`defended-layers.csv`),
`defence-strengths.svg` the best attack that knows the defence behind ten of them (`weakest-settings.csv`, and single
images of CIFAR-10 from `every-defence.csv`), `unmixed-noise.svg` whole batches of an MLP behind normal noise
(`unmixed-noise.csv`). Bars are intervals of 95%.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradveil.metrics.statistics import wilson
from gradveil.report.figures.figure_style import colour, encoded, marker, new_figure, styled

RESULTS = Path(__file__).parent / "results"
FONT = "sans"
Point = tuple[float, int, int]
"""Strength, images recovered, images attacked."""
MODELS = {"scheliga-cnn": "small CNN", "lenet-zhu": "LeNet", "cnn6": "CNN6"}
CHAINS = {
    "noise of dp(clip=20), sigma": r"dp\(clip=20, sigma=(.+)\)",
    "share sent by prune": r"prune\(ratio=(.+)\)",
    "largest entries cut by dgp": r"dgp\(top=(.+), bottom=.+\)",
}
STRENGTHS = {
    "gaussian, deviation": r"gaussian\((.+)\)",
    "laplace, scale": r"laplace\((.+)\)",
    "dp(clip=20), sigma": r"dp\(clip=20, sigma=(.+)\)",
    "user-dp(clip=1), sigma": r"user-dp\(clip=1, sigma=(.+)\)",
    "optimal-noise, deviation": r"optimal-noise\((.+)\)",
    "local-dp(clip=1, sensitivity=2), epsilon": r"local-dp\(clip=1, sensitivity=2, epsilon=(.+)\)",
    "share sent by prune": r"prune\((.+)\)",
    "share sent by minmax": r"minmax\((.+)\)",
    "share sent by dgp": r"dgp\(top=(.+), bottom=(.+)\)",
    "share sent by percentile": r"percentile\(percentile=(.+), gamma=1\)",
}


def recorded(name: str) -> list[dict[str, str]]:
    """Read the lines of a file of measurements."""
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def strength(title: str, numbers: Sequence[float]) -> float:
    """Return the place on an axis: the number itself, or the share of entries that is sent.

    >>> strength("share sent by dgp", [0.2, 0.6]), strength("share sent by percentile", [90])
    (0.2, 0.1)
    """
    if not title.startswith("share"):
        return numbers[0]
    return round(1 - sum(numbers) / (100 if "percentile" in title else 1), 6)


def found(title: str, pattern: str, counts: Mapping[str, tuple[int, int]]) -> list[Point]:
    """Return the points of the defences that a pattern fits, by strength."""
    fits = ((re.fullmatch(pattern, defence), count) for defence, count in counts.items())
    return sorted((strength(title, [*map(float, fit.groups())]), *count) for fit, count in fits if fit)


def best_known() -> dict[str, tuple[int, int]]:
    """Count what the best attack that knows the defence recovers, of one image an update."""
    counts: dict[str, tuple[int, int]] = {}
    for line in [*recorded("every-defence.csv"), *recorded("weakest-settings.csv")]:
        alone = line["images"] == line["target_clients"]
        told = line["attacker"] != "naive" and line["model"] == "scheliga-cnn" and line["data"] == "cifar10"
        if alone and told and line["asr"]:
            images = int(line["images"])
            counts[line["defence"]] = max(counts.get(line["defence"], (0, images)), (int(line["recovered"]), images))
    return counts


def chains(title: str) -> dict[str, list[Point]]:
    """Return a curve for each network and data set."""
    curves: dict[str, dict[str, tuple[int, int]]] = {}
    for line in recorded("defended-layers.csv"):
        data = "MNIST" if line["data"] == "mnist" else "CIFAR-10"
        count = int(line["recovered"]), int(line["images"])
        curves.setdefault(f"{MODELS[line['model']]}, {data}", {})[line["defence"]] = count
    return {name: found(title, CHAINS[title], counts) for name, counts in sorted(curves.items())}


def unmixed(inputs: str) -> dict[str, list[Point]]:
    """Return a curve for each size of a batch: what is recovered, by the noise."""
    curves: dict[int, list[Point]] = {}
    for line in recorded("unmixed-noise.csv"):
        if line["inputs"] == inputs:
            point = float(line["noise"]), int(line["recovered"]), int(line["images"])
            curves.setdefault(int(line["batch"]), []).append(point)
    return {f"batch of {batch}": sorted(points) for batch, points in sorted(curves.items())}


def drawn(panels: Mapping[str, Mapping[str, Sequence[Point]]], columns: int) -> bytes:
    """Draw a panel for each title, of curves by their names, as SVG."""
    rows = -(-len(panels) // columns)
    with styled(FONT):
        figure = new_figure(3.2 * columns, 2.5 * rows + 0.3, 100, FONT)
        axes: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axis, (title, curves) in zip(axes.flat, panels.items(), strict=True):
            places = sorted({place for points in curves.values() for place, *_ in points})
            for number, (name, points) in enumerate(curves.items()):
                rates = [100 * count / images for _, count, images in points]
                ends = [[100 * end for end in wilson(count, images)] for _, count, images in points]
                bars = [[max(0, rate - low) for rate, (low, _) in zip(rates, ends, strict=True)]]
                bars += [[max(0, high - rate) for rate, (_, high) in zip(rates, ends, strict=True)]]
                style = {"color": colour(number), "marker": marker(number), "label": name}
                axis.errorbar([place for place, *_ in points], rates, bars, elinewidth=0.7, **style)
            # Zero has no logarithm: around it the axis is linear.
            axis.set_xscale("symlog", linthresh=min(place for place in places if place))
            axis.set_xticks(places, [f"{place:g}" for place in places], rotation=45 if len(places) > 5 else 0)
            axis.minorticks_off()
            axis.set(xlabel=title, ylim=(-4, 104))
        for axis in axes[:, 0]:
            axis.set_ylabel("images recovered, %")
        if len(next(iter(panels.values()))) > 1:
            handles, names = axes.flat[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=6)
    return encoded(figure, "svg", 100, FONT)


def figures() -> dict[str, bytes]:
    """Draw the figures by the names of their files."""
    counts = best_known()
    return {
        "chain-defences.svg": drawn({title: chains(title) for title in CHAINS}, 3),
        "defence-strengths.svg": drawn(
            {title: {"best": found(title, pattern, counts)} for title, pattern in STRENGTHS.items()}, 5
        ),
        "unmixed-noise.svg": drawn(
            {f"noise, inputs {inputs}": unmixed(inputs) for inputs in ("normalised", "[0, 1]")}, 2
        ),
    }


def main() -> None:
    """Draw the recorded measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().folder
    for name, content in figures().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
