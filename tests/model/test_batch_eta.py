"""How long the rest of a batch takes: by its pace, by what is known of its waits, or nobody can say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.batch import MOST_LOOKED_AT, BatchPace, Waits, eta

FAST = BatchPace(100.0, 0.5, 100.0)
STALLED = BatchPace(100.0, 3600.0, 1e-9)
NOTHING_YET = BatchPace()


def test_a_batch_that_moves_takes_its_rest_at_its_pace() -> None:
    assert eta(50, 4, FAST, Waits(running=4)) == pytest.approx(0.5)


def test_a_batch_that_stands_still_has_no_figure() -> None:
    assert eta(50, 0, STALLED, Waits(could=50)) is None
    assert eta(50, 4, STALLED, Waits(running=4)) is None
    assert eta(50, 0, STALLED, Waits()) is None
    assert eta(50, 0, NOTHING_YET, Waits(could=50)) is None
    assert eta(0, 0, FAST, Waits()) is None, "what is left waits for a person"


def test_minutes_without_a_member_are_usual_where_a_member_takes_minutes() -> None:
    slow = 1 / 600
    assert eta(3, 1, BatchPace(slow, 500.0, 1e-20), Waits(running=1)) == pytest.approx(1800)
    assert eta(3, 1, BatchPace(slow, 1700.0, 1e-20), Waits(running=1)) == pytest.approx(1800)
    assert eta(3, 1, BatchPace(slow, 1900.0, 1e-20), Waits(running=1)) is None


def test_what_is_known_counts() -> None:
    delayed = Waits(delayed=5, delay_seconds=600.0)
    assert eta(5, 0, STALLED, delayed) == pytest.approx(600.05), "then they run as fast as the others did"
    assert eta(5, 0, FAST, delayed) == pytest.approx(600), "a batch that moves ends no sooner"
    assert eta(6, 0, STALLED, delayed) is None, "nobody knows of the sixth"
    assert eta(5, 1, STALLED, delayed) is None, "nor of the one that runs"
    assert eta(5, 0, NOTHING_YET, delayed) is None, "how long one takes was never measured"
    line = Waits(limited=5, limit_seconds=90.0)
    assert eta(5, 0, NOTHING_YET, line) == pytest.approx(90), "a limit has a pace of its own"
    assert eta(5, 0, STALLED, Waits(limited=5, limit_seconds=None)) is None, "a person has closed it"
    assert eta(10, 0, STALLED, Waits(0, 0, 5, 60.0, 5, 90.0)) == pytest.approx(90)


def test_of_a_large_batch_some_speak_for_all() -> None:
    assert eta(100_000, 0, STALLED, Waits(limited=MOST_LOOKED_AT, limit_seconds=90.0)) == pytest.approx(90)
    assert eta(100_000, 0, STALLED, Waits(could=1, limited=MOST_LOOKED_AT - 1, limit_seconds=90.0)) is None


@given(
    left=st.integers(0, 10**6),
    running=st.integers(0, 10),
    rate=st.just(0.0) | st.floats(1e-9, 1e4),  # one member in thirty years is the slowest that anybody could see
    seconds=st.none() | st.floats(0, 1e9),
    decay=st.floats(0, 1),
)
def test_no_figure_is_longer_than_the_rest_at_a_pace_that_was_seen(
    left: int, running: int, rate: float, seconds: float | None, decay: float
) -> None:
    """ "1361380d" came of a rate that had decayed to nothing."""
    found = eta(left, running, BatchPace(rate, seconds, rate * max(decay, 0.135)), Waits(running=running))
    if found is not None:
        assert found <= left / (rate * 0.13)
