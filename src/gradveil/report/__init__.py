"""One self-contained page that says what was recovered and what stopped it."""

from gradveil.report.page import page, write_report
from gradveil.report.training_page import training_page

__all__ = ["page", "training_page", "write_report"]
