"""A flood of messages that are no commands: commands do not wait for it, and what is kept of it is bounded."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, Worker, sql
from commandbus.worker.claim_cursors import LARGEST_CLAIM
from commandbus.worker.raw_messages import Adopter
from support.waiting import one, until

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]
FLOOD = 4000

INVALID = {
    "object": '{"nonsense": true}',
    "text": '"command"',
    "array": '["command"]',
    "null": "null",
    "forged": '{"command": 1}',
    "large": json.dumps({"nonsense": "x" * 3000}),
}


def flood(db: Db, message: str, count: int = FLOOD) -> None:
    db.execute(
        "INSERT INTO pgmq.q_orders__commands (read_ct, enqueued_at, vt, message) "
        "SELECT 0, now(), now() - interval '1 minute', %s::jsonb FROM generate_series(1, %s)",
        (message, count),
    )


@pytest.fixture
def handlers() -> HandlerRegistry:
    registry = HandlerRegistry()
    registry.register("orders", "work", lambda ctx: "done")
    return registry


def completed(db: Db) -> int:
    found: int = one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'")
    return found


def waiting(db: Db) -> int:
    found: int = one(db, "SELECT count(*) FROM pgmq.q_orders__commands")
    return found


@pytest.mark.parametrize("kind", ["object", "large"])
def test_commands_behind_a_flood_do_not_wait_for_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, kind: str
) -> None:
    flood(db, INVALID[kind])
    bus.send_many("orders", [NewCommand("work") for _ in range(200)])
    seen: list[int] = []
    handlers.register("orders", "last", lambda command, ctx: seen.append(waiting(db)))
    bus.send("orders", "last")
    worker = start_worker(handlers)
    until(lambda: completed(db) == 201)
    assert seen[0] > FLOOD / 2  # most of the flood was still there
    until(lambda: waiting(db) == 0)
    assert one(db, "SELECT count(*) FROM commandbus.rejected_message") == FLOOD
    bus.send("orders", "work")
    until(lambda: completed(db) == 202)
    assert worker.stop().is_clean


@pytest.mark.parametrize("kind", INVALID)
def test_a_flood_of_any_kind_is_set_aside_to_its_last_message(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, kind: str
) -> None:
    flood(db, INVALID[kind], 1000)
    bus.send_many("orders", [NewCommand("work") for _ in range(50)])
    worker = start_worker(handlers)
    until(lambda: waiting(db) == 0)
    assert completed(db) == 50
    assert one(db, "SELECT count(*) FROM commandbus.rejected_message") == 1000
    assert worker.stop().is_clean


def test_forged_messages_that_wait_to_be_read_are_bounded(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look like commands of ours, so they are claimed; then nothing is, until some of them were read."""
    monkeypatch.setattr("commandbus.worker.raw_messages.MOST_ROWS", 50)
    flood(db, INVALID["forged"], 3000)
    bus.send_many("orders", [NewCommand("work") for _ in range(50)])
    seen: list[int] = []
    take = Adopter.take

    def counted(adopter: Adopter, domain: str, raw: Any, claimed_at: float) -> None:
        assert not adopter.is_full
        take(adopter, domain, raw, claimed_at)
        seen.append(adopter._taken - adopter._read)

    monkeypatch.setattr(Adopter, "take", counted)
    worker = start_worker(handlers)
    until(lambda: waiting(db) == 0)
    assert completed(db) == 50
    assert max(seen) < 50 + LARGEST_CLAIM
    assert worker.stop().is_clean


def test_a_flood_of_good_raw_messages_becomes_commands(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    flood(db, '{"command_type": "work"}', 1000)
    flood(db, '{"nonsense": true}', 1000)
    worker = start_worker(handlers)
    until(lambda: completed(db) == 1000)
    until(lambda: waiting(db) == 0)
    assert one(db, "SELECT count(*) FROM commandbus.rejected_message") == 1000
    assert worker.stop().is_clean


def test_maintenance_drops_the_oldest_of_too_many_and_says_so(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commandbus.worker.maintenance.PRUNE_SECONDS", 0.1)
    flood(db, '{"nonsense": true}', 300)
    with caplog.at_level(logging.WARNING, "commandbus.worker"):
        start_worker(handlers, retention_asides_count=100)
        until(lambda: waiting(db) == 0)
        until(lambda: one(db, "SELECT count(*) FROM commandbus.rejected_message") == 100)
        until(lambda: any("rejected messages were dropped" in record.getMessage() for record in caplog.records))
    assert one(db, "SELECT max(msg_id) - min(msg_id) FROM commandbus.rejected_message") == 99


def peak_of_reading(database: str, count: int) -> int:
    """The most memory that a new session of the server needs to look at so many large raw messages, in KB."""
    large = json.dumps({"command_type": "work", "data": "x" * 51_000_000})
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("DELETE FROM pgmq.q_orders__commands")
        for _ in range(count):
            conn.execute(
                "INSERT INTO pgmq.q_orders__commands (read_ct, enqueued_at, vt, message, headers) "
                "VALUES (1, now(), now(), %s::jsonb, jsonb_build_object('held_by', 'w'))",
                (large,),
            )
        ids = [id_ for (id_,) in conn.execute("SELECT msg_id FROM pgmq.q_orders__commands")]
    with psycopg.connect(database) as conn:
        asked = {"worker": "w", "msg_ids": ids, "most": 2 << 20, "bite": 8 << 20}
        rows = conn.execute(sql.text("commands/read_raw", domain="orders"), asked).fetchall()
        assert [(size > 51_000_000, text) for _, _, size, text in rows] == [(True, None)] * count
        status = Path(f"/proc/{conn.info.backend_pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("bus")
def test_four_large_messages_cost_the_server_no_more_than_one(database: str) -> None:
    assert peak_of_reading(database, 4) < 1.2 * peak_of_reading(database, 1)
