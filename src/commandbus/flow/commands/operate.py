"""What operators do: retry, cancel and complete commands in the troubleshooting queue, cancel other commands, and
change their priority.

Every action locks what it moves, checks the state, and is recorded with the operator's name. If two operators act
at the same time, one wins. The other's action finds nothing, and `explain` says what the command's state is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Literal

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandNotFoundError, InvalidCommandError, InvalidOperationError
from commandbus.flow.batches import membership
from commandbus.flow.commands.reply import Outcome, compose, deliver
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.commands.settle import cancellation
from commandbus.flow.operation import Plan, Row, Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model import priority as priorities
from commandbus.model.command import CancelResult
from commandbus.model.outcome import Failure
from commandbus.model.priority import Priority
from commandbus.quick_dataclass import dataclass

BITE = 1000  # commands moved by one bulk statement: a bound on locks held, not on what a caller may ask for

Action = Literal["RETRY", "CANCEL", "COMPLETE"]
_ENDS: dict[Action | None, str] = {"CANCEL": "CANCELED", "COMPLETE": "COMPLETED"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects commands in a domain's troubleshooting queue by id, type and error code. All conditions must
    hold."""

    domain: str
    ids: Sequence[int] | None = None
    command_type: str | None = None
    error_code: str | None = None
    entered_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """Who does something, and why. `action` is what is done to commands, `result` the JSON text of COMPLETE."""

    operator: str
    reason: str | None = None
    action: Action | None = None
    result: str | None = None


def operator_action(
    operator: object, reason: object = None, action: Action | None = None, result: str | None = None
) -> OperatorAction:
    """Returns a checked action: every action has an operator."""
    name = names.check_id(operator, "operator")
    if reason is not None and (not isinstance(reason, str) or "\x00" in reason or len(reason) > 8192):
        raise InvalidCommandError("reason must be text of at most 8192 characters without NUL")
    return OperatorAction(name, None if reason is None else payload.clean_text(reason), action, result)


@operation(atomic=True)
def act(selection: Selection, what: OperatorAction, *, limit: int = BITE, waits: bool = True) -> Steps[list[str]]:
    """Apply an action to what is selected, up to `limit`, and wait for rows that others have locked, or pass them
    by. Returns the command_ids that were moved."""
    rows = yield from _apply(selection, what, limit, waits=waits)
    return [command_id for _, command_id, *_ in rows]


def act_on_all(selection: Selection, what: OperatorAction) -> Plan[int]:
    """Apply an action to everything that is selected now, in portions. Returns how many were moved.

    Commands that enter the queue meanwhile are left alone. Otherwise this action would retry a command that fails
    again and again, for ever. Rows that others have locked hold up no others: they come last.
    """
    now = yield _now()
    bounded = replace(selection, entered_before=now)
    moved = 0
    for waits in (False, True):
        while bite := (yield act(bounded, what, waits=waits)):
            moved += len(bite)
    return moved


@operation(atomic=False)
def _now() -> Steps[datetime]:
    rows = yield Statement(b"SELECT pg_catalog.clock_timestamp()")
    found: datetime = rows[0][0]
    return found


@operation(atomic=True)
def act_on(domain: str, command_id: str, what: OperatorAction) -> Steps[None]:
    """Apply an action to one command in the troubleshooting queue, or raise InvalidOperationError."""
    command_id = names.to_id(command_id)
    id_ = yield from _find(domain, command_id)
    if not (yield from _apply(Selection(domain, ids=[id_]), what, 1)):
        raise InvalidOperationError((yield from _explain(domain, command_id, str(what.action).lower())))


