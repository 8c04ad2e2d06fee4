"""The ETA of a batch, from the database: nothing where nobody knows, and what is known of back-offs and limits."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, fail, one

from commandbus import Limit, NewCommand
from commandbus.flow.batches.fold_and_complete import fold

Db = psycopg.Connection[Any]


@pytest.fixture
def batch(orders: Bus, db: Db) -> int:
    """A batch of ten, of which five have completed, five a second."""
    orders.create_batch("orders", [NewCommand("Ship") for _ in range(10)], batch_id="b")
    id_: int = orders.get_batch("orders", "b").id
    for n in (3, 2):
        orders.settle([item.complete(None) for item in orders.claim(n=n)])
        orders.run(fold([id_]))
        db.execute("UPDATE commandbus.batch SET rate_at = rate_at - interval '1 s'")
    db.execute("UPDATE commandbus.batch SET rate = 5, rate_at = now() - interval '0.5 s', rate_count = 5")
    return id_


def eta(bus: Bus) -> float | None:
    """As a look at one batch says, and a list of batches."""
    found: float | None = bus.get_batch("orders", "b").eta_seconds
    listed = bus.query_batches("orders").items[0].eta_seconds
    assert (found is None) == (listed is None)
    assert found is None or found == pytest.approx(listed, rel=0.2, abs=2)
    return found


def stall(db: Db, seconds: float = 3600.0) -> None:
    db.execute("UPDATE commandbus.batch SET rate_at = now() - make_interval(secs => %s)", (seconds,))


@pytest.mark.usefixtures("batch")
def test_a_stalled_batch_has_no_figure(orders: Bus, db: Db) -> None:
    assert eta(orders) == pytest.approx(1, rel=0.3)
    stall(db)
    assert eta(orders) is None
    stall(db, 90 * 86400)
    assert eta(orders) is None


@pytest.mark.usefixtures("batch")
def test_paused_or_kept_by_a_breaker_or_running_has_no_figure(orders: Bus, db: Db) -> None:
    stall(db)
    orders.pause("orders", "Ship")
    assert orders.claim() == []
    assert eta(orders) is None
    orders.resume("orders", "Ship")
    orders.open_breaker("orders", "Ship")
    assert orders.claim() == []
    assert eta(orders) is None
    orders.close_breaker("orders", "Ship")
    assert len(orders.claim()) == 5
    assert eta(orders) is None


@pytest.mark.usefixtures("batch")
def test_the_end_of_a_back_off_counts(orders: Bus, db: Db) -> None:
    attempts = orders.claim()
    for attempt in attempts:
        orders.settle(fail(attempt, ValueError("x")))
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 minutes'")
    assert eta(orders) == pytest.approx(600, rel=0.02), "no sooner"
    stall(db)
    assert eta(orders) == pytest.approx(601, rel=0.02)
    db.execute(
        "UPDATE pgmq.q_orders__commands SET vt = now() "
        "WHERE msg_id = (SELECT min(msg_id) FROM pgmq.q_orders__commands)"
    )
    assert eta(orders) is None, "one of them could run, and nobody takes it"


@pytest.mark.usefixtures("batch")
def test_the_line_of_a_limit_counts(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=2, rate="2/s"))
    _park(db)
    stall(db)
    # Ten strangers wait before them: the last of ours is the fifteenth, at two a second.
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since) "
        "SELECT 'other', 'Ship', n, n, 'limit', 'docai', now() - interval '1 day' FROM generate_series(1, 10) n"
    )
    assert eta(orders) == pytest.approx(7.5)
    db.execute("UPDATE commandbus.limits SET step = 1, until = now() + interval '100 s'")
    assert eta(orders) == pytest.approx(107.5, rel=0.02), "first what is left of its back-off"
    db.execute("UPDATE commandbus.limits SET breaker_open = true, open_until = now() + interval '200 s'")
    assert eta(orders) == pytest.approx(207.5, rel=0.02)
    orders.open_breaker(limit="docai")
    assert eta(orders) is None, "a person has to close it"
    orders.reset_breaker(limit="docai")
    db.execute("UPDATE commandbus.limits SET per_second = NULL")
    assert eta(orders) is None, "nothing was measured"
    db.execute(
        "UPDATE commandbus.limits SET flow = 60, flow_at = date_part('epoch', now()), "
        "flow_since = date_part('epoch', now()) - 600"
    )
    assert eta(orders) == pytest.approx(15, rel=0.05), "one a second was given of late"
    db.execute(
        "UPDATE commandbus.limits SET flow_at = flow_at - 40, flow_since = flow_since - 40, step = 1, "
        "until = now() + interval '100 s'"
    )
    assert eta(orders) == pytest.approx(115, rel=0.05), "a back-off does not make it slower"
    db.execute("UPDATE commandbus.limits SET step = 0, until = NULL")
    db.execute("UPDATE commandbus.limits SET flow_at = flow_at - 3600")
    assert eta(orders) is None, "none was given for an hour, and nobody knows when the next one will be"


def _park(db: Db) -> None:
    """What is left of the batch waits for docai."""
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since) "
        "SELECT 'orders', 'Ship', msg_id, id, 'limit', 'docai', now() "
        "FROM commandbus.command WHERE status = 'PENDING'"
    )
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 years'")


def test_members_in_the_troubleshooting_queue_and_open_batches_have_none(orders: Bus, db: Db, batch: int) -> None:
    db.execute("UPDATE commandbus.batch SET is_open = true")
    assert eta(orders) is None
    db.execute("UPDATE commandbus.batch SET is_open = false, in_tsq = 5")
    assert eta(orders) is None
    assert one(db, "SELECT count(*) FROM commandbus.batch_waits('orders', %s, 10)", batch) == 1
    assert db.execute("SELECT * FROM commandbus.batch_waits('orders', %s, 2)", (batch,)).fetchall() == [
        ("unknown", 2, None, None, None)
    ]
