"""How a process is read and moved.

Messages move a process. They are commands of its type in its domain (step 0): its start, the replies to its
steps, its timers, an operator's retry. Reading locks nothing. The move itself, `apply`, is refused if another
worker has moved the process since it was read. Then the whole message is handled again. So the process row is
locked only for a moment, never while the manager's code runs.

Order within `apply`: commands to cancel (queue row → command row), commands to send (new rows), the process.
"""

from __future__ import annotations

from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidOperationError, PermanentCommandError, ProcessMovedError
from commandbus.flow.commands import operate
from commandbus.flow.commands.send import Outgoing, explain_missing, prepare
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.flow.processes import begin_waits
from commandbus.flow.processes.loaded import Loaded
from commandbus.flow.processes.messages import dump, seconds_until, send_message
from commandbus.flow.processes.tell_the_end import parent_of, tell_the_end
from commandbus.model import names
from commandbus.model.command import NewCommand
from commandbus.model.durations import parse_seconds
from commandbus.model.payload import loads_or_none
from commandbus.model.process import ProcessStatus, StepStatus
from commandbus.processes.manager import ProcessView, StepCommand, StepView
from commandbus.processes.moves import Advance
from commandbus.processes.waiting_steps import Signal, SignalQuery

_LOCK_SPACE = 0x636D6270  # "cmbp": advisory locks of processes that several messages want to move


@operation(atomic=False)
def line_up(domain: str, process_id: str) -> Steps[None]:
    """Wait in line, together with other messages whose move of this process was refused, until the transaction
    ends.

    With 300 replies to one process at once, and 48 threads, this takes 4 s instead of 14, and no message gives up.
    """
    yield Statement(
        b"SELECT pg_catalog.pg_advisory_xact_lock(%(space)s, pg_catalog.hashtext(%(process)s))",
        {"space": _LOCK_SPACE, "process": f"{domain}/{process_id}"},
    )


@operation(atomic=False)
def load(domain: str, process_id: str, *, message: int | None = None) -> Steps[Loaded | None]:
    """Returns a process and its steps; None if there is none. `message`: the internal id of the message, if
    any."""
    asked = {"domain": domain, "process_id": process_id, "message": message}
    rows = yield Statement(sql.text("processes/load"), asked)
    if not rows:
        return None
    (id_, process_id, process_type, status, version, is_compensating, data, state, cancel, failure, created_at,
     deadline_at, batch, reply_to, correlation_id, timer, parent, parent_step, root, depth, steps,
     is_its_message) = rows[0]  # fmt: skip
    view = ProcessView(
        process_id,
        process_type,
        ProcessStatus(status),
        loads_or_none(data),
        loads_or_none(state),
        is_compensating,
        loads_or_none(cancel),
        loads_or_none(failure),
        created_at,
        deadline_at,
        [_step_view(**step) for step in loads_or_none(steps) or []],
        parent_step,
    )
    return Loaded(
        id_, domain, version, batch, reply_to, correlation_id, timer, state is not None, is_its_message,
        parent, root, depth or 0, view,
    )  # fmt: skip


def _step_view(*, status: str, waits: list[Any] | None, **fields: Any) -> StepView:
    kind, name = (None, None) if waits is None else waits
    return StepView(**fields, status=StepStatus(status), kind=kind, signal=name if kind == "signal" else None)


@operation(atomic=False)
def untaken_signals(loaded: Loaded, asked: SignalQuery, most: int) -> Steps[list[Signal]]:
    """The oldest signals of this name that no step has taken."""
    rows = yield Statement(
        sql.text("processes/untaken_signals"),
        {"process": loaded.id, "name": asked.name, "taken": list(asked.taken), "most": most},
    )
    return [Signal(id_, command_id, loads_or_none(data)) for id_, command_id, data in rows]


@operation(atomic=True)
def touch(loaded: Loaded) -> Steps[None]:
    """Count a move that changes nothing. Raises ProcessMovedError if the process has moved."""
    asked = {"id": loaded.id, "version": loaded.version}
    rows = yield Statement(sql.text("processes/touch"), asked)
    if not rows:
        raise _moved(loaded)


