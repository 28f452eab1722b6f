"""The tables of the papers: printed numbers, the runs behind them, and our measurements beside both.

>>> paper = find_study("combining-stochastic-defenses")
>>> len(paper.compare("T1").cells)
32
"""

from gradveil.papers.claims import Claim, JudgedClaim, claims_of, judged_claims
from gradveil.papers.comparison import ComparedCell, ComparedTable, compare
from gradveil.papers.cost_estimate import CostEstimate
from gradveil.papers.documented import recorded_cells, recorded_claims, recorded_tables
from gradveil.papers.paper import (
    PaperStudy,
    TableOverview,
    find_study,
    studies,
)
from gradveil.papers.records import Record, best
from gradveil.papers.study import SCALES, Cell, Study
from gradveil.papers.table_formats import FORMATS
from gradveil.papers.table_run import RowRun, row_runs, run_row

__all__ = [
    "FORMATS",
    "SCALES",
    "Cell",
    "Claim",
    "ComparedCell",
    "ComparedTable",
    "CostEstimate",
    "JudgedClaim",
    "PaperStudy",
    "Record",
    "RowRun",
    "Study",
    "TableOverview",
    "best",
    "claims_of",
    "compare",
    "find_study",
    "judged_claims",
    "recorded_cells",
    "recorded_claims",
    "recorded_tables",
    "row_runs",
    "run_row",
    "studies",
]
