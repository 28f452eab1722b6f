"""Figures for papers, drawn from run directories with matplotlib (the extra `plot`)."""

from gradveil.report.figures.figure_kinds import KINDS
from gradveil.report.figures.paper_figure import draw_figure

__all__ = ["KINDS", "draw_figure"]
