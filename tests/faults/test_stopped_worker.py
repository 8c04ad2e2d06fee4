"""SIGSTOP and SIGCONT of a worker process: what it had claimed is somebody else's when it wakes up."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, Worker
from support.waiting import one, statuses, until, until_settled

Db = psycopg.Connection[Any]
StartProcess = Callable[..., subprocess.Popen[bytes]]
COMMANDS = 1500


def is_stopped(pid: int) -> bool:
    """Have all its threads stopped? On a busy machine a thread may go on for a moment after SIGSTOP was sent."""
    tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["note", "note_async"])
def test_a_worker_that_was_stopped_starts_nothing_that_others_have_completed(
    bus: CommandBus,
    db: Db,
    database: str,
    start_process: StartProcess,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
    kind: str,
) -> None:
    notes = tmp_path / "notes"
    notes.touch()

    def started() -> list[str]:
        return notes.read_text().splitlines()

    bus.send_many("orders", [NewCommand(kind, str(notes), command_id=f"c{n}") for n in range(COMMANDS)])
    process = start_process(concurrency=1, max_attempts=3)
    until(lambda: len(started()) > 300)

    def stops_with_many_in_hand() -> bool:
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        if one(db, "SELECT count(*) > 10 FROM pgmq.q_orders__commands WHERE headers ? 'held_by'"):
            return True
        process.send_signal(signal.SIGCONT)  # just before a claim: a moment later it holds many again
        return False

    until(stops_with_many_in_hand)
    before = len(started())
    assert before < COMMANDS

    handlers = HandlerRegistry()
    handlers.register("orders", kind, lambda ctx: "by the other")
    other = start_worker(handlers, database, concurrency=4)
    until_settled(db)
    assert other.stop().is_clean
    suspected = "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'LOST' AND error LIKE '%child process%'"
    assert one(db, suspected) <= 1, "only what ran when it was stopped is suspected"

    process.send_signal(signal.SIGCONT)
    bus.send("orders", kind, str(notes), command_id="after")
    until_settled(db)
    later = started()[before:]
    assert later[-1] == "after"
    assert len(later) <= 2, f"{len(later) - 1} were started anew; at most the one that ran when it was stopped"
    assert statuses(db) == {"COMPLETED": COMMANDS + 1}
    assert process.poll() is None
