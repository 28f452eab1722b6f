"""A reader reaches the first gradient, and the user's model, in few steps."""

from __future__ import annotations

from benchmarks.reading_paths import MOST, START, library_frames, measure, report


def test_paths_to_the_gradient_and_the_model_are_no_longer_than_measured() -> None:
    numbers = report(measure())
    assert numbers["to_first_gradient"][0] == START
    assert {key: numbers[key] for key in MOST if numbers[key] > MOST[key]} == {}


def test_frames_outside_the_library_do_not_count() -> None:
    assert library_frames(None) == ()
