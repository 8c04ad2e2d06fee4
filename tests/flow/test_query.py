"""Searches that look at a bounded number of rows: what they find, and that a partial answer goes on to the end."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, fail

from commandbus import InvalidCommandError, NewCommand, PermanentCommandError
from commandbus.flow.commands import query_filters, query_sources


def found(bus: Bus, **filters: Any) -> list[str]:
    return [item.command_id for item in bus.query_commands(**filters)]


@pytest.fixture
def shipped(orders: Bus) -> Bus:
    """Ten commands: the first two failed for good, and are in the troubleshooting queue."""
    orders.send_many(
        "orders",
        [
            NewCommand(
                "Ship", {"order_no": n, "to": {"city": "Bern" if n % 2 else "Basel"}}, command_id=f"ship-{n}"
            )
            for n in range(10)
        ],
    )
    first, second = orders.claim(n=2)
    orders.settle(
        [
            fail(first, PermanentCommandError("Street not FOUND", code="ADDRESS")),
            fail(second, PermanentCommandError("no such city", code="CITY")),
        ]
    )
    return orders


def test_what_a_payload_and_an_error_contain(shipped: Bus) -> None:
    assert found(shipped, data={"order_no": "7"}) == ["ship-7"]
    assert found(shipped, data={"to.city": "Bern", "order_no": "4"}) == []
    assert found(shipped, data={"to.city": "Bern"}) == ["ship-9", "ship-7", "ship-5", "ship-3", "ship-1"]
    assert found(shipped, error="street NOT found") == ["ship-0"]
    assert found(shipped, error="city") == ["ship-1"]
    assert found(shipped, error="%") == []
    assert found(shipped, status="IN_TROUBLESHOOTING_QUEUE", domain="orders") == ["ship-1", "ship-0"]
    assert found(shipped, worker="w1") == ["ship-1", "ship-0"]
    assert found(shipped, worker="nobody") == []


@pytest.mark.parametrize(
    "data", [{"": "1"}, {"a": 1}, {1: "a"}, "a=1", {f"p{n}": "1" for n in range(11)}, {"a": "\x00"}], ids=str
)
def test_a_path_that_makes_no_sense_is_named(orders: Bus, data: Any) -> None:
    with pytest.raises(InvalidCommandError, match="data"):
        orders.query_commands(data=data)


def test_json_that_postgresql_cannot_read_is_passed_over(shipped: Bus) -> None:
    with psycopg.connect(shipped.url) as conn:
        conn.execute(
            "UPDATE commandbus.command SET data = '{\"order_no\": \"\\u0000\"}'::json WHERE command_id = 'ship-8'"
        )
    assert found(shipped, data={"order_no": "7"}) == ["ship-7"]


@pytest.mark.parametrize(
    ("filters", "limit"), [({"command_type": "Ship"}, 4), ({"data": {"order_no": "1"}}, 1), ({"error": "city"}, 1)]
)
def test_a_partial_answer_goes_on_to_the_end(
    shipped: Bus, filters: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = found(shipped, **filters)
    monkeypatch.setattr(query_filters, "BUDGET", 3)
    monkeypatch.setattr(query_filters, "BUDGET_FOR_DATA", 1)
    monkeypatch.setattr(query_sources, "BITE", 1)
    monkeypatch.setattr(query_sources, "FEW", 2)
    seen: list[str] = []
    cursor, partial, calls = None, 0, 0
    while calls < 40:
        page = shipped.query_commands(**filters, limit=limit, cursor=cursor)
        seen += [item.command_id for item in page]
        partial += page.is_partial
        assert not page.is_partial or page.has_more
        calls, cursor = calls + 1, page.next_cursor
        if cursor is None:
            break
    assert seen == whole
    assert partial > 0


def test_a_rare_domain_is_found_at_once(shipped: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.create_domain("rare")
    shipped.send("rare", "Ship", command_id="one")
    shipped.send_many("orders", [NewCommand("Ship") for _ in range(5)])
    monkeypatch.setattr(query_filters, "BUDGET", 3)
    page = shipped.query_commands(domain="rare")
    assert ([item.command_id for item in page], page.has_more) == (["one"], False)


def test_counts_are_capped_and_say_so(shipped: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    (status,) = shipped.status("orders")
    assert (status.ready, status.in_tsq, status.capped) == (8, 2, [])
    assert str(status.ready) == "8"
    monkeypatch.setattr("commandbus.flow.commands.inspect.MOST_COUNTED", 5)
    (status,) = shipped.status("orders")
    assert (status.ready, str(status.ready), f"{status.ready} commands") == (5, "5+", "5+ commands")
    assert "ready" in status.capped
    assert "in_tsq" not in status.capped


def test_the_troubleshooting_queue_in_pages(shipped: Bus) -> None:
    shipped.create_domain("billing")
    shipped.send("billing", "Pay", command_id="pay")
    attempt = shipped.claim_one(domain="billing")
    shipped.settle([fail(attempt, PermanentCommandError("broke", code="CITY"))])

    def ids(*args: Any, **filters: Any) -> list[str]:
        return [item.command_id for item in shipped.tsq.list(*args, **filters)]

    assert ids() == ["ship-0", "ship-1", "pay"]
    assert ids(limit=1) == ["ship-0"]
    assert ids("orders") == ["ship-0", "ship-1"]
    assert ids("orders", "Ship", error_code="CITY") == ["ship-1"]
    assert ids(None, "Pay") == ["pay"]
    assert ids(error_code="CITY") == ["ship-1", "pay"]
    first = shipped.tsq.list("orders", limit=1)
    assert [item.command_id for item in shipped.tsq.list("orders", cursor=first.next_cursor)] == ["ship-1"]
