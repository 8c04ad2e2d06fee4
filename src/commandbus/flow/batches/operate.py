"""Cancel a batch, and retry its failed members. Long work, in portions of a thousand members.

Canceling begins with a mark on the batch (`cancel`), which also closes it. Then it passes over the members until
no member has moved during a pass. Members that wait are CANCELED, running ones are asked to stop, and those in the
troubleshooting queue are canceled there. Only the mark counts: if the caller dies on the way, workers continue
(`sweep`), and the fold that finds no member left sets CANCELED.

If two programs carry out the same cancellation (its caller, and a worker that sweeps), they take turns: each
portion takes an advisory lock. In a batch of processes, each transaction that cancels a process takes this lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import BatchNotFoundError, CommandBusError, InvalidOperationError
from commandbus.flow.batches import batches_of_processes as process_batch
from commandbus.flow.batches.create import Locked, ask_to_fold, check_targets, define, finish, insert, lock
from commandbus.flow.batches.fold_and_complete import fold_now
from commandbus.flow.batches.leftovers import Canceling, operator_action_of
from commandbus.flow.commands import operate
from commandbus.flow.commands.operate import OperatorAction, Selection
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.limits.declare import note_action
from commandbus.flow.limits.inspect import ControlAction, actions_on
from commandbus.flow.operation import Operation, Plan, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.batch import BatchCancelReport, BatchRetryReport

BITE = 1000
PASSES = 20  # if members still move after that, the workers' sweep does the rest
PASS_SECONDS = 0.05
_LOCK_SPACE = 0x636D6262  # "cmbb": advisory locks of cancellations
_LOCK = b"SELECT pg_catalog.pg_advisory_xact_lock(%(space)s::bigint << 32 | %(key)s::bigint)"
_TRY_LOCK = b"SELECT pg_catalog.pg_try_advisory_xact_lock(%(space)s::bigint << 32 | %(key)s::bigint)"


class Canceled(NamedTuple):
    """What a portion, or all of them, did: how many members ended, how many were asked to stop, and how many are
    left to the sweep of the workers."""

    canceled: int = 0
    requested: int = 0
    left: int = 0


class _Bite(NamedTuple):
    canceled: int
    requested: int
    moving: int  # members that changed state between two statements: look again
    last_id: int
    is_last: bool


# --- canceling -------------------------------------------------------------------------------------------------


def cancel(domain: str, batch_id: str, what: OperatorAction) -> Plan[BatchCancelReport]:
    """Cancel a batch. Members that wait or need a person are canceled at once, running ones are asked to stop."""
    canceling = yield mark(domain, batch_id, what)
    done: Canceled = yield from CANCEL_MEMBERS[canceling.holds](canceling, is_sweep=False)
    return BatchCancelReport(domain, str(batch_id), *done)


@operation(atomic=True)
def mark(domain: str, batch_id: str, what: OperatorAction) -> Steps[Canceling]:
    """Mark a batch as to be canceled, and close it. The first request is kept. A second request starts the work
    again, because somebody may have retried one of the batch's processes meanwhile."""
    found = yield from lock(domain, batch_id, "UPDATE")
    if not found.is_finished:
        yield from fold_now([found.id])  # the batch may be complete, but not folded yet
        found = yield from lock(domain, batch_id, "UPDATE")
    if found.is_finished:
        raise found.refuse("cancel")
    if found.is_open:
        found.check_isolation("cancel_batch")
    yield note_action(subject(domain, found.batch_id), "CANCEL", what)
    if found.cancel is not None:
        yield Statement(
            b"UPDATE commandbus.batch SET cancel = (cancel::jsonb - 'done'::text)::json WHERE id = %(id)s",
            {"id": found.id},
        )
        return Canceling(found.id, domain, found.holds, operator_action_of(found.cancel))
    yield Statement(
        b"UPDATE commandbus.batch SET is_open = false, cancel = pg_catalog.json_build_object('by', %(by)s::text, "
        b"'reason', %(reason)s::text, 'at', pg_catalog.now()) WHERE id = %(id)s",
        {"id": found.id, "by": what.operator, "reason": what.reason},
    )
    yield from ask_to_fold(found.id)
    return Canceling(found.id, domain, found.holds, what)


def cancel_commands(canceling: Canceling, *, is_sweep: bool) -> Plan[Canceled]:
    """Pass over the members until all have ended or were asked to stop. A sweep does nothing while another program
    works on this cancellation.

    Members that another transaction has locked are passed by. Claims and settlements lock them for a moment only,
    so the next pass comes a moment later. If somebody holds a lock for longer, the workers' sweep comes back."""
    canceled = requested = moving = 0
    for number in range(PASSES):
        if number:
            yield _wait_a_moment()
        moving, last_id, is_last = 0, 0, False
        while not is_last:
            bite: _Bite | None = yield cancel_bite(canceling, after_id=last_id, is_sweep=is_sweep)
            if bite is None:
                return Canceled(canceled, requested)
            canceled, requested, moving = (
                canceled + bite.canceled,
                requested + bite.requested,
                moving + bite.moving,
            )
            last_id, is_last = bite.last_id, bite.is_last
        if not moving:
            yield done(canceling.id)
            break
        if is_sweep:
            break  # it comes again
    return Canceled(canceled, requested, moving)


