"""What people and senders do with breakers: open, close, reset; of limits too; and refuse to send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from breaker_harness import Db, actions, half_open, let_time_pass, open_it, state, step, stuck, tell
from flow_harness import Bus, one

from commandbus import InvalidCommandError, InvalidOperationError, NewCommand, UnknownDomainError
from commandbus.errors import BreakerOpenError, ConfigurationError, UnknownLimitError
from commandbus.flow.breakers.breaker import watch
from commandbus.model.breaker import Breaker
from commandbus.settings import Settings

# --- people


def test_what_a_person_opened_stays_open_until_a_person_closes_it(orders: Bus, db: Db) -> None:
    sent = orders.send("orders", "Ship", command_id="k").id
    assert orders.open_breaker("orders", "Ship", operator="ann", reason="the carrier is down") is True
    assert orders.open_breaker("orders", "Ship", operator="bob") is False
    assert orders.claim() == []
    assert orders.get_command("orders", "k").waiting_note == "breaker opened by ann: the carrier is down"
    assert orders.get_command("orders", "k").waiting_until is None
    (info,) = orders.breakers()
    assert (info.state, info.is_forced, info.until, info.parked) == ("OPEN", True, None, 1)
    assert list(orders.run(watch(["orders"])).due) == []
    assert step(orders) is None
    assert tell(orders, stuck(), stuck(), stuck(), good=[sent]) is None
    assert orders.close_breaker("orders", "Ship", operator="bob") == 1
    assert orders.claim_one().id == sent
    assert actions(db) == [("breaker orders/Ship", "OPEN", "ann"), ("breaker orders/Ship", "CLOSE", "bob")]
    assert one(db, "SELECT reason FROM commandbus.control_action ORDER BY id LIMIT 1") == "the carrier is down"


def test_a_person_takes_over_one_that_opened_by_itself(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship")
    open_it(orders)
    orders.claim()
    probe = half_open(orders, db)
    assert orders.open_breaker("orders", "Ship", operator="ann") is True
    assert orders.claim() == [], "the probe is none any more"
    assert tell(orders, good=[probe]) is None
    assert state(db) == "OPEN"
    assert orders.reset_breaker("orders", "Ship", operator="ann") == 1
    assert [action for _, action, _ in actions(db)] == ["OPEN", "HALF_OPEN", "OPEN", "RESET"]


def test_reset_forgets_what_was_counted(orders: Bus) -> None:
    tell(orders, stuck(), stuck())
    assert orders.reset_breaker("orders", "Ship", operator="ann") == 0
    assert tell(orders, stuck(), stuck()) is None


def test_refusals(orders: Bus, db: Db) -> None:
    for act in (orders.open_breaker, orders.close_breaker, orders.reset_breaker):
        with pytest.raises(UnknownDomainError):
            act("nowhere", "Ship")
        with pytest.raises(InvalidCommandError, match="command_type"):
            act("orders", "")
        with pytest.raises(InvalidOperationError, match="give a domain and a command_type, or limit=NAME"):
            act("orders")
        with pytest.raises(InvalidOperationError, match="not both"):
            act("orders", "Ship", limit="docai")
    with pytest.raises(
        InvalidOperationError, match="of command_type 'Ship' of domain 'orders' has counted nothing"
    ):
        orders.close_breaker("orders", "Ship")
    with pytest.raises(InvalidOperationError, match="has counted nothing and was never opened"):
        orders.reset_breaker("orders", "Ship")
    tell(orders, stuck())
    with pytest.raises(InvalidOperationError, match="is not open"):
        orders.close_breaker("orders", "Ship")
    assert actions(db) == []


# --- refusing at send


@pytest.fixture
def refusing(orders: Bus, connect: Callable[..., Bus]) -> Bus:
    """A bus that refuses to send Ship while its breaker is open."""
    return connect(
        None, settings=Settings(database_url=orders.url, breakers={"orders/Ship": Breaker(on_open="refuse")})
    )


def test_sends_are_refused_while_it_is_open(orders: Bus, refusing: Bus, db: Db) -> None:
    assert refusing.send("orders", "Ship").created
    open_it(orders)
    orders.claim()
    sends: list[Callable[[], Any]] = [
        lambda: refusing.send("orders", "Ship"),
        lambda: refusing.send("orders", "Ship", unique="k", on_conflict="replace"),
        lambda: refusing.call("orders", "Ship"),
        lambda: refusing.send_many("orders", [NewCommand("Pack"), NewCommand("Ship")]),
        lambda: refusing.create_batch("orders", [NewCommand("Pack"), NewCommand("Ship")], batch_id="b"),
    ]
    before = one(db, "SELECT count(*) FROM commandbus.command")
    for send in sends:
        with pytest.raises(BreakerOpenError, match=r"open until .* UTC: 3 of 3 attempts stuck since") as refused:
            send()
        assert (refused.value.domain, refused.value.command_type) == ("orders", "Ship")
    assert one(db, "SELECT count(*) FROM commandbus.command") == before, "nothing was sent"
    assert one(db, "SELECT count(*) FROM commandbus.batch") == 0
    assert refusing.send("orders", "Pack").created
    assert orders.send("orders", "Ship").created, "who was not told to refuse does not"
    half_open(orders, db)
    with pytest.raises(BreakerOpenError, match="half open"):
        refusing.send("orders", "Ship")
    orders.close_breaker("orders", "Ship")
    refusing.create_batch("orders", [NewCommand("Ship")], batch_id="b", is_open=True)
    assert refusing.add_to_batch("orders", "b", [NewCommand("Ship")]) == 1
    orders.open_breaker("orders", "Ship", operator="ann")
    with pytest.raises(BreakerOpenError, match="opened by ann"):
        refusing.add_to_batch("orders", "b", [NewCommand("Ship")])


def test_once_the_time_has_passed_sends_are_let_in_for_one_to_be_tried(orders: Bus, refusing: Bus, db: Db) -> None:
    open_it(orders)
    let_time_pass(db)
    sent = refusing.send("orders", "Ship").id
    assert orders.claim() == []
    assert half_open(orders, db) == sent


# --- limits


@pytest.fixture
def docai(orders: Bus, db: Db) -> None:
    """A limit, as its declaration stores it."""
    db.execute(
        "INSERT INTO commandbus.limits (name, environment, store, concurrency, lease, tries, backoff, "
        "breaker_failures, breaker_reset) VALUES ('docai', 'test', 'postgres', 5, 120, 4, '{2,4}', 3, 60)"
    )


@pytest.mark.usefixtures("docai")
def test_limits_have_breakers_too(orders: Bus, db: Db) -> None:
    (info,) = orders.breakers()
    assert (info.kind, info.name, info.state, info.parked, info.is_forced) == (
        "limit",
        "docai",
        "CLOSED",
        0,
        False,
    )
    with psycopg.connect(orders.url, autocommit=True) as listener:
        listener.execute("LISTEN commandbus_limits")
        assert orders.open_breaker(limit="docai", operator="ann", reason="invoice unpaid") is True
        assert [said.payload for said in listener.notifies(timeout=10, stop_after=1)] == ["limit docai"]
    assert orders.open_breaker(limit="docai", operator="ann") is False
    (info,) = orders.breakers()
    assert (info.state, info.is_forced, info.reason) == ("OPEN", True, "by ann: invoice unpaid")
    db.execute("UPDATE commandbus.limits SET failures = 2, step = 3, until = now(), reason = '429'")
    assert orders.close_breaker(limit="docai", operator="bob") == 0
    row = db.execute(
        "SELECT breaker_open, breaker_forced, open_reason, failures, step, reason FROM commandbus.limits"
    ).fetchone()
    assert row == (False, False, None, 0, 3, "429")
    with pytest.raises(InvalidOperationError, match="the breaker of limit 'docai' is not open"):
        orders.close_breaker(limit="docai")
    assert orders.reset_breaker(limit="docai", operator="bob") == 0
    assert db.execute("SELECT step, until, reason FROM commandbus.limits").fetchone() == (0, None, None)
    assert actions(db) == [
        ("breaker docai", "OPEN", "ann"), ("breaker docai", "CLOSE", "bob"), ("breaker docai", "RESET", "bob"),
    ]  # fmt: skip


@pytest.mark.usefixtures("docai")
def test_a_limit_that_nobody_knows(orders: Bus) -> None:
    for act in (orders.open_breaker, orders.close_breaker, orders.reset_breaker):
        with pytest.raises(UnknownLimitError, match=r"unknown limit 'nobody' \(known: docai\)"):
            act(limit="nobody")
        with pytest.raises(ConfigurationError, match="not the name of a limit"):
            act(limit="No Body")
