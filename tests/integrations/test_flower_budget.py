"""Privacy spent is counted on the client's disk like in the engine, never too little, up to a limit."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.cli.app import run as command_line
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.defences.guarantees import NOTHING
from gradveil.federated.privacy_ledger import guarantee, place
from gradveil.integrations.flower import Protected, answer, protect
from gradveil.integrations.flower.flower_records import record, tensors
from gradveil.theory.accounting import Participation, composed, epsilon
from tests.federated.small_federations import federation
from tests.integrations.flower_in_process import BATCH, Loopback, asked, bits, client, context, helping, ledger
from tests.integrations.test_flower_training import idles

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

DP = "dp(clip=1, sigma=16)"
USER = "user-dp(clip=1, sigma=32)"
ROOT = Path(__file__).parents[2]


def counted(folder, training="lungs", node=0):
    return json.loads(place(folder, f"partition-{node}", training).read_text())


def logged(caplog):
    """What the log ledger last of privacy."""
    return [message for message in caplog.messages if message.startswith(("privacy", NOTHING))][-1]


@pytest.mark.parametrize(
    ("text", "local"),
    [
        (DP, Local(batch=5, lr=0.1, epochs=2)),
        (DP, Local(batch=5, lr=0.1, steps=3, sampling="poisson")),
        (DP, None),
        (USER, Local(batch=5, lr=0.1, epochs=1)),
        (f"{DP} + {USER}", Local(batch=5, lr=0.1, steps=5)),
    ],
)
def test_client_logs_the_guarantee_that_the_engine_reports(text, local, tmp_path, caplog):
    """One client, so that the worst of all is this one; the sentences have the epsilons and what they assume."""
    engine = federation(text, clients=1, local=local, validation=False)
    ledger(tmp_path)
    grid = Loopback(helping(engine.client, tmp_path, training="lungs"), 1)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    with caplog.at_level(logging.INFO, "flwr"):
        Protected(strategy).start(grid, record(engine.client.params()), num_rounds=3)
    assert not grid.errors
    assert logged(caplog) == f"privacy spent in 3 rounds: {guarantee(engine, 3, 1e-5)['guarantee']}"
    assert "epsilon" in logged(caplog)


def test_defence_without_guarantee_counts_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        for number, text in enumerate(("topk(0.5, feedback=true)", "gaussian(0.1)", "clip(1) + laplace(0.1)")):
            own = client(text)
            answer(asked(1, own), context(run=number), own, BATCH, folder=tmp_path)
            protect(text, folder=tmp_path / "mod")(asked(1, own), context(run=number), idles)
    assert not [message for message in caplog.messages if "privacy" in message]


def test_without_a_ledger_each_round_is_accounted_for_alone_and_nothing_is_kept(tmp_path, caplog):
    """No count lies in a folder of a run, which people remove; a limit takes a ledger, and says how to make it."""
    own = client(USER)
    with caplog.at_level(logging.INFO, "flwr"):
        for number, training in ((1, None), (2, None), (3, "lungs")):
            answer(asked(number, own), context(), own, BATCH, folder=tmp_path, training=training)
            assert re.match(
                r"privacy of this round alone: epsilon .* in the one sum.*; nothing is kept", logged(caplog)
            )
    assert not list(tmp_path.rglob("*privacy*"))
    assert not (tmp_path / "_ledgers").exists()
    command = f"gradveil ledger create --identity partition-0 --training brains --folder {tmp_path}"
    with pytest.raises(GradveilError, match=f"has no ledger to be counted in: .* -> create one, .*: {command}"):
        spending(tmp_path, 4, bound=8, training="brains")
    with pytest.raises(GradveilError, match="has no ledger"):
        protect(USER, folder=tmp_path, training="brains", epsilon=8)(asked(4, own), context(run=2), idles)
    assert command_line(command.split()[1:]) == 0
    spending(tmp_path, 4, run=2, bound=8, training="brains")
    assert counted(tmp_path, "brains")["rounds"] == 1


def test_fixed_key_has_no_guarantee_and_counts_nothing(tmp_path, caplog):
    own, key = client(USER), Key(0)
    with caplog.at_level(logging.INFO, "flwr"):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path, key=key)
        assert logged(caplog) == f"{NOTHING}: the noise comes from a fixed key"
        protect(USER, folder=tmp_path / "mod", key=key)(asked(1, own), context(), idles)
        assert logged(caplog) == f"{NOTHING}: the noise comes from a fixed key"
    assert "epsilon" not in caplog.text

    def answered(**given):
        answer(asked(2, own), context(), own, BATCH, **given)

    for ask in (partial(protect, USER), answered):
        with pytest.raises(GradveilError, match=r"epsilon: .*fixed key.* -> leave the key"):
            ask(folder=tmp_path, training="lungs", epsilon=8, key=key)
    ledger(tmp_path)
    spending(tmp_path, 1)
    with pytest.raises(GradveilError, match="key: puts noise that others can draw on a training whose privacy is"):
        spending(tmp_path, 2, key=key)
    assert counted(tmp_path)["rounds"] == 1


def test_repeated_reply_spends_nothing_and_a_lost_one_is_counted(tmp_path):
    ledger(tmp_path)
    for number, rounds in ((1, 1), (1, 1), (2, 2), (7, 3)):
        spending(tmp_path, number)
        assert counted(tmp_path)["rounds"] == rounds
    (spent,) = counted(tmp_path)["spent"]
    assert spent["times"] == spent["sums"] == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
from gradveil.integrations.flower import answer, client_memory
from tests.integrations.flower_in_process import BATCH, asked, client, context
TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 77, 1, 1
own, folder = client("user-dp(clip=1, sigma=32)"), Path(sys.argv[1])
answer(asked(1, own), context(), own, BATCH, folder=folder, training="lungs")
client_memory.save_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
answer(asked(2, own), context(), own, BATCH, folder=folder, training="lungs")
"""


