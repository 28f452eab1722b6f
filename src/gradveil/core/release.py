"""The version of this library. A module of its own, because reading package metadata dominates start-up time."""

from importlib.metadata import version

__version__ = version("gradveil")
"""The version of the installed package."""
