"""What people and programs do with schedules at run time: create, pause, resume, delete, run now; and look at
them.

Everything is recorded in control_action, with who did it and why: 'schedule orders/nightly'.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from commandbus import sql
from commandbus.errors import (
    DuplicateScheduleError,
    InvalidOperationError,
    ScheduleNotFoundError,
    UnknownDomainError,
)
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.records import running_of
from commandbus.flow.limits.declare import note_action
from commandbus.flow.limits.inspect import ControlAction, actions_on
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.flow.schedules.declare import store, tell
from commandbus.flow.schedules.fire import Decided, fire_steps
from commandbus.model import names, page
from commandbus.model.command import CommandStatus, SentCommand
from commandbus.model.json_values import Json
from commandbus.model.page import Page
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.schedule import Decision, MissedPolicy, OverlapPolicy, Schedule, check_name, text_of
from commandbus.model.schedule_times import ScheduleTimes
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule and its state.

    `is_declared`: workers declare it in code; `declared_at` is when a worker last did so, and `declarations` is
    how many different definitions live workers declare. `next_at` is when it fires next, or looks again (None:
    never, or it is paused). `last_fired` is the instant of its last firing; `last_command_id` and `last_status`
    are those of its last command (None if that was pruned). `fired` counts commands, `skipped` counts firings that
    were left out because the last command was unfinished. `waiting_since`: since when a firing waits for the last
    command to finish. `note` is the last unusual thing that happened. `every`, `timeout` and `expires` are
    seconds.
    """

    domain: str
    name: str
    command_type: str
    cron: str | None
    every: float | None
    timezone: str
    data: Json
    headers: Json
    correlation_id: str | None
    reply_to: str | None
    max_attempts: int | None
    timeout: float | None
    expires: float | None
    on_exhausted: OnExhausted | None
    priority: Priority | None
    missed: MissedPolicy
    overlap: OverlapPolicy
    most: int
    is_declared: bool
    created_at: datetime
    changed_at: datetime
    next_at: datetime | None
    last_fired: datetime | None
    last_command_id: str | None
    last_status: CommandStatus | None
    fired: int
    skipped: int
    waiting_since: datetime | None
    note: str | None
    noted_at: datetime | None
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    declared_at: datetime | None
    declarations: int

    @property
    def is_paused(self) -> bool:
        """Has somebody paused it?"""
        return self.paused_at is not None

    @property
    def times(self) -> ScheduleTimes:
        """When it fires."""
        return ScheduleTimes(self.cron, self.every, self.timezone)


@operation(atomic=True)
def create(schedule: Schedule, what: OperatorAction, *, replaces: bool = False) -> Steps[ScheduleRecord]:
    """Create a schedule. If it exists with the same definition, returns it. If it exists with another definition,
    it is replaced only if `replaces`."""
    known = yield Statement(
        b"SELECT 1 FROM commandbus.domain WHERE name = %(domain)s", {"domain": schedule.domain}
    )
    if not known:
        raise UnknownDomainError(schedule.domain)
    existing = yield from _lock(schedule.domain, schedule.name)
    if existing is not None:
        _refuse_declared(existing, schedule.domain, schedule.name, "change it there")
        if existing.fingerprint != schedule.fingerprint() and not replaces:
            raise DuplicateScheduleError(
                f"schedule {schedule.name!r} already exists in domain {schedule.domain!r} with another "
                f"definition; use a new name, or replace it (replace=True, --replace)"
            )
    if (yield from store(schedule, is_declared=False)):
        action = "CREATE" if existing is None else "REPLACE"
        yield note_action(_subject(schedule.domain, schedule.name), action, what, details=schedule.definition())
    return (yield from read_records(schedule.domain, schedule.name, limit=1))[0]


@operation(atomic=True)
def pause(domain: str, name: str, what: OperatorAction) -> Steps[bool]:
    """Pause it: nothing fires. Returns False if it was paused already."""
    existing = yield from _known(domain, name)
    if existing.is_paused:
        return False
    yield Statement(
        b"UPDATE commandbus.schedule SET version = version + 1, paused_at = pg_catalog.clock_timestamp(), "
        b"paused_by = %(operator)s, pause_reason = %(reason)s WHERE domain = %(domain)s AND name = %(name)s",
        {"domain": domain, "name": name, "operator": what.operator, "reason": what.reason},
    )
    yield tell(domain)
    yield note_action(_subject(domain, name), "PAUSE", what)
    return True


@operation(atomic=True)
def resume(domain: str, name: str, what: OperatorAction) -> Steps[datetime | None]:
    """Resume it. Firings that were due during the pause are not made up for. Returns the next firing."""
    existing = yield from _known(domain, name)
    if not existing.is_paused:
        raise InvalidOperationError(f"schedule {name!r} of domain {domain!r} is not paused")
    next_at = existing.times.next_after(existing.now)
    yield Statement(
        b"UPDATE commandbus.schedule SET version = version + 1, paused_at = NULL, paused_by = NULL, "
        b"pause_reason = NULL, waiting_since = NULL, passed_at = %(now)s, next_at = %(next_at)s "
        b"WHERE domain = %(domain)s AND name = %(name)s",
        {"domain": domain, "name": name, "now": existing.now, "next_at": next_at},
    )
    yield tell(domain)
    yield note_action(_subject(domain, name), "RESUME", what)
    return next_at


