"""The command that was given, as it is to be given again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

_FRESH = "--fresh"


def again() -> str:
    """Write the command that was given; --fresh would throw away what it finished."""
    return shlex.join(["gradveil", *kept(sys.argv[1:])])


def kept(words: Iterable[str]) -> list[str]:
    """Leave out what removes results.

    >>> kept(["gradveil", "train", "digits", "--fresh"])
    ['gradveil', 'train', 'digits']
    """
    return [word for word in words if word != _FRESH]
