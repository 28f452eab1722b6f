"""Presets by paper: every text can be read, and a table's name stands for its defences."""

from pathlib import Path

import pytest

from gradveil.audit.reader import assemble
from gradveil.core.errors import GradveilError
from gradveil.defences import parse
from gradveil.defences.papers import PAPERS, spelled_out
from tests.audit.runs import config, settings

TABLES = [(key, table) for key, paper in PAPERS.items() for table in paper.tables]


@pytest.mark.parametrize(("key", "table"), TABLES)
def test_every_defence_of_a_table_is_one(key: str, table: str):
    names = [parse(text).name for text in PAPERS[key].tables[table]]
    assert len(set(names)) == len(names) >= 1
    assert "none" not in names


def test_dual_pruning_removes_what_its_table_says():
    shares = [parse(text).send.stages[0][1].inner for text in PAPERS["dual-gradient-pruning"].tables["ablation"]]
    assert [round(each.top + each.bottom, 9) for each in shares] == [0.48] * 3 + [0.8] * 3 + [0.96] * 3
    assert [round(each.bottom / each.top, 6) for each in shares] == [15, 7, 3] * 3


def test_a_run_file_names_a_table():
    run = assemble(settings(defences=["none", "Gradient-Stand-In/optimisers", "standin"]), ["victims=1"])
    assert run.defences == ["none", "standin", "standin(optimiser=adagrad)", "standin(optimiser=yogi)"]
    assert config(defences=["none"]).defences == ["none"]


def test_unknown_tables_are_refused_with_the_nearest():
    with pytest.raises(GradveilError) as told:
        spelled_out(["none", "dual-gradient-pruning/ablations", "nobody/nothing"])
    assert [problem.where for problem in told.value.problems] == ["defences[1]", "defences[2]"]
    assert "did you mean 'dual-gradient-pruning/ablation'?" in str(told.value)


def test_papers_are_called_as_their_folders():
    folders = {path.name for path in (Path(__file__).parents[2] / "papers").iterdir() if path.is_dir()}
    assert {"dual-gradient-pruning", "gradient-stand-in", "combining-stochastic-defenses"} <= folders & set(PAPERS)
