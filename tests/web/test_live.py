"""The one look at the fleet that all watchers share."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

from commandbus.web.live import Watched


async def first_of(watched: Watched[int]) -> int | Exception:
    async with aclosing(watched.values()) as values:
        return await anext(values)


async def nobody_reads(watched: Watched[int]) -> None:
    async with asyncio.timeout(60):
        while watched._reader is not None:  # noqa: ASYNC110 - it ends by itself
            await asyncio.sleep(0)


def test_who_comes_after_a_pause_begins_with_what_is_now() -> None:
    """Not with what the last watcher saw, which may be of yesterday."""
    numbers = itertools.count(1)

    async def read() -> int:
        return next(numbers)

    async def watch_twice() -> None:
        watched = Watched(read, seconds=0.0)
        assert await first_of(watched) == 1
        await nobody_reads(watched)
        now = next(numbers)
        assert await first_of(watched) == now + 1

    asyncio.run(watch_twice())


def test_who_comes_after_an_outage_is_not_told_of_it() -> None:
    answers = itertools.chain([RuntimeError("away")], itertools.repeat(None))

    async def read() -> int:
        error = next(answers)
        if error is not None:
            raise error
        return 1

    async def watch_twice() -> None:
        watched = Watched(read, seconds=0.0)
        assert isinstance(await first_of(watched), RuntimeError)
        await nobody_reads(watched)
        assert await first_of(watched) == 1

    asyncio.run(watch_twice())
