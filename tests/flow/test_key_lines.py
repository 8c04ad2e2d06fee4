"""Key limits without a worker: what a send accepts, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    UnknownKeyLimitError,
)
from commandbus.flow.keys.release import LineKey, find_new, forget, release
from support.waiting import one

Db = psycopg.Connection[Any]


@pytest.fixture
def tenants(database: str) -> Any:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        bus.key_limits.set("orders", "tenant", concurrency=2)
        yield bus


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda bus: bus.send("orders", "x", key="17"), r"key '17' needs key_limit: command type x"),
        (lambda bus: bus.send("orders", "x", key_limit="tenant"), r"key_limit \('tenant'\) needs key"),
        (lambda bus: bus.send("orders", "x", key=17, key_limit="tenant"), "17"),
        (lambda bus: bus.send("orders", "x", key="17", key_limit="tenant", unique="u"), r"key \('17'\)"),
        (lambda bus: bus.create_batch("orders", [NewCommand("x", key="17")]), "key '17' needs key_limit"),
        (lambda bus: bus.key_limits.set("orders", "a", concurrency=2, ordered=True), "concurrency=1, not 2"),
        (lambda bus: bus.key_limits.set("orders", "a", concurrency=0), "concurrency"),
        (lambda bus: bus.key_limits.set("orders", "a", on_failure="stop"), "'stop'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(tenants: CommandBus, act: Callable[[CommandBus], Any], text: str) -> None:
    with pytest.raises(InvalidCommandError, match=text):
        act(tenants)


def test_unknown_and_used_key_limits(tenants: CommandBus, db: Db) -> None:
    with pytest.raises(UnknownKeyLimitError, match="no key limit 'nobody'"):
        tenants.send("orders", "x", key="17", key_limit="nobody")
    with pytest.raises(UnknownKeyLimitError):
        tenants.key_limits.override("orders", "nobody", "17", concurrency=1, until="1h")
    with pytest.raises(UnknownKeyLimitError, match="'nobody'"):
        tenants.key_limits.lines("orders", "nobody")
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0
    tenants.send("orders", "x", key="17", key_limit="tenant")
    with pytest.raises(InvalidOperationError, match="has unfinished commands"):
        tenants.key_limits.delete("orders", "tenant")


def test_a_declared_key_limit_is_not_deleted_and_no_locks_are_waited_for(
    tenants: CommandBus, database: str, db: Db
) -> None:
    db.execute("INSERT INTO commandbus.type_rule VALUES ('orders', 'x', 'tenant', 'data.t')")
    with pytest.raises(InvalidOperationError, match="for x; remove it"):
        tenants.key_limits.delete("orders", "tenant")
    tenants.send_many("orders", [NewCommand("x", {"t": n % 2}) for n in range(4)])
    with psycopg.connect(database) as conn:  # as an operator's retry of many does
        conn.execute("SELECT FROM commandbus.keyed WHERE key = '0' FOR UPDATE")
        db.execute("SET lock_timeout = '1s'")
        new = tenants.run(find_new("orders"))
        found = tenants.run(release("orders", [], new), db)
        assert (found.commands, found.again) == (2, {LineKey("tenant", "0")})
        tenants.run(forget(["orders"], 0), db)
        tenants.key_limits.set("orders", "tenant", concurrency=3, conn=db)
    assert tenants.run(release("orders", found.again)).commands == 2


def test_the_same_command_id_joins_the_line_once(tenants: CommandBus, db: Db) -> None:
    first = tenants.send("orders", "x", 1, command_id="a", key="17", key_limit="tenant")
    again = tenants.send_many(
        "orders", [NewCommand("x", 1, "a", key="17", key_limit="tenant"), NewCommand("x", 2)]
    )
    assert (again[0].id, again[0].created, again[1].created) == (first.id, False, True)
    assert one(db, "SELECT count(*) FROM commandbus.keyed") == 1
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt <= now()") == 1, "the one without a key"


def test_senders_of_a_key_do_not_wait_for_each_other(tenants: CommandBus, database: str) -> None:
    with psycopg.connect(database) as one_sender, psycopg.connect(database) as other:
        other.execute("SET lock_timeout = '100ms'")
        tenants.send("orders", "x", 1, key="17", key_limit="tenant", conn=one_sender)
        later = tenants.send("orders", "x", 2, key="17", key_limit="tenant", conn=other)
        other.commit()
        (new,) = tenants.run(find_new("orders"))
        assert new.commands == [later.id]
        assert tenants.run(release("orders", [], [new])).commands == 1, "nor does a release wait for a sender"


def test_a_key_that_somebody_releases_is_left_to_them(tenants: CommandBus, database: str) -> None:
    tenants.send_many("orders", [NewCommand("x", n, key="17", key_limit="tenant") for n in range(5)])
    key = LineKey("tenant", "17")
    with psycopg.connect(database) as conn:
        assert tenants.run(release("orders", [key]), conn).commands == 2
        other = tenants.run(release("orders", [key]))
        assert (other.commands, other.again) == (0, {key})
    assert tenants.run(release("orders", [key])).commands == 0, "both places are taken"


def test_the_async_bus_has_the_same(database: str, tenants: CommandBus) -> None:
    asyncio.run(_use_async_bus(database))


async def _use_async_bus(database: str) -> None:
    async with AsyncCommandBus(database) as bus:
        await bus.key_limits.set("orders", "account", ordered=True)
        await bus.send("orders", "x", key="17", key_limit="account")
        (line,) = await bus.key_limits.lines("orders", "account")
        assert (line.key, line.waiting, line.concurrency) == ("17", 1, 1)
        assert [(item.name, item.on_failure) for item in await bus.key_limits.list("orders")] == [
            ("account", "block"), ("tenant", "step_aside"),
        ]  # fmt: skip


def test_changes_are_recorded_with_who_and_why(tenants: CommandBus, database: str) -> None:
    tenants.key_limits.set("orders", "tenant", concurrency=3, operator="ann", reason="more room")
    tenants.key_limits.override("orders", "tenant", "17", concurrency=0, until="1h", operator="bob")
    assert [item.key for item in tenants.key_limits.overrides("orders", "tenant")] == ["17"]

    async def end() -> bool:
        async with AsyncCommandBus(database) as bus:
            return await bus.key_limits.end_override("orders", "tenant", "17", operator="bob")

    assert asyncio.run(end())
    assert not asyncio.run(end()), "there was none any more, and nothing is recorded"
    with pytest.raises(UnknownKeyLimitError):
        tenants.key_limits.end_override("orders", "nobody", None)
    tenants.key_limits.delete("orders", "tenant", operator="ann", reason="unused")
    found = [
        (item.action, item.operator, item.reason, item.domain, item.details)
        for item in tenants.audit.list_actions(domain="orders", limit=4)
    ]
    assert found == [
        ("DELETE", "ann", "unused", "orders", None),
        ("END_OVERRIDE", "bob", None, "orders", {"key": "17"}),
        ("OVERRIDE", "bob", None, "orders", {"key": "17", "concurrency": 0, "seconds": 3600.0}),
        ("SET", "ann", "more room", "orders", {"concurrency": 3, "ordered": False, "on_failure": "step_aside"}),
    ]


def test_an_override_that_ends_lets_the_line_go_on(tenants: CommandBus, db: Db) -> None:
    tenants.key_limits.override("orders", "tenant", None, concurrency=0, until="1h")
    tenants.send("orders", "x", key="17", key_limit="tenant")
    assert tenants.run(release("orders", [LineKey("tenant", "17")])).commands == 0
    assert tenants.key_limits.end_override("orders", "tenant", None)
    assert one(db, "SELECT state FROM commandbus.keyed") == "NEW", "a worker looks at its key again"
    assert tenants.run(release("orders", [LineKey("tenant", "17")])).commands == 1
