"""Redis killed, stopped, emptied, restarted, lost to one and to all: never above the limit, and back by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from limits_harness import QUICK, Client, Inside, declare_limit, tokens

from commandbus.db.embedded import EmbeddedPostgres
from commandbus.limits.stores.redis.scripts import TIMEOUT_SECONDS, StaleError
from support.network import Proxy
from support.redis_server import RedisServer
from support.waiting import one, until

Start = Callable[..., Client]
Db = psycopg.Connection[Any]


@pytest.fixture
def proxies(own_redis: RedisServer) -> Iterator[list[Proxy]]:
    """Two ways to one Redis, each of which can be cut."""
    made = [Proxy(own_redis.port), Proxy(own_redis.port)]
    yield made
    for proxy in made:
        proxy.close()


def behind(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


def cut(proxy: Proxy) -> None:
    proxy.is_refusing = True
    proxy.cut()


def all_in(mode: str, *clients: Client, seconds: float = 30.0) -> None:
    """Until all clients are in this mode."""
    until(
        lambda: all(client.mode == mode for client in clients),
        seconds,
        what=lambda: [(client.mode, client.modes) for client in clients],
    )


def test_first_use_goes_on_at_once(start: Start, redis_url: str, database: str, db: Db) -> None:
    limit, client = declare_limit(database, concurrency=2), start(redis_url)
    assert len(client.take(limit, 3)) == 2
    assert client.mode == "redis"
    assert client.modes in (["redis"], ["lost", "redis"])
    assert one(db, "SELECT epoch FROM commandbus.limit_mode") is not None


def test_the_key_is_named_after_limit_and_environment(
    start: Start, redis_server: RedisServer, redis_url: str, database: str
) -> None:
    limit, client = declare_limit(database, concurrency=2, environment="production"), start(redis_url)
    held = client.take(limit, 2)
    assert set(redis_server.client.zrange("docai_semaphore:production", 0, -1)) == set(held)
    assert redis_server.client.pttl("docai_semaphore:production") > limit.lease * 1000
    assert redis_server.client.pttl("docai_rate:production") > 0
    assert redis_server.client.pttl("commandbus_epoch:test") == -1  # the epoch stays
    assert set(redis_server.client.keys()) == {
        "docai_semaphore:production",
        "docai_rate:production",
        "docai_use:production",
        "commandbus_epoch:test",
    }


def test_lost_to_one_alone_it_begins_nothing_and_the_others_go_on(
    start: Start, proxies: list[Proxy], database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "commandbus.limits")
    limit = declare_limit(database, concurrency=4, lease=60)
    alone, other = start(behind(proxies[0]), "alone"), start(behind(proxies[1]), "other")
    held = alone.take(limit, 2)
    cut(proxies[0])
    all_in("lost", alone)
    assert alone.take(limit) == []
    assert alone.renew(limit, held) == []  # nobody knows, and the lease has not ended
    assert len(other.take(limit, 4)) == 2
    assert other.mode == "redis"
    assert alone.usage(limit).mode == "lost"
    proxies[0].is_refusing = False
    all_in("redis", alone)
    assert alone.renew(limit, held) == []
    alone.release(limit, held)
    assert len(alone.take(limit, 4)) == 2
    said = [record.getMessage() for record in caplog.records]
    assert sum("limits in Redis: alone" in line and "cannot reach it" in line for line in said) == 1
    assert sum("normal again, after lost" in line for line in said) == 1
    assert not any("degraded" in line or "joining" in line for line in said)


def test_what_is_given_back_while_lost_is_free_for_others_when_redis_is_back(
    start: Start, proxies: list[Proxy], database: str
) -> None:
    limit = declare_limit(database, concurrency=1, lease=60)
    alone, other = start(behind(proxies[0]), "alone"), start(behind(proxies[1]), "other")
    held = alone.take(limit)
    cut(proxies[0])
    all_in("lost", alone)
    alone.release(limit, held)
    assert other.take(limit) == []
    proxies[0].is_refusing = False
    until(lambda: other.take(limit))


def test_permits_of_one_that_lost_redis_end_with_their_lease(
    start: Start, proxies: list[Proxy], database: str
) -> None:
    """Others take its permits then, so it must know by then that it has lost them."""
    limit = declare_limit(database, concurrency=2, lease=4)
    alone, other = start(behind(proxies[0]), "alone"), start(behind(proxies[1]), "other")
    held = alone.take(limit, 2)
    cut(proxies[0])
    all_in("lost", alone)
    lost: set[str] = set()

    def taken() -> list[str]:
        lost.update(alone.renew(limit, [token for token in held if token not in lost]))
        granted = other.take(limit)
        assert not granted or lost == set(held)
        return granted

    until(taken)
    proxies[0].is_refusing = False
    all_in("redis", alone)
    assert set(alone.renew(limit, held)) == set(held)


def test_lost_to_all_each_keeps_to_its_share_and_comes_back(
    start: Start, own_redis: RedisServer, database: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "commandbus.limits")
    limit = declare_limit(database, concurrency=5, lease=3)
    clients = [start(own_redis.url, f"client {number}") for number in range(2)]
    first, second = clients
    all_in("redis", *clients)
    own_redis.kill()
    all_in("degraded", *clients)
    assert one(db, "SELECT mode FROM commandbus.limit_mode") == "degraded"
    held = [client.take(limit, 5) for client in clients]
    assert [len(some) for some in held] == [2, 2]  # floor of 5 ÷ 2
    assert all(client.renew(limit, some) == [] for client, some in zip(clients, held, strict=True))
    assert set(first.usage(limit).holders) == {*held[0], *held[1]}
    assert first.usage(limit).mode == "degraded"
    second.release(limit, held[1][:1])
    assert len(second.take(limit, 5)) == 1
    own_redis.start()

    def renewed() -> bool:
        assert first.renew(limit, held[0]) == []
        return first.mode == "redis"

    until(renewed)
    all_in("redis", *clients)
    # The second renews no more what it held then: when its lease has ended, three permits are free.
    taken: list[str] = []

    def freed() -> bool:
        assert first.renew(limit, held[0]) == second.renew(limit, taken) == []
        taken.extend(second.take(limit, 5))
        return len(taken) >= 3

    until(freed)
    assert len(taken) == 3
    said = [record.getMessage() for record in caplog.records]
    assert sum("(degraded)" in line for line in said) == 2  # each client says so, once
    assert sum("normal again" in line for line in said) == 2


def test_with_more_programs_than_permits_the_first_get_one_each(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    limit = declare_limit(database, concurrency=2, lease=60)
    clients = [start(own_redis.url, f"client {number}") for number in range(4)]
    all_in("redis", *clients)
    own_redis.kill()
    all_in("degraded", *clients)
    assert sorted(len(client.take(limit, 2)) for client in clients) == [0, 0, 1, 1]


def test_one_that_held_more_than_its_share_leaves_nothing_for_others_until_it_gives_back(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    limit = declare_limit(database, concurrency=4, lease=60)
    greedy, other = start(own_redis.url, "greedy"), start(own_redis.url, "other")
    held = greedy.take(limit, 4)
    all_in("redis", greedy, other)
    own_redis.kill()
    all_in("degraded", greedy, other)
    assert greedy.renew(limit, held) == []
    assert other.take(limit, 4) == []
    greedy.release(limit, held[:1])
    assert greedy.take(limit) == []  # three are more than its share of two
    assert len(other.take(limit, 4)) == 1
    greedy.release(limit, held[1:])
    assert len(greedy.take(limit, 4)) == 2
    assert len(other.take(limit, 4)) == 1


def test_degraded_a_permit_passes_from_one_program_to_another(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    """Who frees a permit keeps it for the first in line, who may be in a program with no share at all."""
    limit = declare_limit(database, concurrency=1, lease=60)
    clients = [start(own_redis.url, f"client {number}") for number in range(2)]
    all_in("redis", *clients)
    own_redis.kill()
    all_in("degraded", *clients)
    held = [client.take(limit, seconds=20) for client in clients]
    keeper, heir = clients if held[0] else reversed(clients)
    (token,) = held[0] or held[1]
    assert heir.take(limit) == []
    assert heir.renew(limit, [token]) == []
    assert heir.usage(limit).holders[token] > 30
    assert keeper.take(limit) == []
    heir.release(limit, [token])
    assert keeper.usage(limit).holders == {}
    assert len(keeper.take(limit)) == 1
    assert heir.renew(limit, tokens(1)) != []


def test_degraded_the_rate_is_kept_by_all_together(start: Start, own_redis: RedisServer, database: str) -> None:
    limit = declare_limit(database, rate="1/h", burst=4)
    clients = [start(own_redis.url, f"client {number}") for number in range(2)]
    assert len(clients[0].take(limit, 1)) == 1
    all_in("redis", *clients)
    own_redis.kill()
    all_in("degraded", *clients)
    # What was called before is not known here: nothing is left of the burst.
    assert [client.take(limit, 4) for client in clients] == [[], []]
    limit = declare_limit(database, rate="20/s", burst=4)
    granted = 0

    def some() -> bool:
        nonlocal granted
        granted += sum(len(client.take(limit, 1)) for client in clients)
        return granted >= 6

    until(some)


def test_a_program_that_ended_in_order_leaves_its_share_to_the_others(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    limit = declare_limit(database, concurrency=6, lease=60)
    clients = [start(own_redis.url, f"client {number}") for number in range(3)]
    all_in("redis", *clients)
    own_redis.kill()
    all_in("degraded", *clients)
    assert len(clients[0].take(limit, 6)) == 2
    clients[2].stop()
    assert len(clients[0].take(limit, 6)) == 1
    assert len(clients[1].take(limit, 6)) == 3


def test_a_killed_programs_permits_count_for_a_lease_when_redis_is_lost_too(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    limit = declare_limit(database, concurrency=4, lease=60)
    dead, alive = start(own_redis.url, "dead"), start(own_redis.url, "alive")
    assert len(dead.take(limit, 3)) == 3
    all_in("redis", alive)
    dead.stop(kill=True)
    own_redis.kill()
    db.execute("UPDATE commandbus.limit_client SET beat_at = beat_at - interval '10 s' WHERE id LIKE 'dead %'")
    all_in("degraded", alive)
    assert len(alive.take(limit, 4)) == 1
    db.execute("UPDATE commandbus.limit_client SET beat_at = beat_at - interval '60 s' WHERE id LIKE 'dead %'")
    assert len(alive.take(limit, 4)) == 3


def test_one_that_was_stopped_gets_nothing_from_redis_after_it_was_counted_out(
    start: Start, proxies: list[Proxy], database: str, db: Db
) -> None:
    """It reaches Redis, and believes that all is well; the others have lost Redis, and shared out the limit."""
    limit = declare_limit(database, concurrency=2, lease=60)
    stopped, other = start(behind(proxies[0]), "stopped"), start(behind(proxies[1]), "other")
    all_in("redis", stopped, other)
    assert stopped.take(limit, 1, seconds=0.1)
    stopped.freeze()
    cut(proxies[1])
    all_in("lost", other)
    assert other.take(limit) == []
    db.execute("UPDATE commandbus.limit_client SET beat_at = beat_at - interval '90 s' WHERE id LIKE 'stopped %'")
    all_in("degraded", other)
    assert len(other.take(limit, 2)) == 2
    # Its leave ends on Redis' clock, however fresh it believes itself to be: nothing but its own thread has asked.
    store = stopped.store

    def refused() -> bool:
        try:
            granted = store._permits.take(
                limit, tokens(1), 1.0, epoch=store._fleet.epoch, leave=store._fleet.leave
            )
        except StaleError:
            return True
        store._permits.release(limit, granted, epoch=store._fleet.epoch)
        return False

    until(refused, QUICK.live + 10)
    stopped.thaw()
    until(lambda: one(db, "SELECT mode FROM commandbus.limit_mode") == "joining")
    assert stopped.take(limit) == []  # the other holds two, and Redis does not know of them
    assert other.take(limit) == []


def test_flushed_redis_holders_register_before_newcomers_enter(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    limit = declare_limit(database, concurrency=3, lease=3)
    clients = [start(own_redis.url, f"client {number}") for number in range(2)]
    first, second = clients
    held = first.take(limit, 2)
    before = one(db, "SELECT epoch FROM commandbus.limit_mode")
    own_redis.flush()
    until(lambda: one(db, "SELECT epoch FROM commandbus.limit_mode") != before)

    def joined() -> bool:
        assert first.renew(limit, held) == []
        granted = second.take(limit, 3)
        assert not granted or second.mode == "redis"
        return len(granted) == 1

    until(joined)
    assert second.take(limit) == []


def test_redis_that_was_restarted_with_its_data_may_lack_the_last_of_it(
    start: Start, lasting_redis: RedisServer, database: str, db: Db
) -> None:
    limit = declare_limit(database, concurrency=3, lease=3)
    client, other = start(lasting_redis.url), start(lasting_redis.url)
    held = client.take(limit, 2)
    lasting_redis.client.zrem("docai_semaphore:test", held[0])  # what had not reached the disk
    lasting_redis.restart()
    assert lasting_redis.client.zcard("docai_semaphore:test") == 1

    def entered() -> list[str]:
        assert client.renew(limit, held) == []
        return other.take(limit, 3)

    assert len(until(entered)) == 1
    assert lasting_redis.client.zcard("docai_semaphore:test") == 3


def test_the_rate_is_not_forgotten_with_redis_data(start: Start, own_redis: RedisServer, database: str) -> None:
    limit = declare_limit(database, rate="1/h", burst=3, lease=1)
    client = start(own_redis.url)
    assert len(client.take(limit, 3)) == 3
    own_redis.flush()
    assert client.take(limit, 1) == []
    all_in("redis", client)
    assert client.take(limit, 3) == []


def test_a_stopped_redis_that_goes_on_again(start: Start, own_redis: RedisServer, database: str) -> None:
    """It answers late what it was asked: a permit that nobody waits for any more, until its lease ends."""
    limit = declare_limit(database, concurrency=2, lease=6)
    clients = [start(own_redis.url, f"client {number}") for number in range(2)]
    held = clients[0].take(limit)
    all_in("redis", *clients)
    own_redis.pause()
    assert clients[1].take(limit) == []
    all_in("degraded", *clients)
    own_redis.resume()

    def back() -> bool:
        assert clients[0].renew(limit, held) == []
        return all(client.mode == "redis" for client in clients)

    until(back)
    until(lambda: clients[1].take(limit))
    assert clients[1].take(limit) == []


def test_two_databases_share_a_redis_and_its_epoch(
    start: Start, own_redis: RedisServer, database: str, empty_database: str
) -> None:
    from commandbus import CommandBus

    with CommandBus(empty_database) as bus:
        bus.migrate()
    limit = declare_limit(
        database, concurrency=3, lease=3, shared=True
    )  # neither database knows the other's programs
    declare_limit(empty_database, concurrency=3, lease=3, shared=True)
    here, there = start(own_redis.url, "here"), start(own_redis.url, "there", database_url=empty_database)
    held_here, held_there = here.take(limit, 1), there.take(limit, 2)
    assert (len(held_here), len(held_there)) == (1, 2)
    own_redis.flush()

    def is_registered() -> bool:
        assert here.renew(limit, held_here) == []
        assert there.renew(limit, held_there) == []
        assert here.take(limit) == []
        assert there.take(limit) == []
        return bool(own_redis.client.zcard("docai_semaphore:test") == 3)

    until(is_registered)
    there.release(limit, held_there[:1])
    got: list[str] = []

    def has_taken() -> bool:
        assert here.renew(limit, held_here + got) == []
        assert there.renew(limit, held_there[1:]) == []
        got.extend(here.take(limit, 3))
        return bool(got)

    until(has_taken)
    assert len(got) == 1


def test_another_environment_on_the_same_redis_is_left_alone(
    start: Start, own_redis: RedisServer, database: str, empty_database: str
) -> None:
    from commandbus import CommandBus

    with CommandBus(empty_database) as bus:
        bus.migrate()
    limit = declare_limit(database, concurrency=1, environment="test")
    foreign = declare_limit(empty_database, concurrency=1, environment="staging")
    here = start(own_redis.url, "here")
    there = start(own_redis.url, "there", database_url=empty_database, environment="staging")
    assert len(here.take(limit)) == 1
    assert len(there.take(foreign)) == 1
    own_redis.client.delete("commandbus_epoch:test")
    until(lambda: own_redis.client.exists("commandbus_epoch:test"))
    all_in("redis", here)
    assert there.mode == "redis"
    assert there.modes[-1] == "redis"
    assert "joining" not in there.modes


def test_redis_that_is_away_from_the_start(start: Start, own_redis: RedisServer, database: str) -> None:
    limit = declare_limit(database, concurrency=2, lease=1)
    own_redis.kill()
    client = start(own_redis.url)
    all_in("degraded", client)
    held = client.take(limit, 3)
    assert len(held) == 2
    own_redis.start()
    all_in("redis", client)
    until(lambda: len(client.take(limit, 2)) == 2)


def test_a_restarted_client_table_makes_itself_known_again(
    start: Start, own_redis: RedisServer, database: str, db: Db
) -> None:
    limit, client = declare_limit(database, concurrency=2), start(own_redis.url)
    held = client.take(limit)
    db.execute("TRUNCATE commandbus.limit_client, commandbus.limit_mode")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.limit_client") == 1)
    until(lambda: client.mode == "redis" and client.take(limit))
    assert client.renew(limit, held) == []


def test_without_postgresql_permits_are_given_as_long_as_the_leave_lasts(
    start: Start, own_redis: RedisServer, server: EmbeddedPostgres, database: str
) -> None:
    """Nobody can know then whether the others have counted it out. It raises nothing, and comes back by itself."""
    proxy = Proxy(urlsplit(database).port or 0)
    try:
        limit = declare_limit(database, concurrency=2, lease=60)
        client = start(
            own_redis.url, database_url=database.replace(str(urlsplit(database).port), str(proxy.port), 1)
        )
        held = client.take(limit, 2)
        cut(proxy)
        client.release(limit, held[:1])

        def is_refused() -> bool:
            granted = client.take(limit)
            client.release(limit, granted)
            return not granted

        until(is_refused, QUICK.live + 10)
        assert own_redis.client.zcard("docai_semaphore:test") == 1
        assert client.renew(limit, held[1:]) == []
        proxy.is_refusing = False
        until(lambda: client.take(limit))
        assert client.mode == "redis"
    finally:
        proxy.close()


@pytest.mark.waits
@pytest.mark.alone  # it measures how long the slowest of a hundred takes
def test_a_stopped_redis_keeps_nobody_waiting_for_long(
    start: Start, own_redis: RedisServer, database: str
) -> None:
    limit, client = declare_limit(database, concurrency=2, lease=60), start(own_redis.url)
    all_in("redis", client)
    own_redis.pause()
    all_in("degraded", client)
    slowest = 0.0
    for _ in range(100):
        began = time.monotonic()
        client.release(limit, client.take(limit))
        slowest = max(slowest, time.monotonic() - began)
    assert client.mode == "degraded"
    assert slowest < TIMEOUT_SECONDS
    own_redis.resume()
    all_in("redis", client)


FAULTS = [
    "kill",
    "flush",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("pause", "cut one", "cut all")),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.long
def test_never_above_the_limit_on_the_way_there_and_back(
    start: Start, own_redis: RedisServer, proxies: list[Proxy], database: str, fault: str
) -> None:
    """Six programs enter and leave all the time; some stay for several leases, over whatever happens."""
    limit, inside = declare_limit(database, concurrency=5, lease=2.5), Inside(5)
    clients = [start(behind(proxies[number % 2]), f"client {number}") for number in range(6)]
    for client in clients:
        client.work(limit, inside)
    all_in("redis", *clients)

    def goes_on(more: int = 20) -> None:
        goal = inside.entries + more
        until(lambda: inside.entries >= goal, 60, what=lambda: [client.modes for client in clients])

    goes_on()
    if fault == "kill":
        own_redis.kill()
        all_in("degraded", *clients)
        goes_on()
        own_redis.start()
    elif fault == "pause":
        own_redis.pause()
        all_in("degraded", *clients)
        goes_on()
        own_redis.resume()
    elif fault == "flush":
        own_redis.flush()
    elif fault == "cut one":
        cut(proxies[0])
        all_in("lost", *clients[::2])
        goes_on()
        proxies[0].is_refusing = False
    else:
        for proxy in proxies:
            cut(proxy)
        all_in("degraded", *clients)
        goes_on()
        proxies[0].is_refusing = False
        until(lambda: clients[0].mode != "degraded")
        proxies[1].is_refusing = False
    all_in("redis", *clients)
    goes_on()
    inside.assert_never_above()
