"""The frame of every page: headline, sections, one style and one script, in a file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from gradveil.audit.verdict import LEVELS
from gradveil.core.formatting import duration, number, percent, size

TEMPLATES = Path(__file__).parent / "templates"
"""The folder of templates, scripts and the style."""
_SCRIPTS = ("page.js", "plots.js", "front.js", "budget.js", "curves.js")
_ICONS = {"broken": "✕", "leaks": "!", "not broken": "✓", "inconclusive": "~", "not tested": "?"}


class PageSection(NamedTuple):
    """A section of a page: its anchor, its label in the navigation, its title, and its template."""

    id: str
    label: str
    title: str
    template: str


def section(id: str, label: str, title: str, template: str = "") -> PageSection:
    """Make a section whose template has the name of its anchor unless another is given."""
    return PageSection(id, label, title, template or id)


def frame(info: Mapping[str, Any], kind: str, name: str, config: Any, hardware: str = "") -> dict[str, Any]:
    """Return the values that every page shows about its run."""
    created = f"{str(info['created']).replace('T', ' ')[:16]} UTC" if info.get("created") else ""
    return {
        "kind": kind,
        "name": name,
        "version": info.get("gradveil") or "",
        "origin": [text for text in (created, hardware) if text],
        "command": info.get("command", ""),
        "config": json.dumps(config, indent=2, ensure_ascii=False),
    }


def points(share: float) -> str:
    """Write a difference of shares in percentage points.

    >>> points(-0.0123), points(0.4)
    ('−1.2', '+40.0')
    """
    return f"{100 * share:+.1f}".replace("-", "−")


def setting_name(name: str) -> Markup:
    """Write the name of a setting so that lines break behind its brackets, and not in a number.

    >>> setting_name("dp(clip=1, sigma=1e-3)")
    Markup('dp(<wbr>clip=1, sigma=<span class="nowrap">1e-3</span>)')
    """
    return Markup(
        re.sub(r"\b\d[\d.]*e-\d+", r'<span class="nowrap">\g<0></span>', str(escape(name)).replace("(", "(<wbr>"))
    )


@cache
def templates() -> jinja2.Environment:
    """Return the environment of all pages: every text is escaped, numbers are written alike, nothing is read twice."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "size": size,
        "duration": duration,
        "points": points,
        "setting_name": setting_name,
    }
    environment.globals |= {"levels": LEVELS, "icons": _ICONS}
    environment.globals["parts"] = environment.get_template("parts.html.j2").module
    return environment


def render(template: str, sections: Sequence[PageSection], context: Mapping[str, Any]) -> str:
    """Render a page with these sections. Every text of the context is escaped."""
    script = Markup("\n").join(map(_asset, _SCRIPTS))
    return (
        templates()
        .get_template(template)
        .render(**context, sections=sections, style=_asset("style.css"), script=script)
    )


def _asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