@operation(atomic=True)
def apply(loaded: Loaded, made: Advance, state: str, *, max_bytes: int) -> Steps[None]:
    """Write a move, in the transaction that handles its message. Raises ProcessMovedError if the process has
    moved."""
    view = made.view
    yield from _cancel_steps(loaded, made.cancels)
    timer = loaded.timer
    forgotten = [step.timer for step in made.closed if step.timer is not None]
    if view.status.is_final and timer is not None:
        forgotten.append(timer)
        timer = None
    elif not loaded.has_state and view.deadline_at is not None and not view.status.is_final:
        seconds = yield from seconds_until(view.deadline_at)
        timer = yield from _set_timer(loaded, {"event": "deadline"}, seconds)
    for step, command in ((sending.step, sending.command) for sending in made.sends):
        if isinstance(command, StepCommand):
            yield from _send_step(loaded, step, command, max_bytes)
        elif not (yield from begin_waits.begin(loaded, step, command, max_bytes)):
            yield from _check_unmoved(loaded)
            raise begin_waits.is_taken(step, command)
    if forgotten:
        yield Statement(sql.text("processes/forget_timers", domain=loaded.domain), {"timers": forgotten})
    closed = [
        {"n": step.number, "s": step.status, "k": step.closed, "v": step.result, "e": step.error}
        | ({"c": made.taken[step.number], "i": step.command_id} if step.number in made.taken else {})
        for step in made.closed
    ]
    rows = yield Statement(
        sql.text("processes/advance"),
        {
            "id": loaded.id,
            "version": loaded.version,
            "status": view.status,
            "is_final": view.status.is_final,
            "is_compensating": view.is_compensating,
            "state": state,
            "failure": None if view.failure is None else dump(view.failure),
            "timer": timer,
            "cancel": None if view.cancel is None else dump(view.cancel),
            "parent_step": view.parent_step,
            "closed": dump(closed),
        },
    )
    if not rows:
        raise _moved(loaded)
    if view.status.is_final:
        yield from tell_the_end(
            view,
            loaded.domain,
            state,
            reply_to=loaded.reply_to,
            correlation_id=loaded.correlation_id,
            batch=None,  # the worker that handles the message folds after the commit
            parent=parent_of(loaded.parent, view.parent_step),
        )


@operation(atomic=False)
def set_aside(domain: str, process: int | None, message: Any, reason: str) -> Steps[None]:
    """Keep a message that moved nothing, and why."""
    yield Statement(
        b"INSERT INTO commandbus.stray_reply (domain, process, message, reason) "
        b"VALUES (%(domain)s, %(process)s, %(message)s::json, %(reason)s)",
        {"domain": domain, "process": process, "message": dump(message), "reason": reason},
    )


def _cancel_steps(loaded: Loaded, cancels: list[tuple[StepView, str]]) -> Steps[None]:
    operator = f"process {loaded.view.process_id}"[:255]
    wanted = [
        (step.domain, step.command_id, operate.operator_action(operator, why[:8192], "CANCEL"))
        for step, why in cancels
        if step.kind is None
    ]
    yield from cancel_commands(loaded.id, wanted)
    for step, why in cancels:
        if step.kind == "process":
            yield from begin_waits.tell_nested(
                loaded, step, {"event": "cancel", "by": operator, "reason": why[:8192]}
            )


def cancel_commands(process: int, wanted: list[tuple[str, str, operate.OperatorAction]]) -> Steps[None]:
    """Cancel commands of a process, in any state. If one has just ended, its reply is on the way.

    First come the commands that wait or run (queue rows), then those in the troubleshooting queue. The second part
    locks the process. In the other order we could deadlock with a worker that settles a command of the first part.
    Between the two parts the commands in the troubleshooting queue are locked. Then the first part is repeated,
    for commands that an operator has retried in between.
    """
    left = yield from _cancel_waiting(wanted)
    if not left:
        return
    yield from lock_troubled(process)
    for domain, command_id, operator_action in (yield from _cancel_waiting(left)):
        try:
            yield from operate.act_on(domain, command_id, operator_action).steps
        except InvalidOperationError:
            continue


def _cancel_waiting(
    wanted: list[tuple[str, str, operate.OperatorAction]],
) -> Steps[list[tuple[str, str, operate.OperatorAction]]]:
    """Cancel those that wait or run. Returns the others."""
    left = []
    for domain, command_id, operator_action in wanted:
        try:
            yield from operate.cancel(domain, command_id, operator_action).steps
        except InvalidOperationError:
            left.append((domain, command_id, operator_action))
    return left


