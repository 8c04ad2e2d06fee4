"""Add up what happened to the members of a batch, and end the batch when all have ended.

A settle never decides that a batch is complete, because concurrent settles cannot see each other's deltas. `fold`
locks the batch. If no member is left, it sets the final status and sends `on_complete`. Both commit together, so
`on_complete` is sent exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandBusError
from commandbus.flow.commands import reply, send
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.command import NewCommand
from commandbus.model.names import check_queue, queue_of

# If another transaction is about to insert this command_id, our insert would wait for that transaction.
LOCK_TIMEOUT = b"SET LOCAL lock_timeout = '500ms'"
ROW_TIMEOUT = b"SET LOCAL lock_timeout = '1s'"
_LIMIT_WAITING = (
    b"WITH before AS MATERIALIZED (SELECT pg_catalog.current_setting('lock_timeout') AS value) "
    b"SELECT value, pg_catalog.set_config('lock_timeout', '500ms', true) FROM before"
)


@operation(atomic=True)
def fold(batches: Iterable[int], *, waiting: bool = False, line: set[int] | None = None) -> Steps[set[int]]:
    """Fold these batches in a separate transaction. Returns those that no other transaction had locked.

    Without `waiting` it skips locked batches. With `waiting` it waits for them, at most a second, and then raises
    LockNotAvailable. Of several callers that share a `line`, only one waits for a batch. It also folds what the
    others have noted.
    """
    wanted = sorted(batches)
    done = yield from _fold(wanted, is_alone=True)
    if waiting and (left := [batch for batch in wanted if batch not in done]):
        done |= yield from _fold_waiting(left, set() if line is None else line)
    return done


def _fold_waiting(batches: Sequence[int], line: set[int]) -> Steps[set[int]]:
    """Wait for batches, except those that another caller waits for. That caller has not begun to fold, so it will
    see everything committed up to now."""
    mine = [batch for batch in batches if batch not in line]
    if not mine:
        return set()
    line.update(mine)
    try:
        yield Statement(ROW_TIMEOUT)
        yield Statement(
            b"SELECT id FROM commandbus.batch WHERE id = ANY (%(batches)s::bigint[]) "
            b"ORDER BY id FOR NO KEY UPDATE",
            {"batches": mine},
        )
    finally:
        line.difference_update(mine)
    return (yield from _fold(mine, is_alone=True))


def fold_now(batches: Sequence[int]) -> Steps[set[int]]:
    """Fold in the current transaction. If a completion would have to wait for another transaction, nothing is
    folded, and the deltas stay for the workers."""
    yield Statement(b"SAVEPOINT commandbus_fold")
    try:
        done = yield from _fold(batches, is_alone=False)
    except pg.LockNotAvailable:
        yield Statement(b"ROLLBACK TO SAVEPOINT commandbus_fold")
        done = set()
    yield Statement(b"RELEASE SAVEPOINT commandbus_fold")
    return done


def _fold(batches: Sequence[int], *, is_alone: bool) -> Steps[set[int]]:
    rows = yield Statement(sql.text("batches/fold_and_complete"), {"batches": list(batches)})
    due = [(id_, *summary) for id_, is_complete, *summary in rows if is_complete]
    before: str | None = None
    if due and is_alone:
        yield Statement(LOCK_TIMEOUT)
    elif due:
        before = (yield Statement(_LIMIT_WAITING))[0][0]
    for summary in due:
        yield from _send_completion(*summary)
    if before is not None:
        yield Statement(b"SELECT pg_catalog.set_config('lock_timeout', %(before)s, true)", {"before": before})
    return {id_ for id_, *_ in rows}


def _send_completion(
    id_: int,
    domain: str,
    batch_id: str,
    name: str | None,
    status: str,
    total: int,
    completed: int,
    failed: int,
    canceled: int,
    custom_data: str | None,
    on_complete: str,
    in_tsq: int,
) -> Steps[None]:
    """Send `on_complete`. If it cannot be sent, it is set aside, so that the batch can end."""
    queue, aside = queue_of(domain), _dump({"batch": id_, "on_complete": on_complete})
    try:
        wanted: dict[str, Any] = payload.loads(on_complete)
        summary = {
            "domain": domain,
            "batch_id": batch_id,
            "name": name,
            "status": status,
            "total": total,
            "completed": completed,
            "failed": failed,
            "canceled": canceled,
            "in_troubleshooting": in_tsq,
            "custom_data": None if custom_data is None else payload.loads(custom_data),
        }
        if "reply_to" in wanted:
            queue = check_queue(wanted["reply_to"])
            yield from reply.deliver([reply.Reply(queue, _dump({"event": "batch_completed"} | summary))])
        else:
            queue = queue_of(wanted["domain"])
            data = wanted.get("data")
            new = NewCommand(
                wanted["command_type"],
                summary if data is None else data,
                wanted.get("command_id"),
                correlation_id=batch_id,
                headers={"batch": summary},
            )
            outgoing = send.prepare(new, max_bytes=payload.COMPOSED)
            what = {"batch": id_, "command_type": outgoing.command_type, "command_id": outgoing.command_id}
            aside = _dump(what)[:-1] + f',"data":{outgoing.data}}}'
            yield from _send(wanted["domain"], outgoing)
    except (CommandBusError, ValueError, RecursionError) as error:
        reason = payload.clean_text(f"on_complete of batch {id_}: {error}", longest=2000)
        yield Statement(
            b"INSERT INTO commandbus.undelivered_reply (queue, message, reason) "
            b"VALUES (%(queue)s, %(message)s::jsonb, %(reason)s)",
            {"queue": queue, "message": aside, "reason": reason},
        )
    yield Statement(
        b"UPDATE commandbus.batch SET completion_sent_at = pg_catalog.now() WHERE id = %(id)s", {"id": id_}
    )


def _send(domain: str, outgoing: send.Outgoing) -> Steps[None]:
    found = yield Statement(sql.text("setup/find_queues"), {"queues": [queue_of(domain)]})
    if not found:
        raise CommandBusError(f"domain {domain!r} does not exist, or the folding role may not send to it")
    yield from send.send(domain, outgoing).steps


def _dump(value: dict[str, Any]) -> str:
    return payload.dump(value, what="summary", max_bytes=payload.COMPOSED)
