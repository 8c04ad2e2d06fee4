"""Write the outcomes of attempts, once, under their fence, many at a time.

An outcome is JSON text from the moment the attempt ended: the settler only joins the texts. `settle` returns what
was NOT settled: refused (the fence is gone; nothing was changed), busy (try again), or canceled (somebody asked to
cancel it meanwhile, and it did not complete: settle it as CANCELED). Replies are sent in the same transaction. One
bad row must not fail the others: after an error, the caller settles the rows one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final, Literal, Protocol

from commandbus import sql
from commandbus.flow.batches.membership import unhandled
from commandbus.flow.commands.claimed_row import ClaimedRow, Fence
from commandbus.flow.commands.reply import CALL, Outcome, Reply, compose, deliver
from commandbus.flow.operation import Operation, Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.fingerprint import fingerprint_of
from commandbus.model.outcome import STATUS_AFTER, Failure, Judgement, Verdict, insist
from commandbus.model.suspects import Marks

Answer = Literal["done", "refused", "busy", "canceled"]
_REPLIES: Final[dict[Verdict, Outcome]] = {
    Verdict.BUSINESS_RULE: "FAILED",
    Verdict.TIMED_OUT: "FAILED",
    Verdict.FAILED: "FAILED",
    Verdict.EXPIRED: "CANCELED",
    Verdict.CANCELED: "CANCELED",
}


_NO_FAILURES: Final = frozenset({Verdict.CANCELED, Verdict.EXPIRED})


@dataclass(slots=True)
class Settlement:
    """One attempt's outcome, ready to be written. `row` is its JSON for the statement that `is_final` names."""

    domain: str
    msg_id: int
    read_ct: int
    row: str
    is_final: bool = True
    is_parked: bool = False
    reply: Reply | None = None
    is_completion: bool = False
    is_grouped: bool = True  # its command may belong to a batch or a process
    unhandled: int | None = None  # the command, if it is a message to a process and somebody canceled it
    verdict: Verdict | None = None  # None: the attempt completed

    def only_of(self, sent: float) -> Settlement:
        """The same settlement, but only for the command that was sent at this epoch second. After a failover that
        lost commits, another command may have the same id and msg_id."""
        return replace(self, row=f'{self.row[:-1]},"b":{sent!r}}}') if isfinite(sent) else self

    def with_spans(self, spans: Sequence[str] | None) -> Settlement:
        """The same settlement, with the parts in which its handler did not simply run, each as JSON text."""
        return replace(self, row=f'{self.row[:-1]},"p":[{",".join(spans)}]}}') if spans else self


class Done:
    """The usual outcome, which needs no text: the first attempt completed, without a result or a reply."""

    is_completion = True
    is_final = True


DONE: Final = Done()
SPARSE: Final = 16
"""The ids of the commands in one settle_done lie close together: the range has at most so many ids per command."""


class Claimed(Protocol):
    """What settle_done needs to know about an attempt."""

    @property
    def id(self) -> int: ...
    @property
    def msg_id(self) -> int: ...
    @property
    def started(self) -> float | None: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def sent(self) -> float: ...


def is_dense(attempts: Sequence[Claimed]) -> bool:
    """Are the ids of their commands close enough together for settle_done?"""
    ids = [attempt.id for attempt in attempts]
    return max(ids) - min(ids) < SPARSE * len(ids) + 100


@operation(atomic=False)
def settle_done(domain: str, worker: str, attempts: Sequence[Claimed]) -> Steps[list[int] | None]:
    """Write that attempts have completed (`DONE`). Returns the commands that were settled, or None for all.

    It waits for locked queue rows, as long as the session's lock_timeout allows.
    """
    ids = [attempt.id for attempt in attempts]
    first = min(ids) - 1
    messages = ["0"] * (max(ids) - first)
    started = messages.copy()
    for attempt in attempts:
        at = attempt.id - first - 1
        messages[at] = str(attempt.msg_id)
        started[at] = f"{attempt.started:.6f}"
    groups = (
        sql.part("batches/settle_done_batches") if any(attempt.batch is not None for attempt in attempts) else ""
    )
    rows = yield Statement(
        sql.text("commands/settle_done", domain=domain, groups=groups),
        {
            "worker": worker,
            "asked": len(attempts),
            "first": first,
            "messages": "{" + ",".join(messages) + "}",
            "started": "{" + ",".join(started) + "}",
        },
        by_keys=True,
    )
    settled: list[int] | None = rows[0][0]
    return settled


