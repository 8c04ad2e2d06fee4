"""The next firings of all schedules within some time, and those that were missed. Every list is bounded: the
schedules are read once, and the times are computed here."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice, takewhile
from typing import Final

from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.flow.schedules.operate import ScheduleRecord, read_records
from commandbus.model import names
from commandbus.model.durations import Duration, parse_seconds
from commandbus.quick_dataclass import dataclass

MOST_SCHEDULES: Final = 100
MOST_FIRINGS: Final = 20
MOST_MISSED: Final = 10
LONGEST_SECONDS: Final = 366 * 86400
LATE: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class ScheduleFirings:
    """A schedule, its next firings (at most 20; `has_more`: there are others within the time), and the last ten
    that it has missed: because it is late, or paused."""

    schedule: ScheduleRecord
    firings: list[datetime]
    missed: list[datetime]
    has_more: bool


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """The firings between two moments of the server's clock. `has_more`: there are more than 100 schedules."""

    start: datetime
    end: datetime
    schedules: list[ScheduleFirings]
    has_more: bool


@operation(atomic=False)
def timeline(domain: str | None, *, seconds: float) -> Steps[ScheduleTimeline]:
    """The next firings of the schedules of a domain, or of all, within so many seconds (`check_within`)."""
    if domain is not None:
        names.check_domain(domain)
    found = yield from read_records(domain, None, limit=MOST_SCHEDULES + 1)
    now: datetime = (yield Statement(b"SELECT pg_catalog.clock_timestamp()"))[0][0]
    end = now + timedelta(seconds=seconds)
    shown = [_firings(record, now, end) for record in found[:MOST_SCHEDULES]]
    return ScheduleTimeline(now, end, shown, len(found) > MOST_SCHEDULES)


def check_within(within: Duration) -> float:
    """The seconds of a span; raises ValueError if it makes no sense."""
    seconds = parse_seconds(within, name="within")
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidCommandError(f"within is {within!r}: it must be more than 0 and at most a year")
    return seconds


def _firings(record: ScheduleRecord, now: datetime, end: datetime) -> ScheduleFirings:
    soon = takewhile(lambda moment: moment <= end, record.times.after(now))
    found = list(islice(soon, MOST_FIRINGS + 1))
    return ScheduleFirings(record, found[:MOST_FIRINGS], _missed(record, now), len(found) > MOST_FIRINGS)


def _missed(record: ScheduleRecord, now: datetime) -> list[datetime]:
    if record.paused_at is not None:
        return record.times.newest(record.paused_at, now, MOST_MISSED)
    if record.next_at is not None and record.next_at < now - LATE and record.waiting_since is None:
        return record.times.newest(record.next_at - timedelta(microseconds=1), now, MOST_MISSED)
    return []
