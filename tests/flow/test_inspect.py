"""Looking: filters, pages without gaps, and states that only the queue knows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, expire_leases, fail, one

from commandbus import (
    BusinessRuleException,
    CommandQuery,
    CommandStatus,
    InvalidCommandError,
    NewCommand,
    PermanentCommandError,
)
from commandbus.flow.commands.rescue import claimable_work
from commandbus.flow.workers.registry import WorkerIdentity, beat


def _ids(page: Any) -> list[str]:
    return [record.command_id for record in page.items]


@pytest.fixture
def varied(orders: Bus) -> Bus:
    """One command in every state, and one of another domain."""
    orders.create_domain("billing")
    names = ["completed", "failed", "troubled", "retried", "running"]
    orders.send_many("orders", [NewCommand("Ship", command_id=name, correlation_id="c") for name in names])
    completed, failed, troubled, retried, _ = orders.claim()
    orders.settle(
        [
            completed.complete("1"),
            fail(failed, BusinessRuleException("no")),
            fail(troubled, PermanentCommandError("no")),
            fail(retried, ValueError("again")),
        ]
    )
    orders.send("orders", "Pack", command_id="waiting")
    orders.send("orders", "Pack", command_id="delayed", delay=60)
    orders.send("orders", "Pack", command_id="canceled")
    orders.cancel("orders", "canceled")
    orders.send("billing", "Ship", command_id="other")
    return orders


def test_filters(varied: Bus) -> None:
    def found(**filters: Any) -> list[str]:
        return sorted(_ids(varied.query_commands(**filters)))

    assert len(found()) == 9
    assert found(domain="billing") == ["other"]
    assert found(command_type="Pack") == ["canceled", "delayed", "waiting"]
    assert len(found(correlation_id="c")) == 5
    assert found(command_id="other") == ["other"]
    assert found(status="COMPLETED") == ["completed"]
    assert found(status=CommandStatus.FAILED) == ["failed"]
    assert found(status="CANCELED") == ["canceled"]
    assert found(status="IN_TROUBLESHOOTING_QUEUE") == ["troubled"]
    assert found(status="IN_PROGRESS") == ["running"]
    assert found(status="PENDING") == ["delayed", "other", "retried", "waiting"]
    assert found(status="PENDING", domain="orders") == ["delayed", "retried", "waiting"]
    assert found(status="IN_PROGRESS", domain="billing") == []
    assert found(status="PENDING", command_type="Ship", domain="orders") == ["retried"]
    later = datetime.now(UTC) + timedelta(hours=1)
    assert found(created_after=later) == []
    assert len(found(created_before=later)) == 9
    query = CommandQuery(status="IN_PROGRESS")  # type: ignore[arg-type]
    assert _ids(varied.query_commands(query)) == ["running"]
    assert found(domain="unheard_of") == []


def test_states_and_what_is_told_of_them(varied: Bus) -> None:
    states = {record.command_id: record for record in varied.query_commands().items}
    assert {name: record.status.value for name, record in states.items()} == {
        "completed": "COMPLETED",
        "failed": "FAILED",
        "troubled": "IN_TROUBLESHOOTING_QUEUE",
        "retried": "PENDING",
        "running": "IN_PROGRESS",
        "waiting": "PENDING",
        "delayed": "PENDING",
        "canceled": "CANCELED",
        "other": "PENDING",
    }
    assert states["retried"].error == "again"
    assert states["failed"].error == "no"
    assert states["completed"].error is None
    assert (states["running"].worker, states["retried"].worker) == ("w1", None)
    assert states["delayed"].visible_at > states["waiting"].visible_at


def test_pages_are_complete_and_without_gaps(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship" if n % 3 else "Pack", command_id=f"k{n}") for n in range(47)])
    orders.claim(n=10)
    for limit in (1, 7, 46, 47, 48, 1000):
        for filters in ({}, {"command_type": "Ship"}, {"status": "IN_PROGRESS"}, {"status": "PENDING"}):
            whole = orders.query_commands(limit=10_000, **filters)
            assert whole.next_cursor is None
            seen: list[str] = []
            before = None
            while True:
                page = orders.query_commands(limit=limit, cursor=before, **filters)
                assert len(page.items) <= limit
                seen += _ids(page)
                before = page.next_cursor
                if before is None:
                    break
                assert len(page.items) == limit
                if len(seen) == limit:
                    orders.send("orders", "Ship")  # newer ones do not move the pages that follow
            if limit == 1:
                continue  # enough was sent meanwhile
            assert seen == _ids(whole)
    assert [record.id for record in orders.query_commands(limit=9).items] == sorted(
        (record.id for record in orders.query_commands(limit=9).items), reverse=True
    )


def test_bad_questions_are_named(orders: Bus) -> None:
    for filters, named in [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"limit": True}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"cursor": "x"}, "cursor 'x' is not one of this list"),
        ({"cursor": -1}, "cursor -1"),
        ({"cursor": str(2**64)}, "cursor"),
        ({"domain": "Orders"}, "domain"),
        ({"status": "SLEEPING"}, "SLEEPING"),
        ({"status": 5}, "status 5"),
        ({"command_id": "a\x00"}, "command_id"),
        ({"command_id": 5}, "command_id"),
        ({"command_type": "a\x00"}, "command_type"),
        ({"correlation_id": "\ud800"}, "correlation_id"),
        ({"created_after": "2026-01-01"}, "created_after"),
        ({"created_before": datetime(2026, 1, 1)}, "created_before"),  # noqa: DTZ001
    ]:
        with pytest.raises(InvalidCommandError, match=named):
            orders.query_commands(**filters)
    with pytest.raises(TypeError, match="colour"):
        orders.query_commands(colour="red")
    for command_id in ("a\x00", None, 5, "", "\ud800"):
        with pytest.raises(InvalidCommandError, match="command_id"):
            orders.get_command("orders", command_id)
        with pytest.raises(InvalidCommandError, match="command_id"):
            orders.get_audit_trail("orders", command_id)
    with pytest.raises(InvalidCommandError, match="domain"):
        orders.get_command("Orders", "x")
    with pytest.raises(InvalidCommandError, match="domain"):
        orders.get_audit_trail("Orders", "x")
    for filters in ({"limit": 0}, {"limit": -1}, {"limit": "5"}, {"cursor": "x"}, {"cursor": -1}):
        with pytest.raises(InvalidCommandError, match=next(iter(filters))):
            orders.tsq.list(**filters)
    with pytest.raises(InvalidCommandError, match="domain"):
        orders.tsq.list("Orders")
    with pytest.raises(InvalidCommandError, match="error_code"):
        orders.tsq.count(error_code="a\x00")


def test_the_figures_of_domains(varied: Bus, db: psycopg.Connection[Any]) -> None:
    by_name = {status.domain: status for status in varied.status()}
    assert by_name.keys() == {"orders", "billing"}
    figures = by_name["orders"]
    assert (figures.ready, figures.delayed, figures.running, figures.in_tsq, figures.parked) == (2, 1, 1, 1, 0)
    assert 0 <= figures.oldest_seconds < 60
    assert (figures.is_paused, figures.paused_types, figures.rejected) == (False, [], 0)
    db.execute(
        "UPDATE pgmq.q_billing__commands SET vt = now() - interval '100 s', enqueued_at = now() - interval '1 h'"
    )
    (billing,) = varied.status("billing")
    assert (billing.ready, billing.running) == (1, 0)
    assert 100 <= billing.oldest_seconds < 160
    expire_leases(db)
    assert varied.status("orders")[0].running == 1, "held until somebody claims it"


def test_the_registry_of_workers(orders: Bus, db: psycopg.Connection[Any]) -> None:
    identity = WorkerIdentity("w1", "host", 123, ["orders"], 4, "0.1.0")
    orders.run(beat(identity, state="ACTIVE", running=2, settled=10, rates={"orders": 5.0}))
    orders.run(beat(identity, state="ACTIVE", running=3, settled=20, rates={"orders": 7.5}))
    (worker,) = orders.workers()
    assert (worker.id, worker.host, worker.pid, worker.domains) == ("w1", "host", 123, ["orders"])
    assert (worker.running, worker.settled, worker.is_alive) == (3, 20, True)
    assert orders.status("orders")[0].settled_per_second == 7.5
    db.execute("UPDATE commandbus.worker SET heartbeat_at = now() - interval '1 minute'")
    (worker,) = orders.workers()
    assert not worker.is_alive
    assert worker.heartbeat_age_seconds >= 60
    assert orders.status("orders")[0].settled_per_second == 0
    assert (worker.supervisor, worker.health) == (None, None)
    orders.run(beat(identity, state="STOPPED", running=0, settled=20, rates={}))
    assert not orders.workers()[0].is_alive


def test_supervised_workers_say_how_they_are(orders: Bus) -> None:
    identity = WorkerIdentity("w1", "host", 123, ["orders"], 4, "0.1.0", supervisor="s1")
    health: dict[str, Any] = {"state": "DEGRADED", "reasons": ["1 attempt is stuck"]}
    orders.run(beat(identity, state="DRAINING", running=2, settled=10, rates={}, health=health))
    (worker,) = orders.workers()
    assert (worker.supervisor, worker.state, worker.health) == ("s1", "DRAINING", health)
    health = {"state": "HEALTHY", "reasons": []}
    orders.run(beat(identity, state="EXITING", running=2, settled=10, rates={}, health=health))
    assert orders.workers()[0].health == health


def test_domains(bus: Bus, db: psycopg.Connection[Any]) -> None:
    assert bus.list_domains().items == []
    assert bus.create_domain("orders") is True
    assert bus.create_domain("orders") is False
    assert bus.create_domain("a" * 37) is True
    assert [(domain.name, domain.queue) for domain in bus.list_domains()] == [
        ("a" * 37, "a" * 37 + "__commands"),
        ("orders", "orders__commands"),
    ]
    bus.send("a" * 37, "Ship", command_id="k")
    assert bus.get_command("a" * 37, "k").status is CommandStatus.PENDING
    for hostile in ("Orders", "a" * 38, "x; drop table commandbus.command", "", None, "a\x00"):
        with pytest.raises(InvalidCommandError, match="domain"):
            bus.create_domain(hostile)
    for hostile in ("Answers", "a" * 48, "x; drop", "", None):
        with pytest.raises(InvalidCommandError, match="queue"):
            bus.create_queue(hostile)
    db.execute("SELECT pgmq.drop_queue('orders__commands')")
    assert bus.create_domain("orders") is False
    bus.send("orders", "Ship")
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 1


def test_a_command_for_an_instant_of_long_ago_has_not_waited_since_then(orders: Bus) -> None:
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    orders.send("orders", "Ship", at=long_ago)
    orders.send_many("orders", [{"command_type": "Ship", "at": long_ago}])
    orders.create_batch("orders", [{"command_type": "Ship", "at": long_ago}])
    (figures,) = orders.status("orders")
    assert figures.ready == 3
    assert 0 <= figures.oldest_seconds < 60
    seen = orders.run(claimable_work("orders"))
    assert (seen.ready, 0 <= seen.oldest_seconds < 60) == (3, True)
