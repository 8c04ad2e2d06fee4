"""Schedules that code declares: which of them are declared by live workers, and which definition is in effect.

A worker says every few seconds what its code declares. While workers of two releases run side by side, they may
declare one schedule differently. Of the definitions that live workers declare, the newest one is in effect: the
one whose first declaration is the most recent. So a new release wins as soon as its first worker runs, even if old
workers are restarted after that. After a rollback, the old definition is in effect again when the last worker of
the newer release is gone. A schedule that no worker declares any more goes on for a grace, and is then removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from commandbus import sql
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.limits.declare import note_action
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.flow.schedules.exist import CHANNEL
from commandbus.model import payload
from commandbus.model.priority import to_number
from commandbus.model.schedule import Schedule

BY_CODE = OperatorAction("commandbus")


class Undecided(NamedTuple):
    """A declaration that should be in effect and is not. `is_taken`: a schedule of that name was created at run
    time."""

    domain: str
    name: str
    definition: dict[str, Any]
    is_taken: bool


@operation(atomic=False)
def declare(schedules: Sequence[Schedule]) -> Steps[None]:
    """Write down that a live worker declares these schedules."""
    rows = [
        {
            "domain": item.domain,
            "name": item.name,
            "fingerprint": item.fingerprint(),
            "definition": item.definition(),
        }
        for item in schedules
    ]
    text = payload.dump(rows, what="schedules", max_bytes=payload.COMPOSED)
    yield Statement(sql.text("schedules/declare"), {"rows": text})


@operation(atomic=False)
def undecided(domains: Sequence[str]) -> Steps[list[Undecided]]:
    """The declarations that should be in effect and are not; usually none."""
    rows = yield Statement(sql.text("schedules/undecided"), {"domains": list(domains)})
    return [Undecided(*row) for row in rows]


@operation(atomic=True)
def put_into_effect(found: Undecided) -> Steps[bool]:
    """Put a declaration into effect. Returns False if another worker has done so meanwhile. Raises
    InvalidScheduleError or TypeError if this release does not understand the definition of a newer one."""
    schedule = Schedule(found.domain, found.name, **found.definition)
    is_changed = yield from store(schedule, is_declared=True)
    if is_changed:
        yield note_action(f"schedule {found.domain}/{found.name}", "DECLARE", BY_CODE, details=found.definition)
    return is_changed


@operation(atomic=False)
def undeclared(domains: Sequence[str], *, grace_seconds: float) -> Steps[set[tuple[str, str]]]:
    """Schedules (domain and name) that workers once declared, but that no worker has declared for the grace."""
    rows = yield Statement(sql.text("schedules/undeclared"), {"domains": list(domains), "grace": grace_seconds})
    return {(domain, name) for domain, name in rows}


@operation(atomic=True)
def forget(domain: str, name: str, *, grace_seconds: float) -> Steps[bool]:
    """Remove such a schedule, unless a worker declares it again."""
    params = {"domain": domain, "name": name, "grace": grace_seconds}
    rows = yield Statement(sql.text("schedules/forget"), params)
    if rows:
        yield note_action(f"schedule {domain}/{name}", "REMOVE", BY_CODE)
    return bool(rows)


def store(schedule: Schedule, *, is_declared: bool) -> Steps[bool]:
    """Create it, or change its definition, and notify the workers. Returns False if there was nothing to
    change."""
    now: datetime = (yield Statement(b"SELECT pg_catalog.clock_timestamp()"))[0][0]
    rows = yield Statement(
        sql.text("schedules/store"),
        {
            "domain": schedule.domain,
            "name": schedule.name,
            "command_type": schedule.command_type,
            "cron": schedule.cron,
            "every": schedule.every,
            "timezone": schedule.timezone,
            "missed": schedule.missed,
            "overlap": schedule.overlap,
            "most": schedule.most,
            "timeout": schedule.timeout,
            "max_attempts": schedule.max_attempts,
            "expires": schedule.expires,
            "on_exhausted": schedule.on_exhausted,
            "priority": to_number(schedule.priority),
            "correlation_id": schedule.correlation_id,
            "reply_to": schedule.reply_to,
            "headers": None if schedule.headers is None else payload.dump(dict(schedule.headers), what="headers"),
            "data": payload.dump(schedule.data, what="data", max_bytes=payload.COMPOSED),
            "is_declared": is_declared,
            "fingerprint": schedule.fingerprint(),
            "now": now,
            "next_at": schedule.times.next_after(now),
        },
    )
    if rows:
        yield tell(schedule.domain)
    return bool(rows)


def tell(domain: str) -> Statement:
    """Notify the workers, when this transaction commits, that a schedule of a domain has changed."""
    return Statement(
        b"SELECT pg_catalog.pg_notify(%(channel)s, %(domain)s)", {"channel": CHANNEL, "domain": domain}
    )
