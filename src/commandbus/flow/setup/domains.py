"""Create and list domains. A domain is a PGMQ queue, its name in `commandbus.domain`, and grants on it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import MissingPrivilegeError
from commandbus.flow.operation import Statement, Steps, no_schema, operation
from commandbus.lazy import lazy
from commandbus.model import roles
from commandbus.model.names import check_domain, check_queue, pgmq_table, queue_of
from commandbus.quick_dataclass import dataclass

if TYPE_CHECKING:
    from commandbus.flow.queues import messages
else:
    messages = lazy("commandbus.flow.queues.messages")  # only for plain queues

SAFE_PATH = b"SET LOCAL search_path = pg_catalog, pg_temp"
"""Valid until the transaction ends. PGMQ's functions call others by bare names, and must find PGMQ's own."""


@dataclass(frozen=True, slots=True)
class DomainInfo:
    """A domain and its age."""

    name: str
    queue: str
    created_at: datetime


@operation(atomic=True)
def create_domain(domain: str) -> Steps[bool]:
    """Create a domain's queue. Returns False if it existed already. Safe to run concurrently."""
    created = yield from create_steps(domain)
    return created


@operation(atomic=True)
def create_queue(queue: str) -> Steps[None]:
    """Create a plain PGMQ queue, such as one for replies."""
    messages.refuse_domains("create_queue", check_queue(queue, what="queue"))
    yield from _create_queue(queue)
    yield Statement(
        b"INSERT INTO commandbus.setting (name, value) VALUES ('queue.' || %(queue)s, 'reply') "
        b"ON CONFLICT DO NOTHING",
        {"queue": queue},
    )


@operation(atomic=True)
def drop_queue(queue: str) -> Steps[bool]:
    """Drop a PGMQ queue and its archive with all their messages. Returns False if there was none."""
    messages.refuse_domains("drop_queue", queue)
    ((exists, _),) = yield Statement(sql.text("queues/shape"), {"table": f"pgmq.{pgmq_table(queue)}"})
    if not exists:  # PGMQ 1.5 does not check this
        return False
    path = yield from _enter_safe_path()
    try:
        yield Statement(b"SELECT pgmq.drop_queue(%(queue)s)", {"queue": queue})
    except pg.InsufficientPrivilege as error:
        raise MissingPrivilegeError(
            f"this role may not drop queue {queue!r} ({error.diag.message_primary}); drop it as the role that "
            f"created it"
        ) from None
    yield Statement(b"DELETE FROM commandbus.setting WHERE name = 'queue.' || %(queue)s", {"queue": queue})
    yield from _leave_safe_path(path)
    return True


@operation(atomic=False)
def list_domains() -> Steps[list[DomainInfo]]:
    """All domains by name."""
    rows = yield Statement(b"SELECT name, created_at FROM commandbus.domain ORDER BY name")
    return [DomainInfo(name, queue_of(name), created_at) for name, created_at in rows]


def create_steps(domain: str) -> Steps[bool]:
    """The steps of create_domain, for a larger operation."""
    check_domain(domain)
    try:
        rows = yield Statement(
            b"INSERT INTO commandbus.domain (name) VALUES (%(domain)s) ON CONFLICT DO NOTHING RETURNING name",
            {"domain": domain},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName):
        raise no_schema() from None
    except pg.InsufficientPrivilege as error:
        raise _may_not_create(queue_of(domain), error) from None
    yield from _create_queue(queue_of(domain))
    if rows:
        # A queue's rows live for milliseconds, so autovacuum must count changes, not the table's size.
        yield Statement(sql.text("setup/tune_queue", domain=domain))
        yield Statement(sql.text("setup/tune_queue_key", domain=domain))
    return bool(rows)


def _create_queue(queue: str) -> Steps[None]:
    path = yield from _enter_safe_path()
    try:
        yield Statement(b"SELECT pgmq.create(%(queue)s)", {"queue": queue})
    except pg.InsufficientPrivilege as error:
        raise _may_not_create(queue, error) from None
    settings = yield Statement(b"SELECT name, value FROM commandbus.setting WHERE name LIKE 'role.%%'", {})
    for name, role in settings:
        for grant in roles.queue_grants(name.removeprefix("role."), role, queue):
            yield Statement(grant.encode())
    yield from _leave_safe_path(path)


def _enter_safe_path() -> Steps[str]:
    """Returns the search_path as it was: the transaction may belong to a caller who continues in it."""
    ((path,),) = yield Statement(b"SELECT pg_catalog.current_setting('search_path')")
    yield Statement(SAFE_PATH)
    found: str = path
    return found


def _leave_safe_path(path: str) -> Steps[None]:
    yield Statement(b"SELECT pg_catalog.set_config('search_path', %(path)s, true)", {"path": path})


def _may_not_create(queue: str, error: pg.InsufficientPrivilege) -> MissingPrivilegeError:
    return MissingPrivilegeError(
        f"this role may not create queue {queue!r} ({error.diag.message_primary}); create it as the role that "
        f"ran `commandbus migrate`"
    )
