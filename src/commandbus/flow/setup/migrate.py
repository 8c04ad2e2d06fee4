"""Upgrade the schema of a database to this release, from any earlier one or from nothing.

Everything happens in one transaction under one advisory lock: any number of processes may run it at once, and
a failure leaves nothing behind. No superuser is needed, only CREATE on the database.

Each migration says whether it is compatible: whether programs that do not know it may go on with the schema that
it leaves. The flag is stored with the migration's number, so that an older program, which does not have the file,
can read it. A newer schema is refused if any of its newer migrations is not compatible, because an old release
must not guess what a new one meant.

If an ALTER TABLE waits for a long transaction, every send waits behind it. So it waits for LOCK_SECONDS at most.
Then everything is rolled back, the sends go on, and `migrate` tries again. If other programs migrate at the same
time, it waits longer for them, because no send waits behind that; but not for ever, because one of them may hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from psycopg import errors as pg

from commandbus import sql
from commandbus.db import pgmq
from commandbus.errors import MissingPrivilegeError, SchemaError
from commandbus.flow.operation import Plan, Statement, Steps, operation
from commandbus.flow.setup.domains import SAFE_PATH, create_steps
from commandbus.flow.setup.roles import grant_again
from commandbus.flow.setup.schema_state import SchemaState, look_now
from commandbus.model.durations import format_seconds
from commandbus.model.reconnect_backoff import Backoff
from commandbus.model.timeouts import MIGRATION_WAIT_SECONDS

LOCK = 0x636D6462_75730001  # 'cmdbus' and a purpose: an arbitrary constant, the same in all releases

LOCK_SECONDS: Final = 1.0
TURN_SECONDS: Final = 10.0
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 5.0

_LIMIT = f"SET LOCAL lock_timeout = {LOCK_SECONDS * 1000:.0f}".encode()
_TURN_LIMIT = f"SET LOCAL lock_timeout = {TURN_SECONDS * 1000:.0f}".encode()
_BEGIN = b"""
CREATE SCHEMA IF NOT EXISTS commandbus;
CREATE TABLE IF NOT EXISTS commandbus.migration (
    number         integer PRIMARY KEY,
    name           text NOT NULL,
    applied_at     timestamptz NOT NULL DEFAULT now(),
    is_compatible  boolean NOT NULL DEFAULT false
);
"""


class _BusyError(SchemaError):
    """Another transaction holds a lock that a migration needs and has waited for."""

    def __init__(self, error: BaseException, waited: float) -> None:
        super().__init__(str(error))
        self.waited = waited


def migrate(
    domains: Sequence[str] = (),
    *,
    wait_seconds: float = MIGRATION_WAIT_SECONDS,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Plan[SchemaState]:
    """Apply what is missing. Returns the state from before; its `missing` is what was applied.

    While another transaction is in the way, it tries again for about `wait_seconds`, and tells `on_wait` which
    one.
    """
    backoff, waited = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS), 0.0
    while True:
        try:
            state: SchemaState = yield _migrate_once(domains)
        except _BusyError as busy:
            waited += busy.waited
            if waited > wait_seconds:
                raise SchemaError(
                    f"the schema could not be changed within {format_seconds(wait_seconds)}: a transaction on its "
                    f"tables does not end; end it (`commandbus doctor` names the oldest), and migrate again"
                ) from None
        else:
            return state
        on_wait((yield _who_blocks()) or "a transaction that has ended since")
        yield _sleep(backoff.next())
        waited += backoff.seconds


@operation(atomic=False)
def _sleep(seconds: float) -> Steps[None]:
    """Sleep on the server, which works with the sync and the async driver."""
    yield Statement(b"SELECT pg_catalog.pg_sleep(%(seconds)s)", {"seconds": seconds})


@operation(atomic=False)
def _who_blocks() -> Steps[str | None]:
    """Describes the oldest transaction that holds a lock on one of our tables."""
    rows = yield Statement(sql.text("setup/schema_holder"), {"key": LOCK})
    if not rows:
        return None
    pid, application, seconds = rows[0]
    name = f" ({application})" if application else ""
    return f"the transaction of session {pid}{name}, open for {format_seconds(round(seconds))}"


@operation(atomic=True)
def _migrate_once(domains: Sequence[str]) -> Steps[SchemaState]:
    yield Statement(_TURN_LIMIT)
    try:
        yield Statement(b"SELECT pg_catalog.pg_advisory_xact_lock(%(key)s)", {"key": LOCK})
    except pg.LockNotAvailable as error:
        raise _BusyError(error, TURN_SECONDS) from None
    yield Statement(_LIMIT)
    yield Statement(SAFE_PATH)  # names in defaults and views are resolved only once, now
    try:
        return (yield from _migrate(domains))
    except pg.LockNotAvailable as error:
        raise _BusyError(error, LOCK_SECONDS) from None


def _migrate(domains: Sequence[str]) -> Steps[SchemaState]:
    state = yield from look_now()
    if state.missing and state.newer:
        raise SchemaError(
            f"this database's commandbus schema lacks migration {state.missing[0]} but has {state.newer[0]}, "
            f"which this release does not know; run `commandbus migrate` of the newer release"
        )
    if state.missing:
        try:
            yield Statement(_BEGIN)
            version, way = yield from pgmq.install(Statement)
            for number, (name, text) in sql.migrations().items():
                if number in state.missing:
                    yield Statement(text.encode())
                    yield Statement(
                        b"INSERT INTO commandbus.migration (number, name, is_compatible) "
                        b"VALUES (%(number)s, %(name)s, %(is_compatible)s)",
                        {"number": number, "name": name, "is_compatible": sql.is_compatible(text)},
                    )
            for key, value in (("pgmq_version", version), ("pgmq_way", way)):
                yield Statement(
                    b"INSERT INTO commandbus.setting (name, value) VALUES (%(key)s, %(value)s) "
                    b"ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    {"key": key, "value": value},
                )
            yield from grant_again()
        except pg.InsufficientPrivilege as error:
            raise MissingPrivilegeError(
                f"this role may not create the schema ({error.diag.message_primary}); run `commandbus migrate` as "
                f"the database's owner, GRANT CREATE ON DATABASE to this role, or give a DBA the output of "
                f"`commandbus migrate --print`"
            ) from None
    for domain in domains:
        yield from create_steps(domain)
    return state


def script() -> str:
    """The whole schema as one SQL script for a DBA, for a database that has nothing yet or an older schema."""
    parts = [
        "-- commandbus: the schema, as `commandbus migrate` would apply it. Safe to run again.",
        "BEGIN;",
        f"{_TURN_LIMIT.decode()};",
        f"SELECT pg_catalog.pg_advisory_xact_lock({LOCK});",
        "-- Sends must not queue up behind an ALTER TABLE that waits for a long transaction: run it again then.",
        f"{_LIMIT.decode()};",
        "-- What a default or a view calls is looked up once, here.",
        f"{SAFE_PATH.decode()};",
        _BEGIN.decode().strip(),
        pgmq.script(),
    ]
    for number, (name, text) in sql.migrations().items():
        guarded = text.replace("$commandbus$", "")
        parts.append(
            f"DO $migrate$ BEGIN IF NOT EXISTS (SELECT FROM commandbus.migration WHERE number = {number}) THEN\n"
            f"EXECUTE $commandbus$\n{guarded}\n$commandbus$;\n"
            f"INSERT INTO commandbus.migration (number, name, is_compatible) "
            f"VALUES ({number}, '{name}', {str(sql.is_compatible(text)).lower()});\n"
            f"END IF; END $migrate$;"
        )
    parts.append(
        "INSERT INTO commandbus.setting (name, value)\n"
        "SELECT 'pgmq_version', COALESCE((SELECT extversion FROM pg_catalog.pg_extension "
        "WHERE extname = 'pgmq'),\n"
        f"                                '{pgmq.packaged_version()}')\n"
        "UNION ALL SELECT 'pgmq_way', CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_extension "
        "WHERE extname = 'pgmq')\n"
        "                                  THEN 'extension' ELSE 'sql' END\n"
        "ON CONFLICT (name) DO NOTHING;"
    )
    parts.append("COMMIT;\n")
    return "\n\n".join(parts)
