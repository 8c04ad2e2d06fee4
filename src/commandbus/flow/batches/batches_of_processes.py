"""Batches whose members are processes. `create.py` has what all batches share; this module has the members.

A process counts as completed when it is COMPLETED, as failed when it is FAILED or COMPENSATED, as canceled when
it is CANCELED, and as in the troubleshooting queue while one of its commands is there. A batch is canceled and
retried process by process, each in its own transactions. After an interruption, a second request or a worker's
sweep does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from commandbus.errors import DuplicateBatchError, DuplicateProcessError, InvalidOperationError
from commandbus.flow.batches.create import (
    Definition,
    Fingerprint,
    check_targets,
    existing,
    finish,
    insert,
    lock,
)
from commandbus.flow.commands import operate
from commandbus.flow.commands.operate import OperatorAction, Selection
from commandbus.flow.commands.send import canonical
from commandbus.flow.operation import Plan, Row, Statement, Steps, operation
from commandbus.flow.processes.move import lock_troubled
from commandbus.flow.processes.operate import cancel_process, retry_process
from commandbus.flow.processes.start import Starting, insert_new, start_now
from commandbus.model.batch import CreatedBatch
from commandbus.model.process import ProcessStatus

BITE = 200


@operation(atomic=True, whole=True)
def create(definition: Definition, process_type: str, starting: Iterator[Starting]) -> Steps[CreatedBatch]:
    """Create a batch and start its processes, all or nothing. Returns the existing one if it is the same."""
    return (yield from _create(definition, process_type, starting))


@operation(atomic=True, whole=True)
def add(domain: str, batch_id: str, process_type: str, starting: Iterator[Starting]) -> Steps[int]:
    """Start processes as members of an open batch, all or nothing. Returns how many."""
    return (yield from _add(domain, batch_id, process_type, starting))


def _create(definition: Definition, process_type: str, starting: Iterator[Starting]) -> Steps[CreatedBatch]:
    yield from check_targets(definition)
    fingerprint = Fingerprint(definition) if definition.has_own_id else None
    if fingerprint is not None:
        starting = _digested(fingerprint, process_type, starting)
    id_ = yield from insert(definition)
    if id_ is None and fingerprint is not None:
        for _ in starting:
            pass
        return (yield from existing(definition, fingerprint.text()))
    if id_ is None:
        raise DuplicateBatchError(definition.domain, definition.batch_id)
    total = yield from _start_all(definition.domain, process_type, starting, id_, counts=False)
    digest = None if fingerprint is None else fingerprint.text()
    return (yield from finish(definition, id_, total=total, fingerprint=digest))


def _add(domain: str, batch_id: str, process_type: str, starting: Iterator[Starting]) -> Steps[int]:
    found = yield from lock(domain, batch_id, "KEY SHARE")
    if found.holds != "processes":
        raise found.refuse("add processes to", f"it holds {found.holds}")
    if not found.is_open:
        raise found.refuse("add to", None if found.is_finished else "it is closed")
    return (yield from _start_all(domain, process_type, starting, found.id, counts=True))


def _start_all(
    domain: str, process_type: str, starting: Iterator[Starting], batch: int, *, counts: bool
) -> Steps[int]:
    started = yield from start_now(domain, process_type, starting, batch=batch, counts=counts)
    for one in started:
        if not one.created:
            raise DuplicateProcessError(domain, one.process_id, "a batch starts each of its processes itself")
    twice = [process_id for process_id, n in Counter(one.process_id for one in started).items() if n > 1]
    if twice:
        raise DuplicateProcessError(domain, twice[0], "it is in the batch twice")
    return len(started)


def _digested(fingerprint: Fingerprint, process_type: str, starting: Iterator[Starting]) -> Iterator[Starting]:
    for item in starting:
        own = item.process_id if item.has_own_id else None
        fingerprint.add(
            process_type, own, canonical(item.data), item.deadline_seconds, item.reply_to, item.correlation_id
        )
        yield item


# --- canceling and retrying ----------------------------------------------------------------------------------


def cancel_members(batch: int, domain: str, what: OperatorAction) -> Plan[int]:
    """Ask every process that is not final to stop. Returns how many were asked."""
    asked = last_id = 0
    while bite := (yield _members(batch, last_id, _UNFINISHED)):
        for id_, process_id, _ in bite:
            last_id = id_
            try:
                yield from cancel_process(domain, process_id, what)
            except InvalidOperationError:  # the process has just ended, or is being undone
                continue
            asked += 1
    return asked


def retry_members(batch: int, domain: str, what: OperatorAction) -> Plan[int]:
    """Let FAILED processes go on, and retry commands in the troubleshooting queue. Returns how many processes."""
    retried = last_id = 0
    while bite := (yield _members(batch, last_id, ["FAILED", "WAITING_FOR_TSQ"])):
        for id_, process_id, status in bite:
            last_id = id_
            try:
                if status == ProcessStatus.FAILED:
                    yield retry_process(domain, process_id, what)
                    retried += 1
                else:
                    retried += bool((yield _retry_troubled(id_, what)))
            except InvalidOperationError:  # another request was first
                continue
    return retried


def start_again(old: int, domain: str, new: int) -> Steps[tuple[int, int]]:
    """Start a new process for each undone process of a batch, as a member of another batch. Returns how many were
    started, and how many were undone in all. A second retry finds the process_id taken and starts nothing."""
    started = seen = last_id = 0
    while True:
        rows = yield Statement(
            b"SELECT id, process_type, data::text, reply_to, correlation_id, "
            b"extract(epoch FROM deadline_at - created_at)::float8 FROM commandbus.process "
            b"WHERE batch = %(batch)s AND status = 'COMPENSATED' AND id > %(after_id)s ORDER BY id LIMIT %(bite)s",
            {"batch": old, "after_id": last_id, "bite": BITE},
        )
        if not rows:
            return started, seen
        last_id = rows[-1][0]
        seen += len(rows)
        for process_type in sorted({its_type for _, its_type, *_ in rows}):
            again = [
                Starting(f"again:{id_}", data, deadline, reply_to, correlation_id)
                for id_, its_type, data, reply_to, correlation_id, deadline in rows
                if its_type == process_type
            ]
            started += len((yield from insert_new(domain, process_type, again, new)))


_UNFINISHED = [status.value for status in ProcessStatus if not status.is_final]


@operation(atomic=False)
def _members(batch: int, after_id: int, statuses: list[str]) -> Steps[list[Row]]:
    return (
        yield Statement(
            b"SELECT id, process_id, status FROM commandbus.process WHERE batch = %(batch)s AND id > %(after_id)s "
            b"AND status = ANY (%(statuses)s::text[]) ORDER BY id LIMIT %(bite)s",
            {"batch": batch, "after_id": after_id, "statuses": statuses, "bite": BITE},
        )
    )


@operation(atomic=True)
def _retry_troubled(process: int, what: OperatorAction) -> Steps[int]:
    troubled = yield from lock_troubled(process)
    moved = 0
    for domain in sorted({domain for domain, _ in troubled}):
        ids = [id_ for of_domain, id_ in troubled if of_domain == domain]
        moved += len((yield from operate.act(Selection(domain, ids=ids), what, limit=len(ids)).steps))
    return moved
