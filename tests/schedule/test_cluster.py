"""Workers on Ray: the results of one process, lost actors replaced, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.audit_run import describe, run, site
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import Store
from gradveil.core.errors import GradveilError
from gradveil.federated import training_run as training
from gradveil.federated.training_run import site as train_site
from gradveil.federated.training_setup import TrainingTrial, open_setting
from gradveil.federated.training_state import RoundResult, Status
from gradveil.runs.ray_pool import Cluster
from gradveil.runs.task import Job, Parcel, Scheduler, Site, in_process
from tests.audit.runs import Silent, config
from tests.audit.test_kill import results
from tests.federated.test_run import config as train_config
from tests.federated.test_run import timeless, trained
from tests.schedule.ray_clusters import bridges, gone, kill_at_start, kill_desk, members, standing_cluster
from tests.schedule.worker_sites import deadly

pytestmark = pytest.mark.processes

RAYS = 2


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[str, int]]:
    """The address and session of an existing cluster with two CPUs."""
    with standing_cluster(RAYS) as (address, session, settings), pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield address, session


class Killing(Silent):
    """A display that calls a function at the first progress."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action = action

    def progress(self, trial: TrialAddress, share: int, step: Any) -> None:
        if not self.steps:
            assert self.action()
        super().progress(trial, share, step)


def audited(folder: Path, schedule: Scheduler, display: Silent) -> dict[str, Any]:
    with Store(folder).open(describe(SMALL, 2, "command")) as store:
        run(open_experiment(SMALL), store, display, 2, schedule)
    return results(folder)


SMALL = config(defences=["none", "gaussian(0.01)", "topk(0.1)"])
LOST = "the cluster is lost"


def test_cluster_replaces_a_killed_actor_and_carries_large_messages(tmp_path: Path) -> None:
    setting = {"marks": str(tmp_path), "kills": {"2": 1}}
    reported: list[Parcel] = []
    job = Job(
        deadly(setting), lambda n: Parcel({"number": n}, b"\n" * 9_000_000), lambda n, parcel: reported.append(parcel)
    )
    with Cluster(Site("tests.schedule.worker_sites:deadly", setting), RAYS)(job, [1, 2, 3]) as done:
        (session,) = bridges(os.getpid())
        results = dict(done)
        assert len([called for called in members(session).values() if called.startswith(b"ray::Desk")]) <= RAYS
    assert results == {n: Parcel({"did": n}, b"\n" * n * 9_000_000) for n in (1, 2, 3)}
    assert Parcel({"threads": 1}, b"\n" * 9_000_000) in reported
    assert gone(session)


def test_cluster_replaces_an_actor_killed_at_its_start_within_seconds(tmp_path: Path) -> None:
    """Ray itself waits for minutes; a busy machine may take half a minute to start another one."""
    job: Job[int] = Job(deadly({}), lambda n: Parcel({"number": n}), lambda n, parcel: None)
    killed: set[int] = set()
    times: list[float] = []

    def kill() -> None:
        (session,) = bridges(os.getpid())
        while not kill_at_start(session, killed) and not times:
            time.sleep(0.02)
        times.append(time.monotonic())

    with Cluster(Site("tests.schedule.worker_sites:deadly", {"marks": str(tmp_path), "kills": {}}), 1)(
        job, [1]
    ) as done:
        killer = threading.Thread(target=kill)
        killer.start()
        assert dict(done) == {1: Parcel({"did": 1})}
        times.append(time.monotonic())
        killer.join()
    assert killed
    assert times[1] - times[0] < 120


def test_cluster_audit_with_a_killed_actor_equals_one_process(tmp_path: Path, standing: tuple[str, int]) -> None:
    address, session = standing
    display = Killing(lambda: kill_desk(session))
    results = audited(tmp_path / "ray", Cluster(site(open_experiment(SMALL), None), RAYS, address=address), display)
    assert results == audited(tmp_path / "here", in_process, Silent())
    assert len(display.finished) == 3
    assert b"raylet" in b" ".join(members(session).values()), "it is not ours"
    assert not bridges(os.getpid())


def test_cluster_training_with_a_killed_actor_equals_one_process(tmp_path: Path, standing: tuple[str, int]) -> None:
    address, session = standing
    setting = open_setting(train_config(rounds=3, defences=["none", "topk(0.2, feedback=true)"]))
    whole, _ = trained(tmp_path / "here", setting)
    killed: list[bool] = []

    def report(trial: TrainingTrial, record: RoundResult, status: Status) -> None:
        if not killed:
            killed.append(kill_desk(session))

    with training.TRAINING_RUN.opened(tmp_path / "ray", training.describe(setting.config, "command")):
        schedule = Cluster(train_site(setting, None), RAYS, address=address)
        results = training.run(setting, tmp_path / "ray", report, schedule)
    assert killed == [True]
    assert [timeless(row) for row in results] == [timeless(row) for row in whole]


def test_cluster_that_cannot_start_raises_with_the_reason(standing: tuple[str, int]) -> None:
    address, _ = standing
    job: Job[int] = Job(deadly({}), lambda n: Parcel({}), lambda n, parcel: None)
    for cluster, problem in (
        (Cluster(Site("tests.schedule.worker_sites:refusing", {}), 1, address=address), "OSError: the disk has gone"),
        (
            Cluster(Site("x:y", {}), 3, address=address),
            "need 3 CPUs, and of the cluster 2 of 2 CPUs and 0 of 0 GPUs are free",
        ),
        (Cluster(Site("x:y", {}), 1, address="127.0.0.1:1"), "ConnectionRefusedError: .*refused"),
    ):
        with pytest.raises(GradveilError, match=problem), cluster(job, [1]) as done:
            next(done)
    assert not bridges(os.getpid())


def test_lost_cluster_raises_and_another_engine_finishes_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")

    def lose() -> bool:
        (session,) = bridges(os.getpid())
        ray = [pid for pid in members(session) if pid != session]
        for pid in ray:
            os.kill(pid, signal.SIGKILL)
        return bool(ray)

    with pytest.raises(GradveilError, match=LOST) as error:
        audited(tmp_path / "lost", Cluster(site(open_experiment(SMALL), None), RAYS), Killing(lose))
    assert "run the same command again" in str(error.value)
    assert not bridges(os.getpid())
    display = Silent()
    assert audited(tmp_path / "lost", in_process, display) == audited(tmp_path / "here", in_process, Silent())


def test_interrupted_audit_ends_ray_and_prints_the_command_to_resume(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        'name = "small"\ntarget_clients = 2\nattacks = ["ig(iterations=4)", "ig(iterations=20000)"]\n'
        'data = { name = "faces", size = 16 }\nmodel = { name = "lenet-zhu" }\n'
    )
    words = ["audit", "small.toml", "--engine", "ray", "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # What a shell starts in the background ignores interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    session = 0
    try:
        end = time.monotonic() + 200
        while not list(tmp_path.glob("runs/small/trials/*/trial.json")) and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.1)
        (session,) = bridges(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 130
        assert "To go on, run the same command again:\n  gradveil audit small.toml --engine ray" in errors.decode()
        assert gone(session)
    finally:
        process.kill()
        process.communicate()
        for pid in members(session) if session else ():
            os.kill(pid, signal.SIGKILL)
