"""Clients x defences x attacks x seeds, run, judged and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.audit.api import Result
    from gradveil.audit.audit_config import RunConfig
    from gradveil.audit.findings import Findings, print_outcome
    from gradveil.audit.gate import Accepted, Gate
    from gradveil.audit.recorded.inverted_update import Inverted
    from gradveil.audit.run_directory import Run, Trial, load_run
    from gradveil.audit.run_file import bundled, read, read_training
    from gradveil.audit.verdict import Price, Verdict, verdicts
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Accepted": "gradveil.audit.gate",
            "Findings": "gradveil.audit.findings",
            "Gate": "gradveil.audit.gate",
            "Inverted": "gradveil.audit.recorded.inverted_update",
            "Price": "gradveil.audit.verdict",
            "Result": "gradveil.audit.api",
            "Run": "gradveil.audit.run_directory",
            "RunConfig": "gradveil.audit.audit_config",
            "Trial": "gradveil.audit.run_directory",
            "Verdict": "gradveil.audit.verdict",
            "bundled": "gradveil.audit.run_file",
            "load_run": "gradveil.audit.run_directory",
            "print_outcome": "gradveil.audit.findings",
            "read": "gradveil.audit.run_file",
            "read_training": "gradveil.audit.run_file",
            "verdicts": "gradveil.audit.verdict",
        },
    )

__all__ = [
    "Accepted",
    "Findings",
    "Gate",
    "Inverted",
    "Price",
    "Result",
    "Run",
    "RunConfig",
    "Trial",
    "Verdict",
    "bundled",
    "load_run",
    "print_outcome",
    "read",
    "read_training",
    "verdicts",
]
