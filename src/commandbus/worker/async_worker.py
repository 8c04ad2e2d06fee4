"""AsyncWorker: a worker inside an application that owns an event loop: the same worker, with threads of its own.

    async with AsyncWorker(handlers, domains=["orders"]):
        await serve()

Nothing of it runs on the application's loop, so handlers and that loop cannot delay each other. With
`on_callers_loop=True` async handlers run on that loop, where they can use the application's clients. Claiming,
leases, deadlines and outcomes still have threads of their own, so they hold whatever the loop does. But nobody can
end code that blocks a loop: see `AsyncWorker`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from commandbus.model.durations import Duration
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.health import HealthStatus
from commandbus.worker.stop_report import StopReport
from commandbus.worker.worker import Worker

T = TypeVar("T")


class AsyncWorker:
    """Takes the arguments of `Worker`. `worker` is the worker inside.

    `on_callers_loop=True` runs async handlers (and awaitables that sync handlers return) on the event loop that
    starts the worker. A handler that awaits is canceled at its deadline, as everywhere. One that blocks blocks the
    application, until it lets go. Its attempt is given up at its deadline and grace all the same: it is settled as
    stuck, its lease is not renewed any more, and nothing it does later is saved. Attempts beside it are tried
    again, not charged. No async handler starts before the loop runs again; sync handlers go on.
    """

    def __init__(self, handlers: HandlerRegistry, *, on_callers_loop: bool = False, **options: Any) -> None:
        self.worker = Worker(handlers, **options)
        self._on_callers_loop = on_callers_loop

    @property
    def health_status(self) -> HealthStatus:
        """The health of the worker."""
        return self.worker.health_status

    @property
    def state(self) -> str:
        """STARTING, ACTIVE, PAUSED (by an operator), DRAINING, EXITING, or STOPPED."""
        return self.worker.state

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.worker.is_running:  # otherwise it was asked to stop before it started
            await self.stop()

    async def start(self) -> bool:
        """Start, and wait for the database if it is away; a start that is canceled is given up."""
        self._choose_loop()
        return await self._in_thread(self.worker.start)

    async def run(self) -> StopReport:
        """Start, and run until `stop`, `worker.request_stop` or a limit ends it, or this task is canceled: then
        it stops in order before the cancellation goes on."""
        self._choose_loop()
        return await self._in_thread(self.worker.run)

    async def stop(self, wait: Duration | None = None) -> StopReport:
        """Stop in order, within `wait` (default: shutdown_timeout)."""
        return await self._in_thread(lambda: self.worker.stop(wait))

    def _choose_loop(self) -> None:
        self.worker._callers_loop = asyncio.get_running_loop() if self._on_callers_loop else None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """In a thread of its own: the few threads of the loop's executor belong to the application."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(done.set_result, result)

        threading.Thread(target=run, name=f"{self.worker.id}-run", daemon=True).start()
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self.worker.request_stop("the task was canceled")
            await asyncio.wait([done])
            raise


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    done.set_exception(error)
    done.exception()  # the result is read here, because a canceled caller does not read it
