"""The names, settings and defaults that the command line shows, read from a file that `make_index` writes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""What `gradveil list` shows of one entry, by column."""
FILE = Path(__file__).with_name("index.json")
"""Where the index lies."""


@cache
def read_index() -> dict[str, Any]:
    """Read the index, which callers must not change."""
    return json.loads(FILE.read_text(encoding="utf-8"))
