"""What a command costs in row writes, and that the settle's update of its row stays in place (HOT)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    NewCommand,
    PermanentCommandError,
    Worker,
)
from commandbus.db.drivers import run
from commandbus.flow.breakers.breaker import Bad, report
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import Settlement, settle
from commandbus.model.breaker import Breaker
from commandbus.model.outcome import judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from support.databases import Databases
from support.waiting import one, until, until_settled
from support.workers import quick_settings

Db = psycopg.Connection[Any]
POLICY = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)


@pytest.fixture
def database(databases: Databases) -> Iterator[str]:
    """One without history: the statistics count all writes since it was made."""
    with databases.lend(used=False) as address:
        yield address


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    """A bus on a migrated database with a domain `orders`."""
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        yield bus


@pytest.fixture
def db(database: str) -> Iterator[Db]:
    """A plain connection in autocommit mode."""
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn


def claimed(conn: Db, n: int) -> list[Attempt]:
    found = run(conn, claim(domain="orders", worker="w", n=n, lease_seconds=60, cursor=None))
    made = [Attempt("orders", row, None, 0.0) for row in found.ready]
    for attempt in made:
        attempt.started = 1.0
    return made


def written(db: Db, *tables: str) -> int:
    """Row writes so far, as the statistics tell: inserts, updates and deletes."""
    chosen = "AND relname = ANY (%s)" if tables else ""
    return int(
        one(
            db,
            "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables "
            f"WHERE schemaname IN ('commandbus', 'pgmq') {chosen}",
            *([list(tables)] if tables else []),
        )
    )


def settle_all(database: str, batch: int, result: str | None = '{"ok": true}') -> None:
    """Claim and settle everything, batch by batch; closing the connection reports its statistics."""
    with psycopg.connect(database, autocommit=True) as conn:
        while made := claimed(conn, batch):
            assert run(conn, settle("orders", "w", [each.complete(result) for each in made])) == {}


def test_a_command_costs_five_row_writes(database: str, bus: CommandBus, db: Db) -> None:
    bus.close()
    until(lambda: written(db, "domain", "meta") == 2)
    before = written(db)
    bus.send_many("orders", [NewCommand("work", {"n": n}) for n in range(1000)])
    settle_all(database, 200)
    bus.close()
    until(lambda: written(db) - before >= 5000)
    assert written(db) - before == 5000


def test_a_worker_makes_no_other_writes_for_a_command(database: str, bus: CommandBus, db: Db) -> None:
    """Its own rows, of the registry and the announcement, do not grow with the commands."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: "done")
    before = written(db)
    bus.send_many("orders", [NewCommand("work", {"n": n}) for n in range(1000)])
    with Worker(handlers, settings=quick_settings(database)):
        until_settled(db)
    bus.close()
    tables = ("command", "q_orders__commands")
    until(lambda: written(db, *tables) >= 5000)
    assert written(db, *tables) == 5000
    assert written(db) - before - 5000 < 30


def test_counting_for_a_breaker_writes_nothing_per_attempt(database: str, bus: CommandBus, db: Db) -> None:
    """A stuck attempt is in the window, so the counts of its type ride on the heartbeat: one row a second."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: "done")
    bus.run(report("orders", "work", Breaker(), bad=[Bad(1, True, "ExecutionStuck: it hangs")]))
    before = written(db)
    bus.send_many("orders", [NewCommand("work", {"n": n}) for n in range(1000)])
    with Worker(handlers, settings=quick_settings(database, breakers_enabled=True)):
        until_settled(db)
        counted = "SELECT (counts -> 'orders/work' -> 'others') IS NOT NULL FROM commandbus.worker"
        until(lambda: one(db, counted))
        until(lambda: [info.others for info in bus.breakers()] == [1000])
    bus.close()
    tables = ("command", "q_orders__commands")
    until(lambda: written(db, *tables) >= 5000)
    assert written(db, *tables) == 5000
    assert written(db, "breaker") == 2, "the report of the stuck attempt: made, and saved"
    assert written(db) - before - 5000 < 30


@pytest.mark.parametrize("in_batch", [False, True], ids=["alone", "in a batch"])
def test_settling_updates_command_rows_in_place(database: str, bus: CommandBus, db: Db, in_batch: bool) -> None:
    commands = [NewCommand("work", {"n": n, "text": "x" * 60}) for n in range(5000)]
    bus.create_batch("orders", commands) if in_batch else bus.send_many("orders", commands)
    settle_all(database, 200)

    def updates() -> tuple[int, int]:
        row = db.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'commandbus.command'::regclass"
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    until(lambda: updates()[0] == 5000)
    assert updates()[1] / 5000 >= 0.85


def test_no_index_names_a_column_that_settling_changes(database: str, bus: CommandBus, db: Db) -> None:
    """Neither as a column, nor in an expression or a predicate: one such index would end HOT updates."""
    bus.send_many("orders", [NewCommand("work", command_id=f"c{n}") for n in range(5)])
    rows = "SELECT command_id, to_jsonb(c) FROM commandbus.command c"
    before = dict(db.execute(rows).fetchall())

    def failed(attempt: Attempt, error: Exception) -> Settlement:
        return attempt.fail(judge_failure(error, charge=1, policy=POLICY, max_attempts=None))

    attempts = claimed(db, 5)
    outcomes = [
        attempts[0].complete('"result"'),
        failed(attempts[1], BusinessRuleException("no")),
        failed(attempts[2], PermanentCommandError("no")),
        failed(attempts[3], RuntimeError("again")),
        attempts[4].give_back(),
    ]
    assert run(db, settle("orders", "w", outcomes)) == {}
    after = dict(db.execute(rows).fetchall())
    changed = {name for each in before for name in before[each] if before[each][name] != after[each][name]}
    assert {"status", "result", "finished_at", "waived"} <= changed
    indexed = {
        name
        for (name,) in db.execute(
            """
            SELECT a.attname FROM pg_index i
              JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
             WHERE i.indrelid = 'commandbus.command'::regclass
            UNION
            SELECT a.attname FROM pg_index i
              JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid
                              AND d.refclassid = 'pg_class'::regclass AND d.refobjid = i.indrelid
              JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = d.refobjsubid
             WHERE i.indrelid = 'commandbus.command'::regclass
            """
        )
    }
    assert {"id", "domain", "command_id"} <= indexed
    assert indexed & changed == set()
