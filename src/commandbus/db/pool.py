"""Connections and pools: how they are created, and their properties.

Our connections are in autocommit mode (an operation opens its own transaction where it needs one). They prepare
statements, unless told otherwise (behind PgBouncer in transaction mode). Their transactions are READ COMMITTED,
whatever the database's default is, because our statements lock rows and look again. A pool that the application
passes in is used as it is, and never closed by us.

A connection notices when its network is gone: keepalives, `tcp_user_timeout`, and 3 s to connect to each host. If
the database is unreachable, a pool of handlers tries again every 2 s (for a bus see `db/bus_pool.py`). If the
address names several hosts, the one that accepts writes is chosen. Options in the address take precedence.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from commandbus.clock import monotonic
from commandbus.db.answer_clock import PendingAnswer
from commandbus.db.drivers import (
    AnyAsyncConnection,
    AnyConnection,
    LostSocketError,
    OwnAsyncConnection,
    OwnConnection,
    ServiceConnection,
)
from commandbus.db.quick_statements import QuickStatements
from commandbus.errors import ConfigurationError
from commandbus.logger import OneLine
from commandbus.model.reconnect_backoff import Backoff
from commandbus.settings import Settings

CHECK_AFTER_SECONDS = 0.1
CONNECT_SECONDS = 3
ALIVE = {
    "connect_timeout": str(CONNECT_SECONDS),
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "12000",
}
LONGEST_PAUSE_SECONDS: Final = 2.0
OWN_SEARCH_PATH = "pg_catalog,pg_temp"
"""Of our threads' sessions: nobody but the server's owner can put a function or an operator there."""
BY_KEYS = "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c jit=off"
"""Of sessions that go by keys. Up to PostgreSQL 17 a scan that is switched off, and yet needed, costs 10^10: the
server would compile such a statement for a second, each time that it runs."""
ANSWER_SECONDS: Final = 5.0
_SHOW_LEVEL: Final = b"SHOW default_transaction_isolation"
_READ_COMMITTED: Final = ("read committed",)
POOL_PREFIX = "commandbus-"
_ONE_LINE = OneLine(POOL_PREFIX)
_poolers: set[str] = set()  # addresses that refuse settings at the start of a session


def connection_kwargs(settings: Settings, *, name: str) -> dict[str, Any]:
    """Arguments of psycopg's connect for a connection of ours."""
    return {
        "autocommit": True,
        "prepare_threshold": 2 if settings.prepared_statements else None,
        "application_name": f"commandbus {name}"[:63],
    }


def check_conninfo(database_url: str | None) -> str:
    """Returns the connection string, or raises what is wrong with it (without the password)."""
    if not database_url:
        raise ConfigurationError(
            "no database is configured: set COMMANDBUS_DATABASE_URL, `database_url` in commandbus.toml, or pass "
            "database_url (`embedded` runs a PostgreSQL in the project's folder)"
        )
    try:
        _parse(database_url)
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            "database_url is not a PostgreSQL URL or connection string; it looks like "
            "postgresql://user:password@host:5432/database or `host=… dbname=…`"
        ) from None
    return database_url


def lasting_conninfo(conninfo: str | None, **more: Any) -> str:
    """The same address for a connection that notices when its network or its primary is gone."""
    given = _parse(check_conninfo(conninfo)) | {name: value for name, value in more.items() if value is not None}
    several = {"target_session_attrs": "read-write"} if _names_several_hosts(given) else {}
    return _joined(tuple((ALIVE | several | given).items()))


# Each session that is opened needs these: libpq takes an address apart in 33 µs, and needs 80 to join one.
@functools.lru_cache(maxsize=64)
def _parse(conninfo: str) -> dict[str, Any]:
    """The parts of an address. The caller must not change them."""
    return conninfo_to_dict(conninfo)


@functools.lru_cache(maxsize=64)
def _joined(parts: tuple[tuple[str, Any], ...]) -> str:
    return make_conninfo(**dict(parts))


def _names_several_hosts(given: dict[str, Any]) -> bool:
    """libpq's own variables count, too, for what the address leaves out."""
    if os.environ.get("PGTARGETSESSIONATTRS"):
        return False  # that error says what to do
    named = given.get("host") or given.get("hostaddr")
    return "," in str(named or os.environ.get("PGHOST") or os.environ.get("PGHOSTADDR") or "")


