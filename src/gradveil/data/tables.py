"""Tables of numbers and categories: CSV and Parquet files, data frames, and a bundled sample."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.resources
import io
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.extras import needs
from gradveil.data.column_inference import with_inference
from gradveil.data.dataset import Dataset, Splits
from gradveil.spaces.table_space import TOLERANCE, TableColumn, TableSpace

OTHER = "other"
"""The level of values that are not among the public ones."""
FEW = 10
"""Whole numbers with at most so many different public values are categories, unless a run says otherwise."""
SUFFIXES = (".csv", ".csv.gz", ".parquet")
"""Files that hold a table, by the end of their names."""
KINDS = ("number", "category")
"""Kinds of columns."""
LABELS = ("label", "target", "class", "income", "y")
"""Names of a label column that need not be given."""

Values = Mapping[str, Sequence[Any]]
"""A table: the values of each column, by its name."""


Kinds = Mapping[str, str]
"""Kinds of columns by name, one of `KINDS` each; those of the other columns follow from their public values."""


class Halves(NamedTuple):
    """The public and the private rows of a table."""

    public: Values
    private: Values


def is_table(name: str) -> bool:
    """Report whether data of this name are a file with a table.

    >>> is_table("patients.csv"), is_table("cifar10")
    (True, False)
    """
    return name.lower().endswith(SUFFIXES) and ":" not in name


def without_suffix(name: str) -> str:
    """Return the name of data without the suffix of a table's file.

    >>> without_suffix("texts:notes.csv"), without_suffix("v1.5")
    ('texts:notes', 'v1.5')
    """
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def read_values(path: Path) -> Values:
    """Read a CSV or Parquet file; empty cells of a CSV file are missing."""
    where = str(path)
    if path.name.lower().endswith(".parquet"):
        with needs("hub", where):
            import pyarrow as pa
            import pyarrow.parquet as pq

        try:
            return pq.read_table(path).to_pydict()
        except (pa.ArrowException, OSError) as error:
            raise fail(where, f"cannot be read as Parquet ({error})", "check that the file is complete") from error
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise fail(where, f"cannot be read as CSV ({error})", "save it as UTF-8 text") from error
    return parsed(text, where)


def parsed(text: str, where: str) -> Values:
    """Read the text of a CSV file: numbers where every cell of a column is one."""
    lines = list(csv.reader(io.StringIO(text)))
    if len(lines) < 2 or len({*lines[0]}) < len(lines[0]):
        raise fail(where, "has no rows below a line of different column names", "write the names into its first line")
    if odd := next((number for number, line in enumerate(lines, 1) if len(line) != len(lines[0])), None):
        what = f"line {odd} has {len(lines[odd - 1])} cells, the first line {len(lines[0])}"
        raise fail(where, what, "quote cells that hold commas")
    columns = zip(*lines[1:], strict=True)
    return {name: _typed(cells) for name, cells in zip(lines[0], columns, strict=True)}


def _typed(cells: Sequence[str]) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(cell) if cell.strip() else None for cell in cells]
        except ValueError:
            continue
    return [cell if cell.strip() else None for cell in cells]


def is_frame(given: Any) -> bool:
    """Report whether this is a data frame of pandas, polars or pyarrow.

    >>> is_frame({"age": [41]})
    False
    """
    return hasattr(given, "columns") and (hasattr(given, "to_dict") or hasattr(given, "to_pydict"))


def of_frame(frame: Any, where: str = "table") -> Values:
    """Turn a data frame of pandas, polars or pyarrow, or a mapping of columns, into plain values.

    Columns may be lists, series, arrays or tensors.

    >>> of_frame({"age": torch.tensor([41.5, 23.0]), "sex": ["f", None]})
    {'age': [41.5, 23.0], 'sex': ['f', None]}
    """
    if hasattr(frame, "to_pydict"):  # pyarrow
        return frame.to_pydict()
    made = frame.to_dict(as_series=False) if hasattr(frame, "get_columns") else frame
    made = made.to_dict("list") if hasattr(made, "iloc") else made
    if not isinstance(made, Mapping):
        remedy = "give a data frame, or a dict of columns; audit and invert take (array, labels) themselves"
        raise fail(where, f"is {type(frame).__name__}", remedy)
    values = {str(name): [_plain(cell) for cell in _listed(cells)] for name, cells in made.items()}
    lengths = {len(cells): name for name, cells in values.items()}
    if len(lengths) > 1:
        (one, first), (other, second), *_ = lengths.items()
        what = f"has {one} values in column '{first}' and {other} in column '{second}'"
        raise fail(where, what, "give one value per row")
    return values


def _listed(cells: Any) -> Sequence[Any]:
    """Turn an array, a tensor or a series into a list of plain values."""
    return cells.tolist() if hasattr(cells, "tolist") else cells


def _plain(cell: Any) -> Any:
    """Turn a number of NumPy or torch into a plain one, and an empty cell into None."""
    value = cell.item() if hasattr(cell, "item") else cell
    return None if _missing(value) else value


def _missing(value: Any) -> bool:
    """Report whether a cell is empty: None, not a number, or pandas' NA, which has no truth value."""
    return value is None or type(value).__name__ == "NAType" or (not isinstance(value, list) and bool(value != value))


