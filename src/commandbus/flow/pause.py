"""pause and resume: a whole domain (nothing of it is claimed) or one command type (its commands are parked)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from commandbus.errors import InvalidOperationError, UnknownDomainError
from commandbus.flow.operate import Deed
from commandbus.flow.statement import Plan, Statement, Steps, operation
from commandbus.flow.unpark import Bite, Parked, wake, wake_rest
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


def resume(domain: str, command_type: str | None) -> Plan[int]:
    """Resume; returns how many parked commands went back to the queue, in bites."""
    parked = Parked("pause", domain, command_type or "")
    return (yield from wake_rest(parked, _resume(domain, command_type)))


@operation(atomic=True)
def _resume(domain: str, command_type: str | None) -> Steps[Bite]:
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
    return (yield from wake(Parked("pause", domain, command_type or "")))


@operation(atomic=False)
def list_pauses() -> Steps[list[PauseInfo]]:
    """Everything that is paused."""
    rows = yield Statement(
        b"SELECT domain, nullif(command_type, ''), operator, reason, paused_at FROM commandbus.pause ORDER BY 1, 2"
    )
    return [PauseInfo(*row) for row in rows]
