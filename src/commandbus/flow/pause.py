"""pause and resume: a whole domain (nothing of it is claimed) or one command type (its commands are parked)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidOperationError, UnknownDomainError
from commandbus.flow.operate import Deed
from commandbus.flow.send import explain_missing
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.model import names


@dataclass(frozen=True, slots=True)
class PauseInfo:
    """What is paused; command_type None means the whole domain."""

    domain: str
    command_type: str | None
    operator: str
    reason: str | None
    paused_at: datetime


@operation(atomic=True)
def pause(domain: str, command_type: str | None, what: Deed) -> Steps[bool]:
    """Pause; False if it was paused already. What runs goes on."""
    if command_type is not None:
        names.check_type(command_type)
    known = yield Statement(b"SELECT 1 FROM commandbus.domain WHERE name = %(domain)s", {"domain": domain})
    if not known:
        raise UnknownDomainError(domain)
    rows = yield Statement(
        b"INSERT INTO commandbus.pause (domain, command_type, operator, reason) "
        b"VALUES (%(domain)s, %(type)s, %(operator)s, %(reason)s) ON CONFLICT DO NOTHING RETURNING domain",
        {"domain": domain, "type": command_type or "", "operator": what.operator, "reason": what.reason},
    )
    return bool(rows)


@operation(atomic=True)
def resume(domain: str, command_type: str | None) -> Steps[int]:
    """Resume; answers how many parked commands went back to the queue."""
    if command_type is not None:
        names.check_type(command_type)
    params = {"domain": domain, "type": command_type or ""}
    gone = yield Statement(
        b"DELETE FROM commandbus.pause WHERE domain = %(domain)s AND command_type = %(type)s RETURNING domain",
        params,
    )
    if not gone:
        what = f"command_type {command_type!r} of domain {domain!r}" if command_type else f"domain {domain!r}"
        raise InvalidOperationError(f"{what} is not paused")
    # A statement of its own: its snapshot sees what was parked by those that the DELETE waited for.
    try:
        rows = yield Statement(sql.text("unpark", domain=domain), params | {"reason": "pause"})
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    count: int = rows[0][0]
    return count


@operation(atomic=False)
def list_pauses() -> Steps[list[PauseInfo]]:
    """Everything that is paused."""
    rows = yield Statement(
        b"SELECT domain, nullif(command_type, ''), operator, reason, paused_at FROM commandbus.pause ORDER BY 1, 2"
    )
    return [PauseInfo(*row) for row in rows]
