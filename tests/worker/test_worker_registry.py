"""A worker's row in the registry, its own limits, retention in the background, and what it checks at the start."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from commandbus import (
    CommandBus,
    ConfigurationError,
    HandlerRegistry,
    NewCommand,
    SchemaError,
    UnknownDomainError,
    Worker,
)
from commandbus.worker import maintenance
from support.waiting import one, until, until_settled
from support.workers import add, quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


@pytest.fixture
def handlers() -> HandlerRegistry:
    """One quick handler."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: None)
    return handlers


# --- the registry ---------------------------------------------------------------------------------------------


def test_the_registry_knows_a_worker_from_its_start_to_its_stop(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "BEAT_SECONDS", 0.1)
    worker = start_worker(handlers, concurrency=3)
    until(lambda: bus.workers())
    (info,) = bus.workers()
    assert (info.id, info.state, info.is_alive) == (worker.id, "ACTIVE", True)
    assert (info.domains, info.concurrency) == (["orders"], 3)
    assert info.version
    bus.send_many("orders", [NewCommand("work") for _ in range(10)])
    until(lambda: bus.workers()[0].settled == 10)
    assert bus.workers()[0].heartbeat_at > info.heartbeat_at
    assert bus.workers()[0].started_at == info.started_at
    worker.stop()
    (info,) = bus.workers()
    assert (info.state, info.is_alive, info.running, info.settled) == ("STOPPED", False, 0, 10)


def test_a_beat_tells_how_many_run(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "BEAT_SECONDS", 0.1)
    handlers.register("orders", "block", lambda ctx: go_on.wait(20) and None)
    bus.send_many("orders", [NewCommand("block") for _ in range(2)])
    start_worker(handlers)
    until(lambda: bus.workers() and bus.workers()[0].running == 2)
    assert bus.status("orders")[0].running == 2
    go_on.set()
    until(lambda: bus.workers()[0].running == 0)


# --- limits of the process ------------------------------------------------------------------------------------


def test_max_messages_ends_the_worker_cleanly(database: str, bus: CommandBus, db: Db, lane: str) -> None:
    handlers = HandlerRegistry()

    async def work(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "work", work)
    bus.send_many("orders", [NewCommand("work") for _ in range(60)])
    worker = Worker(handlers, settings=quick_settings(database, max_messages=50))
    report = worker.run()
    assert report.is_clean
    assert "max_messages 50" in report.reason
    assert report.settled >= 50
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == report.settled
    assert bus.workers()[0].state == "STOPPED"


def test_max_memory_ends_the_worker_cleanly(database: str, bus: CommandBus, handlers: HandlerRegistry) -> None:
    report = Worker(handlers, settings=quick_settings(database, max_memory_mb=1)).run()
    assert report.is_clean
    assert "max_memory_mb 1" in report.reason


# --- retention ------------------------------------------------------------------------------------------------


def test_finished_commands_are_pruned_in_the_background(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_SECONDS", 0.2)
    bus.send_many("orders", [NewCommand("work") for _ in range(50)])
    bus.send("orders", "work", command_id="waits", delay=3600)
    worker = start_worker(handlers, retention_count=5)
    until(
        lambda: (
            one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 5
            and one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'PENDING'") == 1
        )
    )
    assert worker.stop().settled == 50


# --- the start ------------------------------------------------------------------------------------------------


def test_a_database_without_the_schema_is_a_clear_error(empty_database: str, handlers: HandlerRegistry) -> None:
    worker = Worker(handlers, settings=quick_settings(empty_database))
    with pytest.raises(SchemaError, match="commandbus migrate"):
        worker.start()
    assert not worker.is_running


def test_a_domain_that_the_role_may_not_create_is_a_clear_error(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    server_admin: Callable[[sql.Composable], None],
) -> None:
    roles = bus.create_roles(f"pickup_{uuid.uuid4().hex[:8]}")
    role = roles["worker"]
    db.execute(f"ALTER ROLE {role} LOGIN".encode())
    try:
        url = database.replace("postgres@", f"{role}@")
        handlers.register("unmade", "work", lambda ctx: None)
        with pytest.raises(UnknownDomainError, match="'unmade'"):
            Worker(handlers, settings=quick_settings(url)).start()
        # For what exists the role is enough.
        known = HandlerRegistry()
        known.register("orders", "work", lambda ctx: "by role")
        with Worker(known, settings=quick_settings(url)):
            bus.send("orders", "work", command_id="c")
            until_settled(db)
        assert bus.get_command("orders", "c").result == "by role"  # type: ignore[union-attr]
    finally:
        for each in roles.values():
            db.execute(f"DROP OWNED BY {each}".encode())
            db.execute(f"DROP ROLE {each}".encode())


@pytest.mark.parametrize(
    ("domains", "error"),
    [("orders", "not the text"), (["Orders"], "Orders"), (["x" * 60], "xxx")],
)
def test_bad_domains_are_refused(database: str, handlers: HandlerRegistry, domains: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Worker(handlers, domains=domains, settings=quick_settings(database))


def test_a_worker_without_handlers_is_refused(database: str) -> None:
    with pytest.raises(ConfigurationError, match="no domain"):
        Worker(HandlerRegistry(), settings=quick_settings(database))


def test_settings_and_arguments_together_are_refused(database: str, handlers: HandlerRegistry) -> None:
    with pytest.raises(TypeError, match="not both"):
        Worker(handlers, settings=quick_settings(database), concurrency=2)
