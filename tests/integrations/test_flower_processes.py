"""Flower with real processes: the example's README as written, in simulation and over TLS, and a client that is killed.

What is started is stopped by its id; the home directory is the test's own.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation, train
from gradveil.integrations.flower.flower_records import decoded
from tests.federated.small_federations import federation

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
EXAMPLE, WAITING = ROOT / "examples" / "flower_app", Path(__file__).parent / "waiting_app"
TEXTS = ROOT / "examples" / "flower_text_app"
PATIENCE = 600
"""Seconds; on a machine with nothing else to do all of it takes two minutes."""


def commands(*words: str, example: Path = EXAMPLE) -> list[str]:
    """The commands of an example's README that have all of these words."""
    blocks = re.findall(r"```console\n(.*?)```", (example / "README.md").read_text("utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if all(word in line for word in words)]


@pytest.fixture
def surroundings(tmp_path):
    """Environment variables: a home of its own, free ports, Gradveil from this checkout."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(5)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in sockets]
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "GRADVEIL_TEST_FOLDER": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[3],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[4],
        "PORTS": " ".join(ports[:3]),
    }


def ported(command: str, surroundings) -> str:
    """The command with free ports in place of those that the README names."""
    for written, free in zip(("9200", "9201", "9202"), surroundings["PORTS"].split(), strict=True):
        command = command.replace(written, free)
    return command


@contextmanager
def started(command: str, surroundings, log: Path, cwd: Path):
    """A process that is killed at the end, with all that it started."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {ported(command, surroundings)}"],
            env=surroundings,
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process) -> None:
    """Kill a process and all that it started, which may be in groups and sessions of their own."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    family = [process.pid]
    for member in family:
        family += parents.get(member, [])
    if process.poll() is None:
        for member in family:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    process.wait()


def wait(ready, process, problem: str, *logs: Path):
    """Wait until something is there, and return it; not if the process fails that should bring it."""
    end = time.monotonic() + PATIENCE
    while not (value := ready()):
        if time.monotonic() > end or process.poll():
            tails = "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())
            pytest.fail(f"{problem} did not come\n{tails}")
        time.sleep(0.1)
    return value


def run(command: str, surroundings, cwd: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", ported(command, surroundings)],
        env=surroundings,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def listening(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


class OfKeys(Federation):
    """A federation whose clients draw as those of the example do with a fixed key."""

    def task(self, standing, client, number, here):
        local_client = Key(0).child("client", client).child("round", number)
        return super().task(standing, client, number, here)._replace(key=local_client)


def with_fixed_key(folder: Path) -> Path:
    """Copy the example; its clients draw what the engine draws. As it stands nobody can compute their noise again."""
    copy = Path(shutil.copytree(EXAMPLE, folder))
    module = copy / "digits" / "client.py"
    text = module.read_text("utf-8")
    changed = text.replace(
        "examples(number, clients))", 'examples(number, clients), key=Key(0).child("client", number))'
    )
    changed = changed.replace("from digits", "from gradveil.core.noise import Key\nfrom digits")
    assert changed.count("Key(0)") == changed.count("import Key") == 1
    module.write_text(changed, "utf-8")
    return copy


def simulated(command: str, example: Path, surroundings, tmp_path: Path) -> tuple[list[float], str]:
    """Run an example in simulation; return the accuracy of each round, and all that it printed."""
    port, log = surroundings["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"], tmp_path / "server.log"
    # `flwr run` would start this one itself, and leave it running where nobody stops it.
    local = f"flower-superlink --insecure --simulation --host 127.0.0.1 --port {port}"
    with started(local, surroundings, log, tmp_path) as process:
        wait(lambda: listening(port), process, "a SuperLink", log)
        output = run(command, surroundings, example)
    return [float(value) for value in re.findall(r"MetricRecord: \{'accuracy': ([\d.e-]+)\}", output)], output


def test_clients_of_the_text_example_send_noise_at_words_that_they_do_not_have(tmp_path, surroundings):
    """Undefended, the rows of an embedding that change are the words of a client's sentences."""
    [command] = commands("flwr run . --stream", example=TEXTS)
    accuracies, output = simulated(f"{command} --run-config rounds=1", TEXTS, surroundings, tmp_path)
    assert len(accuracies) == 1
    assert "refused" not in output

    texts = load("reviews").public
    for number in (0, 1):
        [home] = (tmp_path / ".gradveil" / "flower" / f"partition-{number}").glob("run-*")
        answer = load_file(home / "answer-1")
        received = {key.removeprefix("received."): value for key, value in answer.items() if key != "sent"}
        moved = decoded(bytes(answer["sent"].numpy()), received, {})["words.weight"].any(1)
        assert int(moved.sum()) == len(texts.space.vocabulary) > len(texts.inputs.unique())


