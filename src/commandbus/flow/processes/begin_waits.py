"""How steps begin that send no command: waits for a signal, sleeps, nested processes, and the undoing of these.

In the transaction that moves the process. A nested process that is to be canceled or undone gets a message. So no
transaction locks the rows of two processes.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import PermanentCommandError
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Statement, Steps
from commandbus.flow.processes.loaded import Loaded
from commandbus.flow.processes.messages import seconds_until, send_message
from commandbus.model import names, payload
from commandbus.model.command import new_command_id
from commandbus.model.durations import parse_seconds
from commandbus.model.process import DEFAULT_DOMAIN, MAX_DEPTH, NewProcess, ProcessStatus, StepStatus
from commandbus.processes.manager import ProcessView, StepView, check_manager, check_new
from commandbus.processes.waiting_steps import StepProcess, StepSignal, StepSleep, StepUndo, WaitingStep

_SPACE = uuid.UUID("6f0f6c1e-6f6e-4a7a-9d0e-6e6573746564")  # for ids of nested processes that would be too long


class _Nested(NamedTuple):
    domain: str
    process_type: str
    process_id: str
    data: str
    seconds: float | None


def begin(loaded: Loaded, step: StepView, command: WaitingStep | StepUndo, max_bytes: int) -> Steps[bool]:
    """Begin such a step. Returns False if its nested process has an id that is taken."""
    if isinstance(command, StepSignal):
        yield from _wait_for_signal(loaded, step, command)
    elif isinstance(command, StepSleep):
        yield from _sleep(loaded, step, command)
    elif isinstance(command, StepUndo):
        yield from _undo_nested(loaded, step)
    else:
        return (yield from _start_nested(loaded, step, command, max_bytes))
    return True


def is_taken(step: StepView, command: WaitingStep | StepUndo) -> PermanentCommandError:
    """The error for a nested process whose id is taken."""
    id_ = getattr(command, "process_id", None) or step.command_id
    return PermanentCommandError(
        f"the nested process of step {step.name!r} cannot be started: process_id {id_!r} is taken",
        code="DUPLICATE_PROCESS",
    )


def _wait_for_signal(loaded: Loaded, step: StepView, command: StepSignal) -> Steps[None]:
    seconds = None if command.deadline is None else parse_seconds(command.deadline, name="deadline")
    timer = None
    if seconds and step.status is StepStatus.SENT:  # otherwise it has taken a signal that was there already
        data = {"event": "deadline", "step": step.number, "on_timeout": command.on_timeout}
        if command.on_timeout == "continue":
            data["otherwise"] = command.otherwise
        timer = yield from send_message(loaded.domain, loaded.view, loaded.id, data, delay=seconds)
    yield from _note(loaded, step, loaded.domain, "", command.name, timer=timer, seconds=seconds or None)


def _sleep(loaded: Loaded, step: StepView, command: StepSleep) -> Steps[None]:
    if command.duration is not None:
        seconds = parse_seconds(command.duration, name="duration")
    else:
        seconds = yield from seconds_until(command.until)
    data = {"event": "wake", "step": step.number}
    timer = yield from send_message(loaded.domain, loaded.view, loaded.id, data, delay=seconds)
    yield from _note(loaded, step, loaded.domain, "", "sleep", timer=timer, seconds=seconds)


def _undo_nested(loaded: Loaded, step: StepView) -> Steps[None]:
    undone = next(one for one in loaded.view.steps if one.number == step.undoes)
    step.domain, step.command_id = undone.domain, undone.command_id
    by = f"process {loaded.view.process_id!r}"
    process_type = yield from tell_nested(loaded, step, {"event": "undo", "step": step.number, "by": by})
    yield from _note(loaded, step, step.domain, step.command_id, process_type)


def tell_nested(loaded: Loaded, step: StepView, data: dict[str, Any]) -> Steps[str]:
    """Send a message to the nested process of a step. Returns its type."""
    asked = {"domain": step.domain, "process_id": step.command_id, "parent": loaded.id}
    rows = yield Statement(sql.text("processes/nested"), asked)
    if not rows:
        raise PermanentCommandError(
            f"step {step.number} ({step.name}) has no nested process {step.command_id!r} in {step.domain!r}",
            code="NO_NESTED_PROCESS",
        )
    id_, process_type = rows[0]
    view: ProcessView[Any] = ProcessView(step.command_id, process_type, ProcessStatus.PENDING, None, None)
    yield from send_message(step.domain, view, id_, data)
    return str(process_type)


def _start_nested(loaded: Loaded, step: StepView, command: StepProcess, max_bytes: int) -> Steps[bool]:
    if loaded.depth >= MAX_DEPTH:
        raise PermanentCommandError(
            f"step {step.name!r} would nest processes more than {MAX_DEPTH} levels deep: does "
            f"{loaded.view.process_type!r} start itself again and again?",
            code="NESTED_TOO_DEEP",
        )
    nested = _prepare(loaded, step, command, max_bytes)
    step.command_id = nested.process_id
    try:
        rows = yield Statement(
            sql.text("processes/start_nested", domain=nested.domain),
            nested._asdict()
            | {
                "command_id": new_command_id(),
                "reply_to": names.queue_of(loaded.domain),
                "correlation_id": loaded.correlation_id or loaded.view.process_id,
                "parent": loaded.id,
                "parent_step": step.number,
                "root": loaded.root or loaded.id,
                "depth": loaded.depth + 1,
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        missing = explain_missing(nested.domain, error)
        text = f"the nested process of step {step.name!r} cannot be started: {missing}"
        raise PermanentCommandError(text, code="INVALID_STEP") from None
    if rows:
        yield from _note(loaded, step, nested.domain, nested.process_id, nested.process_type)
    return bool(rows)


def _prepare(loaded: Loaded, step: StepView, command: StepProcess, max_bytes: int) -> _Nested:
    process = command.process
    try:
        new = NewProcess(command.data)
        if isinstance(process, str):
            domain, process_type, deadline = DEFAULT_DOMAIN, names.check_type(process), None
        else:
            check_manager(process)
            domain, process_type, deadline = process.domain, process.process_type, process.deadline
            new = check_new(process, new)
        wanted = deadline if command.deadline is None else command.deadline
        return _Nested(
            names.check_domain(command.domain or domain),
            process_type,
            _id_of(loaded, step, command),
            payload.dump(new.data, what="data", max_bytes=max_bytes),
            (parse_seconds(wanted, name="deadline") or None) if wanted is not None else None,
        )
    except ValueError as error:
        raise PermanentCommandError(
            f"the nested process of step {step.name!r} cannot be started: {error}", code="INVALID_STEP"
        ) from None


def _id_of(loaded: Loaded, step: StepView, command: StepProcess) -> str:
    """The id of a nested process: that of its parent and the name of the step. The number of the step is added if
    an earlier attempt at the step has this id."""
    if command.process_id is not None:
        own = names.to_new_id(command.process_id, "process_id")
    else:
        own = f"{loaded.view.process_id}/{step.name}"
    if any(one.command_id == own for one in loaded.view.steps if one is not step):
        own += f"~{step.number}"
    return own if len(own) <= names.MAX_ID_LENGTH else str(uuid.uuid5(_SPACE, own))


def _note(
    loaded: Loaded,
    step: StepView,
    domain: str,
    command_id: str,
    command_type: str,
    *,
    timer: int | None = None,
    seconds: float | None = None,
) -> Steps[None]:
    yield Statement(
        sql.text("processes/wait"),
        {
            "process": loaded.id,
            "number": step.number,
            "name": step.name,
            "undoes": step.undoes,
            "has_undo": step.has_undo,
            "kind": step.kind,
            "timer": timer,
            "domain": domain,
            "command_id": command_id,
            "command_type": command_type,
            "seconds": seconds,
        },
    )
