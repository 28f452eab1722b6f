"""The page of a training: what every defence costs in accuracy, bytes and time, and how the rounds went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.core.words import duration, percent, plural, size
from gradveil.defences.lint import MEANINGLESS
from gradveil.federated.reading import Training, load_training
from gradveil.federated.work import FAILED
from gradveil.report.curves import lines
from gradveil.report.kinds import GOOD, ROUNDS, Kind, as_csv, idle, kinds, proofs, rounds, rows, what
from gradveil.report.pictures import data_uri
from gradveil.report.render import render


def training_page(folder: Path) -> str:
    """Render the training in a folder as HTML. Every text of it is escaped."""
    return render("training.html.j2", ("page.js", "axes.js", "curves.js"), context(load_training(folder)))


def context(training: Training) -> dict[str, Any]:
    """Work out everything the template shows."""
    every, config = kinds(training.cells), training.config
    failed = [(cell, told) for cell, told in training.cells if told is not None and told["status"] == FAILED]
    drawn = lines(every)
    return {
        "name": config.name,
        "version": training.info.get("gradveil", ""),
        "date": str(training.info.get("created", "")).replace("T", " ")[:16],
        "what": what(config),
        "cards": cards(every, training),
        "failed": failed,
        "idle": idle(every),
        "left": sum(told is None for _, told in training.cells),
        "kinds": every,
        "seeds": config.seeds,
        "shares": _shares(every),
        "proofs": proofs(every),
        "meaningless": MEANINGLESS,
        "drawn": drawn,
        "validated": any(point["loss"] is not None for line in drawn for point in line["points"]),
        "rows": list(rows(training.cells)),
        "csv": data_uri(as_csv(rows(training.cells)).encode(), "text/csv;charset=utf-8"),
        "rounds_csv": data_uri(as_csv(rounds(training.cells), ROUNDS).encode(), "text/csv;charset=utf-8"),
        "command": training.info.get("command", ""),
        "config": json.dumps(training.info["config"], indent=2, ensure_ascii=False),
        "data": {"lines": drawn},
        "duration": duration,
        "points": _points,
    }


def _points(share: float) -> str:
    """Write a difference of shares in percentage points.

    >>> _points(-0.0123), _points(0.4)
    ('−1.2', '+40.0')
    """
    return f"{100 * share:+.1f}".replace("-", "−")


def cards(every: Sequence[Kind], training: Training) -> list[dict[str, str]]:
    """Choose the key numbers: the accuracy without a defence, the dearest and the cheapest defence, what was run."""
    found = []
    sound = [kind for kind in every if kind.values("accuracy") and not kind.diverged]
    bare = next((kind for kind in sound if kind.name == "none"), None)
    known = [kind for kind in sound if kind.name not in ("none", "central")]
    if bare is not None:
        found.append(_card("Accuracy without a defence", percent(bare.mean("accuracy")), _spread(bare)))
    if known:
        best = max(known, key=lambda kind: kind.mean("accuracy") or 0.0)
        found.append(_card("Most accurate defence", percent(best.mean("accuracy")), f"{best.name} · {_spread(best)}"))
        sent = min(known, key=lambda kind: kind.mean("bytes_up") or 0.0)
        share = _share(sent.mean("bytes_up"), bare.mean("bytes_up") if bare else None)
        found.append(_card("Fewest bytes sent a round", size(sent.mean("bytes_up")), f"{sent.name}{share}"))
    done = sum(told is not None and told["status"] in GOOD for _, told in training.cells)
    rounds = f"{plural(training.config.rounds, 'round')} each, {plural(len(training.config.seeds), 'seed')}"
    found.append(_card("Trainings finished", f"{done} of {len(training.cells)}", rounds))
    return found


def _card(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail, "level": ""}


def _spread(kind: Kind) -> str:
    if kind.deviation is None:
        return plural(len(kind.values("accuracy")), "seed")
    return f"± {100 * kind.deviation:.1f} points over {plural(len(kind.values('accuracy')), 'seed')}"


def _share(own: float | None, bare: float | None) -> str:
    return f" · {percent(own / bare)} of those without a defence" if own is not None and bare else ""


def _shares(every: Sequence[Kind]) -> dict[str, dict[str, float]]:
    """Scale the bars of the table: every mean as a share of the largest."""
    found: dict[str, dict[str, float]] = {}
    for key in ("bytes_up", "bytes_down", "seconds"):
        means = {kind.name: value for kind in every if (value := kind.mean(key)) is not None}
        top = max(means.values(), default=0.0)
        found[key] = {name: value / top if top else 0.0 for name, value in means.items()}
    return found
