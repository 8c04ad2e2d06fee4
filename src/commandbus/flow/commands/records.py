"""Records of commands, made of two rows: the command's own row, and its queue row while it is not settled.

Only the queue row knows whether a command is IN_PROGRESS. So for a page of commands, each queue concerned is read
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.breakers.breaker import explain
from commandbus.flow.commands.unhandled_types import note_of_now, unhandled_types
from commandbus.flow.keys.positions import Position, positions
from commandbus.flow.limits.inspect import LineEstimate, lines_of
from commandbus.flow.operation import Row, Statement, Steps
from commandbus.model.command import CancelRequest, CommandRecord, CommandStatus
from commandbus.model.payload import loads_or_none
from commandbus.model.priority import name_of
from commandbus.model.retry import OnExhausted
from commandbus.model.unique_key import UniqueKey

HANDLER = "handler"  # what a parked command waits for: a worker that has a handler for its type
KEY = "key"  # … or its turn in the line of its key
HIDDEN = timedelta(days=365 * 8)
QueueKey = tuple[str, int]  # domain and msg_id


class CommandRow(NamedTuple):
    """A row of commands/query_commands.sql."""

    id: int
    domain: str
    command_id: str
    command_type: str
    status: str
    data: str | None
    result: str | None
    correlation_id: str | None
    reply_to: str | None
    headers: str | None
    max_attempts: int | None
    attempt: int | None
    attempt_base: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    msg_id: int
    error_type: str | None
    error_code: str | None
    error: str | None
    timeout: float | None
    batch_id: str | None
    waived: int
    apart: str | None
    expires_at: datetime | None
    on_exhausted: OnExhausted | None
    snoozes: int | None
    priority: int | None
    key_limit: str | None
    key: str | None
    unique_rule: str | None
    has_unique_key: bool | None

    @property
    def charged(self) -> int | None:
        """How many attempts were charged, for a command that is not in its queue; None if a person has ended
        it."""
        if self.attempt is not None:
            return max(0, self.attempt - self.attempt_base - self.waived)
        return 0 if self.status == "PENDING" or not self.attempt_base else None


class QueueRow(NamedTuple):
    """A row of commands/queue_rows.sql."""

    msg_id: int
    visible_at: datetime
    read_ct: int
    held_by: str | None
    since: str | None
    parked_for: str | None
    cancel: str | None
    progress: str | None
    parked_until: datetime | None
    note: str | None
    limit: str | None
    breaker_state: str | None
    breaker_is_forced: bool | None
    breaker_reason: str | None

    @property
    def current_note(self) -> str | None:
        """Why it is parked: the present state of its breaker, or the note that was written when it was parked."""
        if self.breaker_state is None:
            return self.note
        return explain(self.breaker_state, is_forced=bool(self.breaker_is_forced), reason=self.breaker_reason)


def queue_rows(domain: str, msg_ids: Sequence[int]) -> Steps[list[QueueRow]]:
    """The queue's side of these commands, as far as they are still in the queue."""
    rows = yield Statement(
        sql.text("commands/queue_rows", domain=domain), {"domain": domain, "msg_ids": list(msg_ids)}
    )
    return [QueueRow(*row) for row in rows]


def running_of(commands: Iterable[tuple[str, int | None]]) -> Steps[set[QueueKey]]:
    """Those of these commands (domain and msg_id; None: it is not in its queue) that a worker holds: they are
    IN_PROGRESS."""
    waiting: dict[str, list[int]] = {}
    for domain, msg_id in commands:
        if msg_id is not None:
            waiting.setdefault(domain, []).append(msg_id)
    running: set[QueueKey] = set()
    for domain, msg_ids in waiting.items():
        found = yield from queue_rows(domain, msg_ids)
        running |= {(domain, row.msg_id) for row in found if row.held_by is not None}
    return running


def complete(rows: Sequence[Row]) -> Steps[list[CommandRecord]]:
    """Returns the records of these rows, with the queue's side of those that are not settled."""
    commands = [CommandRow(*row) for row in rows]
    waiting: dict[str, list[int]] = {}
    for command in commands:
        if command.status == "PENDING":
            waiting.setdefault(command.domain, []).append(command.msg_id)
    queued: dict[QueueKey, QueueRow] = {}
    lines: dict[QueueKey, LineEstimate] = {}
    for domain, msg_ids in waiting.items():
        found = yield from queue_rows(domain, msg_ids)
        queued |= {(domain, row.msg_id): row for row in found}
        if limited := {row.msg_id: row.limit for row in found if row.limit is not None}:
            estimates = yield from lines_of(domain, limited)
            lines |= {(domain, msg_id): line for msg_id, line in estimates.items()}
    unhandled = yield from _unhandled(queued)
    in_line = yield from _in_line(commands, queued)
    records = []
    for command in commands:
        key = (command.domain, command.msg_id)
        record = _settled_side(command)
        if row := queued.get(key):
            note = unhandled.get((command.domain, command.command_type))
            record = _with_queue_row(record, command, row, lines.get(key), note)
        if (position := in_line.get(command.id)) is not None:
            record = _with_position(record, position)
        records.append(record)
    return records


