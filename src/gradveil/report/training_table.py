"""The numbers of every training and of every round, for the table of the page and for CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from gradveil.core.formatting import duration, number, percent, size
from gradveil.federated.training_groups import NOT_FINISHED, Trials
from gradveil.report.table import Column, text_column

_ROUND_VALUES = (
    *("accuracy", "loss", "validation_accuracy", "validation_loss"),
    *("bytes_up", "bytes_down", "seconds", "client_seconds"),
)
_HELD_BACK = {
    "gamma": "gamma",
    "residual_squared": "residual",
    "gradient_squared_largest": "largest",
    "gradient_squared_mean": "full",
    "gradient_variance": "variance",
}
_CLIENT_COUNTS = {"answered": "clients", "refused": "refused", "absent": "absent"}
ROUNDS = ("defence", "seed", "round", *_ROUND_VALUES, *_CLIENT_COUNTS, *_HELD_BACK)
"""The columns of the CSV of rounds."""


def _number(key: str, title: str, meaning: str, show: Any = number) -> Column[Mapping[str, Any]]:
    return Column(key, title, meaning, itemgetter(key), show)


COLUMNS: tuple[Column[Mapping[str, Any]], ...] = (
    text_column("defence", "Defence", "transform of every update", itemgetter("defence")),
    _number("seed", "Seed", "seed of images, weights, clients and order", str),
    text_column("status", "Status", "how the training ended", itemgetter("status")),
    _number("rounds", "Rounds", "rounds of training"),
    _number("best_round", "Best round", "round with the lowest validation loss, whose parameters are kept"),
    _number("accuracy", "Accuracy", "share of test images classified correctly", percent),
    _number("loss", "Test loss", "mean loss on the test images"),
    _number("validation_loss", "Validation loss", "mean loss on the clients' validation images"),
    _number("bytes_up", "Sent per round", "bytes that all clients send in a round", size),
    _number("bytes_down", "Received per round", "bytes that all clients receive in a round", size),
    _number("seconds", "Time per round", "seconds of work", duration),
    _number("total_bytes_up", "Sent in total", "bytes that all clients send in all rounds", size),
    _number("total_bytes_down", "Received in total", "bytes that all clients receive in all rounds", size),
    _number("client_seconds", "Seconds per client", "seconds of one client's work in a round"),
    _number("total_seconds", "Time in total", "seconds of work in all rounds", duration),
)
"""The columns of the page's table."""


def training_rows(trials: Trials) -> Iterator[dict[str, Any]]:
    """Return one row per training, with the values of the table and of the CSV."""
    summed = ("bytes_up", "bytes_down", "seconds")
    keys = ("rounds", "best_round", "accuracy", "loss", "validation_loss", *summed, "client_seconds")
    for trial, summary in trials:
        values: Mapping[str, Any] = summary or {}
        curve = values.get("curve") or ()
        yield {
            "defence": trial.title,
            "seed": trial.seed,
            "status": values["status"] if values else NOT_FINISHED,
            **{key: values.get(key) for key in keys},
            **{f"total_{key}": sum(point[key] for point in curve) if curve else None for key in summed},
            **{f"epsilon_{unit}": (values.get("epsilon") or {}).get(unit) for unit in ("example", "client")},
            **{key: values.get(key) for key in ("delta", "guarantee", "failed")},
        }


def round_rows(trials: Trials) -> Iterator[dict[str, Any]]:
    """Return one row per round of every training."""
    for trial, summary in trials:
        for point in summary["curve"] if summary else ():
            yield {
                "defence": trial.title,
                "seed": trial.seed,
                "round": point["number"],
                **{key: point.get(key) for key in _ROUND_VALUES},
                **{name: len(point.get(key, ())) for name, key in _CLIENT_COUNTS.items()},
                **{name: (point.get("held_back") or {}).get(key) for name, key in _HELD_BACK.items()},
            }
