"""The version of this library, read from what pip installed: that takes longer than all else at start-up."""

from importlib.metadata import version

__version__ = version("gradveil")
"""The version of the installed package."""
