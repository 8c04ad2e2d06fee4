"""Return parked commands to the queue, in portions, after a pause or a breaker.

A million commands may be parked. The transaction that ends the pause or closes the breaker wakes the first
portion. The other portions follow in separate transactions, so that no claim waits for a lock. If a program was
killed on the way, `left_parked` finds the rest: the maintenance thread of every worker calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Operation, Plan, Statement, Steps, operation
from commandbus.quick_dataclass import dataclass

Reason = Literal["pause", "breaker"]
BITE: Final = 1000


class Parked(NamedTuple):
    """Commands of one type that are parked for the same reason."""

    reason: Reason
    domain: str
    command_type: str


@dataclass(frozen=True, slots=True)
class UnparkBite:
    """How many went back to the queue, and after which parked row the next portion begins; None if none is
    left."""

    count: int
    after: int | None = None


def wake(parked: Parked, *, after: int = 0, bite: int = BITE) -> Steps[UnparkBite]:
    """Wake one portion, in a separate statement. While this transaction waited for locks, others may have parked
    more commands; the new snapshot sees these, too."""
    reason, domain, command_type = parked
    params = {"reason": reason, "domain": domain, "type": command_type, "after": after, "bite": bite}
    try:
        rows = yield Statement(sql.text("commands/unpark", domain=domain), params)
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    return UnparkBite(*rows[0][:2])


@operation(atomic=False)
def wake_some(parked: Parked, after: int) -> Steps[UnparkBite]:
    """One more portion, in its own transaction."""
    return (yield from wake(parked, after=after))


def wake_rest(parked: Parked, first: Operation[UnparkBite] | None = None) -> Plan[int]:
    """Portion by portion until nothing is left, beginning with `first`. Returns how many went back in all."""
    bite: UnparkBite = yield first or wake_some(parked, 0)
    total = bite.count
    while bite.after is not None:
        bite = yield wake_some(parked, bite.after)
        total += bite.count
    return total


@operation(atomic=False)
def left_parked(domains: Sequence[str]) -> Steps[list[Parked]]:
    """Commands of these domains that are parked although nothing keeps them parked."""
    rows = yield Statement(sql.text("commands/left_parked"), {"domains": list(domains)})
    return [Parked(*row) for row in rows]
