"""Made-up trials: so many target clients recovered, and whatever else a test is about."""

from __future__ import annotations

from typing import Any

from gradveil.audit.result_rows import BASELINES, Row
from gradveil.audit.run_directory import Trial

HEALTHY = {"objective": 0.01, "objective_initial": 1.0, "diverged": 0.0}
CONTROLS = {name: {"asr": 0.0, "ssim_mean": 0.1, "psnr_mean": 9.0} for name in ("wrong_target_client", *BASELINES)}


RARE = {"recovered": 0.0, "identified": 0.01, "identifiable": 0.0}
"""What a guess is expected to reach where no image of a class passes for another, among 100 private images of it."""


def row(won: int, of: int = 32, **change: Any) -> Row:
    """A trial in which the first `won` targets (or those of `which`) were recovered, and identified by default."""
    which = change.pop("which", range(won))
    ssim = change.pop("ssim", 0.3)
    single = change.pop("identified", None)
    expected = change.pop("expected", RARE)
    records = []
    for target_client in range(of):
        won_it = target_client in which
        image = {"ssim": ssim, "success": int(won_it), "identified": won_it if single is None else single, "matched": 0}
        image |= {"expected": expected}
        records.append({"target_client": target_client, "ssim": ssim, "status": "budget", "per_image": [image]})
    info = {
        "model": "lenet", "data": "faces", "client": "gradient", "batch": 1, "round": 0, "seed": 0,
        "defence": "dgp", "attack": "ig", "simulated_client": "full", "knowledge": {"targets": "known"},
        "health": HEALTHY, "controls": CONTROLS, "bytes_sent": 10.0, "bytes_dense": 20.0,
    }  # fmt: skip
    return Row(change.pop("number", 0), Trial(info | change, records))


BARE = row(32, defence="none", simulated_client="naive", number=90)
