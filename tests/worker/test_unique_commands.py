"""Keys of commands beside a running worker: the last debounced one runs, and no change is missed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, Worker
from support.waiting import one, until, until_settled

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def test_only_the_last_debounced_command_runs(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ran: list[Any] = []
    handlers.register("orders", "draft", lambda command, ctx: ran.append(command.data))
    start_worker(handlers)
    with psycopg.connect(bus.settings.database_url) as conn:  # nothing can start before the commit
        sent = [bus.send("orders", "draft", n, unique="d", debounce="100ms", conn=conn) for n in range(5)]
    until_settled(db)
    assert ran == [4]
    assert ([each.created for each in sent], [each.replaced for each in sent]) == (
        [True, False, False, False, False], [False, True, True, True, True],
    )  # fmt: skip
    assert bus.send("orders", "draft", 5, unique="d", debounce="100ms").created, "it begins anew"
    until(lambda: ran == [4, 5])


def test_no_change_is_missed_by_a_command_that_is_sent_while_none_waits(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """What "waiting" is for: who changes something sends in the same transaction, and the last run sees all."""
    db.execute("CREATE TABLE counted (n integer)")
    seen: list[int] = []

    @handlers.handler("orders", "count")
    def count(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            seen.append(one(conn, "SELECT count(*) FROM counted"))

    def change() -> None:
        with psycopg.connect(bus.settings.database_url) as conn:
            for n in range(20):
                conn.execute("INSERT INTO counted VALUES (%s)", [n])
                bus.send("orders", "count", unique="count", unique_while="waiting", conn=conn)
                conn.commit()

    start_worker(handlers)
    changing = [threading.Thread(target=change) for _ in range(4)]
    for thread in changing:
        thread.start()
    for thread in changing:
        thread.join(60)
    until_settled(db)
    assert max(seen) == 80


def test_a_handler_sends_its_successor_with_its_own_key(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """A claimed command does not have its key under "waiting", and has it under "unfinished"."""
    created: list[bool] = []

    @handlers.handler("orders", "tick")
    def tick(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            for unique_while in ("unfinished", "waiting"):
                if command.data == 1:
                    sent = bus.send("orders", "tick", 2, unique="tick", unique_while=unique_while, conn=tx)
                    created.append(sent.created)

    bus.send("orders", "tick", 1, unique="tick")
    start_worker(handlers)
    until_settled(db)
    assert created == [False, True]
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 2
