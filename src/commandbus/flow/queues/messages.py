"""messages: send to any PGMQ queue, read, remove and archive what is in it, as PGMQ's own functions do.

The statements work on PGMQ's tables, as all of ours do: they mean the same with every search_path, and work with
every PGMQ from 1.5 on. A newer PGMQ also stores when a message was last read; `Shapes` knows which queues have
that column.

A domain's queue holds its commands, and its rows are their leases. Taking a row away would lose the command, and a
read would count as one of its attempts. So in such a queue `read` only looks, and all changes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError, InvalidOperationError, UnknownQueueError
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import JsonValue
from commandbus.model.queue import QueueMessage

Shapes = dict[str, bool]
"""Queue → has it the column `last_read_at`? Kept by a client, filled by its first operation on a queue."""

MAX_ID = 2**63 - 1
MOST_READ = 10_000

_INSTEAD = {
    "delete": "a command is ended with `bus.cancel`, or in the troubleshooting queue",
    "archive": "what became of a command stays in commandbus.command; `bus.prune` removes it",
    "pop": "run a Worker, or look with `read`",
    "purge": "commands are ended with `bus.cancel`, batches with `bus.cancel_batch`",
    "set_vt": "`bus.pause` holds commands up, `send(delay=…)` sends for later",
    "drop_queue": "commands that wait there would be lost",
    "create_queue": "`bus.create_domain` creates it",
}


def channel_of(queue: str) -> str:
    """The channel that is notified when a message, such as a reply, comes into a queue."""
    return f"commandbus_r_{queue.lower()}"


@operation(atomic=False)
def send(
    queue: str,
    messages: Sequence[JsonValue],
    *,
    headers: Sequence[Mapping[str, JsonValue] | None] | None,
    delay: Duration | None,
    at: datetime | None,
    max_bytes: int,
) -> Steps[list[int]]:
    """Send messages in their order; returns their ids."""
    table = names.check_pgmq_queue(queue)
    params = {
        "messages": [payload.dump(message, what="message", max_bytes=max_bytes) for message in messages],
        "headers": _headers(messages, headers, max_bytes),
        "at": _instant(at, delay),
        "delay": seconds_of(delay or 0, "delay"),
    }
    if not messages:
        return []
    is_due = at is None and not params["delay"] and not names.is_domain_queue(queue)
    params["channel"] = channel_of(queue) if is_due else None
    try:
        ((sent, _),) = yield Statement(sql.text("queues/send", pgmq=table), params)
    except pg.UndefinedTable:
        raise UnknownQueueError(queue) from None
    return list(sent)


@operation(atomic=False)
def read(queue: str, shapes: Shapes, *, vt: Duration, qty: int) -> Steps[list[QueueMessage]]:
    """Messages that can be read now, oldest first. For `vt`, nobody else reads them. In a domain's queue, only
    looks."""
    name = "queues/peek" if names.is_domain_queue(queue) else "queues/read"
    params = {"vt": seconds_of(vt, "vt"), "qty": names.check_count(qty, "qty", most=MOST_READ)}
    return (yield from _messages(name, queue, shapes, params))


@operation(atomic=False)
def pop(queue: str, shapes: Shapes, *, qty: int) -> Steps[list[QueueMessage]]:
    """Messages that can be read now, oldest first, read and removed at once."""
    refuse_domains("pop", queue)
    params = {"qty": names.check_count(qty, "qty", most=MOST_READ)}
    return (yield from _messages("queues/pop", queue, shapes, params))


@operation(atomic=False)
def set_vt(queue: str, shapes: Shapes, msg_id: int, vt: Duration) -> Steps[QueueMessage | None]:
    """Make a message readable after that time, counted from now; None if there is no such message."""
    refuse_domains("set_vt", queue)
    params = {"msg_id": _msg_id(msg_id), "vt": seconds_of(vt, "vt")}
    found = yield from _messages("queues/set_vt", queue, shapes, params)
    return found[0] if found else None


@operation(atomic=False)
def delete(queue: str, msg_ids: Sequence[int]) -> Steps[list[int]]:
    """Remove messages; returns the ids of those that were there."""
    refuse_domains("delete", queue)
    params = {"msg_ids": [_msg_id(each) for each in msg_ids]}
    rows = yield from _on_table(queue, Statement(sql.text("queues/delete", pgmq=queue), params))
    return sorted(msg_id for (msg_id,) in rows)


@operation(atomic=False)
def archive(queue: str, shapes: Shapes, msg_ids: Sequence[int]) -> Steps[list[int]]:
    """Move messages to the queue's archive; returns the ids of those that were there."""
    refuse_domains("archive", queue)
    params = {"msg_ids": [_msg_id(each) for each in msg_ids]}
    parts = yield from _parts(queue, shapes)
    rows = yield from _on_table(queue, Statement(sql.text("queues/archive", pgmq=queue, **parts), params))
    return sorted(msg_id for (msg_id,) in rows)


