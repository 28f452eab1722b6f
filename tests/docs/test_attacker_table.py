"""The page of what attacks whom holds the table in the code, and what it chooses for every defence and kind of update.

After a change of the table, `python -m tests.docs.test_attacker_table` writes the page again.
"""

from pathlib import Path

import pytest

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Known
from gradveil.audit.attack_selection import pairs
from gradveil.audit.attackers.attacker_table import RULES, aimed_by, as_markdown
from gradveil.audit.attackers.run_attackers import decide, widened
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.defences import DEFENCES
from tests.laws.cases import LAWS

PAGE = Path("docs/reference/what-attacks-what.md")
MARKS = "<!-- rules -->", "<!-- defences -->", "<!-- updates -->"
UPDATES = {
    "`mlp`, one image": {"model": {"name": "mlp", "options": {"width": 32}}},
    "`mlp`, 8 images": {"model": {"name": "mlp", "options": {"width": 32}}, "client": [{"batch": 8}]},
    "`scheliga-cnn`, one image": {"model": {"name": "scheliga-cnn"}},
    "`scheliga-cnn`, 8 images": {"model": {"name": "scheliga-cnn"}, "client": [{"batch": 8}]},
    "`vit`, one image": {"model": {"name": "vit", "options": {"width": 64}}},
    "`resnet18`, one image": {"model": {"name": "resnet18", "options": {"width": 4}}},
}
SOME = ("none", "gaussian(1e-3)", "prune(0.9)", "quantise", "mixup", "dropout", "precode", "dcs")
"""A defence of each kind that the rows for updates tell apart, and of several slots."""


def chosen(update):
    """Say what comes to the attackers of these defences for such updates."""
    raw = {
        "name": "r",
        "data": {"name": "faces", "size": 32, "public": 12},
        "target_clients": 1,
        "attacks": ["adaptive"],
    }
    experiment = open_experiment(resolve(raw | {"defences": [*SOME]} | update), checked=False)
    experiment, _, _ = widened(experiment, decide(experiment))
    return {
        defence: [
            attack
            for attack, against in pairs(experiment.config)
            if against == defence and attack not in aimed_by("curious", defence)
            if (0, defence, attack) not in experiment.unfit
        ]
        for defence in SOME
    }


def written():
    """Return the three tables of the page."""
    named = "\n".join(
        f"| `{name}` | {', '.join(entry.traits) or '–'} | {_listed(aimed_by('curious', entry))} "
        f"| {len(aimed_by('malicious', entry))} |"
        for name, entry in DEFENCES.items()
    )
    by_update = "\n".join(
        f"| {update} | {', '.join(f'`{name}`' for name in defences)} | {attacks} |"
        for update, settings in UPDATES.items()
        for attacks, defences in _alike(chosen(settings))
    )
    return (
        "\n".join(as_markdown()),
        f"| defence | what it does | attackers | malicious servers |\n|---|---|---|---|\n{named}",
        f"| update | defence | attackers too |\n|---|---|---|\n{by_update}",
    )


def _alike(by_defence):
    """Group the defences that meet the same attackers."""
    groups = {}
    for defence, attacks in by_defence.items():
        groups.setdefault(_listed(attacks), []).append(defence)
    return groups.items()


def _listed(attacks):
    return ", ".join(f"`{text}`" for text in attacks) or "–"


@pytest.fixture(scope="module")
def tables():
    return written()


@pytest.mark.parametrize("index", range(len(MARKS)))
def test_page_holds_what_the_table_chooses(index, tables):
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(f"{MARKS[index]}\n\n")[1].startswith(f"{tables[index]}\n"), "write it: see the top of this file"


def test_every_row_that_looks_at_defences_has_one_that_it_is_for():
    traits = {trait for entry in DEFENCES.values() for trait in entry.traits}
    assert {rule.defence for rule in RULES} - {None, "anything", "changes updates", "is unknown"} == traits


@pytest.mark.parametrize("name", DEFENCES)
def test_every_setting_of_a_defence_meets_an_attack_that_knows_it(name):
    for text in LAWS[name].texts:
        knowing = [make_attack(attack) for attack in aimed_by("curious", text, LAWS[name].of)]
        told = [{key for key, how in a.knowledge.items() if isinstance(how, Known)} - {"public"} for a in knowing]
        assert any(a.simulated_client == "full" and not some for a, some in zip(knowing, told, strict=True)), text


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for mark, table in zip(MARKS, written(), strict=True):
        before, _, after = page.partition(f"{mark}\n")
        after = after.lstrip("\n")
        rest = after.partition("\n\n")[2] if after.startswith("|") else after
        page = f"{before}{mark}\n\n{table}\n\n{rest}"
    PAGE.write_text(page.rstrip("\n") + "\n", encoding="utf-8")
