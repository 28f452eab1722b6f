"""The command line: `gradveil audit`, `train`, `report`, `summary`, `list`, `check` and more."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C is quiet even while torch is still being imported."""
    from gradveil.core.errors import INTERRUPTED

    try:
        from gradveil.cli.app import main as begin
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(INTERRUPTED)
    begin()
