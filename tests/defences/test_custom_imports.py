"""Custom defences and attacks by import path: read like built-in ones, imported only with consent."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.audit.attack_selection import aimed_at
from gradveil.audit.run_directory import load_run
from gradveil.audit.run_file import read
from gradveil.cli.app import app
from gradveil.core.errors import GradveilError
from gradveil.defences import entries, parse

CODE = '''"""Defences and attacks of a user."""
from dataclasses import dataclass, field, replace
import torch
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.core.types import Stage, Transform
from gradveil.defences import parse

@dataclass(frozen=True)
class Shift(Transform):
    """Adds the same wave to every update."""
    size: float = 0.5
    drawn: bool = False
    stage = Stage.NOISE
    def apply(self, update, state, noise, context):
        wave = torch.rand_like if self.drawn else lambda v: torch.ones(v.shape)
        return {name: value + self.size * wave(value) for name, value in update.items()}, state

@dataclass(frozen=True)
class Each(Shift):
    per_example: bool = True

thin = parse("prune(0.9)")
def both(std=1.0, *, kind="gaussian"):
    """Noise, then pruning."""
    return parse(f"{kind}({std})") + thin
def surgery(module, generator):
    return module
def compress(update, state):
    return update
def search(observations, simulated_client, knowledge, key):
    return None
def scaled(sizes=torch.ones(3), std=1.0):
    return parse(f"gaussian({std * float(sizes.sum())})")
def three():
    return 3
def breaks(x):
    raise RuntimeError(f"no {x}")

quick = replace(make_attack("ig(iterations=3)"), name="quick")
def slow(lr, name="ours"):
    """Inversion with a step size."""
    return make_attack(f"ig(iterations=3, lr={lr})")
class Guess:
    """Sees nothing."""
    simulated_client = "naive"
    knowledge = {}
    def __init__(self, level=0.5):
        self.name, self.level = "guess", level
    def __call__(self, observations, simulated_client, knowledge, key, progress=None, plan=()):
        found = make_attack("ig(iterations=1, labels=restore)")(observations, simulated_client, knowledge, key)
        return replace(found, inputs=found.inputs * 0 + self.level)
print("imported")
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's module in the folder where the command runs."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def test_parse_import_path_works_like_a_name(mine):
    read_text = parse("mine:both( 2 , kind=laplace)+ mine:thin +dp + mine:Shift", own=True)
    assert read_text.name == "mine:both(std=2, kind=laplace) + mine:thin + dp + mine:Shift"
    assert parse(read_text.name, own=True) == read_text
    assert parse("mine:both(std=2, kind=laplace)", own=True).send == parse("laplace(2) + prune(0.9)").send
    assert parse("mine:both(1.0)", own=True).name == "mine:both"
    assert parse("mine:Each(size=2)", own=True).step is not None
    assert parse("mine:Shift(size=2)", own=True).send is not None


def test_parse_import_path_allows_any_default(mine):
    assert parse("mine:scaled(std=2)", own=True).name == "mine:scaled(std=2)"
    assert parse("mine:scaled", own=True).send == parse("gaussian(3)").send


def test_make_attack_accepts_an_import_path(mine):
    quick, slow, guess = (make_attack(t, own=True) for t in ("mine:quick(lr=2)", "mine:slow(0.5)", "mine:Guess"))
    assert (quick.name, quick.descent.stepper.lr, quick.descent.iterations) == ("mine:quick(lr=2)", 2, 3)
    assert (slow.name, slow.descent.stepper.lr) == ("mine:slow(lr=0.5)", 0.5)
    assert isinstance(quick, Inversion)
    assert (guess.name, guess.level) == ("mine:Guess", 0.5)


WRONG = {
    "mine:three": "returned int, not a defence",
    "mine:breaks": "needs 'x'",
    "mine:breaks(1)": "raised RuntimeError: no 1 -> it was called with x=1",
    "mine:bot": "did you mean 'both'?",
    "mine:both(sdt=1)": "did you mean 'std'? mine:both takes std (a number, a word or a text; default 1)",
    "nowhere:both": "there is no module 'nowhere'",
    "mine:sys": "has no 'sys'",
    "mine:torch": "'torch' is of type module",
    "mine:": "unknown defence 'mine'",
    "gausian(1)": "did you mean 'gaussian'?",
    "mine.py:thin": "'mine.py' is a file, and a module is named without '.py' -> write mine:thin",
    "mine:quick": "'quick' is of type Inversion",
    "mine:surgery": "replaces modules of the model -> wrap it in a defence",
    "mine:compress": "acts on an update -> write it as the apply of a class",
}


@pytest.mark.parametrize("text", WRONG)
def test_parse_invalid_import_path_raises(mine, text):
    with pytest.raises(GradveilError) as problem:
        parse(text, own=True)
    assert WRONG[text] in " -> ".join((problem.value.problems[0].what.split("\n")[0], problem.value.problems[0].remedy))
    assert problem.value.problems[0].where.startswith("defence, character")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine:three", "returned int, not an attack"),
        ("mine:thin", "'thin' is of type Defence"),
        ("mine:search", "attack mine:search: .* no name"),
    ],
)
def test_make_attack_of_a_non_attack_raises(mine, text, message):
    with pytest.raises(GradveilError, match=message):
        make_attack(text, own=True)


def test_records_never_import_custom_code(mine, capsys):
    """What records, reports and servers say is read, never imported."""
    for reads in (parse, entries, make_attack):
        with pytest.raises(GradveilError, match="is custom code"):
            reads("mine:both(std=2)")
    assert {*aimed_at("mine:both + dropout")} >= {"portfolio", "portfolio(undo_entries=true)", "learned", "dia"}
    assert "imported" not in capsys.readouterr().out
    assert "mine" not in sys.modules


def test_iterations_apply_to_a_custom_attack(mine):
    config = read("digits", {"attacks": ["mine:quick"], "iterations": 7}, ())
    assert config.iterations == 7
    with pytest.raises(GradveilError, match="no attack takes iterations"):
        read("digits", {"attacks": ["mine:slow(lr=1)"], "iterations": 7}, ())
    with pytest.raises(GradveilError, match="is the same as"):
        read("digits", {"attacks": ["mine:quick(iterations=7)", "mine:quick"], "iterations": 7}, ())


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


def test_check_reports_problems_of_a_custom_stage(mine):
    shared = output_of("check", "digits", "--defence", "mine:Shift")
    assert "send.Shift: adds the same noise to every client" in shared
    assert "No errors" in shared
    drawn = output_of("check", "digits", "--defence", "mine:Shift(drawn=true)")
    assert "send.Shift: apply returns different results" in drawn
    assert "draw nothing in apply" in drawn


def test_audit_with_custom_code_warns_after_a_change(mine):
    custom = ["--defence", "mine:both(std=0.001)", "--attack", "mine:quick", "--attack", "mine:Guess(level=0)"]
    custom += ["--no-control"]
    problem = output_of("audit", "digits", "--target-clients", "1", *custom, "--out", "run", "--workers", "1")
    assert "mine:both(std=0.001)" in problem, problem
    assert "has changed since" not in problem
    (mine / "mine.py").write_text(CODE + "# changed")
    again = output_of("audit", "digits", "--target-clients", "1", *custom, "--out", "run", "--workers", "1")
    assert "warning: module mine: has changed since this run computed 2 trials" in again
    recorded = {(trial.info["defence"], trial.info["attack"]) for trial in load_run("run").trials}
    assert recorded == {
        ("mine:both(std=0.001)", "mine:quick"),
        ("mine:both(std=0.001)", "mine:Guess(level=0)"),
    }
    sys.modules.pop("mine")
    Path("mine.py").unlink()
    assert "report.html" in output_of("report", "run")
    assert "mine" not in sys.modules


def test_train_with_custom_code_warns_after_a_change(mine):
    few = [
        f"--set={each}"
        for each in (
            "data.public=60",
            "data.gallery=30",
            "clients=3",
            "local.batch=8",
            "data.size=16",
            "model.name=lenet-zhu",
        )
    ]
    custom = ["train", "digits", *few, "--defence", "mine:both(std=0.001)", "--out", "run", "--workers", "1"]
    assert "has changed since" not in output_of(*custom, "--rounds", "1", "--seed", "0")
    (mine / "mine.py").write_text(CODE + "# changed")
    more = output_of(*custom, "--rounds", "2", "--seed", "0", "--seed", "1")
    assert "warning: module mine: has changed since this run computed 1 trial" in more
    again = output_of(*custom, "--rounds", "2", "--seed", "0", "--seed", "1")
    assert "has changed since this run computed 1 trial" in again, "the first round is older, the last is not"
    (mine / "mine.py").write_text(CODE)
    both_seeds = output_of(*custom, "--rounds", "2", "--seed", "0", "--seed", "1")
    assert "has changed since this run computed 1 trial" in both_seeds, "the other one"
    assert "has changed since" not in output_of(*custom, "--rounds", "1", "--seed", "0", "--fresh")
