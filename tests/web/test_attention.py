"""What the first page says, from what one look at the fleet found."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from commandbus import CommandBus, Limit, RateLimitError
from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.commands.failures import FailureGroup
from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
from commandbus.flow.commands.unhandled_types import UnhandledType
from commandbus.web import rendering
from commandbus.web.attention import Fleet, concerns, headline
from support.waiting import until
from web.conftest import Serve

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


def test_a_limit_says_how_long_it_is_blocked_and_not_by_whose_clock(
    database: str, bus: CommandBus, serve: Serve
) -> None:
    bus.declare_limit(Limit("docai", concurrency=2, backoff=[600]))
    with pytest.raises(RateLimitError), bus.limit("docai"):
        raise RateLimitError("429 from docai")
    (said,) = until(lambda: texts(replace(CALM, limits=bus.limits().items)))
    assert re.fullmatch(r"limit docai is backing off for about \S+: 429 from docai, step 1 of the back-off", said)
    visit = serve()
    about, exactly = r"for about \S+: 429 from docai", r"Blocked for \S.* more, until : 429 from docai"
    for path, said in (("/limits", about), ("/limit?name=docai", exactly), ("/", about)):
        shown = re.sub(r"<time.*?</time>", "", visit.get(path).text)
        assert re.search(said, shown), path
        assert not re.search(r"until \d\d:\d\d", shown), path
    kinds = replace(CALM, domains=[replace(ORDERS, paused_types=["ship", "bill"])])
    assert texts(kinds) == ["orders/ship, orders/bill are paused"]


def test_a_critical_worker_says_why() -> None:
    ill = replace(WORKER, health={"state": "CRITICAL", "reasons": ["the settler is blocked"]})
    assert texts(replace(CALM, workers=[ill])) == ["worker w1 is critical: the settler is blocked"]
    assert headline(concerns(replace(CALM, workers=[ill]))) == "1 thing needs you:"


def test_a_type_in_trouble_says_since_when_and_since_which_version() -> None:
    def failing(count: int, **more: Any) -> FailureGroup:
        return FailureGroup(
            "f",
            "orders",
            "ship",
            "Error",
            "E",
            None,
            None,
            "s",
            count,
            AT,
            AT,
            "8f3a",
            "8f3a",
            count,
            None,
            **more,
        )

    fleet = replace(CALM, in_tsq={("orders", "ship"): 5, ("orders", "bill"): 1})
    told = replace(fleet, failures=[failing(1), failing(4, is_new=True)])
    when = f"since {AT:%b %d, %H:%M} UTC"
    assert texts(told) == [
        f"5 commands of orders/ship are in the troubleshooting queue, {when}, new in version 8f3a",
        "1 command of orders/bill is in the troubleshooting queue",
    ]
    assert texts(replace(fleet, failures=[failing(4)]))[0].endswith(f"queue, {when}, version 8f3a")
    shown = rendering.concern(concerns(told)[0])
    assert f', since <time datetime="{AT.isoformat()}">{AT:%b %d, %H:%M} UTC</time>, new in' in shown
    assert texts(replace(fleet, failures=[replace(failing(4), since_version=None)]))[0].endswith(when)
    assert concerns(replace(CALM, breakers=[BREAKER]))[0].link == "breaker?name=orders%2Fship"
