"""How send_many works: in few round trips, and beside the preparation of the next chunk."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, async_only, queue_length

from commandbus import AsyncCommandBus, InvalidCommandError, NewCommand, sql
from commandbus.flow.commands.send import prepare, send_chunk
from support.waiting import until

Db = psycopg.Connection[Any]
PLAIN = {"command_type": "Ship"}


def test_one_statement_is_all_if_no_command_can_exist() -> None:
    """Others need a transaction: a command that exists with other content takes the whole chunk back."""
    ours, callers = prepare(NewCommand("Ship")), prepare(NewCommand("Ship", command_id="x"))
    assert not send_chunk("orders", [ours, ours]).atomic
    assert send_chunk("orders", [ours, callers]).atomic
    late = prepare(NewCommand("Ship", delay=1))
    assert not send_chunk("orders", [ours, late]).atomic


def test_plain_commands_take_the_short_way() -> None:
    plain, late = prepare(NewCommand("Ship")), prepare(NewCommand("Ship", delay=1))
    short = sql.text("commands/send_many_plain", domain="orders")
    assert next(send_chunk("orders", [plain, plain]).steps).sql == short
    assert next(send_chunk("orders", [plain, late]).steps).sql != short


@pytest.mark.parametrize("late", [False, True], ids=["plain", "with options"])
def test_receipts_are_in_the_order_of_the_commands(orders: Bus, db: Db, late: bool) -> None:
    commands = [NewCommand(f"Ship{n % 3}", n, delay=n % 2 if late else None) for n in range(30)]
    sent = orders.send_many("orders", commands, chunk_size=20)
    found = db.execute("SELECT id, command_type, data::text::int FROM commandbus.command ORDER BY id").fetchall()
    assert [(each.id, f"Ship{n % 3}", n) for n, each in enumerate(sent)] == found
    assert all(each.created for each in sent)


def test_the_server_works_while_the_next_chunk_is_read(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship")  # so that there is a connection

    def commands() -> Iterator[dict[str, Any]]:
        yield from [PLAIN] * 2
        until(lambda: queue_length(db) == 3, what="the first chunk is committed")
        yield PLAIN

    assert len(orders.send_many("orders", commands(), chunk_size=2)) == 3
    assert queue_length(db) == 4


@async_only
def test_other_tasks_run_while_a_chunk_is_prepared(orders: Bus) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    seen: list[int] = []

    def commands() -> Iterator[dict[str, Any]]:
        for _ in range(1000):
            seen.append(turns)
            yield PLAIN

    async def both() -> None:
        task = asyncio.create_task(others())
        async with AsyncCommandBus(orders.url) as bus:
            await bus.send_many("orders", commands())
        task.cancel()

    orders.runner.run(both())
    assert len(set(seen)) == 10


@async_only
def test_a_canceled_send_many_leaves_nothing_under_way(orders: Bus) -> None:
    async def cancel() -> tuple[int, int]:
        async with AsyncCommandBus(orders.url) as bus:
            await bus.send("orders", "Ship")
            before = len(asyncio.all_tasks())

            def commands() -> Iterator[dict[str, Any]]:
                yield PLAIN
                sending.cancel()
                yield PLAIN

            sending = asyncio.create_task(bus.send_many("orders", commands(), chunk_size=1))
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert bus._own_pool is not None
            stats = bus._own_pool.get_stats()
            assert stats["pool_available"] == stats["pool_size"]
            return before, len(asyncio.all_tasks())

    before, after = orders.runner.run(cancel())
    assert before == after


@async_only
def test_of_two_errors_the_first_one_is_raised_and_none_is_left(orders: Bus) -> None:
    """The chunk under way fails, and so does the preparation of the next one."""
    complaints: list[Any] = []

    async def send() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with AsyncCommandBus(orders.url) as bus:
            with pytest.raises(InvalidCommandError, match="command 2 of send_many"):
                await bus.send_many("nowhere", [PLAIN, {"command_type": ""}], chunk_size=1)

    orders.runner.run(send())
    gc.collect()
    assert complaints == []
