"""Commands that wait for a handler, because the worker that claimed them has none for their type.

During a deploy some workers know a new command type and others do not yet. A worker that claims a command of a
type that it does not know parks the command (flow/commands/claim.py). Workers that know the type lease it from
there (`take`). If no running worker has known the type for `unknown_type_timeout`, any worker of the domain gives
the commands up: they go to the troubleshooting queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import starmap

from commandbus import sql
from commandbus.errors import UnknownCommandTypeError
from commandbus.flow.commands.claim import Claim, as_claim
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.settle import of_row, settle
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.model.outcome import Failure, Judgement, Verdict, describe
from commandbus.quick_dataclass import dataclass

MOST_COUNTED = 10_000
# CASE, because for a plain comparison the planner expects a third of all rows and sorts them.
_OF_AGE = (
    "AND CASE WHEN parked_at <= pg_catalog.now() - pg_catalog.make_interval(secs => %(age)s) "
    "THEN true ELSE false END"
)


@dataclass(frozen=True, slots=True)
class UnhandledType:
    """A command type whose commands wait for a handler.

    `waiting` is how many commands wait (counted up to 10,000), and `since` is when the first of them began to
    wait. `workers` is how many running workers have a handler, and `seconds` is for how long no worker has had
    one.
    """

    domain: str
    command_type: str
    waiting: int
    since: datetime
    workers: int
    seconds: float

    @property
    def name(self) -> str:
        """The type with its domain, such as "orders/ship"."""
        return f"{self.domain}/{self.command_type}"


def note(domain: str, command_type: str, timeout_seconds: float) -> str:
    """Why a command of this type is parked, for people."""
    return (
        f"no running worker handles {domain}/{command_type}; after {format_seconds(timeout_seconds)} without one "
        f"it goes to the troubleshooting queue"
    )


def note_of_now(item: UnhandledType) -> str | None:
    """Why a command is still parked although a running worker has a handler; None if no worker has one."""
    if not item.workers:
        return None
    verb = "handles" if item.workers == 1 else "handle"
    return f"waits for a free slot: {counted(item.workers, 'running worker')} {verb} {item.name}"


@operation(atomic=False)
def find_unhandled(domains: Sequence[str], *, most: int = 1) -> Steps[list[UnhandledType]]:
    """The types of these domains whose commands wait for a handler; counts up to `most` commands of each."""
    return (yield from unhandled_types(domains, most=most))


def unhandled_types(domains: Sequence[str], *, most: int) -> Steps[list[UnhandledType]]:
    """`find_unhandled` as a part of another operation."""
    rows = yield Statement(sql.text("commands/unhandled_types"), {"domains": list(domains), "most": most})
    return [UnhandledType(*row) for row in rows]


@operation(atomic=False)
def take(*, domain: str, command_type: str, worker: str, n: int, lease_seconds: float) -> Steps[Claim]:
    """Lease up to n commands that wait for a handler, for a worker that has it."""
    params = _params(domain, command_type, worker, n, lease_seconds) | {"paused": [""]}
    rows = yield Statement(sql.text("commands/take_unhandled", domain=domain, of_age=""), params)
    return as_claim(rows, n)


@operation(atomic=True)
def give_up(
    *, domain: str, command_type: str, worker: str, n: int, lease_seconds: float, age_seconds: float
) -> Steps[int]:
    """Send up to n commands that have waited for so long to the troubleshooting queue; returns how many.

    Those of a paused type stay where they are.
    """
    params = _params(domain, command_type, worker, n, lease_seconds) | {
        "age": age_seconds,
        "paused": ["", command_type],
    }
    rows = yield Statement(sql.text("commands/take_unhandled", domain=domain, of_age=_OF_AGE), params)
    judgement = Judgement(Verdict.UNKNOWN_TYPE, _failure(domain, command_type, age_seconds))
    ours = [row for row in starmap(ClaimedRow, rows) if row.id is not None]
    settlements = [of_row(domain, row, judgement, started=None) for row in ours]
    if settlements:
        yield from settle(domain, worker, settlements, waiting=True).steps
    return len(settlements)


def _failure(domain: str, command_type: str, seconds: float) -> Failure:
    text = (
        f"no running worker has had a handler for command_type {command_type!r} of domain {domain!r} for "
        f"{format_seconds(seconds)} (unknown_type_timeout)"
    )
    return replace(describe(UnknownCommandTypeError(domain, command_type)), error=text)


def _params(domain: str, command_type: str, worker: str, n: int, lease_seconds: float) -> dict[str, object]:
    return {"domain": domain, "type": command_type, "worker": worker, "n": n, "lease": lease_seconds}
