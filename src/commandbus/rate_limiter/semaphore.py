"""RedisSemaphore and AsyncRedisSemaphore: a permit of a shared limit, for any program that has a Redis client."""

from __future__ import annotations

import asyncio
import secrets
import threading
from types import TracebackType
from typing import Any, Final, Self

from commandbus.clock import monotonic
from commandbus.errors import InvalidOperationError, LimitTimeoutError, RateLimitError, TransientCommandError
from commandbus.logger import safe_logger
from commandbus.model.durations import parse_seconds
from commandbus.model.limit import Limit, check_limit_name
from commandbus.rate_limiter.shared_redis import SemaphoreValues, SharedRedis, check_client, shared_redis
from commandbus.settings import load_settings

logger = safe_logger("commandbus.limits")

MAX_CONCURRENT_CALLS: Final = 5
MOST: Final = 1_000_000
ACQUIRE_SECONDS: Final = 30.0
LEAST_PAUSE_SECONDS: Final = 0.001


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """The number, or what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{name} must be a whole number from {least} to {MOST}, not {value!r:.80}")
    return value


def check_seconds(name: str, value: Any) -> float:
    """The seconds, more than 0, or what is wrong with them."""
    seconds = parse_seconds(value, name=name)
    if seconds < LEAST_PAUSE_SECONDS:
        raise ValueError(f"{name} must be at least a millisecond, not {value!r:.80}")
    return seconds


class SlotTimeoutError(RateLimitError, LimitTimeoutError):
    """No permit became free in time; nobody was called. It is a RateLimitError for those who catch that; a worker
    does not take it for a 429."""

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        TransientCommandError.__init__(self, message, code="LIMIT_TIMEOUT")
        self.retry_after = None
        self.limit = limit


class _Semaphore:
    """What both twins have: the values, and one permit at a time."""

    def __init__(
        self,
        redis_client: Any,
        name: str,
        max_concurrent: int = MAX_CONCURRENT_CALLS,
        ttl: float = 120,
        *,
        environment: str | None = None,
        fallback: int = 0,
    ) -> None:
        check_client(redis_client)
        environment = load_settings().environment if environment is None else environment
        # A limit of the same name has the same rules: what it may be, this may be.
        limit = Limit(
            check_limit_name(name), check_count("max_concurrent", max_concurrent), environment=environment
        )
        self.redis = redis_client
        self._values = SemaphoreValues(limit.name, environment, max_concurrent, check_seconds("ttl", ttl))
        self._fallback = check_count("fallback", fallback, least=0)
        self._token: str | None = None

    @property
    def name(self) -> str:
        """The key in Redis, `{name}_semaphore:{environment}`, which a `Limit` of that name has, too."""
        return f"{self._values.name}_semaphore:{self._values.environment}"

    @property
    def max_concurrent(self) -> int:
        return self._values.concurrency

    @property
    def ttl(self) -> float:
        return self._values.lease

    @property
    def is_held(self) -> bool:
        """Has it a permit now? One whose lease could not be renewed in time is lost."""
        return self._token is not None

    @property
    def _shared(self) -> SharedRedis:
        return shared_redis(self.redis, self._values.environment)

    def _try(self) -> bool:
        token = f"semaphore/{secrets.token_hex(8)}"
        if not self._shared.take(self._values, token, fallback=self._fallback, on_lost=lambda: self._lose(token)):
            return False
        self._token = token
        return True

    def _lose(self, token: str) -> None:
        if self._token == token:
            self._token = None

    def _take_token(self) -> str | None:
        token, self._token = self._token, None
        return token

    def _check_free(self) -> None:
        if self._token is not None:
            raise InvalidOperationError(
                f"this semaphore of {self._values.name!r} holds a permit: release it first, or make another one"
            )

    def _pause(self, until: float) -> float | None:
        """Seconds until the next look at the latest; None when the time is up."""
        left = until - monotonic()
        if left <= 0:
            logger.warning("no permit of %s became free in time", self._values.name)
            return None
        return max(LEAST_PAUSE_SECONDS, min(left, self._shared.seconds_to_next(self._values)))

    def _timed_out(self, timeout: float) -> SlotTimeoutError:
        return SlotTimeoutError(
            f"Could not acquire API slot: no permit of {self._values.name!r} became free within {timeout:g} s"
            f"{self._shared.trouble}",
            limit=self._values.name,
        )


class RedisSemaphore(_Semaphore):
    """One permit of a semaphore that all programs of an environment share: at most `max_concurrent` hold one.

    The permit is renewed while it is held, and ends `ttl` seconds after the program that held it died. While Redis
    is away nothing begins, unless `fallback` says how many this program may hold then. `with semaphore:` acquires
    and releases, and raises SlotTimeoutError if no permit becomes free within 30 s.
    """

    def acquire(self, timeout: float = ACQUIRE_SECONDS) -> bool:
        """Take a permit, and wait `timeout` seconds for one at most; False if none became free."""
        self._check_free()
        until, freed = monotonic() + parse_seconds(timeout, name="timeout"), threading.Event()
        if self._try():
            return True
        shared = self._shared
        shared.register(freed.set)
        try:
            while not self._try():
                pause = self._pause(until)
                if pause is None:
                    return False
                freed.wait(pause)
                freed.clear()
        finally:
            shared.unregister(freed.set)
        return True

    def release(self) -> None:
        """Give the permit back; nothing happens if there is none."""
        token = self._take_token()
        if token is not None:
            self._shared.release(token)

    def abandon(self) -> None:
        """Keep the permit until its lease ends: the call that it was for may still run at the other end."""
        token = self._take_token()
        if token is not None:
            self._shared.keep_until_lease_ends(token)

    def __enter__(self) -> Self:
        if not self.acquire():
            raise self._timed_out(ACQUIRE_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncRedisSemaphore(_Semaphore):
    """The same for async code; `redis_client` may be a sync or an async one. No wait holds a thread."""

    async def acquire(self, timeout: float = ACQUIRE_SECONDS) -> bool:
        """Take a permit, and wait `timeout` seconds for one at most; False if none became free."""
        self._check_free()
        loop, freed = asyncio.get_running_loop(), asyncio.Event()
        until = monotonic() + parse_seconds(timeout, name="timeout")
        if await self._try_async():
            return True
        shared = self._shared

        def wake() -> None:
            loop.call_soon_threadsafe(freed.set)

        shared.register(wake)
        try:
            while not await self._try_async():
                pause = await asyncio.to_thread(self._pause, until)
                if pause is None:
                    return False
                try:
                    async with asyncio.timeout(pause):
                        await freed.wait()
                except TimeoutError:
                    pass
                freed.clear()
        finally:
            shared.unregister(wake)
        return True

    async def _try_async(self) -> bool:
        """In a thread, which ends soon. If nobody waits for it any more, it gives back what it has taken."""
        is_over = threading.Event()
        trying = asyncio.get_running_loop().run_in_executor(None, self._try_unless, is_over)
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:
            is_over.set()
            trying.add_done_callback(lambda _: self._give_back())  # the waiter may have looked just before
            raise

    def _try_unless(self, is_over: threading.Event) -> bool:
        is_granted = self._try()
        if is_granted and is_over.is_set():
            self._give_back()
        return is_granted

    def _give_back(self) -> None:
        token = self._take_token()
        if token is not None:
            threading.Thread(target=self._shared.release, args=(token,), daemon=True).start()

    async def release(self) -> None:
        """Give the permit back; nothing happens if there is none."""
        token = self._take_token()
        if token is not None:
            await asyncio.to_thread(self._shared.release, token)

    async def abandon(self) -> None:
        """Keep the permit until its lease ends: the call that it was for may still run at the other end."""
        token = self._take_token()
        if token is not None:
            self._shared.keep_until_lease_ends(token)

    async def __aenter__(self) -> Self:
        if not await self.acquire():
            raise self._timed_out(ACQUIRE_SECONDS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
