"""Optional packages: imports that name the extra to install where a package is missing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from gradveil.core.errors import fail

Extra = Literal["demo", "dp", "flower", "hub", "metrics", "perceptual", "plot", "ray", "text"]
"""The extras of `pyproject.toml` that users install."""


def install(extra: Extra) -> str:
    """Return the command that installs an extra, for any shell.

    >>> install("demo")
    'pip install "gradveil[demo]"'
    """
    return f'pip install "gradveil[{extra}]"'


@contextmanager
def needs(extra: Extra, where: str) -> Generator[None]:
    """Report an import that fails in the block, with the command that installs its extra.

    >>> with needs("dp", "epsilon"):
    ...     import nowhere
    Traceback (most recent call last):
    ...
    gradveil.core.errors.GradveilError: epsilon: needs the package 'nowhere' -> pip install "gradveil[dp]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise fail(where, f"needs the package '{package}'", install(extra)) from error
    except ImportError as error:
        raise fail(where, f"cannot import what it needs ({error})", install(extra)) from error