def test_round_of_a_killed_client_is_counted(tmp_path):
    """Killed while its second round is written: the attempt counts, and so does the one after it."""
    ledger(tmp_path)
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=surroundings, check=False)
    assert done.returncode == -signal.SIGKILL
    assert counted(tmp_path)["rounds"] == 2
    own = client(USER)
    answer(asked(2, own), context(), own, BATCH, folder=tmp_path, training="lungs")
    assert counted(tmp_path)["rounds"] == 3


def test_only_a_named_training_keeps_its_count_across_runs(tmp_path):
    own = client(USER)
    ledger(tmp_path)
    for number in (1, 2):
        answer(asked(1, own), context(run=number), own, BATCH, folder=tmp_path, training="lungs")
        answer(asked(1, own), context(run=number + 10), own, BATCH, folder=tmp_path)
    assert counted(tmp_path)["rounds"] == 2
    (tmp_path / "partition-0" / "training-lungs").unlink()  # an empty state is not an empty budget
    answer(asked(1, own), context(run=3), own, BATCH, folder=tmp_path, training="lungs")
    assert counted(tmp_path)["rounds"] == 3


def spending(folder, number, run=1, bound=None, own=None, **settings):
    own = own or client(USER)
    limit = {"folder": folder, "training": "lungs", "epsilon": bound, **settings}
    return answer(asked(number, own), context(run=run), own, BATCH, **limit)


def test_round_beyond_the_limit_is_refused_and_changes_no_file(tmp_path):
    two = epsilon(32.0, Participation(2, sampling="shuffled", at_most=2))
    ledger(tmp_path)
    spending(tmp_path, 1, bound=two)
    last = spending(tmp_path, 1, run=2, bound=two)
    before = counted(tmp_path)
    files = sorted(str(file) for file in tmp_path.rglob("*"))
    what = rf"would be [0-9.]+ for each client \(2 rounds answered\), above {two:g}"
    with pytest.raises(GradveilError, match=what):
        spending(tmp_path, 2, run=2, bound=two)
    assert bits(spending(tmp_path, 1, run=2, bound=two)) == bits(last)  # what was sent is sent again
    with pytest.raises(GradveilError, match=what):
        spending(tmp_path, 1, run=3, bound=two)
    assert counted(tmp_path) == before
    assert [file for file in files if not Path(file).exists()] == []
    spending(tmp_path, 2, run=3, bound=2 * two)


def test_mod_checks_the_limit_before_the_app_trains(tmp_path):
    own, calls = client("none"), []

    def app(message, given):
        calls.append(message)
        return idles(message, given)

    one = epsilon(32.0, Participation(1, sampling="shuffled", at_most=1))
    ledger(tmp_path)
    mod = protect(USER, folder=tmp_path, training="lungs", epsilon=one)
    first = mod(asked(1, own), context(), app)
    with pytest.raises(GradveilError, match="1 round answered"):
        mod(asked(2, own), context(), app)
    assert bits(mod(asked(1, own), context(), app)) == bits(first)
    assert len(calls) == 1
    assert counted(tmp_path)["rounds"] == 1


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"epsilon": 8}, "start again with every run"),
        ({"epsilon": 0, "training": "lungs"}, r"privacy\.epsilon"),
        ({"epsilon": 8, "delta": 1.0, "training": "lungs"}, r"privacy\.delta"),
        ({"epsilon": 8, "training": "lungs", "text": "topk(0.1)"}, f"has no epsilon \\({NOTHING}\\)"),
        ({"epsilon": 8, "training": "lungs", "text": "clip(1) + laplace(0.1)"}, "has no epsilon"),
    ],
)
def test_limit_without_guarantee_or_named_training_is_refused(settings, what, tmp_path):
    text = settings.pop("text", USER)
    with pytest.raises(GradveilError, match=what):
        protect(text, folder=tmp_path, **settings)
    own = client(text)
    with pytest.raises(GradveilError, match=what):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path, **settings)
    assert not list(tmp_path.rglob("answer-*"))


