"""Lost sessions and read-only seconds at random, under load and with a limit: afterwards all of it drains unaided.

The moments are anybody's guess, so a run that leaves something behind prints what it left: the queue rows, who is
parked for what, and the state of the limit.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import sql

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Worker
from support.waiting import one, statuses, until
from support.workers import short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
pytestmark = [pytest.mark.slow, pytest.mark.waits]
SEEDS = range(12) if os.environ.get("COMMANDBUS_TEST_THOROUGH") else range(1)
CHAOS_SECONDS = 6.0
COMMANDS = 340  # of each kind
ENDED = "status NOT IN ('PENDING')"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_random_losses_leave_drains_by_itself(
    database: str, bus: CommandBus, db: Db, start_worker: StartWorker, seed: int
) -> None:
    bus.declare_limit(Limit("api", concurrency=3))
    handlers, dice = HandlerRegistry(), random.Random(seed)
    handlers.register("orders", "call", lambda command, ctx: None, limits=["api"])

    @handlers.handler("orders", "write", timeout=20)
    def write(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO ledger (kind, command_id) VALUES ('write', %s)", [command.command_id])

    workers = [start_worker(handlers, database, max_attempts=100, **short_lease()) for _ in range(2)]
    for kind in ("call", "write"):
        bus.send_many("orders", [NewCommand(kind, command_id=f"{kind}-{n}") for n in range(COMMANDS)])
    end = monotonic() + CHAOS_SECONDS
    while monotonic() < end and one(db, f"SELECT count(*) FROM commandbus.command WHERE NOT ({ENDED})"):
        if dice.random() < 0.2:
            _be_read_only(database, db, dice)
        else:
            _end_one(db, dice)
        threading.Event().wait(dice.random() / 4)  # the moments are anybody's guess
    until(lambda: set(statuses(db)) == {"COMPLETED"}, 60, what=lambda: _left(db, workers))
    assert one(db, "SELECT count(DISTINCT command_id) FROM ledger") == COMMANDS
    assert one(db, "SELECT count(*) FROM ledger") == COMMANDS, "a transaction commits with its completion, once"


def _end_one(db: Db, dice: random.Random) -> None:
    ours = "datname = current_database() AND application_name LIKE 'commandbus test-%'"
    found = db.execute(f"SELECT pid FROM pg_stat_activity WHERE {ours}".encode())
    pids = [pid for (pid,) in found]
    if pids:
        db.execute("SELECT pg_terminate_backend(%s)", (dice.choice(pids),))


def _be_read_only(database: str, db: Db, dice: random.Random) -> None:
    """As before a promotion: new sessions are read-only, and those that are there end."""
    name = sql.Identifier(database.rsplit("/", 1)[1])
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'commandbus test-%'"
    )
    threading.Event().wait(0.3 + dice.random())
    db.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))


def _left(db: Db, workers: list[Worker]) -> str:
    """What was left behind."""
    queries = {
        "statuses": "SELECT command_type, status, count(*) FROM commandbus.command GROUP BY 1, 2",
        "queue": "SELECT vt <= now() AS due, headers ->> 'held_by' AS holder, min(vt), max(vt), count(*) "
        "FROM pgmq.q_orders__commands GROUP BY 1, 2",
        "parked": "SELECT reason, limit_name, woken_at IS NOT NULL, token IS NOT NULL, count(*) "
        "FROM commandbus.parked GROUP BY 1, 2, 3, 4",
        "limits": "SELECT * FROM commandbus.limits",
        "waiting": "SELECT * FROM commandbus.waiting",
        "now": "SELECT now()",
    }
    found = [f"{name}: {db.execute(query.encode()).fetchall()}" for name, query in queries.items()]
    return "\n".join([*found, *(f"{worker.id}: {worker.health_status!r}" for worker in workers)])
