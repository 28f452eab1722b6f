"""Scoring a cell: reconstructions against the truth, beside what nobody's update, or somebody else's, would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import Remark, in_words
from gradveil.audit.bound import mse_bound
from gradveil.audit.cell import Address, Recovered
from gradveil.audit.controls import best_guesses, controls_of, expected_of
from gradveil.audit.guessing import EXACT
from gradveil.audit.scene import Scene
from gradveil.audit.store import Cell
from gradveil.audit.trained import trained_on
from gradveil.audit.utility import left_out
from gradveil.metrics import (
    Missing,
    asr,
    identification,
    label_accuracy,
    lpips,
    match_batch,
    mse,
    permute,
    psnr,
    ssim,
)


@dataclass(frozen=True)
class Named:
    """What reports call the defence and the attack, and whom to cite."""

    defence_title: str
    attack_title: str
    citations: tuple[str, ...] = ()


def score(scene: Scene, cell: Address, found: Recovered, named: Named) -> Cell:
    """Compare in pixels: denormalised, clamped to [0, 1], and each batch matched one to one by least MSE.

    Where a batch defence changed the images, reconstructions are also scored against the images that the client trained
    on (`success_transformed`, `identified_transformed`); `success` is against the private images.
    """
    places = scene.examples(cell.client, range(cell.clients(scene.config.victims)), cell.seed)
    truth, candidate = scene.pixels(scene.batch(places).inputs), scene.pixels(found.tensors["inputs"])
    order, matched = match_batch(candidate, truth)
    scores = {"mse": mse(matched, truth), "psnr": psnr(matched, truth), "ssim": ssim(matched, truth)}
    trained = trained_on(scene, cell, found.tensors, places) if "transformed" in found.tensors else None
    scores |= trained.scores if trained else {}
    reasons = _perceptual(scene, matched, truth, scores)
    labels = permute(found.tensors["targets"], order)
    whole = len(scene.victims) > 1
    identified = identification(matched, places, scene.victims.pixels.double()) if whole else None
    records = []
    for v in range(len(places)):
        records.append(_record(scene, found, places, labels, order, scores, identified, v))
    chances = expected_of(scene.guessing, scene, places)
    for v, record in enumerate(records):
        for b, image in enumerate(record["per_image"]):
            image["expected"] = chances[v][b]
            image |= trained.of(v, b) if trained else {}
    controls = controls_of(scene.guessing, scene, matched, places)
    info = {**info_of(scene, cell, found, named), "missing": reasons, "controls": controls}
    info["best_guesses"] = best_guesses(scene.guessing, scene, places)
    info["trace"] = _trace(scene, found, truth)
    kept: dict[str, Tensor] = {}
    if scene.config.images:
        kept = {"truth": truth.float(), "reconstruction": matched.float().nan_to_num(0.5)}
        if "transformed" in found.tensors:
            kept["truth_transformed"] = scene.pixels(found.tensors["transformed"]).float()
        kept = {name: value.contiguous() for name, value in kept.items()}
    return Cell(info, records, None, kept)


def _perceptual(scene: Scene, matched: Tensor, truth: Tensor, scores: dict[str, Tensor]) -> dict[str, str]:
    """Add LPIPS to the scores, or return the reason why not under its name."""
    net = scene.config.lpips
    if net is None:
        return {"lpips": 'not asked for: set lpips = "alex" (or "vgg") in the run file'}
    found = lpips(matched, truth, net)
    if isinstance(found, Missing):
        return {"lpips": found.reason}
    scores["lpips"] = found
    return {}


def failure(scene: Scene, cell: Address, named: Named, message: str, unfit: bool = False) -> Cell:
    """Make the record of a cell without a result: a status in the results, never a gap.

    It could not be finished; or the attack does not apply there (`unfit`), which is nobody's fault.
    """
    return Cell({**_address(scene, cell, named), "failed": message, "unfit": unfit}, [])


def _record(
    scene: Scene,
    found: Recovered,
    places: Tensor,
    labels: Tensor,
    order: Tensor,
    scores: Mapping[str, Tensor],
    identified: Tensor | None,
    v: int,
) -> dict[str, Any]:
    tensors, victims = found.tensors, places.shape[0]
    truth = scene.victims.targets[places[v]]
    images = [
        {
            **{name: float(values[v, b]) for name, values in scores.items()},
            "success": int(scores["ssim"][v, b] > scene.config.threshold),
            "exact": bool(scores["ssim"][v, b] > EXACT),
            "identified": None if identified is None else bool(identified[v, b]),
            "matched": int(order[v, b]),
        }
        for b in range(places.shape[1])
    ]
    return {
        "victim": scene.config.first_victim + v,
        "index": int(places[v, 0]),
        "label": truth.tolist(),
        "predicted": labels[v].tolist(),
        "status": found.statuses[v],
        "iterations": int(tensors["iterations"][v]),
        "seconds": found.facts["seconds"] / victims,
        "objective": float(tensors["objective"][v]),
        "restart": int(tensors["restart"][v]),
        **{name: fmean(image[name] for image in images) for name in scores},
        "success": int(all(image["success"] for image in images)),
        "label_accuracy": float(label_accuracy(labels[v : v + 1], truth[None])),
        "identified": None if identified is None else all(image["identified"] for image in images),
        "distance": float(tensors["distance"][v]),
        "cosine": float(tensors["cosine"][v]),
        "first_order_utility": float(tensors["first_order_utility"][v]),
        "second_order_utility": float(tensors["second_order_utility"][v]),
        "per_image": images,
    }


def _address(scene: Scene, cell: Address, named: Named) -> dict[str, Any]:
    settings = scene.config.client[cell.client]
    return {
        "cell": cell.id,
        "control": cell.control,
        "model": scene.config.model.name,
        "prepared": list(scene.prepared),
        "data": scene.config.data.name,
        "seed": cell.seed,
        "round": scene.config.rounds - 1,
        "trained": cell.trained,
        "client": settings.title,
        "batch": settings.examples,
        "defence": cell.defence,
        "defence_title": named.defence_title,
        "attack": cell.attack,
        "attack_title": named.attack_title,
        "citations": list(named.citations),
        "threshold": scene.config.threshold,
    }


def info_of(scene: Scene, cell: Address, found: Recovered, named: Named) -> dict[str, Any]:
    """Say what was attacked, by whom, and how the attack did as an attack."""
    facts, tensors, settings = found.facts, found.tensors, scene.config.client[cell.client]
    seconds = facts["seconds"]
    return {
        **_address(scene, cell, named),
        **facts,
        "remarks": in_words(Remark(*each) for each in facts["remarks"]),
        "training": scene.source.facts(cell.defence, cell.seed, cell.trained),
        "bytes_dense": float(tensors["bytes_dense"].double().mean()),
        "bytes_sent": float(tensors["bytes_sent"].double().mean()),
        "distance": float(tensors["distance"].mean()),
        "cosine": float(tensors["cosine"].mean()),
        "first_order_utility": float(tensors["first_order_utility"].mean()),
        "second_order_utility": float(tensors["second_order_utility"].mean()),
        "pruned": left_out(tensors["distance"], facts.get("pruned")),
        "iterations_per_second": facts["row_iterations"] / seconds if seconds else None,
        "bound": mse_bound(scene, tensors, settings.examples) if len(tensors.get("nats", ())) else None,
        "health": {
            "objective": _median(tensors["objective"]),
            "objective_initial": _median(tensors["initial"]),
            "objective_truth": _median(tensors["at_truth"]),
            **_matches(tensors),
            "diverged": sum(status == "diverged" for status in found.statuses) / len(found.statuses),
        },
    }


def _matches(tensors: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Summarise how well the answers and the true images explain the update without priors, where that is known."""
    if "match" not in tensors or "match_at_truth" not in tensors:
        return {}
    answer, truth = tensors["match"], tensors["match_at_truth"]
    names = ("match", "layers", "likelihood")[: answer.shape[1]]
    return {
        name: _median(values[:, place])
        for place, start in enumerate(names)
        for name, values in ((start, answer), (f"{start}_truth", truth))
    }


def _trace(scene: Scene, found: Recovered, truth: Tensor) -> list[dict[str, float]]:
    """Score what the attack would have answered earlier: quality against budget."""
    rows: list[dict[str, float]] = []
    for name, inputs in found.tensors.items():
        if name.startswith("trace."):
            similarity = ssim(match_batch(scene.pixels(inputs), truth)[1], truth)
            rate = asr(similarity, scene.config.threshold).rate
            count = int(name.removeprefix("trace."))
            rows.append({"iterations": count, "asr": rate, "ssim_mean": float(similarity.mean())})
    return sorted(rows, key=lambda row: row["iterations"])


def _median(values: Tensor) -> float | None:
    """Return the median of the finite values, None if there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if finite.numel() else None
