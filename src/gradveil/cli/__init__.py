"""The command line: `gradveil audit`, `report`, `summary`, `list`, `check`."""

from gradveil.cli.app import app, main

__all__ = ["app", "main"]
