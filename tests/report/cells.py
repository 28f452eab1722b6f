"""Made-up cells: so many victims recovered, and whatever else a test is about."""

from __future__ import annotations

from typing import Any

from gradveil.audit.rows import FLOORS, Row
from gradveil.audit.store import Cell

HEALTHY = {"objective": 0.01, "objective_initial": 1.0, "diverged": 0.0}
CONTROLS = {name: {"asr": 0.0, "ssim_mean": 0.1, "psnr_mean": 9.0} for name in ("wrong_victim", *FLOORS)}


def row(won: int, of: int = 32, **change: Any) -> Row:
    """A cell in which the first `won` victims were recovered (or those of `which`)."""
    which = change.pop("which", range(won))
    ssim = change.pop("ssim", 0.3)
    identified = change.pop("identified", False)
    records = []
    for victim in range(of):
        image = {"ssim": ssim, "success": int(victim in which), "identified": identified, "matched": 0}
        records.append({"victim": victim, "ssim": ssim, "status": "budget", "per_image": [image]})
    info = {
        "model": "lenet", "data": "faces", "client": "gradient", "batch": 1, "round": 0, "seed": 0,
        "defence": "dgp", "attack": "ig", "belief": "full", "knowledge": {"targets": "known"},
        "health": HEALTHY, "controls": CONTROLS, "bytes_sent": 10.0, "bytes_dense": 20.0,
    }  # fmt: skip
    return Row(change.pop("number", 0), Cell(info | change, records))


BARE = row(32, defence="none", belief="naive", number=90)
