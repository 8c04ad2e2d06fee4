"""ScheduleRepository and AsyncScheduleRepository: schedules at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from commandbus.bus.base import whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.flow.commands.operate import OperatorAction, operator_action
from commandbus.flow.operation import then
from commandbus.flow.schedules import operate
from commandbus.flow.schedules import timeline as firings
from commandbus.flow.schedules.operate import ScheduleRecord
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.model import names
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.durations import Duration
from commandbus.model.handle import given_by
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.schedule import MissedPolicy, OverlapPolicy, Schedule, check_name


class ScheduleRepository(Repository):
    """Schedules: `bus.schedules`, or `ScheduleRepository(pool)`."""

    def create(
        self,
        domain: str,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str | None = None,
        command_type: str | None = None,
        data: JsonValue = None,
        headers: Mapping[str, JsonValue] | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | None = None,
        on_exhausted: OnExhausted | None = None,
        missed: MissedPolicy = "run_once",
        overlap: OverlapPolicy = "allow",
        most: int = 100,
        priority: Priority | None = None,
        replace: bool = False,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> ScheduleRecord:
        """Create a schedule at run time; see `Schedule` for its options. It lives until somebody deletes it.

        If a schedule with the same name and definition exists, nothing changes, and it is returned. If its
        definition is different, it is replaced with `replace`; otherwise this raises DuplicateScheduleError.
        """
        data = self._bus._plain(NewCommand("schedule", data)).data
        schedule = Schedule(
            domain, name, cron, every, timezone, command_type, data, headers, correlation_id, reply_to,
            max_attempts, timeout, expires, on_exhausted, missed, overlap, most,
            priority,
        )  # fmt: skip
        creation = operate.create(schedule, _action(operator, reason), replaces=replace)
        return self._bus.run(creation, conn)

    def pause(
        self,
        domain: str,
        name: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> bool:
        """Pause a schedule: nothing fires until somebody resumes it. Returns False if it was paused already."""
        return self._bus.run(operate.pause(*_named(domain, name), _action(operator, reason)), conn)

    def resume(
        self,
        domain: str,
        name: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> datetime | None:
        """Resume it. Firings that were due during the pause are not made up for. Returns the next firing."""
        return self._bus.run(operate.resume(*_named(domain, name), _action(operator, reason)), conn)

    def delete(
        self,
        domain: str,
        name: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Delete a schedule that was created at run time. Commands that it has sent stay."""
        return self._bus.run(operate.delete(*_named(domain, name), _action(operator, reason)), conn)

    def run_now(
        self,
        domain: str,
        name: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> SentCommand:
        """Send its command now, even if it is paused or the last command is unfinished. Its firings stay as they
        are."""
        sending = operate.run_now(*_named(domain, name), _action(operator, reason))
        return self._bus.run(then(sending, lambda sent: given_by(self._bus, sent)), conn)

    def get(self, domain: str, name: str, *, conn: object = None) -> ScheduleRecord | None:
        """A schedule and its state; None if there is none of this name."""
        return self._bus.run(operate.get(domain, name), conn)

    def list(
        self, domain: str | None = None, *, limit: int = 100, cursor: str | None = None, conn: object = None
    ) -> Page[ScheduleRecord]:
        """Schedules of a domain, or of all, by name."""
        return self._bus.run(operate.list_schedules(domain, limit=limit, cursor=cursor), conn)

    def next_firings(self, domain: str, name: str, *, count: int = 5, conn: object = None) -> Sequence[datetime]:
        """Its next firings by the server's clock, in UTC, even while it is paused."""
        return self._bus.run(operate.next_firings(domain, name, count=count), conn)

    def timeline(
        self, domain: str | None = None, *, within: Duration = "1d", conn: object = None
    ) -> ScheduleTimeline:
        """The next firings of all schedules (or those of a domain) within some time, and those that were missed.
        At most 100 schedules, and 20 firings of each."""
        return self._bus.run(firings.timeline(domain, seconds=firings.check_within(within)), conn)


class AsyncScheduleRepository(AsyncRepository):
    """Schedules for async code: `bus.schedules`, or `AsyncScheduleRepository(pool)`. The same methods, awaited."""

    create = awaited(ScheduleRepository.create)
    pause = awaited(ScheduleRepository.pause)
    resume = awaited(ScheduleRepository.resume)
    delete = awaited(ScheduleRepository.delete)
    run_now = awaited(ScheduleRepository.run_now)
    get = awaited(ScheduleRepository.get)
    list = awaited(ScheduleRepository.list)
    next_firings = awaited(ScheduleRepository.next_firings)
    timeline = awaited(ScheduleRepository.timeline)


def _named(domain: str, name: str) -> tuple[str, str]:
    return names.check_domain(domain), check_name(name)


def _action(operator: str | None, reason: str | None) -> OperatorAction:
    return operator_action(operator or whoami(), reason)
