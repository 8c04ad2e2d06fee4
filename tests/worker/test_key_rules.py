"""Limits with a key on handlers: every sender applies them, and what comes another way joins at the claim."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    ConfigurationError,
    HandlerRegistry,
    InvalidCommandError,
    Limit,
    NewCommand,
    Worker,
)
from commandbus.flow.commands.send import may_have_rule
from support.waiting import one, until, until_settled
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
TENANT = Limit("tenant", concurrency=2, key="data.tenant_id")
SERIAL = Limit("account", concurrency=1, key="data.account", ordered=True)


def held_up(handlers: HandlerRegistry, go_on: threading.Event, limit: Limit = TENANT) -> None:
    handlers.register("orders", "ship", lambda command, ctx: go_on.wait(30), limits=[limit])


def lines(db: Db) -> list[tuple[str, str]]:
    return db.execute("SELECT key, state FROM commandbus.keyed ORDER BY command").fetchall()


def test_every_sender_applies_the_rule_of_a_type(
    bus: CommandBus,
    database: str,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
) -> None:
    held_up(handlers, go_on)
    handlers.register("orders", "other", lambda command, ctx: None)
    start_worker(handlers)
    assert db.execute("SELECT command_type, key_limit, key_path FROM commandbus.type_rule").fetchall() == [
        ("ship", "tenant", "data.tenant_id")
    ]
    data = {"tenant_id": 17}
    bus.send("orders", "ship", data)
    assert may_have_rule("orders", "ship")
    bus.send("orders", "ship", data, command_id="own", headers={"a": 1})
    bus.send("orders", "ship", {}, key="17")
    bus.send_many("orders", [NewCommand("ship", data), NewCommand("other"), NewCommand("ship", data, "mine")])
    bus.create_batch("orders", [NewCommand("ship", data), NewCommand("ship", data)])
    asyncio.run(_send_async(database, data))
    until(lambda: [state for _, state in lines(db)].count("RELEASED") == 2)
    assert [key for key, _ in lines(db)] == ["17"] * 8
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE key IS NULL") == 1, "the other type has no rule"
    again = bus.send("orders", "ship", data, command_id="own", headers={"a": 1})
    assert not again.created
    go_on.set()
    until_settled(db)
    # No claim had to put one into its line. (What waited there for a second has a row with the number 0.)
    claimed = "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'PARKED' AND number > 0"
    assert one(db, claimed) == 0


async def _send_async(database: str, data: Any) -> None:
    async with AsyncCommandBus(database) as bus:
        await bus.send("orders", "ship", data)


def test_what_comes_another_way_joins_its_line_at_the_claim(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    held_up(handlers, go_on)
    data = {"tenant_id": "a"}
    early = bus.send("orders", "ship", data)  # before there is a rule
    start_worker(handlers)
    until(lambda: lines(db) == [("a", "RELEASED")])
    bus.send("orders", "ship", data, delay=0.05)
    bus.send("orders", "ship", data, unique="u")
    db.execute('SELECT pgmq.send(\'orders__commands\', \'{"command_type": "ship", "data": {"tenant_id": "a"}}\')')
    until(lambda: len(lines(db)) == 4)
    until(lambda: [state for _, state in lines(db)].count("RELEASED") == 2)
    record = bus.get_command("orders", early.command_id)
    assert record is not None
    assert record.charged_attempts == 1, "the claim that put it into its line is not charged"
    go_on.set()
    until_settled(db)
    until(lambda: lines(db) == [])


def test_a_message_that_somebody_made_visible_goes_back_into_its_line(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    running: list[int] = []

    @handlers.handler("orders", "ship", limits=[SERIAL])
    def ship(command: Any, ctx: Any) -> None:
        running.append(command.data["n"])
        go_on.wait(30)

    start_worker(handlers)
    bus.send_many("orders", [NewCommand("ship", {"account": 1, "n": n}) for n in range(3)])
    until(lambda: running == [0])
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() WHERE headers IS NULL")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.attempt WHERE error_code = 'KEY_LIMIT'") == 2)
    assert running == [0]
    go_on.set()
    until_settled(db)
    assert running == [0, 1, 2]


def test_keys_that_cannot_be_used(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    held_up(handlers, go_on)
    start_worker(handlers)
    for data in ({"tenant_id": {"a": 1}}, {"tenant_id": [1]}, {"tenant_id": "x" * 256}):
        with pytest.raises(InvalidCommandError, match=r"type ship.*limit tenant.*data\.tenant_id"):
            bus.send("orders", "ship", data)
        with pytest.raises(InvalidCommandError, match=r"data\.tenant_id"):
            bus.create_batch("orders", [NewCommand("ship", data)])
    for data in ({}, None, {"tenant_id": None}, {"tenant_id": ""}, [1]):
        bus.send("orders", "ship", data)
    assert {key for key, _ in lines(db)} == {""}, "commands without a key form one line"
    odd = bus.send("orders", "ship", {"tenant_id": {}}, unique="u")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.tsq WHERE command = %s", odd.id) == 1)
    record = bus.get_command("orders", odd.command_id)
    assert record is not None
    assert (record.error_code, record.charged_attempts) == ("INVALID_KEY", 1)


def test_the_last_worker_to_start_wins(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    def declare(*limits: Limit) -> None:
        registry = HandlerRegistry()
        registry.register("orders", "ship", lambda command, ctx: None, limits=limits)
        Worker(registry, settings=quick_settings(database)).run(until_idle=True)

    declare(TENANT)
    bus.key_limits.set("orders", "tenant", concurrency=5)
    declare(TENANT)
    assert [item.concurrency for item in bus.key_limits.list("orders")] == [5], "a person's change stays"
    with caplog.at_level(logging.WARNING, "commandbus"):
        declare(Limit("tenant", concurrency=3, key="data.tenant"))
    assert 'concurrency": 2' in caplog.text
    assert (
        "ship was declared differently before: limit tenant of data.tenant_id, now limit tenant of data.tenant"
        in caplog.text
    )
    assert [item.concurrency for item in bus.key_limits.list("orders")] == [3]
    declare()
    assert "now no limit with a key" in caplog.text
    assert one(db, "SELECT count(*) FROM commandbus.type_rule") == 0
    bus.send("orders", "ship", {"tenant": 1})
    assert lines(db) == []


def test_a_limit_with_a_key_of_the_settings(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    """With one for permits beside it, and a bus that reads the same settings."""
    handlers.register("orders", "ship", lambda command, ctx: None, limits=["tenant", "api"])
    limits = {"tenant": {"concurrency": 2, "key": "headers.tenant"}, "api": {"concurrency": 1}}
    settings = quick_settings(database, limits=limits)
    worker = Worker(handlers, settings=settings)
    worker.run(until_idle=True)
    bus.send("orders", "ship", headers={"tenant": "a"})
    assert lines(db) == [("a", "NEW")]
    with CommandBus(settings=settings) as other, other.limit("api"):
        pass
    assert [info.name for info in bus.limits().items] == ["api"]
    Worker(handlers, settings=settings).run(until_idle=True)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Limit("tenant", concurrency=3, key="tenant_id"), "'tenant_id'"),
        (lambda: Limit("tenant", concurrency=3, key="data..x"), r"'data\.\.x'"),
        (lambda: Limit("tenant", concurrency=3, key="data.x", rate="5/s"), r"rate \(.5/s.\) cannot be given"),
        (lambda: Limit("tenant", concurrency=3, key="data.x", max_wait=5), r"max_wait \(5\) cannot"),
        (lambda: Limit("tenant", key="data.x"), "concurrency must be .* not None"),
        (lambda: Limit("tenant", concurrency=3, key="data.x", ordered=True), "ordered needs concurrency=1, not 3"),
        (lambda: Limit("tenant", concurrency=3, ordered=True), r"ordered \(True\) needs key"),
        (lambda: Limit("tenant", concurrency=1, key="data.x", on_failure="stop"), "'stop'"),
        (lambda: HandlerRegistry().register("orders", "x", print, limits=[TENANT, SERIAL]), "account, tenant"),
    ],
)  # fmt: skip
def test_bad_limits_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_a_limit_with_a_key_belongs_to_one_domain_and_has_no_permits(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.declare_limit(TENANT)
    handlers.register("orders", "ship", print, limits=["tenant"])  # by its name
    handlers.register("billing", "pay", print, limits=["tenant"])
    with pytest.raises(ConfigurationError, match="orders and billing"):
        start_worker(handlers)
    with pytest.raises(ConfigurationError, match="'tenant': key is for limits of handlers"):
        bus.declare_limit(TENANT)
    with pytest.raises(ConfigurationError, match="'docai': key is for limits"):
        bus.set_limit("docai", concurrency=1, key="data.x")  # type: ignore[call-arg]


def test_a_person_sees_why_a_command_waits(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    held_up(handlers, go_on, Limit("tenant", concurrency=1, key="data"))
    start_worker(handlers)
    sent = bus.send_many("orders", [NewCommand("ship", 17) for _ in range(5)])
    until(lambda: [state for _, state in lines(db)].count("RELEASED") == 1)
    db.execute("UPDATE commandbus.key_limit SET run_seconds = 1000")
    record = bus.get_command("orders", sent[3].command_id)
    assert record is not None
    assert (record.waiting_for, record.waiting_limit, record.waiting_ahead, record.visible_at) == (
        "key", "tenant", 2, None,
    )  # fmt: skip
    assert record.waiting_text is not None
    assert record.waiting_text.startswith(
        "waits for its turn: tenant 17, 1 of 1 running, 2 before it, next in about"
    )
    (line,) = bus.key_limits.lines("orders", "tenant")
    assert str(line).startswith("tenant 17: 1 of 1, 4 waiting, next in about 16m")
    assert record.waiting_estimated_seconds is not None
    assert 2900 < record.waiting_estimated_seconds < 3000
