"""kill -9 of worker processes under load, and commands that kill their workers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand, Priority, TroubleshootingQueue
from support.running import examples
from support.waiting import one, statuses, until, until_settled, verdicts

Db = psycopg.Connection[Any]
StartProcess = Callable[..., subprocess.Popen[bytes]]


@pytest.mark.slow
def test_kill_9_under_load_loses_nothing_and_repeats_no_transaction(
    bus: CommandBus, db: Db, start_process: StartProcess
) -> None:
    kinds = ["exact", "plain", "exact_async", "option", "plain", "option_async"]
    priorities: list[Priority] = ["normal", "high", "normal", "low"]
    bus.send_many(
        "orders", [NewCommand(kinds[n % 6], command_id=f"c{n}", priority=priorities[n % 4]) for n in range(1200)]
    )
    alive = [start_process(), start_process()]
    for kill in range(examples(3, thorough=5)):
        until(lambda reached=(kill + 1) * 120: statuses(db).get("COMPLETED", 0) >= reached, 30)
        victim = alive.pop(0)
        victim.kill()
        alive.append(start_process())
    until_settled(db, 60)
    assert statuses(db) == {"COMPLETED": 1200}
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0
    runs = dict(db.execute("SELECT kind, count(*) FROM ledger GROUP BY 1").fetchall())
    distinct = dict(db.execute("SELECT kind, count(DISTINCT command_id) FROM ledger GROUP BY 1").fetchall())
    assert distinct == {"exact": 800, "plain": 400}
    assert runs["exact"] == 800
    # The completing attempt is the one whose write is in the ledger.
    assert (
        one(
            db,
            "SELECT count(*) FROM ledger l JOIN commandbus.command c USING (command_id) "
            "WHERE kind = 'exact' AND l.attempt = c.attempt",
        )
        == 800
    )
    # A handler's return value is in the same commit.
    returned = (
        "SELECT count(*) FROM commandbus.command WHERE command_type LIKE 'option%%' "
        "AND result::text OPERATOR(pg_catalog.=) attempt::text"
    )
    assert one(db, returned) == 400
    lost = one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'LOST'")
    assert lost > 0
    # Every attempt is accounted for: numbers have no gaps. Of more than ten give-backs only some are kept.
    gaps = (
        "SELECT c.command_id, c.attempt FROM commandbus.command c WHERE c.attempt <= 10 AND c.attempt <> 1 + "
        "(SELECT count(*) FROM commandbus.attempt a WHERE a.command = c.id AND a.verdict <> 'NOTE')"
    )
    assert db.execute(gaps).fetchall() == []


@pytest.mark.slow
def test_a_command_that_kills_its_worker_ends_in_the_troubleshooting_queue(
    bus: CommandBus, db: Db, start_process: StartProcess
) -> None:
    bus.send("orders", "killer", command_id="killer", max_attempts=2)
    bus.send_many("orders", [NewCommand("exact", command_id=f"c{n}") for n in range(60)])
    settings = {"visibility_timeout": 1.0, "statement_timeout": 0.5}
    process = start_process(**settings)

    def is_settled() -> bool:
        nonlocal process
        if process.poll() is not None:
            assert process.returncode == 1
            process = start_process(**settings)
        return bool(one(db, "SELECT NOT EXISTS (SELECT FROM commandbus.command WHERE status = 'PENDING')"))

    until(is_settled, 40)
    assert statuses(db) == {"COMPLETED": 60, "IN_TROUBLESHOOTING_QUEUE": 1}
    (entry,) = TroubleshootingQueue(bus).list("orders")
    assert (entry.command_id, entry.error_code) == ("killer", "WORKER_LOST")
    ends = [verdict for _, verdict in verdicts(db, "killer") if verdict != "GIVEN_BACK"]
    assert ends == ["LOST", "EXHAUSTED"], "it is convicted by the child process that dies of it, and pays for both"
    assert one(db, "SELECT count(*) = count(DISTINCT command_id) FROM ledger")
    assert process.poll() is None
