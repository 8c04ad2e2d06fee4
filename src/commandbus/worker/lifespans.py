"""RunningLifespans: runs what a registry declares around the life of a worker (`on_start`, `on_stop`, `lifespan`).

    start   in their order: sync functions in the thread that starts the worker, async ones on its event loop
    stop    in reverse, within a time limit; what hangs is left behind, and what fails is logged
    renew   async functions start again on the event loop that replaces a blocked one

If one fails at the start, those that had started are stopped again.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from commandbus.clock import monotonic
from commandbus.errors import WorkerStartError
from commandbus.logger import safe_logger
from commandbus.worker.execution.lifespan_declarations import Lifespan, Role, WorkerState

logger = safe_logger("commandbus.worker")

LOOK_SECONDS: Final = 0.1
UNDO_SECONDS: Final = 5.0  # how long those that have started may take to stop, if a later one fails
LEAST_SECONDS: Final = 0.05
OnLoop = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]


class RunningLifespans:
    """The functions of one process. `on_loop` runs a coroutine on the event loop of its async handlers."""

    def __init__(self, declared: Sequence[Lifespan], on_loop: OnLoop, *, is_child: bool = False) -> None:
        self.state = WorkerState(is_child=is_child)
        self._declared = declared
        self._on_loop = on_loop
        self._started: list[tuple[Lifespan, Any]] = []  # with its generator, if it is one
        self._left: list[Any] = []  # generators of a loop that was abandoned: they can never be closed

    @property
    def is_empty(self) -> bool:
        """Is there nothing to run?"""
        return not self._declared

    def start(self, *, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Run those of the start. Raises WorkerStartError if one fails. False if the worker was asked to stop
        meanwhile: then what had started is stopped again."""
        for item in self._declared:
            if is_stopping():
                self.stop(UNDO_SECONDS)
                return False
            try:
                self._begin(item, is_stopping)
            except _StopAskedError:
                self.stop(UNDO_SECONDS)
                return False
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                logger.exception("%s failed", item.name)
                self.stop(UNDO_SECONDS)
                raise start_error(item, error) from error
        return True

    def _begin(self, item: Lifespan, is_stopping: Callable[[], bool]) -> None:
        if item.role is Role.STOP:
            self._started.append((item, None))
        elif item.is_async:
            self._await(self._begin_async(item), is_stopping)
        else:
            steps = item.function(self.state)
            if item.role is Role.AROUND:
                next(steps)
            self._started.append((item, steps))

    async def _begin_async(self, item: Lifespan) -> None:
        if item.role is Role.AROUND:
            steps = item.function(self.state)
            await anext(steps)
        else:
            steps = await item.function(self.state)
        self._started.append((item, steps))

    def _await(self, coroutine: Coroutine[Any, Any, Any], is_stopping: Callable[[], bool]) -> None:
        running = self._on_loop(coroutine)
        while not wait([running], LOOK_SECONDS).done:
            if is_stopping():
                running.cancel()
                raise _StopAskedError
        running.result()

    async def renew(self) -> None:
        """On a new event loop, before it runs an attempt: what was made on the old one cannot be used here."""
        for item in self._declared:
            if item.is_async and item.role is not Role.STOP:
                self._left += [steps for known, steps in self._started if known is item]
                self._started = [each for each in self._started if each[0] is not item]
                try:
                    await self._begin_async(item)
                except Exception as error:
                    raise start_error(item, error) from error

    def stop(self, seconds: float) -> None:
        """Run those of the stop, in reverse, within this time. Raises nothing."""
        until = monotonic() + seconds
        while self._started:
            item, steps = self._started.pop()
            if item.role is Role.START:
                continue
            try:
                self._end(item, steps, until)
            except _LateError:
                logger.error("%s has not ended within %.3g s: it is left behind", item.name, seconds)  # noqa: TRY400
            except BaseException:
                logger.exception("%s failed", item.name)

    def _end(self, item: Lifespan, steps: Any, until: float) -> None:
        if item.is_async:
            ending = self._on_loop(_end_async(item, steps, self.state))
        else:
            ending = Future()
            threading.Thread(target=_end_sync, args=(item, steps, self.state, ending), daemon=True).start()
        if not wait([ending], max(LEAST_SECONDS, until - monotonic())).done:
            if item.is_async:  # a thread cannot be canceled
                ending.cancel()
            raise _LateError
        ending.result()


class _StopAskedError(Exception):
    """The worker was asked to stop while it started."""


class _LateError(Exception):
    """The time for the stop is over."""


def _end_sync(item: Lifespan, steps: Any, state: WorkerState, done: Future[None]) -> None:
    """In a thread of its own, so that it cannot hold up the end of the worker."""
    try:
        if item.role is Role.STOP:
            item.function(state)
        else:
            _finish(steps)
    except BaseException as error:  # noqa: BLE001 - the worker's thread logs it
        done.set_exception(error)
    else:
        done.set_result(None)


def _finish(steps: Any) -> None:
    try:
        next(steps)
    except StopIteration:
        return
    raise RuntimeError("it has reached a second `yield`; a lifespan has one")


async def _end_async(item: Lifespan, steps: Any, state: WorkerState) -> None:
    if item.role is Role.STOP:
        await item.function(state)
        return
    try:
        await anext(steps)
    except StopAsyncIteration:
        return
    raise RuntimeError("it has reached a second `yield`; a lifespan has one")


def start_error(item: Lifespan, error: BaseException) -> WorkerStartError:
    """The error of a worker whose start failed: which function, at which line, and why."""
    if isinstance(error, StopIteration | StopAsyncIteration):
        return WorkerStartError(f"{item.name} ended without a `yield`, so the worker does not start")
    if isinstance(error, asyncio.CancelledError):
        return WorkerStartError(f"{item.name} was canceled, so the worker does not start")
    return WorkerStartError(
        f"{item.name} failed{_place(item, error)}, so the worker does not start: {type(error).__name__}: {error}"
    )


def _place(item: Lifespan, error: BaseException) -> str:
    """The last line of the function's own file, or else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(item.function, "__code__", None), "co_filename", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
