"""Replay: a new command like an old one with other data, and both trails say so."""

from __future__ import annotations

from typing import Any

import pytest
from flow_harness import Bus, Roles, fail, sync_only

from commandbus import (
    CommandNotFoundError,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    PermanentCommandError,
)

pytestmark = sync_only


def trouble(bus: Bus, name: str, **more: Any) -> None:
    bus.send("orders", "Ship", {"to": "nowhere"}, command_id=name, **more)
    bus.settle(fail(bus.claim_one(), PermanentCommandError("no", code="BAD")))


def test_a_replay_takes_everything_but_the_data_and_both_trails_name_it(orders: Bus) -> None:
    orders.create_queue("answers")
    trouble(
        orders, "old", headers={"h": 1}, correlation_id="c-1", max_attempts=7, timeout=90, reply_to="answers",
        on_exhausted="fail",
    )  # fmt: skip
    sent = orders.commands.replay("orders", "old", {"to": "Bonn"}, new_id="new", operator="ann", reason="address")
    new, old = orders.get_command("orders", "new"), orders.get_command("orders", "old")
    assert (sent.command_id, new.status, new.data) == ("new", CommandStatus.PENDING, {"to": "Bonn"})
    assert (new.headers, new.correlation_id, new.max_attempts, new.timeout) == ({"h": 1}, "c-1", 7, 90)
    assert new.reply_to is None
    assert old.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    said = {"operator": "ann", "reason": "address"}
    assert [(e.event, e.details) for e in orders.get_audit_trail("orders", "old")][-1] == (
        "REPLAYED", {"as": "new", **said},
    )  # fmt: skip
    assert ("REPLAY", {"of": "old", **said}) in [
        (e.event, e.details) for e in orders.get_audit_trail("orders", "new")
    ]
    again = orders.commands.replay("orders", "old", None, cancel=True)
    assert orders.get_command("orders", "old").status is CommandStatus.CANCELED
    assert orders.get_command("orders", again.command_id).data is None


def test_what_cannot_be_replayed_is_refused_and_nothing_is_sent(orders: Bus, acting: Roles) -> None:
    trouble(orders, "old")
    orders.send("orders", "Ship", {}, command_id="waits")
    replay = orders.commands.replay
    with pytest.raises(CommandNotFoundError, match="no command 'nobody'"):
        replay("orders", "nobody", {})
    with pytest.raises(InvalidOperationError, match="'waits' of domain 'orders' has not ended"):
        replay("orders", "waits", {})
    for same in ("waits", "old"):
        with pytest.raises(Exception, match=same):
            replay("orders", "old", {"other": same}, new_id=same)
    with pytest.raises(InvalidCommandError):
        replay("orders", "old", {1, 2})
    orders.tsq.operator_cancel("orders", "old")
    with pytest.raises(InvalidOperationError, match="'old' is CANCELED: there is nothing to cancel"):
        replay("orders", "old", {}, cancel=True)
    assert len(orders.query_commands()) == 2
    assert acting("operator").commands.replay("orders", "old", {}, new_id="by-operator").created
    with pytest.raises(Exception, match=r"privilege|permission"):
        acting("producer").commands.replay("orders", "old", {})
