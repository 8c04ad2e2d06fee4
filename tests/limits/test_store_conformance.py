"""What every back end of limits does, in Redis and in PostgreSQL alike: one suite."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from limits_harness import QUICK, Inside, Maker, tokens

from commandbus import Settings
from commandbus.db.drivers import run
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.limits.declare import get_limit
from commandbus.limits.limit_connection import LimitConnection
from commandbus.limits.stores.postgres import PostgresPermitStore
from commandbus.limits.stores.redis.store import RedisPermitStore
from commandbus.model.limit import allowance
from support.redis_server import RedisServer
from support.waiting import until


def test_grants_a_prefix_of_the_tokens_up_to_the_concurrency(make: Maker) -> None:
    limit, store, wanted = make.limit(concurrency=5), make(), tokens(8)
    assert store.take(limit, wanted, limit.lease) == wanted[:5]
    assert store.take(limit, tokens(1), limit.lease) == []


def test_a_token_that_has_a_permit_keeps_it_and_takes_no_second(make: Maker) -> None:
    limit, store = make.limit(concurrency=2), make()
    (token,) = store.take(limit, tokens(1), limit.lease)
    assert store.take(limit, [token], limit.lease) == [token]
    assert len(store.usage(limit).holders) == 1
    assert len(store.take(limit, tokens(2), limit.lease)) == 1


def test_permits_are_shared_by_all_clients(make: Maker) -> None:
    limit, one, other = make.limit(concurrency=3), make("one"), make("other")
    assert len(one.take(limit, tokens(2), limit.lease)) == 2
    assert len(other.take(limit, tokens(2), limit.lease)) == 1
    assert one.usage(limit).holders.keys() == other.usage(limit).holders.keys()


def test_giving_back_frees_that_one_only_and_twice_is_once(make: Maker) -> None:
    limit, store = make.limit(concurrency=3), make()
    held = store.take(limit, tokens(3), limit.lease)
    store.release(limit, [held[1]])
    store.release(limit, [held[1]])
    assert set(store.usage(limit).holders) == {held[0], held[2]}
    assert len(store.take(limit, tokens(3), limit.lease)) == 1


def test_an_unknown_token_frees_nothing(make: Maker) -> None:
    limit, store = make.limit(concurrency=1), make()
    store.take(limit, tokens(1), limit.lease)
    store.release(limit, tokens(1))
    assert store.take(limit, tokens(1), limit.lease) == []


def test_somebody_elses_permit_can_be_given_back_by_its_token(make: Maker) -> None:
    limit, one, other = make.limit(concurrency=1), make("one"), make("other")
    held = one.take(limit, tokens(1), limit.lease)
    other.release(limit, held)
    assert other.take(limit, tokens(1), limit.lease) != []


def test_a_lease_that_is_not_renewed_ends(make: Maker) -> None:
    limit, dead, other = make.limit(concurrency=1, lease=2), make("dead"), make("other")
    (gone,) = dead.take(limit, tokens(1), limit.lease)
    assert other.take(limit, tokens(1), limit.lease) == []
    until(lambda: other.take(limit, tokens(1), limit.lease))
    assert dead.renew(limit, [gone]) == [gone]


def test_each_holder_has_a_lease_of_its_own(make: Maker) -> None:
    """Traffic of others does not keep the permit of one who is gone."""
    limit, store = make.limit(concurrency=2, lease=1), make()
    gone = store.take(limit, tokens(1), limit.lease)[0]
    (kept,) = store.take(limit, tokens(1), limit.lease)

    def renewed_alone() -> bool:
        assert store.renew(limit, [kept]) == []
        return gone not in store.usage(limit).holders

    until(renewed_alone)
    assert set(store.usage(limit).holders) == {kept}


def test_a_renewed_permit_is_kept_beyond_its_first_lease(make: Maker) -> None:
    limit, store, other = make.limit(concurrency=1, lease=2), make(), make("other")
    held = store.take(limit, tokens(1), limit.lease)
    ends = time.monotonic() + 2.5 * limit.lease

    def held_throughout() -> bool:
        assert store.renew(limit, held) == []
        assert other.take(limit, tokens(1), limit.lease) == []
        return time.monotonic() > ends

    until(held_throughout)


def test_renewing_tells_which_are_lost(make: Maker) -> None:
    limit, store = make.limit(concurrency=2), make()
    held = store.take(limit, tokens(2), limit.lease)
    store.release(limit, held[:1])
    stranger = tokens(1)
    assert store.renew(limit, [*held, *stranger]) == [held[0], *stranger]


def test_a_permit_taken_for_a_moment_passes_to_who_renews_it(make: Maker) -> None:
    limit, keeper, heir = make.limit(concurrency=1, lease=60), make("keeper"), make("heir")
    held = keeper.take(limit, tokens(1), 5.0)
    assert heir.renew(limit, held) == []
    assert heir.usage(limit).holders[held[0]] > 30


def test_nothing_is_asked_for_and_nothing_is_got(make: Maker) -> None:
    limit, store = make.limit(concurrency=1), make()
    assert store.take(limit, [], limit.lease) == []
    assert store.renew(limit, []) == []
    store.release(limit, [])
    assert store.usage(limit).holders == {}


def test_the_rate_lets_a_burst_begin_and_then_one_by_one(make: Maker) -> None:
    limit, store = make.limit(rate="5/s", burst=4), make()
    began = time.monotonic()
    assert len(store.take(limit, tokens(10), limit.lease)) == 4
    granted = 4
    while granted < 10:
        granted += len(store.take(limit, tokens(10 - granted), limit.lease))
        assert granted <= 4 + (time.monotonic() - began) * 5 + 0.01
    assert time.monotonic() - began >= 6 / 5 - 0.01


def test_the_rate_is_that_of_the_model(make: Maker, database: str, redis_server: RedisServer) -> None:
    """The sums in Lua and in SQL come out as those in `model.limit.allowance`."""
    limit, store = make.limit(rate="40/s", burst=7), make()

    def books() -> tuple[float, float]:
        """When the bucket will be empty, and when that was written."""
        if make.kind == "redis":
            tat, at = redis_server.client.hmget("docai_rate:test", "tat", "flow_at")
            return float(tat or 0), float(at or 0)
        with psycopg.connect(database) as conn:
            row = conn.execute("SELECT tat, flow_at FROM commandbus.limits").fetchone()
            assert row is not None
            return row

    grants = 0
    for wanted in itertools.cycle((1, 3, 9, 2)):
        tat, _ = books()
        granted = len(store.take(limit, tokens(wanted), limit.lease))
        after, at = books()
        if granted:
            expected, expected_tat = allowance(at, tat, 40.0, 7, wanted)
            assert granted == expected
            assert after == pytest.approx(expected_tat, abs=1e-5)
            grants += 1
        else:
            assert after == tat
        if grants >= 25:
            break


def test_rate_and_concurrency_hold_together(make: Maker) -> None:
    limit, store = make.limit(concurrency=3, rate="1/h", burst=5), make()
    held = store.take(limit, tokens(9), limit.lease)
    assert len(held) == 3
    store.release(limit, held)
    assert len(store.take(limit, tokens(9), limit.lease)) == 2  # permits are free, the rate is used up
    assert store.take(limit, tokens(1), limit.lease) == []


def test_what_was_refused_uses_up_no_rate(make: Maker) -> None:
    limit, store = make.limit(concurrency=1, rate="1/h", burst=2), make()
    held = store.take(limit, tokens(5), limit.lease)
    for _ in range(5):
        assert store.take(limit, tokens(3), limit.lease) == []
    store.release(limit, held)
    assert len(store.take(limit, tokens(3), limit.lease)) == 1


def test_a_limit_without_concurrency_knows_its_holders(make: Maker) -> None:
    limit, store = make.limit(rate="1000/s", burst=50), make()
    held = store.take(limit, tokens(20), limit.lease)
    assert len(held) == 20
    assert set(store.usage(limit).holders) == set(held)


def test_fewer_permits_while_held_lets_nobody_in_until_enough_have_left(make: Maker) -> None:
    limit, store = make.limit(concurrency=5), make()
    held = store.take(limit, tokens(5), limit.lease)
    limit = make.limit(concurrency=2)
    assert store.renew(limit, held) == []
    for _ in range(3):
        assert store.take(limit, tokens(1), limit.lease) == []
        store.release(limit, [held.pop()])
    assert len(held) == 2
    assert store.take(limit, tokens(1), limit.lease) == []
    store.release(limit, [held.pop()])
    assert len(store.take(limit, tokens(5), limit.lease)) == 1


def test_more_permits_while_held_are_there_at_once(make: Maker) -> None:
    limit, store = make.limit(concurrency=2), make()
    store.take(limit, tokens(2), limit.lease)
    limit = make.limit(concurrency=6)
    assert len(store.take(limit, tokens(9), limit.lease)) == 4


def test_looking_tells_the_holders_their_time_and_the_flow(make: Maker) -> None:
    limit, store = make.limit(concurrency=4, lease=30), make()
    first = store.usage(limit)
    assert (first.holders, first.flow, first.mode) == ({}, None, make.kind)
    held = store.take(limit, tokens(3), limit.lease)
    found = store.usage(limit)
    assert set(found.holders) == set(held)
    assert all(25 < left <= 30 for left in found.holders.values())
    assert found.flow is not None
    assert 3 / 30 < found.flow <= 3.1  # three within a second or, on a slow machine, some more
    store.release(limit, held)
    assert store.usage(limit).holders == {}


def test_limits_of_other_names_are_others(make: Maker) -> None:
    one, other, store = make.limit(name="one", concurrency=1), make.limit(name="other", concurrency=1), make()
    assert store.take(one, tokens(1), one.lease)
    assert store.take(other, tokens(1), other.lease)
    assert store.take(one, tokens(1), one.lease) == []


def test_the_clients_clock_does_not_matter(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose clock is an hour off gets no permit that is not free, and none that ends at once."""
    limit, right = make.limit(concurrency=2, rate="1000/s", burst=1000, lease=5), make("right")
    held = right.take(limit, tokens(1), limit.lease)
    wall = time.time
    for skew in (3600.0, -3600.0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda skew=skew: wall() + skew)
            wrong = make("wrong")
            mine = wrong.take(limit, tokens(3), limit.lease)
            assert len(mine) == 1
            assert wrong.renew(limit, [*held, *mine]) == []
            assert all(0 < left <= 5 for left in wrong.usage(limit).holders.values())
        assert set(right.usage(limit).holders) == {*held, *mine}
        wrong.release(limit, mine)