@operation(atomic=False)
def settle_one(
    domain: str, worker: str, attempt: Claimed, *, read_ct: int, number: int, result: str | None
) -> Steps[dict[tuple[int, int], Answer]]:
    """Write one completion without a reply, a batch or a process, in its handler's transaction.

    Returns what `settle` returns. `result` is JSON text.
    """
    rows = yield Statement(
        sql.text("commands/settle_one", domain=domain),
        {
            "msg_id": attempt.msg_id,
            "read_ct": read_ct,
            "command": attempt.id,
            "worker": worker,
            "number": number,
            "started": attempt.started,
            "sent": attempt.sent,
            "result": result,
        },
        by_keys=True,
    )
    return {} if rows else {(attempt.msg_id, read_ct): "refused"}


def completed(fence: Fence, *, started: float, result: str | None) -> Settlement:
    """The settlement of a completed command; `started` is the epoch second, `result` its JSON text."""
    domain, msg_id, read_ct, id_, number = fence
    value = "" if result is None else f',"v":{result}'
    row = f'{{"m":{msg_id},"r":{read_ct},"c":{id_},"s":"COMPLETED","n":{number},"t":{started:.6f}{value}}}'
    return Settlement(domain, msg_id, read_ct, row, is_completion=True)


def judged(
    fence: Fence,
    *,
    started: float | None,
    command_type: str,
    judgement: Judgement,
    marks: Marks,
    is_waived: bool = False,
) -> Settlement:
    """The settlement of a failed attempt. The judgement says what becomes of the command. `marks` are the
    command's marks before; `is_waived`: the attempt is not charged."""
    failure = judgement.failure
    alike = None if judgement.verdict in _NO_FAILURES else fingerprint_of(fence.domain, command_type, failure)
    error = _error(judgement.verdict, failure, command_type, alike)
    head = f'{_head(fence, started)},"e":{error}'
    if judgement.verdict is Verdict.RETRY:
        after = marks.after_failure(judgement.failure)
        change = _change(marks, replace(after, waived=after.waived + is_waived))
        return _again(fence, f'{head},"d":{judgement.delay_seconds:.6f},{change}}}', Verdict.RETRY)
    status = STATUS_AFTER[judgement.verdict]
    row = f'{head},"s":"{status}"}}'
    return Settlement(fence.domain, fence.msg_id, fence.read_ct, row, verdict=judgement.verdict)


def of_row(
    domain: str, row: ClaimedRow, judgement: Judgement, *, started: float | None, is_waived: bool = False
) -> Settlement:
    """The settlement, with its reply, of an attempt that did not complete."""
    judgement = insist(judgement, row.step)
    fence = row.fence(domain)
    settlement = judged(
        fence,
        started=started,
        command_type=row.command_type,
        judgement=judgement,
        marks=row.marks,
        is_waived=is_waived,
    )
    settlement.is_grouped = row.is_grouped
    verdict = judgement.verdict
    if verdict in (Verdict.CANCELED, Verdict.EXPIRED) and row.step == 0:
        settlement.unhandled = fence.id
    if row.reply_to is not None and (verdict in _REPLIES or (row.reply_to == CALL and settlement.is_final)):
        settlement.reply = compose(
            row.reply_to,
            _REPLIES.get(verdict, "FAILED"),
            id_=fence.id,
            domain=domain,
            command_id=row.command_id,
            command_type=row.command_type,
            correlation_id=row.correlation_id,
            failure=judgement.failure,
        )
    return settlement


