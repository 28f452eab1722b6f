"""The Pareto front: what nothing else beats in one respect without losing in another."""

from __future__ import annotations

from collections.abc import Sequence

Point = Sequence[float]
"""What is to be kept small, one number a respect."""


def dominates(one: Point, other: Point) -> bool:
    """Say whether a point is nowhere larger than another, and somewhere smaller. Equal points leave each other alone.

    >>> dominates((1, 2), (1, 3)), dominates((1, 3), (2, 2)), dominates((1, 2), (1, 2))
    (True, False, False)
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def front(points: Sequence[Point]) -> list[int]:
    """Return the places of the points that none dominates, in order.

    >>> front([(0, 3), (1, 1), (2, 2), (3, 0), (1, 1)])
    [0, 1, 3, 4]
    """
    return [place for place, own in enumerate(points) if not any(dominates(other, own) for other in points)]


def beaten_by(points: Sequence[Point]) -> dict[int, list[int]]:
    """Return, for every point that is not on the front, the places of those on it that dominate it."""
    members = front(points)
    found = {place: [m for m in members if dominates(points[m], own)] for place, own in enumerate(points)}
    return {place: by for place, by in found.items() if by}