def test_never_above_the_limit_with_many_threads(make: Maker) -> None:
    limit, inside = make.limit(concurrency=5), Inside(5)
    stores = [make(f"client {number}") for number in range(12)]

    def enter_and_leave(store: Any) -> None:
        for _ in range(40):
            granted = store.take(limit, tokens(2), limit.lease)
            for token in granted:
                inside.enter(token)
            for token in granted:
                inside.leave(token)
            store.release(limit, granted)

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(enter_and_leave, stores))
    inside.assert_never_above()
    assert inside.entries > 50
    assert stores[0].usage(limit).holders == {}


@pytest.fixture
def counter() -> Any:
    """Counts who is inside, for many processes: [now, peak, entries]."""
    return multiprocessing.get_context("spawn").Array("i", 3)


def test_never_above_the_limit_with_ten_processes_while_some_are_killed(
    make: Maker, database: str, redis_url: str, counter: Any
) -> None:
    """One who is killed inside may still be at work: its permit is free only after its lease."""
    make.limit(concurrency=5, lease=2)
    context = multiprocessing.get_context("spawn")
    settings = {"database_url": database, "redis_url": redis_url, "environment": "test"}
    processes = [
        context.Process(target=_enter_and_leave, args=(make.kind, settings, counter, sys.path, number < 4))
        for number in range(10)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
            assert process.exitcode in (0, -9)
        assert sum(process.exitcode == -9 for process in processes) == 4
    finally:
        for process in processes:
            process.kill()
    assert counter[1] <= 5
    assert counter[2] > 100


def _enter_and_leave(kind: str, settings: dict[str, Any], counter: Any, path: list[str], is_to_die: bool) -> None:
    """A process of the test above; `is_to_die`: it is killed while it is inside, for the third time."""
    sys.path[:] = path
    chosen = Settings(**settings)
    store: Any = (
        PostgresPermitStore(LimitConnection(LastingConnection(chosen, name="process")))
        if kind == "postgres"
        else RedisPermitStore(chosen, "process", pace=QUICK)
    )
    with psycopg.connect(settings["database_url"], autocommit=True) as conn:
        limit = run(conn, get_limit("docai"))
    entered, deadline = 0, time.monotonic() + 90
    while entered < 20 and time.monotonic() < deadline:
        granted = store.take(limit, tokens(1), limit.lease)
        if not granted:
            time.sleep(0.005)
            continue
        entered += 1
        with counter.get_lock():
            counter[0] += 1
            counter[1] = max(counter[1], counter[0])
            counter[2] += 1
        if is_to_die and entered == 3:
            # Its call goes on at the other end for as long as its permit is kept; then it is no longer inside.
            left = store.usage(limit).holders[granted[0]]
            if os.fork() == 0:
                threading.Event().wait(left - 0.3)
                with counter.get_lock():
                    counter[0] -= 1
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        with counter.get_lock():
            counter[0] -= 1
        store.release(limit, granted)
    assert entered == 20
