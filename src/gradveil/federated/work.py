"""The work of a training as a scheduler knows it: a cell is ordered where it stands, and told after every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from gradveil.core.files import plain
from gradveil.core.own import code_of
from gradveil.federated.checkpoint import pack_standing, unpack_standing
from gradveil.federated.config import TrainConfig, digest
from gradveil.federated.engine import Federation, train
from gradveil.federated.opening import refuse_other_images
from gradveil.federated.privacy import guarantee
from gradveil.federated.recorded import Recorder
from gradveil.federated.setting import Cell, Setting, cells, open_setting
from gradveil.federated.standing import Standing
from gradveil.nn.weights import fingerprint
from gradveil.schedule.work import Parcel, Site, Tell, Work

FAILED = "failed"
"""Status of a training that ended in an error; the next call takes it up again."""


def site(opened: Setting, data_dir: Path | None, recorder: Recorder | None = None) -> Site:
    """Say what workers elsewhere open to train the cells of this run."""
    record = None
    if recorder is not None:
        record = {"truth": recorder.truth, "rounds": recorder.rounds, "clients": recorder.clients}
        record["folder"] = str(recorder.folder.resolve())
    where = str(data_dir.resolve()) if data_dir else None
    setting = {"config": opened.config.resolved(), "data_dir": where, "record": record}
    return Site(f"{__name__}:{open_work.__name__}", {**setting, "images": opened.data.identities()})


def open_work(setting: Mapping[str, Any]) -> Work:
    """Open the setting of a run, where somebody else has checked it."""
    data_dir = Path(setting["data_dir"]) if setting["data_dir"] else None
    opened = open_setting(TrainConfig.model_validate(setting["config"]), data_dir, checked=False)
    refuse_other_images(setting["images"], opened.data.identities())
    record = setting["record"]
    return working(opened, Recorder(**{**record, "folder": Path(record["folder"])}) if record else None)


def working(setting: Setting, recorder: Recorder | None = None) -> Work:
    """Return the work of a run whose setting is open: it tells each round with the bytes that go on from there."""
    config = setting.config
    every = {cell.id: cell for cell in cells(config)}

    def work(order: Parcel, tell: Tell) -> Parcel:
        cell = every[order.facts["cell"]]
        own = identity(setting, cell)
        standing = unpack_standing(order.data, own, device=config.device) if order.data else None

        def keep(now: Standing) -> None:
            tell(Parcel({"record": asdict(now.records[-1]), "status": now.status}, pack_standing(now, own)))

        federation = setting.federation(cell)
        if recorder is not None:
            federation = replace(federation, recorder=_configured(recorder, cell, config, federation))
        standing = going_on(standing, config.rounds) or begun(setting, cell, federation)
        standing = replace(standing, planned=max(standing.planned, config.rounds))
        standing = train(federation, config.rounds, standing, keep)
        return Parcel(summarise(cell, standing, facts(federation, config, standing)))

    return work


def _configured(recorder: Recorder, cell: Cell, config: TrainConfig, federation: Federation) -> Recorder:
    """Tell the recorder what the clients of this cell are configured as."""
    local = federation.client.local
    if config.local is None or local is None:
        return replace(recorder, run=cell.id, defence=cell.defence, local=None, sends="gradient")
    spelled = config.local.model_copy(update={"batch": local.batch})
    return replace(recorder, run=cell.id, defence=cell.defence, local=spelled, sends="difference")


def begun(setting: Setting, cell: Cell, federation: Federation) -> Standing:
    """Return where a training stands before its first round, with what of its code is the user's own."""
    return replace(federation.start(), code=code_of((setting.config.model.name, cell.defence)))


def going_on(standing: Standing | None, rounds: int) -> Standing | None:
    """Let a training that is finished run on where more rounds are asked for."""
    if standing is not None and standing.status == "finished" and len(standing.records) < rounds:
        return replace(standing, status="running")
    return standing


def facts(federation: Federation, config: TrainConfig, standing: Standing) -> dict[str, Any]:
    """Say what is proven of a training, how many test examples judge it, and what share of them one class for all is.

    What is proven counts the most rounds that it was ever planned for, or had.
    """
    counts = federation.test.targets.bincount()
    rounds = max(config.rounds, standing.planned, len(standing.records))
    judged = {"tested": int(counts.sum()), "constant": int(counts.max()) / int(counts.sum())}
    return guarantee(federation, rounds, config.delta) | judged


def identity(setting: Setting, cell: Cell) -> str:
    """Hash what a training's standing depends on; the weights it starts from too, where a file gives them."""
    start = [fingerprint(setting.weights)] if setting.weights else []
    return digest([setting.config.digest(), cell.title, cell.seed, *start])


def summarise(cell: Cell, standing: Standing, told: Mapping[str, Any]) -> dict[str, Any]:
    """Sum one training up, with every round's record: the accuracy is that of the parameters it ends with.

    `told` is what else is known of it, see `facts`. Bytes are the means of the rounds, seconds their medians: a
    process is slow once, in the first round of its first training, which says nothing of that training's defence.
    """
    records = standing.records
    last = records[standing.best_round - 1] if standing.best_round else records[-1]
    rounds = len(records)
    worked = [record.client_seconds for record in records if record.client_seconds is not None]
    return plain(
        {
            "cell": cell.id,
            "defence": cell.title,
            "seed": cell.seed,
            "status": standing.status,
            "rounds": rounds,
            "best_round": standing.best_round,
            "accuracy": last.accuracy,
            "loss": last.loss,
            "validation_loss": last.validation_loss,
            "bytes_up": sum(record.bytes_up for record in records) / rounds,
            "bytes_down": sum(record.bytes_down for record in records) / rounds,
            "seconds": median_low(record.seconds for record in records),
            "client_seconds": median_low(worked) if worked else None,
            **told,
            "code": dict(standing.code),
            "start": None if standing.start is None else dict(zip(("loss", "accuracy"), standing.start, strict=True)),
            "curve": [asdict(record) for record in records],
        }
    )


def failure(cell: Cell, why: str) -> dict[str, Any]:
    """Sum up a training that failed: it has no numbers."""
    numbers = (
        "best_round",
        "accuracy",
        "loss",
        "validation_loss",
        "bytes_up",
        "bytes_down",
        "seconds",
        "client_seconds",
    )
    named = {"cell": cell.id, "defence": cell.title, "seed": cell.seed, "status": FAILED, "failed": why}
    nothing = {"guarantee": None, "epsilon": {}, "delta": None}
    return {**named, "rounds": 0, **dict.fromkeys(numbers), **nothing, "start": None, "curve": []}
