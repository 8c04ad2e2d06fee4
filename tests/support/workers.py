"""Workers for tests: short settings, and handlers whose one body runs in either lane.

A body is an `async def` that awaits only `done(…)` and `opened(…)` and enters `either(…)`: in the sync lane these
never suspend, so the body runs to its end in one go on the slot's thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from commandbus import HandlerRegistry, RetryPolicy, Settings

Body = Callable[[Any, Any], Awaitable[Any]]
BUSY = "given back before it had started: the slots of its worker are busy"
"""The history's text of an attempt that waited before busy slots, and is another worker's to take."""
AT_ONCE = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)


def quick_settings(database_url: str, **changes: Any) -> Settings:
    """Settings of a worker that looks often, so that no test depends on a notification it does not test.

    Breakers are off: what hangs in a test would make later commands of its type wait.
    """
    chosen: dict[str, Any] = {
        "database_url": database_url,
        "concurrency": 4,
        "poll_interval": 0.1,
        "backoff_schedule": (0.0,),
        "backoff_jitter": 0.0,
        "shutdown_timeout": 10.0,
        "cancel_grace": 1.0,
        "breakers_enabled": False,
    }
    return Settings(**chosen | changes)


def short_lease(**changes: Any) -> dict[str, Any]:
    """A lease of a second and a half, and what must be shorter than it."""
    return {"visibility_timeout": 1.5, "statement_timeout": 1.0, "cancel_grace": 0.5} | changes


def add(
    handlers: HandlerRegistry, lane: str, command_type: str, body: Body, *, domain: str = "orders", **options: Any
) -> None:
    """Register one body for the sync or the async lane."""
    if lane == "async":

        async def handle(command: Any, ctx: Any) -> Any:
            return await body(command, ctx)

        handlers.register(domain, command_type, handle, **options)
    else:
        handlers.register(domain, command_type, lambda command, ctx: _in_one_go(body(command, ctx)), **options)


def _in_one_go(body: Any) -> Any:
    try:
        body.send(None)
    except StopIteration as stop:
        return stop.value
    body.close()
    raise AssertionError("a body in the sync lane must not suspend")


async def done(value: Any) -> Any:
    """What a call of either lane answers."""
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def either(block: Any) -> AsyncIterator[Any]:
    """A context manager of either lane."""
    if hasattr(block, "__aenter__"):
        async with block as entered:
            yield entered
    else:
        with block as entered:
            yield entered


async def opened(go_on: threading.Event, seconds: float = 20.0) -> None:
    """Wait for a limit client without blocking an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        assert go_on.wait(seconds), "it was not told to go on"
        return
    deadline = monotonic() + seconds
    while not go_on.is_set():
        assert monotonic() < deadline, "it was not told to go on"
        await asyncio.sleep(0.005)