@operation(atomic=False)
def _wait_a_moment() -> Steps[None]:
    yield Statement(b"SELECT pg_catalog.pg_sleep(%(seconds)s)", {"seconds": PASS_SECONDS})


def cancel_processes(canceling: Canceling, *, is_sweep: bool) -> Plan[Canceled]:
    """Ask all processes that have not ended to stop. Each ends when its completed steps are undone. A sweep does
    nothing while another program works on this cancellation."""
    members: Plan[int] = process_batch.cancel_members(canceling.id, canceling.domain, canceling.what)
    try:
        step = next(members)
        while True:
            try:
                answer = yield _alone(canceling, step, is_sweep=is_sweep)
            except CommandBusError as error:
                step = members.throw(error)
                continue
            if answer is None:
                members.close()
                return Canceled()
            step = members.send(answer[0])
    except StopIteration as stop:
        yield done(canceling.id)
        return Canceled(0, stop.value)


@operation(atomic=True)
def _alone(canceling: Canceling, step: Operation[Any], *, is_sweep: bool) -> Steps[tuple[Any] | None]:
    """The result of an operation; None if another program works on this cancellation."""
    if not (yield from _lock(canceling, is_sweep=is_sweep)):
        return None
    return ((yield from step.steps),)


def _lock(canceling: Canceling, *, is_sweep: bool) -> Steps[bool]:
    """Take the lock for the rest of the transaction. A sweep does not wait for it."""
    answer = yield Statement(
        _TRY_LOCK if is_sweep else _LOCK, {"space": _LOCK_SPACE, "key": canceling.id & 0xFFFFFFFF}
    )
    return answer[0][0] is not False


CANCEL_MEMBERS: Final[dict[str, Callable[..., Plan[Canceled]]]] = {
    "commands": cancel_commands,
    "processes": cancel_processes,
}
"""How the members of a batch are canceled, by what it holds: `(canceling, *, is_sweep)`."""


@operation(atomic=True)
def cancel_bite(canceling: Canceling, *, after_id: int, is_sweep: bool, bite: int = BITE) -> Steps[_Bite | None]:
    """Cancel one portion of a pass; None if another program works on this cancellation."""
    if not (yield from _lock(canceling, is_sweep=is_sweep)):
        return None
    rows = yield Statement(
        sql.text("batches/members"), {"batch": canceling.id, "after_id": after_id, "bite": bite}
    )
    waiting = [id_ for id_, status in rows if status == "PENDING"]
    troubled = [id_ for id_, status in rows if status == "IN_TROUBLESHOOTING_QUEUE"]
    # First the troubled ones: who retries them locks their rows in this order, too. Otherwise each could wait for
    # the other, because the second statement also locks commands that have moved since their status was read.
    ended: list[str] = []
    if troubled:
        selection = Selection(canceling.domain, ids=troubled)
        ended = yield from operate.act(selection, canceling.what, limit=len(troubled), waits=False).steps
    canceled, requested, found = yield from _cancel_waiting(canceling, waiting)
    moving = len(waiting) + len(troubled) - found - len(ended)
    last_id = rows[-1][0] if rows else after_id
    return _Bite(canceled + len(ended), requested, moving, last_id, len(rows) < bite)