def table(
    frame: Any,
    label: str | None = None,
    private: Any = None,
    columns: Kinds | None = None,
    person: str | None = None,
) -> Splits:
    """Make data of a data frame (pandas, polars, pyarrow) or a mapping of columns, with this label column.

    Columns of a mapping are lists, series, arrays or tensors. `private` holds the private rows; without it, every
    fourth row of each class is private. `columns` declares columns as "number" or "category". `person` is a column that
    names the person of each row: models do not read it, and an audit measures whether rows of a person can be linked.

    >>> data = table({"age": [20.5 + i for i in range(12)], "sex": ["f", "m"] * 6, "ill": [0, 1] * 6}, label="ill")
    >>> data.private
    Dataset('table/private', 2 rows of 2, 2 classes)
    """
    values = of_frame(frame)
    halves = shared_out(values, label_of(values, "table", label)) if private is None else None
    return splits_of(
        halves or Halves(values, of_frame(private, "private")), "table", label, kinds=columns, person=person
    )


def open_rows(
    name: str,
    data_dir: Path | None,
    label: str | None = None,
    source: str = "",
    column: str | None = None,
    kinds: Kinds | None = None,
    person: str | None = None,
) -> Splits:
    """Load a table by its name: `NAME-train.parquet` and `NAME-test.parquet` in the data folder, or a file.

    Of a single file every fourth row of each class is private. Means, deviations, ranges and levels are those of the
    public rows alone.
    """
    return splits_of(_halves(name, data_dir, label), name, label, source, column, kinds, person)


def splits_of(
    halves: Halves,
    name: str,
    label: str | None = None,
    source: str = "",
    column: str | None = None,
    kinds: Kinds | None = None,
    person: str | None = None,
) -> Splits:
    """Make data of public and private rows; `column` names one of which `Dataset.column` keeps the public values.

    The column `person` is no input: `Dataset.persons` keeps its values.
    """
    target = label_of(halves.public, name, label)
    if person is not None and (person not in halves.public or person == target):
        others = ", ".join(name for name in halves.public if name != target)
        raise fail("person", f"names '{person}', which is no column beside the label", f"choose among: {others}")
    people = [tuple(half.get(person, ())) if person else () for half in halves]
    halves = Halves(*({name: cells for name, cells in half.items() if name != person} for half in halves))
    kinds = kinds or {}
    refuse([*_problems(halves, target, name), *_kind_problems(halves, target, kinds)])
    features = [column for column in halves.public if column != target]
    classes, numbers = _classes(halves, target, name)
    if column is not None and column != "label" and column not in halves.public:
        raise fail(f"column '{column}'", f"is not in {name}", f"choose among: {', '.join(halves.public)}")
    space = TableSpace(tuple(fitted(one, halves.public[one], kinds.get(one)) for one in features))
    space = with_inference(space, _inputs(space, halves.public))
    kept = [tuple(halves.public[target if column == "label" else column]) if column else (), ()]
    return Splits(
        *(
            replace(
                _made(
                    f"{name}/{split}", space, half, labels, classes, source or f"{name}, as given by the user.", extra
                ),
                persons=named,
            )
            for split, half, labels, extra, named in zip(
                ("public", "private"), halves, numbers, kept, people, strict=True
            )
        )
    )