def statistics(message, _context):
    """An app that trains a model with running statistics."""
    received = tensors(message.content["arrays"])
    arrays = record({name: value + 0.1 for name, value in received.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})}), reply_to=message)


def test_undefended_statistics_void_the_guarantee_for_all_later_rounds(tmp_path, caplog):
    own = Client(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))

    def ask(number, way, bound=None):
        message = asked(number, own)
        values = tensors(message.content["arrays"]) | {"1.running_mean": torch.zeros(3), "1.running_var": torch.ones(3)}
        message.content["arrays"] = record(values)
        settings = {"folder": tmp_path, "training": "lungs", "guard": "ignore", "epsilon": bound}
        return protect(USER, statistics=way, **settings)(message, context(), statistics)

    ledger(tmp_path)
    with caplog.at_level(logging.INFO, "flwr"):
        ask(1, "keep")
        assert "epsilon" in logged(caplog)
        with pytest.raises(GradveilError, match=r"has no epsilon .*running statistics are sent without a defence"):
            ask(2, "send", 100.0)
        for number, way in ((2, "send"), (3, "keep")):
            ask(number, way)
            assert f"{NOTHING} of each client" in logged(caplog)
            assert "epsilon" not in logged(caplog)
    with pytest.raises(GradveilError, match="would be inf for each client"):
        ask(4, "keep", 100.0)


def test_rounds_with_different_sampling_rates_add_up(tmp_path, caplog):
    def ask(number, **local):
        own = client(DP, local=Local(lr=0.1, **local))
        return answer(asked(number, own), context(), own, BATCH, folder=tmp_path, training="lungs")

    ledger(tmp_path)
    with caplog.at_level(logging.INFO, "flwr"):
        ask(1, batch=1, steps=2, sampling="poisson")
        ask(2, batch=2, steps=3, sampling="poisson")
    value = composed([(16.0, Participation(2, rate=1 / 3)), (16.0, Participation(3, rate=2 / 3))])
    assert f"epsilon {value:.4g} at delta 1e-05 of each example" in logged(caplog)
    assert max(epsilon(16.0, Participation(2, rate=1 / 3)), epsilon(16.0, Participation(3, rate=2 / 3))) < value
    with pytest.raises(GradveilError, match="counts sums of poisson batches, and this round's are shuffled"):
        ask(3, batch=1, steps=1)
    assert counted(tmp_path)["rounds"] == 2


def test_missing_or_damaged_ledger_is_not_taken_for_zero(tmp_path):
    file = ledger(tmp_path)
    empty = file.read_text()
    for number in (1, 2):
        spending(tmp_path, number, bound=8)
    counts = json.loads(file.read_text())
    (spent,) = counts["spent"]
    bad = [{**spent, "multiplier": "32"}, {**spent, "times": 0}, {**spent, "unit": "day"}, {**spent, "mechanism": 1}]
    forms = [{**counts, "version": 1}, {**counts, "rounds": 0}, {**counts, "spent": []}, [], "{"]
    forms += [{**counts, "spent": [one]} for one in bad]
    for number, run in ((3, 1), (1, 2)):  # in the run that has a state, and in one that continues it
        for form in forms:
            file.write_text(form if isinstance(form, str) else json.dumps(form))
            with pytest.raises(GradveilError, match=r"lungs: (is|counts other)"):
                spending(tmp_path, number, run)
    file.write_text(empty)  # a new one, where the old one was lost
    for number, run in ((1, 2), (1, 3)):
        with pytest.raises(GradveilError, match=r"lungs: counts no round, but rounds have been answered"):
            spending(tmp_path, number, run)
    file.unlink()
    with pytest.raises(GradveilError, match="has no ledger to be counted in"):
        spending(tmp_path, 1, 3, bound=8)
    file.write_text(json.dumps(counts))
    spending(tmp_path, 2, 3)
    assert counted(tmp_path)["rounds"] == 3
