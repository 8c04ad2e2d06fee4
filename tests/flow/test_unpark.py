"""Unparking: in bites, and nothing stays parked that nothing keeps."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from breaker_harness import Db, half_open, open_it, tell
from flow_harness import Bus, one, sync_only

from commandbus import NewCommand
from commandbus.flow.commands import unpark
from commandbus.flow.commands.unpark import Parked, UnparkBite, left_parked, wake_some

SHIP = Parked("breaker", "orders", "Ship")
PAUSED = Parked("pause", "orders", "Ship")


@pytest.fixture
def bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bites of three, so that ten are many."""
    defaults = dict(unpark.wake.__kwdefaults__ or {})
    monkeypatch.setitem(unpark.wake.__kwdefaults__, "bite", 3)  # type: ignore[arg-type]
    assert defaults["bite"] == unpark.BITE


def parked(db: Db) -> int:
    count: int = one(db, "SELECT count(*) FROM commandbus.parked")
    return count


def park(bus: Bus, count: int) -> None:
    """So many commands of Ship are claimed while its breaker is open, or it is paused."""
    bus.send_many("orders", [NewCommand("Ship") for _ in range(count)])
    assert bus.claim("w", count) == []


@pytest.mark.usefixtures("bites")
@pytest.mark.parametrize("how", ["close", "reset", "resume"])
def test_people_wake_all_of_it_in_bites(orders: Bus, db: Db, how: str) -> None:
    orders.pause("orders", "Ship") if how == "resume" else open_it(orders)
    park(orders, 10)
    act = {"close": orders.close_breaker, "reset": orders.reset_breaker, "resume": orders.resume}[how]
    assert act("orders", "Ship") == 10
    assert parked(db) == 0
    assert len(orders.claim("w", 20)) == 10


@pytest.mark.usefixtures("bites")
def test_a_probe_that_went_well_wakes_the_first_bite_at_once_and_the_others_are_left_for_the_sweep(
    orders: Bus, db: Db
) -> None:
    open_it(orders)
    park(orders, 10)
    probe = half_open(orders, db)
    assert orders.run(left_parked(["orders"])) == []
    moved = tell(orders, good=[probe])
    assert moved is not None
    assert (moved.state, moved.released, parked(db)) == ("CLOSED", 3, 6)
    assert moved.rest_after is not None
    assert orders.run(left_parked(["orders"])) == [SHIP]
    assert orders.run(left_parked(["billing"])) == []
    bite = orders.run(wake_some(SHIP, moved.rest_after))
    assert bite == UnparkBite(3, one(db, "SELECT min(seq) - 1 FROM commandbus.parked"))
    assert orders.run(wake_some(SHIP, 0)).count == 3
    assert orders.run(wake_some(SHIP, 0)) == UnparkBite(0, None)
    assert orders.run(left_parked(["orders"])) == []


def test_what_a_pause_or_an_open_breaker_keeps_is_left_alone(orders: Bus, db: Db) -> None:
    open_it(orders)
    park(orders, 2)
    assert orders.run(wake_some(SHIP, 0)) == UnparkBite(0, None)
    orders.close_breaker("orders", "Ship")
    orders.pause("orders", "Ship")
    assert orders.claim() == []
    assert orders.run(wake_some(PAUSED, 0)) == UnparkBite(0, None)
    assert orders.run(left_parked(["orders"])) == []
    assert parked(db) == 2


def test_many_kinds_of_what_is_parked(orders: Bus, db: Db) -> None:
    """The look goes from one kind to the next, past what waits for limits."""
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason) "
        "SELECT 'orders', t, n * 100 + m, 1, r "
        "FROM unnest(ARRAY['breaker', 'limit', 'pause']) WITH ORDINALITY x(r, n), "
        "unnest(ARRAY['A', 'B']) t, generate_series(1, 5) m WHERE (t = 'A') = (m % 2 = 0)"
    )
    db.execute("INSERT INTO commandbus.pause (domain, command_type, operator) VALUES ('orders', 'A', 'ann')")
    db.execute("INSERT INTO commandbus.breaker (domain, command_type, state) VALUES ('orders', 'B', 'HALF_OPEN')")
    assert orders.run(left_parked(["orders"])) == [
        Parked("breaker", "orders", "A"),
        Parked("pause", "orders", "B"),
    ]


def test_rows_without_a_message_that_waits_are_removed(orders: Bus, db: Db) -> None:
    """Somebody has purged the queue, or moved a message by hand: nobody else would ever look at these rows."""
    open_it(orders)
    park(orders, 3)
    first, second = [
        row[0] for row in db.execute("SELECT msg_id FROM commandbus.parked ORDER BY seq LIMIT 2").fetchall()
    ]
    db.execute("DELETE FROM pgmq.q_orders__commands WHERE msg_id = %s", (first,))
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '30 s' WHERE msg_id = %s", (second,))
    assert orders.close_breaker("orders", "Ship") == 1
    assert parked(db) == 0
    assert one(db, "SELECT vt > now() + interval '20 s' FROM pgmq.q_orders__commands WHERE msg_id = %s", second)


@sync_only
def test_a_row_that_somebody_holds_is_passed_over_and_found_later(orders: Bus, db: Db) -> None:
    open_it(orders)
    park(orders, 3)
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands ORDER BY msg_id LIMIT 1 FOR UPDATE")
        assert orders.close_breaker("orders", "Ship") == 2
        assert parked(db) == 1
    assert orders.run(left_parked(["orders"])) == [SHIP]
    assert orders.run(wake_some(SHIP, 0)).count == 1


@sync_only
def test_one_at_a_time_and_what_was_woken_and_claimed_meanwhile_stays_claimed(orders: Bus, db: Db) -> None:
    open_it(orders)
    park(orders, 4)
    with psycopg.connect(orders.url) as other:
        other.execute("UPDATE commandbus.breaker SET state = 'CLOSED'")
        _wake(other)
        db.execute("UPDATE commandbus.breaker SET window_seconds = window_seconds WHERE false")
        other.commit()
        other.execute("SELECT 1")
        held = orders.claim("w2", 10)
        assert len(held) == 4
        assert orders.run(wake_some(SHIP, 0)) == UnparkBite(0, None)
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt > now() + interval '10 s'") == 4
    open_it(orders, "Pack")
    orders.send("orders", "Pack")
    assert orders.claim() == []
    pack = Parked("breaker", "orders", "Pack")
    db.execute("UPDATE commandbus.breaker SET state = 'CLOSED'")
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('commandbus unpark breaker orders Pack', 0))")
        assert orders.run(wake_some(pack, 0)) == UnparkBite(0, None), "somebody else is at it"
    assert orders.run(wake_some(pack, 0)) == UnparkBite(1, None)


def _wake(conn: psycopg.Connection[Any]) -> None:
    """As the maintenance of another worker does, in a transaction that is still open."""
    conn.execute(
        "WITH gone AS (DELETE FROM commandbus.parked RETURNING msg_id) "
        "UPDATE pgmq.q_orders__commands SET vt = now() WHERE msg_id IN (SELECT msg_id FROM gone)"
    )
