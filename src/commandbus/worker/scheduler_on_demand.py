"""SchedulerOnDemand: the Scheduler of a worker with schedules. Its own code may declare some, or somebody creates
one for a domain of its."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commandbus.flow.operation import Operation
from commandbus.flow.schedules.exist import exist
from commandbus.worker.service_on_demand import ServiceOnDemand

if TYPE_CHECKING:
    from commandbus.worker.scheduler import Scheduler


class SchedulerOnDemand(ServiceOnDemand["Scheduler"]):
    """The scheduler of one worker, if it needs one."""

    def start(self) -> None:
        """Start it if this worker's code declares schedules. The owner of the worker calls it."""
        if self._spec.handlers.schedules_of(self._spec.domains):
            self._begin()

    def _is_needed(self) -> Operation[bool]:
        return exist(self._spec.domains)

    def _make(self) -> Scheduler:
        from commandbus.worker.scheduler import Scheduler

        spec = self._spec
        declared = spec.handlers.schedules_of(spec.domains)
        return Scheduler(self._settings, spec.domains, declared, on_error=spec.fail, name=spec.id)
