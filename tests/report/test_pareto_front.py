"""The law of a Pareto front: no member is dominated, and a member dominates every other point."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradveil.report.pareto import dominates, dominators, front

# A small grid, so that many points are equal in one respect or in all.
POINTS = st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 4)] * n), max_size=25))


@given(POINTS)
def test_no_member_is_dominated_and_all_others_are_by_a_member(every: list[tuple[int, ...]]) -> None:
    members, beaten = front(every), dominators(every)
    assert sorted([*members, *beaten]) == list(range(len(every)))
    for place in members:
        assert not any(dominates(other, every[place]) for other in every)
    for place, by in beaten.items():
        assert by
        assert set(by) <= set(members)
        assert all(dominates(every[master], every[place]) for master in by)


@given(POINTS)
def test_the_order_of_points_does_not_matter_and_the_smallest_is_a_member(every: list[tuple[int, ...]]) -> None:
    chosen = {every[place] for place in front(every)}
    turned = every[::-1]
    assert {turned[place] for place in front(turned)} == chosen
    if every:
        assert min(every) in chosen


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=3, max_size=3))
def test_domination_is_a_strict_order(three: list[tuple[int, ...]]) -> None:
    a, b, c = three
    assert not dominates(a, a)
    assert not (dominates(a, b) and dominates(b, a))
    assert dominates(a, c) or not (dominates(a, b) and dominates(b, c))


def test_equal_points_are_on_the_front_together() -> None:
    assert front([(1, 1), (1, 1), (0, 2), (1, 2)]) == [0, 1, 2]
    assert dominators([(1, 1), (1, 1), (0, 2), (1, 2)]) == {3: [0, 1, 2]}
