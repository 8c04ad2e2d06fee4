"""The audit trail: every event of a command's life, in the order in which it happened."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, expire_leases, fail, one

from commandbus import AuditEvent, BusinessRuleException, PermanentCommandError, TransientCommandError


def _events(bus: Bus, command_id: str = "k") -> list[tuple[str, int | None]]:
    return [(str(entry.event), entry.attempt) for entry in bus.get_audit_trail("orders", command_id)]


def test_a_life_with_everything_in_it(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=2, correlation_id="c")
    orders.settle(fail(orders.claim_one("w1"), TransientCommandError("busy", code="HTTP_503", details={"n": 1})))
    orders.claim_one("w2")
    expire_leases(db)
    third = orders.claim_one("w3")
    orders.settle(third.give_back(), "w3")
    fourth = orders.claim_one("w4")
    orders.settle(fail(fourth, ValueError("still")), "w4")
    orders.tsq.operator_retry("orders", "k", operator="ann", reason="try")
    orders.settle(fail(orders.claim_one("w5"), PermanentCommandError("never", code="GONE")), "w5")
    orders.tsq.operator_complete("orders", "k", 5, operator="bob")
    assert _events(orders) == [
        ("SENT", None),
        ("RECEIVED", 1),
        ("FAILED", 1),
        ("RETRY_SCHEDULED", 1),
        ("RECEIVED", 2),
        ("FAILED", 2),
        ("GIVEN_BACK", 3),
        ("RECEIVED", 4),
        ("FAILED", 4),
        ("RETRY_EXHAUSTED", 4),
        ("MOVED_TO_TSQ", 4),
        ("OPERATOR_RETRY", None),
        ("RECEIVED", 5),
        ("FAILED", 5),
        ("MOVED_TO_TSQ", 5),
        ("OPERATOR_COMPLETE", None),
    ]
    trail = orders.get_audit_trail("orders", "k")
    assert [entry.at for entry in trail] == sorted(entry.at for entry in trail)
    assert trail[0].details == {"command_type": "Ship", "correlation_id": "c"}
    assert trail[1].worker == "w1"
    assert trail[2].details == {
        "verdict": "RETRY",
        "error_type": "TransientCommandError",
        "error_code": "HTTP_503",
        "error": "busy",
        "details": {"n": 1},
    }
    assert "retry_at" in trail[3].details
    assert (trail[5].worker, trail[5].details["error_code"]) == ("w2", "WORKER_LOST")
    assert trail[10].details["error"] == "still"
    assert trail[11].details == {"operator": "ann", "reason": "try"}
    assert trail[15].details == {"operator": "bob"}


@pytest.mark.parametrize(
    ("end", "events"),
    [
        (lambda a: a.complete(None), ["SENT", "RECEIVED", "COMPLETED"]),
        (lambda a: fail(a, BusinessRuleException("no")), ["SENT", "RECEIVED", "BUSINESS_RULE_FAILED"]),
        (lambda a: fail(a, PermanentCommandError("no")), ["SENT", "RECEIVED", "FAILED", "MOVED_TO_TSQ"]),
    ],
    ids=["completed", "business", "permanent"],
)
def test_short_lives(orders: Bus, end: Any, events: list[str]) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.settle(end(orders.claim_one()))
    assert [event for event, _ in _events(orders)] == events


def test_a_running_attempt_and_a_parked_command_are_in_it(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    assert _events(orders) == [("SENT", None)]
    attempt = orders.claim_one("w7")
    assert _events(orders) == [("SENT", None), ("RECEIVED", 1)]
    assert orders.get_audit_trail("orders", "k")[-1].worker == "w7"
    orders.settle(attempt.give_back(), "w7")
    orders.pause("orders", "Ship")
    orders.claim()
    assert _events(orders)[-1] == ("PARKED", 2)
    assert orders.get_audit_trail("orders", "unknown").items == []


def test_the_events_are_known(db: psycopg.Connection[Any]) -> None:
    """Every event that the view can say is one that Python knows, and the issue's are among them."""
    wanted = {
        *("SENT", "RECEIVED", "COMPLETED", "FAILED", "RETRY_SCHEDULED", "RETRY_EXHAUSTED", "MOVED_TO_TSQ"),
        *("BUSINESS_RULE_FAILED", "OPERATOR_RETRY", "OPERATOR_CANCEL", "OPERATOR_COMPLETE"),
    }
    assert wanted <= {event.value for event in AuditEvent}
    definition = one(db, "SELECT pg_get_viewdef('commandbus.audit'::regclass)")
    for event in wanted - {"OPERATOR_RETRY", "OPERATOR_CANCEL", "OPERATOR_COMPLETE"}:
        assert f"'{event}'" in definition


@pytest.mark.parametrize("skew", [-3600.0, 3600.0], ids=["behind", "ahead"])
def test_a_workers_wrong_clock_does_not_change_the_order(orders: Bus, skew: float) -> None:
    """When an attempt started is said by its worker; everything else by the server."""
    orders.send("orders", "Ship", command_id="k")
    for _ in range(2):
        attempt = orders.claim_one()
        assert attempt.started is not None
        attempt.started += skew
        orders.settle(fail(attempt, ValueError()))
    attempt = orders.claim_one()
    orders.settle(fail(attempt, PermanentCommandError()))
    orders.tsq.operator_retry("orders", "k")
    attempt = orders.claim_one()
    assert attempt.started is not None
    attempt.started += skew
    orders.settle(attempt.complete(None))
    assert _events(orders) == [
        ("SENT", None),
        *[("RECEIVED", 1), ("FAILED", 1), ("RETRY_SCHEDULED", 1)],
        *[("RECEIVED", 2), ("FAILED", 2), ("RETRY_SCHEDULED", 2)],
        *[("RECEIVED", 3), ("FAILED", 3), ("MOVED_TO_TSQ", 3), ("OPERATOR_RETRY", None)],
        *[("RECEIVED", 4), ("COMPLETED", 4)],
    ]