def connect_own(
    settings: Settings, *, name: str, statement_seconds: float, lock_seconds: float, goes_by_keys: bool = False
) -> OwnConnection:
    """A connection for a thread of ours, with timeouts that the server enforces if it accepts them.

    `goes_by_keys`: an index is preferred to any scan, whatever the size of a table was when a statement was
    planned. So most statements are planned once (ADR 15).

    A thread of ours leaves a transaction open for the time of a round trip. If its network falls silent meanwhile,
    the server ends the session, and frees its locks, as soon as a statement of it would be too late.

    Behind PgBouncer nothing can be set for a session, not even the search path. There it is enough that our
    statements name the schema of everything they call.
    """
    url = check_conninfo(settings.database_url)
    address = lasting_conninfo(url)
    kwargs = connection_kwargs(settings, name=name)
    if settings.prepared_statements and url not in _poolers:
        limits = (
            f"-c statement_timeout={int(statement_seconds * 1000)} -c lock_timeout={int(lock_seconds * 1000)} "
            f"-c idle_in_transaction_session_timeout={int(statement_seconds * 1000)} "
            f"-c default_transaction_isolation=read\\ committed -c search_path={OWN_SEARCH_PATH}"
        )
        options = " ".join(filter(None, [options_of(address), limits, BY_KEYS if goes_by_keys else ""]))
        try:
            conn = ServiceConnection.connect(address, options=options, **kwargs)
        except psycopg.OperationalError as error:
            if not refuses_options(error):
                raise
            # PgBouncer: nothing may be left in a session, so only the answer clock limits the time.
            _poolers.add(url)
        else:
            conn.goes_by_keys = goes_by_keys
            return read_committed(conn)
    plain = ServiceConnection.connect(address, **kwargs)
    plain.begins = None
    return read_committed(plain)


def is_pooled(settings: Settings) -> bool:
    """Does a session belong to others, too? So say the settings, or the pooler that refused to set something for a
    session. Nothing may be left in such a session: no setting, no LISTEN."""
    return not settings.prepared_statements or check_conninfo(settings.database_url) in _poolers


def listening_kwargs(settings: Settings) -> dict[str, Any]:
    """Arguments of psycopg's connect for a connection that is to LISTEN: a pooler refuses them, and may not."""
    given = options_of(lasting_conninfo(settings.database_url))
    return {"options": f"{given} -c search_path={OWN_SEARCH_PATH}".strip()}


def note_pooler(settings: Settings, error: psycopg.OperationalError) -> bool:
    """Was the connection refused by a pooler? That is remembered."""
    if not refuses_options(error):
        return False
    _poolers.add(check_conninfo(settings.database_url))
    return True


def options_of(conninfo: str) -> str:
    """The options for the start of a session that the address or libpq's own variable names. A caller that gives
    other options must repeat these, because otherwise they would be lost."""
    return str(_parse(conninfo).get("options") or os.environ.get("PGOPTIONS") or "")


def refuses_options(error: psycopg.Error) -> bool:
    """Is it PgBouncer's refusal of settings at the start of a session?"""
    return "startup parameter" in str(error)


def read_committed(conn: OwnConnection) -> OwnConnection:
    """Makes its transactions READ COMMITTED, without a round trip."""
    conn.isolation_level = IsolationLevel.READ_COMMITTED
    return conn


def ask_default_level(conn: OwnConnection) -> None:
    """A single statement runs at the server's default isolation level. If that is not READ COMMITTED, the driver
    must be told."""
    row = conn.execute(_SHOW_LEVEL, prepare=False).fetchone()
    conn.begins = row != _READ_COMMITTED


def _configure(conn: OwnConnection) -> None:
    read_committed(conn)
    question = PendingAnswer("a pool's new connection", cancel_after=ANSWER_SECONDS, cut_after=ANSWER_SECONDS)
    with question.asked(conn):
        ask_default_level(conn)
    _make_quick(conn)


async def _configure_async(conn: OwnAsyncConnection) -> None:
    await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)
    cursor = await asyncio.wait_for(conn.execute(_SHOW_LEVEL, prepare=False), ANSWER_SECONDS)
    conn.begins = await cursor.fetchone() != _READ_COMMITTED
    _make_quick(conn)


def _make_quick(conn: OwnConnection | OwnAsyncConnection) -> None:
    """Nobody but us runs statements on the connections of a bus's pool."""
    if conn.prepare_threshold is not None:
        conn.quick = QuickStatements(conn)


