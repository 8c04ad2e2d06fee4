"""Replies: the outcome of a command, sent to the PGMQ queue that its sender named, in the settling transaction.

A reply is `{"outcome": "SUCCESS" | "FAILED" | "CANCELED", "domain", "command_id", "command_type",
"correlation_id", "result" | "error": {"type", "code", "message"}}`. If the queue no longer exists, the command is
settled all the same, and the reply is kept in `commandbus.undelivered_reply`, with the reason.

Two kinds of replies need no queue of their own. The reply to a process's step goes to the queue of the process's
domain, as a command of the process's type, which the domain's workers run like any other. A caller that waits in
`bus.call` is only notified that it should read the command's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from commandbus import sql
from commandbus.flow.operation import Statement, Steps
from commandbus.model import payload
from commandbus.model.names import is_domain_queue, is_queue
from commandbus.model.outcome import Failure
from commandbus.quick_dataclass import dataclass

Outcome = Literal["SUCCESS", "FAILED", "CANCELED"]
CALL: Final = "!call"  # `reply_to` of a command whose sender waits in bus.call: no queue can have this name
TOLD_AT_ONCE: Final = 300  # a notification has room for 8000 bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: the queue, the message's JSON text, and the row id of the command that it is about."""

    queue: str
    message: str
    command: int = 0


def compose(
    queue: str,
    outcome: Outcome,
    *,
    id_: int,
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
    return Reply(queue, "{" + ",".join(parts) + "}", id_)


def deliver(replies: Sequence[Reply]) -> Steps[None]:
    """One INSERT and one NOTIFY per queue."""
    by_queue: dict[str, list[Reply]] = {}
    for reply in replies:
        by_queue.setdefault(reply.queue, []).append(reply)
    if called := by_queue.pop(CALL, None):
        ids = [str(reply.command) for reply in called]
        told = [",".join(ids[at : at + TOLD_AT_ONCE]) for at in range(0, len(ids), TOLD_AT_ONCE)]
        yield Statement(sql.text("commands/call_settled"), {"told": told})
    if not by_queue:
        return
    existing = yield Statement(sql.text("setup/find_queues"), {"queues": sorted(filter(is_queue, by_queue))})
    found = {queue for (queue,) in existing}
    for queue, sent in sorted(by_queue.items()):
        messages = "[" + ",".join([reply.message for reply in sent]) + "]"
        params = {"queue": queue, "messages": messages, "commands": [reply.command for reply in sent]}
        if queue not in found:
            yield Statement(sql.text("commands/reply_undelivered"), params)
        else:
            name = "processes/reply_to_process" if is_domain_queue(queue) else "commands/reply"
            yield Statement(sql.text(name, queue=queue), params)
