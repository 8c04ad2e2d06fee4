"""The server: can it be reached, is it one that we support, and do its settings fit ours?

Reads only. If a plain role may not see something (other users' transactions), the finding says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from commandbus.cli.doctor.findings import Conn, Findings, fail, ok, warn
from commandbus.cli.render import age
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.settings import Settings
from commandbus.worker.stop_report import ROUTER_SLOTS

OLDEST, NEWEST = 14, 18
CLOCK_SECONDS = 2.0
LONG_TRANSACTION_SECONDS = 300.0
WORKER_CONNECTIONS = 4
SUPERVISOR_CONNECTIONS = 1


def examine(conn: Conn, settings: Settings, *, is_embedded: bool) -> Findings:
    """Everything about the server."""
    yield from _version(conn)
    yield from _role_of_server(conn)
    yield from _creators(conn)
    yield from _search_path(conn)
    yield from _pooler(conn, settings)
    yield from _limits_of_role(conn, settings)
    yield from _clock(conn)
    yield from _limits(conn, settings)
    if not is_embedded:  # an embedded server is ours alone
        yield from _dead_clients(conn)
    yield from _durability(conn)
    yield from _connections(conn, settings)
    yield from _transactions(conn)


def _one(conn: Conn, query: str, params: dict[str, Any] | None = None) -> Any:
    row = conn.execute(query.encode(), params).fetchone()
    return None if row is None else row[0]


def _setting(conn: Conn, name: str) -> Any:
    """A setting in the unit that PostgreSQL keeps it in (milliseconds, for times)."""
    return _one(conn, "SELECT setting FROM pg_catalog.pg_settings WHERE name = %(name)s", {"name": name})


def _version(conn: Conn) -> Findings:
    text = _one(conn, "SHOW server_version")
    major = conn.info.server_version // 10_000
    if major < OLDEST:
        yield fail("version", f"PostgreSQL {text} is older than {OLDEST}", f"upgrade to {OLDEST} or newer")
    elif major > NEWEST:
        yield warn(
            "version", f"PostgreSQL {text} is newer than {NEWEST}, the newest that this release was tested on"
        )
    else:
        yield ok("version", f"PostgreSQL {text}")


def _role_of_server(conn: Conn) -> Findings:
    if _one(conn, "SELECT pg_catalog.pg_is_in_recovery()"):
        yield fail("server", "this is a standby: nothing can be written", "connect to the primary")
    elif _one(conn, "SHOW default_transaction_read_only") == "on":
        yield fail("server", "transactions are read-only (default_transaction_read_only)", "set it to off")
    if (isolation := _one(conn, "SHOW default_transaction_isolation")) != "read committed":
        yield warn(
            "isolation",
            f"default_transaction_isolation is {isolation!r}: workers will meet serialization failures",
            "ALTER ROLE … SET default_transaction_isolation = 'read committed'",
        )
    if (encoding := _one(conn, "SHOW server_encoding")) != "UTF8":
        yield warn("encoding", f"the database's encoding is {encoding}: not every text can be stored", "use UTF8")


def _creators(conn: Conn) -> Findings:
    """By default, PUBLIC may create objects in `public` up to PostgreSQL 14, and after an upgrade from there."""
    rows = conn.execute(
        b"SELECT pg_catalog.quote_ident(n.nspname) "
        b"FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a "
        b"WHERE a.grantee = 0::oid AND a.privilege_type = 'CREATE' "
        b"AND (n.nspname = 'public' OR n.nspname = ANY (pg_catalog.current_schemas(false))) ORDER BY 1"
    ).fetchall()
    for (schema,) in rows:
        yield warn(
            "strangers",
            f"every login may create functions in schema {schema}: it can put one in place of a function that "
            f"your own SQL calls without its schema, and your handlers then run it with their rights",
            f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        )
    if not rows:
        yield ok("strangers", "nobody may create in schema public without a grant")


def _search_path(conn: Conn) -> Findings:
    """If search_path does not name pg_catalog, PostgreSQL puts it first."""
    path = _one(conn, "SHOW search_path")
    names = [name.strip() for name in path.split(",")]
    if "pg_catalog" in names[1:]:
        yield warn(
            "search path",
            f"search_path is {path}: a role that may create in a schema before pg_catalog can replace any "
            "operator, also those of our statements",
            "name pg_catalog first, or not at all: then PostgreSQL puts it first",
        )


def _pooler(conn: Conn, settings: Settings) -> Findings:
    """A pooler invents the session's process id; a server reports the real one."""
    if conn.info.backend_pid == _one(conn, "SELECT pg_catalog.pg_backend_pid()"):
        return
    if settings.prepared_statements:
        yield warn(
            "pooler",
            "a pooler such as PgBouncer is in between, and prepared statements are on",
            "set prepared_statements = false (COMMANDBUS_PREPARED_STATEMENTS) for transaction mode; workers that "
            "should be woken at once need a direct connection, else they poll",
        )
    else:
        yield ok("pooler", "a pooler is in between, prepared statements are off; workers behind it poll")


