"""Defences as text: what is read, how it is named, and every mistake with its place."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import GradveilError, Problem
from gradveil.core.settings import REQUIRED, literal
from gradveil.defences import DEFENCES, NONE, Clip, Defence, Dual, Feedback, Gaussian, Magnitude, parse
from tests.laws.cases import TEXTS

CANONICAL = {
    "none": "none",
    "dp": "dp",
    " dp ( clip = 20.0 ,sigma=1e-4 ) ": "dp(sigma=0.0001)",
    "DP(10, .5, mean)": "dp(clip=10, sigma=0.5, on=mean)",
    "dp() + none + cvb": "dp + cvb",
    "dropout(0.3)": "dropout(p=0.3)",
    'dropout(where="a b")': 'dropout(where="a b")',
    "dropout(where='x.0')": 'dropout(where="x.0")',
    "clip_example(inf)": "clip-example(norm=inf)",
    "prune(0.99, global)": "prune(ratio=0.99, scope=global)",
    "prune(scope=layer, ratio=5e-1, feedback=True)": "prune(ratio=0.5, feedback=true)",
    "cvb(kernel=none, kl=published_code)": "cvb(kl=published_code)",
    """dropout(where='a"b')""": """dropout(where='a"b')""",
    'cvb(position="True")': 'cvb(position="True")',
    "dgp(0.05,0.75)+dgp": "dgp + dgp",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_parse_name_is_the_canonical_text(text: str):
    defence = parse(text)
    assert defence.name == CANONICAL[text]


@pytest.mark.parametrize("text", [*CANONICAL, *TEXTS])
def test_parse_canonical_text_round_trips(text: str):
    defence = parse(text)
    assert parse(defence.name) == defence


def test_parse_parts_match_the_text():
    assert parse("none") == NONE
    assert dict(parse("dp(clip=2, sigma=0.5)").step.stages) == {"clip": Clip(2, True), "noise": Gaussian(1.0, "sum", 2)}
    assert dict(parse("topk(keep=0.9)").send.stages) == {"prune": Magnitude(0.1)}
    assert dict(parse("dgp").send.stages) == {"prune": Feedback(Dual(0.05, 0.75))}


ONE = {
    "": (1, "expected the name of a defence", "choose from: none, clip"),
    "dp +": (5, "expected the name of a defence", "choose from"),
    "3": (1, "not '3'", "choose from"),
    "@": (1, "not '@'", "choose from"),
    "purne(0.5)": (1, "unknown defence 'purne'", "did you mean 'prune'?"),
    "zzzzzz": (1, "unknown defence 'zzzzzz'", "All are listed by `gradveil list defences`"),
    "dp + drop-out": (6, "unknown defence 'drop-out'", "did you mean 'dropout' or 'token-dropout'?"),
    "dp(": (3, "never closed", "add ')' after '('"),
    "dp(clip=1 + cvb": (3, "never closed", "add ')' after '1'"),
    "dp)": (3, "unexpected ')'", "parentheses"),
    "dp 3": (4, "unexpected '3'", "parentheses"),
    "dp(1)(2)": (6, "unexpected '(' after ')'", "join defences by '+'"),
    "dp(1 2)": (6, "unexpected '2'", "commas"),
    "dp(clip=)": (9, "expected a value, not ')'", "name=value"),
    "dp(clip=": (8, "expected a value, not '='", "name=value"),
    "gaussian(1e-4x)": (10, "expected a value, not '1e-4x'", "name=value"),
    "dp(clp=20)": (
        4,
        "unknown argument 'clp'",
        "did you mean 'clip'? dp takes clip (a number above 0 or inf; default 20)",
    ),
    "none(1)": (6, "one value too many", "none takes no arguments"),
    "dp(1, 2, sum, 4)": (15, "one value too many", "sigma (a number of at least 0; default 0.001)"),
    "dp(sigma=1, 3)": (13, "without a name", "name=value"),
    "prune(0.5, ratio=0.4)": (12, "'ratio' is given twice", "keep one"),
    "prune": (1, "'prune' needs 'ratio'", "a number in [0, 1): prune(ratio=…)"),
    "prune(1)": (7, "ratio is 1", "give a number in [0, 1)"),
    "prune(ratio=true)": (13, "ratio is True", "give a number in [0, 1)"),
    "prune(ratio=nan)": (13, "ratio is 'nan'", "give a number in [0, 1)"),
    "prune(0.5, column)": (12, "scope is 'column'", "one of: layer, global"),
    "prune(0.5, feedback=1)": (21, "feedback is 1", "true or false"),
    "clip(0)": (6, "norm is 0", "give a number above 0 or inf"),
    "clip(-1)": (6, "norm is -1", "above 0"),
    "gaussian(std=inf)": (14, "std is inf", "give a number of at least 0"),
    "gaussian(std=1e999)": (14, "std is inf", "give a number of at least 0"),
    "laplace(-inf)": (9, "scale is -inf", "give a number of at least 0"),
    "topk(0)": (6, "keep is 0", "give a number in [1e-15, 1]"),
    "clip(1) + topk(feedback=true, keep=1e-20)": (36, "keep is 1e-20", "give a number in [1e-15, 1]"),
    "dgc(keep=1e-20)": (10, "keep is 1e-20", "give a number in [1e-15, 1]"),
    "precode(k=2.5)": (11, "k is 2.5", "a whole number of at least 1"),
    "cvb(kernel=4)": (12, "kernel is 4", "an odd number of at least 1, or none"),
    'cvb(position="")': (14, "position is ''", "the path of a module"),
    "dgp(0.5, bottom=0.5)": (1, "top + bottom is 1.0", "sum is below 1"),
    "dp(clip=inf)": (1, "is infinite", "give a finite norm"),
    f"prune({'1' * 400})": (7, "ratio is inf", "give a number in [0, 1)"),
    f"precode(k={'9' * 5000})": (11, "k is inf", "a whole number of at least 1"),
}


@pytest.mark.parametrize("text", ONE)
def test_parse_error_marks_the_character(text: str):
    position, evidence, remedy = ONE[text]
    with pytest.raises(GradveilError) as caught:
        parse(text)
    (problem,) = caught.value.problems
    assert problem.where == f"defence, character {position}"
    assert evidence in problem.what
    assert remedy in problem.remedy
    _, line, caret, *_ = problem.what.split("\n")
    assert line == f"    {text}"
    assert caret.index("^") == 4 + position - 1


def test_parse_reports_every_mistake():
    with pytest.raises(GradveilError) as caught:
        parse("dp(clp=1, sigma=-1) + purne(0.5) + prune + dropout(p=2, q=1) + ")
    positions = [int(problem.where.split()[-1]) for problem in caught.value.problems]
    assert positions == [4, 17, 23, 36, 54, 57, 63]


PIECES = [
    "dp",
    "prune",
    "clip",
    "ratio",
    "=",
    "(",
    ")",
    ",",
    "+",
    " ",
    "0.5",
    "-1",
    "1e-3",
    "inf",
    "none",
    '"',
    "é",
    "\n",
]


def read(text: str) -> tuple[Defence | None, list[Problem]]:
    try:
        return parse(text), []
    except GradveilError as error:
        return None, list(error.problems)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_parse_any_text_returns_a_defence_or_raises(text: str):
    defence, result = read(text)
    assert (defence is None) == bool(result)
    assert all(1 <= int(problem.where.split()[-1]) <= len(text) + 1 for problem in result)
    assert defence is None or parse(defence.name) == defence


@given(st.floats(0, 0.999999))
def test_every_share_survives_being_written(ratio: float):
    assert parse(f"prune(ratio={literal(ratio)})") == DEFENCES["prune"](ratio=ratio)


@pytest.mark.parametrize("name", DEFENCES)
def test_entry_is_complete(name: str):
    entry = DEFENCES[name]
    assert entry.name == name
    assert entry.description
    assert entry.guarantee
    assert entry.citation
    names = [argument.name for argument in entry.arguments if entry.feedback is None or argument.name != "feedback"]
    assert names == list(inspect.signature(entry.factory).parameters)
    for argument in entry.arguments:
        assert argument.help.endswith("."), f"{argument.name} has no help"
        assert argument.default is REQUIRED or argument.allowed.problems("x", argument.default) == []
        assert argument.name in entry.usage()


@pytest.mark.parametrize("text", [text for text in TEXTS if "+" not in text])
def test_entry_changes_the_slots_it_names(text: str):
    defence = parse(text)
    filled = tuple(slot for slot in ("model", "batch", "step", "send") if getattr(defence, slot))
    assert filled == DEFENCES[text.split("(")[0]].changes


def test_entry_refuses_every_wrong_argument_from_python():
    with pytest.raises(GradveilError) as caught:
        DEFENCES["prune"](scope="column", rate=1)
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == ["prune.rate", "prune.ratio", "prune.scope"]
    with pytest.raises(GradveilError, match=r"precode\.k: is 10"):
        DEFENCES["precode"](k=10**400)


@pytest.mark.parametrize(
    ("text", "setting", "value"), [("precode(k=1e1)", "k", 10), ("cvb(kernel=3.0, beta=1)", "kernel", 3)]
)
def test_whole_numbers_are_whole_however_they_are_written(text: str, setting: str, value: int):
    """A size of 10.0 would be refused by torch, in words of its own."""
    (surgery,) = parse(text).model
    assert repr(getattr(surgery, setting)) == repr(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("standin(optimiser=adagrad, beta2=0.9)", "standin.beta2: changes nothing: Adagrad averages nothing"),
        ("adgp(voters=7)", "adgp.voters: changes nothing"),
        ("instahide(least=0.5)", "instahide.least: changes nothing"),
        ("optimal-noise(0.1, batches=4)", "optimal-noise.batches: changes nothing"),
        ("optimal-prune(0.5, batches=4)", "optimal-prune.batches: changes nothing"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(text: str, message: str):
    with pytest.raises(GradveilError, match=message):
        parse(text)
    parse("standin(optimiser=adagrad, beta2=0.9, variant=published_code) + adgp(selection=vote, voters=7)")
