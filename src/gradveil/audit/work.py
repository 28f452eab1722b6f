"""The work of an audit as a scheduler knows it: one share of a cell's victims is ordered, attacked and sent back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from gradveil.attacks.base import Progress
from gradveil.attacks.plan import keep_freed_memory
from gradveil.audit.cell import Address, Recovered, cells, recover
from gradveil.audit.config import RunConfig
from gradveil.audit.observed import recover_observed
from gradveil.audit.plans import Plan, Plans
from gradveil.audit.scene import Scene, open_scene
from gradveil.audit.source import Source
from gradveil.federated.opening import refuse_other_images
from gradveil.schedule.work import Parcel, Site, Tell, Work


@dataclass(frozen=True)
class Task:
    """A share of a cell's victims: one piece of work for one process."""

    cell: Address
    share: int
    numbers: range

    def order(self, plans: Mapping[str, Plan], source: Source) -> Parcel:
        """Say what a worker needs to attack this share: what was settled before, where its training stood."""
        cell = self.cell
        stood = source.kept(cell.defence, cell.seed, cell.trained)
        return Parcel({"cell": cell.id, "victims": [self.numbers.start, self.numbers.stop], "plans": plans}, stood)


def site(scene: Scene, data_dir: Path | None) -> Site:
    """Say what workers elsewhere open to attack the cells of this run, and which attacks do not apply there."""
    setting = {
        "config": scene.config.resolved(),
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "unfit": [[*meeting, why] for meeting, why in scene.unfit.items()],
        "images": scene.images,
    }
    return Site(f"{__name__}:{open_work.__name__}", setting)


def open_work(setting: Mapping[str, Any]) -> Work:
    """Open the scene of a run, where somebody else has checked it."""
    keep_freed_memory()
    data_dir = Path(setting["data_dir"]) if setting["data_dir"] else None
    scene = open_scene(RunConfig.model_validate(setting["config"]), data_dir, checked=False)
    refuse_other_images(setting["images"], scene.images)
    unfit = {(client, defence, attack): why for client, defence, attack, why in setting["unfit"]}
    return working(replace(scene, unfit=unfit))


def working(scene: Scene) -> Work:
    """Return the work of a run whose scene is open."""
    addresses = {address.id: address for address in cells(scene.config)}

    def work(order: Parcel, tell: Tell) -> Parcel:
        def settle(name: str, plan: Plan) -> None:
            tell(Parcel({"plan": name, "settled": plan}))

        def progress(step: Progress) -> None:
            tell(Parcel({"step": asdict(step)}))

        facts = order.facts
        cell, numbers = addresses[facts["cell"]], range(*facts["victims"])
        plans = Plans(facts["plans"], settle)
        standing = scene.source.standing(order.data, cell.defence, cell.seed)
        found = (
            recover(scene, cell, numbers, progress, plans, standing)
            if scene.source.simulated
            else recover_observed(scene, cell, numbers, progress, plans)
        )
        return Parcel({"facts": found.facts, "statuses": found.statuses}, save(found.tensors))

    return work


def recovered(parcel: Parcel) -> Recovered:
    """Read what came back."""
    # Copied to where torch puts its own: sums within a tensor depend on where it lies.
    tensors = {name: value.clone() for name, value in load(parcel.data).items()}
    return Recovered(tensors, dict(parcel.facts["facts"]), tuple(parcel.facts["statuses"]))
