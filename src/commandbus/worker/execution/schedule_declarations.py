"""Schedules that a registry declares: a part of HandlerRegistry.

    @handlers.schedule("orders", "nightly", cron="30 2 * * *", timezone="Europe/Berlin")
    def nightly(command, ctx): ...

`Schedule` is imported with the first of them: most registries have none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from commandbus.errors import ConfigurationError
from commandbus.model.durations import Duration
from commandbus.model.json_values import JsonValue
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.worker.execution.handler_options import AllHandlerOptions, HandlerOptions

if TYPE_CHECKING:
    from commandbus.model.schedule import MissedPolicy, OverlapPolicy, Schedule

F = TypeVar("F", bound=Callable[..., object])


class ScheduleDeclarations:
    """Schedules by (domain, name). Filled at import time, read by workers."""

    def __init__(self) -> None:
        self._schedules: dict[tuple[str, str], Schedule] = {}

    @abstractmethod
    def get(self, domain: str, command_type: str) -> Any: ...

    @abstractmethod
    def register(
        self,
        domain: str,
        command_type: str,
        function: Callable[..., object],
        **options: Unpack[AllHandlerOptions],
    ) -> object: ...

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules that were declared here."""
        return list(self._schedules.values())

    def schedules_of(self, domains: Container[str]) -> list[Schedule]:
        """Those of some domains."""
        return [item for item in self.schedules if item.domain in domains]

    def declare_schedule(self, schedule: Schedule) -> Schedule:
        """Declare a schedule for a command type that has its own handler. It fires while workers run with this
        registry."""
        from commandbus.model.schedule import Schedule  # most registries have none

        if not isinstance(schedule, Schedule):
            raise TypeError(f"a schedule must be a Schedule(domain, name, cron=…), not {schedule!r:.80}")
        key = schedule.domain, schedule.name
        if self._schedules.setdefault(key, schedule) != schedule:
            raise ConfigurationError(
                f"schedule {schedule.name!r} of domain {schedule.domain!r} is declared twice, differently: by "
                f"{self._schedules[key].times.text} and {schedule.times.text}; give one of them another name"
            )
        return schedule

    def schedule(
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
        **options: Unpack[HandlerOptions],
    ) -> Callable[[F], F]:
        """Declare a schedule, and register the decorated function as the handler of its commands.

        See `Schedule`; `options` are those of `handler`. A function that is registered for that command type
        already keeps its own.
        """
        from commandbus.model.schedule import Schedule

        declared = Schedule(
            domain, name, cron, every, timezone, command_type, data, headers, correlation_id, reply_to,
            max_attempts, timeout, expires, on_exhausted, missed, overlap, most,
            priority,
        )  # fmt: skip

        def register(function: F) -> F:
            command_type = str(declared.command_type)
            existing = self.get(domain, command_type)
            if existing is None or existing.written != function:
                self.register(domain, command_type, function, timeout=timeout, **options)
            self.declare_schedule(declared)
            return function

        return register
