"""The settler: one row that cannot be written, or not now, never keeps its neighbours waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, HandlerRegistry, NewCommand, Worker
from support.waiting import one, statuses, until, until_settled, verdicts
from support.workers import add, opened, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]

POISON = """
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.command_id = 'poison' AND ({condition}) THEN RAISE EXCEPTION 'this row is cursed'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER poison BEFORE UPDATE ON commandbus.command FOR EACH ROW EXECUTE FUNCTION poison();
"""


@pytest.fixture
def ran() -> dict[str, int]:
    """How often each command was run."""
    return {}


@pytest.fixture
def handlers(lane: str, ran: dict[str, int]) -> HandlerRegistry:
    """One handler that counts its runs."""
    handlers = HandlerRegistry()

    async def work(command: Any, ctx: Any) -> str:
        ran[command.command_id] = ran.get(command.command_id, 0) + 1
        return "done"

    add(handlers, lane, "work", work)
    return handlers


def test_a_row_that_cannot_be_stored_fails_alone(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: dict[str, int],
) -> None:
    db.execute(POISON.format(condition="NEW.status = 'COMPLETED'").encode())
    ids = [f"c{n}" for n in range(100)]
    ids[50] = "poison"
    bus.send_many("orders", [NewCommand("work", command_id=each) for each in ids])
    worker = start_worker(handlers)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 99, "IN_TROUBLESHOOTING_QUEUE": 1}
    found = bus.get_command("orders", "poison")
    assert found is not None
    assert found.error_code == "UNSTORABLE"
    assert "cursed" in (found.error or "")
    assert set(ran.values()) == {1}
    report = worker.stop()
    assert report.is_clean
    assert report.settled == 100


def test_a_row_that_cannot_be_written_at_all_is_tried_again_when_its_lease_ends(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    db.execute(POISON.format(condition="true").encode())
    ids = [f"c{n}" for n in range(20)]
    ids[3] = "poison"
    bus.send_many("orders", [NewCommand("work", command_id=each, max_attempts=50) for each in ids])
    start_worker(handlers, **short_lease())
    until(lambda: statuses(db) == {"COMPLETED": 19, "PENDING": 1})
    until(lambda: "command poison stays leased" in caplog.text)  # its failure could not be stored, either
    db.execute("DROP TRIGGER poison ON commandbus.command")
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 20}
    assert {name: count for name, count in ran.items() if name != "poison"} == {
        each: 1 for each in ids if each != "poison"
    }
    assert ("LOST" in {verdict for _, verdict in verdicts(db, "poison")}) == (ran["poison"] > 1)


def test_a_row_that_somebody_holds_is_tried_again_while_its_neighbours_settle(
    database: str,
    bus: CommandBus,
    db: Db,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    handlers = HandlerRegistry()
    runs: list[str] = []

    async def work(command: Any, ctx: Any) -> None:
        runs.append(command.command_id)
        if command.command_id == "held":
            await opened(go_on)

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="held")
    worker = start_worker(handlers)
    until(lambda: runs == ["held"])
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        go_on.set()
        bus.send_many("orders", [NewCommand("work") for _ in range(100)])
        until(lambda: statuses(db) == {"COMPLETED": 100, "PENDING": 1})
        other.rollback()
    until_settled(db)
    assert runs.count("held") == 1
    assert verdicts(db, "held") == []
    report = worker.stop()
    assert (report.settled, report.is_clean) == (101, True)


def _backend(db: Db, part: str) -> int:
    return int(
        one(
            db,
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s",
            f"%{part}",
        )
    )


def _is_blocked(db: Db, part: str) -> bool:
    return bool(
        one(
            db,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock' AND application_name LIKE %s",
            f"%{part}",
        )
    )


def test_a_cancelled_settle_is_repeated_and_nothing_is_run_twice(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: dict[str, int],
) -> None:
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE commandbus.attempt IN ACCESS EXCLUSIVE MODE")
        bus.send_many("orders", [NewCommand("work", command_id=f"c{n}") for n in range(5)])
        worker = start_worker(handlers)
        until(lambda: _is_blocked(db, "settler"))
        assert one(db, "SELECT pg_cancel_backend(%s)", _backend(db, "settler"))
        until(lambda: not _is_blocked(db, "settler"))
        other.rollback()
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 5}
    assert set(ran.values()) == {1}
    assert worker.stop().is_clean


def test_a_cancelled_claim_does_not_end_the_worker(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(handlers)
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE commandbus.pause IN ACCESS EXCLUSIVE MODE")
        until(lambda: _is_blocked(db, "claimer"))
        assert one(db, "SELECT pg_cancel_backend(%s)", _backend(db, "claimer"))
        until(lambda: not _is_blocked(db, "claimer"))
        other.rollback()
    bus.send("orders", "work", command_id="c")
    until_settled(db)
    assert bus.get_command("orders", "c").status is CommandStatus.COMPLETED  # type: ignore[union-attr]
    assert worker.stop().is_clean


@pytest.mark.parametrize("part", ["claimer", "settler", "keeper"])
def test_a_terminated_backend_comes_back(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: dict[str, int],
    part: str,
) -> None:
    bus.send("orders", "work", command_id="before")
    worker = start_worker(handlers)
    until_settled(db)
    assert one(db, "SELECT pg_terminate_backend(%s, 5000)", _backend(db, part))
    bus.send_many("orders", [NewCommand("work", command_id=f"c{n}") for n in range(20)])
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 21}
    assert set(ran.values()) == {1}
    assert worker.stop().is_clean
