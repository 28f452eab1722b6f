"""The columns of CSV tables."""

from gradveil.report.table import as_csv


def test_a_key_of_some_rows_is_a_column_of_all() -> None:
    assert as_csv([{"a": 1}, {"a": 2, "b": 3}]).splitlines() == ["a,b", "1,", "2,3"]
    assert as_csv([], ["a", "b"]).splitlines() == ["a,b"]
