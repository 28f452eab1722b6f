"""The source and the tests keep every rule, and every rule catches what it forbids."""

import pytest

from tests.architecture.rules import SOURCE_RULES, TEST_RULES, imports_point_left
from tests.architecture.source import SRC, TESTS, Source, read

RULES = SOURCE_RULES | TEST_RULES
BODY = '"""Module."""\n'
LONG = "\n".join(["    x = 1"] * 61)

BAD = {
    "imports_point_left": [
        ("gradveil.core.noise", "from gradveil.nn import models"),
        ("gradveil.core.noise", "import gradveil.client"),
        ("gradveil.attacks.inversion.distances", "from gradveil.defences.dp import Clip"),
        ("gradveil.attacks.inversion.distances", "from gradveil import defences"),
        ("gradveil.attacks.active.craft", "from ...defences import clip"),
        ("gradveil.attacks.inversion.distances", "def f():\n    import gradveil.defences.pruning"),
        ("gradveil.attacks.inversion.distances", "import importlib\nimportlib.import_module('gradveil.defences')"),
        ("gradveil.theory.bounds", "from ..attacks import optimise"),
        ("gradveil.integrations.flower", "from gradveil.audit import run"),
        ("gradveil.report.page", "from gradveil.bench import tables"),
        ("gradveil.audit.audit_run", "from gradveil import __version__"),
        ("gradveil.helpers", "import torch"),
    ],
    "optional_imports_are_lazy": [
        ("gradveil.data.hub", "import datasets"),
        ("gradveil.metrics.image_similarity", "from lpips import LPIPS"),
    ],
    "files_are_short": [("gradveil.core.noise", "x = 1\n" * 701)],
    "draws_name_their_generator": [
        ("gradveil.core.noise", "import torch\ntorch.randn(2)"),
        ("gradveil.core.noise", "import torch as t\nt.randperm(3, device='cpu')"),
        ("gradveil.core.noise", "from torch import bernoulli as b\nb(p)"),
        ("gradveil.core.noise", "import torch\ntorch.empty(3).normal_()"),
        ("gradveil.core.noise", "from torch import nn\nnn.init.uniform_(w)"),
        ("gradveil.core.noise", "from torch.nn import functional as F\nF.dropout(x, generator=g)"),
    ],
    "no_global_random_state": [
        ("gradveil.core.noise", "import torch\ntorch.manual_seed(0)"),
        ("gradveil.core.noise", "from torch.cuda import manual_seed_all\nmanual_seed_all(0)"),
        ("gradveil.core.noise", "import numpy as np\nnp.random.rand(3)"),
        ("gradveil.core.noise", "from numpy.random import shuffle\nshuffle(x)"),
        ("gradveil.core.noise", "import numpy as np\nnp.random.default_rng()"),
        ("gradveil.core.noise", "import random"),
        ("gradveil.core.noise", "from random import choice"),
        ("gradveil.core.noise", "from torch.distributions import Normal"),
    ],
    "no_pickle": [
        ("gradveil.core.noise", "import pickle"),
        ("gradveil.core.noise", "from joblib import dump"),
        ("gradveil.core.noise", "import torch\ntorch.save(x, p)"),
        ("gradveil.core.noise", "from torch import load\nload(p)"),
        ("gradveil.core.noise", "import numpy\nnumpy.load(p, allow_pickle=True)"),
    ],
    "no_broad_except": [
        ("gradveil.core.noise", "try:\n    f()\nexcept:\n    pass"),
        ("gradveil.core.noise", "try:\n    f()\nexcept Exception as e:\n    pass"),
        ("gradveil.core.noise", "try:\n    f()\nexcept (ValueError, BaseException):\n    pass"),
        ("gradveil.core.noise", "from .errors import FOREIGN\ntry:\n    f()\nexcept FOREIGN:\n    pass"),
    ],
    "kinds_are_told_apart_in_spaces": [
        ("gradveil.report.page", "if row.words.kind == 'images':\n    f()"),
        ("gradveil.report.page", "from gradveil.core.space import ExampleWords\na = words == ExampleWords()"),
        ("gradveil.report.page", "a = kind != ExampleWords.kind"),
    ],
    "public_names_are_documented": [
        ("gradveil.core.noise", "def f(): ..."),
        ("gradveil.core.noise", "class A: ..."),
        ("gradveil.core.noise", 'class A:\n    """A."""\n    def f(self): ...'),
        ("gradveil.core.noise", 'class A:\n    """A."""\n    @property\n    def f(self): ...'),
    ],
    "public_constants_are_documented": [
        ("gradveil.core.noise", "LAWS = {}"),
        ("gradveil.attacks.inversion.optimisers", "A, B = 1, 2\nC = 3"),
        ("gradveil.nn.normalisation", "KINDS: tuple[str, ...] = ()\nf()"),
    ],
    "tests_can_fail": [
        ("test_x", "def test_a():\n    f()"),
        ("test_x", "def test_a():\n    assert True"),
        ("test_x", "def test_a():\n    assert x\ndef test_b():\n    help()\ndef help():\n    return 1"),
    ],
}

