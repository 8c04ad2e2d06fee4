"""Figures of an hour: percentiles from buckets, what is known and what is not, and where versions changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from commandbus.model.minute_figures import BUCKETS, MinuteRow, WorkerLife, added, bucket_of, hours_of, percentile

NOW = datetime(2026, 5, 4, 12, 30, 20, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def counts(*waits: float) -> list[int]:
    return added([[int(bucket_of(wait) == n) for n in range(BUCKETS)] for wait in waits])


@pytest.mark.parametrize("seconds", [0.0015, 0.03, 1.0, 59.0, 3600.0, 50_000.0])
def test_a_percentile_is_right_within_a_fifth(seconds: float) -> None:
    found = percentile(counts(seconds), 0.5)
    assert found is not None
    assert 0.8 <= found / seconds <= 1.25


def test_percentiles_of_many() -> None:
    waits = counts(*[0.01] * 98, 5.0, 5.0)
    assert percentile(waits, 0.5) == pytest.approx(0.01, rel=0.25)
    assert percentile(waits, 0.99) == pytest.approx(5.0, rel=0.25)
    assert percentile([0] * BUCKETS, 0.5) is None


@pytest.mark.parametrize("odd", [float("-inf"), -5.0, 0.0, float("nan")])
def test_a_wait_that_cannot_be_counts_as_none_at_all(odd: float) -> None:
    assert bucket_of(odd) == 0


def test_a_wait_longer_than_any_bucket() -> None:
    assert bucket_of(1e12) == BUCKETS - 1


def test_what_nobody_knows_is_none_and_not_zero() -> None:
    start = NOW.replace(second=0)
    row = MinuteRow(start - 3 * MINUTE, "orders", 120, None, counts(0.5))
    life = WorkerLife(["orders"], "1", start - 10 * MINUTE, start - 2 * MINUTE)
    (hour,) = hours_of(["orders"], NOW, [row], [life])
    assert len(hour.minutes) == 60
    assert [item.settled for item in hour.minutes[-11:]] == [None, *[0] * 7, 120, None, None][-11:]
    assert hour.minutes[-3].ready is None
    assert hour.minutes[-4].ready == 0
    assert hour.minutes[-4].wait_p50 is None
    assert hour.minutes[-3].wait_p50 == pytest.approx(0.5, rel=0.25)
    assert hour.wait_p99 == pytest.approx(0.5, rel=0.25)


def test_a_domain_that_no_worker_serves_has_no_figures() -> None:
    life = WorkerLife(["orders"], "1", NOW - 90 * MINUTE, NOW)
    (hour,) = hours_of(["mail"], NOW, [], [life])
    assert {(item.settled, item.ready, item.wait_p50) for item in hour.minutes} == {(None, None, None)}
    assert (hour.wait_p50, hour.wait_p99, hour.marks) == (None, None, [])


def test_a_version_is_marked_when_its_first_worker_came() -> None:
    def life(version: str, minutes: float) -> WorkerLife:
        return WorkerLife(["orders"], version, NOW - minutes * MINUTE, NOW)

    lives = [life("b", 10), life("a", 200), life("a", 5), life("b", 8), life("c", 1)]
    (hour,) = hours_of(["orders"], NOW, [], lives)
    assert [(mark.version, (NOW - mark.at) / MINUTE) for mark in hour.marks] == [("b", 10), ("c", 1)]
