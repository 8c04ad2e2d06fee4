"""Batches that a crash left: what is to be folded, and which cancellations go on.

Every worker looks every two seconds. So this is apart from the work itself (`operate.py`), which few workers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload

KINDS = ("commands", "processes")
"""What a batch can hold; a newer release may know more."""


class Canceling(NamedTuple):
    """A batch that is being canceled, by which operator, and why."""

    id: int
    domain: str
    holds: str
    what: OperatorAction


class Leftovers(NamedTuple):
    """Batches with something to fold, and those whose cancellation is not done."""

    to_fold: list[int]
    to_cancel: list[Canceling]


@operation(atomic=False)
def leftovers(limit: int = 100, *, but: Sequence[int] = ()) -> Steps[Leftovers]:
    """Batches that need work, except `but`: a crash left them, or a member was settled a moment ago."""
    rows = yield Statement(sql.text("batches/sweep"), {"limit": limit, "but": list(but)})
    return Leftovers(
        [id_ for id_, _, _, cancel in rows if cancel is None],
        [
            Canceling(id_, domain, holds, operator_action_of(cancel))
            for id_, domain, holds, cancel in rows
            if cancel is not None and holds in KINDS
        ],
    )


def operator_action_of(cancel: str) -> OperatorAction:
    """The action that the mark on a batch tells of."""
    found = payload.loads(cancel)
    return OperatorAction(found["by"], found["reason"], "CANCEL")
