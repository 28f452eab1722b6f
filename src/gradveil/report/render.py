"""From a template and what it shows to one HTML file that holds its styles and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gradveil.core.words import number, percent, size

TEMPLATES = Path(__file__).parent / "templates"
"""Where pages, styles and scripts lie."""


def render(template: str, scripts: Sequence[str], context: Mapping[str, Any]) -> str:
    """Render a page with these scripts, in this order. Every text of the context is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number, "size": size}
    return environment.get_template(template).render(
        **context, style=_asset("style.css"), scripts=[_asset(name) for name in scripts]
    )


def _asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
