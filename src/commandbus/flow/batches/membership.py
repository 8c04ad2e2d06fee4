"""What it means for batches and processes when an operator or a sender moves their commands.

Settlements count members themselves (commands/settle_final.sql). This module is for moves that are not
settlements: out of the troubleshooting queue, and canceled before they ran. Batches are counted in deltas, and
folded in the same transaction if nobody else is folding them. Processes are locked after the commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from commandbus import sql
from commandbus.flow.batches.fold_and_complete import fold_now
from commandbus.flow.commands.reply import Reply, deliver
from commandbus.flow.operation import Statement, Steps
from commandbus.flow.processes.tell_the_end import parent_of, reply_to_parent
from commandbus.model import payload

Count = Literal["t", "c", "f", "x", "q"]
"""One-letter names of a batch's counts in batches/count_batches.sql: total, completed, failed, canceled, in the
TSQ.
"""


class Member(NamedTuple):
    """A moved command: its row id, its batch, its process, and which step of it."""

    command: int
    batch: int | None
    process: int | None
    step: int | None


def retried(members: Sequence[Member]) -> Steps[None]:
    """Count members that left the troubleshooting queue to be run again."""
    counts = _count(members, {"q": -1})
    yield from _release(members, counts)
    yield from count(counts)


def ended(
    members: Sequence[Member], status: Literal["CANCELED", "COMPLETED"], *, was_in_tsq: bool, why: str
) -> Steps[None]:
    """Count members that a person ended, in the troubleshooting queue or before they ran."""
    change: dict[Count, int] = {"x" if status == "CANCELED" else "c": 1}
    if was_in_tsq:
        change["q"] = -1
    counts = _count(members, change)
    if was_in_tsq:
        yield from _release(members, counts)
    if messages := [item.command for item in members if item.process is not None and item.step == 0]:
        yield from _abandon(messages, why, counts)
    yield from count(counts)


def unhandled(messages: Sequence[int]) -> Steps[None]:
    """Tell processes that a person canceled messages to them (row ids) before they handled these messages."""
    counts: dict[int, Counter[Count]] = {}
    yield from _abandon(messages, "somebody canceled a message that this process had not handled", counts)
    yield from count(counts)


def count(counts: dict[int, Counter[Count]]) -> Steps[None]:
    """Note the counts of batches, and fold those that nobody else is folding."""
    if not counts:
        return
    rows = [{"b": batch} | {name: n for name, n in changes.items() if n} for batch, changes in counts.items()]
    yield Statement(sql.text("batches/count_batches"), {"rows": payload.dump(rows, what="rows")})
    yield from fold_now(sorted(counts))


def _count(members: Iterable[Member], change: dict[Count, int]) -> dict[int, Counter[Count]]:
    counts: dict[int, Counter[Count]] = {}
    for item in members:
        if item.batch is not None:
            found = counts.setdefault(item.batch, Counter())
            for name, n in change.items():
                found[name] += n
    return counts


def _abandon(messages: Sequence[int], why: str, counts: dict[int, Counter[Count]]) -> Steps[None]:
    rows = yield Statement(sql.text("processes/abandon"), {"messages": list(messages), "why": why})
    for batch, was_troubled, *_ in rows:
        if batch is not None:
            found = counts.setdefault(batch, Counter())
            found["f"] += 1
            found["q"] -= was_troubled
    told = [(queue, message, parent_of(*parent)) for _, _, queue, message, *parent in rows if queue is not None]
    if replies := [Reply(queue, message) for queue, message, parent in told if parent is None]:
        yield from deliver(replies)
    for queue, message, parent in told:
        if parent is not None:
            yield from reply_to_parent(queue, parent, message)


def _release(members: Sequence[Member], counts: dict[int, Counter[Count]]) -> Steps[None]:
    processes = sorted(item.process for item in members if item.process is not None)
    if processes:
        rows = yield Statement(sql.text("processes/release"), {"processes": processes})
        for (batch,) in rows:
            counts.setdefault(batch, Counter())["q"] -= 1
