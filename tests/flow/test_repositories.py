"""The data-access layer: each repository through both drivers, in a caller's transaction, and on a pool."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, fail, sync_only
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus import (
    AsyncAuditLogger,
    AsyncBatchRepository,
    AsyncCommandRepository,
    AsyncProcessRepository,
    AuditEvent,
    AuditLogger,
    BatchRepository,
    BatchStatus,
    CancelResult,
    CommandNotFoundError,
    CommandQuery,
    CommandRepository,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    NewAuditEvent,
    NewCommand,
    NewProcess,
    PermanentCommandError,
    ProcessRepository,
    ProcessStatus,
)


@pytest.fixture
def commands(orders: Bus, part: Callable[[str], Any]) -> Any:
    return part("commands")


@pytest.fixture
def audit(orders: Bus, part: Callable[[str], Any]) -> Any:
    return part("audit")


@pytest.fixture
def batches(orders: Bus, part: Callable[[str], Any]) -> Any:
    return part("batches")


@pytest.fixture
def processes(orders: Bus, part: Callable[[str], Any]) -> Any:
    return part("processes")


def to_tsq(orders: Bus) -> None:
    """The next command fails for good, and needs a person."""
    orders.settle(fail(orders.claim_one(), PermanentCommandError("never", code="GONE")))


# --- commands -------------------------------------------------------------------------------------------------


def test_commands_are_saved_and_found_by_name(commands: Any) -> None:
    sent = commands.save("orders", NewCommand("Ship", {"n": 1}, command_id="a", correlation_id="c"))
    assert commands.save(
        "orders", NewCommand("Ship", {"n": 1}, command_id="a", correlation_id="c")
    ) == sent._replace(created=False)
    commands.save_many("orders", [NewCommand("Pack", command_id="b"), {"command_type": "Ship", "command_id": "d"}])
    assert commands.get("orders", "a").data == {"n": 1}
    assert commands.get("orders", "x") is None
    found = commands.get_many("orders", ["a", "b", "x"])
    assert {name: record.command_type for name, record in found.items()} == {"a": "Ship", "b": "Pack"}
    assert commands.get_many("orders", []) == {}
    assert commands.exists("orders", "a")
    assert not commands.exists("orders", "x")
    assert commands.exists_many("orders", ["a", "d", "x"]) == {"a", "d"}


def test_commands_come_in_pages(commands: Any, orders: Bus) -> None:
    for n in range(5):
        commands.save("orders", NewCommand("Ship" if n % 2 else "Pack", command_id=f"k{n}", correlation_id="c"))
    first = commands.query(CommandQuery(domain="orders"), limit=2)
    assert [record.command_id for record in first] == ["k4", "k3"]
    second = commands.query(CommandQuery(domain="orders"), limit=9, cursor=first.next_cursor)
    assert [record.command_id for record in second] == ["k2", "k1", "k0"]
    assert second.next_cursor is None
    assert [record.command_id for record in commands.list_by_type("orders", "Ship")] == ["k3", "k1"]
    assert len(commands.list_by_correlation("c", limit=4)) == 4
    running = orders.claim_one()
    assert [each.command_id for each in commands.list_by_status("orders", CommandStatus.IN_PROGRESS)] == ["k0"]
    assert len(commands.list_by_status(None, CommandStatus.PENDING)) == 4
    orders.settle(running.complete(None))
    assert [each.command_id for each in commands.list_by_status("orders", CommandStatus.COMPLETED)] == ["k0"]


def test_commands_are_counted_by_status(commands: Any, orders: Bus) -> None:
    commands.save_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(4)])
    commands.save("orders", NewCommand("Pack"))
    orders.settle(orders.claim_one().complete(None))
    orders.claim_one()
    assert commands.count_by_status("orders") == {
        CommandStatus.COMPLETED: 1, CommandStatus.IN_PROGRESS: 1, CommandStatus.PENDING: 3,
    }  # fmt: skip
    assert commands.count_by_status("orders", "Pack") == {CommandStatus.PENDING: 1}


def test_a_person_acts_on_commands(commands: Any, orders: Bus) -> None:
    for name in ("retried", "given_up", "done_by_hand"):
        commands.save("orders", NewCommand("Ship", command_id=name))
        to_tsq(orders)
    assert [entry.command_id for entry in commands.list_in_tsq("orders", error_code="GONE", limit=2)] == [
        "retried", "given_up",
    ]  # fmt: skip
    commands.operator_retry("orders", "retried", operator="ann")
    commands.operator_cancel("orders", "given_up", operator="ann", reason="too late")
    commands.operator_complete("orders", "done_by_hand", {"by": "hand"}, operator="ann")
    assert commands.get("orders", "retried").status is CommandStatus.PENDING
    assert commands.get_outcome("orders", "given_up").status is CommandStatus.CANCELED
    assert commands.get_outcome("orders", "done_by_hand").result == {"by": "hand"}
    assert commands.cancel("orders", "retried") is CancelResult.CANCELED
    with pytest.raises(InvalidOperationError):
        commands.operator_retry("orders", "retried")
    assert [attempt.error_code for attempt in commands.get_attempts("orders", "given_up")] == ["GONE"]


def test_what_was_moved_aside_is_listed(commands: Any, orders: Bus, db: psycopg.Connection[Any]) -> None:
    db.execute("SELECT pgmq.send('orders__commands', '{\"no\": \"type\"}')")
    orders.put_right(orders.claim_raw())
    commands.save("orders", NewCommand("Ship", reply_to="nowhere"))
    orders.settle(orders.claim_one().complete(None))
    assert [message.domain for message in commands.list_rejected("orders")] == ["orders"]
    assert [reply.queue for reply in commands.list_undelivered()] == ["nowhere"]
    assert commands.list_stuck("orders").items == []


# --- audit ----------------------------------------------------------------------------------------------------


def test_an_applications_events_stand_where_they_happened(audit: Any, orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    audit.log("orders", "k", "LABEL_PRINTED", {"printer": 7})
    first = orders.claim_one()
    audit.log("orders", "k", "CARRIER_CHOSEN")
    during = [(str(entry.event), entry.attempt) for entry in audit.get_events("orders", "k")]
    assert during == [("SENT", None), ("LABEL_PRINTED", None), ("RECEIVED", 1), ("CARRIER_CHOSEN", 1)]
    orders.settle(fail(first, ValueError("no")))
    audit.log("orders", "k", "RETRY_SEEN")
    orders.settle(orders.claim_one("w2").complete(None), "w2")
    audit.log("orders", "k", "PARCEL_GONE")
    assert [str(entry.event) for entry in audit.get_events("orders", "k")] == [
        "SENT", "LABEL_PRINTED", "RECEIVED", "CARRIER_CHOSEN", "FAILED", "RETRY_SCHEDULED", "RETRY_SEEN",
        "RECEIVED",
        "COMPLETED", "PARCEL_GONE",
    ]  # fmt: skip
    trail = orders.get_audit_trail("orders", "k")
    assert trail[1].details == {"printer": 7}
    assert (trail[0].event, trail[1].event) == (AuditEvent.SENT, "LABEL_PRINTED")


def test_many_events_are_written_together_or_not_at_all(audit: Any, orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.send("orders", "Ship", command_id="b")
    assert audit.log_many("orders", [NewAuditEvent("a", "SEEN"), NewAuditEvent("b", "SEEN", {"n": 1})]) == 2
    assert audit.log_many("orders", []) == 0
    with pytest.raises(CommandNotFoundError, match="no command 'x' in domain 'orders'"):
        audit.log_many("orders", [NewAuditEvent("a", "AGAIN"), NewAuditEvent("x", "AGAIN")])
    assert [str(entry.event) for entry in audit.get_events("orders", "a")] == ["SENT", "SEEN"]
    with pytest.raises(CommandNotFoundError):
        audit.log("nowhere", "a", "SEEN")


@pytest.mark.parametrize(
    ("event", "details", "says"),
    [
        ("COMPLETED", None, "told by commandbus itself"),
        ("completed", None, "told by commandbus itself"),
        ("", None, "event '' is not valid"),
        ("SEEN", [1], "details must be a dict"),
        ("SEEN", {"what": object()}, "details is not JSON"),
    ],
)
def test_events_that_are_none(audit: Any, orders: Bus, event: str, details: Any, says: str) -> None:
    orders.send("orders", "Ship", command_id="k")
    with pytest.raises(InvalidCommandError, match=says):
        audit.log("orders", "k", event, details)


def test_events_are_pruned_with_their_command(audit: Any, orders: Bus, db: psycopg.Connection[Any]) -> None:
    for name in ("old", "young"):
        orders.send("orders", "Ship", command_id=name)
        audit.log("orders", name, "SEEN")
    orders.settle(orders.claim_one().complete(None))
    db.execute("UPDATE commandbus.command SET finished_at = %s", [datetime.now(UTC) - timedelta(days=9)])
    orders.prune(age="1d")
    assert db.execute("SELECT count(*) FROM commandbus.audit_event").fetchone() == (1,)
    assert [str(entry.event) for entry in audit.get_events("orders", "young")] == ["SENT", "SEEN"]


def test_who_may_work_may_log(audit: Any, orders: Bus, acting: Roles, part: Callable[..., Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    for kind in ("worker", "operator"):
        part("audit", acting(kind)).log("orders", "k", f"BY_{kind}")
    for kind in ("reader", "producer"):
        role = acting(kind)
        assert_refused(lambda role=role: part("audit", role).log("orders", "k", "FORGED"))
    assert [str(entry.event) for entry in audit.get_events("orders", "k")] == ["SENT", "BY_worker", "BY_operator"]


# --- batches --------------------------------------------------------------------------------------------------


def test_batches_are_made_looked_at_and_ended(batches: Any, orders: Bus) -> None:
    batches.save("orders", [NewCommand("Ship", command_id="a")], batch_id="b1", is_open=True, custom_data={"n": 1})
    assert batches.add("orders", "b1", [NewCommand("Ship", command_id="b"), NewCommand("Ship")]) == 2
    assert batches.close("orders", "b1")
    assert batches.exists("orders", "b1")
    assert not batches.exists("orders", "b2")
    assert batches.get("orders", "b2") is None
    to_tsq(orders)
    record = batches.get("orders", "b1")
    assert (record.total, record.in_tsq, record.custom_data) == (3, 1, {"n": 1})
    assert len(batches.list_commands("orders", "b1")) == 3
    troubled = batches.list_commands("orders", "b1", CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    assert [command.command_id for command in troubled] == ["a"]
    assert batches.retry_failed("orders", "b1", operator="ann").retried == 1
    assert batches.cancel("orders", "b1", operator="ann").canceled == 3
    assert [each.batch_id for each in batches.list_by_status("orders", BatchStatus.CANCELED)] == ["b1"]
    assert len(batches.query("orders", limit=1)) == 1


# --- processes ------------------------------------------------------------------------------------------------


def test_processes_are_started_and_found(processes: Any, orders: Bus) -> None:
    orders.create_domain("processes")
    processes.save("trip", NewProcess({"city": "Rome"}, process_id="p1"))
    started = processes.save_many("trip", [NewProcess({"city": city}) for city in ("Oslo", "Bern")])
    assert len({one.process_id for one in started}) == 2
    assert processes.get("processes", "p1").data == {"city": "Rome"}
    assert processes.get("processes", "x") is None
    assert processes.exists("processes", "p1")
    assert not processes.exists("processes", "x")
    assert processes.get_steps("processes", "p1") == []
    assert processes.get_steps("processes", "x") == []
    assert len(processes.list_by_type("processes", "trip", limit=2)) == 2
    assert len(processes.query("processes", process_type="trip", status=ProcessStatus.PENDING)) == 3
    assert processes.list_by_status(None, ProcessStatus.COMPLETED).items == []
    assert processes.list_by_batch("processes", "none").items == []
    assert processes.list_strays("processes").items == []
    with pytest.raises(InvalidOperationError):
        processes.retry("processes", "p1")
    assert processes.cancel("processes", "p1", operator="ann") is ProcessStatus.PENDING


def test_the_process_of_a_command(processes: Any, orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_domain("processes")
    processes.save("trip", NewProcess({"city": "Rome"}, process_id="p1"))
    (message,) = db.execute("SELECT command_id FROM commandbus.command WHERE domain = 'processes'").fetchone() or (
        "",
    )
    assert processes.get_by_command("processes", message).process_id == "p1"
    orders.send("orders", "Ship", command_id="alone")
    assert processes.get_by_command("orders", "alone") is None
    assert processes.get_by_command("orders", "x") is None


# --- transactions and pools -----------------------------------------------------------------------------------


@sync_only
def test_repositories_join_the_callers_transaction(
    commands: Any, audit: Any, batches: Any, processes: Any, orders: Bus, database: str
) -> None:
    orders.create_domain("processes")
    with psycopg.connect(database) as conn:
        commands.save("orders", NewCommand("Ship", command_id="k"), conn=conn)
        audit.log("orders", "k", "SEEN", conn=conn)
        with pytest.raises(CommandNotFoundError):
            audit.log("orders", "x", "SEEN", conn=conn)  # the transaction goes on
        batches.save("orders", [NewCommand("Ship")], batch_id="b", conn=conn)
        processes.save("trip", NewProcess({}, process_id="p"), conn=conn)
        assert commands.exists("orders", "k", conn=conn)
        assert [str(entry.event) for entry in audit.get_events("orders", "k", conn=conn)] == ["SENT", "SEEN"]
        assert batches.get("orders", "b", conn=conn).total == 1
        assert processes.exists("processes", "p", conn=conn)
        conn.rollback()
    assert not commands.exists("orders", "k")
    assert not batches.exists("orders", "b")
    assert not processes.exists("processes", "p")


def test_repositories_of_a_pool(orders: Bus, database: str) -> None:
    if orders.driver == "sync":
        with ConnectionPool(database, min_size=1, open=True) as pool:
            CommandRepository(pool).save("orders", NewCommand("Ship", command_id="k"))
            AuditLogger(pool).log("orders", "k", "SEEN")
            assert len(AuditLogger(pool).get_events("orders", "k")) == 2
            assert BatchRepository(pool).query("orders").items == []
            assert ProcessRepository(pool).query("orders").items == []
        return

    async def use() -> None:
        async with AsyncConnectionPool(database, min_size=1, open=False) as pool:
            await AsyncCommandRepository(pool).save("orders", NewCommand("Ship", command_id="k"))
            await AsyncAuditLogger(pool).log("orders", "k", "SEEN")
            assert len(await AsyncAuditLogger(pool).get_events("orders", "k")) == 2
            assert (await AsyncBatchRepository(pool).query("orders")).items == []
            assert (await AsyncProcessRepository(pool).query("orders")).items == []

    orders.runner.run(use())


def test_both_drivers_have_the_same_methods() -> None:
    for sync, twin in (
        (CommandRepository, AsyncCommandRepository), (AuditLogger, AsyncAuditLogger),
        (BatchRepository, AsyncBatchRepository), (ProcessRepository, AsyncProcessRepository),
    ):  # fmt: skip
        names = {name for name in vars(sync) if not name.startswith("_")}
        assert names == {name for name in vars(twin) if not name.startswith("_")}