@operation(atomic=True)
def delete(domain: str, name: str, what: OperatorAction) -> Steps[None]:
    """Delete a schedule that was created at run time. Commands that it has sent stay."""
    existing = yield from _known(domain, name)
    _refuse_declared(existing, domain, name, "remove it there, or pause it")
    yield Statement(
        b"DELETE FROM commandbus.schedule WHERE domain = %(domain)s AND name = %(name)s",
        {"domain": domain, "name": name},
    )
    yield note_action(_subject(domain, name), "DELETE", what)
    yield tell(domain)


@operation(atomic=True)
def run_now(domain: str, name: str, what: OperatorAction) -> Steps[SentCommand]:
    """Send its command now, even if it is paused or the last command is unfinished. Its firings stay as they
    are."""
    existing = yield from _known(domain, name)
    command_id = f"schedule:{name}@{text_of(existing.now)}/{secrets.token_hex(4)}"
    unchanged = Decision((existing.now,), existing.passed_at, existing.next_at, existing.waiting_since)
    decided = Decided(name, existing.version, unchanged, run_id=command_id)
    fired = yield from fire_steps(domain, [decided], even_paused=True)
    yield note_action(_subject(domain, name), "RUN_NOW", what, details={"command_id": command_id})
    id_ = fired[0].last
    assert id_ is not None, "the id is new"  # noqa: S101
    return SentCommand(domain, command_id, id_)


# --- looking -----------------------------------------------------------------------------------------------------


@operation(atomic=False)
def get(domain: str, name: str) -> Steps[ScheduleRecord | None]:
    """A schedule; None if there is none of this name."""
    found = yield from read_records(names.check_domain(domain), check_name(name), limit=1)
    return found[0] if found else None


@operation(atomic=False)
def list_schedules(domain: str | None, *, limit: int, cursor: str | None) -> Steps[Page[ScheduleRecord]]:
    """Schedules of a domain, or of all, by name."""
    if domain is not None:
        names.check_domain(domain)
    names.check_count(limit, "limit")
    found = yield from read_records(domain, None, limit=limit + 1, after=_place_of(cursor))
    return page.cut(found, limit, lambda item: f"{item.domain}/{item.name}")


@operation(atomic=False)
def next_firings(domain: str, name: str, *, count: int) -> Steps[list[datetime]]:
    """Its next firings by the server's clock, in UTC; also if it is paused."""
    names.check_count(count, "count", most=1000)
    found = yield from read_records(names.check_domain(domain), check_name(name), limit=1)
    if not found:
        raise ScheduleNotFoundError(domain, name)
    now: datetime = (yield Statement(b"SELECT pg_catalog.clock_timestamp()"))[0][0]
    return found[0].times.first_after(now, count)


@operation(atomic=False)
def list_actions(domain: str, name: str, *, limit: int) -> Steps[list[ControlAction]]:
    """Who did what to a schedule, newest first."""
    return (yield from actions_on([_subject(domain, name)], limit))


# --- rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule's row as far as operators' actions need it; `now` is the server's clock."""

    fingerprint: str
    is_declared: bool
    is_paused: bool
    version: int
    cron: str | None
    every: float | None
    timezone: str
    passed_at: datetime
    next_at: datetime | None
    waiting_since: datetime | None
    now: datetime

    @property
    def times(self) -> ScheduleTimes:
        return ScheduleTimes(self.cron, self.every, self.timezone)


def _lock(domain: str, name: str) -> Steps[_Row | None]:
    rows = yield Statement(
        b"SELECT fingerprint, is_declared, paused_at IS NOT NULL, version, cron, every, timezone, passed_at, "
        b"next_at, waiting_since, pg_catalog.clock_timestamp() "
        b"FROM commandbus.schedule WHERE domain = %(domain)s AND name = %(name)s FOR UPDATE",
        {"domain": domain, "name": name},
    )
    return _Row(*rows[0]) if rows else None


def _known(domain: str, name: str) -> Steps[_Row]:
    found = yield from _lock(domain, name)
    if found is None:
        raise ScheduleNotFoundError(domain, name)
    return found


def _refuse_declared(existing: _Row, domain: str, name: str, remedy: str) -> None:
    if existing.is_declared:
        raise InvalidOperationError(
            f"schedule {name!r} of domain {domain!r} is declared in the code of workers; {remedy}"
        )


def read_records(
    domain: str | None, name: str | None, *, limit: int, after: Sequence[str] | None = None
) -> Steps[list[ScheduleRecord]]:
    """Schedules, by domain and name."""
    after_domain, after_name = (None, None) if after is None else after
    rows = yield Statement(
        sql.text("schedules/records"),
        {"domain": domain, "name": name, "limit": limit, "after_domain": after_domain, "after_name": after_name},
    )
    records = [(ScheduleRecord(*row), msg_id) for *row, msg_id in rows]
    running = yield from running_of([(found.domain, msg_id) for found, msg_id in records])
    return [_record(found, is_running=(found.domain, msg_id) in running) for found, msg_id in records]


def _record(found: ScheduleRecord, *, is_running: bool) -> ScheduleRecord:
    status = None if found.last_status is None else CommandStatus(found.last_status)
    if is_running:
        status = CommandStatus.IN_PROGRESS
    next_at = None if found.is_paused else found.next_at
    return replace(found, last_status=status, next_at=next_at)


def _place_of(cursor: object) -> tuple[str, str] | None:
    if cursor is None:
        return None
    domain, slash, name = cursor.partition("/") if isinstance(cursor, str) else ("", "", "")
    if not slash:
        raise page.no_cursor(cursor)
    return names.check_domain(domain), check_name(name)


def _subject(domain: str, name: str) -> str:
    return f"schedule {domain}/{name}"
