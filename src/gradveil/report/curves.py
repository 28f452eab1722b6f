"""Curves over the rounds of a training: one line a defence, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from gradveil.core.words import number, percent, size
from gradveil.report.kinds import Kind


def lines(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Describe the curves for the page's script; a defence keeps its colour where an earlier one has no curve."""
    return [
        {"series": place, "name": kind.name, "points": list(_points(kind)), "best": list(_best(kind))}
        for place, kind in enumerate(kinds)
        if any(told["curve"] for told in kind.counted)
    ]


def _points(kind: Kind) -> Iterator[dict[str, Any]]:
    """Average the seeds round by round: those that got so far; the model before the first round is round 0."""
    starts = [told["start"]["accuracy"] for told in kind.counted if told["start"]]
    if starts:
        yield {"round": 0, "sent": 0, "loss": None, "seeds": len(starts), **_band("accuracy", starts)}
    for place in range(max(len(told["curve"]) for told in kind.counted)):
        here = [told["curve"] for told in kind.counted if len(told["curve"]) > place]
        points = [curve[place] for curve in here]
        losses = [point["validation_loss"] for point in points if point["validation_loss"] is not None]
        yield {
            "round": points[0]["number"],
            "sent": fmean(list(accumulate(point["bytes_up"] for point in curve))[place] for curve in here),
            "seeds": len(points),
            **_band("accuracy", [point["accuracy"] for point in points]),
            **_band("loss", losses),
            "lines": [f"round {points[0]['number']}", *_said(points, losses)],
        }


def _band(key: str, values: Sequence[float]) -> dict[str, float | None]:
    """Give the mean of the seeds, and the lowest and highest of them."""
    if not values:
        return dict.fromkeys((key, f"{key}_low", f"{key}_high"))
    return {key: fmean(values), f"{key}_low": min(values), f"{key}_high": max(values)}


def _said(points: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Iterator[str]:
    shares = [point["accuracy"] for point in points]
    several = f" ({percent(min(shares))} to {percent(max(shares))} of {len(shares)} seeds)" if len(shares) > 1 else ""
    yield f"accuracy {percent(fmean(shares))}{several}"
    if losses:
        yield f"validation loss {number(fmean(losses))}"
    up, down = (fmean(point[key] for point in points) for key in ("bytes_up", "bytes_down"))
    yield f"{size(up)} sent, {size(down)} received, {fmean(point['seconds'] for point in points):.1f} s"


def _best(kind: Kind) -> Iterator[dict[str, Any]]:
    """Mark the round whose parameters each seed ends with."""
    for told in kind.counted:
        if told["best_round"]:
            point = told["curve"][told["best_round"] - 1]
            yield {
                "round": point["number"],
                "sent": sum(earlier["bytes_up"] for earlier in told["curve"][: told["best_round"]]),
                "accuracy": point["accuracy"],
                "loss": point["validation_loss"],
                "lines": [f"seed {told['seed']}: best round {point['number']}", *_said([point], _known(point))],
            }


def _known(point: Mapping[str, Any]) -> list[float]:
    return [] if point["validation_loss"] is None else [point["validation_loss"]]