def _made(
    name: str,
    space: TableSpace,
    values: Values,
    labels: Sequence[int],
    classes: tuple[str, ...],
    source: str,
    extra: tuple[Any, ...],
) -> Dataset:
    inputs = _inputs(space, values)
    plain = zip(*(values[column.name] for column in space.columns), strict=True)
    marks = tuple(int.from_bytes(hashlib.sha256(repr(row).encode()).digest()[:6]) for row in plain)
    targets = torch.tensor(labels, dtype=torch.int64)
    return Dataset(name, inputs, targets, classes, source=source, column=extra, marks=marks, example=space)


def _inputs(space: TableSpace, values: Values) -> Tensor:
    cells = [placed_values(column, values[column.name]) for column in space.columns]
    return space.encode(torch.stack(cells, -1)).float()


def fitted(name: str, values: Sequence[Any], kind: str | None = None) -> TableColumn:
    """Learn a column from its public values.

    Unless its kind is declared, text and whole numbers with at most ten values are categories.
    """
    known = [value for value in values if not _missing(value)]
    whole = all(isinstance(value, int) for value in known)
    words = any(isinstance(value, str | bool) for value in known)
    if kind == "category" or (kind is None and (words or (whole and len({*known}) <= FEW))):
        counts = Counter(map(str, known if words else sorted(known)))
        levels = tuple(sorted(counts) if words else counts)
        levels = levels if OTHER in levels else (*levels, OTHER)
        missing = len(values) - len(known)
        return TableColumn(name, levels, usual=max(*counts.values(), missing) / max(1, len(values)))
    return replace(column_of_numbers(name, torch.tensor(known, dtype=torch.float64)), whole=whole)


def column_of_numbers(name: str, numbers: Tensor, scaling: tuple[float, float] | None = None) -> TableColumn:
    """Learn a column from its numbers [N]; `scaling` is the mean and deviation to use instead of theirs."""
    mean, std = scaling or (float(numbers.mean()), float(numbers.std(correction=0)))
    std = std if std > 1e-12 else 1.0
    usual = float(((numbers - numbers.median()).abs() <= TOLERANCE * std).double().mean())
    low, high = float(numbers.min()), float(numbers.max())
    return TableColumn(name, (), mean, std, low, max(high, low + 1e-9), usual=usual)


def placed_values(column: TableColumn, values: Sequence[Any]) -> Tensor:
    """Turn values into cells of a view: places of levels, numbers; a missing number is the public mean."""
    if column.levels:
        places = {level: place for place, level in enumerate(column.levels)}
        rest = places[OTHER]
        return torch.tensor([places.get(str(value), rest) for value in values], dtype=torch.float64)
    return torch.tensor([column.mean if _missing(value) else value for value in values], dtype=torch.float64)


def label_of(values: Values, name: str, label: str | None) -> str:
    """Return the name of the label column."""
    wanted = (label,) if label else LABELS
    found = next((column for column in wanted if column in values), None)
    if found is None:
        what = f"has no label column {' or '.join(wanted)}"
        raise fail(f"data {name!r}", what, f"set label_column to one of: {', '.join(values)}")
    return found


def _classes(halves: Halves, target: str, name: str) -> tuple[tuple[str, ...], tuple[list[int], list[int]]]:
    names = sorted({*halves.public[target]}, key=lambda value: (isinstance(value, str), value))
    places = {value: place for place, value in enumerate(names)}
    if strange := {*halves.private[target]} - {*names}:
        what = f"class {next(iter(strange))!r} is in the private rows only"
        raise fail(f"data {name!r}", what, "split the rows so that each class is in both")
    numbers = tuple([places[value] for value in half[target]] for half in halves)
    return tuple(map(str, names)), (numbers[0], numbers[1])


