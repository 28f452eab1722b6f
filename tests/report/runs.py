"""Run directories made by hand: real faces as truths, degraded copies of them as reconstructions, scores computed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.private_files import seal
from gradveil.metrics import mse, psnr, ssim
from tests.report.images import controls, degrade, faces
from tests.report.trials import recorded

PARAMS = 15_826
DENSE = 4.0 * PARAMS


@dataclass(frozen=True)
class Case:
    """A defence as the fixture plays it: what each kind of attacker gets out of it (0 nothing, 1 everything)."""

    text: str
    title: str
    guarantee: str
    bytes: float
    distance: float
    naive: float
    full: float | None
    """None: no attacker who knows the defence was run."""
    knowledge: str = "neutral"


CASES = (
    Case("none", "No defence: the control of every comparison", "none", DENSE, 0.0, 1.0, None),
    Case("clip(norm=1.0)", "Scale the update down to a norm", "bounds the update's norm", DENSE, 0.62, 0.96, 0.98),
    Case(
        "gaussian(std=0.01)",
        "Add normal noise to the update",
        "differential privacy if clipped",
        DENSE,
        1.31,
        0.45,
        0.52,
        "sample",
    ),
    Case(
        "prune(ratio=0.9)", "Send zeros in place of the smallest entries", "none", 0.2 * DENSE, 0.41, 0.55, 0.8, "infer"
    ),
    Case(
        "dgp(top=0.05, bottom=0.75)",
        "Send zeros in place of each layer's largest and smallest entries",
        "none",
        0.3 * DENSE,
        0.93,
        0.12,
        0.3,
        "infer",
    ),
    Case(
        "precode(k=64)", "A variational bottleneck before the last linear layer", "none", 1.12 * DENSE, 0.35, 0.05, None
    ),
    Case(
        "dp(clip=1.0, sigma=1.0)",
        "Clip each example's gradient, add normal noise",
        "(ε, δ)-differential privacy",
        DENSE,
        38.0,
        0.02,
        0.04,
        "sample",
    ),
)
ATTACKS = (("dlg", "L2 distance of gradients, L-BFGS", 0.93), ("ig", "Cosine distance and total variation", 1.0))
CITATIONS = {
    "dlg": "L. Zhu, Z. Liu, S. Han, “Deep Leakage from Gradients”, NeurIPS 2019",
    "ig": "J. Geiping et al., “Inverting Gradients – How easy is it to break privacy?”, NeurIPS 2020",
}
Change = Mapping[str, Any]


def records(candidate: Tensor, truth: Tensor, case: Case) -> list[dict[str, Any]]:
    """Score every target client."""
    result = []
    tables = {"mse": mse(candidate, truth), "psnr": psnr(candidate, truth), "ssim": ssim(candidate, truth)}
    for v in range(truth.shape[0]):
        images = [
            {name: float(table[v, b]) for name, table in tables.items()}
            | {"success": int(tables["ssim"][v, b] > 0.5), "identified": bool(tables["ssim"][v, b] > 0.3), "matched": b}
            | {"expected": {"recovered": 0.02, "identified": 0.02, "identifiable": 0.01}}
            for b in range(truth.shape[1])
        ]
        mean = {name: sum(image[name] for image in images) / len(images) for name in tables}
        result.append(
            {
                "target_client": v,
                "index": v,
                "label": [0] * len(images),
                "predicted": [0] * len(images),
                "status": "converged" if mean["ssim"] > 0.9 else "diverged" if v == 13 else "budget",
                "iterations": 300,
                "seconds": 0.4,
                "objective": mean["mse"],
                "restart": 0,
                **mean,
                "success": int(all(image["success"] for image in images)),
                "label_accuracy": 1.0,
                "identified": all(image["identified"] for image in images),
                "distance": case.distance,
                "cosine": 1 / (1 + case.distance),
                "per_image": images,
            }
        )
    return result


def trace(truth: Tensor, quality: float) -> list[dict[str, float]]:
    """Play what an attack of 300 iterations would have answered earlier: the fewer, the worse."""
    result = []
    for halving in range(7, 0, -1):
        similarity = ssim(degrade(truth, quality * 0.8**halving, torch.Generator().manual_seed(halving)), truth)
        rate = float((similarity > 0.5).double().mean())
        result.append({"iterations": 300 >> halving, "asr": rate, "ssim_mean": float(similarity.mean())})
    return result


def trial(
    case: Case, attack: tuple[str, str, float], simulated_client: str, seed: int, truth: Tensor
) -> dict[str, Any]:
    """Play one trial: its `info`, `records` and `images`."""
    name, title, skill = attack
    quality = (case.naive if simulated_client == "naive" or case.full is None else case.full) * skill
    key = sum(map(ord, case.text + name + simulated_client)) + 1000 * seed
    candidate = degrade(truth, quality, torch.Generator().manual_seed(key))
    full = simulated_client == "full"
    knowledge = {"targets": "known"} | (
        {"model.*" if "precode" in case.text else "send.*": case.knowledge} if full else {}
    )
    info = {
        "trial": f"lenet-zhu-faces-s{seed}-r0--{case.text}--{name}-{simulated_client}".replace(" ", "")[:60],
        "model": "lenet-zhu",
        "data": "faces",
        "seed": seed,
        "round": 0,
        "client": "gradient",
        "batch": truth.shape[1],
        "defence": case.text,
        "defence_title": case.title,
        "guarantee": case.guarantee,
        "attack": f"{name}(simulated_client=full)" if full else name,
        "attack_title": title,
        "simulated_client": simulated_client,
        "threshold": 0.5,
        "grants": ["targets: the true labels"],
        "knowledge": knowledge,
        "citations": [CITATIONS[name]],
        "params": PARAMS,
        "bytes_dense": DENSE,
        "bytes_sent": case.bytes,
        "distance": case.distance,
        "cosine": 1 / (1 + case.distance),
        "seconds": 0.4 * truth.shape[0],
        "row_iterations": 300 * truth.shape[0],
        "iterations_per_second": 750.0,
        "plan": [truth.shape[0]],
        "restarts": 1,
        "health": {
            "objective": 0.0007 if quality > 0.5 else 0.012 + case.distance / (1 + case.distance),
            "objective_initial": 1.04,
            "diverged": 1 / 16,
        },
        "controls": controls(candidate, truth),
        "trace": trace(truth, quality),
    }
    return {
        "info": recorded(info),
        "records": records(candidate, truth, case),
        "images": {"truth": truth, "reconstruction": candidate},
    }


def simulated_clients(case: Case) -> Sequence[str]:
    """Which attackers a case was attacked by."""
    return ("naive",) if case.full is None else ("naive", "full")


def played(
    target_clients: int = 16, seeds: Sequence[int] = (0,), cases: Sequence[Case] = CASES, batch: int = 1
) -> list[dict[str, Any]]:
    """Play defences x attacks x simulated clients x seeds."""
    flat = faces(target_clients * batch)
    truth = flat.reshape(target_clients, batch, *flat.shape[2:])
    return [
        trial(case, attack, simulated_client, seed, truth)
        for seed in seeds
        for case in cases
        for attack in ATTACKS
        for simulated_client in simulated_clients(case)
    ]


def write_run(folder: Path, trials: Sequence[Mapping[str, Any]], images: bool = True, **change: Any) -> Path:
    """Write a run directory in the audit's format."""
    names = [entry["info"]["trial"] for entry in trials]
    info = {
        "format": 3,
        "share": 16,
        "name": "faces",
        "created": "2025-06-01T09:30:00+00:00",
        "trials": [f"{number:03d}" for number in range(len(names))],
        "config": {"name": "faces", "data": {"name": "faces"}, "target_clients": 16, "threshold": 0.5},
        "config_hash": "0123456789abcdef",
        "gradveil": "0.1.0",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
        "machine": {"python": "3.11.7", "platform": "Linux-x86_64", "cpu": "EPYC", "cores": 2, "device": "cpu"},
        "command": "gradveil audit faces --seed 0",
        **change,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(info), "utf-8")
    for number, entry in enumerate(trials):
        place = folder / "trials" / f"{number:03d}"
        place.mkdir(parents=True)
        (place / "trial.json").write_text(json.dumps({**entry["info"], "trial": place.name}), "utf-8")
        (place / "records.json").write_text(json.dumps(entry["records"]), "utf-8")
        if images and entry["images"]:
            kept = {name: value.contiguous() for name, value in entry["images"].items()}
            (place / "images.safetensors").write_bytes(seal(kept))
    return folder


