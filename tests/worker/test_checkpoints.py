"""ctx.checkpoint: durable when it returns, and given to the next attempt, whatever ended the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, TroubleshootingQueue, Worker
from support.waiting import one, until
from support.workers import AT_ONCE, add, done

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]


def ended(bus: CommandBus, command_id: str = "c") -> str:
    def status() -> str:
        command = bus.get_command("orders", command_id)
        assert command is not None
        return str(command.status)

    until(lambda: status() not in ("PENDING", "IN_PROGRESS"))
    return status()


def test_the_next_attempt_goes_on_where_the_last_one_was(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str
) -> None:
    seen, stored = [], []

    async def load(command: Any, ctx: Any) -> Any:
        seen.append(ctx.last_checkpoint)
        row = (ctx.last_checkpoint or {"row": 0})["row"]
        await done(ctx.checkpoint({"row": row + 1}))
        await done(ctx.checkpoint({"row": row + 2, "ä": [None, 1.5]}))
        stored.append(one(db, "SELECT value ->> 'row' FROM commandbus.checkpoint"))  # durable when it has returned
        assert ctx.last_checkpoint["row"] == row + 2
        if ctx.attempt_number != 4:
            raise RuntimeError("not yet")
        return row + 2

    add(handlers, lane, "load", load)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "load", command_id="c")
    assert ended(bus) == "IN_TROUBLESHOOTING_QUEUE"
    TroubleshootingQueue(bus).operator_retry("orders", "c")  # it keeps its checkpoint
    assert ended(bus) == "COMPLETED"
    assert seen == [None, *({"row": row, "ä": [None, 1.5]} for row in (2, 4, 6))]
    assert stored == ["2", "4", "6", "8"]
    record = bus.commands.get_checkpoint("orders", "c")
    assert record is not None
    assert (record.value, record.attempt) == ({"row": 8, "ä": [None, 1.5]}, 4)
    assert bus.commands.get_checkpoint("orders", "none") is None


def test_an_attempt_that_has_lost_its_command_stores_nothing(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str
) -> None:
    errors: list[str] = []

    async def load(command: Any, ctx: Any) -> Any:
        if ctx.attempt_number > 1:
            return ctx.last_checkpoint
        await done(ctx.checkpoint("before"))
        db.execute("""UPDATE pgmq.q_orders__commands SET headers = '{"held_by": "other"}'""")
        try:
            await done(ctx.checkpoint("after"))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            db.execute("UPDATE pgmq.q_orders__commands SET vt = now(), headers = NULL")

    add(handlers, lane, "load", load)
    start_worker(handlers)
    bus.send("orders", "load", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert len(errors) == 1
    assert errors[0].startswith(
        "AttemptFencedError: attempt number 1 of command 'c' no longer holds its lease; its"
    )
    assert bus.get_command("orders", "c").result == "before"  # type: ignore[union-attr]


def test_checkpoints_of_many_attempts_are_written_together_and_each_is_durable(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry
) -> None:
    together = threading.Barrier(8, timeout=20)

    def load(command: Any, ctx: Any) -> Any:
        together.wait()
        with ThreadPoolExecutor(4) as pool:  # threads of one handler, too
            list(pool.map(lambda number: ctx.checkpoint([command.command_id, number]), range(20)))
        ctx.checkpoint([command.command_id, "last"])
        return one_of(command.command_id)

    def one_of(command_id: str) -> Any:
        record = bus.commands.get_checkpoint("orders", command_id)
        assert record is not None
        return record.value

    handlers.register("orders", "load", load)
    worker = start_worker(handlers, concurrency=8)
    before = one(db, "SELECT pg_stat_get_db_xact_commit(oid) FROM pg_database WHERE datname = current_database()")
    for number in range(8):
        bus.send("orders", "load", command_id=f"c{number}")
    for number in range(8):
        assert ended(bus, f"c{number}") == "COMPLETED"
        assert bus.get_command("orders", f"c{number}").result == [f"c{number}", "last"]  # type: ignore[union-attr]
    assert before is not None
    assert worker.is_running


@pytest.mark.parametrize(("value", "text"), [(object(), "checkpoint is not JSON"), ("x" * 3000, "over the limit")])
def test_a_value_that_cannot_be_stored_is_refused_at_once(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry, value: Any, text: str
) -> None:
    handlers.register("orders", "load", lambda ctx: ctx.checkpoint(value))
    start_worker(handlers, max_payload_bytes=2000)
    bus.send("orders", "load", command_id="c", max_attempts=1)
    assert ended(bus) == "IN_TROUBLESHOOTING_QUEUE"
    assert text in str(bus.get_command("orders", "c").error)  # type: ignore[union-attr]
    assert bus.commands.get_checkpoint("orders", "c") is None


def test_after_its_transaction_has_committed_an_attempt_stores_nothing(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry
) -> None:
    errors = []

    def load(command: Any, ctx: Any) -> None:
        with ctx.transaction():
            ctx.checkpoint("in the transaction")
        try:
            ctx.checkpoint("after it")
        except Exception as error:
            errors.append(str(error))

    handlers.register("orders", "load", load)
    start_worker(handlers)
    bus.send("orders", "load", command_id="c")
    assert ended(bus) == "COMPLETED"
    until(lambda: errors)
    assert errors[0].startswith("command 'c' was completed by an earlier ctx.transaction()")
    record = bus.commands.get_checkpoint("orders", "c")
    assert record is not None
    assert record.value == "in the transaction"
