"""Backoff: from the first pause to the longest, by doubling."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus.model.reconnect_backoff import Backoff
from support.running import examples

SECONDS = st.floats(0.001, 1000)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.seconds == 0.0
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.seconds == 3.0


def test_after_a_success_they_begin_again() -> None:
    backoff = Backoff(0.5, 3.0)
    for _ in range(4):
        backoff.next()
    backoff.reset()
    assert [backoff.next(), backoff.next()] == [0.5, 1.0]


@settings(max_examples=examples(100, thorough=1000))
@given(SECONDS, SECONDS, st.integers(1, 5000))
def test_no_pause_is_shorter_than_the_last_or_longer_than_the_longest(
    first: float, longest: float, tries: int
) -> None:
    backoff = Backoff(first, longest)
    pauses = [backoff.next() for _ in range(tries)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] == min(first, longest)
    assert pauses[-1] <= longest