def check_open(conn: AnyConnection | AnyAsyncConnection) -> None:
    """Raise if the server has ended this idle connection: its last message is waiting to be read.

    This looks at the socket once, without a round trip, and not at all if the connection was used a moment ago. So
    a restart or a terminated session causes no error. A silent network is not noticed. A socket that a handler has
    closed is always noticed: its number may belong to another file by now.
    """
    if isinstance(conn, OwnConnection) and not conn.has_its_socket:
        conn.close()  # otherwise the pool would keep it
        raise LostSocketError("somebody in this process has closed the connection's socket")
    now = monotonic()
    if now - getattr(conn, "checked_at", 0.0) < CHECK_AFTER_SECONDS:
        return
    if isinstance(conn, OwnConnection | OwnAsyncConnection):
        conn.checked_at = now
    looking = select.poll()
    looking.register(conn.pgconn.socket, select.POLLIN)
    while looking.poll(0):
        conn.pgconn.consume_input()


async def _check_open_async(conn: AnyAsyncConnection) -> None:
    check_open(conn)


class SteadyAttempt:
    """When a pool tries again to connect: after a second, and then every two. psycopg's own attempt doubles its
    pause without an end, so a pool would not reconnect for minutes after its database is back."""

    FIRST_SECONDS = 1.0

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._give_up_at = 0.0
        self._backoff = Backoff(self.FIRST_SECONDS, LONGEST_PAUSE_SECONDS)

    @property
    def delay(self) -> float:
        """Seconds until the next attempt."""
        return self._backoff.seconds

    def update_delay(self, now: float) -> None:
        """The attempt that began then has failed."""
        if not self.delay:
            self._give_up_at = now + self._timeout
        self._backoff.next()

    def time_to_give_up(self, now: float) -> bool:
        """Has it been tried for long enough?"""
        return 0.0 < self._give_up_at <= now


class _SteadyPool(ConnectionPool[OwnConnection]):
    def _add_connection(self, attempt: Any, growing: bool = False) -> None:  # noqa: FBT001 - its base's
        super()._add_connection(attempt or SteadyAttempt(self.reconnect_timeout), growing)  # type: ignore[arg-type]


def open_pool(
    settings: Settings,
    *,
    name: str,
    max_size: int,
    reconnect_failed: Callable[[ConnectionPool[Any]], None] | None = None,
    max_idle: float | None = None,
) -> ConnectionPool[OwnConnection]:
    """A pool of connections for handlers; connects in the background, on demand.

    Their transactions are the handlers' own, with the isolation level that the database says.
    """
    arguments = _pool_arguments(settings, name=name, max_size=max_size)
    if max_idle is not None:
        arguments["max_idle"] = min(max_idle, settings.pool_max_idle)
    return _SteadyPool(
        connection_class=OwnConnection,
        check=check_open,
        open=True,
        reconnect_failed=reconnect_failed,
        **arguments,
    )


def pool_options(settings: Settings, *, name: str, max_size: int) -> dict[str, Any]:
    """Arguments of a pool of sync connections for our own statements."""
    more = {"connection_class": OwnConnection, "check": check_open, "configure": _configure}
    return _pool_arguments(settings, name=name, max_size=max_size) | more


def async_pool_options(settings: Settings, *, name: str, max_size: int) -> dict[str, Any]:
    """The same for async connections."""
    more = {"connection_class": OwnAsyncConnection, "check": _check_open_async, "configure": _configure_async}
    return _pool_arguments(settings, name=name, max_size=max_size) | more


def _pool_arguments(settings: Settings, *, name: str, max_size: int) -> dict[str, Any]:
    logging.getLogger("psycopg.pool").addFilter(_ONE_LINE)  # only once: it is the same filter
    return {
        "conninfo": lasting_conninfo(settings.database_url),
        "kwargs": connection_kwargs(settings, name=name),
        "min_size": min(settings.pool_min_size, max_size),
        "max_size": max_size,
        "timeout": settings.pool_timeout,
        "max_lifetime": settings.pool_max_lifetime,
        "max_idle": settings.pool_max_idle,
        "reconnect_timeout": settings.pool_reconnect_timeout,
        "name": f"{POOL_PREFIX}{name}",
    }


def cut(conn: AnyConnection | AnyAsyncConnection) -> None:
    """In a forked process: nothing sent here reaches the server, and the parent can end the session."""
    with suppress(OSError, psycopg.Error):
        if not conn.closed:
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, conn.pgconn.socket, inheritable=False)
            os.close(nothing)
