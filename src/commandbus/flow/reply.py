"""Replies: what became of a command, sent to the PGMQ queue that its sender named, in the settling transaction.

A reply is `{"outcome": "SUCCESS" | "FAILED" | "CANCELED", "domain", "command_id", "command_type",
"correlation_id", "result" | "error": {"type", "code", "message"}}`. A queue that has vanished must not keep the
command from being settled: such a reply is kept in `commandbus.undelivered_reply`, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from commandbus import sql
from commandbus.flow.statement import Statement, Steps
from commandbus.model import payload
from commandbus.model.names import check_queue
from commandbus.model.outcome import Failure

Outcome = Literal["SUCCESS", "FAILED", "CANCELED"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: the queue and the message's JSON text."""

    queue: str
    message: str


def compose(
    queue: str,
    outcome: Outcome,
    *,
    domain: str,
    command_id: str,
    command_type: str,
    correlation_id: str | None,
    result: str | None = None,
    failure: Failure | None = None,
) -> Reply:
    """The reply for one outcome; `result` is JSON text."""
    quote = payload.quote
    parts = [
        f'"outcome":"{outcome}"',
        f'"domain":{quote(domain)}',
        f'"command_id":{quote(command_id)}',
        f'"command_type":{quote(command_type)}',
        f'"correlation_id":{"null" if correlation_id is None else quote(correlation_id)}',
        f'"result":{"null" if result is None else result}',
    ]
    if failure is not None:
        parts.append(
            f'"error":{{"type":{quote(failure.error_type)},"code":{quote(failure.error_code)},'
            f'"message":{quote(failure.error)}}}'
        )
    return Reply(queue, "{" + ",".join(parts) + "}")


def deliver(replies: Sequence[Reply]) -> Steps[None]:
    """One INSERT and one NOTIFY a queue."""
    by_queue: dict[str, list[str]] = {}
    for reply in replies:
        by_queue.setdefault(check_queue(reply.queue), []).append(reply.message)
    existing = yield Statement(sql.text("find_queues"), {"queues": sorted(by_queue)})
    found = {queue for (queue,) in existing}
    for queue, messages in sorted(by_queue.items()):
        name = "reply" if queue in found else "reply_undelivered"
        yield Statement(sql.text(name, queue=queue), {"queue": queue, "messages": "[" + ",".join(messages) + "]"})
