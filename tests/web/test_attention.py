"""What the first page says, from what one look at the fleet found."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
from commandbus.flow.commands.unhandled_types import UnhandledType
from commandbus.web.attention import Fleet, concerns, headline

AT = datetime(2026, 3, 1, tzinfo=UTC)
ORDERS = DomainStatus("orders", 0, 0, 0, 0, 0, None, 0.0, is_paused=False)
WORKER = WorkerInfo("w1", "host", 7, ["orders"], 4, "1", "ACTIVE", AT, AT, 1.0, True, 0, 0)
CALM = Fleet([ORDERS], [WORKER], [], [], {})
BREAKER = BreakerInfo("type", "orders/ship", "OPEN", "3 of 3 got stuck", AT, AT, None, 3, 0, 0, 2, False)


def texts(fleet: Fleet) -> list[str]:
    return [item.text for item in concerns(fleet)]


def test_a_calm_fleet_needs_nobody() -> None:
    assert concerns(CALM) == []
    assert headline([]) == "Nothing needs you."
    stopped = replace(WORKER, state="STOPPED", is_alive=False)
    assert concerns(replace(CALM, workers=[WORKER, stopped])) == []


def test_everything_that_needs_a_person_is_said_and_what_stands_still_comes_first() -> None:
    unhandled = UnhandledType("orders", "refund", 1, AT, 0, 60.0)
    troubled = Fleet(
        [replace(ORDERS, ready=5, is_paused=True, rejected=2, unhandled=[unhandled])],
        [replace(WORKER, is_alive=False, heartbeat_age_seconds=90.0)],
        [],
        [BREAKER],
        {("orders", "ship"): 1, ("orders", "bill"): 12},
    )
    assert texts(troubled) == [
        "5 commands of orders could run, but no worker serves it",
        "worker w1 has been silent for 1m30s",
        "the breaker of orders/ship is open: 3 of 3 got stuck, 2 commands parked",
        "12 commands of orders/bill are in the troubleshooting queue",
        "1 command of orders/ship is in the troubleshooting queue",
        "1 command of orders/refund waits for a worker that handles that type",
        "orders is paused: all of it",
        "2 messages to orders were no command",
    ]
    assert headline(concerns(troubled)) == "8 things need you:"
    assert concerns(troubled)[3].link == "troubleshooting?domain=orders&command_type=bill"


def test_a_critical_worker_says_why() -> None:
    ill = replace(WORKER, health={"state": "CRITICAL", "reasons": ["the settler is blocked"]})
    assert texts(replace(CALM, workers=[ill])) == ["worker w1 is critical: the settler is blocked"]
    assert headline(concerns(replace(CALM, workers=[ill]))) == "1 thing needs you:"