@operation(atomic=True)
def cancel(domain: str, command_id: str, what: OperatorAction) -> Steps[CancelResult]:
    """Cancel a command. If it runs, ask its worker to stop it.

    A second request changes nothing. A command that is in the troubleshooting queue, or has ended, is refused.
    """
    command_id = names.to_id(command_id)
    try:
        rows = yield Statement(
            sql.text("commands/cancel", domain=domain),
            {"domain": domain, "command_id": command_id, "operator": what.operator, "reason": what.reason},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    if not rows:
        yield from _find(domain, command_id)
        raise InvalidOperationError((yield from _explain(domain, command_id, "cancel")))
    *told, result, msg_id = rows[0]
    if result == CancelResult.CANCELED:
        yield Statement(
            b"DELETE FROM commandbus.parked WHERE domain = %(domain)s AND msg_id = %(msg_id)s",
            {"domain": domain, "msg_id": msg_id},
        )
        yield from tell(domain, [tuple(told)], what, was_in_tsq=False)
    return CancelResult(result)


@operation(atomic=True)
def set_priority(domain: str, command_id: str, priority: object, what: OperatorAction) -> Steps[Priority]:
    """Change the priority of a command that waits, or of the retries of one that runs. Returns the former one."""
    command_id = names.to_id(command_id)
    number = priorities.to_number("" if priority is None else priority, InvalidCommandError)
    params = {"domain": domain, "command_id": command_id, "priority": number, "name": priorities.name_of(number)}
    try:
        rows = yield Statement(
            sql.text("commands/set_priority", domain=domain),
            params | {"operator": what.operator, "reason": what.reason},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    if not rows:
        yield from _find(domain, command_id)
        raise InvalidOperationError((yield from _explain(domain, command_id, "change the priority of")))
    before, msg_id, _ = rows[0]
    yield Statement(sql.text("limits/set_turn"), {"domain": domain, "msg_id": msg_id})
    return priorities.name_of(before)


def _apply(selection: Selection, what: OperatorAction, limit: int, *, waits: bool = True) -> Steps[list[Row]]:
    locking = "" if waits else "SKIP LOCKED"
    params = {
        "domain": selection.domain,
        "ids": None if selection.ids is None else list(selection.ids),
        "command_type": selection.command_type,
        "error_code": selection.error_code,
        "entered_before": selection.entered_before,
        "limit": limit,
        "operator": what.operator,
        "reason": what.reason,
    }
    try:
        if what.action == "RETRY":
            retry = sql.text("commands/tsq_retry", domain=selection.domain, locking=locking)
            rows = yield Statement(retry, params)
            yield from membership.retried(
                [membership.Member(id_, batch, process, None) for id_, _, batch, process, _ in rows]
            )
            return rows
        status = _ENDS[what.action]
        rows = yield Statement(
            sql.text("commands/tsq_end", locking=locking),
            params | {"action": what.action, "status": status, "result": what.result},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(selection.domain, error) from None
    yield from tell(selection.domain, rows, what, was_in_tsq=True)
    return rows


def tell(domain: str, rows: Sequence[Row], what: OperatorAction, *, was_in_tsq: bool) -> Steps[None]:
    """Update the replies, batches and processes of commands that a person has ended."""
    failure = None if what.action == "COMPLETE" else cancellation(what.operator, what.reason)
    why = f"{what.operator} ended a message that this process had not handled"
    if what.reason:
        why += f": {what.reason}"
    yield from tell_ended(domain, rows, failure, was_in_tsq=was_in_tsq, why=why, result=what.result)


def tell_ended(
    domain: str,
    rows: Sequence[Row],
    failure: Failure | None,
    *,
    was_in_tsq: bool,
    why: str,
    result: str | None = None,
) -> Steps[None]:
    """Update the replies, batches and processes of commands that ended without an attempt: CANCELED for this
    reason, or COMPLETED."""
    outcome: Outcome = "SUCCESS" if failure is None else "CANCELED"
    yield from membership.ended(
        [membership.Member(id_, batch, process, step) for id_, _, _, _, _, batch, process, step in rows],
        "COMPLETED" if failure is None else "CANCELED",
        was_in_tsq=was_in_tsq,
        why=why,
    )
    replies = [
        compose(
            reply_to,
            outcome,
            id_=id_,
            domain=domain,
            command_id=command_id,
            command_type=command_type,
            correlation_id=correlation_id,
            result=result,
            failure=failure,
        )
        for id_, command_id, command_type, correlation_id, reply_to, *_ in rows
        if reply_to is not None
    ]
    if replies:
        yield from deliver(replies)


def _find(domain: str, command_id: str) -> Steps[int]:
    names.check_domain(domain)
    rows = yield Statement(
        b"SELECT id FROM commandbus.command WHERE domain = %(domain)s AND command_id = %(command_id)s",
        {"domain": domain, "command_id": command_id},
    )
    if not rows:
        raise CommandNotFoundError(f"no command {command_id!r} in domain {domain!r}")
    id_: int = rows[0][0]
    return id_


def _explain(domain: str, command_id: str, verb: str) -> Steps[str]:
    rows = yield Statement(
        sql.text("commands/status_of", domain=domain), {"domain": domain, "command_id": command_id}
    )
    status, holder, lease_ends, asked_by = rows[0] if rows else ("gone", None, None, None)
    asked = f", and {asked_by} has asked to cancel it" if asked_by else ""
    state = {
        "IN_TROUBLESHOOTING_QUEUE": "it is in the troubleshooting queue (see `commandbus tsq`)",
        "IN_PROGRESS": f"worker {holder} holds it (its lease ends at {lease_ends} unless renewed){asked}",
        "PENDING": "it is waiting in the queue, not in the troubleshooting queue",
    }.get(status, f"it is {status}, and that is final")
    return f"cannot {verb} command {command_id!r} of domain {domain!r}: {state}"