def _limits_of_role(conn: Conn, settings: Settings) -> Findings:
    """Behind PgBouncer in transaction mode, only settings of the role can limit how long our own statements
    wait."""
    if settings.prepared_statements:
        return
    unlimited = [name for name in ("lock_timeout", "statement_timeout") if _setting(conn, name) == "0"]
    if unlimited:
        who = _one(conn, "SELECT current_user")
        yield warn(
            "role limits",
            f"prepared_statements is off, as behind PgBouncer in transaction mode, and role {who} has no "
            f"{' and no '.join(unlimited)}: somebody's lock is noticed only by the worker's own clock, after 10 s",
            f"ALTER ROLE {who} SET lock_timeout = '2s'; ALTER ROLE {who} SET statement_timeout = '30s'",
        )
    else:
        yield ok("role limits", "lock_timeout and statement_timeout are set for this role")


def _clock(conn: Conn) -> Findings:
    before = time.time()
    server = _one(conn, "SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8")
    after = time.time()
    difference = abs(server - (before + after) / 2)
    if difference > CLOCK_SECONDS + (after - before):
        yield warn(
            "clock",
            f"this machine's clock and the server's differ by {age(difference)}",
            "set up NTP; leases go by the server's clock, logs by this one",
        )
    else:
        yield ok("clock", f"differs from the server's by {format_seconds(round(difference, 3))}")


def _limits(conn: Conn, settings: Settings) -> Findings:
    """Timeouts of the server, for this role's sessions, that are shorter than our own."""
    quiet = True
    for name, what, ours, harm in _ours(settings):
        if name == "lock_timeout" and not settings.prepared_statements:
            continue  # behind PgBouncer our own sessions use the value of the role: see `role limits`
        theirs = int(_setting(conn, name) or 0) / 1000  # no limit: 0, or a version before PostgreSQL 17
        if 0 < theirs < ours:
            quiet = False
            yield warn(
                name,
                f"this role's sessions have {name} = {format_seconds(theirs)}, less than our {what} "
                f"({format_seconds(ours)}): {harm}",
                f"ALTER ROLE … SET {name} = 0 for the workers' role, or a lower {what.rpartition(' of ')[2]}",
            )
    if quiet:
        yield ok("server limits", "no timeout of the server is shorter than ours")


def _ours(settings: Settings) -> Iterator[tuple[str, str, float, str]]:
    """The server's setting, our setting that must not be longer, its value, and what happens if it is longer."""
    limits = settings.timeouts
    statement = limits.statement_timeout
    yield (
        "statement_timeout", "statement_timeout", statement,
        "claims, settlements and migrations can be cut short",
    )  # fmt: skip
    yield (
        "lock_timeout", "lock_timeout, 80% of statement_timeout", limits.lock_timeout,
        "settlements and migrations can fail",
    )  # fmt: skip
    yield (
        "idle_in_transaction_session_timeout", "statement_timeout", statement,
        "a handler's transaction can be ended while it does something else",
    )  # fmt: skip
    yield (
        "transaction_timeout", *_longest_transaction(settings),
        "a handler's transaction can be ended before its attempt is",
    )  # fmt: skip
    yield (
        "idle_session_timeout", "pool_max_idle", settings.pool_max_idle,
        "connections that the pool keeps are closed by the server, and made anew again and again",
    )  # fmt: skip


def _longest_transaction(settings: Settings) -> tuple[str, float]:
    """The longest transaction: of an attempt that commits when it counts as stuck; without a deadline, one
    statement."""
    stuck = settings.timeouts.stuck_seconds()
    if stuck is None:
        return "statement_timeout", settings.statement_timeout
    return ("visibility_timeout + 5s" if settings.task_timeout is None else "task_timeout + cancel_grace"), stuck


def _dead_clients(conn: Conn) -> Findings:
    if int(_setting(conn, "client_connection_check_interval") or 0) == 0:
        yield ok(
            "client_connection_check_interval",
            "0: a query goes on to its end when its client has died, also one of a session that a handler opened "
            "itself in a worker that was killed",
            "ALTER SYSTEM SET client_connection_check_interval = '10s' ends it sooner",
        )


def _durability(conn: Conn) -> Findings:
    harm = {
        "fsync": "a crash of the machine can destroy the database",
        "full_page_writes": "a crash of the machine can destroy the database",
        "synchronous_commit": "a crash of the server can lose what was answered, so that an attempt runs twice",
        "autovacuum": "queues grow and slow down",
    }
    bad = {name: what for name, what in harm.items() if _setting(conn, name) == "off"}
    for name, what in bad.items():
        yield warn(name, f"{name} is off: {what}", f"ALTER SYSTEM SET {name} = on")
    if not bad:
        yield ok("durability", "fsync, full_page_writes, synchronous_commit and autovacuum are on")


