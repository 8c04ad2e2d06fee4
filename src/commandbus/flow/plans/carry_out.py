"""What workers do with plans that were started: one portion after the other, at the plan's pace.

A portion is one transaction: it locks the plan's row, then the rows of its commands in the troubleshooting queue,
acts on them, and notes how far the plan is. So a worker that dies leaves a portion done or not begun, and another
worker goes on. A command that has left the queue since the preview, even if it came back, is skipped. A command
that another session has locked holds up nobody: it is passed by, and the plan comes back to it when all others are
done, every second until the lock is gone. The plan is done when each of its commands was moved or skipped.

Lock order: plan → tsq, command, process (waits for none of them) → queue row → batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commandbus import sql
from commandbus.errors import CommandBusError
from commandbus.flow.commands.operate import OperatorAction, Selection, act
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.quick_dataclass import dataclass

BITE: Final = 1000
CHANNEL: Final = "commandbus_plans"
"""The channel on which the start of a plan is notified, with its domain."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What one portion did. `locked`: commands whose turn had come, but that others had locked."""

    plan: int
    moved: int
    skipped: int
    is_last: bool
    trouble: str | None = None
    locked: int = 0


@operation(atomic=False)
def are_running(domains: Sequence[str]) -> Steps[bool]:
    """Is a plan of these domains under way?"""
    rows = yield Statement(sql.text("plans/running"), {"domains": list(domains)})
    found: bool = rows[0][0]
    return found


@operation(atomic=True)
def carry_out(domains: Sequence[str], *, bite: int = BITE) -> Steps[Portion | None]:
    """Carry out the portion that is due first; None if none is due, or others work on those that are."""
    rows = yield Statement(sql.text("plans/due"), {"domains": list(domains), "bite": bite})
    if not rows:
        return None
    yield Statement(b"SAVEPOINT commandbus_plan")
    try:
        return (yield from _portion(rows[0]))
    except CommandBusError as error:
        yield Statement(b"ROLLBACK TO SAVEPOINT commandbus_plan")
        plan, *_ = rows[0]
        note = f"stopped because of an error: {error}"
        yield Statement(sql.text("plans/stop"), {"plan": plan, "operator": "commandbus", "note": note})
        return Portion(plan, 0, 0, is_last=True, trouble=str(error))


def _portion(due: Row) -> Steps[Portion]:
    plan, domain, action, result, operator, reason, _total, reached, bite = due
    params = {"plan": plan, "domain": domain, "reached": reached, "bite": bite}
    found = yield Statement(sql.text("plans/portion", lock=sql.part("plans/lock")), params)
    is_fresh = bool(found)
    if not is_fresh:
        found = yield Statement(sql.text("plans/portion_of_locked", lock=sql.part("plans/lock")), params)
    ours = [id_ for id_, _, is_ours in found if is_ours]
    skipped = [id_ for id_, is_there, _ in found if not is_there]
    locked = [id_ for id_, is_there, is_ours in found if is_there and not is_ours]
    if ours:
        why = f"plan {plan}" if reason is None else f"plan {plan}: {reason}"
        what = OperatorAction(operator, why, action, result)
        yield from act(Selection(domain, ids=ours), what, limit=len(ours)).steps
    unlocked = [] if is_fresh else ours
    if skipped or locked or unlocked:
        noted = {"plan": plan, "skipped": skipped, "locked": locked, "unlocked": unlocked}
        yield Statement(sql.text("plans/note"), noted)
    state = yield Statement(
        sql.text("plans/advance"),
        {
            "plan": plan,
            "reached": found[-1][0] if is_fresh else reached,
            "moved": len(ours),
            "skipped": len(skipped),
            "locked": len(locked) if is_fresh else -len(found),
            "seen": len(found),
        },
    )
    return Portion(plan, len(ours), len(skipped), is_last=state[0][0] == "DONE", locked=len(locked))
