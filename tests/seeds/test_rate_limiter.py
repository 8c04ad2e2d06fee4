"""The rate limiter as its specification writes it, with real Redis: its samples, and its tests under their names.

Where the specification's tests have a MagicMock for Redis, a real one stands here: a mock cannot show a race.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import redis.asyncio

from commandbus import ApiTimeoutError, CommandBus, Limit, LimitTimeoutError, Settings
from commandbus.errors import InvalidOperationError
from commandbus.model.api_errors import api_failure
from commandbus.rate_limiter import (
    BACKOFF_BASE,
    BACKOFF_MAX,
    CHUNK_TIMEOUT_SECONDS,
    MAX_CONCURRENT_CALLS,
    AsyncRedisSemaphore,
    RateLimitContext,
    RateLimitError,
    RedisSemaphore,
    calculate_backoff,
    process_chunk_with_timeout,
    process_with_retry,
    process_with_retry_sync,
    rate_limited_api_call,
)
from support.redis_server import RedisServer
from support.waiting import Stopwatch, until


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def held(client: redis.Redis, key: str = "test_semaphore:development") -> int:
    return int(client.zcard(key))  # type: ignore[arg-type]


def all_given_back(client: redis.Redis) -> None:
    until(lambda: held(client) == 0)


def test_the_constants() -> None:
    assert (CHUNK_TIMEOUT_SECONDS, MAX_CONCURRENT_CALLS, BACKOFF_BASE, BACKOFF_MAX) == (60, 5, 2, 30)


class TestRedisSemaphore:
    def test_limits_concurrent_calls(self, client: redis.Redis) -> None:
        others = [RedisSemaphore(client, "test", max_concurrent=5) for _ in range(MAX_CONCURRENT_CALLS)]
        assert all(other.acquire() for other in others)  # at the limit
        semaphore = RedisSemaphore(client, "test", max_concurrent=5)
        began = time.monotonic()
        result = semaphore.acquire(timeout=1.0)
        assert result is False  # should not acquire
        assert time.monotonic() - began >= 1.0
        for other in others:
            other.release()

    def test_acquires_when_slots_available(self, client: redis.Redis) -> None:
        others = [RedisSemaphore(client, "test", max_concurrent=5) for _ in range(2)]  # 2 of 5 used
        assert all(other.acquire() for other in others)
        semaphore = RedisSemaphore(client, "test", max_concurrent=5)
        result = semaphore.acquire()
        assert result is True
        assert held(client) == 3
        for each in (*others, semaphore):
            each.release()
        assert held(client) == 0

    def test_of_a_hundred_threads_five_get_in_at_once_and_no_more(self, client: redis.Redis) -> None:
        inside, most, lock = 0, 0, threading.Lock()
        full = threading.Barrier(5)  # each leaves when five are in

        def work(_: int) -> None:
            nonlocal inside, most
            # A name of its own: what an earlier test holds would be missing here.
            with RedisSemaphore(client, "hundred"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                full.wait(30)
                with lock:
                    inside -= 1

        with ThreadPoolExecutor(20) as threads:
            list(threads.map(work, range(100)))
        assert (most, inside) == (5, 0)
        until(lambda: held(client, "hundred_semaphore:development") == 0)

    def test_who_waits_is_woken_when_a_permit_is_given_back(self, client: redis.Redis) -> None:
        holder, waiter = (RedisSemaphore(client, "test", max_concurrent=1) for _ in range(2))
        assert holder.acquire()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(waiter.acquire, 30)
            until(lambda: client.pubsub_numpat())
            holder.release()
            given_back = time.monotonic()
            assert waiting.result(20)
        assert time.monotonic() - given_back < 10  # the lease would have lasted two minutes
        waiter.release()

    def test_a_lease_is_renewed_while_it_is_held(self, client: redis.Redis) -> None:
        semaphore, other = (RedisSemaphore(client, "test", max_concurrent=1, ttl=1) for _ in range(2))
        assert semaphore.acquire()
        assert not other.acquire(timeout=2.5)
        assert semaphore.is_held
        semaphore.release()
        assert other.acquire(timeout=5)
        other.release()

    def test_a_permit_of_a_process_that_died_ends_with_its_lease(
        self, client: redis.Redis, redis_url: str
    ) -> None:
        dying = multiprocessing.get_context("spawn").Process(target=_acquire_and_die, args=(redis_url,))
        dying.start()
        dying.join()
        assert held(client) == 1
        with RedisSemaphore(client, "test", max_concurrent=1):
            assert held(client) == 1
        all_given_back(client)

    def test_a_release_gives_back_nothing_of_others(self, client: redis.Redis) -> None:
        holder, stranger = (RedisSemaphore(client, "test", max_concurrent=1) for _ in range(2))
        assert holder.acquire()
        stranger.release()
        assert held(client) == 1
        with pytest.raises(InvalidOperationError, match="holds a permit"):
            holder.acquire()
        holder.release()
        holder.release()

    def test_its_key_is_that_of_a_limit(self, client: redis.Redis) -> None:
        semaphore = RedisSemaphore(client, "docai", environment="production")
        assert semaphore.name == "docai_semaphore:production"
        assert (semaphore.max_concurrent, semaphore.ttl) == (5, 120)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"name": "doc ai"}, "doc ai"),
            ({"name": "docai", "max_concurrent": 0}, "max_concurrent"),
            ({"name": "docai", "ttl": 0}, "ttl"),
        ],
    )
    def test_arguments_that_make_no_sense(self, client: redis.Redis, arguments: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            RedisSemaphore(client, **arguments)

    def test_a_redis_that_was_emptied_lets_nobody_in_for_a_lease(self, client: redis.Redis) -> None:
        """Who held a permit before holds it still, and Redis is told."""
        first, second = (RedisSemaphore(client, "test", max_concurrent=2, ttl=2) for _ in range(2))
        assert first.acquire()
        client.flushall()
        began = time.monotonic()
        assert second.acquire(timeout=20)
        assert time.monotonic() - began > 1
        until(lambda: held(client) == 2)
        first.release()
        second.release()


def _acquire_and_die(url: str) -> None:
    import os

    assert RedisSemaphore(redis.Redis.from_url(url), "test", max_concurrent=1, ttl=1).acquire()
    os._exit(0)


class TestWithoutRedis:
    @pytest.fixture
    def own_redis(self) -> Iterator[RedisServer]:
        server = RedisServer()
        try:
            server.start()
            yield server
        finally:
            server.close()

    def test_nothing_begins(self, own_redis: RedisServer) -> None:
        client = redis.Redis.from_url(own_redis.url)
        own_redis.kill()
        assert not RedisSemaphore(client, "test").acquire(timeout=0.3)

    def test_each_program_keeps_to_its_share_if_it_says_so(self, own_redis: RedisServer) -> None:
        client = redis.Redis.from_url(own_redis.url)
        own_redis.kill()
        first, second = (RedisSemaphore(client, "test", fallback=1) for _ in range(2))
        assert first.acquire(timeout=5)
        assert not second.acquire(timeout=0.3)
        own_redis.restart()
        until(lambda: held(client) == 1)  # Redis is told
        first.release()
        until(lambda: held(client) == 0)


class TestWithLimit:
    def test_a_limit_and_a_semaphore_count_together(
        self, client: redis.Redis, database: str, redis_url: str
    ) -> None:
        with CommandBus(settings=Settings(database_url=database, redis_url=redis_url)) as bus:
            bus.declare_limit(Limit("docai", concurrency=2, shared=True))
            with bus.limit("docai"):
                assert held(client, "docai_semaphore:development") == 1
                one, two = (RedisSemaphore(client, "docai", max_concurrent=2) for _ in range(2))
                assert one.acquire()
                assert not two.acquire(timeout=0.2)
                with pytest.raises(LimitTimeoutError), bus.limit("docai", wait=0.2):
                    pass
                one.release()
                assert two.acquire(timeout=10)
                two.release()
            until(lambda: held(client, "docai_semaphore:development") == 0)

    def test_a_semaphore_is_woken_by_a_limit(self, client: redis.Redis, database: str, redis_url: str) -> None:
        waiter = RedisSemaphore(client, "docai", max_concurrent=1)
        with CommandBus(settings=Settings(database_url=database, redis_url=redis_url)) as bus:
            bus.declare_limit(Limit("docai", concurrency=1, shared=True))
            with ThreadPoolExecutor(1) as thread, bus.limit("docai"):
                waiting = thread.submit(waiter.acquire, 60)
                until(lambda: client.pubsub_numpat())
            assert waiting.result()
        waiter.release()


class TestAsync:
    def test_the_async_twin(self, client: redis.Redis, redis_url: str) -> None:
        async def use() -> None:
            async with redis.asyncio.Redis.from_url(redis_url) as asynchronous:
                holder, waiter = (AsyncRedisSemaphore(asynchronous, "test", max_concurrent=1) for _ in range(2))
                assert await holder.acquire()
                assert not await waiter.acquire(timeout=0.2)
                waiting = asyncio.create_task(waiter.acquire(timeout=30))
                await asyncio.sleep(0)
                await holder.release()
                assert await waiting
                await waiter.release()
                async with AsyncRedisSemaphore(client, "test", max_concurrent=1) as again:
                    assert again.is_held

        asyncio.run(use())
        all_given_back(client)

    def test_a_wait_that_is_canceled_leaves_nothing_behind(self, client: redis.Redis) -> None:
        async def use() -> None:
            holder = AsyncRedisSemaphore(client, "test", max_concurrent=1)
            assert await holder.acquire()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await AsyncRedisSemaphore(client, "test", max_concurrent=1).acquire()
            await holder.release()

        asyncio.run(use())
        all_given_back(client)


class TestRateLimitedCall:
    def test_the_usage_of_the_specification(
        self, client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COMMANDBUS_REDIS_URL", redis_url)

        async def api_call() -> str:
            assert held(client, "docai_semaphore:development") == 1
            return "text"

        async def use() -> str:
            async with rate_limited_api_call() as limiter:
                result = await api_call()
                limiter.record_success()
            return result

        assert asyncio.run(use()) == "text"
        assert held(client, "docai_semaphore:development") == 0

    def test_a_call_that_takes_too_long_is_canceled_and_its_permit_kept(self, client: redis.Redis) -> None:
        async def use() -> None:
            async with rate_limited_api_call("test", timeout=0.1, redis_client=client):
                await asyncio.sleep(30)

        with pytest.raises(ApiTimeoutError, match=r"no answer from test within 0\.1 s \(timeout\)"):
            asyncio.run(use())
        assert held(client) == 1  # the call may still run at the other end

    def test_a_sync_call_that_took_too_long_is_told_at_its_end(self, client: redis.Redis) -> None:
        with (
            pytest.raises(TimeoutError, match="timeout"),
            rate_limited_api_call("test", 0.05, redis_client=client),
        ):
            time.sleep(0.1)
        assert held(client) == 0  # it has come back

    def test_an_error_gives_the_permit_back(self, client: redis.Redis) -> None:
        with pytest.raises(KeyError), rate_limited_api_call("test", redis_client=client):
            raise KeyError("no")
        assert held(client) == 0

    def test_no_slot_is_a_rate_limit_error(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RedisSemaphore, "acquire", lambda self: False)
        call = rate_limited_api_call("test", redis_client=client)
        with pytest.raises(RateLimitError, match="Could not acquire API slot") as caught, call:
            pass
        assert isinstance(caught.value, LimitTimeoutError)
        assert (caught.value.code, caught.value.limit) == ("LIMIT_TIMEOUT", "test")
        assert api_failure(caught.value) is None  # no 429: a worker does not let the fleet back off

    def test_the_context_knows_its_back_off(self, client: redis.Redis) -> None:
        context = RateLimitContext(RedisSemaphore(client, "test"))
        assert [context.calculate_backoff(attempt) for attempt in range(1, 7)] == [2, 4, 8, 16, 30, 30]
        assert context.backoff_seconds == 30
        context.record_success()
        assert context.backoff_seconds == 0
        assert calculate_backoff(10**9) == 30


class Processor:
    """An OCR processor that refuses some times, then answers."""

    def __init__(self, refusals: int = 0, seconds: float = 0.0, retry_after: float | None = 0.0) -> None:
        self.calls = 0
        self._refusals = refusals
        self._seconds = seconds
        self._retry_after = retry_after

    def process_sync(self, chunk: bytes) -> dict[str, Any]:
        self.calls += 1
        time.sleep(self._seconds)
        if self.calls <= self._refusals:
            raise RateLimitError("429", retry_after=self._retry_after)
        return {"bytes": len(chunk)}


class TestChunkTimeout:
    def test_timeout_raises_error(self) -> None:
        def slow_processor(_: bytes) -> dict[str, Any]:
            time.sleep(5)
            return {}

        processor = Processor()
        processor.process_sync = slow_processor  # type: ignore[method-assign]
        stopwatch = Stopwatch()
        with pytest.raises(TimeoutError, match="Chunk processing timed out after 1s"):
            process_chunk_with_timeout(
                b"chunk",
                processor,
                timeout=1,
            )
        assert stopwatch.seconds(waits=1.0) < 4

    def test_a_call_that_is_in_time(self) -> None:
        assert process_chunk_with_timeout(b"chunk", Processor()) == {"bytes": 5}

    def test_in_any_thread_and_for_less_than_a_second(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(process_chunk_with_timeout, b"", Processor(seconds=1), 0.05)
            with pytest.raises(TimeoutError):
                call.result()

    def test_an_async_processor_is_canceled(self) -> None:
        canceled = threading.Event()

        async def process(_: bytes) -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                canceled.set()
                raise

        with pytest.raises(TimeoutError, match="timed out after"):
            process_chunk_with_timeout(b"", process, timeout=0.1)
        assert canceled.wait(5)

    def test_its_own_errors_are_the_callers(self) -> None:
        def fail(_: bytes) -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            process_chunk_with_timeout(b"", fail)
        with pytest.raises(TypeError, match="int has neither process_sync nor process"):
            process_chunk_with_timeout(b"", 5)


@pytest.mark.parametrize(
    "process",
    [lambda *args, **more: asyncio.run(process_with_retry(*args, **more)), process_with_retry_sync],
    ids=["async", "sync"],
)
class TestRetry:
    def test_a_429_is_tried_again(self, process: Callable[..., Any]) -> None:
        processor = Processor(refusals=3)
        assert process(b"chunk", processor) == {"bytes": 5}
        assert processor.calls == 4

    def test_max_attempts_exceeded(self, process: Callable[..., Any]) -> None:
        processor = Processor(refusals=9)
        with pytest.raises(RateLimitError):
            process(b"chunk", processor, max_attempts=4)
        assert processor.calls == 4

    def test_the_back_off_of_the_specification(
        self, process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[float] = []

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        # Not the functions of asyncio and time themselves: other threads of the program sleep, too.
        monkeypatch.setattr("commandbus.rate_limiter.calls.sleep_async", sleep)
        monkeypatch.setattr("commandbus.rate_limiter.calls.sleep", waited.append)
        refusing = iter([RateLimitError("429")] * 5)

        def call(_: bytes) -> str:
            for error in refusing:
                raise error
            return "done"

        assert process(b"", call, max_attempts=6) == "done"
        assert waited == [2, 4, 8, 16, 30]

    def test_each_call_is_bounded(self, process: Callable[..., Any]) -> None:
        with pytest.raises(TimeoutError):
            process(b"", Processor(seconds=3), timeout=0.05)
