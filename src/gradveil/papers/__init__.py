"""The tables of the papers: printed numbers, the runs behind them, and our measurements beside both."""

from gradveil.papers.comparison import ComparedCell, compare
from gradveil.papers.records import Record, best
from gradveil.papers.study import SCALES, Cell, Study, find_study, studies
from gradveil.papers.table_run import RowRun, row_runs, run_row

__all__ = [
    "SCALES",
    "Cell",
    "ComparedCell",
    "Record",
    "RowRun",
    "Study",
    "best",
    "compare",
    "find_study",
    "row_runs",
    "run_row",
    "studies",
]