def _connections(conn: Conn, settings: Settings) -> Findings:
    reserved = sum(
        int(_setting(conn, name) or 0) for name in ("superuser_reserved_connections", "reserved_connections")
    )
    most = int(_setting(conn, "max_connections")) - reserved
    used = _one(
        conn,
        "SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity "
        "WHERE backend_type = 'client backend' OR (backend_type IS NULL AND usename IS NOT NULL)",
    )
    limit_client = _limit_client_connections(conn, settings)
    messages = _message_connections(conn)
    scheduler = _table_connections(conn, "schedule")
    releaser = _table_connections(conn, "key_limit")
    own = WORKER_CONNECTIONS + limit_client + messages + scheduler + releaser
    parts = {"limits": limit_client, "processes": messages, "schedules": scheduler, "key limits": releaser}
    counted_in = " and ".join(what for what, count in parts.items() if count)
    included = f", {counted_in} included" if counted_in else ""
    needed = settings.processes * (settings.concurrency + own) + SUPERVISOR_CONNECTIONS
    for what, limit in (
        (
            "database",
            "SELECT datconnlimit FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()",
        ),
        ("role", "SELECT rolconnlimit FROM pg_catalog.pg_roles WHERE rolname = current_user"),
    ):
        found = _one(conn, limit)
        if found is not None and 0 <= found < needed:
            yield warn(
                "connections",
                f"the {what}'s connection limit is {found}, but workers of these settings need up to {needed}",
                f"ALTER {what.upper()} … CONNECTION LIMIT {2 * needed}, or lower concurrency or processes",
            )
    message = (
        f"{used} of {most} in use; workers of these settings need up to {needed} "
        f"({settings.processes} × ({settings.concurrency} slots + {own}) "
        f"+ {SUPERVISOR_CONNECTIONS}){included}, and more while some are replaced"
    )
    if most - used < needed:
        yield warn("connections", message, "raise max_connections, or lower concurrency or processes")
    else:
        yield ok("connections", message)


def _message_connections(conn: Conn) -> int:
    """If there are processes, a worker that also has other work has extra slots for messages to processes."""
    if not _is_readable(conn, "process"):
        return 0
    return ROUTER_SLOTS if _one(conn, "SELECT EXISTS (SELECT FROM commandbus.process)") else 0


def _table_connections(conn: Conn, table: str) -> int:
    """If there are schedules or key limits, a worker has a connection for them."""
    if not _is_readable(conn, table):
        return 0
    return int(_one(conn, f"SELECT EXISTS (SELECT FROM commandbus.{table})"))


def _is_readable(conn: Conn, table: str) -> bool:
    found: bool = _one(
        conn,
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace "
        f"WHERE nspname = 'commandbus' AND relname = '{table}' "
        "AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT'))",
    )
    return found


def _limit_client_connections(conn: Conn, settings: Settings) -> int:
    """If limits are used, a worker has a connection for them, and one more if some are kept in Redis."""
    is_readable = _is_readable(conn, "limits")
    kept = {settings.backend_of(limit) for limit in settings.permit_limits}
    if is_readable:
        kept |= {row[0] for row in conn.execute(b"SELECT DISTINCT store FROM commandbus.limits").fetchall()}
    return bool(kept) + ("redis" in kept)


def _transactions(conn: Conn) -> Findings:
    sees_all = _one(
        conn,
        "SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') OR rolsuper FROM pg_catalog.pg_roles "
        "WHERE rolname = current_user",
    )
    rows = conn.execute(
        b"SELECT pid, extract(epoch FROM pg_catalog.clock_timestamp() - xact_start)::float8, state, "
        b"application_name FROM pg_catalog.pg_stat_activity "
        b"WHERE pid <> pg_catalog.pg_backend_pid() AND datname = pg_catalog.current_database() "
        b"AND xact_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => %(age)s) "
        b"ORDER BY xact_start",
        {"age": LONG_TRANSACTION_SECONDS},
    ).fetchall()
    prepared = _one(
        conn,
        "SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_xacts "
        "WHERE prepared < pg_catalog.now() - pg_catalog.make_interval(secs => %(age)s)",
        {"age": LONG_TRANSACTION_SECONDS},
    )
    if rows:
        pid, seconds, state, application = rows[0]
        yield warn(
            "transactions",
            f"{counted(len(rows), 'transaction')} open for minutes; the oldest for {age(seconds)}: pid {pid}, "
            f"{state}, {application or 'no application name'}",
            f"nothing can be vacuumed meanwhile; end it in its application, or SELECT pg_terminate_backend({pid})",
        )
    if prepared:
        yield warn(
            "transactions",
            f"{counted(prepared, 'prepared transaction')} {'waits' if prepared == 1 else 'wait'} for minutes",
            "see pg_prepared_xacts",
        )
    if not rows and not prepared:
        yield ok("transactions", "none open for long" + ("" if sees_all else " (of those that this role may see)"))
