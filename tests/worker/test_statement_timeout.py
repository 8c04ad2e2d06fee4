"""Layer 1: a handler's connection has the worker's statement_timeout, and its session is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from commandbus import CommandBus, HandlerRegistry, RetryPolicy, Worker, load_settings

LIMITS = (
    "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('work_mem')"
)


@pytest.fixture
def bus(database: str) -> Any:
    with CommandBus(database) as bus:
        bus.create_domain("work")
        yield bus


def work(database: str, handlers: HandlerRegistry, **settings: Any) -> None:
    chosen = load_settings({"database_url": database, "concurrency": 1, **settings})
    Worker(handlers, settings=chosen).run(until_idle=True)


def both(function: Callable[[Any], Any]) -> list[Callable[..., Any]]:
    """The same statements from a sync and from an async handler."""

    def sync(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            return [list(conn.execute(text).fetchone() or ()) for text in function(command)]

    async def asynchronous(command: Any, ctx: Any) -> Any:
        async with ctx.connection() as conn:
            return [list(await (await conn.execute(text)).fetchone() or ()) for text in function(command)]

    return [sync, asynchronous]


@pytest.mark.parametrize("lane", [0, 1], ids=["sync", "async"])
def test_ac1_the_limits_are_set_at_check_out_and_a_handlers_changes_do_not_outlive_it(
    bus: CommandBus, database: str, lane: int
) -> None:
    change = "SELECT set_config('statement_timeout', '7', false), set_config('work_mem', '1MB', false)"
    handlers = HandlerRegistry()
    handlers.register("work", "look", both(lambda command: [LIMITS])[lane])
    handlers.register("work", "spoil", both(lambda command: [change, "SELECT pg_advisory_lock(1)"])[lane])
    ids = [bus.send("work", name).command_id for name in ("look", "spoil", "look")]
    work(database, handlers, statement_timeout=20)
    records = [bus.get_command("work", id_) for id_ in ids]
    first, _, last = [record.result for record in records if record is not None]
    assert first[0][:2] == ["20s", "16s"]
    assert last == first


@pytest.mark.parametrize("lane", [0, 1], ids=["sync", "async"])
def test_ac5_a_query_that_the_limit_ends_is_a_transient_failure_with_code_timeout(
    bus: CommandBus, database: str, lane: int
) -> None:
    handlers = HandlerRegistry()
    policy = RetryPolicy(max_attempts=2, backoff_schedule=[0])
    handlers.register("work", "sleep", both(lambda command: ["SELECT pg_sleep(60)"])[lane], retry_policy=policy)
    sent = bus.send("work", "sleep")
    for _ in range(2):
        work(database, handlers, statement_timeout=0.1)
    attempts = bus.get_attempts("work", sent.command_id)
    assert [(attempt.verdict, attempt.error_code) for attempt in attempts] == [
        ("RETRY", "TIMEOUT"),
        ("EXHAUSTED", "TIMEOUT"),
    ]


def test_a_lent_pool_keeps_its_own_settings(bus: CommandBus, database: str) -> None:
    def configure(conn: psycopg.Connection[Any]) -> None:
        conn.execute("SET statement_timeout = '3s'")
        conn.execute("SET work_mem = '2MB'")
        conn.commit()

    handlers = HandlerRegistry()
    handlers.register("work", "look", both(lambda command: [LIMITS])[0])
    sent = bus.send("work", "look")
    with ConnectionPool(database, min_size=1, max_size=1, configure=configure) as pool:
        chosen = load_settings({"database_url": database, "concurrency": 1})
        Worker(handlers, settings=chosen, pool=pool).run(until_idle=True)
        with pool.connection() as conn:
            assert conn.execute(LIMITS).fetchone() == ("3s", "0", "2MB")
            assert not conn.autocommit
    record = bus.get_command("work", sent.command_id)
    assert record is not None
    assert record.result == [["25s", "20s", "2MB"]]


@pytest.mark.parametrize("lane", [0, 1], ids=["sync", "async"])
def test_behind_a_pooler_the_limits_last_for_the_transaction_and_the_session_is_left_alone(
    bus: CommandBus, database: str, lane: int
) -> None:
    """The server sees what PgBouncer's other clients would get: the same session, right after the handler."""
    handlers = HandlerRegistry()

    def look(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            inside = conn.execute(LIMITS).fetchone()
            conn.commit()
            return [inside, conn.execute(LIMITS).fetchone()]

    async def look_async(command: Any, ctx: Any) -> Any:
        async with ctx.connection() as conn:
            inside = await (await conn.execute(LIMITS)).fetchone()
            await conn.commit()
            return [inside, await (await conn.execute(LIMITS)).fetchone()]

    handlers.register("work", "look", [look, look_async][lane])
    sent = bus.send("work", "look")
    work(database, handlers, prepared_statements=False)
    record = bus.get_command("work", sent.command_id)
    assert record is not None
    inside, after = record.result
    assert inside[:2] == ["25s", "20s"]
    assert after[:2] == ["0", "0"]
