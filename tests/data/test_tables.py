"""Tables from files and frames: kinds of columns, splits, what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import DATASETS, load
from gradveil.data.tables import Halves, fitted, of_frame, placed_values, shared_out, splits_of, table
from gradveil.spaces import TableSpace


def written(folder: Path, rows: int = 40) -> Path:
    lines = ["age,sex,visits,label"]
    lines += [f"{20 + 7 * i % 60},{'fm'[i % 2]},{i % 3},{'ill' if i % 4 == 0 else 'well'}" for i in range(rows)]
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")
    return folder / "patients.csv"


def test_a_csv_file_is_split_by_class_and_its_columns_are_inferred(tmp_path: Path) -> None:
    public, private = load(str(written(tmp_path)))
    assert (len(public), len(private)) == (31, 9)
    assert public.classes == ("ill", "well")
    assert isinstance(public.space, TableSpace)
    assert [(column.name, column.levels) for column in public.space.columns] == [
        ("age", ()),
        ("sex", ("f", "m", "other")),
        ("visits", ("0", "1", "2", "other")),
    ]
    assert private.identity() != public.identity()


def test_the_bundled_sample_has_half_of_each_class_and_no_row_twice() -> None:
    public, private = load("census")
    assert (len(public), len(private)) == (1000, 200)
    assert public.targets.bincount().tolist() == [500, 500]
    assert "1200" in DATASETS["census"].description
    distances = torch.cdist(private.inputs, public.inputs, compute_mode="donot_use_mm_for_euclid_dist")
    assert float((distances == 0).any(1).double().mean()) < 0.05


def test_values_that_are_not_public_are_other_and_missing_numbers_are_the_mean() -> None:
    words, numbers = fitted("job", ["a", "b", None]), fitted("pay", [float(i) for i in range(20)])
    assert placed_values(words, ["b", "z", None]).tolist() == [1.0, 2.0, 2.0]
    assert placed_values(numbers, [3.0, None, math.nan]).tolist() == [3.0, 9.5, 9.5]
    assert fitted("pay", [*(float(i) for i in range(20)), math.nan]).mean == 9.5


def test_private_rows_change_no_statistic() -> None:
    public = {"x": [float(i) for i in range(20)], "label": [0, 1] * 10}
    for scale in (1.0, 1e6):
        private = {"x": [scale, -scale], "label": [0, 1]}
        data = splits_of(Halves(public, private), "made").private
        assert isinstance(data.space, TableSpace)
        assert (data.space.columns[0].low, data.space.columns[0].high) == (0.0, 19.0)
        assert data.views[0, 0] == pytest.approx(scale, rel=1e-5)


def test_frames_of_pandas_and_plain_columns_give_the_same() -> None:
    pandas = pytest.importorskip("pandas")
    columns = {"x": [1, None, 3], "label": ["a", "b", "a"]}
    assert of_frame(pandas.DataFrame(columns)) == of_frame(columns) == columns


def test_columns_may_be_arrays_tensors_and_lists_of_their_numbers() -> None:
    plain = {"age": [20.5 + i for i in range(12)], "sex": ["f", "m"] * 6, "ill": [0, 1] * 6}
    arrays = {"age": torch.tensor(plain["age"]), "sex": np.array(plain["sex"]), "ill": np.array(plain["ill"])}
    scalars = arrays | {"age": list(np.array(plain["age"]))}
    wanted = table(plain, label="ill")
    for given in (arrays, scalars):
        made = table(given, label="ill")
        assert made.public.space == wanted.public.space
        assert torch.equal(made.private.inputs, wanted.private.inputs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((12, 3)), "table: is ndarray -> give a data frame, or a dict of columns"),
        ({"age": [1.0, 2.0], "ill": [0, 1, 0]}, "has 2 values in column 'age' and 3 in column 'ill'"),
        ({"age": np.zeros((12, 2)), "ill": [0, 1] * 6}, "column 'age' holds list"),
    ],
    ids=["array", "lengths", "two-dimensional"],
)
def test_what_is_no_table_is_refused(given: Any, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        table(given, label="ill")


def test_a_column_of_persons_is_kept_and_is_no_input() -> None:
    columns = {"age": [20.5 + i for i in range(12)], "who": list("abcdef") * 2, "ill": [0, 1] * 6}
    data = table(columns, label="ill", person="who")
    assert data.public.space.view_shape == (1,)
    assert len(data.private.persons) == len(data.private)
    assert data.private.subset([1]).persons == (data.private.persons[1],)
    with pytest.raises(GradveilError, match="person: names 'ill', which is no column beside the label"):
        table(columns, label="ill", person="ill")


def test_every_fourth_row_of_a_class_is_private() -> None:
    halves = shared_out({"x": list(range(12)), "label": [0] * 8 + [1] * 4}, "label")
    assert halves.private["x"] == [3, 7, 11]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no label column"),
        ("a,label\n1,x\n2\n", "line 3 has 1 cells"),
        ("label\n0\n1\n0\n0\n0\n", "no column beside the label"),
        ("a,label\n1,0\n2,\n3,0\n4,0\n5,0\n", "has no label"),
        ("a,label\ninf,0\n2,0\n3,0\n4,0\n", "infinite"),
        ("a,label\n1,0.5\n2,0.5\n3,0.5\n4,0.5\n", "fractions"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(GradveilError, match=message):
        load(str(tmp_path / "t.csv"))


def test_declared_kinds_of_columns_win_over_inferred_ones(tmp_path: Path) -> None:
    declared = {"visits": "number", "age": "category"}
    space = load(str(written(tmp_path)), columns=declared).public.space
    assert isinstance(space, TableSpace)
    kinds = {column.name: "category" if column.levels else "number" for column in space.columns}
    assert kinds == {"age": "category", "sex": "category", "visits": "number"}


def test_columns_that_follow_from_others_are_inferred_and_others_are_not() -> None:
    random = torch.Generator().manual_seed(0)
    ages = torch.randint(20, 80, (400,), generator=random).tolist()
    sexes = torch.randint(2, (400,), generator=random).tolist()
    columns = {"age": ages, "months": [12 * age for age in ages], "old": [str(age > 50) for age in ages]}
    space = table({**columns, "sex": ["fm"[sex] for sex in sexes], "label": [0, 1] * 200}).public.space
    assert isinstance(space, TableSpace)
    inferred = {column.name: column.inferred for column in space.columns}
    assert inferred["age"] == inferred["months"] == 1
    assert inferred["old"] > 0.9
    assert inferred["sex"] < 0.65
    assert next(column for column in space.columns if column.name == "months").guessed == 1


def test_every_unknown_column_and_kind_is_named(tmp_path: Path) -> None:
    wrong = {"height": "number", "weight": "number", "age": "real", "sex": "number"}
    with pytest.raises(GradveilError) as error:
        load(str(written(tmp_path)), columns=wrong)
    found = {problem.where: problem.what + problem.remedy for problem in error.value.problems}
    assert found.keys() == {"columns", "columns.age", "columns.sex"}
    assert "height, weight" in found["columns"]
    assert "age, sex, visits" in found["columns"]
    assert "number, category" in found["columns.age"]
    with pytest.raises(GradveilError, match="columns"):
        load("digits", columns={"age": "number"})
