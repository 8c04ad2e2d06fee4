"""A worker that beats, has room and cannot ask for work, though its supervisor reaches the database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from commandbus import CommandBus, CommandStatus
from support.supervised import Supervised
from support.waiting import one, until

Supervise = Callable[..., Supervised]
END_SESSIONS = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name LIKE %s"""
STARVE = '''

@handlers.handler("orders", "starve")
def starve(command, ctx):
    """What is open stays open, but nothing can be opened any more."""
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
'''


def test_a_worker_that_can_open_no_connection_is_replaced(
    supervise: Supervise,
    bus: CommandBus,
    db: psycopg.Connection[Any],
    tasks: Path,
    impatient: Callable[[str], None],
) -> None:
    impatient("worker_processes.CLAIMLESS_SECONDS = 3.0")
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + STARVE)
    supervised = supervise().until_ready()
    (first,) = supervised.workers()
    bus.send("orders", "quick", command_id="before")
    until(lambda: is_completed(bus, "before"))  # all modules that it needs are loaded: they are files, too
    bus.send("orders", "starve", command_id="starve")
    until(lambda: is_completed(bus, "starve"), what=lambda: supervised.log)
    assert one(db, END_SESSIONS, "% claimer") == 1
    bus.send("orders", "quick", command_id="after")
    until(lambda: is_completed(bus, "after"), 40, what=lambda: supervised.log)
    until(lambda: first not in supervised.workers(), 30, what=lambda: supervised.log)
    assert "is replaced: it has free slots" in supervised.log


def is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED
