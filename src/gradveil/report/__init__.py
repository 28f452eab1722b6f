"""One self-contained page that says what was recovered and what stopped it."""

from gradveil.report.page import page, write_report

__all__ = ["page", "write_report"]
