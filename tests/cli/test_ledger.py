"""`gradveil ledger`: an owner makes the count of a client's privacy, and looks at it."""

import json
import stat

import pytest

from gradveil.cli.app import run
from gradveil.federated.privacy_ledger import Ledger, SpentNoise, keep, ledger_file
from gradveil.theory.accounting import Participation, epsilon

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")


def words(folder, verb="show", identity="hospital-a", training="lungs-2026"):
    return ["ledger", verb, "--identity", identity, "--training", training, "--folder", str(folder)]


def test_a_ledger_is_made_once_and_shown(tmp_path, capsys):
    assert run(words(tmp_path)) == 2
    assert "is missing" in capsys.readouterr().err
    assert run(words(tmp_path, "create")) == 0
    file = ledger_file(tmp_path, "hospital-a", "lungs-2026")
    assert str(file) in capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run(words(tmp_path)) == 0
    assert "0 rounds counted: nothing is spent" in capsys.readouterr().out

    client = SpentNoise(mechanism=0, unit="client", multiplier=8.0, sampling="shuffled", rate=1.0, sums=3, times=3)
    keep(file, Ledger(rounds=3, spent=[client]))
    assert run([*words(tmp_path), "--json", "--delta", "1e-6"]) == 0
    value = epsilon(8.0, Participation(3, delta=1e-6, sampling="shuffled", at_most=3))
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["delta"], found["epsilon"]) == (3, 1e-6, {"client": pytest.approx(value)})
    assert run(words(tmp_path)) == 0
    assert "3 rounds counted: epsilon" in capsys.readouterr().out

    assert run(words(tmp_path, "create")) == 2
    assert "is there already" in capsys.readouterr().err
    assert json.loads(file.read_text())["rounds"] == 3

    keep(file, Ledger(rounds=4, spent=[client, client.model_copy(update={"multiplier": 0.0, "sums": 1, "times": 1})]))
    assert run([*words(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == {}
    assert "no formal guarantee of each client" in found["guarantee"]


@pytest.mark.parametrize(("identity", "training"), [("../a", "b"), ("a", "b/c"), ("", "b"), ("_ledgers", "b")])
def test_a_name_leads_nowhere_else(identity, training, tmp_path, capsys):
    assert run(words(tmp_path / "in", "create", identity, training)) == 2
    assert "no name for a file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
