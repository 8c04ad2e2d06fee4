"""Look at permits in Redis without taking part: a program that only looks does not count in the fleet, holds
nothing, and needs no right to write. If it cannot reach Redis, it says so ("unknown") instead of guessing.
"""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.limits.declare import LimitRow
from commandbus.flow.limits.inspect import UNKNOWN
from commandbus.flow.limits.metrics import RedisFleet
from commandbus.limits.stores.redis.scripts import EpochError, RedisLostError, RedisScripts, StaleError
from commandbus.model.limit import PermitUsage
from commandbus.settings import Settings

LOST_DATA = "Redis is back, or has lost its data"
SHARED = "programs outside the fleet may hold permits (shared)"


def look_at(settings: Settings, rows: Sequence[LimitRow], fleet: RedisFleet) -> dict[str, PermitUsage]:
    """How the permits of these limits, all kept in Redis, are used. Waits for Redis a second at most."""
    if fleet.mode == "degraded":
        return {row.name: _degraded(row, fleet) for row in rows}
    if settings.redis_url is None:
        return _unknown(rows, "the permits are in Redis, and this program has no redis_url")
    if fleet.epoch is None:  # no program has used Redis yet
        return {row.name: PermitUsage({}, row.usage.flow, fleet.mode) for row in rows}
    found = _unknown(rows, "the permits are in Redis, which this program cannot reach now")
    permits = RedisScripts(settings.redis_url, settings.environment)
    try:
        for row in rows:
            is_blocked = row.limit_state.blocked_until(row.now) is not None
            seen = permits.usage(row, epoch=fleet.epoch, is_blocked=is_blocked)
            found[row.name] = _seen(row, seen, fleet)
    except (RedisLostError, EpochError, StaleError):
        pass  # what was not seen stays unknown
    finally:
        permits.close()
    return found


def _unknown(rows: Sequence[LimitRow], why: str) -> dict[str, PermitUsage]:
    return {row.name: PermitUsage({}, row.usage.flow, UNKNOWN, why) for row in rows}


def _degraded(row: LimitRow, fleet: RedisFleet) -> PermitUsage:
    note = f"Redis is away, and {SHARED}: nobody begins before it is back" if row.shared else None
    return PermitUsage(fleet.tokens.get(row.name, {}), row.usage.flow, fleet.mode, note=note)


def _seen(row: LimitRow, seen: PermitUsage, fleet: RedisFleet) -> PermitUsage:
    """The usage, with the reason why newcomers wait: the fleet registers, or others may hold permits for a
    lease."""
    mode, seconds, note = fleet.mode, None, None
    if fleet.mode == "joining":
        seconds, note = fleet.blocked_seconds, f"{LOST_DATA}: {fleet.note}"
    if row.shared and seen.blocked_seconds is not None:
        mode, seconds, note = "joining", seen.blocked_seconds, f"{LOST_DATA}, and {SHARED}"
    elif not row.shared and any(token.startswith("semaphore/") for token in seen.holders):
        note = "stand-alone semaphores hold permits, and the limit is not declared with shared=True: nobody begins"
    return PermitUsage(seen.holders, seen.flow or row.usage.flow, mode, blocked_seconds=seconds, note=note)