def waived(
    domain: str,
    row: ClaimedRow,
    *,
    started: float | None,
    failure: Failure,
    suspect: bool = False,
    in_chunk: bool = False,
    single: bool = False,
) -> Settlement:
    """The attempt was stopped through no fault of its own: its command is retried at once, and not charged.

    `suspect`: it may have killed its worker, so its next attempt runs in a child process; `in_chunk`: and alone,
    because others ran with it in one chunk. `single`: it was part of a chunk that failed, so it runs by itself
    from now on.
    """
    error = _error(Verdict.WAIVED, failure, "")
    change = _change(row.marks, row.marks.after_suspicion(in_chunk=in_chunk)) if suspect else '"w":1'
    if single:
        change += ',"g":true'
    fence = row.fence(domain)
    return _again(fence, f'{_head(fence, started)},"d":0,{change},"e":{error}}}', Verdict.WAIVED)


def snoozed(
    domain: str, row: ClaimedRow, *, started: float | None, failure: Failure, delay_seconds: float
) -> Settlement:
    """The handler wants the command to be tried again after the delay. The attempt is not charged."""
    fence, error = row.fence(domain), _error(Verdict.SNOOZED, failure, "")
    row_text = f'{_head(fence, started)},"d":{delay_seconds:.6f},"w":1,"z":true,"e":{error}}}'
    return _again(fence, row_text, Verdict.SNOOZED)


def parked(
    domain: str,
    row: ClaimedRow,
    *,
    started: float | None,
    limit: str,
    failure: Failure,
    note: str,
    until: float | None,
) -> Settlement:
    """The command waits for a limit, hidden from workers, and is not charged.

    `until` is the epoch second until which the limit is blocked, if that is known.
    """
    quote, fence = payload.quote, row.fence(domain)
    parts = [
        _head(fence, started),
        f'"y":{quote(row.command_type)},"l":{quote(limit)},"u":{_epoch(until)}',
        f'"o":{quote(note)},"e":{_error(Verdict.PARKED, failure, row.command_type)}}}',
    ]
    settlement = _again(fence, ",".join(parts), Verdict.PARKED)
    settlement.is_parked = True
    return settlement


def cancellation(by: str, reason: str | None) -> Failure:
    """The reason for the end of an attempt that somebody asked to cancel."""
    return Failure("OperatorCancel", "CANCELED", f"canceled by {by}" + (f": {reason}" if reason else ""))


def given_back(fence: Fence, *, delay: float = 0.0, why: str = "its worker stops") -> Settlement:
    """The command was claimed but not started: it returns to the queue, at once or later, and is not charged."""
    failure = Failure("GivenBack", "GIVEN_BACK", f"given back before it had started: {why}")
    error = _error(Verdict.GIVEN_BACK, failure, "")
    return _again(fence, f'{_head(fence, None)},"d":{delay:.6f},"w":1,"e":{error}}}', Verdict.GIVEN_BACK)


def _head(fence: Fence, started: float | None) -> str:
    """Returns the beginning of an outcome's JSON."""
    return f'{{"m":{fence.msg_id},"r":{fence.read_ct},"c":{fence.id},"n":{fence.number},"t":{_epoch(started)}'


def _again(fence: Fence, row: str, verdict: Verdict) -> Settlement:
    return Settlement(fence.domain, fence.msg_id, fence.read_ct, row, is_final=False, verdict=verdict)


def settle(
    domain: str,
    worker: str,
    settlements: Sequence[Settlement],
    *,
    waiting: bool = False,
    lock_timeout_ms: int | None = None,
) -> Operation[dict[tuple[int, int], Answer]]:
    """Write outcomes of one domain. Returns those (msg_id, read_ct) that were not settled, and why.

    `waiting=True` waits for locked queue rows instead of returning busy. `lock_timeout_ms` is how long it waits at
    most for any other row; by default as long as the session's lock_timeout says.
    """
    # In key order: every transaction that locks several queue rows uses this order, so they cannot deadlock.
    ordered = sorted(settlements, key=lambda item: item.msg_id)
    first = {(item.msg_id, item.read_ct): item for item in reversed(ordered)}
    if len(first) < len(ordered):  # an attempt has one outcome: the first one counts
        ordered = sorted(first.values(), key=lambda item: item.msg_id)
    final = [item for item in ordered if item.is_final]
    again = [item for item in ordered if not item.is_final and not item.is_parked]
    waiting_ = [item for item in ordered if item.is_parked]
    more = [item for item in final if item.reply is not None or item.unhandled is not None]
    kinds = {"commands/settle_final": final, "commands/settle_again": again, "commands/settle_park": waiting_}
    steps = _settle(domain, worker, kinds, locking="" if waiting else "SKIP LOCKED")
    if lock_timeout_ms is not None:
        return Operation(_hurried(steps, lock_timeout_ms), atomic=True)
    return Operation(steps, atomic=bool(more) or sum(map(bool, kinds.values())) > 1)


