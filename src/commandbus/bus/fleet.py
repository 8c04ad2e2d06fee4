"""The fleet on the bus: what slots run, the last hour, and questions to workers; the methods of both shells."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from commandbus.bus.base import BusBase, whoami
from commandbus.bus.one_body import awaited
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Operation, then
from commandbus.lazy import lazy
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.commands import operate
    from commandbus.flow.workers import figures, requests, slots
    from commandbus.flow.workers import post_mortems as dead
    from commandbus.flow.workers.post_mortems import PostMortem
    from commandbus.flow.workers.requests import Asked, LiveStack, Wish
    from commandbus.flow.workers.slots import WorkerSlots
    from commandbus.model.minute_figures import HourFigures
else:
    operate = lazy("commandbus.flow.commands.operate")
    figures = lazy("commandbus.flow.workers.figures")
    requests = lazy("commandbus.flow.workers.requests")
    dead = lazy("commandbus.flow.workers.post_mortems")
    slots = lazy("commandbus.flow.workers.slots")

T = TypeVar("T")


class FleetMethods(BusBase):
    """What CommandBus can tell of the fleet."""

    @abstractmethod
    def run(self, operation: Operation[T], conn: object = None) -> T: ...

    def watch_slots(self, watch: Duration = 10) -> Page[WorkerSlots]:
        """What the slots of live workers run. Workers publish that only while somebody watches, so the first call
        may return nothing: it asks them to publish for as long as `watch` says (at most a minute). They do so
        within a second; call this again and again."""
        return self.run(then(slots.watch_slots(_seconds(watch, "watch")), Page))

    def last_hour(self, *domains: str) -> Page[HourFigures]:
        """The last sixty minutes of these domains or of all: what was settled, what was ready, how long commands
        waited, and when workers of another version came."""
        return self.run(then(figures.last_hour(domains or None), Page))

    def post_mortems(self, *, limit: int = 50) -> Page[PostMortem]:
        """The last workers that died: how, and which attempts were charged for it and which were not."""
        return self.run(then(dead.post_mortems(limit=limit), Page))

    def request_stack(self, domain: str, command_id: str, *, wait: Duration = 5) -> LiveStack:
        """Where a running command is at this moment: files, lines and functions. Its worker is asked, and has so
        long to answer. A command that does not run is no error: `problem` says so."""
        seconds = _seconds(wait)
        asked = self.run(requests.ask_for_stack(domain, command_id))
        found = self._answer(asked, seconds)
        return requests.live_stack(domain, command_id, asked, found, seconds)

    def recycle_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> None:
        """Ask a worker to claim nothing more, and to end when what runs has ended. Its supervisor starts a
        replacement at once. Raises InvalidOperationError if the worker is not alive, has no supervisor, or does
        not answer in time."""
        self._ask_worker(worker, "RECYCLE", wait, operator, reason)

    def pause_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> bool:
        """Pause one worker: it claims nothing more, gives back what has not started, and finishes what runs.
        Returns False if it was paused already. The pause ends with `resume_worker`, or with the worker: one that
        is started again is not paused. Raises InvalidOperationError if the worker is not alive, drains, or does
        not answer in time."""
        return self._ask_worker(worker, "PAUSE", wait, operator, reason)

    def resume_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> bool:
        """Let a paused worker claim again. Returns False if it was not paused. Raises InvalidOperationError as
        `pause_worker` does."""
        return self._ask_worker(worker, "RESUME", wait, operator, reason)

    def _ask_worker(
        self, worker: str, wish: Wish, wait: Duration, operator: str | None, reason: str | None
    ) -> bool:
        seconds = _seconds(wait)
        action = operate.operator_action(operator or whoami(), reason)
        asked = self.run(requests.ask_worker(worker, wish, action))
        return requests.complied(wish, asked, self._answer(asked, seconds), seconds)

    def _answer(self, asked: Asked, wait: float) -> Mapping[str, Any] | None:
        if asked.id is None:
            return None
        for pause in requests.pauses(wait):
            time.sleep(pause)
            if (found := self.run(requests.find_answer(asked))) is not None:
                return found
        return None


class AsyncFleetMethods(BusBase):
    """What AsyncCommandBus can tell of the fleet."""

    @abstractmethod
    async def run(self, operation: Operation[T], conn: object = None) -> T: ...

    watch_slots = awaited(FleetMethods.watch_slots)
    last_hour = awaited(FleetMethods.last_hour)
    post_mortems = awaited(FleetMethods.post_mortems)

    async def request_stack(self, domain: str, command_id: str, *, wait: Duration = 5) -> LiveStack:
        """Where a running command is at this moment: files, lines and functions. Its worker is asked, and has so
        long to answer. A command that does not run is no error: `problem` says so."""
        seconds = _seconds(wait)
        asked = await self.run(requests.ask_for_stack(domain, command_id))
        found = await self._answer(asked, seconds)
        return requests.live_stack(domain, command_id, asked, found, seconds)

    async def recycle_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> None:
        """Ask a worker to claim nothing more, and to end when what runs has ended. Its supervisor starts a
        replacement at once. Raises InvalidOperationError if the worker is not alive, has no supervisor, or does
        not answer in time."""
        await self._ask_worker(worker, "RECYCLE", wait, operator, reason)

    async def pause_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> bool:
        """Pause one worker: it claims nothing more, gives back what has not started, and finishes what runs.
        Returns False if it was paused already. The pause ends with `resume_worker`, or with the worker: one that
        is started again is not paused. Raises InvalidOperationError if the worker is not alive, drains, or does
        not answer in time."""
        return await self._ask_worker(worker, "PAUSE", wait, operator, reason)

    async def resume_worker(
        self, worker: str, *, wait: Duration = 5, operator: str | None = None, reason: str | None = None
    ) -> bool:
        """Let a paused worker claim again. Returns False if it was not paused. Raises InvalidOperationError as
        `pause_worker` does."""
        return await self._ask_worker(worker, "RESUME", wait, operator, reason)

    async def _ask_worker(
        self, worker: str, wish: Wish, wait: Duration, operator: str | None, reason: str | None
    ) -> bool:
        seconds = _seconds(wait)
        action = operate.operator_action(operator or whoami(), reason)
        asked = await self.run(requests.ask_worker(worker, wish, action))
        return requests.complied(wish, asked, await self._answer(asked, seconds), seconds)

    async def _answer(self, asked: Asked, wait: float) -> Mapping[str, Any] | None:
        if asked.id is None:
            return None
        for pause in requests.pauses(wait):
            await asyncio.sleep(pause)
            if (found := await self.run(requests.find_answer(asked))) is not None:
                return found
        return None


def _seconds(value: Duration, name: str = "wait") -> float:
    return min(60.0, parse_seconds(value, name=name, error=InvalidCommandError))
