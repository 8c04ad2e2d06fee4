"""PostgreSQL stopped, crashed and started again under load: the worker recovers by itself, the ledger is exact."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, RetryPolicy, Worker
from commandbus.db.embedded import EmbeddedPostgres
from support.waiting import one, statuses, until, until_settled
from support.workers import add, done, either

StartWorker = Callable[..., Worker]
PATIENT = RetryPolicy(max_attempts=30, backoff_schedule=[0.05], jitter=0)
INSERT = "INSERT INTO ledger (kind, command_id, attempt) VALUES ('exact', %s, %s)"


pytestmark = pytest.mark.shared_setup


def _fast(server: EmbeddedPostgres) -> None:
    _end(server, signal.SIGINT)


def _immediate(server: EmbeddedPostgres) -> None:
    _end(server, signal.SIGQUIT)


def _end(server: EmbeddedPostgres, number: signal.Signals) -> None:
    address, pid = server.dsn, server.status().pid
    assert pid is not None
    os.kill(pid, number)
    until(lambda: not server.running, 20)
    assert server.start() == address


def _crash_a_backend(server: EmbeddedPostgres) -> None:
    """The server ends all its sessions and recovers.

    It does so a moment after the crash, and may let somebody in until then. The bystander's session tells when.
    """
    with (  # closed, and no more: the end of `with connection` would ask a dead session to commit
        closing(psycopg.connect(server.dsn, autocommit=True)) as victim,
        closing(psycopg.connect(server.dsn, autocommit=True)) as bystander,
    ):
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            bystander.execute("SELECT pg_sleep(60)")


@pytest.mark.slow
@pytest.mark.parametrize("end", [_fast, _immediate, _crash_a_backend])
def test_a_worker_outlives_its_server(
    own_server: EmbeddedPostgres, start_worker: StartWorker, end: Callable[[EmbeddedPostgres], None]
) -> None:
    name = f"restart{end.__name__}"
    with psycopg.connect(own_server.dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}".encode())
    url = own_server.dsn_of(name)
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
        bus.send_many(
            "orders",
            [NewCommand(("exact", "exact_async", "plain")[n % 3], command_id=f"c{n}") for n in range(900)],
        )
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("CREATE TABLE ledger (kind text, command_id text, attempt integer)")
    handlers = HandlerRegistry()
    plain: list[str] = []

    async def exact(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt_number)))

    @handlers.handler("orders", "plain", retry_policy=PATIENT)
    def work(command: Any, ctx: Any) -> None:
        time.sleep(0.005)
        plain.append(command.command_id)

    add(handlers, "sync", "exact", exact, retry_policy=PATIENT)
    add(handlers, "async", "exact_async", exact, retry_policy=PATIENT)
    worker = start_worker(handlers, url, visibility_timeout=3.0, statement_timeout=1.0)
    for reached in (100, 300):
        until(lambda reached=reached: worker.settled >= reached)
        end(own_server)
    db = until(lambda: _connect(url))
    with db:
        until_settled(db, 40)
        assert statuses(db) == {"COMPLETED": 900}
        assert one(db, "SELECT count(*) FROM ledger") == 600
        assert one(db, "SELECT count(DISTINCT command_id) FROM ledger") == 600
        assert len(set(plain)) == 300
        assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0
    assert worker.stop().is_clean


def _connect(url: str) -> psycopg.Connection[Any] | None:
    try:
        return psycopg.connect(url, autocommit=True)
    except psycopg.OperationalError:
        return None
