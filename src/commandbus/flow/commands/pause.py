"""pause and resume: a whole domain (nothing of it is claimed) or one command type (its commands are parked).

control_action records both, with who did it and why: 'pause orders/ship', or 'pause orders/' for a domain.
"""

from __future__ import annotations

from datetime import datetime

from commandbus.errors import InvalidOperationError, UnknownDomainError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.unpark import Parked, UnparkBite, wake, wake_rest
from commandbus.flow.limits.declare import note_action
from commandbus.flow.limits.inspect import ControlAction
from commandbus.flow.operation import Plan, Statement, Steps, operation
from commandbus.model import names
from commandbus.quick_dataclass import dataclass

PREFIX = "pause "


@dataclass(frozen=True, slots=True)
class PauseInfo:
    """What is paused; command_type None means the whole domain."""

    domain: str
    command_type: str | None
    operator: str
    reason: str | None
    paused_at: datetime


@operation(atomic=True)
def pause(domain: str, command_type: str | None, what: OperatorAction) -> Steps[bool]:
    """Pause. Returns False if it was paused already. Running attempts go on."""
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
    if rows:
        yield note_action(_subject(domain, command_type), "PAUSE", what)
    return bool(rows)


def resume(domain: str, command_type: str | None, what: OperatorAction) -> Plan[int]:
    """Resume. Returns how many parked commands went back to the queue, in portions."""
    parked = Parked("pause", domain, command_type or "")
    return (yield from wake_rest(parked, _resume(domain, command_type, what)))


@operation(atomic=True)
def _resume(domain: str, command_type: str | None, what: OperatorAction) -> Steps[UnparkBite]:
    if command_type is not None:
        names.check_type(command_type)
    params = {"domain": domain, "type": command_type or ""}
    gone = yield Statement(
        b"DELETE FROM commandbus.pause WHERE domain = %(domain)s AND command_type = %(type)s RETURNING domain",
        params,
    )
    if not gone:
        named = f"command_type {command_type!r} of domain {domain!r}" if command_type else f"domain {domain!r}"
        raise InvalidOperationError(f"{named} is not paused")
    yield note_action(_subject(domain, command_type), "RESUME", what)
    # Idle workers must look again: while the domain was paused they found nothing, and no command was parked.
    yield Statement(b"SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, '0')", params)
    return (yield from wake(Parked("pause", domain, command_type or "")))


@operation(atomic=False)
def list_pauses() -> Steps[list[PauseInfo]]:
    """Everything that is paused."""
    rows = yield Statement(
        b"SELECT domain, nullif(command_type, ''), operator, reason, paused_at FROM commandbus.pause ORDER BY 1, 2"
    )
    return [PauseInfo(*row) for row in rows]


@operation(atomic=False)
def list_actions(*, limit: int) -> Steps[list[ControlAction]]:
    """Who paused and resumed what, newest first. Index: the key, backwards; control_action is small."""
    rows = yield Statement(
        b"SELECT subject, action, operator, reason, details, performed_at FROM commandbus.control_action "
        b"WHERE pg_catalog.starts_with(subject, %(prefix)s) ORDER BY id DESC LIMIT %(limit)s",
        {"prefix": PREFIX, "limit": limit},
    )
    return [ControlAction(*row) for row in rows]


def _subject(domain: str, command_type: str | None) -> str:
    return f"{PREFIX}{domain}/{command_type or ''}"
