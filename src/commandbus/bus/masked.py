"""Buses for programs that show to people what they read: the command line and the console. What `run` and `follow`
return is masked by the setting `mask`. What is written is not."""

from __future__ import annotations

from typing import TypeVar

from commandbus.bus.asynchronous import AsyncCommandBus
from commandbus.bus.sync import CommandBus
from commandbus.flow.commands.query_filters import CommandQuery
from commandbus.flow.operation import Operation, Plan
from commandbus.model.mask import Mask
from commandbus.model.masked_records import RecordMask
from commandbus.settings import Settings

T = TypeVar("T")


class MaskedCommandBus(CommandBus):
    """A CommandBus whose answers are for people."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings=settings)
        self._record_mask = RecordMask(Mask(settings.mask))

    def _check_search(self, query: CommandQuery) -> None:
        self._record_mask.check_search(query.data)

    def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation; what it returns is masked."""
        return self._record_mask.show(super().run(operation, conn))  # type: ignore[no-any-return]

    def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other; what they return in the end is masked."""
        return self._record_mask.show(super().follow(plan, conn))  # type: ignore[no-any-return]


class AsyncMaskedCommandBus(AsyncCommandBus):
    """An AsyncCommandBus whose answers are for people."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings=settings)
        self._record_mask = RecordMask(Mask(settings.mask))

    def _check_search(self, query: CommandQuery) -> None:
        self._record_mask.check_search(query.data)

    async def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation; what it returns is masked."""
        return self._record_mask.show(await super().run(operation, conn))  # type: ignore[no-any-return]

    async def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other; what they return in the end is masked."""
        return self._record_mask.show(await super().follow(plan, conn))  # type: ignore[no-any-return]


def bus_for_people(settings: Settings) -> CommandBus:
    """A bus whose answers are masked, if there are rules."""
    return MaskedCommandBus(settings) if settings.mask else CommandBus(settings=settings)


def async_bus_for_people(settings: Settings) -> AsyncCommandBus:
    """The same for async code."""
    return AsyncMaskedCommandBus(settings) if settings.mask else AsyncCommandBus(settings=settings)
