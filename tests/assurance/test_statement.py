"""The assurance statement restates a run, names what was not examined, and claims nothing more."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from gradveil.assurance.statement import _chosen, _neighbours, assurance_of
from gradveil.assurance.threat_letters import letter_of
from gradveil.audit.findings import findings_of
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import NEEDLESS, Run, load_run
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.report import assurance_page, audit_page, write_assurance
from tests.audit.runs import config, execute

PRIVATE = "dp(clip=1, sigma=2)"


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Run:
    attacks = ["cdia(iterations=6)", "learned(epochs=1, width=8, features=16)", "analytic(prior=public)"]
    chosen = config(
        data={"name": "faces", "size": 16},
        model={"name": "mlp", "options": {"width": 48}},
        defences=["none", PRIVATE, "prune(0.5)"],
        attacks=attacks,
        target_clients=4,
    )
    return execute(chosen, tmp_path_factory.mktemp("assured") / "run")[0]


def test_letters_follow_what_was_granted(audit: Run) -> None:
    rows = {row.preset: row for row in (Row(place, trial) for place, trial in enumerate(audit.trials))}
    assert letter_of(rows["cdia"]) == "E"  # it is given the labels
    statement = assurance_of(audit, PRIVATE)
    assert [each.letter for each in statement.attackers] == list("ABCDEFGH")
    assert "E" in [each.letter for each in statement.attackers if each.was_run]
    assert next(each for each in statement.attackers if each.letter == "E").labels_given
    assert "labels were given" in assurance_page(statement)
    assert "labels were given" in audit_page(audit)
    assert all(each.undefended for each in statement.attackers if each.was_run)
    assert all(bool(each.why_not) != each.was_run for each in statement.attackers)


@pytest.mark.parametrize(
    ("secrets", "letter"), [(["statistics.norm.mean"], "E"), (["statistics.norm.mean", "model.drop.mask"], None)]
)
def test_statistics_of_a_batch_are_those_of_the_clients_data(
    audit: Run, secrets: list[str], letter: str | None
) -> None:
    trial = audit.trials[0]
    assert letter_of(Row(0, replace(trial, info=trial.info | {"secrets": secrets}))) == letter


@pytest.mark.parametrize(
    ("facts", "letter"),
    [
        ({"grants": []}, "B"),
        ({"grants": ["public: 9 images of the same kind, none of a target client"]}, "D"),
        ({"grants": [], "columns": [{"name": "age"}]}, "D"),
        ({"grants": ["targets: the true labels", "public: 9 images of the same kind"]}, "E"),
        ({"grants": ["bounds: the least and greatest value of the batch"]}, "E"),
    ],
)
def test_labels_and_ranges_of_a_client_are_its_data_and_columns_are_auxiliary(
    audit: Run, facts: dict[str, Any], letter: str
) -> None:
    trial = audit.trials[0]
    assert letter_of(Row(0, replace(trial, info=trial.info | {"secrets": []} | facts))) == letter


@pytest.mark.parametrize("person", ["patient", None])
def test_rows_of_a_person_are_linked_where_a_column_names_persons(tmp_path: Path, person: str | None) -> None:
    lines = ["patient,age,weight,height,pulse,ill"]
    lines += [
        f"p{i // 8 % 10},{20 + 7 * (i // 8 % 10)}.5,{50 + 5 * (i // 8 % 10)}.1,1.5,{60 + i // 8 % 10},{i % 2}"
        for i in range(160)
    ]
    (tmp_path / "patients.csv").write_text("\n".join(lines) + "\n")
    chosen = config(
        data={"name": str(tmp_path / "patients.csv"), "label_column": "ill", **({"person": person} if person else {})},
        model={"name": "tabular-mlp"},
        defences=["none"],
        attacks=["analytic"],
        target_clients=10,
    )
    run = execute(chosen, tmp_path / "run")[0]
    names = [each["name"] for each in run.trials[0].info["columns"]]
    assert ("patient" in names) == (person is None)
    risk = next(each for each in assurance_of(run, "none").risks if each.criterion == "linkability")
    if person is None:
        assert risk.note == "not assessed: no column was declared to name persons (data.person)"
        return
    assert risk.value is not None
    assert risk.control is not None
    assert risk.value > 0.5 > risk.control
    assert "of 10; control: persons permuted" in risk.note


def test_inference_of_rows_is_held_against_what_the_rest_of_a_row_gives_away(tmp_path: Path) -> None:
    chosen = config(
        data={"name": "census"},
        model={"name": "tabular-mlp"},
        defences=["none"],
        attacks=["analytic"],
        target_clients=8,
    )
    row = execute(chosen, tmp_path / "run")[0]
    risk = next(each for each in assurance_of(row, "none").risks if each.criterion == "inference")
    assert risk.value is not None
    assert risk.control is not None
    assert 0 < risk.control < 1
    assert "18" in risk.note


def test_statement_holds_guarantee_risks_and_gaps(audit: Run) -> None:
    statement = assurance_of(audit, PRIVATE)
    assert len(statement.formal.limits) == 1
    assert statement.formal.audited == "not audited"
    assert {risk.criterion: risk.value is not None for risk in statement.risks} == {
        "singling out": True,
        "linkability": False,
        "inference": False,
    }
    assert "released model" in statement.not_examined[0]
    assert set(statement.signature.values()) == {None}
    heuristic = assurance_of(audit, "prune(0.5)").formal
    assert (heuristic.guarantee, heuristic.limits) == ("no formal guarantee", ())


def test_control_without_the_defence_is_one_of_the_same_setting(audit: Run) -> None:
    other = [
        replace(trial, info=trial.info | {"batch": 7}) if trial.info["undefended"] else trial for trial in audit.trials
    ]
    assert all(each.undefended == "" for each in assurance_of(replace(audit, trials=other), PRIVATE).attackers)


def test_groups_of_one_setting_are_not_claimed_of_another(audit: Run) -> None:
    (client,) = audit.info["config"]["client"]
    config = audit.info["config"] | {"client": [client | {"members": 4}, client]}
    trust = assurance_of(replace(audit, info=audit.info | {"config": config}), PRIVATE).formal.trust
    assert "every single update or the sum of 4 clients" in trust


def test_searches_that_were_not_needed_are_not_examined(audit: Run) -> None:
    left = [
        replace(trial, records=[], info=trial.info | {"failed": f"{NEEDLESS}, since analytic breaks it"})
        if trial.info["preset"] == "cdia" and trial.info["undefended"]
        else trial
        for trial in audit.trials
    ]
    listed = assurance_of(replace(audit, trials=left), PRIVATE).not_examined
    assert any(each.startswith("searches that were left out") and "cdia" in each for each in listed)


def test_setting_that_nobody_could_judge_speaks_before_one_that_held(audit: Run) -> None:
    verdict = findings_of(audit).verdicts[0]
    held, open_ = (replace(verdict, level=level) for level in ("not broken", "inconclusive"))
    assert _chosen([held, open_], verdict.defence, None) is open_


def test_missing_and_failed_trials_are_named(audit: Run) -> None:
    first, second, *rest = (trial for trial in audit.trials if trial.info["defence"] == PRIVATE)
    failed = replace(second, info=second.info | {"failed": "out of memory", "unfit": False}, records=[])
    some = [trial for trial in audit.trials if trial not in (first, second)]
    gaps = assurance_of(replace(audit, trials=[*some, failed]), PRIVATE).not_examined
    assert rest
    assert any("1 trial of this run that is not done" in each for each in gaps)
    assert any(f"failed: {second.info['attack']} on {PRIVATE}" in each for each in gaps)


def test_run_with_changed_settings_gets_no_statement(audit: Run, tmp_path: Path) -> None:
    assert audit.path is not None
    folder = copytree(audit.path, tmp_path / "edited")
    before = assurance_of(load_run(folder), PRIVATE).provenance["results (SHA-256)"]
    records = next(folder.glob("trials/*/records.json"))
    values = json.loads(records.read_text())
    values[0]["ssim"] = 0.99
    records.write_text(json.dumps(values))
    assert assurance_of(load_run(folder), PRIVATE).provenance["results (SHA-256)"] != before
    file = folder / "run.json"
    changed = json.loads(file.read_text())
    changed["config"]["privacy"] = {"steps": 9, "rate": 0.1, "delta": 1e-5, "sampling": "poisson", "accountant": "pld"}
    file.write_text(json.dumps(changed))
    with pytest.raises(GradveilError, match="has other settings"):
        write_assurance(folder, tmp_path / "out", PRIVATE, pdf=False)


def test_page_and_json_have_the_same_fields_and_claim_nothing_more(audit: Run, tmp_path: Path) -> None:
    entry = {"defence": "dp(clip=1.0, sigma=2.0)", "unit": "example", "claimed": 2.0, "at_least": 2.5, "violated": True}
    file = tmp_path / "epsilon.json"
    file.write_text(json.dumps([entry | {"confidence": 0.95, "delta": 1e-5}, {"defence": "none", "not_audited": "x"}]))
    assert audit.path is not None
    words = ["assure", str(audit.path), "--defence", PRIVATE, "--epsilon-audit", str(file), "--no-pdf"]
    assert run([*words, "--out", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "assurance.json").read_text())
    page = (tmp_path / "assurance.html").read_text()
    assert values["schema"] == "gradveil.assurance/1"
    assert "VIOLATED" in values["formal"]["audited"]
    for text in (values["finding"], values["worst"], *values["not_examined"], *values["renewal"]):
        assert text in page.replace("&#39;", "'")
    for letter in "ABCDEFGH":
        assert f"<b>{letter}</b>" in page
    assert not re.search(r"anonymous|compliant|https?://", page)
    assert "<script" not in page
    assert 'id="assurance"' in audit_page(audit)


@pytest.mark.processes
def test_statement_prints_on_one_page(audit: Run, tmp_path: Path) -> None:
    assert audit.path is not None
    *_, printed = write_assurance(audit.path, tmp_path, PRIVATE, pdf=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) == 1


def test_texts_of_a_run_are_escaped(audit: Run) -> None:
    audit.info["name"] = "<img src=x>"
    assert "<img src=x>" not in assurance_page(assurance_of(audit))


@pytest.mark.parametrize(
    ("content", "extra"), [("{}", []), ('[{"defence": 1}]', []), ("[", []), ("[]", ["--defence", "dgp"])]
)
def test_wrong_use_is_refused(audit: Run, tmp_path: Path, content: str, extra: list[str]) -> None:
    file = tmp_path / "epsilon.json"
    file.write_text(content)
    assert run(["assure", str(audit.path), "--epsilon-audit", str(file), "--out", str(tmp_path / "new"), *extra]) == 2
    assert not (tmp_path / "new").exists()


def test_unknown_defence_is_named(audit: Run) -> None:
    with pytest.raises(GradveilError) as caught:
        assurance_of(audit, "dgp")
    assert [problem.where for problem in caught.value.problems] == ["--defence"]


def test_neighbours_of_a_client_name_the_epsilon_of_a_replaced_one() -> None:
    one = {"unit": "client", "noise": 2.0, "releases": 1}  # twice the clip: as one added with half the noise
    assert "replaced, epsilon is at most 4.377" in _neighbours([one], {"delta": 1e-5})
    assert _neighbours([one | {"unit": "example"}], {}) == "one example added or removed"
    assert _neighbours([one], {"sampling": "shuffled"}) == "one client replaced"
