"""Limits, breakers and schedules in numbers, for metrics. Reads only, except `count_granted`: it tells PostgreSQL
now and then how many permits Redis gave, so that all programs can see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.limits.redis_outage import HeartbeatPace, Program
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.quick_dataclass import dataclass

MOST_COUNTED = 10_000
MOST_SCHEDULES = 1000


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """One limit. `permits` is None if any number may be in use at once. The counters begin when it was
    declared."""

    name: str
    permits: int | None
    in_use: int
    parked: int
    callers: int
    backoff_seconds: float
    breaker_open: bool
    is_degraded: bool
    granted: int
    rate_limited: int
    waits: int
    waited_seconds: float


class BreakerFigures(NamedTuple):
    """The breaker of one command type: is it open, how many stuck attempts it counts, how many commands it
    parks."""

    breaker_open: bool
    stuck: int
    parked: int


class ScheduleFigures(NamedTuple):
    """One schedule: by how many seconds it is late, commands that it sent, firings that it skipped."""

    late_seconds: float
    fired: int
    skipped: int


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """All limits, the breakers of command types, by (domain, command_type), and schedules, by (domain, name)."""

    limits: tuple[LimitFigures, ...] = ()
    breakers: Mapping[tuple[str, str], BreakerFigures] = field(default_factory=dict)
    schedules: Mapping[tuple[str, str], ScheduleFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RedisFleet:
    """Where permits of Redis limits are kept now, and the permits that PostgreSQL counts: limit → token →
    seconds."""

    mode: str
    epoch: str | None
    tokens: Mapping[str, Mapping[str, float]]
    blocked_seconds: float | None = None  # for how long no call may begin
    note: str | None = None  # why


@operation(atomic=False)
def figures(domains: Sequence[str]) -> Steps[FleetFigures]:
    """All limits, and the breakers and schedules of these domains."""
    rows = yield Statement(sql.text("limits/metrics"), {"most": MOST_COUNTED, "alive": HeartbeatPace().live})
    found = yield Statement(sql.text("breakers/metrics"), {"domains": list(domains), "most": MOST_COUNTED})
    breakers = {(domain, command_type): BreakerFigures(*rest) for domain, command_type, *rest in found}
    timed = yield Statement(sql.text("schedules/figures"), {"domains": list(domains), "most": MOST_SCHEDULES})
    schedules = {(domain, name): ScheduleFigures(*rest) for domain, name, *rest in timed}
    return FleetFigures(tuple(LimitFigures(*row) for row in rows), breakers, schedules)


@operation(atomic=False)
def redis_fleet() -> Steps[RedisFleet]:
    """What PostgreSQL knows about permits in Redis."""
    modes = yield Statement(sql.text("limits/mode_read"))
    rows = yield Statement(sql.text("limits/client_list", locking=""))
    tokens: dict[str, dict[str, float]] = {}
    for *columns, _, now in rows:
        program = Program(*columns)
        for name in program.held:
            left = {token: ends - now for token, ends in program.tokens(name, now).items()}
            tokens.setdefault(name, {}).update(left)
    mode, epoch, seconds, note = modes[0] if modes else ("redis", None, None, None)
    return RedisFleet(mode, epoch, tokens, seconds, note)


@operation(atomic=False)
def count_granted(granted: Mapping[str, int], seconds: float) -> Steps[None]:
    """Tell how many permits of Redis limits were given here within so many seconds."""
    for name, count in sorted(granted.items()):
        yield Statement(sql.text("limits/count"), {"name": name, "count": count, "seconds": seconds})
