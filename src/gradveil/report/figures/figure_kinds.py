"""The kinds of figures: the metrics that each can show, and what they are shown against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradveil.report.pareto import AXES


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure; the first metric and the first `against` are its defaults."""

    title: str
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """The metrics of an audit with their axis titles."""
    against: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the horizontal axis of an audit can show."""
    training_metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same of a training; a kind without any draws audits only."""
    training_against: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: tuple[str, ...] = ("x", "y")
    """The texts that can be replaced."""


RATES = {
    "identifiable": "Identifiable images (%)",
    "recovered": "Recovered images (%)",
    "identified": "Identified images (%)",
}
"""Shares of images, with 95% intervals."""
COSTS = {
    "accuracy": "Test accuracy (%)",
    "bytes": "Bytes sent",
    "seconds": "Seconds per client and round",
    "distance": "Update distortion",
    "utility": "First-order utility (%)",
}
"""Costs of a defence: those of a training, then those that every audit has."""
MORE_IS_BETTER = {axis.key for axis in AXES if axis.more_is_better} | {"utility"}
"""Costs of which more is better."""

KINDS: Mapping[str, FigureKind] = {
    "grid": FigureKind(
        "Ground truth on top, reconstructions below",
        {"ssim": "SSIM", "psnr": "PSNR", "mse": "MSE", "lpips": "LPIPS", "outcome": "outcome", "none": ""},
        headers=("truth",),
    ),
    "pareto": FigureKind("Leak against a cost", {**RATES, "ssim": "Mean SSIM"}, COSTS),
    "curve": FigureKind(
        "Quality against budget, or accuracy over rounds",
        {"ssim": "Mean SSIM", "recovered": RATES["recovered"]},
        {"iterations": "Iterations", "seconds": "Seconds per target client"},
        {"accuracy": "Test accuracy (%)", "loss": "Validation loss"},
        {"rounds": "Round", "bytes": "Bytes sent by all clients"},
    ),
    "layers": FigureKind(
        "Noise of a defence in each layer",
        {"noise": "Noise (root mean square)", "ratio": "Noise / update"},
        {"layer": "Layer", "parameter": "Parameter"},
    ),
}
"""Every kind of figure."""
FORMATS = ("pdf", "svg", "png")
"""File formats."""
WIDTHS = {"single": 3.4, "double": 7.0}
"""Widths of a column and of a page in inches."""
FONTS = ("sans", "serif")
"""Font families."""