def lock_troubled(process: int) -> Steps[list[Row]]:
    """Lock all commands of a process in the troubleshooting queue. Returns (domain, row id) of each. Call it
    before the first of them leaves the queue, because that locks the process. Otherwise an operator who moves
    another command would hold its lock while waiting for the process."""
    return (
        yield Statement(
            b"SELECT t.domain, t.command FROM commandbus.tsq t "
            b"WHERE t.command IN (SELECT id FROM commandbus.command WHERE process = %(process)s) "
            b"ORDER BY t.command FOR UPDATE",
            {"process": process},
        )
    )


def _prepare(
    loaded: Loaded, step: StepView, command: StepCommand, max_bytes: int
) -> tuple[str, Outgoing, float | None]:
    """A step's domain, its checked command, and how long the step may take."""
    try:
        new = NewCommand(
            command.command_type,
            command.data,
            _own_id(loaded.view, step, command),
            loaded.correlation_id or loaded.view.process_id,
            max_attempts=command.max_attempts,
            delay=command.delay,
            headers=command.headers,
            timeout=command.timeout,
            on_exhausted=command.on_exhausted,
        )
        seconds = None if command.deadline is None else parse_seconds(command.deadline, name="deadline")
        return names.check_domain(command.domain), prepare(new, max_bytes=max_bytes), seconds or None
    except ValueError as error:
        raise PermanentCommandError(
            f"the command of step {step.name!r} cannot be sent: {error}", code="INVALID_STEP"
        ) from None


def _send_step(loaded: Loaded, step: StepView, command: StepCommand, max_bytes: int) -> Steps[None]:
    domain, outgoing, deadline = _prepare(loaded, step, command, max_bytes)
    timer = None
    if deadline:
        timer = yield from _set_timer(loaded, {"event": "deadline", "step": step.number}, deadline)
    try:
        rows = yield Statement(
            sql.text("processes/step", domain=domain),
            {
                "domain": domain,
                "command_id": outgoing.command_id,
                "command_type": outgoing.command_type,
                "max_attempts": outgoing.max_attempts,
                "correlation_id": outgoing.correlation_id,
                "reply_to": names.queue_of(loaded.domain),
                "headers": outgoing.headers,
                "data": outgoing.data,
                "timeout": outgoing.timeout_seconds,
                "on_exhausted": outgoing.on_exhausted,
                "delay": outgoing.delay_seconds,
                "process": loaded.id,
                "step": step.number if step.undoes is None else -step.number,
                "name": step.name,
                "undoes": step.undoes,
                "has_undo": step.has_undo,
                "timer": timer,
                "deadline": deadline,
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        missing = explain_missing(domain, error)
        raise PermanentCommandError(
            f"the command of step {step.name!r} cannot be sent: {missing}", code="INVALID_STEP"
        ) from None
    if not rows:
        yield from _check_unmoved(loaded)  # a worker that moved it meanwhile may have sent this very command
        raise PermanentCommandError(
            f"the command of step {step.name!r} cannot be sent: command_id {outgoing.command_id!r} already "
            f"exists in domain {domain!r}",
            code="DUPLICATE_COMMAND",
        )


def _check_unmoved(loaded: Loaded) -> Steps[None]:
    rows = yield Statement(
        b"SELECT version FROM commandbus.process WHERE id = %(id)s AND version = %(version)s",
        {"id": loaded.id, "version": loaded.version},
    )
    if not rows:
        raise _moved(loaded)


def _moved(loaded: Loaded) -> ProcessMovedError:
    return ProcessMovedError(f"process {loaded.view.process_id!r} was moved by somebody else meanwhile")


def _own_id(view: ProcessView[Any], step: StepView, command: StepCommand) -> str | None:
    """The manager's command_id; with this step's number added if an earlier attempt at the step has the same
    id."""
    own = command.command_id
    if own is not None and any(one.command_id == own for one in view.steps if one is not step):
        return f"{own}~{step.number}"
    return own


def _set_timer(loaded: Loaded, data: dict[str, Any], seconds: float) -> Steps[int]:
    return (yield from send_message(loaded.domain, loaded.view, loaded.id, data, delay=seconds))
