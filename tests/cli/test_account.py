"""`gradveil account`: from a noise multiplier to epsilon and back."""

import json

import pytest

from gradveil.cli.app import run

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

TRAINING = ["--rate", "0.01", "--steps", "1000", "--delta", "1e-5"]


def computed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run(["account", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_there_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--rate", "0.1", "--steps", "100", "--delta", "1e-5"]
    there = computed(capsys, "--sigma", "5", *training)
    assert there["epsilon"] == pytest.approx(0.7583, abs=1e-3)
    back = computed(capsys, "--epsilon", str(there["epsilon"]), *training)
    assert back["sigma"] == pytest.approx(5.0, rel=1e-3)
    assert back["epsilon"] <= there["epsilon"]
    rdp = computed(capsys, "--sigma", "1", *TRAINING, "--accountant", "rdp")
    assert rdp["epsilon"] == pytest.approx(2.1014, abs=1e-4)


def test_output_states_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["account", "--sigma", "1", *TRAINING]) == 0
    out = capsys.readouterr().out
    assert "epsilon 1.828 at delta 1e-05" in out
    assert "Assumed: each example is in each of 1,000 sums with probability 0.01, independently (Poisson)" in out
    assert run(["account", "--sigma", "0"]) == 0
    assert "epsilon infinite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "exactly one of --sigma and --epsilon"),
        (["--sigma", "1", "--epsilon", "3"], "exactly one of --sigma and --epsilon"),
        (["--sigma", "-1"], "--sigma: is -1.0 -> give a number of at least 0"),
        (["--sigma", "1", "--rate", "2", "--delta", "0", "--sampling", "fixed"], "3 problems"),
        (["--epsilon", "1e-9", "--delta", "1e-12", "--steps", "1000"], "--epsilon: 1e-09 would need"),
    ],
)
def test_wrong_use_exits_with_2(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["account", *words]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_a_limit_of_recovery_is_never_rounded_down(capsys):
    assert run(["account", "--sigma", "2", "--guess", "0.02"]) == 0
    assert "at most 0.0602 (guess 0.02)" in capsys.readouterr().out  # 0.06012
