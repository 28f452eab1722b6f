"""The page of the papers' cells shows exactly what the records give."""

from __future__ import annotations

import re
from html import unescape

import pytest

from gradveil.papers import recorded_claims, recorded_tables
from tests.docs.test_pages import DOCS


def test_cells_of_the_page_are_those_of_the_records(hook):
    lines = [line for line in hook.paper_cells().splitlines() if line.startswith("<tr><td")]
    shown = [(table, one) for table in recorded_tables() for one in table.cells]
    assert len(lines) == len(shown)
    for line, (table, one) in zip(lines, shown, strict=True):
        texts = [unescape(text) for text in re.findall(r"<td[^>]*>(.*?)</td>", line)]
        assert texts[1:4] == [table.entry.name, one.cell.setting, one.cell.row]
        assert texts[7].partition("<br>")[0] == one.status
        sorts = re.findall(r'data-sort="([^"]*)"', line)
        if one.ours is not None and one.record is not None:
            wanted = table.study.measurement(one.cell)
            assert wanted is not None
            values = [float(score[wanted.metric]) for score in one.record.scores if score.get(wanted.metric)]
            made = {"mean": sum(values) / len(values), "max": max(values), "min": min(values)}
            ours = made[table.study.content.metrics[one.cell.metric].statistic]
            assert float(sorts[-1]) == pytest.approx(ours * (100 if one.cell.unit == "%" else 1))
            assert one.record.command in texts[10]


def test_claims_of_the_page_are_judged_by_the_records(hook):
    lines = hook.paper_claims().splitlines()[2:]
    assert [line.split("|")[4].strip(" *") for line in lines] == [claim.outcome for claim in recorded_claims()]
    assert "<!-- table: paper-cells -->" in (DOCS / "paper-results.md").read_text("utf-8")
    assert "<!-- table: paper-claims -->" in (DOCS / "results.md").read_text("utf-8")
