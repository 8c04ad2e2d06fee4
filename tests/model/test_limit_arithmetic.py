"""The sums of limits: rates, shares and back-off. Every back end must come to the same."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st

from commandbus.model.limit import (
    BACKOFF_JITTER,
    BACKOFF_SECONDS,
    GRAIN_SECONDS,
    allowance,
    backoff,
    share,
    until_next,
)

rates = st.floats(0.01, 1000)
bursts = st.integers(1, 50)
steps = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 60)), min_size=1, max_size=40)
starts = st.sampled_from([0.0, 1.0e6, 1_800_000_000.0])


def run(start: float, steps: list[tuple[float, int]], per_second: float, burst: int) -> list[tuple[float, int]]:
    """Ask at each step, some seconds after the one before; when, and how many were granted."""
    now, tat, given = start, 0.0, []
    for pause, wanted in steps:
        now += pause
        granted, tat = allowance(now, tat, per_second, burst, wanted)
        assert 0 <= granted <= wanted
        given.append((now, granted))
    return given


# --- rates -----------------------------------------------------------------------------------------------------


@given(start=starts, steps=steps, per_second=rates, burst=bursts)
def test_no_window_of_time_has_more_than_the_burst_and_what_the_rate_adds(
    start: float, steps: list[tuple[float, int]], per_second: float, burst: int
) -> None:
    moments = run(start, steps, per_second, burst)
    for first, (begin, _) in enumerate(moments):
        total = 0
        for now, granted in moments[first:]:
            total += granted
            # Epoch seconds are exact to 2.4e-7 s, and each grant may be off by half of that.
            grain = (GRAIN_SECONDS + math.ulp(start) * (1 + len(steps))) * per_second
            assert total <= burst + (now - begin) * per_second + grain + 2e-6


@given(start=starts, steps=steps, per_second=rates, burst=bursts)
def test_nobody_waits_for_nothing(
    start: float, steps: list[tuple[float, int]], per_second: float, burst: int
) -> None:
    """Work-conserving: when more were wanted than granted, one more would have broken the promise."""
    now, tat = start, 0.0
    for pause, wanted in steps:
        now += pause
        ahead = max(tat - now, 0.0) * per_second  # how full the bucket is
        granted, after = allowance(now, tat, per_second, burst, wanted)
        if granted < wanted:
            assert ahead + granted + 1 > burst
            assert until_next(now, after, per_second, burst) > 0
        tat = after


@given(start=starts, steps=steps, per_second=rates, burst=bursts, cuts=st.lists(st.integers(0, 60), max_size=5))
@example(start=1_800_000_000.0, steps=[(0.0, 8)], per_second=131.0, burst=8, cuts=[3])
def test_asking_in_parts_gives_as_much_as_asking_at_once(
    start: float, steps: list[tuple[float, int]], per_second: float, burst: int, cuts: list[int]
) -> None:
    now, whole, parts = start, 0.0, 0.0
    for pause, wanted in steps:
        now += pause
        at_once, whole = allowance(now, whole, per_second, burst, wanted)
        in_parts = 0
        edges = sorted({0, wanted, *(cut for cut in cuts if cut < wanted)})
        for low, high in pairwise(edges):
            granted, parts = allowance(now, parts, per_second, burst, high - low)
            in_parts += granted
        assert in_parts == at_once
        assert abs(parts - whole) < GRAIN_SECONDS * (1 + len(steps))
        parts = whole  # so that it is this step that is looked at, and not rounding that adds up


@given(start=starts, per_second=rates, burst=bursts)
def test_after_the_wait_that_was_told_one_may_begin(start: float, per_second: float, burst: int) -> None:
    granted, tat = allowance(start, 0.0, per_second, burst, burst + 1)
    assert granted == burst
    wait = until_next(start, tat, per_second, burst)
    assert 0 < wait <= 1 / per_second
    assert allowance(start + wait * 0.9, tat, per_second, burst, 1)[0] == 0 or wait * per_second < 1e-5
    assert allowance(start + wait + 1e-6, tat, per_second, burst, 1)[0] == 1


def test_a_steady_stream_gets_exactly_its_rate() -> None:
    """120 a minute, asked for far more often: after the burst, two a second and no fewer."""
    moments = run(1_800_000_000.0, [(0.01, 3)] * 6000, 2.0, 5)
    assert 5 + 119 <= sum(granted for _, granted in moments) <= 5 + 120
    assert sum(granted for _, granted in moments[:1]) == 3


@given(now=starts, later=st.floats(0, 1e9), per_second=rates, burst=bursts)
@example(now=0.0, later=3600.0, per_second=2.0, burst=1)
def test_a_moment_left_by_another_rate_or_clock_shuts_the_limit_for_one_burst_at_most(
    now: float, later: float, per_second: float, burst: int
) -> None:
    _, tat = allowance(now, now + later, per_second, burst, 1)
    assert until_next(now, tat, per_second, burst) <= 1 / per_second
    granted, _ = allowance(now + burst / per_second + 1e-6, tat, per_second, burst, burst)
    assert granted == burst


def test_nothing_wanted_changes_nothing() -> None:
    assert allowance(100.0, 100.4, 2.0, 1, 0) == (0, 100.4)
    assert allowance(100.0, 50.0, 2.0, 1, 0) == (0, 50.0)
    assert allowance(100.0, 50.0, 2.0, 1, -3) == (0, 50.0)


# --- shares ----------------------------------------------------------------------------------------------------


@given(limit=st.integers(1, 500), workers=st.integers(1, 700))
def test_the_shares_of_all_workers_never_exceed_the_limit(limit: int, workers: int) -> None:
    shares = [share(limit, rank, workers) for rank in range(workers)]
    assert sum(shares) <= limit
    if workers <= limit:
        assert set(shares) == {limit // workers}
        assert sum(shares) > limit - workers  # what is left is less than one each
    else:
        assert shares == [1] * limit + [0] * (workers - limit)


@given(limit=st.integers(1, 500), workers=st.integers(0, 700), rank=st.integers(-5, 1000))
def test_who_is_not_among_the_workers_has_no_share(limit: int, workers: int, rank: int) -> None:
    assume(not 0 <= rank < max(workers, 1))
    assert share(limit, rank, workers) == 0


def test_a_worker_that_knows_of_no_other_has_all() -> None:
    assert [share(5, 0, workers) for workers in (0, 1, 2, 3, 5, 6)] == [5, 5, 2, 1, 1, 1]
    assert share(5, 5, 6) == 0


# --- back-off --------------------------------------------------------------------------------------------------

spreads = st.floats(0, 1, exclude_max=True)


@given(step=st.integers(1, 100), spread=spreads)
def test_back_off_is_2_4_8_16_30_seconds_within_the_jitter(step: int, spread: float) -> None:
    base = (2, 4, 8, 16, 30)[min(step, 5) - 1]
    assert base * (1 - BACKOFF_JITTER) <= backoff(BACKOFF_SECONDS, step, spread=spread) <= base
    assert backoff(BACKOFF_SECONDS, step, spread=0) == base


@given(schedule=st.lists(st.floats(0, 1e6), min_size=1), step=st.integers(-3, 50), spread=spreads)
def test_the_last_wait_repeats_and_there_is_none_before_the_first(
    schedule: list[float], step: int, spread: float
) -> None:
    wait = backoff(schedule, step, spread=spread)
    if step >= len(schedule):
        assert wait == backoff(schedule, len(schedule), spread=spread)
    if step < 1:
        assert wait == backoff(schedule, 1, spread=spread)


@given(step=st.integers(1, 5), low=spreads, high=spreads)
def test_the_jitter_spreads_a_herd(step: int, low: float, high: float) -> None:
    assume(high - low > 0.01)
    assert backoff(BACKOFF_SECONDS, step, spread=low) > backoff(BACKOFF_SECONDS, step, spread=high)