def _hurried(
    steps: Steps[dict[tuple[int, int], Answer]], lock_timeout_ms: int
) -> Steps[dict[tuple[int, int], Answer]]:
    yield Statement(f"SET LOCAL lock_timeout = {lock_timeout_ms:d}".encode())
    return (yield from steps)


def _settle(
    domain: str, worker: str, kinds: Mapping[str, list[Settlement]], *, locking: str
) -> Steps[dict[tuple[int, int], Answer]]:
    unsettled: dict[tuple[int, int], Answer] = {}
    final = kinds["commands/settle_final"]
    for name, items in kinds.items():
        if items:
            # This takes 6% of a settlement's time, so it is done only for members of batches or processes.
            groups = (
                sql.part("commands/settle_batches_and_processes") if any(item.is_grouped for item in items) else ""
            )
            rows = yield Statement(
                sql.text(name, domain=domain, locking=locking, groups=groups),
                {
                    "domain": domain,
                    "worker": worker,
                    "rows": "[" + ",".join([item.row for item in items]) + "]",
                },
                by_keys=not groups,
            )
            # After a wait for the locks, "busy" means that the row was taken after our snapshot: refused.
            unsettled |= {
                (msg_id, read_ct): "refused" if answer == "busy" and not locking else answer
                for msg_id, read_ct, answer in rows
            }
    replies = [
        item.reply for item in final if item.reply is not None and (item.msg_id, item.read_ct) not in unsettled
    ]
    if replies:
        yield from deliver(replies)
    messages = [
        item.unhandled
        for item in final
        if item.unhandled is not None and (item.msg_id, item.read_ct) not in unsettled
    ]
    if messages:
        yield from unhandled(messages)
    return unsettled


def _error(verdict: Verdict, failure: Failure, command_type: str, fingerprint: str | None = None) -> str:
    quote = payload.quote
    parts = [
        f'"verdict":"{verdict}"',
        f'"error_type":{quote(failure.error_type)}',
        f'"error_code":{quote(failure.error_code)}',
        f'"error":{quote(failure.error)}',
        f'"command_type":{quote(command_type)}',
    ]
    if failure.traceback is not None:
        parts.append(f'"traceback":{quote(failure.traceback)}')
    if failure.details is not None:
        parts.append(f'"details":{failure.details}')
    if failure.rung is not None:
        parts.append(f'"rung":{quote(failure.rung)}')
    if failure.autopsy is not None:
        parts.append(f'"autopsy":{failure.autopsy}')
    if failure.duration_ms is not None:
        parts.append(f'"duration_ms":{failure.duration_ms}')
    if fingerprint is not None:
        parts.append(f'"fingerprint":"{fingerprint}"')
    if failure.own_frame is not None:
        parts.append(f'"own_frame":{quote(failure.own_frame)}')
    return "{" + ",".join(parts) + "}"


def _change(before: Marks, after: Marks) -> str:
    """The change to the command's row; usually none."""
    if after == before:
        return '"w":0'
    suspect = "null" if after.suspect is None else after.suspect
    quarantine, alone = ("true" if mark else "null" for mark in (after.quarantine, after.alone))
    return f'"w":{after.waived - before.waived},"k":true,"x":{suspect},"q":{quarantine},"a":{alone}'


def _epoch(started: float | None) -> str:
    return "null" if started is None else f"{started:.6f}"
