"""The table of attackers says what the attacks themselves say."""

import re
from pathlib import Path

import pytest

from gradveil.attacks.attack_catalogue import ATTACKS
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import Known, Optimise
from gradveil.audit.attack_check import STATES
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.budgets import restarts_worth
from gradveil.report.plots import RISING

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference/attacks.md").read_text("utf-8")
VERDICTS = (DOCS / "reference/verdicts.md").read_text("utf-8")
ADAPTIVE = (DOCS / "explanation/adaptive-attacks.md").read_text("utf-8")
ASSUMED = PAGE.partition("## Assumptions")[2].partition("\n## ")[0].splitlines()
LINES = [[part.strip() for part in line.strip("|").split("|")] for line in ASSUMED if line.startswith("| `")]
TABLE = {line[0].strip("`"): line[1:] for line in LINES}


def test_every_attack_has_its_line():
    assert set(TABLE) == set(ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
def test_simulated_client_grants_and_what_is_optimised(name):
    attack = ATTACKS[name].make()
    believes, told, optimised, *_ = TABLE[name]
    assert believes == {"naive": "undefended", "full": "defended"}[attack.simulated_client]
    secret = [pattern for pattern, how in attack.knowledge.items() if isinstance(how, Known) and pattern != "public"]
    assert told.startswith("**") is bool(secret)
    assert ("public" in attack.knowledge) is ("public images" in told or "public texts" in told)
    searched = any(isinstance(how, Optimise) for how in attack.knowledge.values())
    searched = searched or getattr(attack, "labels", None) == "joint"
    assert bool(optimised and not optimised.startswith("nothing")) is searched


def test_the_words_of_the_report_are_explained():
    assert all(f"**{label}**" in VERDICTS for label, _ in STATES.values())
    assert all(f"**{kind}**" in ADAPTIVE for kind in ATTACKERS if kind != "undefended")


def test_numbers_of_the_page():
    assert re.search(rf"more than\s+{RISING} mean SSIM|more\s+than {RISING} mean SSIM", ADAPTIVE)
    halved = Inversion("a", restarts=8, descent=Descent(halving=True))
    assert restarts_worth(halved) == 2.5
    assert re.search(r"of eight after 1/8, 1/4 and 1/2 .* two and a half", PAGE, re.DOTALL)
