"""What workers do with plans that were started: one portion after the other, at the plan's pace.

A portion is one transaction: it locks the plan's row, then the rows of its commands in the troubleshooting queue,
acts on them, and notes how far the plan is. So a worker that dies leaves a portion done or not begun, and another
worker goes on. A command that has left the queue since the preview, even if it came back, is skipped.

Lock order: plan → tsq → queue row → command row → batch → process.
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
    """What one portion did."""

    plan: int
    moved: int
    skipped: int
    is_last: bool
    trouble: str | None = None


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
    found = yield Statement(
        sql.text("plans/portion"), {"plan": plan, "domain": domain, "reached": reached, "bite": bite}
    )
    there = [id_ for id_, is_there in found if is_there]
    skipped = [id_ for id_, is_there in found if not is_there]
    if there:
        why = f"plan {plan}" if reason is None else f"plan {plan}: {reason}"
        what = OperatorAction(operator, why, action, result)
        yield from act(Selection(domain, ids=there), what, limit=len(there)).steps
    if skipped:
        yield Statement(sql.text("plans/skip"), {"plan": plan, "skipped": skipped})
    state = yield Statement(
        sql.text("plans/advance"),
        {
            "plan": plan,
            "reached": found[-1][0] if found else reached,
            "moved": len(there),
            "skipped": skipped,
            "seen": len(found),
        },
    )
    return Portion(plan, len(there), len(skipped), is_last=state[0][0] == "DONE")
