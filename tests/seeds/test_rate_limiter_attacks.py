"""The rate limiter and callers who hold it wrong, and a Redis that is ill."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.cluster
import redis.sentinel

from commandbus import ConfigurationError
from commandbus.rate_limiter import (
    AsyncRedisSemaphore,
    RateLimitError,
    RedisSemaphore,
    calculate_backoff,
    process_chunk_with_timeout,
    process_with_retry,
    process_with_retry_sync,
    rate_limited_api_call,
)
from support.redis_server import RedisServer
from support.waiting import until

NOBODY = redis.Redis(host="127.0.0.1", port=1)
BAD_COUNTS = [0, -1, True, 2.5, "5", None, 10**9]
BAD_SECONDS = [-1, float("nan"), float("inf"), None, "soon", True, [5]]
KEY = "test_semaphore:development"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


def read(chunk: bytes) -> dict[str, Any]:
    return {"letters": len(chunk)}


@pytest.mark.parametrize("kind", [RedisSemaphore, AsyncRedisSemaphore])
def test_bad_terms_are_refused_by_name(kind: Callable[..., Any]) -> None:
    for count in BAD_COUNTS:
        with pytest.raises(ValueError, match="max_concurrent must be a whole number"):
            kind(NOBODY, "test", max_concurrent=count)
    for seconds in [*BAD_SECONDS, 0]:
        with pytest.raises(ValueError, match="ttl"):
            kind(NOBODY, "test", ttl=seconds)
    for name in ("", "Test", "a b", None, 5, "x" * 49, "t\x00"):
        with pytest.raises(ValueError, match="is not the name of a limit"):
            kind(NOBODY, name)
    with pytest.raises(ValueError, match="environment"):
        kind(NOBODY, "test", environment="a b")
    with pytest.raises(ValueError, match="fallback"):
        kind(NOBODY, "test", fallback=-1)


def test_only_a_client_of_one_server_will_do() -> None:
    for client in (None, "redis://127.0.0.1:6379/0", object(), redis.Redis):
        with pytest.raises(ConfigurationError, match=r"such as redis\.Redis"):
            RedisSemaphore(client, "test")
    cluster = redis.cluster.RedisCluster.__new__(redis.cluster.RedisCluster)  # one that connects needs a cluster
    with pytest.raises(ConfigurationError, match="one Redis server"):
        RedisSemaphore(cluster, "test")
    master = redis.sentinel.Sentinel([("127.0.0.1", 1)]).master_for("mymaster")
    with pytest.raises(ConfigurationError, match="Sentinel"):
        RedisSemaphore(master, "test")


@pytest.mark.parametrize("seconds", BAD_SECONDS)
def test_bad_waits_and_timeouts_are_refused_by_name(seconds: Any) -> None:
    semaphore = RedisSemaphore(NOBODY, "test")
    for call in (
        lambda: semaphore.acquire(timeout=seconds),
        lambda: asyncio.run(AsyncRedisSemaphore(NOBODY, "test").acquire(timeout=seconds)),
        lambda: rate_limited_api_call("test", seconds, redis_client=NOBODY),
        lambda: process_chunk_with_timeout(b"", read, seconds),
        lambda: process_with_retry_sync(b"", read, timeout=seconds),
        lambda: asyncio.run(process_with_retry(b"", read, timeout=seconds)),
    ):
        with pytest.raises(ValueError, match="timeout"):
            call()


@pytest.mark.parametrize("count", BAD_COUNTS)
def test_bad_numbers_of_attempts_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        process_with_retry_sync(b"", read, count)
    with pytest.raises(ValueError, match="max_attempts"):
        asyncio.run(process_with_retry(b"", read, count))
    if count != 10**9:  # counted from 1, and as far as one likes
        with pytest.raises(ValueError, match="attempt"):
            calculate_backoff(count)


def test_a_client_that_decodes_or_was_closed_serves_as_well(redis_url: str) -> None:
    decoding = redis.Redis.from_url(redis_url, decode_responses=True, protocol=3)
    closed = redis.Redis.from_url(redis_url)
    closed.close()
    for client in (decoding, closed):
        with RedisSemaphore(client, "test", max_concurrent=1) as semaphore:
            assert semaphore.is_held
            assert not RedisSemaphore(client, "test", max_concurrent=1).acquire(timeout=0)


def test_a_forked_process_has_no_permit_of_its_parent(client: redis.Redis) -> None:
    semaphore = RedisSemaphore(client, "test", max_concurrent=2)
    assert semaphore.acquire()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            semaphore.release()  # not its own
            other = RedisSemaphore(client, "test", max_concurrent=2)
            is_right = other.acquire(timeout=5)
            other.release()
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.zcard(KEY) == 1
    semaphore.release()
    until(lambda: client.zcard(KEY) == 0)


def test_a_redis_that_takes_no_writes_gives_nothing_and_says_why(own_redis: RedisServer) -> None:
    client = redis.Redis.from_url(own_redis.url)
    RedisSemaphore(client, "test").acquire()  # it has been used before
    for make_ill, word in (
        (lambda: client.config_set("maxmemory", "1"), "OutOfMemory"),
        (lambda: client.replicaof("127.0.0.1", "1"), "ReadOnly"),
    ):
        make_ill()
        semaphore = RedisSemaphore(client, "test", max_concurrent=5)
        assert not semaphore.acquire(timeout=0.1)
        assert word in str(semaphore._timed_out(0.1))
        client.replicaof("NO", "ONE")
        client.config_set("maxmemory", "0")


def test_a_wrong_password_gives_nothing_and_says_why(own_redis: RedisServer) -> None:
    own_redis.client.config_set("requirepass", "right")
    wrong = redis.Redis.from_url(own_redis.url, password="wrong")
    semaphore = RedisSemaphore(wrong, "test")
    assert not semaphore.acquire(timeout=0.1)
    assert "AuthenticationError" in str(semaphore._timed_out(0.1))
    right = redis.Redis.from_url(own_redis.url, password="right")
    with RedisSemaphore(right, "test"):
        pass


def test_a_call_in_any_thread_and_a_refusal_that_never_ends(client: redis.Redis) -> None:
    found: list[Any] = []

    def refuse(chunk: bytes) -> None:
        found.append(threading.current_thread().name)
        raise RateLimitError("no", retry_after=0)

    def use() -> None:
        with pytest.raises(RateLimitError):
            process_with_retry_sync(b"", refuse)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(found) == 4
