"""`gradveil list`: every name with what it takes, found by its kind, its name or an argument."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gradveil.attacks.attack_catalogue import ATTACKS, KNOWN_BY_WORD, SETTINGS, GenerativeEntry, known_as, make_attack
from gradveil.attacks.inversion.optimisers import LBFGS
from gradveil.cli.app import run
from gradveil.cli.list_command import KINDS, TOPICS
from gradveil.cli.make_index import everything
from gradveil.core.settings import REQUIRED
from gradveil.defences import DEFENCES, parse


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["list", *words]) == 0
    return capsys.readouterr().out


def plain(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(shown(capsys, *words, "--json"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_listed_whole(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = plain(capsys, kind)
    assert rows == json.loads(json.dumps(everything()[kind]))
    assert all(row["name"] and row["description"] for row in rows)
    assert kind in ("metrics", "runs") or all(row["citation"] for row in rows)
    text = shown(capsys, kind)
    assert all(row["name"] in text for row in rows)


def test_everything_is_listed_with_the_way_to_switch_feedback_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(plain(capsys)) == list(KINDS)
    text = " ".join(shown(capsys).split())
    assert all(name in text for name in ("ig-scheliga", "dgp", "lenet-zhu", "patches", "faces"))
    assert TOPICS["feedback"] in text
    assert "topk(keep=…, feedback=true), dgp(feedback=false)" in text


def test_defences_are_listed_with_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    (dp,) = [row for row in plain(capsys, "defences") if row["name"] == "dp"]
    assert [argument.pop("help")[:5] for argument in dp["arguments"]] == ["Large", "Noise", "What "]
    assert dp["arguments"] == [
        {"name": "clip", "allowed": "a number above 0 or inf", "required": False, "default": 20.0},
        {"name": "sigma", "allowed": "a number of at least 0", "required": False, "default": 0.001},
        {"name": "on", "allowed": str(DEFENCES["dp"].arguments[2].allowed), "required": False, "default": "sum"}
        | {"choices": list(DEFENCES["dp"].arguments[2].allowed.names)},
    ]
    assert "dp(clip=20, sigma=0.001, on=sum)" in shown(capsys, "defences")
    text = shown(capsys, "prune")
    assert re.search(r"ratio +a number in \[0, 1\) +required", text)
    assert re.search(r"scope +one of: layer, global +default layer", text)


@pytest.mark.parametrize("width", [100, 120, 160])
def test_defences_stand_side_by_side(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown(capsys, "defences")
    assert max(map(len, text.splitlines())) <= width
    assert re.match(r"defences +changes +costs a client +guarantee +adaptive attackers", text)
    assert re.search(r"^dp +each gradient +2 gradients; all bytes +yes +portfolio, learned", text, re.MULTILINE)
    assert re.search(r"^dgp +the update +a few passes .* no +portfolio ×3", text, re.MULTILINE)
    assert re.search(r"^clip +the update .* no +portfolio, learned", text, re.MULTILINE)
    assert re.search(r"^gaussian .* after a clip +portfolio", text, re.MULTILINE)
    flowing = " ".join(text.split())
    for name, entry in DEFENCES.items():
        assert re.search(rf"^{name} .*{re.escape(entry.cost.split()[0])}", text, re.MULTILINE)
        assert " ".join(entry.citation.split()) in flowing
    assert all(row["cost"] == DEFENCES[row["name"]].cost for row in plain(capsys, "defences"))
    assert f"costs {DEFENCES['dgp'].cost}" in " ".join(shown(capsys, "dgp").split())


def test_a_name_may_follow_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "defences", "dgp") == shown(capsys, "dgp")
    assert list(plain(capsys, "runs", "faces")) == ["runs"]
    assert [row["name"] for row in plain(capsys, "defences", "keep")["defences"]] == ["topk", "adgp", "dgc"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("defences", "dpg"), "is none of the defences"),
        (("dgp", "defences"), "the wrong way round"),
        (("dgp", "dp"), "`gradveil list defences dgp`"),
        (("defences", "mine:signs"), "runs no code"),
    ],
)
def test_two_words_that_do_not_fit_are_refused(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["list", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine:signs", "mine:signs(keep=0.1)", "folder:scans"])
def test_a_path_of_yours_is_sent_to_the_command_that_tries_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", name]) == 2
    said = capsys.readouterr().err
    assert "runs no code" in said
    assert "gradveil check" in said


def test_attacks_share_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "attacks")
    assert len(re.findall(r"^iterations +a whole number of at least 1, or none", text, re.MULTILINE)) == 1
    assert re.search(r"^tv +.*\(not analytic, ", text, re.MULTILINE)


def test_settings_of_an_attack_have_its_own_values(capsys: pytest.CaptureFixture[str]) -> None:
    (ig,) = plain(capsys, "ig")["attacks"]
    own = {argument["name"]: argument["default"] for argument in ig["arguments"]}
    built = make_attack("ig")
    assert (own["iterations"], own["tv"], own["lr"]) == (built.descent.iterations, built.tv, 0.1)
    assert "sign" not in {argument["name"] for argument in plain(capsys, "dlg")["attacks"][0]["arguments"]}
    assert re.search(r"iterations +a whole number of at least 1, or none +default 24000", shown(capsys, "ig"))


WIDE = [n for n, entry in ATTACKS.items() if entry.arguments is SETTINGS or isinstance(entry, GenerativeEntry)]


@pytest.mark.parametrize("name", WIDE)
def test_every_setting_that_an_attack_takes_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = plain(capsys, name)["attacks"]
    shown_with = {argument["name"]: argument["default"] for argument in row["arguments"]}
    by_newton = {"sign"} if isinstance(make_attack(name).descent.stepper, LBFGS) else set[str]()
    assert {argument.name for argument in ATTACKS[name].arguments} - shown_with.keys() == by_newton
    for setting, (_, words, _) in KNOWN_BY_WORD.items():
        assert shown_with[setting] == known_as(make_attack(name), setting)
        for word in words.keys() - {"simulated"}:  # which leaves a preset as it is
            built = known_as(make_attack(f"{name}({setting}={word}, simulated_client=full)"), setting)
            assert built == word


@pytest.mark.parametrize("name", [*DEFENCES, *ATTACKS])
def test_one_name_shows_the_help_of_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, name).split())
    for argument in {**DEFENCES, **ATTACKS}[name].arguments:
        assert argument.help.endswith("."), f"{argument.name} has no help"
        assert argument.name == "sign" or argument.help in text


@pytest.mark.parametrize("name", [*DEFENCES, *ATTACKS])
def test_one_name_shows_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, name)
    (row,) = [row for rows in plain(capsys, name).values() for row in rows]
    assert row["description"] in " ".join(text.split())
    for argument in row["arguments"]:
        assert re.search(rf"\b{argument['name']} +{re.escape(argument['allowed'][:20])}", text)


@pytest.mark.parametrize("name", [name for name, entry in DEFENCES.items() if entry.arguments])
def test_the_way_a_defence_is_shown_reads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = plain(capsys, name)["defences"]
    assert parse(row["usage"].replace("…", "0.5")).name.startswith(name)


def test_a_name_of_two_kinds_is_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(plain(capsys, "faces")) == ["data", "runs"]
    text = shown(capsys, "faces")
    assert "faces, data" in text
    assert "faces, a bundled run" in text


@pytest.mark.parametrize("words", ["clip_example", "Clip-Example", "clip-example(norm=1)"])
def test_names_are_read_as_run_files_read_them(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["name"] for row in plain(capsys, words)["defences"]] == ["clip-example"]


def test_an_argument_is_found_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"prune", "topk", "dgp"} <= {row["name"] for row in plain(capsys, "feedback")["defences"]}
    text = shown(capsys, "feedback")
    assert TOPICS["feedback"] in text
    assert re.search(r"dgp +true or false +default true +dgp\(feedback=false\)", text)
    assert re.search(r"ig-scheliga +a number of at least 0, or none +default 0.01", shown(capsys, "tv"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("topkk", "did you mean 'topk'"),
        ("error-feedback", "'feedback'"),
        ("defense", "'defences'"),
        ("lenet", "'lenet-"),
    ],
)
def test_an_unknown_name_gives_the_nearest(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", name]) == 2
    assert near in capsys.readouterr().err


def test_attack_is_listed_with_simulated_client_and_side_information(capsys: pytest.CaptureFixture[str]) -> None:
    (dia,) = plain(capsys, "dia")["attacks"]
    assert dia["simulated_client"] == "full"
    drawn = {"model.*.lock.*": "sample", "model.*": "sample"}
    assert dia["knowledge"] == {"targets": "known", "model.*.mask": "optimise", **drawn}
    text = " ".join(shown(capsys, "dia").split())
    assert "believes in the client with its defence" in text
    law = "drawn afresh from its public law"
    assert f"model.*.mask: found together with the examples; model.*.lock.*: {law}; model.*: {law}" in text
    assert "believes in a client without defence" in " ".join(shown(capsys, "ig").split())


def test_adaptive_is_explained_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`adaptive` stands for the attackers that aim at each defence" in shown(capsys, "attacks")
    assert "`adaptive`" in shown(capsys)


def test_a_paper_shows_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "dual-gradient-pruning").split())
    assert "dual-gradient-pruning/main dgp(top=0.05, bottom=0.75)" in text
    assert "gradveil audit dual-gradient-pruning/adaptive" in text
    assert "gradveil train dual-gradient-pruning/train-mnist" in text
    assert "PAPER/TABLE" in shown(capsys, "papers")


@pytest.mark.parametrize("name", DEFENCES)
def test_every_default_that_is_shown_can_be_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = DEFENCES[name]
    text = shown(capsys, "defences", name)
    required = {argument.name: "0.5" for argument in entry.arguments if argument.default is REQUIRED}
    for argument in entry.arguments:
        if argument.name not in required:
            found = re.search(rf"^ *{argument.name} .*default (\S+|\"[^\"]*\") *$", text, re.MULTILINE)
            assert found, f"{argument.name} in {text}"
            given = {**required, argument.name: found[1]}
            typed = parse(f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})")
            assert typed == parse(f"{name}({', '.join(required.values())})")