def test_the_example_in_simulation_ends_with_the_engines_parameters(tmp_path, surroundings, monkeypatch):
    """Five rounds as the README starts them, but for a fixed key; then the engine trains with the same one."""
    example = with_fixed_key(tmp_path / "example")
    [command] = commands("flwr run . --stream")
    accuracies, output = simulated(command, example, surroundings, tmp_path)
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.8
    assert "refused" not in output

    monkeypatch.syspath_prepend(str(EXAMPLE))
    from digits.task import examples, held_out, make_client

    homes = [tmp_path / ".gradveil" / "flower" / f"partition-{number}" for number in (0, 1)]
    [name] = [folder.name for folder in homes[0].glob("run-*")]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # as the example's server does
        client = make_client()
    engine = OfKeys(client, [ClientShare(examples(number, 2)) for number in (0, 1)], held_out())
    standing = train(engine, 5)
    # Of the end the clients know the last round: what they received, and what they sent.
    left = [load_file(home / name / "answer-5") for home in homes]
    received = {key.removeprefix("received."): value for key, value in left[0].items() if key != "sent"}
    sent = {i: decoded(bytes(answer["sent"].numpy()), received, {}) for i, answer in enumerate(left)}
    counts = {i: len(share.train.targets) for i, share in enumerate(engine.shares)}
    mean, _ = Server().mean(sent, counts, {})
    for parameter, value in standing.params.items():
        torch.testing.assert_close(received[parameter] - mean[parameter], value, rtol=1e-4, atol=1e-5)
    assert [round(record.accuracy, 4) for record in standing.records] == [round(value, 4) for value in accuracies]


def node(log: Path) -> str | None:
    """The id that the SuperLink gave to a SuperNode when it was last started."""
    value = re.findall(r"SuperNode ID: (\d+)", log.read_text(errors="replace"))
    return value[-1] if value else None


@contextmanager
def deployed(tmp_path, surroundings):
    """A SuperLink over TLS, as the README starts one; what it yields starts another process in its surroundings."""
    for command in (*commands("openssl"), *commands("mkdir"), *commands("printf")):
        run(command, surroundings, tmp_path)
    with ExitStack() as stack:

        def start(command: str, log: Path, cwd: Path = tmp_path):
            return stack.enter_context(started(command, surroundings, log, cwd))

        start(commands("flower-superlink")[0], tmp_path / "server.log")
        yield start


def test_a_residual_survives_kill_9_in_a_deployment_over_tls(tmp_path, surroundings):
    """Three rounds; before the third one client is killed, comes back as another node, and goes on where it was."""
    logs = {name: tmp_path / f"{name}.log" for name in ("server", "a", "b", "run")}
    nodes = commands("flower-supernode")
    with deployed(tmp_path, surroundings) as start:
        first, second = start(nodes[0], logs["a"]), start(nodes[1], logs["b"])
        before = [
            wait(lambda log=log: node(log), process, "a SuperNode", log)
            for process, log in ((first, logs["a"]), (second, logs["b"]))
        ]
        run_it = commands("flwr run . loopback")[0]
        running = start(run_it, logs["run"], WAITING)
        wait((tmp_path / "waiting").exists, running, "the second round", *logs.values())

        selected = next((tmp_path / ".gradveil" / "flower" / "hospital-a").glob("run-*"))
        assert sorted(file.name for file in selected.iterdir()) == ["answer-2", "state-2"]
        kill(first)
        logs["a"].write_text("")
        again = start(nodes[0], logs["a"])
        after = wait(lambda: node(logs["a"]), again, "the SuperNode again", logs["a"])
        assert after != before[0]
        (tmp_path / "nodes.part").write_text(f"{after} {before[1]}")
        (tmp_path / "nodes.part").rename(tmp_path / "nodes")
        final = tmp_path / "final.safetensors"
        wait(final.exists, running, "the end", *logs.values())
        assert sorted(file.name for file in selected.iterdir()) == ["answer-3", "state-3"]

    sent = load_file(final)
    assert sent.pop("rounds") == 3
    engine = federation("dp(clip=1, sigma=1e-3) + topk(0.1, feedback=true)", clients=2, validation=False)
    standing = train(engine, 2)
    expected = engine.round(standing).params
    standing.clients.pop(0)
    without = engine.round(standing).params
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-9, atol=1e-12)
    assert any(not torch.allclose(sent[name], value, rtol=1e-3) for name, value in without.items())


def test_clients_killed_at_any_moment_lose_nothing(tmp_path, surroundings):
    """One client or the other is killed again and again, wherever it is; the rounds end with the engine's parameters.

    Set GRADVEIL_KILLS for more of them than fit into everyday tests.
    """
    surroundings["GRADVEIL_TEST_SERVER"] = "insists"
    kills, draw = int(os.environ.get("GRADVEIL_KILLS", "3")), random.Random(0)
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    nodes, final, rounds = commands("flower-supernode"), tmp_path / "final.safetensors", tmp_path / "rounds"
    with deployed(tmp_path, surroundings) as start:
        living = [start(command, log) for command, log in zip(nodes, logs, strict=True)]
        for process, log in zip(living, logs, strict=True):
            wait(lambda log=log: node(log), process, "a SuperNode", log)
        running = start(commands("flwr run . loopback")[0], tmp_path / "run.log", WAITING)
        logfiles = (tmp_path / "run.log", tmp_path / "server.log", *logs)
        wait(rounds.exists, running, "the first round", *logfiles)
        for _ in range(kills):
            time.sleep(draw.uniform(0, 6))
            target_client = draw.randrange(2)
            kill(living[target_client])
            logs[target_client].write_text("")
            living[target_client] = start(nodes[target_client], logs[target_client])
            wait(
                lambda log=logs[target_client]: node(log),
                living[target_client],
                "the SuperNode again",
                logs[target_client],
            )
        (tmp_path / "enough").touch()
        wait(final.exists, running, "the end", *logfiles)

    sent = load_file(final)
    engine = federation("dp(clip=1, sigma=1e-3) + topk(0.1, feedback=true)", clients=2, validation=False)
    standing = train(engine, int(sent.pop("rounds")))
    for name, value in standing.params.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-9, atol=1e-12)
