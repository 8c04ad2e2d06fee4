"""pause and resume: a domain is not claimed; a type's commands are parked, and none stays parked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from flow_harness import (
    Bus,
    at_once,
    expire_leases,
    fail,
    one,
    queue_length,
    snapshot,
    sync_only,
    wait_until_blocked,
)

from commandbus import (
    CommandBus,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    UnknownDomainError,
)
from commandbus.flow.commands.claim import claim, put_right


def test_a_paused_domain_is_not_claimed(orders: Bus) -> None:
    orders.create_domain("billing")
    orders.send("orders", "Ship")
    orders.send("billing", "Ship")
    assert orders.pause("orders", operator="ann", reason="flood") is True
    assert orders.pause("orders", operator="bob") is False
    (pause,) = orders.pauses()
    assert (pause.domain, pause.command_type, pause.operator, pause.reason) == ("orders", None, "ann", "flood")
    assert orders.claim() == []
    assert len(orders.claim(domain="billing")) == 1
    orders.send("orders", "Ship")
    assert orders.claim() == []
    assert orders.resume("orders") == 0
    assert len(orders.claim()) == 2
    assert orders.pauses().items == []


def test_what_runs_goes_on(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    orders.pause("orders")
    assert orders.renew([attempt]) == []
    assert orders.settle(attempt.complete(None)) == {}
    assert orders.get_command("orders", "k").status is CommandStatus.COMPLETED


def test_a_paused_types_commands_are_parked_and_resumed(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for n in range(3):
        orders.send("orders", "Ship", command_id=f"s{n}", max_attempts=1)
        orders.send("orders", "Pack", command_id=f"p{n}")
    assert orders.pause("orders", "Ship", operator="ann")
    assert sorted(attempt.command_id for attempt in orders.claim()) == ["p0", "p1", "p2"]
    record = orders.get_command("orders", "s0")
    assert (record.status, record.waiting_for, record.visible_at) == (CommandStatus.PENDING, "pause", None)
    (status,) = orders.status("orders")
    assert (status.parked, status.ready, status.delayed, status.running) == (3, 0, 0, 3)
    assert (status.is_paused, status.paused_types) == (False, ["Ship"])
    said = orders.get_audit_trail("orders", "s0")[-1]
    assert (said.event, said.attempt, said.details["error"]) == ("PARKED", 1, "its command type is paused")
    assert orders.claim() == []
    with psycopg.connect(orders.url, autocommit=True) as listener:
        listener.execute("LISTEN commandbus_orders")
        assert orders.resume("orders", "Ship") == 3
        assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1
    again = orders.claim()
    assert sorted(attempt.command_id for attempt in again) == ["s0", "s1", "s2"]
    assert all((attempt.number, attempt.charge) == (2, 1) for attempt in again), "parking is not charged"
    assert orders.settle([attempt.complete(None) for attempt in again]) == {}
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_parking_twice_keeps_the_charge(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    for _ in range(3):
        orders.pause("orders", "Ship")
        assert orders.claim() == []
        assert orders.resume("orders", "Ship") == 1
    assert orders.claim_one().charge == 1


def test_a_domain_and_its_type_are_paused_apart(orders: Bus) -> None:
    orders.send("orders", "Ship")
    orders.pause("orders", "Ship")
    assert orders.claim() == []
    orders.pause("orders")
    assert [(pause.domain, pause.command_type) for pause in orders.pauses()] == [
        ("orders", "Ship"),
        ("orders", None),
    ]
    assert orders.resume("orders") == 0
    assert orders.claim() == []
    assert orders.resume("orders", "Ship") == 1
    assert len(orders.claim()) == 1


def test_a_retry_of_a_paused_type_is_parked_when_it_is_due(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    orders.pause("orders", "Ship")
    orders.settle(fail(attempt, ValueError("x")))
    assert orders.claim() == []
    assert orders.get_command("orders", "k").waiting_for == "pause"
    orders.resume("orders", "Ship")
    again = orders.claim_one()
    assert (again.number, again.charge) == (3, 2)


def test_a_lost_attempt_of_a_paused_type_is_recorded_and_parked(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.claim_one("dead")
    orders.pause("orders", "Ship")
    expire_leases(db)
    assert orders.claim("w2") == []
    assert db.execute("SELECT number, verdict FROM commandbus.attempt").fetchall() == [(1, "LOST"), (2, "PARKED")]
    orders.resume("orders", "Ship")
    again = orders.claim_one("w2")
    assert (again.number, again.charge, again.is_suspect) == (3, 1, True)


def test_refusals(orders: Bus, db: psycopg.Connection[Any]) -> None:
    before = snapshot(db)
    with pytest.raises(InvalidOperationError, match="domain 'orders' is not paused"):
        orders.resume("orders")
    with pytest.raises(InvalidOperationError, match="command_type 'Ship' of domain 'orders' is not paused"):
        orders.resume("orders", "Ship")
    with pytest.raises(UnknownDomainError):
        orders.pause("nowhere")
    for command_type in ("", "a\x00", 5, "x" * 201, "\ud800"):
        with pytest.raises(InvalidCommandError, match="command_type"):
            orders.pause("orders", command_type)
        with pytest.raises(InvalidCommandError, match="command_type"):
            orders.resume("orders", command_type)
    assert snapshot(db) == before


@sync_only
def test_a_row_that_another_claimer_looks_at_is_parked_too(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.pause("orders", "Ship")
    found = orders.claim_raw()
    with psycopg.connect(orders.url) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        putting = threads.submit(orders.put_right, found)
        wait_until_blocked(db)
        other.commit()
        assert putting.result(30) == ([], 0)
    assert orders.get_command("orders", "k").waiting_for == "pause"


@sync_only
@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_resume_races_with_parking(orders: Bus, db: psycopg.Connection[Any], level: str) -> None:
    """Claimers park while an operator pauses and resumes, many times: in the end nothing stays parked, whatever
    the database's own isolation level is."""
    name = one(db, "SELECT quote_ident(current_database())")
    db.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'".encode())
    count = 60
    orders.send_many("orders", [NewCommand("Ship") for _ in range(count)])
    over = threading.Event()

    def operator() -> None:
        try:
            with CommandBus(orders.url) as bus:
                for _ in range(60):
                    bus.pause("orders", "Ship", operator="ann")
                    bus.resume("orders", "Ship")
        finally:
            over.set()

    def worker(name: str) -> int:
        seen = 0
        with CommandBus(orders.url) as bus:
            while not over.is_set():
                found = bus.run(claim(domain="orders", worker=name, n=15, lease_seconds=60, cursor=None))
                rows = list(found.ready)
                if found.odd:
                    right, _ = bus.run(put_right(domain="orders", worker=name, odd=found.odd, max_bytes=1000))
                    rows += right
                    seen += len(found.odd) - len(right)
                if rows:
                    from commandbus.flow.commands.claimed_row import ClaimedRow
                    from commandbus.flow.commands.settle import given_back, settle

                    back = [given_back(ClaimedRow(*row).fence("orders")) for row in rows]
                    while back:  # busy: the other claimer looked at the row just now
                        answers = bus.run(settle("orders", name, back))
                        assert set(answers.values()) <= {"busy"}
                        back = [item for item in back if (item.msg_id, item.read_ct) in answers]
        return seen

    answers = at_once([operator, lambda: worker("w1"), lambda: worker("w2")])
    assert answers[0] is None, answers
    assert all(isinstance(answer, int) for answer in answers[1:]), answers
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt > now() + interval '1 year'") == 0
    assert queue_length(db) == count
    last = orders.claim("late", count)
    assert len(last) == count
    assert {attempt.charge for attempt in last} == {1}


def test_who_resumes_is_written_down_as_who_pauses_is(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.pause("orders", "Ship", operator="ann", reason="flood")
    assert orders.pause("orders", "Ship", operator="bob") is False
    orders.resume("orders", "Ship", operator="cid", reason="dry again")
    orders.pause("orders", operator="ann")
    orders.resume("orders")
    rows = db.execute(
        "SELECT subject, action, operator, reason FROM commandbus.control_action ORDER BY id"
    ).fetchall()
    assert rows[:3] == [
        ("pause orders/Ship", "PAUSE", "ann", "flood"),
        ("pause orders/Ship", "RESUME", "cid", "dry again"),
        ("pause orders/", "PAUSE", "ann", None),
    ]
    assert rows[3][:2] == ("pause orders/", "RESUME")
    assert rows[3][2], "whoever it was has a name"