GOOD = {
    "imports_point_left": [
        ("gradveil.attacks.inversion.distances", "from gradveil.core import noise\nfrom . import prior\nimport torch"),
        ("gradveil.cli", "from gradveil import __version__, audit, report"),
        ("gradveil.integrations.flower", "from gradveil.wire.codec import encode"),
    ],
    "optional_imports_are_lazy": [
        ("gradveil.data.hub", "def load():\n    import datasets"),
        ("gradveil.integrations.flower", "import flwr"),
    ],
    "files_are_short": [("gradveil.core.noise", "x = 1\n" * 700)],
    "draws_name_their_generator": [
        ("gradveil.core.noise", "import torch\ntorch.randn(2, generator=g)\nw.normal_(generator=g)\nnormal(3)"),
    ],
    "no_global_random_state": [
        (
            "gradveil.core.noise",
            "import numpy as np\nnp.random.default_rng(0)\nx: np.random.Generator\ng.manual_seed(0)",
        ),
    ],
    "no_pickle": [
        ("gradveil.core.noise", "import numpy\nnumpy.load(p, allow_pickle=False)\nimport json\njson.load(f)")
    ],
    "no_broad_except": [
        ("gradveil.core.noise", "try:\n    f()\nexcept (ValueError, OSError):\n    pass"),
        (
            "gradveil.audit.argument_checks",
            "from ..core.errors import FOREIGN\ntry:\n    f()\nexcept FOREIGN:\n    pass",
        ),
    ],
    "kinds_are_told_apart_in_spaces": [
        ("gradveil.core.space", "drawn = self.words.kind == 'images'"),
        ("gradveil.report.page", "if row.words.drawn and trial.kind == 'grid':\n    f(row.words.kind)"),
    ],
    "public_names_are_documented": [
        (
            "gradveil.core.noise",
            'def f():\n    """F."""\n    def inner(): ...\ndef _g(): ...\nclass _A:\n    def f(self): ...',
        ),
        (
            "gradveil.core.noise",
            'class A:\n    """A."""\n    def __len__(self): ...\n    @override\n    def f(self): ...',
        ),
    ],
    "public_constants_are_documented": [
        ("gradveil.core.noise", '_LAWS = {}\nKINDS = ()\n"""Kinds."""\nA, B = 1, 2\n"""Both."""\n__all__ = []'),
        ("gradveil.cli.check_command", "FOUND = 1"),
    ],
    "tests_can_fail": [
        ("test_x", "def test_a():\n    with pytest.raises(ValueError):\n        f()"),
        ("test_x", "def test_a():\n    torch.testing.assert_close(a, b)"),
        ("test_x", "def test_a():\n    same(1)\ndef same(x):\n    assert x == 1"),
    ],
}


def violations(rule: str, sources: list[Source]) -> str:
    return "\n".join(f"{source.module}:{wrong}" for source in sources for wrong in RULES[rule](source))


@pytest.mark.parametrize("rule", SOURCE_RULES)
def test_source_keeps_the_rule(rule: str) -> None:
    sources = read(SRC)
    assert len(sources) > 12
    assert violations(rule, sources) == ""


@pytest.mark.parametrize("rule", TEST_RULES)
def test_tests_keep_the_rule(rule: str) -> None:
    sources = read(TESTS)
    assert len(sources) > 2
    assert violations(rule, sources) == ""


@pytest.mark.parametrize("rule", RULES)
def test_rule_catches_what_it_forbids(rule: str) -> None:
    for module, snippet in BAD[rule]:
        assert RULES[rule](Source(module, BODY + snippet)), snippet


@pytest.mark.parametrize("rule", RULES)
def test_rule_allows_what_is_right(rule: str) -> None:
    for module, snippet in GOOD[rule]:
        source = Source(module, snippet if rule == "files_are_short" else BODY + snippet)
        assert RULES[rule](source) == [], snippet


def test_missing_module_docstring_is_caught() -> None:
    assert RULES["public_names_are_documented"](Source("gradveil.core.noise", "x = 1"))


def test_relative_imports_of_a_package_are_resolved_from_itself() -> None:
    inside = Source("gradveil.attacks", "from .optimise import invert\nfrom ..defences import clip", is_package=True)
    assert [name for _, name in inside.imports] == ["gradveil.attacks.optimise.invert", "gradveil.defences.clip"]
    assert len(imports_point_left(inside)) == 1
