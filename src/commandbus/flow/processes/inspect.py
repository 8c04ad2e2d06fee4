"""What is known about processes. Reads only, locks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime
from typing import Any, NamedTuple

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.records import QueueKey, running_of
from commandbus.flow.operation import Operation, Row, Statement, Steps, operation, then
from commandbus.model import names
from commandbus.model.durations import in_utc
from commandbus.model.page import MAX_ID, Page, cut, id_of
from commandbus.model.payload import loads_or_none
from commandbus.model.process import (
    ProcessRecord,
    ProcessStatus,
    ProcessSummary,
    SignalRecord,
    StepRecord,
    StepStatus,
    StrayReply,
)

BUDGET = 20_000  # processes that one call looks at
ANY_LENGTH = 1_000_000_000


class Bounds(NamedTuple):
    """How much of a process is read: `longest` bytes of its data and state (None: any), so many steps and other
    lines of its trail, and so much of what it waits for."""

    longest: int | None = None
    outstanding: int | None = None
    troubles: int | None = None
    characters: int = ANY_LENGTH
    steps: int | None = None
    lines: int | None = None
    longest_line: int | None = None

    def of_rows(self) -> dict[str, int | None]:
        """The parameters of processes/query_processes.sql."""
        return {
            "longest": self.longest,
            "steps": self.outstanding,
            "troubles": self.troubles,
            "characters": self.characters,
        }


WHOLE = Bounds()
ROW = Bounds(longest=0, outstanding=5, troubles=1, characters=500)
"""A line of a list."""
VIEW = Bounds(
    longest=262_144, outstanding=20, troubles=20, characters=2_000, steps=500, lines=100, longest_line=4_000
)
"""A page."""


@operation(atomic=False)
def query_processes(
    *,
    domain: str | None = None,
    process_id: str | None = None,
    process_type: str | None = None,
    status: ProcessStatus | str | None = None,
    batch_id: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    bounds: Bounds = WHOLE,
) -> Steps[Page[ProcessRecord]]:
    """Processes that match, newest first."""
    status = status.upper() if isinstance(status, str) else status
    if status is not None and status not in list(ProcessStatus):
        raise InvalidCommandError(
            f"status {names.shown(status)} is not a process status; known are {', '.join(ProcessStatus)}"
        )
    names.check_count(limit, "limit")
    before, end = id_of(cursor), None
    if process_id is None and any(value is not None for value in (domain, process_type, status, batch_id)):
        found = yield Statement(
            b"SELECT id FROM commandbus.process WHERE id < %(before)s::bigint ORDER BY id DESC "
            b"OFFSET %(budget)s LIMIT 1",
            {"before": before or MAX_ID, "budget": BUDGET - 1},
        )
        end = found[0][0] if found else None
    rows = yield Statement(
        sql.text("processes/query_processes"),
        {
            "domain": None if domain is None else names.check_domain(domain),
            "process_id": None if process_id is None else names.to_id(process_id, "process_id"),
            "process_type": None if process_type is None else names.check_type(process_type),
            "status": status,
            "batch_id": None if batch_id is None else names.to_id(batch_id, "batch_id"),
            "limit": limit + 1,
            "before_id": before,
            "after_id": end or 0,
            **bounds.of_rows(),
        },
    )
    if end is not None and len(rows) <= limit:
        return Page([_record(row) for row in rows], str(end), is_partial=True)
    return cut([_record(row) for row in rows], limit, lambda record: record.id)


def list_summaries(**filters: Any) -> Operation[Page[ProcessSummary]]:
    """Processes that match, newest first, without what they carry."""
    return then(
        query_processes(**filters, bounds=ROW),
        lambda page: Page([_summary(item) for item in page], page.next_cursor, page.is_partial),
    )


@operation(atomic=True)
def get_process(domain: str, process_id: str, *, bounds: Bounds = WHOLE) -> Steps[ProcessRecord | None]:
    """Returns everything that is known about a process, with its trail, or as much as the bounds allow; None if
    there is no such process."""
    found = yield from query_processes(
        domain=names.check_domain(domain), process_id=process_id, limit=1, bounds=bounds
    ).steps
    if not found:
        return None
    record: ProcessRecord = found[0]
    params = {"process": record.id, "longest": bounds.longest_line}
    rows = yield Statement(sql.text("processes/trail"), params | {"most": bounds.steps})
    signals = yield Statement(sql.text("processes/signals"), params | {"most": bounds.lines})
    in_queues = [(of_domain, msg_id) for _, _, _, _, of_domain, *_, msg_id in rows]
    running = yield from running_of([*in_queues, *((record.domain, msg_id) for *_, msg_id in signals)])
    record.steps.extend(_step(row, running) for row in reversed(rows))
    record.signals.extend(_signal(row, record.domain, running) for row in reversed(signals))
    strays = yield Statement(
        b"SELECT id, domain, created_at, reason, CASE WHEN %(longest)s::integer IS NULL "
        b"OR pg_catalog.octet_length(message::text) <= %(longest)s THEN message::text END "
        b"FROM commandbus.stray_reply WHERE process = %(process)s ORDER BY id DESC LIMIT %(most)s::bigint",
        params | {"most": bounds.lines},
    )
    record.strays.extend(
        StrayReply(id_, of_domain, record.process_id, at, reason, loads_or_none(message))
        for id_, of_domain, at, reason, message in reversed(strays)
    )
    if bounds.steps is not None and record.steps and record.steps[0].number > 1:
        return replace(record, left_out={**record.left_out, "steps": record.steps[0].number - 1})
    return record


@operation(atomic=False)
def list_strays(
    domain: str | None, *, process_id: str | None = None, limit: int, cursor: str | None = None
) -> Steps[Page[StrayReply]]:
    """Replies that moved nothing, newest first."""
    rows = yield Statement(
        b"SELECT s.id, s.domain, p.process_id, s.created_at, s.reason, s.message::text "
        b"FROM commandbus.stray_reply s LEFT JOIN commandbus.process p ON p.id = s.process "
        b"WHERE (%(domain)s::text IS NULL OR s.domain = %(domain)s) "
        b"AND (%(process_id)s::text IS NULL OR p.process_id = %(process_id)s) "
        b"AND (%(before_id)s::bigint IS NULL OR s.id < %(before_id)s) ORDER BY s.id DESC LIMIT %(limit)s",
        {
            "domain": None if domain is None else names.check_domain(domain),
            "process_id": None if process_id is None else names.to_id(process_id, "process_id"),
            "before_id": id_of(cursor),
            "limit": names.check_count(limit, "limit") + 1,
        },
    )
    found = [StrayReply(*(*head, loads_or_none(message))) for *head, message in rows]
    return cut(found, limit, lambda stray: stray.id)


def _signal(row: Row, domain: str, running: set[QueueKey]) -> SignalRecord:
    """A row of processes/signals.sql."""
    signal_id, name, data, sent_at, by, reason, step, status, command_id, msg_id = row
    status = "IN_PROGRESS" if (domain, msg_id) in running else status
    return SignalRecord(signal_id, name, loads_or_none(data), sent_at, by, reason, step, status, command_id)


def _step(row: Row, running: set[QueueKey]) -> StepRecord:
    """A row of processes/trail.sql."""
    number, name, undoes, status, domain, command_id, command_type, *rest = row
    sent_at, finished_at, deadline_at, result, error, command_status, data, kind, has_undo, msg_id = rest
    return StepRecord(
        number=number,
        name=name,
        undoes=undoes,
        status=StepStatus(status),
        domain=domain,
        command_id=command_id,
        command_type=command_type,
        sent_at=sent_at,
        finished_at=finished_at,
        deadline_at=deadline_at,
        result=loads_or_none(result),
        error=loads_or_none(error),
        command_status="IN_PROGRESS" if (domain, msg_id) in running else command_status,
        data=loads_or_none(data),
        kind=kind,
        has_undo=has_undo,
    )


def _record(row: Row) -> ProcessRecord:
    (id_, domain, process_id, process_type, status, is_compensating, data, state, created_at, started_at,
     updated_at, finished_at, deadline_at, batch_id, reply_to, correlation_id, failure, cancel, in_tsq,
     outstanding, troubles, failing, parent, data_bytes, state_bytes) = row  # fmt: skip
    status = ProcessStatus(status)
    troubled: list[Mapping[str, Any]] = loads_or_none(troubles) or []
    return ProcessRecord(
        id_,
        domain,
        process_id,
        process_type,
        status,
        is_compensating,
        loads_or_none(data),
        loads_or_none(state),
        created_at,
        started_at,
        updated_at,
        finished_at,
        deadline_at,
        batch_id,
        reply_to,
        correlation_id,
        loads_or_none(failure),
        loads_or_none(cancel),
        in_tsq,
        *_waits_for(status, loads_or_none(outstanding) or [], troubled, loads_or_none(failing), domain),
        troubles=troubled,
        parent=loads_or_none(parent),
        left_out={
            name: size
            for name, text, size in (("data", data, data_bytes), ("state", state, state_bytes))
            if text is None and size is not None
        },
    )


def _summary(record: ProcessRecord) -> ProcessSummary:
    return ProcessSummary(**{item.name: getattr(record, item.name) for item in fields(ProcessSummary)})


class _Waiting(NamedTuple):
    """What a process waits for: in words, its kinds, and the moments that the words name."""

    text: str | None
    kinds: list[str]
    moments: list[datetime]


def _waits_for(
    status: ProcessStatus,
    outstanding: list[Mapping[str, Any]],
    troubles: list[Mapping[str, Any]],
    failing: Mapping[str, Any] | None,
    domain: str,
) -> _Waiting:
    """Says why the process does not go on."""
    if not status.is_final and not troubles and failing is None and outstanding:
        return _for_steps(outstanding)
    return _Waiting(_for_other(status, troubles, failing, domain), [], [])


def _for_other(
    status: ProcessStatus, troubles: list[Mapping[str, Any]], failing: Mapping[str, Any] | None, domain: str
) -> str | None:
    """What it waits for, other than its steps."""
    if status.is_final:
        return None
    if troubles:
        first = troubles[0]
        what = "its own message" if first["step"] == 0 else f"command {first['command_id']!r}"
        return f"{what} in the troubleshooting queue of {first['domain']!r}: {first['error']}"
    if failing is not None:
        what = f"its own message {failing['command_id']!r} of domain {domain!r}"
        return f"{what}, which is tried again: attempt number {failing['number']} failed: {failing['error']}"
    return f"a worker of domain {domain!r} to handle its next message"


def _for_steps(outstanding: list[Mapping[str, Any]]) -> _Waiting:
    replies = [_reply(one) for one in outstanding if one["kind"] is None]
    told = ["the reply to " + ", ".join(replies)] if replies else []
    others = [one for one in outstanding if one["kind"] is not None]
    moments = [moment for one in others for moment in _moments(one)]
    kinds = sorted({one["kind"] or "command" for one in outstanding})
    return _Waiting("; ".join(told + [_other(one) for one in others]), kinds, moments)


def _reply(step: Mapping[str, Any]) -> str:
    what = "step" if step["undoes"] is None else "the compensation"
    return f"{what} {step['name']!r} (command {step['command_id']!r} of domain {step['domain']!r})"


def _moments(step: Mapping[str, Any]) -> list[datetime]:
    """The moments that `_other` names."""
    named = {"signal": ("sent_at", "deadline_at"), "sleep": ("deadline_at",)}.get(step["kind"], ())
    return [datetime.fromisoformat(step[name]) for name in named if step[name] is not None]


def _other(step: Mapping[str, Any]) -> str:
    """What a step waits for that has sent no command."""
    moments = [in_utc(moment) for moment in _moments(step)]
    if step["kind"] == "signal":
        return f"the signal {step['command_type']!r} since {' until '.join(moments)}"
    if step["kind"] == "sleep":
        return f"the end of its sleep at {moments[0]}"
    what = "the end of" if step["undoes"] is None else "the undoing of"
    return (
        f"{what} the nested process {step['command_id']!r} of domain {step['domain']!r} "
        f"(step {step['name']!r}), which is {step['nested'] or 'out of sight'}"
    )
