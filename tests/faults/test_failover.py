"""Two real servers: a primary, and a synchronous standby that takes over.

Split brain is not covered: whoever promotes a standby sees to it that the old primary is gone (STONITH).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, RetryPolicy, Worker
from commandbus.db.embedded import EmbeddedPostgres
from support.access import passfile_of, password_in
from support.waiting import one, until, within
from support.workers import short_lease

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup]

PATIENT = RetryPolicy(max_attempts=50, backoff_schedule=[0.05], jitter=0)
BACK_SECONDS = 30.0
StartWorker = Callable[..., Worker]


class Pair:
    """A primary and its standby, and the address that names both."""

    def __init__(self, folder: Path, binaries: Path | None) -> None:
        self._folder = folder
        self._binaries = binaries
        self.primary = self._server("first")
        self.primary.start()
        self.primary.stop()
        data = self.primary.status().data
        assert data is not None
        copy = folder / "second" / data.name
        copy.parent.mkdir()
        os.chown(copy.parent, *_owner(data))
        shutil.copytree(data, copy, symlinks=True)
        for path in [copy, *copy.rglob("*")]:
            os.chown(path, *_owner(data))
        shutil.copy(passfile_of(self.primary), copy.parent)  # with its mode
        self.primary = self._server("first", synchronous_standby_names="*")
        self.primary.start()
        self.standby = self._server("second")
        port = self.primary.status().port
        (copy / "standby.signal").touch()
        os.chown(copy / "standby.signal", *_owner(data))
        with (copy / "postgresql.auto.conf").open("a") as file:
            password = password_in(passfile_of(self.primary))
            file.write(f"primary_conninfo = 'host=127.0.0.1 port={port} user=postgres password={password}'\n")
        self.standby.start()
        with psycopg.connect(self.primary.dsn, autocommit=True) as conn:
            until(lambda: one(conn, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == 1)

    @property
    def url(self) -> str:
        """Both hosts. That the one that can write is wanted is added by commandbus itself."""
        ports = [server.status().port for server in (self.primary, self.standby)]
        passfile = passfile_of(self.primary)
        return f"postgresql://postgres@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/postgres?passfile={passfile}"

    def kill_primary(self) -> None:
        """kill -9 of every process of it."""
        postmaster = self.primary.status().pid
        assert postmaster is not None
        family = [postmaster, *_children(postmaster)]
        for pid in family:
            os.kill(pid, signal.SIGKILL)

    def promote(self) -> None:
        with psycopg.connect(self.standby.dsn, autocommit=True) as conn:
            assert one(conn, "SELECT pg_promote()")

    def close(self) -> None:
        self.standby.stop(force=True)
        self.primary.stop(force=True)

    def _server(self, name: str, **settings: str) -> EmbeddedPostgres:
        return EmbeddedPostgres(self._folder / name, binaries=self._binaries, fsync=False, settings=settings)


def _owner(path: Path) -> tuple[int, int]:
    return path.stat().st_uid, path.stat().st_gid


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == pid:
                found.append(int(entry.name))
    return found


@pytest.fixture
def pair(folder: Path, postgres_binaries: Path | None) -> Iterator[Pair]:
    pair = Pair(folder, postgres_binaries)
    try:
        yield pair
    finally:
        pair.close()


class Sender:
    """Sends one command after the other, and remembers those that the database has acknowledged."""

    def __init__(self, url: str) -> None:
        self._bus = CommandBus(url)
        self._stop = threading.Event()
        self.acknowledged: list[str] = []
        self._thread = threading.Thread(target=self._send_all)
        self._thread.start()

    def _send_all(self) -> None:
        number = 0
        while not self._stop.wait(0.002):
            number += 1
            try:
                self._bus.send("orders", "exact", {"n": number}, command_id=f"c{number:06}")
            except psycopg.Error:
                continue  # not acknowledged: it may be there or not
            self.acknowledged.append(f"c{number:06}")

    def stop(self) -> list[str]:
        self._stop.set()
        self._thread.join(60)
        self._bus.close()
        return self.acknowledged


@pytest.fixture
def running() -> dict[str, int]:
    return {}


@pytest.fixture
def handlers(running: dict[str, int]) -> HandlerRegistry:
    """`exact` writes the ledger in the completing transaction, and notes that nobody else runs it now."""
    handlers = HandlerRegistry()
    twice: list[str] = []
    lock = threading.Lock()

    @handlers.handler("orders", "exact", retry_policy=PATIENT)
    def exact(command: Any, ctx: Any) -> None:
        with lock:
            running[command.command_id] = running.get(command.command_id, 0) + 1
            if running[command.command_id] > 1:
                twice.append(command.command_id)
        try:
            with ctx.transaction() as tx:
                tx.execute("INSERT INTO ledger VALUES (%s)", (command.command_id,))
        finally:
            with lock:
                running[command.command_id] -= 1
        assert not twice, twice

    return handlers


def prepare(url: str) -> None:
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
        with bus.connect() as conn:
            conn.execute("CREATE TABLE ledger (command_id text)")


def assert_nothing_lost(url: str, acknowledged: list[str]) -> None:
    query = "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'"
    with CommandBus(url) as bus, bus.connect() as conn:
        conn.autocommit = True
        until(lambda: one(conn, query) == 0, 60, what=lambda: one(conn, query))
        rows = conn.execute("SELECT command_id, count(*) FROM ledger GROUP BY 1").fetchall()
        ledger: dict[str, int] = dict(rows)  # type: ignore[arg-type]
    assert set(acknowledged) <= set(ledger)
    assert set(ledger.values()) == {1}


def test_kill_9_of_the_primary_under_load(
    pair: Pair, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    url = pair.url
    prepare(url)
    workers = [start_worker(handlers, url, **short_lease()) for _ in range(2)]
    sender = Sender(url)
    until(lambda: len(sender.acknowledged) > 200, 60)
    pair.kill_primary()
    pair.promote()
    settled = sum(worker.settled for worker in workers)
    within(BACK_SECONDS, lambda: sum(worker.settled for worker in workers) > settled + 50)
    reached = len(sender.acknowledged)
    until(lambda: len(sender.acknowledged) > reached + 50, BACK_SECONDS)
    assert_nothing_lost(url, sender.stop())
    for worker in workers:
        worker.stop()


def test_a_switchover_with_a_read_only_phase(
    pair: Pair, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """The standby is read-only until it is promoted; workers that reach it meanwhile wait."""
    url = pair.url
    prepare(url)
    worker = start_worker(handlers, url, **short_lease())
    sender = Sender(url)
    until(lambda: len(sender.acknowledged) > 50, 60)
    pair.primary.stop(force=True)
    with psycopg.connect(pair.standby.dsn, autocommit=True) as conn:
        assert one(conn, "SELECT pg_is_in_recovery()")
    until(lambda: worker._parts.is_database_lost)  # type: ignore[union-attr]
    pair.promote()
    reached = len(sender.acknowledged)
    until(lambda: len(sender.acknowledged) > reached + 50, BACK_SECONDS)
    assert_nothing_lost(url, sender.stop())
    worker.stop()


def test_a_commit_that_was_canceled_while_it_waited_for_the_standby_is_not_acknowledged(
    folder: Path, postgres_binaries: Path | None
) -> None:
    server = EmbeddedPostgres(folder / "alone", binaries=postgres_binaries, fsync=False)
    server.start()
    try:
        with CommandBus(server.dsn) as bus, psycopg.connect(server.dsn, autocommit=True) as admin:
            bus.migrate(domains=["orders"])
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin.execute("SELECT pg_reload_conf()")
            until(lambda: one(admin, "SHOW synchronous_standby_names") == "nobody")
            outcome: list[BaseException | str] = []

            def send() -> None:
                try:
                    bus.send_many("orders", [NewCommand("exact", command_id="c")])
                    outcome.append("acknowledged")
                except psycopg.Error as error:
                    outcome.append(error)

            sending = threading.Thread(target=send)
            sending.start()
            waits = "SELECT max(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            pid = until(lambda: one(admin, waits), 20)
            assert one(admin, "SELECT pg_cancel_backend(%s)", pid)
            sending.join(20)
            (what,) = outcome
            assert isinstance(what, psycopg.OperationalError)
            assert "not acknowledged" in str(what)
    finally:
        server.stop(force=True)
