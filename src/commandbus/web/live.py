"""One look at the fleet for all who watch: however many pages are open, the database is asked once per interval.

The look goes on only while somebody watches. Each watcher gets the newest state when it is ready for it, so a slow
one misses states, and nothing piles up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, TypeVar

from commandbus.logger import safe_logger

logger = safe_logger("commandbus.console")

T = TypeVar("T")
SECONDS: Final = 2.0
MOST_WATCHERS: Final = 200


class TooManyWatchersError(Exception):
    """So many pages are open that one more would be too many."""


class Watched(Generic[T]):
    """A value that is read again and again while somebody watches it."""

    def __init__(self, read: Callable[[], Awaitable[T]], *, seconds: float = SECONDS) -> None:
        self._read = read
        self._seconds = seconds
        self._changed = asyncio.Condition()
        self._newest: T | None = None
        self._error: Exception | None = None
        self._number = 0
        self._watchers = 0
        self._reader: asyncio.Task[None] | None = None

    async def values(self) -> AsyncGenerator[T | Exception, None]:
        """The value from now on, whenever it was read anew; the error instead, if it could not be read."""
        if self._watchers >= MOST_WATCHERS:
            raise TooManyWatchersError
        self._watchers += 1
        seen = 0
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_on())
            seen = self._number  # what was read for earlier watchers is old by now
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(partial(self._is_newer, seen))
                    seen = self._number
                    value = self._error if self._error is not None else self._newest
                if value is not None:
                    yield value
        finally:
            self._watchers -= 1

    def _is_newer(self, seen: int) -> bool:
        return self._number > seen

    async def close(self) -> None:
        """Read no more."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read_on(self) -> None:
        while self._watchers:
            try:
                self._newest, self._error = await self._read(), None
            except Exception as error:  # noqa: BLE001 - the watchers are told, and the next look may succeed
                logger.warning("the console cannot read the fleet's state: %s", error)
                self._error = error
            async with self._changed:
                self._number += 1
                self._changed.notify_all()
            await asyncio.sleep(self._seconds)
        self._reader = None
