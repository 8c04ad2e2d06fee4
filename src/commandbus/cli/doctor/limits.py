"""Limits: are the permit stores reachable, and do the durations of each limit make sense? Reads only."""

from __future__ import annotations

from commandbus.cli.doctor.findings import Conn, Findings, fail, ok, warn
from commandbus.cli.exit_codes import one_line
from commandbus.db.drivers import run
from commandbus.errors import ConfigurationError
from commandbus.flow.limits.declare import LimitRow, difference, list_limits
from commandbus.flow.limits.metrics import redis_fleet
from commandbus.limits.stores.redis.scripts import RedisLostError, RedisScripts
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.settings import Settings, mask_redis_url
from commandbus.shell_words import quoted

CHECK = "limits"
SHORTEST_RENEWAL_SECONDS = 1.0
_AWAY = {
    "degraded": "all workers lost Redis, and each uses only its share",
    "joining": "Redis is back or has lost its data, and holders register their permits first",
}


def examine(conn: Conn, settings: Settings) -> Findings:
    """The permit stores first, then each limit."""
    rows = run(conn, list_limits())
    in_redis = [row for row in rows if row.store == "redis"]
    if in_redis or settings.redis_url is not None:
        yield from _redis(conn, settings, in_redis)
    troubles = [finding for row in rows for finding in (*_times(row), *_limit_state(row))]
    troubles += _declarations(rows, settings)
    yield from troubles
    if not troubles:
        kept = f", {len(in_redis)} of them in Redis" if in_redis else ""
        yield ok(CHECK, f"{counted(len(rows), 'limit')}{kept}" if rows else "none are declared")


def _declarations(rows: list[LimitRow], settings: Settings) -> Findings:
    """Are the declarations of these settings in effect? The last program to start wins."""
    known = {row.name: row for row in rows}
    for limit in settings.permit_limits:
        row = known.get(limit.name)
        if row is not None and row.declared is not None and row.declared != limit.to_json():
            yield warn(
                CHECK,
                f"{limit.name}: another program has declared it differently: "
                f"{difference(limit.to_json(), row.declared)}",
                "declare it the same everywhere; the last program to start wins",
            )


def _redis(conn: Conn, settings: Settings, in_redis: list[LimitRow]) -> Findings:
    names = ", ".join(row.name for row in in_redis)
    if settings.redis_url is None:
        yield fail(
            CHECK,
            f"{names}: kept in Redis, but redis_url is not set: workers with these settings cannot use them",
            'set COMMANDBUS_REDIS_URL, or declare a limit under another name with store="postgres"',
        )
        return
    address = mask_redis_url(settings.redis_url)
    needed = f"{names} cannot be used by this program" if names else "limits declared without a store need it"
    try:
        permits = RedisScripts(settings.redis_url, settings.environment)
        try:
            permits.probe()
        finally:
            permits.close()
    except ConfigurationError as error:
        yield fail("redis", one_line(error))
        return
    except RedisLostError as error:
        yield fail(
            "redis",
            f"{address} does not answer ({one_line(error)}): {needed}",
            "check the address, and that Redis is up",
        )
        return
    yield ok("redis", f"{address} answers")
    mode = run(conn, redis_fleet()).mode
    if in_redis and mode in _AWAY:
        yield warn("redis", f"the limits in it are {mode}: {_AWAY[mode]}", "nothing to do: it recovers by itself")


def _times(row: LimitRow) -> Findings:
    lease, longest = row.limit.lease_seconds, max(row.limit.backoff_seconds)
    if lease / 3 < SHORTEST_RENEWAL_SECONDS:
        yield warn(
            CHECK,
            f"limit {row.name} has a lease of {format_seconds(lease)}, renewed every third of that: a worker that "
            f"pauses for a moment loses its permit while its call goes on",
            f"`commandbus limits set {quoted(row.name)} --lease 120s`; a longer lease costs time only after a "
            f"crash",
        )
    if (max_wait := row.limit.max_wait_seconds) is not None and max_wait < longest:
        yield warn(
            CHECK,
            f"limit {row.name}: commands wait {format_seconds(max_wait)} at most (max_wait), and its back-off "
            f"grows to {format_seconds(longest)}: they may need a person before it is over",
            f"`commandbus limits set {quoted(row.name)} --max-wait 1h`, or a shorter --backoff",
        )


def _limit_state(row: LimitRow) -> Findings:
    if row.limit_state.breaker_forced or row.limit_state.breaker_open:
        yield warn(
            CHECK,
            row.limit_state.explain(row.name),
            f"`commandbus breakers close --limit {quoted(row.name)}` closes it",
        )
