"""When a command type is in trouble: the arithmetic of its bad attempts and of what ended otherwise."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.breaker import Breaker
from commandbus.model.breaker_rule import (
    LEAST_KEPT,
    MOST_MOMENTS,
    AttemptCounts,
    BadAttempt,
    find_trouble,
    kept,
    moments,
)

FIVE = Breaker()
NOW = 1_800_000_000.0


def stuck(n: int, *, began: float = NOW, step: float = 0.0, commands: int | None = None) -> list[BadAttempt]:
    """So many stuck attempts, each of a command of its own unless there are fewer."""
    return [BadAttempt(k % (commands or n), True, began + k * step, began + k * step + 300) for k in range(n)]


def ended(at: list[float]):
    """Attempts that ended otherwise, at these moments."""
    return lambda since: float(sum(each >= since for each in at))


def test_five_hanging_among_a_thousand_good_are_no_trouble_of_the_type() -> None:
    good = [NOW + n * 0.3 for n in range(1000)]
    assert find_trouble(FIVE, stuck(5), ended(good)) is None
    assert find_trouble(FIVE, stuck(5, step=50), ended(good)) is None


def test_after_an_hour_of_successes_the_first_full_round_of_stuck_slots_is_trouble() -> None:
    good = [NOW - 3600 + n * 0.1 for n in range(36_000)]  # the last of them ends as the first stuck one begins
    found = find_trouble(FIVE, stuck(8, step=0.01), ended(good))
    assert found is not None
    assert (found.how, found.bad, found.commands, found.ended) == ("stuck", 5, 5, 5)
    assert found.text("12:03:07 UTC") == "5 of 5 attempts stuck since 12:03:07 UTC (5 commands)"


def test_a_stray_stuck_attempt_long_before_hides_nothing() -> None:
    good = [NOW - 3000 + n for n in range(2990)]
    assert find_trouble(FIVE, [*stuck(1, began=NOW - 3000), *stuck(5)], ended(good)) is not None


def test_fewer_than_enough_or_of_too_few_commands_are_no_trouble() -> None:
    assert find_trouble(FIVE, stuck(4)) is None
    assert find_trouble(FIVE, stuck(50, step=1, commands=2)) is None
    assert find_trouble(FIVE, stuck(50, step=1, commands=3)) is not None
    assert find_trouble(Breaker(stuck=2), stuck(2)) is not None, "two commands do, of two attempts"
    assert find_trouble(Breaker(stuck=2), stuck(2, commands=1)) is None
    assert find_trouble(Breaker(stuck=1), stuck(1)) is not None
    assert find_trouble(Breaker.off(), stuck(50)) is None


def test_exactly_half_is_trouble() -> None:
    assert find_trouble(FIVE, stuck(5), lambda _: 5.0) is not None
    assert find_trouble(FIVE, stuck(5), lambda _: 6.0) is None
    assert find_trouble(FIVE, stuck(5), lambda _: math.inf) is None


def test_failures_count_stuck_attempts_too_and_are_among_those_that_ended() -> None:
    rule = Breaker(stuck=0, failures=4)
    bad = [BadAttempt(n, n == 0, NOW, NOW + 1) for n in range(4)]
    assert find_trouble(rule, bad, lambda _: 3.0) is not None, "the three others that ended are the failures"
    found = find_trouble(rule, bad, lambda _: 7.0)
    assert found is not None
    assert (found.how, found.bad, found.ended) == ("failed", 4, 8)
    assert find_trouble(rule, bad, lambda _: 8.0) is None


@given(
    began=st.lists(st.floats(0, 3000), max_size=40),
    good=st.lists(st.floats(0, 3600), max_size=60),
    enough=st.integers(1, 8),
    commands=st.integers(1, 6),
)
def test_it_is_trouble_exactly_if_it_is_for_some_of_the_last(
    began: list[float], good: list[float], enough: int, commands: int
) -> None:
    bad = [BadAttempt(n % commands, True, at, at + 300) for n, at in enumerate(began)]

    def is_trouble_since(since: float) -> bool:
        some = [item for item in bad if item.began >= since]
        different = len({item.command for item in some})
        others = sum(at >= since for at in good)
        return len(some) >= enough and different >= min(3, enough) and len(some) >= others

    expected = any(is_trouble_since(item.began) for item in bad)
    assert (find_trouble(Breaker(stuck=enough), bad, ended(good)) is not None) == expected


def test_what_has_left_the_window_is_forgotten_and_a_row_stays_small() -> None:
    bad = stuck(500, began=NOW - 3000, step=1)
    assert len(kept(FIVE, bad, NOW)) == LEAST_KEPT
    assert kept(FIVE, bad, NOW)[-1] == bad[-1]
    assert kept(FIVE, bad, NOW + 10_000) == []
    assert len(kept(Breaker(stuck=100), bad, NOW)) == 400
    assert kept(FIVE, [bad[1], bad[0]], NOW) == bad[:2], "in the order of their ends"


@given(st.lists(st.floats(0, 1e9), max_size=300))
def test_moments_are_few_ascend_and_contain_the_last(began: list[float]) -> None:
    found = moments([BadAttempt(1, True, at, at) for at in began])
    assert len(found) <= MOST_MOMENTS
    assert found == sorted(set(found))
    assert found[-1:] == sorted(began)[-1:]


def test_a_tally_tells_at_most_how_many_and_can_be_stored() -> None:
    tally = AttemptCounts(30.0, [10.0, 20.0], [None, 4])
    assert AttemptCounts.from_json(json.loads(json.dumps(tally.to_json()))) == tally
    assert tally.after(9.9) is None
    assert tally.after(10.0) == math.inf
    assert tally.after(15.0) == math.inf
    assert tally.after(20.0) == tally.after(99.0) == pytest.approx(4)
