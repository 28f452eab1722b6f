"""Metrics: pure functions that compare reconstructions with ground truths."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gradveil.core.errors import FOREIGN, fail
from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.user_code import imported
from gradveil.metrics import image_similarity, label_scores, update_cost
from gradveil.metrics.image_similarity import (
    Missing,
    identification,
    lpips,
    mse,
    mse_adadefense,
    psnr,
    psnr_adadefense,
    rank,
    ssim,
    ssim_adadefense,
    ssim_pairs,
    ssim_rescaled,
    ssim_rescaled_padded,
    ssim_torchmetrics,
)
from gradveil.metrics.label_scores import label_accuracy, matched_label_accuracy
from gradveil.metrics.matching import match_batch, pairwise_mse, permute
from gradveil.metrics.statistics import Rate, Risk, asr, risk, wilson
from gradveil.metrics.update_cost import cosine, dense_bytes, relative_distance


class Metric(NamedTuple):
    """One entry of the table of metrics."""

    function: Callable[..., Any]
    description: str
    higher_is_better: bool
    """True if a higher score means a better reconstruction (for `updates`: a better preserved update)."""
    of: Literal["images", "labels", "gallery", "updates"]
    """The arguments: (candidate, truth) for images and labels, (candidate, index, gallery) for the gallery."""
    legacy: bool = False
    """A published program's variant, not comparable with the standard metric."""


METRICS: dict[str, Metric] = {
    "mse": Metric(image_similarity.mse, "mean squared error of pixels in [0, 1]", False, "images"),
    "psnr": Metric(image_similarity.psnr, "peak signal-to-noise ratio in dB, range 1, at most 100", True, "images"),
    "ssim": Metric(
        image_similarity.ssim, "structural similarity, Gaussian window, scikit-image's reading", True, "images"
    ),
    "lpips": Metric(lpips, "learned perceptual distance (AlexNet or VGG), where weights are at hand", False, "images"),
    "label_accuracy": Metric(
        label_scores.label_accuracy, "share of a batch's labels recovered, in any order", True, "labels"
    ),
    "matched_label_accuracy": Metric(
        label_scores.matched_label_accuracy, "whether each matched image has its own label", True, "labels"
    ),
    "identification": Metric(
        identification, "nearest image of the client's data set is the target client", True, "gallery"
    ),
    "relative_distance": Metric(
        update_cost.relative_distance,
        "l2 distance of the sent to the raw update, relative to the raw",
        False,
        "updates",
    ),
    "cosine": Metric(update_cost.cosine, "cosine of the sent and the raw update", True, "updates"),
    "ssim_torchmetrics": Metric(
        image_similarity.ssim_torchmetrics, "SSIM with padded borders", True, "images", legacy=True
    ),
    "ssim_rescaled": Metric(
        image_similarity.ssim_rescaled, "SSIM after each image is stretched to [0, 1]", True, "images", legacy=True
    ),
    "ssim_rescaled_padded": Metric(
        image_similarity.ssim_rescaled_padded, "the same with padded borders", True, "images", legacy=True
    ),
    "ssim_adadefense": Metric(
        image_similarity.ssim_adadefense, "SSIM with a uniform window of 7 pixels", True, "images", legacy=True
    ),
    "mse_adadefense": Metric(
        image_similarity.mse_adadefense, "root mean squared error on 0 to 255", False, "images", legacy=True
    ),
    "psnr_adadefense": Metric(
        image_similarity.psnr_adadefense, "10 log10(255^2 / RMSE) on 0 to 255", True, "images", legacy=True
    ),
}
"""Every metric by name. Legacy ones are named after the program whose numbers they reproduce."""


def _plugged(plugin: Plugin) -> Metric:
    """Return the entry of a plug-in's metric."""
    return _entry(plugin.path)


def _entry(path: str) -> Metric:
    """Return the entry of a custom metric: a `Metric`, or a function of (candidate, truth)."""
    target = imported(path, f"metric {path}")
    if isinstance(target, Metric):
        return target
    if not callable(target):
        problem, remedy = f"is a {type(target).__name__}", "name a function (candidate, truth) -> scores, or a Metric"
        raise fail(f"metric {path}", problem, remedy)
    return Metric(target, (inspect.getdoc(target) or path).splitlines()[0], True, "images")


ALL_METRICS: Catalogue[Metric] = Catalogue("metrics", "metric", METRICS, _plugged)
"""`METRICS` and those of plug-ins."""


def metric(name: str) -> Metric:
    """Return a metric of reconstructions: from `METRICS`, of a plug-in, or custom (`pkg.module:name`)."""
    if ":" in name:
        return _entry(name)
    names = [known for known in ALL_METRICS if known not in METRICS or METRICS[known].of == "images"]
    if name not in names:
        near = get_close_matches(name, names, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"choose from: {', '.join(names)}; or pkg.module:function"
        raise fail(f"metric {name}", "is no metric of reconstructions", remedy)
    return ALL_METRICS[name]


def scored(name: str, candidate: Tensor, truth: Tensor) -> Tensor | str:
    """Score images [V, B, C, H, W] with a metric of this name, one score [V, B] for each; or return why there is none.

    A metric may be custom code: it gets copies, and what goes wrong in it costs its own score alone.
    """
    try:
        values: Any = metric(name).function(candidate.clone(), truth.clone())
    except FOREIGN as error:
        return f"it raised {type(error).__name__}: {error}"
    if isinstance(values, Missing):
        return values.reason
    if not isinstance(values, Tensor) or values.shape != truth.shape[:2]:
        returned = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        return f"it returned {returned}, and one score for each example is {tuple(truth.shape[:2])}"
    return values


__all__ = [
    "ALL_METRICS",
    "METRICS",
    "Metric",
    "Missing",
    "Rate",
    "Risk",
    "asr",
    "cosine",
    "dense_bytes",
    "identification",
    "label_accuracy",
    "lpips",
    "match_batch",
    "matched_label_accuracy",
    "metric",
    "mse",
    "mse_adadefense",
    "pairwise_mse",
    "permute",
    "psnr",
    "psnr_adadefense",
    "rank",
    "relative_distance",
    "risk",
    "scored",
    "ssim",
    "ssim_adadefense",
    "ssim_pairs",
    "ssim_rescaled",
    "ssim_rescaled_padded",
    "ssim_torchmetrics",
    "wilson",
]
