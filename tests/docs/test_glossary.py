"""The glossary has the words of `--explain`, with the same meaning."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit.attack_check import STATES
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.findings import definitions
from gradveil.audit.verdict import LEVELS

PAGE = (Path(__file__).parents[2] / "docs/reference/glossary.md").read_text("utf-8")
TERMS = {term.lower(): meaning for term, meaning in re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", PAGE, re.MULTILINE)}
UNDEFINED = {"scope", "threat model"}
"""What `--explain` says of one run, not of a word."""


def test_no_word_is_defined_twice():
    assert len(TERMS) == len(re.findall(r"^\| \*\*", PAGE, re.MULTILINE))


@pytest.mark.parametrize("words", [LEVELS, STATES], ids=["levels", "attack checks"])
def test_labels_of_verdicts_have_the_meaning_of_the_code(words):
    assert {label.lower(): TERMS.get(label.lower()) for label, _ in words.values()} == {
        label.lower(): meaning for label, meaning in words.values()
    }


def test_kinds_of_attackers_have_the_meaning_of_the_code():
    known = {kind: short for kind, (short, _) in ATTACKERS.items() if kind != "undefended"}
    assert {kind: TERMS[kind].startswith(short) for kind, short in known.items()} == dict.fromkeys(known, True)


def test_explain_defines_words_as_the_glossary_does():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4), nn.Sigmoid(), nn.Linear(4, 2))
    batch = torch.rand(2, 1, 16, 16), torch.tensor([0, 1])
    attacks = ["ig(iterations=1)", "wiig(iterations=1)"]
    result = gradveil.audit(model, batch, defences=["none", "gaussian(0.1)"], attacks=attacks, progress=False)
    lines = [line.removesuffix(".").partition(": ") for line in definitions(result.findings, result.config)]
    said = {term.rpartition(", ")[2].lower(): meaning for term, colon, meaning in lines if colon}
    assert {"recovered", "identifiable", "baseline", "risk", "naive", "informed", "distance"} <= set(said)
    assert [
        term for term, meaning in said.items() if term not in UNDEFINED and not TERMS[term].startswith(meaning)
    ] == []