def _cancel_waiting(canceling: Canceling, ids: Sequence[int]) -> Steps[tuple[int, int, int]]:
    """Returns how many were canceled, how many were asked to stop, and how many were still waiting or running."""
    if not ids:
        return 0, 0, 0
    domain, what = canceling.domain, canceling.what
    try:
        rows = yield Statement(
            sql.text("batches/cancel", domain=domain),
            {"domain": domain, "ids": list(ids), "operator": what.operator, "reason": what.reason},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    results = [result for *_, result, _ in rows]
    ended = [row for row, result in zip(rows, results, strict=True) if result == "CANCELED"]
    if ended:
        yield Statement(
            b"DELETE FROM commandbus.parked WHERE domain = %(domain)s AND msg_id = ANY (%(msg_ids)s)",
            {"domain": domain, "msg_ids": [msg_id for *_, msg_id in ended]},
        )
        yield from operate.tell(domain, [tuple(told) for *told, _, _ in ended], what, was_in_tsq=False)
    return len(ended), results.count("REQUESTED"), len(rows)


@operation(atomic=False)
def done(batch: int) -> Steps[None]:
    """Note that every member has ended or was asked to stop, so that nothing is left to sweep. An ended batch gets
    this note, too: an operator may retry one of its processes, which must not be canceled again."""
    yield Statement(
        b"UPDATE commandbus.batch SET cancel = (cancel::jsonb || '{\"done\": true}')::json "
        b"WHERE id = %(id)s AND cancel ->> 'done'::text IS NULL",
        {"id": batch},
    )


# --- what a crash left ------------------------------------------------------------------------------------------


def resume(canceling: Canceling) -> Plan[Canceled]:
    """Continue a cancellation, unless another program works on it."""
    return (yield from CANCEL_MEMBERS[canceling.holds](canceling, is_sweep=True))


# --- retrying ---------------------------------------------------------------------------------------------------


def retry_failed(
    domain: str, batch_id: str, what: OperatorAction, *, name: object = None, on_complete: object = None
) -> Plan[BatchRetryReport]:
    """Retry members in the troubleshooting queue, and send those that FAILED for good again in a new batch.

    Processes that are FAILED go on where they stopped; those that were undone are started again in the new batch.
    `name` and `on_complete` are those of the new batch.
    """
    define(domain, name=name, on_complete=on_complete)  # a bad definition is refused before anything is retried
    batch, holds = yield _find(domain, batch_id, what)
    retried, last_id, is_last = 0, 0, False
    if holds == "processes":
        retried = yield from process_batch.retry_members(batch, domain, what)
        is_last = True
    while not is_last:
        moved, last_id, is_last = yield _retry_bite(domain, batch, what, after_id=last_id)
        retried += moved
    again, before, new_batch_id = yield _send_again(domain, batch_id, name, on_complete)
    return BatchRetryReport(domain, str(batch_id), retried, again, before, new_batch_id)


@operation(atomic=True)
def _find(domain: str, batch_id: str, what: OperatorAction) -> Steps[tuple[int, str]]:
    """The batch and what it holds. That somebody retries it is recorded."""
    name = names.to_id(batch_id, "batch_id")
    rows = yield Statement(
        sql.text("batches/existing"), {"domain": names.check_domain(domain), "batch_id": name, "fingerprint": None}
    )
    if not rows:
        raise BatchNotFoundError(domain, name)
    yield note_action(subject(domain, name), "RETRY", what)
    return rows[0][0], rows[0][3]


# --- what people did --------------------------------------------------------------------------------------------


def subject(domain: str, batch_id: str) -> str:
    """What the audit calls a batch."""
    return f"batch {domain}/{batch_id}"


@operation(atomic=False)
def list_actions(domain: str, batch_id: str, *, limit: int) -> Steps[list[ControlAction]]:
    """Who closed, canceled and retried a batch, newest first. Index: control_action_subject."""
    return (yield from actions_on([subject(names.check_domain(domain), names.to_id(batch_id, "batch_id"))], limit))


@operation(atomic=True)
def _retry_bite(domain: str, batch: int, what: OperatorAction, *, after_id: int) -> Steps[tuple[int, int, bool]]:
    """How many were retried, the last id that was looked at, and whether it was the last portion."""
    rows = yield Statement(sql.text("batches/members"), {"batch": batch, "after_id": after_id, "bite": BITE})
    moved: list[str] = []
    if ids := [id_ for id_, status in rows if status == "IN_TROUBLESHOOTING_QUEUE"]:
        moved = yield from operate.act(Selection(domain, ids=ids), what, limit=len(ids)).steps
    return len(moved), rows[-1][0] if rows else after_id, len(rows) < BITE


@operation(atomic=True)
def _send_again(
    domain: str, batch_id: str, name: object, on_complete: object
) -> Steps[tuple[int, int, str | None]]:
    """Returns how many were sent again, how many had been sent again before, and the new batch."""
    # If two operators retry, the second one finds everything sent.
    old = yield from lock(domain, batch_id, "NO KEY UPDATE")
    definition = define(
        domain,
        holds=old.holds,
        name=f"retry of {old.batch_id}"[: names.MAX_ID_LENGTH] if name is None else name,
        on_complete=on_complete,
        retry_of=old.id,
    )
    yield from check_targets(definition)
    yield Statement(b"SAVEPOINT commandbus_batch")
    new = yield from insert(definition)
    if new is None:
        raise InvalidOperationError(f"the batch_id {definition.batch_id!r} is taken")
    if old.holds == "processes":
        again, seen = yield from process_batch.start_again(old.id, domain, new)
    else:
        again, seen = yield from _send_all_again(old, new)
    if not again:
        yield Statement(b"ROLLBACK TO SAVEPOINT commandbus_batch")
        return 0, seen, None
    yield from finish(definition, new, total=again, fingerprint=None)
    return again, seen - again, definition.batch_id


def _send_all_again(old: Locked, new: int) -> Steps[tuple[int, int]]:
    again = seen = last_id = 0
    while True:
        try:
            rows = yield Statement(
                sql.text("batches/retry", domain=old.domain),
                {"domain": old.domain, "batch": old.id, "into": new, "after_id": last_id, "bite": BITE},
            )
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_missing(old.domain, error) from None
        sent, looked_at, last, _ = rows[0]
        again, seen, last_id = again + sent, seen + looked_at, last or last_id
        if looked_at < BITE:
            return again, seen
