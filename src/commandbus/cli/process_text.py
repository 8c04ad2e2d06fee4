"""How a process and its steps are printed for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commandbus.cli.render import (
    age,
    age_of,
    compact,
    moment,
    print_fields,
    print_table,
    say,
    say_heading,
    shortened,
)
from commandbus.cli.table import columns
from commandbus.model.process import (
    ProcessRecord,
    ProcessStatus,
    ProcessSummary,
    SignalRecord,
    StepRecord,
    StepStatus,
)
from commandbus.model.process_graph import completed
from commandbus.shell_words import arguments


def note(item: ProcessRecord | ProcessSummary) -> str | None:
    """What it waits for, or why it ended as it did."""
    if not item.status.is_final:
        return item.waits_for
    return None if item.status is ProcessStatus.COMPLETED else _why(item)


def _why(item: ProcessRecord | ProcessSummary) -> str | None:
    return _error(item.failure) or (None if item.cancel is None else _request(item.cancel))


def print_record(record: ProcessRecord) -> None:
    """A process for people."""
    undone = " (it is being undone)" if record.is_compensating and not record.status.is_final else ""
    print_fields(
        {
            "process": f"{record.domain} {record.process_id}",
            "internal id": f"#{record.id}",
            "type": record.process_type,
            "status": f"{record.status}{undone}",
            "waits for": record.waits_for,
            "failure": _error(record.failure),
            "cancel": None if record.cancel is None else _request(record.cancel),
            "nested in": None if record.parent is None else _parent(record.parent),
            "cancel would undo": ", ".join(completed(record, has_undo=True)) or None,
            "cancel may undo": _maybe(completed(record, has_undo=None)),
            "cancel leaves": ", ".join(completed(record, has_undo=False)) or None,
            "batch": record.batch_id,
            "started": f"{moment(record.created_at)} ({age_of(record.created_at)} ago)",
            "last moved": record.updated_at if record.started_at is not None else None,
            "finished": record.finished_at,
            "deadline": record.deadline_at,
            "correlation id": record.correlation_id,
            "reply to": record.reply_to,
            "data": compact(record.data),
            "state": None if record.started_at is None else compact(record.state),
        }
    )


def print_trail(record: ProcessRecord) -> None:
    """What the process has sent and waited for, its signals, what needs a person, and what moved nothing."""
    say_heading("trail")
    print_table(
        columns(":no step :undoes? domain? =command_id type?? sent???? :took??? outcome ~error"),
        [(step.number, step.name, step.undoes, step.domain, step.command_id, _what(step), step.sent_at,
          _took(step), _outcome(step), _error(step.error)) for step in record.steps],
        empty="nothing was sent yet",
    )  # fmt: skip
    if record.signals:
        say_heading("signals")
        print_table(
            columns("signal =id sent? by? taken_by ~data?"),
            [(item.name, item.signal_id, item.sent_at, item.by, _taken_by(record, item), shortened(item.data))
             for item in record.signals],
        )  # fmt: skip
    if record.troubles:
        say_heading("in the troubleshooting queue")
        print_table(
            columns("domain =command_id type?? step? code ~error"),
            [(item["domain"], item["command_id"], item["command_type"], _step_name(record, item["step"]),
              item["error_code"], item["error"]) for item in record.troubles],
        )  # fmt: skip
        first = record.troubles[0]
        name = arguments(first["domain"], first["command_id"])
        say(f"`commandbus tsq retry|cancel|complete {name}` decides")
    if record.strays:
        say_heading("replies that moved nothing")
        print_table(
            columns("at? ~reason ~message?"),
            [(stray.at, stray.reason, shortened(stray.message)) for stray in record.strays],
        )


def _maybe(steps: list[str]) -> str | None:
    return f"{', '.join(steps)} (if their program has an undo)" if steps else None


def _parent(parent: Mapping[str, Any]) -> str:
    return f"{parent['domain']} {parent['process_id']} (step {parent['step']})"


def _what(step: StepRecord) -> str:
    """The type of a command, or what the step waits for instead."""
    if step.kind == "sleep":
        return f"until {moment(step.deadline_at)}" if step.deadline_at else "sleep"
    return step.command_type if step.kind is None else f"{step.kind} {step.command_type}"


def _taken_by(record: ProcessRecord, signal: SignalRecord) -> str:
    if signal.step is not None:
        return _step_name(record, signal.step)
    return "nobody: it was canceled" if signal.status == "CANCELED" else "nobody"


def _request(cancel: Mapping[str, Any]) -> str:
    reason = f": {cancel['reason']}" if cancel.get("reason") else ""
    return f"asked for by {cancel.get('by')}{reason}"


def _error(error: Mapping[str, Any] | None) -> str | None:
    if error is None:
        return None
    return f"{error.get('type')} [{error.get('code')}]: {error.get('message')}"


def _took(step: StepRecord) -> str:
    """The time from sending the command to its end."""
    if step.finished_at is None:
        return f"{age_of(step.sent_at)} so far"
    return age((step.finished_at - step.sent_at).total_seconds())


def _outcome(step: StepRecord) -> str:
    """The status of a step; before its reply has come, also the status of its command."""
    if step.status is not StepStatus.SENT or step.command_status is None:
        return step.status
    return f"{step.status} ({step.command_status})"


def _step_name(record: ProcessRecord, number: int) -> str:
    """The name of the step that a command belongs to; 0 is a message that the process's own code could not
    handle."""
    if number == 0:
        return "its own message"
    name = next((step.name for step in record.steps if step.number == abs(number)), str(abs(number)))
    return name if number > 0 else f"undo {name}"