def trained(trials: Sequence[Mapping[str, Any]], stages: Sequence[int] = (0, 4)) -> list[dict[str, Any]]:
    """Play the same trials before a training and after some of its rounds, where less comes out of them."""
    result: list[dict[str, Any]] = []
    for stage in stages:
        for entry in trials:
            place = [case.text for case in CASES].index(entry["info"]["defence"])
            accuracy = 0.95 - 0.04 * place - 0.01 * entry["info"]["seed"]
            facts = {"round": stage, "accuracy": accuracy if stage else 0.1, "loss": 1.0, "final_accuracy": accuracy}
            costs = {
                "bytes_up": 10 * entry["info"]["bytes_sent"],
                "bytes_down": 10 * DENSE,
                "seconds": 0.9,
                "client_seconds": 0.03 + 0.01 * place,
            }
            proof = {"guarantee": "no formal guarantee", "epsilon": {}, "delta": None}
            info = {**entry["info"], "trained": stage, "training": {**facts, **costs, **proof}}
            info["trial"] = f"t{stage}-{info['trial']}"
            records = [
                {
                    **r,
                    "per_image": [
                        {**i, "success": i["success"] * (r["target_client"] % 3 > 0 or not stage)}
                        for i in r["per_image"]
                    ],
                }
                for r in entry["records"]
            ]
            result.append({**entry, "info": info, "records": records})
    return result


def failed_trial(message: str) -> dict[str, Any]:
    """A trial that could not be finished."""
    keys = (
        "trial",
        "model",
        "data",
        "seed",
        "round",
        "client",
        "batch",
        "defence",
        "defence_title",
        "attack",
        "attack_title",
        "preset",
        "trained",
        "update",
        "local",
        "changes",
        "undefended",
    )
    whole = trial(CASES[3], ATTACKS[0], "naive", 0, faces(2))["info"]
    return {"info": {key: whole[key] for key in keys} | {"failed": message}, "records": [], "images": {}}
