"""One cell of a run summed up in one flat object: what `gradveil summary` and `--json` say of it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from gradveil.audit.store import UNFIT, Cell
from gradveil.metrics import wilson


def summarise(cell: Cell) -> dict[str, Any]:
    """Sum one cell up in one flat object.

    Rates count images; means are over images; `seconds` is the attack's working time, summed over processes; an
    unfinished cell has None. `accuracy` is the model's after `trained` rounds of training, `final_accuracy` that at
    the end, `client_seconds` what one update takes, `round_*` what a round costs. Of pruning
    alone, `gamma_1` is the share of the update's energy left out, `proposition_1` and `gamma_1_least` what dual pruning
    leaves out at least (the paper's and the sharper bound), `cosine_*` how far a perfect match is off.
    """
    info, records = cell.info, cell.records
    keys = ("cell", "model", "data", "seed", "round", "trained", "client", "defence", "attack")
    training, pruned = info.get("training") or {}, info.get("pruned") or {}
    images = [image for record in records for image in record.get("per_image", ())]
    successes = sum(image["success"] for image in images)
    low, high = wilson(successes, len(images)) if images else (None, None)
    statuses: dict[str, int] = {}
    for record in records:
        statuses[record["status"]] = statuses.get(record["status"], 0) + 1
    return {
        **{key: info.get(key) for key in keys},
        "control": bool(info.get("control")),
        "victims": len(records),
        "images": len(images),
        "asr": successes / len(images) if images else None,
        "asr_low": low,
        "asr_high": high,
        "ssim_mean": _mean(images, "ssim"),
        "psnr_mean": _mean(images, "psnr"),
        "mse_mean": _mean(images, "mse"),
        "mse_bound": (info.get("bound") or {}).get("mse"),
        "unbounded": info.get("unbounded"),
        "label_accuracy": _mean(records, "label_accuracy"),
        "guarantee": info.get("guarantee"),
        "distance": info.get("distance"),
        "first_order_utility": info.get("first_order_utility"),
        "second_order_utility": info.get("second_order_utility"),
        "gamma_1": pruned.get("gamma"),
        "gamma_1_least": pruned.get("least"),
        "proposition_1": pruned.get("proposition_1"),
        "cosine_promised": pruned.get("promised"),
        "cosine_worst": pruned.get("worst"),
        "bytes_sent": info.get("bytes_sent"),
        "seconds": info.get("seconds"),
        "accuracy": training.get("accuracy"),
        "final_accuracy": training.get("final_accuracy"),
        "client_seconds": training.get("client_seconds"),
        **{f"round_{key}": training.get(key) for key in ("bytes_up", "bytes_down", "seconds")},
        "statuses": statuses or {UNFIT if cell.unfit else "failed": 1},
        "prepared": "; ".join(info.get("prepared", ())),
        "failed": cell.failed,
        "unscored": cell.unscored,
        "notes": "; ".join(info.get("notes", ())),
    }


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None
