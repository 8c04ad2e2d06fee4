"""What happened in a domain, minute by minute: the buckets in which waits are counted, and the figures of an hour.

Pure: from what the database has to what is shown. A figure that nobody knows is None, never 0.

A bucket is wider than the one before by a factor of √2, so a percentile is right within a fifth. The first ends at
one millisecond, and the last has everything from about a day on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import datetime, timedelta
from typing import Final

from commandbus.quick_dataclass import dataclass

FIRST_SECONDS: Final = 0.001
BUCKETS: Final = 54
MINUTES: Final = 60
RECENT_MINUTES: Final = 5
"""Percentiles of waits that are shown as numbers are those of so many minutes, the current one included."""
MOST_COUNTED: Final = 10_000
MOST_MARKS: Final = 20
_MINUTE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class MinuteFigures:
    """One minute of a domain. `settled` is how many attempts workers settled, `ready` how many commands could run
    then (counted up to 10,000). The waits are seconds from when a command was due until a worker claimed it; None
    if none was claimed. Any other figure is None if no worker was there to tell."""

    at: datetime
    settled: int | None
    ready: int | None
    wait_p50: float | None
    wait_p99: float | None


@dataclass(frozen=True, slots=True)
class VersionMark:
    """From then on, workers of the domain ran another version."""

    at: datetime
    version: str


@dataclass(frozen=True, slots=True)
class HourFigures:
    """The last sixty whole minutes of a domain, the oldest first. `wait_p50` and `wait_p99` are those of the last
    five minutes; None if nothing was claimed in them."""

    domain: str
    minutes: list[MinuteFigures]
    wait_p50: float | None
    wait_p99: float | None
    marks: list[VersionMark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MinuteRow:
    """A row of `commandbus.minute_figure`."""

    at: datetime
    domain: str
    settled: int
    ready: int | None
    waits: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """From when to when a worker was there, for which domains, and with which version."""

    domains: Sequence[str]
    version: str
    started_at: datetime
    seen_at: datetime


def bucket_of(seconds: float) -> int:
    """The bucket of a wait."""
    if not seconds > FIRST_SECONDS:
        return 0
    return min(BUCKETS - 1, 1 + int(2 * math.log2(seconds / FIRST_SECONDS)))


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The wait that this share of all stays below, in seconds; None if none was counted."""
    total = sum(counts)
    if total <= 0:
        return None
    sums = itertools.accumulate(counts)
    bucket = next(number for number, seen in enumerate(sums) if seen >= share * total)
    return FIRST_SECONDS * 2 ** ((bucket - 0.5) / 2) if bucket else FIRST_SECONDS / 2


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """Several counts as one."""
    total = [0] * BUCKETS
    for each in counts:
        for bucket, count in enumerate(each[:BUCKETS]):
            total[bucket] += count
    return total


def hours_of(
    domains: Iterable[str], now: datetime, rows: Iterable[MinuteRow], lives: Sequence[WorkerLife]
) -> list[HourFigures]:
    """The last hour of each domain, by the database's clock."""
    by_domain: dict[str, dict[datetime, MinuteRow]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, {})[row.at] = row
    return [_hour(domain, now, by_domain.get(domain, {}), lives) for domain in domains]


def _hour(
    domain: str, now: datetime, rows: Mapping[datetime, MinuteRow], lives: Sequence[WorkerLife]
) -> HourFigures:
    here = [life for life in lives if domain in life.domains]
    current = now.replace(second=0, microsecond=0)
    starts = [current - _MINUTE * back for back in range(MINUTES, 0, -1)]
    recent = added(row.waits for row in rows.values() if row.at > current - _MINUTE * RECENT_MINUTES)
    return HourFigures(
        domain,
        [_minute(start, rows.get(start), here) for start in starts],
        percentile(recent, 0.5),
        percentile(recent, 0.99),
        _marks(here, starts[0]),
    )


def _minute(start: datetime, row: MinuteRow | None, lives: Sequence[WorkerLife]) -> MinuteFigures:
    """A minute without a row is one in which nothing happened, if a worker was there all the time to tell."""
    if row is None:
        is_known = any(life.started_at <= start and life.seen_at >= start + _MINUTE for life in lives)
        none = 0 if is_known else None
        return MinuteFigures(start, none, none, None, None)
    return MinuteFigures(start, row.settled, row.ready, percentile(row.waits, 0.5), percentile(row.waits, 0.99))


def _marks(lives: Sequence[WorkerLife], since: datetime) -> list[VersionMark]:
    """When the first worker of each version came. The version that was there before the hour is no change."""
    first: dict[str, datetime] = {}
    for life in sorted(lives, key=lambda life: life.started_at):
        first.setdefault(life.version, life.started_at)
    found = [VersionMark(at, version) for version, at in first.items()]
    changes = [mark for number, mark in enumerate(found) if mark.at >= since and number > 0]
    return changes[-MOST_MARKS:]
