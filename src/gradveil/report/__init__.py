"""Results of audits and trainings as one self-contained HTML page, as tables and as CSV."""

from gradveil.report.assurance_page import assurance_page, write_assurance
from gradveil.report.audit_page import audit_page
from gradveil.report.figures import draw_figure
from gradveil.report.notebook import inverted_html, result_html
from gradveil.report.report_file import write_report
from gradveil.report.training_page import training_page

__all__ = [
    "assurance_page",
    "audit_page",
    "draw_figure",
    "inverted_html",
    "result_html",
    "training_page",
    "write_assurance",
    "write_report",
]
