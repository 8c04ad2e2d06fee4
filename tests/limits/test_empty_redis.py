"""Redis that comes back without its data: the fleet begins as soon as no permit of before can be held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
from limits_harness import QUICK, Client, Inside, declare_limit

from commandbus import CommandBus, ConfigurationError, Limit, Settings
from commandbus.rate_limiter import RedisSemaphore
from support.redis_server import RedisServer
from support.waiting import one, until

Start = Callable[..., Client]
Db = psycopg.Connection[Any]
LONG = 600.0
"""A lease that nobody waits for."""
NOTE = "SELECT note FROM commandbus.limit_mode"
KEY = "docai_semaphore:test"


@pytest.fixture
def semaphore(own_redis: RedisServer) -> Iterator[Callable[..., RedisSemaphore]]:
    """Semaphores of programs of their own: each has its own client."""
    made: list[RedisSemaphore] = []

    def make(**options: Any) -> RedisSemaphore:
        client = redis.Redis.from_url(own_redis.url)
        made.append(RedisSemaphore(client, "docai", environment="test", **options))
        return made[-1]

    yield make
    for semaphore in made:
        semaphore.abandon()
        semaphore.redis.close()


@pytest.fixture(params=["flush", "restart"])
def empty(request: pytest.FixtureRequest, own_redis: RedisServer) -> Callable[[], None]:
    """Redis loses its data."""
    return own_redis.flush if request.param == "flush" else own_redis.restart


def looking(database: str, server: RedisServer) -> CommandBus:
    """Who only looks takes no part in the fleet."""
    return CommandBus(settings=Settings(database_url=database, redis_url=server.url, environment="test"))


def taken(client: Client, limit: Any, count: int) -> list[str]:
    """What it gets, as soon as it gets something."""
    return until(lambda: client.take(limit, count), 30)


def test_a_fleet_whose_programs_all_live_goes_on_at_once(
    start: Start, own_redis: RedisServer, database: str, db: Db, empty: Callable[[], None]
) -> None:
    limit = declare_limit(database, concurrency=3, lease=LONG)
    first, second, third = (start(own_redis.url, name) for name in ("first", "second", "third"))
    held = first.take(limit, 1) + second.take(limit, 1)
    before = one(db, "SELECT epoch FROM commandbus.limit_mode")
    empty()
    assert len(taken(third, limit, 3)) == 1  # two are registered
    assert set(held) < set(own_redis.client.zrange(KEY, 0, -1))
    assert one(db, "SELECT epoch FROM commandbus.limit_mode") != before
    assert (third.mode, one(db, NOTE)) == ("redis", None)


def test_the_first_program_of_all_needs_no_others(start: Start, own_redis: RedisServer, database: str) -> None:
    limit = declare_limit(database, concurrency=3, lease=LONG)
    client = start(own_redis.url)
    held = client.take(limit, 2)
    own_redis.flush()
    assert len(taken(client, limit, 3)) == 1
    client.release(limit, held)
    assert len(client.take(limit, 3)) == 2


def test_permits_of_one_that_was_killed_count_until_its_lease_has_ended(
    start: Start, own_redis: RedisServer, database: str, db: Db, empty: Callable[[], None]
) -> None:
    limit = declare_limit(database, concurrency=2, lease=3)
    declare_limit(database, name="slow", concurrency=2, lease=LONG)  # a lease that the killed one does not have
    killed, other = start(own_redis.url, "killed"), start(own_redis.url, "other")
    assert other.take(limit, 1, seconds=0.01)
    held: list[str] = []
    until(lambda: held.extend(killed.take(limit, 2 - len(held))) or len(held) == 2)  # after that moment of a lease
    began = time.monotonic()
    killed.stop(kill=True)
    empty()
    assert other.take(limit) == []
    until(lambda: (one(db, NOTE) or "").startswith("killed ") and other.mode == "joining")
    with looking(database, own_redis) as bus:
        info = bus.get_limit("docai")
    assert (info.state, info.mode) == ("JOINING", "joining")
    assert info.until is not None
    assert 0 < info.seconds_left <= QUICK.live + 3
    assert "Redis is back, or has lost its data: killed " in info.text
    assert len(taken(other, limit, 2)) == 2
    assert time.monotonic() - began > 3


def test_one_that_does_not_answer_is_waited_for_until_it_registers(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    limit = declare_limit(database, concurrency=2, lease=LONG)
    stopped, other = start(own_redis.url, "stopped"), start(own_redis.url, "other")
    held = stopped.take(limit, 1)
    stopped.freeze()
    own_redis.flush()
    until(lambda: other.take(limit) == [] and "stopped" in (one(db, NOTE) or ""))
    stopped.thaw()
    assert len(taken(other, limit, 2)) == 1
    assert stopped.renew(limit, held) == []


def test_one_that_has_never_held_anything_is_not_waited_for(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    limit = declare_limit(database, concurrency=2, lease=LONG)
    stopped, other = start(own_redis.url, "stopped"), start(own_redis.url, "other")
    until(lambda: stopped.mode == other.mode == "redis" and other.take(limit, 1))
    stopped.ask(stopped.store.tick)
    stopped.freeze()
    own_redis.flush()
    assert len(taken(other, limit, 2)) == 1


@pytest.mark.long
def test_never_above_the_limit_while_redis_is_emptied_again_and_again(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    """Programs enter and leave. One is killed on the way, and its calls go on until its leases end."""
    limit, inside = declare_limit(database, concurrency=5, lease=2.5), Inside(5)
    clients = [start(own_redis.url, f"client {number}") for number in range(4)]
    for client in clients:
        client.work(limit, inside)
    for number in range(6):
        goal = inside.entries + 20
        until(lambda goal=goal: inside.entries >= goal, 60, what=lambda: one(db, NOTE))
        if number == 2:
            clients.pop().die()
        own_redis.flush()
    inside.assert_never_above()


# --- limits that stand-alone semaphores share -------------------------------------------------------------------


def test_a_shared_limit_waits_its_lease_and_the_semaphores_with_it(
    start: Start, own_redis: RedisServer, database: str, semaphore: Callable[..., RedisSemaphore]
) -> None:
    limit = declare_limit(database, concurrency=2, lease=3, shared=True)
    client, outside = start(own_redis.url), semaphore(max_concurrent=2, ttl=3)
    held = client.take(limit, 1)
    assert outside.acquire()
    assert client.take(limit, 1) == []
    own_redis.flush()
    began = time.monotonic()
    until(lambda: client.take(limit, 1) == [] and own_redis.client.zcard(KEY) == 2)  # both have registered
    outside.release()
    client.release(limit, held)
    assert len(taken(client, limit, 2)) == 2
    assert time.monotonic() - began > 2.5


def test_limits_say_that_a_shared_limit_waits(start: Start, own_redis: RedisServer, database: str) -> None:
    limit = declare_limit(database, concurrency=2, lease=LONG, shared=True)
    client = start(own_redis.url)
    client.release(limit, client.take(limit, 1))
    own_redis.flush()
    with looking(database, own_redis) as bus:
        until(lambda: client.take(limit, 1) == [] and bus.get_limit("docai").state == "JOINING")
        info, estimate = bus.get_limit("docai"), bus.estimate("docai")
    assert info.mode == "joining"
    assert 0 < info.seconds_left <= LONG
    assert "programs outside the fleet may hold permits (shared)" in info.text
    assert estimate.seconds is None or estimate.seconds > 100


def test_semaphores_notice_that_redis_has_lost_its_data_and_newcomers_wait(
    own_redis: RedisServer, semaphore: Callable[..., RedisSemaphore]
) -> None:
    """Also if a program that cannot know has begun first: it takes its own epoch for the first one of all."""
    holder, fresh, waiter = (semaphore(max_concurrent=2, ttl=4) for _ in range(3))
    assert holder.acquire()
    own_redis.flush()
    assert fresh.acquire()
    until(lambda: own_redis.client.zcard(KEY) == 2)  # the holder has registered
    *_, opens, _ = own_redis.client.get("commandbus_epoch:test").split(":")
    fresh.release()
    assert waiter.acquire(timeout=30)
    seconds, micros = own_redis.client.time()
    assert 0 < int(opens) <= seconds * 1_000_000 + micros
    assert holder.is_held


def test_without_redis_a_shared_limit_lets_nobody_begin(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    limit = declare_limit(database, concurrency=4, lease=2, shared=True)
    own = declare_limit(database, name="own", concurrency=4, lease=2)
    client = start(own_redis.url)
    held = client.take(limit, 1)
    own_redis.kill()
    until(lambda: client.mode == "degraded")
    assert client.take(limit, 4) == []
    assert len(client.take(own, 4)) == 4
    until(lambda: client.renew(limit, held) == held)  # semaphores may have it by now
    with looking(database, own_redis) as bus:
        assert "nobody begins before it is back" in bus.get_limit("docai").text
    own_redis.start()
    assert len(taken(client, limit, 4)) == 4


def test_a_semaphore_gets_no_permit_of_a_limit_that_is_not_shared(
    start: Start, own_redis: RedisServer, database: str, semaphore: Callable[..., RedisSemaphore]
) -> None:
    limit = declare_limit(database, concurrency=2, lease=60)
    client, outside = start(own_redis.url), semaphore(max_concurrent=2)
    client.release(limit, client.take(limit, 1))
    with pytest.raises(ConfigurationError, match=r"Limit\('docai', …, shared=True\)"):
        outside.acquire()
    shared = declare_limit(database, concurrency=2, lease=60, shared=True)
    assert client.take(shared, 1)
    assert outside.acquire()
    assert client.take(shared, 1) == []


def test_the_fleet_gets_none_while_semaphores_hold_permits_of_what_is_not_shared(
    start: Start,
    own_redis: RedisServer,
    database: str,
    semaphore: Callable[..., RedisSemaphore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = declare_limit(database, concurrency=2, lease=60)
    outside, late = semaphore(max_concurrent=2), semaphore(max_concurrent=2)
    assert outside.acquire()
    client = start(own_redis.url)
    assert client.take(limit, 1) == []
    assert "is not declared with shared=True" in caplog.text
    with looking(database, own_redis) as bus:
        assert "shared=True" in bus.get_limit("docai").text
    with pytest.raises(ConfigurationError):
        late.acquire()
    outside.release()
    assert len(client.take(limit, 2)) == 2


def test_shared_is_a_property_of_limits_in_redis(database: str) -> None:
    with pytest.raises(ConfigurationError, match="shared"):
        Limit("docai", concurrency=1, shared=True, store="postgres")
    with pytest.raises(ConfigurationError, match="shared must be true or false, not 'yes'"):
        Limit("docai", concurrency=1, shared="yes")  # type: ignore[arg-type]