def _unhandled(queued: Mapping[QueueKey, QueueRow]) -> Steps[dict[tuple[str, str], str | None]]:
    """Why commands wait for a handler now, by domain and type. Workers with a handler may have started
    meanwhile."""
    domains = sorted({domain for (domain, _), row in queued.items() if row.parked_for == HANDLER})
    if not domains:
        return {}
    found = yield from unhandled_types(domains, most=1)
    return {(item.domain, item.command_type): note_of_now(item) for item in found}


def _in_line(commands: Sequence[CommandRow], queued: Mapping[QueueKey, QueueRow]) -> Steps[dict[int, Position]]:
    """Commands that wait for their turn. Only those that are hidden for years, and not parked, are looked at."""
    far = datetime.now(UTC) + HIDDEN
    hidden = [
        command.id
        for command in commands
        if (row := queued.get((command.domain, command.msg_id))) and not row.parked_for and row.visible_at > far
    ]
    return (yield from positions(hidden)) if hidden else {}


def _with_position(record: CommandRecord, position: Position) -> CommandRecord:
    return replace(
        record,
        visible_at=None,
        waiting_for=KEY,
        waiting_note=position.text,
        waiting_limit=position.key_limit,
        waiting_ahead=position.before,
        waiting_estimated_seconds=position.seconds,
    )


def _settled_side(row: CommandRow) -> CommandRecord:
    status = CommandStatus(row.status)
    return CommandRecord(
        id=row.id, domain=row.domain, command_id=row.command_id, command_type=row.command_type, status=status,
        data=loads_or_none(row.data), result=loads_or_none(row.result), correlation_id=row.correlation_id,
        reply_to=row.reply_to, headers=loads_or_none(row.headers), max_attempts=row.max_attempts,
        attempts=row.attempt_base if row.attempt is None else row.attempt, created_at=row.created_at,
        started_at=row.started_at, finished_at=row.finished_at, worker=row.worker, error_type=row.error_type,
        error_code=row.error_code, error=row.error, timeout=row.timeout, batch_id=row.batch_id,
        charged_attempts=row.charged, apart=None if status.is_final else row.apart,
        expires_at=row.expires_at, on_exhausted=row.on_exhausted, snoozes=row.snoozes or 0,
        priority=name_of(row.priority), key_limit=row.key_limit, key=row.key,
        unique=_unique(row.unique_rule, has_key=bool(row.has_unique_key)),
    )  # fmt: skip


def _unique(text: str | None, *, has_key: bool) -> UniqueKey | None:
    """The key with which a command was sent, and the rule of that send."""
    rule = loads_or_none(text)
    if rule is None:
        return None
    return UniqueKey(
        rule["key"],
        rule["while"],
        rule["on_conflict"],
        rule.get("window"),
        rule.get("debounce"),
        rule.get("max_delay"),
        has_key=has_key,
    )


def _with_queue_row(
    record: CommandRecord, command: CommandRow, row: QueueRow, line: LineEstimate | None, unhandled: str | None
) -> CommandRecord:
    until, note = row.parked_until, row.current_note
    if line is not None:
        until, note = line.until, line.note  # as of now: the command may have been parked for another reason
    if row.parked_for == HANDLER:
        note = unhandled or note
    held_by = row.held_by
    return replace(
        record,
        status=CommandStatus.IN_PROGRESS if held_by else record.status,
        attempts=command.attempt_base + row.read_ct,
        charged_attempts=max(0, row.read_ct - command.waived),
        worker=held_by,
        started_at=datetime.fromisoformat(row.since) if held_by and row.since else record.started_at,
        visible_at=None if held_by or row.parked_for else row.visible_at,
        waiting_for=row.parked_for,
        waiting_until=until,
        waiting_note=note,
        waiting_limit=row.limit,
        waiting_ahead=None if line is None else line.ahead,
        waiting_estimated_seconds=None if line is None else line.seconds,
        progress=loads_or_none(row.progress) if held_by else None,
        cancel_requested=CancelRequest.from_json(row.cancel) if held_by else None,
    )
