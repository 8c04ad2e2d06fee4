"""renew: leases are extended, never shortened; the lost ones are told; a locked row starves nobody."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
from flow_harness import Bus, expire_leases, fail, one

from commandbus import NewCommand
from commandbus.flow.commands.renew import PendingCancel, Renewal, renew


def _left(db: psycopg.Connection[Any]) -> list[timedelta]:
    return [row[0] for row in db.execute("SELECT vt - now() FROM pgmq.q_orders__commands ORDER BY msg_id")]


def test_leases_are_extended_and_never_shortened(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(3)])
    attempts = orders.claim(lease=20)
    assert orders.renew(attempts, lease=100) == []
    assert all(timedelta(seconds=90) < left for left in _left(db))
    assert orders.renew(attempts, lease=5) == []
    assert all(timedelta(seconds=80) < left for left in _left(db))
    assert one(db, "SELECT max(read_ct) FROM pgmq.q_orders__commands") == 1
    assert orders.renew([], lease=5) == []


def test_the_lost_ones_are_told(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(5)])
    kept, settled, retried, taken, given = orders.claim()
    orders.settle([settled.complete(None), fail(retried, ValueError()), given.give_back()])
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1s' WHERE msg_id = %s", (taken.msg_id,))
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '1h' WHERE headers IS NULL")
    assert [attempt.id for attempt in orders.claim("w2")] == [taken.id]
    lost = orders.renew([kept, settled, retried, taken, given])
    assert sorted(lost) == sorted((a.msg_id, a.read_ct) for a in (settled, retried, taken, given))
    assert orders.renew([kept], "w2") == [(kept.msg_id, kept.read_ct)]


def test_a_lease_that_ran_out_but_was_not_taken_is_renewed(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    attempt = orders.claim_one()
    expire_leases(db)
    assert orders.renew([attempt], lease=60) == []
    assert orders.claim("w2") == []


def test_a_locked_row_is_neither_waited_for_nor_lost_and_is_told(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(3)])
    attempts = orders.claim(lease=20)
    fences = [(attempt.msg_id, attempt.read_ct) for attempt in attempts]
    with psycopg.connect(orders.url) as completing:
        completing.execute("SELECT FROM pgmq.q_orders__commands WHERE msg_id = %s FOR UPDATE", (fences[1][0],))
        assert orders.run(renew("orders", "w1", attempts, lease_seconds=100)) == Renewal([], [], [fences[1]])
        first, locked, last = _left(db)
        assert min(first, last) > timedelta(seconds=90) > locked
    assert orders.run(renew("orders", "w1", attempts, lease_seconds=100)) == Renewal([], [], [])
    assert min(_left(db)) > timedelta(seconds=90)


def test_a_locked_row_that_is_to_be_canceled_tells_both(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    fence = (attempt.msg_id, attempt.read_ct)
    orders.cancel("orders", "k", operator="ann")
    with psycopg.connect(orders.url) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        renewal = orders.run(renew("orders", "w1", [attempt], lease_seconds=100))
    assert renewal == Renewal([], [PendingCancel(*fence, "ann", None)], [fence])


def test_a_row_of_somebody_else_is_lost_locked_or_not(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    attempt = orders.claim_one()
    fence = (attempt.msg_id, attempt.read_ct)
    expire_leases(db)
    orders.claim_one("w2")
    with psycopg.connect(orders.url) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        assert orders.run(renew("orders", "w1", [attempt], lease_seconds=100)) == Renewal([fence], [], [])
