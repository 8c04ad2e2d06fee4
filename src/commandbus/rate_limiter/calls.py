"""Calls of an external API: limited, bounded in time, tried again after a 429. For sync and async callers.

A sync call cannot be ended from outside (a signal reaches the main thread only, and no call in C). So it runs in a
thread of its own, and who waits for it goes on when the time is up; the thread ends with its call.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from asyncio import sleep as sleep_async
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import cache
from time import sleep
from types import TracebackType
from typing import Any, Final

from commandbus.errors import ApiTimeoutError, ConfigurationError, RateLimitError
from commandbus.limits.with_block import CallTimeout, verdict
from commandbus.logger import safe_logger
from commandbus.model.api_errors import told_seconds
from commandbus.rate_limiter.semaphore import (
    ACQUIRE_SECONDS,
    MAX_CONCURRENT_CALLS,
    AsyncRedisSemaphore,
    RedisSemaphore,
    check_count,
    check_seconds,
)
from commandbus.settings import load_settings

logger = safe_logger("commandbus.limits")

CHUNK_TIMEOUT_SECONDS: Final = 60
BACKOFF_BASE: Final = 2
BACKOFF_MAX: Final = 30


def calculate_backoff(attempt: int) -> float:
    """Seconds to wait after the attempt-th refusal, counted from 1: 2, 4, 8, 16, then 30."""
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
        raise ValueError(f"attempt must be a whole number, counted from 1, not {attempt!r:.80}")
    return float(min(BACKOFF_BASE ** min(attempt, 32), BACKOFF_MAX))


class RateLimitContext:
    """What a rate-limited call knows of its back-off."""

    def __init__(self, semaphore: RedisSemaphore | AsyncRedisSemaphore) -> None:
        self.semaphore = semaphore
        self.backoff_seconds: float = 0

    def record_success(self) -> None:
        """The call went well: there is no back-off."""
        self.backoff_seconds = 0

    def calculate_backoff(self, attempt: int) -> float:
        """Seconds to wait after the attempt-th refusal, counted from 1."""
        self.backoff_seconds = calculate_backoff(attempt)
        return self.backoff_seconds


class rate_limited_api_call:  # noqa: N801 - used as a function is: async with rate_limited_api_call() as limiter
    """A call that holds a permit of `name` and takes `timeout` seconds at most: `async with`, or `with`.

    It waits 30 s for a permit (SlotTimeoutError, which is a RateLimitError). An async block is canceled when its
    time is up; a sync one cannot be, and raises ApiTimeoutError at its end. The permit is then kept until its
    lease ends, unless the call has come back: it may still run at the other end. Redis is the one of the settings
    (`COMMANDBUS_REDIS_URL`), or of `redis_client`.
    """

    def __init__(
        self,
        name: str = "docai",
        timeout: float = CHUNK_TIMEOUT_SECONDS,
        *,
        redis_client: Any = None,
        max_concurrent: int = MAX_CONCURRENT_CALLS,
    ) -> None:
        self._name = name
        self._seconds = check_seconds("timeout", timeout)
        client = _client_of_settings() if redis_client is None else redis_client
        self._sync = RedisSemaphore(client, name, max_concurrent)
        self._async = AsyncRedisSemaphore(client, name, max_concurrent)
        self._timer: asyncio.Timeout | None = None
        self._timeout: CallTimeout | None = None

    def __enter__(self) -> RateLimitContext:
        if not self._sync.acquire():
            raise self._sync._timed_out(ACQUIRE_SECONDS)
        self._begin()
        return RateLimitContext(self._sync)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late, keeps = self._judge(error)
        if keeps:
            self._sync.abandon()
        else:
            self._sync.release()
        if late is not None:
            raise late from error

    async def __aenter__(self) -> RateLimitContext:
        if not await self._async.acquire():
            raise self._async._timed_out(ACQUIRE_SECONDS)
        self._timer = asyncio.timeout(self._begin().seconds)
        await self._timer.__aenter__()
        return RateLimitContext(self._async)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None  # noqa: S101 - made as it was entered
        assert self._timeout is not None  # noqa: S101 - likewise
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError:
            await self._async.abandon()
            raise ApiTimeoutError(self._timeout.text) from error
        if error is not None and verdict(error)[2]:
            await self._async.abandon()
        else:
            await self._async.release()

    def _begin(self) -> CallTimeout:
        self._timeout = CallTimeout(self._name, self._seconds, "timeout")
        return self._timeout

    def _judge(self, error: BaseException | None) -> tuple[ApiTimeoutError | None, bool]:
        """Is the call late, and may it still be under way at the other end? One that has come back is not."""
        assert self._timeout is not None  # noqa: S101 - made as it was entered
        late = ApiTimeoutError(self._timeout.text)
        if error is None:
            return late if self._timeout.is_over else None, False
        answer, _, keeps = verdict(error)
        is_late = not isinstance(error, ApiTimeoutError) and self._timeout.explains(error, answer)
        return (late, True) if is_late else (None, keeps)


def process_chunk_with_timeout(
    chunk_bytes: bytes, ocr_processor: Any, timeout: float = CHUNK_TIMEOUT_SECONDS
) -> Any:
    """The result of `ocr_processor.process_sync(chunk_bytes)`, or TimeoutError after so many seconds.

    In any thread. `ocr_processor` may also have an async `process`, or be a function; what is awaitable is awaited
    and, when the time is up, canceled.
    """
    done: Future[Any] = Future()
    timeout = check_seconds("timeout", timeout)
    call, context = _call_of(ocr_processor), contextvars.copy_context()

    def run() -> None:
        try:
            done.set_result(context.run(_run_to_end, call, chunk_bytes, timeout))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            done.set_exception(error)

    threading.Thread(target=run, name="commandbus-api-call", daemon=True).start()
    try:
        return done.result(timeout)
    except TimeoutError:
        if done.done():
            raise  # the call's own
        raise _timed_out(timeout) from None


async def process_with_retry(
    chunk_bytes: bytes, ocr_processor: Any, max_attempts: int = 4, *, timeout: float = CHUNK_TIMEOUT_SECONDS
) -> Any:
    """The result of a call; after a RateLimitError it is tried again, `max_attempts` times in all.

    It waits 2, 4, 8, 16, then 30 seconds, or as long as the API says (`retry_after`), and never holds up the loop.
    """
    check_count("max_attempts", max_attempts)
    for attempt in range(1, max_attempts):
        try:
            return await _process(chunk_bytes, ocr_processor, timeout)
        except RateLimitError as error:
            await sleep_async(_pause_after(attempt, error))
    return await _process(chunk_bytes, ocr_processor, timeout)


def process_with_retry_sync(
    chunk_bytes: bytes, ocr_processor: Any, max_attempts: int = 4, *, timeout: float = CHUNK_TIMEOUT_SECONDS
) -> Any:
    """The same for sync code."""
    check_count("max_attempts", max_attempts)
    for attempt in range(1, max_attempts):
        try:
            return process_chunk_with_timeout(chunk_bytes, ocr_processor, timeout)
        except RateLimitError as error:
            sleep(_pause_after(attempt, error))
    return process_chunk_with_timeout(chunk_bytes, ocr_processor, timeout)


async def _process(chunk_bytes: bytes, ocr_processor: Any, timeout: float) -> Any:
    call, timeout = _call_of(ocr_processor), check_seconds("timeout", timeout)
    if inspect.iscoroutinefunction(call):
        return await _within(timeout, call(chunk_bytes))
    return await asyncio.to_thread(process_chunk_with_timeout, chunk_bytes, ocr_processor, timeout)


def _run_to_end(call: Callable[[bytes], Any], chunk_bytes: bytes, timeout: float) -> Any:
    result = call(chunk_bytes)
    if not inspect.isawaitable(result):
        return result

    async def finish() -> Any:
        return await _within(timeout, result)

    return asyncio.run(finish())


async def _within(timeout: float, result: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(timeout) as bound:
            return await result
    except TimeoutError as error:
        raise (_timed_out(timeout) if bound.expired() else error) from None


def _call_of(ocr_processor: Any) -> Callable[[bytes], Any]:
    for name in ("process_sync", "process"):
        found = getattr(ocr_processor, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    if callable(ocr_processor):
        return ocr_processor  # type: ignore[no-any-return]
    raise TypeError(f"{type(ocr_processor).__name__} has neither process_sync nor process, and is no function")


def _pause_after(attempt: int, error: RateLimitError) -> float:
    asked = told_seconds(error.retry_after)
    pause = calculate_backoff(attempt) if asked is None else asked
    logger.warning("rate limited, attempt %d: again in %g s (%s)", attempt, pause, error)
    return pause


def _timed_out(timeout: float) -> ApiTimeoutError:
    return ApiTimeoutError(f"Chunk processing timed out after {timeout:g}s (timeout)")


@cache
def _client_of_settings() -> Any:
    """One for the whole program, as long as it lives."""
    url = load_settings().redis_url
    if url is None:
        raise ConfigurationError(
            "rate_limited_api_call needs Redis: set COMMANDBUS_REDIS_URL, or pass redis_client"
        )
    import redis

    return redis.Redis.from_url(url)
