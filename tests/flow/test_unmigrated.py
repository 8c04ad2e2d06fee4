"""A database without the schema: every public method says so, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, one

from commandbus import CommandBus, CommandStatus, Limit, NewCommand, SchemaError, TroubleshootingQueue

CALLS: dict[str, list[Callable[[Bus], Any]]] = {
    "create_domain": [lambda bus: bus.create_domain("orders")],
    "create_queue": [lambda bus: bus.create_queue("answers")],
    "list_domains": [lambda bus: bus.list_domains()],
    "create_roles": [lambda bus: bus.create_roles("unmigrated")],
    "send": [lambda bus: bus.send("orders", "x"), lambda bus: bus.send("orders", "x", command_id="k", delay=1)],
    "send_many": [lambda bus: bus.send_many("orders", [NewCommand("x"), NewCommand("x", command_id="k")])],
    "cancel": [lambda bus: bus.cancel("orders", "x")],
    "get_command": [lambda bus: bus.get_command("orders", "x")],
    "get_outcome": [lambda bus: bus.get_outcome("orders", "x")],
    "query_commands": [
        lambda bus: bus.query_commands(),
        lambda bus: bus.query_commands(status=CommandStatus.PENDING),
        lambda bus: bus.query_commands(domain="orders", status="IN_PROGRESS"),
    ],
    "get_audit_trail": [lambda bus: bus.get_audit_trail("orders", "x")],
    "get_attempts": [lambda bus: bus.get_attempts("orders", "x")],
    "list_stuck_groups": [lambda bus: bus.list_stuck_groups()],
    "list_stuck": [lambda bus: bus.list_stuck(), lambda bus: bus.list_stuck("orders", "x")],
    "rejected": [lambda bus: bus.rejected(), lambda bus: bus.rejected("orders")],
    "create_batch": [
        lambda bus: bus.create_batch("orders", [NewCommand("x")]),
        lambda bus: bus.create_batch("orders", [], batch_id="b", on_complete={"reply_to": "q"}),
    ],
    "add_to_batch": [lambda bus: bus.add_to_batch("orders", "b", [NewCommand("x")])],
    "close_batch": [lambda bus: bus.close_batch("orders", "b")],
    "get_batch": [lambda bus: bus.get_batch("orders", "b")],
    "query_batches": [lambda bus: bus.query_batches(), lambda bus: bus.query_batches("orders", "PENDING")],
    "wait_for_batch": [lambda bus: bus.wait_for_batch("orders", "b", wait=1)],
    "cancel_batch": [lambda bus: bus.cancel_batch("orders", "b")],
    "retry_failed": [lambda bus: bus.retry_failed("orders", "b")],
    "wait": [lambda bus: bus.wait("orders", "x", wait=1)],
    "wait_all": [lambda bus: bus.wait_all([("orders", "x")], wait=1)],
    "call": [lambda bus: bus.call("orders", "x", wait=1)],
    "start_process": [lambda bus: bus.start_process("x"), lambda bus: bus.start_process("x", process_id="p")],
    "start_processes": [lambda bus: bus.start_processes("x", [{}, {"process_id": "p"}])],
    "create_process_batch": [lambda bus: bus.create_process_batch("x", [{}])],
    "add_processes_to_batch": [lambda bus: bus.add_processes_to_batch("x", "b", [{}])],
    "get_process": [lambda bus: bus.get_process("orders", "p")],
    "query_processes": [lambda bus: bus.query_processes(), lambda bus: bus.query_processes(status="FAILED")],
    "cancel_process": [lambda bus: bus.cancel_process("orders", "p")],
    "signal": [lambda bus: bus.signal("orders", "p", "paid")],
    "retry_process": [lambda bus: bus.retry_process("orders", "p")],
    "stray_replies": [lambda bus: bus.stray_replies(), lambda bus: bus.stray_replies("orders", process_id="p")],
    "undelivered_replies": [lambda bus: bus.undelivered_replies()],
    "status": [lambda bus: bus.status(), lambda bus: bus.status("orders")],
    "workers": [lambda bus: bus.workers()],
    "pause": [lambda bus: bus.pause("orders"), lambda bus: bus.pause("orders", "x")],
    "resume": [lambda bus: bus.resume("orders"), lambda bus: bus.resume("orders", "x")],
    "pauses": [lambda bus: bus.pauses()],
    "breakers": [lambda bus: bus.breakers()],
    "open_breaker": [lambda bus: bus.open_breaker("orders", "x"), lambda bus: bus.open_breaker(limit="x")],
    "close_breaker": [lambda bus: bus.close_breaker("orders", "x"), lambda bus: bus.close_breaker(limit="x")],
    "reset_breaker": [lambda bus: bus.reset_breaker("orders", "x"), lambda bus: bus.reset_breaker(limit="x")],
    "declare_limit": [lambda bus: bus.declare_limit(Limit("x", concurrency=1))],
    "limits": [lambda bus: bus.limits()],
    "get_limit": [lambda bus: bus.get_limit("x")],
    "set_limit": [lambda bus: bus.set_limit("x", concurrency=1)],
    "unset_limit": [lambda bus: bus.unset_limit("x")],
    "estimate": [lambda bus: bus.estimate("x")],
    "find_id": [lambda bus: bus.find_id("x"), lambda bus: bus.find_id("x", domain="orders")],
    "get_ledger": [lambda bus: bus.get_ledger("orders", "x")],
    "last_hour": [lambda bus: bus.last_hour(), lambda bus: bus.last_hour("orders")],
    "limit_detail": [lambda bus: bus.limit_detail("x")],
    "list_failures": [lambda bus: bus.list_failures(), lambda bus: bus.list_failures("orders", "x")],
    "post_mortems": [lambda bus: bus.post_mortems()],
    "pause_worker": [lambda bus: bus.pause_worker("w", wait=1)],
    "resume_worker": [lambda bus: bus.resume_worker("w", wait=1)],
    "recycle_worker": [lambda bus: bus.recycle_worker("w", wait=1)],
    "request_stack": [lambda bus: bus.request_stack("orders", "x", wait=1)],
    "watch_slots": [lambda bus: bus.watch_slots()],
    "why_waiting": [lambda bus: bus.why_waiting("orders", "x")],
    "preview_prune": [lambda bus: bus.preview_prune(age=1), lambda bus: bus.preview_prune(count=1)],
    "prune": [lambda bus: bus.prune(age=1), lambda bus: bus.prune(count=1)],
}
# The report about the database is right without a schema: it looks at the server.
OTHER = {"migrate", "schema_state", "close", "connect", "run", "follow", "limit", "middleware"} | {
    "database_report"
}
TSQ_CALLS: dict[str, Callable[[Bus], Any]] = {
    "list": lambda bus: bus.tsq.list(),
    "count": lambda bus: bus.tsq.count("orders"),
    "count_by_type": lambda bus: bus.tsq.count_by_type(),
    "operator_retry": lambda bus: bus.tsq.operator_retry("orders", "x"),
    "operator_cancel": lambda bus: bus.tsq.operator_cancel("orders", "x"),
    "operator_complete": lambda bus: bus.tsq.operator_complete("orders", "x"),
    "retry_all": lambda bus: bus.tsq.retry_all("orders"),
    "cancel_all": lambda bus: bus.tsq.cancel_all("orders"),
    "complete_all": lambda bus: bus.tsq.complete_all("orders"),
}


def _public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_no_method_was_forgotten() -> None:
    assert _public(CommandBus) == CALLS.keys() | OTHER
    assert _public(TroubleshootingQueue) == TSQ_CALLS.keys()


@pytest.fixture
def unmigrated(connect: Callable[..., Bus], empty_database: str) -> Bus:
    return connect(empty_database)


def test_every_method_says_so(unmigrated: Bus) -> None:
    for name, calls in CALLS.items():
        for call in calls:
            with pytest.raises(SchemaError, match="commandbus migrate") as caught:
                call(unmigrated)
            assert caught.value.args, name
    for call in TSQ_CALLS.values():
        with pytest.raises(SchemaError, match="commandbus migrate"):
            call(unmigrated)
    with psycopg.connect(unmigrated.url) as conn:
        assert one(conn, "SELECT count(*) FROM pg_namespace WHERE nspname IN ('commandbus', 'pgmq')") == 0
        assert one(conn, "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'unmigrated%%'") == 0


def test_a_permit_of_a_limit_says_so_too(empty_database: str) -> None:
    with CommandBus(empty_database) as bus:
        for _ in range(2):
            with pytest.raises(SchemaError, match="commandbus migrate"), bus.limit("x"):
                raise AssertionError("there is no such permit")
        bus.migrate()
        bus.declare_limit(Limit("x", concurrency=1))
        with bus.limit("x"):
            assert bus.get_limit("x").in_use == 1


def test_pgmq_alone_is_not_enough(unmigrated: Bus) -> None:
    from commandbus.db.pgmq import packaged_sql

    with psycopg.connect(unmigrated.url) as conn:
        conn.execute(packaged_sql().encode())
        conn.execute("SELECT pgmq.create('orders__commands')")
    for calls in CALLS.values():
        for call in calls:
            with pytest.raises(SchemaError, match="commandbus migrate"):
                call(unmigrated)


def test_the_bus_works_once_it_is_migrated(unmigrated: Bus) -> None:
    """The same connections, which have seen and maybe prepared the failing statements."""
    for _ in range(4):
        with pytest.raises(SchemaError):
            unmigrated.send("orders", "x")
    unmigrated.migrate(domains=["orders"])
    unmigrated.send("orders", "x", command_id="k")
    assert unmigrated.get_command("orders", "k").status is CommandStatus.PENDING
