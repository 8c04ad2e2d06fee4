"""What operators do to processes: cancel them, and let a FAILED one go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandBusError, InvalidOperationError, ProcessNotFoundError
from commandbus.flow.batches.fold_and_complete import fold_now
from commandbus.flow.commands import operate
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Plan, Row, Statement, Steps, operation
from commandbus.flow.processes.messages import send_message
from commandbus.flow.processes.move import cancel_commands
from commandbus.flow.processes.tell_the_end import parent_of, tell_the_end
from commandbus.model import names
from commandbus.model.payload import loads_or_none
from commandbus.model.process import ProcessStatus
from commandbus.processes.manager import ProcessView


def cancel_process(domain: str, process_id: str, what: operate.OperatorAction) -> Plan[ProcessStatus]:
    """Cancel a process: its outstanding commands are canceled, and its steps are undone that have an undo.

    First the request is written. No step is sent after that: a move that has begun is refused and done again. Then
    the commands are canceled, each in its own transaction. If this was interrupted, a second request continues
    from there.
    """
    process_id = names.to_id(process_id, "process_id")
    status = yield _request_cancel(names.check_domain(domain), process_id, what)
    for id_, of_domain, command_id, is_to_retry in (yield _unfinished(domain, process_id)):
        yield _end_unfinished(id_, of_domain, command_id, what, is_to_retry=is_to_retry)
    return cast(ProcessStatus, status)


@operation(atomic=True)
def _request_cancel(domain: str, process_id: str, what: operate.OperatorAction) -> Steps[ProcessStatus]:
    rows = yield Statement(
        sql.text("processes/cancel"),
        {"domain": domain, "process_id": process_id, "operator": what.operator, "reason": what.reason},
    )
    if not rows:
        raise (yield from _refusal(domain, process_id, "cancel"))
    (id_, status, has_ended, batch, reply_to, correlation_id, process_type, parent, parent_step,
     waits) = rows[0]  # fmt: skip
    request = {"by": what.operator, "reason": what.reason}
    view: ProcessView[Any] = ProcessView(
        process_id, process_type, ProcessStatus.CANCELED, None, None, cancel=request
    )
    if has_ended:
        yield from tell_the_end(
            view, domain, "null", reply_to=reply_to, correlation_id=correlation_id, batch=batch,
            parent=parent_of(parent, parent_step),
        )  # fmt: skip
    elif waits:  # no command of it ends now, so that no reply would come
        yield from send_message(domain, view, id_, {"event": "cancel"} | request)
    return ProcessStatus(status)


@operation(atomic=False)
def _unfinished(domain: str, process_id: str) -> Steps[list[Row]]:
    """The commands of outstanding steps, and the messages that the process's own code could not handle. Such
    messages are retried, because the code may succeed now that it sees the request. If the process has ended: all
    messages."""
    return (yield Statement(sql.text("processes/unfinished"), {"domain": domain, "process_id": process_id}))


@operation(atomic=True)
def _end_unfinished(
    process: int, domain: str, command_id: str, what: operate.OperatorAction, *, is_to_retry: bool
) -> Steps[None]:
    if is_to_retry:
        try:
            yield from operate.act_on(domain, command_id, replace(what, action="RETRY")).steps
        except InvalidOperationError:
            return
    else:
        yield from cancel_commands(process, [(domain, command_id, what)])


@operation(atomic=True)
def retry_process(domain: str, process_id: str, what: operate.OperatorAction) -> Steps[None]:
    """Let a FAILED process go on from where it stopped."""
    process_id = names.to_id(process_id, "process_id")
    try:
        rows = yield Statement(
            sql.text("processes/retry"), {"domain": names.check_domain(domain), "process_id": process_id}
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    if not rows:
        raise (yield from _refusal(domain, process_id, "retry"))
    id_, process_type, batch, ended = rows[0]
    view: ProcessView[Any] = ProcessView(process_id, process_type, ProcessStatus.IN_PROGRESS, None, None)
    asked = {"by": what.operator, "reason": what.reason}
    missed = loads_or_none(ended) or []
    if all(item["delay"] for item in missed):  # also if it missed nothing
        missed.append({"message": {"event": "retry"}, "delay": 0.0})
    for item in missed:
        yield from send_message(domain, view, id_, item["message"] | {"operator": asked}, delay=item["delay"])
    if batch is not None:
        yield from fold_now([batch])


def _refusal(domain: str, process_id: str, verb: str) -> Steps[CommandBusError]:
    rows = yield Statement(
        b"SELECT status, is_compensating, parent FROM commandbus.process "
        b"WHERE domain = %(domain)s AND process_id = %(id)s",
        {"domain": domain, "id": process_id},
    )
    if not rows:
        return ProcessNotFoundError(f"no process {process_id!r} in domain {domain!r}")
    status, is_compensating, parent = rows[0]
    why = f"it is {status}"
    if verb == "cancel" and is_compensating and not ProcessStatus(status).is_final:
        why = f"it is being undone already ({status})"
    elif verb == "retry" and status == "FAILED" and parent is not None:
        why = "it is nested in another process, which was told that it FAILED: retry that one"
    elif verb == "retry":
        why += "; only a FAILED process can be retried"
    return InvalidOperationError(f"cannot {verb} process {process_id!r} of domain {domain!r}: {why}")