@operation(atomic=False)
def purge(queue: str) -> Steps[int]:
    """Remove all messages; returns how many there were."""
    refuse_domains("purge", queue)
    ((count,),) = yield from _on_table(queue, Statement(sql.text("queues/purge", pgmq=queue)))
    found: int = count
    return found


def refuse_domains(verb: str, queue: str) -> None:
    """Raise InvalidOperationError for a change that would damage a domain's queue."""
    domain = names.domain_of_queue(names.check_pgmq_queue(queue))
    if domain is not None:
        raise InvalidOperationError(
            f"cannot {verb} on {queue!r}: it is the queue of domain {domain!r}, whose rows are the leases of its "
            f"commands; {_INSTEAD[verb]}"
        )


def seconds_of(value: Duration, name: str) -> float:
    """A duration in seconds, or InvalidCommandError naming the argument and the value."""
    try:
        return parse_seconds(value, name=name)
    except ValueError as error:
        raise InvalidCommandError(str(error)) from None


def _messages(name: str, queue: str, shapes: Shapes, params: Mapping[str, Any]) -> Steps[list[QueueMessage]]:
    parts = yield from _parts(queue, shapes)
    rows = yield from _on_table(queue, Statement(sql.text(name, pgmq=queue, **parts), params))
    return sorted((_message(*row) for row in rows), key=lambda message: message.msg_id)


def _parts(queue: str, shapes: Shapes) -> Steps[dict[str, str]]:
    """The part of a statement for the column that only newer PGMQ releases have."""
    if queue not in shapes:
        table = f"pgmq.{names.pgmq_table(queue)}"
        ((exists, has_last_read),) = yield Statement(sql.text("queues/shape"), {"table": table})
        if not exists:
            raise UnknownQueueError(queue)
        shapes[queue] = has_last_read
    return LAST_READ if shapes[queue] else dict.fromkeys(LAST_READ, "")


LAST_READ = {
    "last_read": ", m.last_read_at",
    "last_read_column": ", last_read_at",
    "set_last_read": ", last_read_at = pg_catalog.clock_timestamp()",
}


def _on_table(queue: str, statement: Statement) -> Steps[list[Row]]:
    try:
        return (yield statement)
    except pg.UndefinedTable:
        raise UnknownQueueError(queue) from None


def _message(
    msg_id: int,
    read_ct: int,
    enqueued_at: datetime,
    vt: datetime,
    message: str | None,
    headers: str | None,
    last_read_at: datetime | None = None,
) -> QueueMessage:
    return QueueMessage(msg_id, read_ct, enqueued_at, vt, _document(message), _document(headers), last_read_at)


def _document(text: str | None) -> Any:
    """JSON of any client. A document that Python cannot parse (depth, digits) stays text."""
    try:
        return payload.loads_or_none(text)
    except (ValueError, RecursionError):
        return text


def _headers(
    messages: Sequence[JsonValue], headers: Sequence[Mapping[str, JsonValue] | None] | None, max_bytes: int
) -> list[str | None]:
    if headers is None:
        return [None] * len(messages)
    if len(headers) != len(messages):
        raise InvalidCommandError(
            f"headers: {len(headers)} for {len(messages)} messages; give one for each, or None"
        )
    return [None if each is None else payload.dump(each, what="headers", max_bytes=max_bytes) for each in headers]


def _instant(at: datetime | None, delay: Duration | None) -> datetime | None:
    if at is not None and delay is not None:
        raise InvalidCommandError("give delay or at, not both")
    if at is not None and (not isinstance(at, datetime) or at.tzinfo is None):
        raise InvalidCommandError(f"at must be a datetime with a time zone, not {names.shown(at)}")
    return at


def _msg_id(value: object) -> int:
    return names.check_count(value, "msg_id", most=MAX_ID)
