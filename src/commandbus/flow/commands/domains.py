"""Which domains there are, and what to say of one that has no queue."""

from __future__ import annotations

from psycopg import errors as pg

from commandbus.errors import CommandBusError, UnknownDomainError
from commandbus.flow.operation import Statement, Steps, no_schema


def all_domains() -> Steps[list[str]]:
    """The names of all domains."""
    rows = yield Statement(b"SELECT name FROM commandbus.domain ORDER BY name")
    return [name for (name,) in rows]


def no_queue(domain: str) -> Steps[CommandBusError]:
    """A queue is missing. Find out whether the domain does not exist, or commandbus was never migrated."""
    try:
        rows = yield Statement(b"SELECT pg_catalog.to_regclass('commandbus.domain') IS NULL")
    except pg.InFailedSqlTransaction:  # a lent pool whose connections are not in autocommit mode
        return UnknownDomainError(domain)
    return no_schema() if rows[0][0] else UnknownDomainError(domain)
