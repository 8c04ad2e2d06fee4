"""Fire schedules: look which are due by the server's clock, and make the firings that were decided.

Any worker may do this at any time, and several may do it at once: `schedules/fire.sql` moves a row only if it is
still as it was when its firing was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.schedule import Decision, Due, command_id_of, text_of
from commandbus.model.schedule_times import ScheduleTimes
from commandbus.quick_dataclass import dataclass


class DueRow(NamedTuple):
    """A row of `schedules/look.sql`."""

    domain: str
    name: str
    cron: str | None
    every: float | None
    timezone: str
    missed: str
    overlap: str
    most: int
    version: int
    passed_at: datetime
    waiting_since: datetime | None
    last_status: str | None
    now: datetime
    seconds: float

    def to_due(self) -> Due:
        """What `decide` needs."""
        times = ScheduleTimes(self.cron, self.every, self.timezone)
        return Due(
            *(times, self.missed, self.overlap, self.most, self.passed_at, self.now),
            waiting_since=self.waiting_since,
            last_status=self.last_status,
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about one schedule, made when its row was at `version`."""

    name: str
    version: int
    decision: Decision
    run_id: str | None = None  # a run that a person asked for: the id of its command

    def to_json(self) -> dict[str, Any]:
        """What `schedules/fire.sql` reads."""
        made = self.decision
        firings = [{"id": self.run_id or command_id_of(self.name, at), "at": text_of(at)} for at in made.firings]
        fired_at = made.firings[-1] if made.firings and self.run_id is None else None
        return {
            "name": self.name,
            "version": self.version,
            "passed_at": text_of(made.passed_at),
            "next_at": _text(made.next_at),
            "fired_at": _text(fired_at),
            "waiting_since": _text(made.waiting_since),
            "skipped": made.skipped,
            "note": made.note,
            "firings": firings,
        }


class Fired(NamedTuple):
    """A schedule that was moved: how many commands were sent, and the id of the last."""

    name: str
    commands: int
    last: int | None


@operation(atomic=False)
def look(domains: Sequence[str], *, n: int) -> Steps[list[DueRow]]:
    """The schedules that come next, at most n."""
    rows = yield Statement(sql.text("schedules/look"), {"domains": list(domains), "n": n})
    return [DueRow(*row) for row in rows]


@operation(atomic=False)
def fire(domain: str, decided: Sequence[Decided]) -> Steps[list[Fired]]:
    """Make the firings of one domain. Returns the schedules that were moved: the others have changed meanwhile."""
    return (yield from fire_steps(domain, decided))


def fire_steps(domain: str, decided: Sequence[Decided], *, even_paused: bool = False) -> Steps[list[Fired]]:
    """`fire` as a part of another operation."""
    rows = payload.dump([item.to_json() for item in decided], what="firings", max_bytes=payload.COMPOSED)
    try:
        found = yield Statement(
            sql.text("schedules/fire", domain=domain),
            {"domain": domain, "rows": rows, "even_paused": even_paused},
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    return [Fired(*row[:3]) for row in found]


@operation(atomic=False)
def put_off(domain: str, name: str, *, version: int, seconds: float, note: str) -> Steps[None]:
    """A schedule cannot be fired: note why, and prevent further tries for some seconds. No firing is lost: when it
    can be fired again, its policy decides about what was missed."""
    yield Statement(
        b"UPDATE commandbus.schedule SET version = version + 1, note = %(note)s, "
        b"noted_at = pg_catalog.clock_timestamp(), "
        b"next_at = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s) "
        b"WHERE domain = %(domain)s AND name = %(name)s AND version = %(version)s",
        {"domain": domain, "name": name, "version": version, "seconds": seconds, "note": payload.clean_text(note)},
    )


def _text(instant: datetime | None) -> str | None:
    return None if instant is None else text_of(instant)