def _problems(halves: Halves, target: str, name: str) -> Sequence[Problem]:
    where, found = f"data {name!r}", list[Problem]()
    if len(halves.public) < 2:
        found.append(Problem(where, "has no column beside the label", "give one at least"))
    if other := {*halves.public} ^ {*halves.private}:
        found.append(Problem(where, f"has columns in one split only: {', '.join(sorted(other))}", "add or remove them"))
        return found
    for split, half in zip(("public", "private"), halves, strict=True):
        if len(half[target]) == 0:
            found.append(Problem(where, f"has no {split} rows", "give more rows"))
    found += label_problems(halves, target, name)
    for column, values in halves.public.items():
        if all(map(_missing, values)):
            found.append(Problem(where, f"column '{column}' has no public value", "remove it"))
        wrong = {type(v).__name__ for v in values} - {"str", "int", "float", "bool", "NoneType"}
        if wrong:
            found.append(Problem(where, f"column '{column}' holds {wrong.pop()}", "give text and numbers"))
        if any(isinstance(value, float) and math.isinf(value) for value in (*values, *halves.private[column])):
            found.append(Problem(where, f"column '{column}' holds infinite numbers", "leave those cells empty"))
    return found


def _kind_problems(halves: Halves, target: str, kinds: Kinds) -> Iterator[Problem]:
    features = [column for column in halves.public if column != target]
    if unknown := [column for column in kinds if column not in features]:
        what = f"names {', '.join(unknown)}: no column of the rows"
        yield Problem("columns", what, f"choose among: {', '.join(features)}")
    for column, kind in kinds.items():
        if kind not in KINDS:
            yield Problem(f"columns.{column}", f"is '{kind}'", f"choose one of: {', '.join(KINDS)}")
        elif kind == "number" and any(isinstance(v, str) for half in halves for v in half.get(column, ())):
            words = next(v for half in halves for v in half[column] if isinstance(v, str))
            yield Problem(f"columns.{column}", f"is a number, and holds '{words}'", "declare it a category")


def label_problems(halves: Halves, target: str, name: str, some: str = "rows") -> Iterator[Problem]:
    """Find labels that are missing, or that name no classes."""
    where = f"data {name!r}"
    for split, half in zip(("public", "private"), halves, strict=True):
        missing = next((place for place, value in enumerate(half[target]) if _missing(value)), None)
        if missing is not None:
            what = f"number {missing} of the {split} {some} has no label"
            yield Problem(where, what, "remove it, or name another column of labels")
            continue
        sorts = {isinstance(value, str) for value in half[target]}
        if len(sorts) > 1 or any(isinstance(value, float) for value in half[target]):
            yield Problem(where, f"'{target}' mixes text and numbers, or holds fractions", "name classes")


def _halves(name: str, data_dir: Path | None, label: str | None) -> Halves:
    if name == "census":
        return Halves(*(parsed(_bundled(part), name) for part in ("public", "private")))
    if is_table(name):
        path = next((p for p in (Path(name), (data_dir or Path()) / name) if p.is_file()), None)
        if path is None:
            tables = [each.name for each in Path(name).parent.glob("*") if is_table(each.name)]
            near = get_close_matches(Path(name).name, tables, n=1)
            hint = f"did you mean {str(Path(name).parent / near[0])!r}? " if near else ""
            remedy = f"{hint}paths start at the folder of the command, {Path.cwd()}, or at --data-dir"
            raise fail(f"data {name!r}", "is no file here or in the data folder", remedy)
        values = read_values(path)
        return shared_out(values, label_of(values, name, label))
    homes = (data_dir or Path()) / "tables", data_dir or Path()
    pairs = [[home / f"{name}-{split}.parquet" for split in ("train", "test")] for home in homes]
    there = next((pair for pair in pairs if all(path.is_file() for path in pair)), None)
    if there is None:
        remedy = f"set --data-dir (or GRADVEIL_DATA) to a folder with tables/{name}-train.parquet and -test.parquet"
        raise fail(f"data {name!r}", "needs files, and they are not there", remedy)
    return Halves(*(read_values(path) for path in there))


def shared_out(values: Values, target: str) -> Halves:
    """Make every fourth row of each class private."""
    seen: Counter[Any] = Counter()
    held = list[bool]()
    for value in values[target]:
        seen[value] += 1
        held.append(seen[value] % 4 == 0)
    parts = (
        {
            name: [v for v, private in zip(cells, held, strict=True) if private is which]
            for name, cells in values.items()
        }
        for which in (False, True)
    )
    return Halves(*parts)


def _bundled(part: str) -> str:
    file = importlib.resources.files("gradveil.data") / f"census_{part}.csv.gz"
    return gzip.decompress(file.read_bytes()).decode()
