"""Made-up trials: so many target clients recovered, and whatever else a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from gradveil.attacks import make_attack
from gradveil.audit.attack_selection import attacker, method, undefended
from gradveil.audit.result_rows import BASELINES, Row
from gradveil.audit.run_directory import Trial
from gradveil.core.errors import GradveilError
from gradveil.core.formatting import plural
from gradveil.defences import entries

HEALTHY = {"objective": 0.01, "objective_initial": 1.0, "diverged": 0.0}
CONTROLS = {name: {"asr": 0.0, "ssim_mean": 0.1, "psnr_mean": 9.0} for name in ("wrong_target_client", *BASELINES)}


RARE = {"recovered": 0.0, "identified": 0.01, "identifiable": 0.0}
"""What a guess is expected to reach where no image of a class passes for another, among 100 private images of it."""


def recorded(info: Mapping[str, Any]) -> dict[str, Any]:
    """Add the facts that an audit writes of such a trial, except those that `info` has."""
    info = {"grants": [], "knowledge": {}, "seed": 0, "trained": None, **info}
    try:
        attack: Any = make_attack(info["attack"])
    except GradveilError:
        attack = SimpleNamespace(knowledge=info["knowledge"])
    try:
        changes = [slot for entry in entries(info["defence"]) for slot in entry.changes]
    except GradveilError:
        changes = ["send"]
    secrets = [grant.partition(": ")[0] for grant in info["grants"]]
    secrets = [name for name in secrets if name not in ("targets", "public", "bounds")]
    bare = not changes and undefended(info.get("recorded_defence") or "none")
    simulated: Any = SimpleNamespace(
        simulated_client=info["simulated_client"], ignore=getattr(attack, "ignore", "nothing")
    )
    kind = attacker(simulated, info["defence"], changes, bare, secrets)
    local = info["client"].startswith("local")
    trains = info["client"].replace("local", "local training") + " on" if local else "one gradient of"
    facts = {
        "changes": changes,
        "undefended": bare,
        "secrets": secrets,
        "attacker": "active" if "planted" in info and not secrets else kind,
        "method": method(attack),
        "preset": info["attack"].partition("(")[0],
        "local": local,
        "update": f"{trains} {plural(info['batch'], 'image')}",
        "in_parts": False,
        "rounds_used": [info["round"]],
        "simulated": 0,
        "target_iterations": 0.0,
    }
    return facts | info


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
    return Row(change.pop("number", 0), Trial(recorded(info | change), records))


BARE = row(32, defence="none", simulated_client="naive", number=90)
