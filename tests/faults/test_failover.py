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

from commandbus import CommandBus, HandlerRegistry, HealthState, NewCommand, RetryPolicy, Worker
from commandbus.db.embedded import EmbeddedPostgres
from support.access import passfile_of, password_in
from support.network import Proxy
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
def twice() -> list[str]:
    """The commands that ran twice at once."""
    return []


@pytest.fixture
def handlers(running: dict[str, int], twice: list[str]) -> HandlerRegistry:
    """`exact` writes the ledger in the completing transaction, and notes that nobody else runs it now."""
    handlers = HandlerRegistry()
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
    pair: Pair, handlers: HandlerRegistry, start_worker: StartWorker, twice: list[str]
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
    assert twice == []


def test_a_switchover_with_a_read_only_phase(
    pair: Pair, handlers: HandlerRegistry, start_worker: StartWorker, twice: list[str]
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
    until(lambda: worker._runtime.is_database_lost)  # type: ignore[union-attr]
    pair.promote()
    settled, reached = worker.settled, len(sender.acknowledged)
    within(BACK_SECONDS, lambda: worker.settled > settled + 50)
    until(lambda: len(sender.acknowledged) > reached + 50, BACK_SECONDS)
    assert_nothing_lost(url, sender.stop())
    worker.stop()
    assert twice == []


@pytest.fixture
def moved(pair: Pair) -> Iterator[Proxy]:
    """An address that leads to the primary, until somebody moves it."""
    port = pair.primary.status().port
    assert port is not None
    proxy = Proxy(port)
    yield proxy
    proxy.close()


def test_an_address_that_leads_to_a_standby_before_its_promotion(
    pair: Pair, start_worker: StartWorker, moved: Proxy
) -> None:
    """One host, as of a balancer: nothing there says which server can write. Workers that were connected, and
    one that starts meanwhile, wait; health names what does not work, and an outcome is kept."""
    prepare(pair.url)
    port = pair.standby.status().port
    assert port is not None
    url = f"postgresql://postgres@127.0.0.1:{moved.port}/postgres?passfile={passfile_of(pair.primary)}"
    ran: list[str] = []
    proceed = threading.Event()
    handlers = HandlerRegistry()

    @handlers.handler("orders", "slow", timeout=60)
    def slow(command: Any, ctx: Any) -> str:
        ran.append(command.command_id)
        assert proceed.wait(60)
        return "kept"

    worker = start_worker(handlers, url)
    with CommandBus(pair.url) as bus:
        bus.send("orders", "slow", command_id="a")
        until(lambda: ran == ["a"])
    with psycopg.connect(pair.standby.dsn, autocommit=True) as conn:
        until(lambda: one(conn, "SELECT count(*) FROM commandbus.command") == 1)
    moved.lead_to(port)
    fresh = start_worker(handlers, url)
    proceed.set()
    until(lambda: worker._runtime.settler.backlog == 1)  # type: ignore[union-attr]
    for each in (worker, fresh):
        within(15, lambda each=each: "claimer" in each.health_status.as_dict()["reasons"].__str__())
    pair.kill_primary()
    pair.promote()
    with CommandBus(url) as bus:
        within(5 + 5, lambda: _status(bus, "a") == "COMPLETED")
        bus.send("orders", "slow", command_id="b")
        until(lambda: _status(bus, "b") == "COMPLETED", 20)
    assert ran == ["a", "b"], "the outcome was kept, so nothing ran twice"
    for each in (worker, fresh):
        until(lambda each=each: each.health_status.state is HealthState.HEALTHY)
        assert each.stop().is_clean


def _status(bus: CommandBus, command_id: str) -> str | None:
    found = bus.get_command("orders", command_id)
    return None if found is None else str(found.status)


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


@pytest.mark.parametrize("kind", ["work", "work_async"])
def test_a_handlers_commit_that_was_canceled_while_it_waited_for_the_standby_is_not_acknowledged(
    folder: Path, postgres_binaries: Path | None, start_worker: StartWorker, kind: str
) -> None:
    """The handler is told so. The commit stands on this server, together with the completion, so nothing runs
    again; the history says what happened. The next command on the same connection knows nothing of it."""
    handlers = HandlerRegistry()
    acknowledged: list[str] = []

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO work (command) VALUES (%s)", [command.command_id])
            if command.command_id == "first":  # only this transaction waits for the standby
                tx.execute("SET LOCAL synchronous_commit = on")
        acknowledged.append(command.command_id)

    @handlers.handler("orders", "work_async", timeout=60)
    async def work_async(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO work (command) VALUES (%s)", [command.command_id])
            if command.command_id == "first":
                await tx.execute("SET LOCAL synchronous_commit = on")
        acknowledged.append(command.command_id)

    server = EmbeddedPostgres(folder / "alone", binaries=postgres_binaries, fsync=False)
    server.start()
    try:
        with CommandBus(server.dsn) as bus, psycopg.connect(server.dsn, autocommit=True) as admin:
            bus.migrate(domains=["orders"])
            admin.execute("CREATE TABLE work (command text)")
            admin.execute("ALTER SYSTEM SET synchronous_commit = local")
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin.execute("SELECT pg_reload_conf()")
            until(lambda: one(admin, "SHOW synchronous_standby_names") == "nobody")
            worker = start_worker(handlers, server.dsn, concurrency=1)
            bus.send("orders", kind, command_id="first", max_attempts=1)
            waits = "SELECT max(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            pid = until(lambda: one(admin, waits), 20)
            bus.send("orders", kind, command_id="second", max_attempts=1)
            assert one(admin, "SELECT pg_cancel_backend(%s)", pid)
            until(lambda: _status(bus, "second") == "COMPLETED", 20)
            assert _status(bus, "first") == "COMPLETED"
            assert admin.execute("SELECT command FROM work ORDER BY 1").fetchall() == [("first",), ("second",)]
            assert acknowledged == ["second"]
            until(lambda: bus.get_attempts("orders", "first"))
            (noted,) = bus.get_attempts("orders", "first")
            assert "a failover now would lose it" in str(noted.error)
            assert not bus.get_attempts("orders", "second").items
            assert worker.stop().is_clean
    finally:
        server.stop(force=True)


def test_a_message_that_is_handed_out_again_with_the_number_of_its_command(
    database: str, proxy: Proxy, through: str, start_worker: StartWorker
) -> None:
    """After a failover that lost commits the sequences of queue and commands both count again from where they
    were. The same worker claims the other command, while its attempt of the lost one still runs: nothing of that
    one lands."""
    proceed = {"lost": threading.Event(), "other": threading.Event()}
    began: list[str] = []
    handlers = HandlerRegistry()

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> str:
        began.append(command.command_id)
        assert proceed[command.command_id].wait(30)
        return str(command.command_id)

    with CommandBus(database) as bus, psycopg.connect(database, autocommit=True) as db:
        bus.create_domain("orders")
        lost = bus.send("orders", "work", command_id="lost")
        worker = start_worker(handlers, through)
        until(lambda: began == ["lost"])
        proxy.is_refusing = True
        proxy.cut()
        db.execute("DELETE FROM pgmq.q_orders__commands")
        db.execute("DELETE FROM commandbus.command")
        for table, column in (("pgmq.q_orders__commands", "msg_id"), ("commandbus.command", "id")):
            db.execute(f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), 1, false)".encode())
        other = bus.send("orders", "work", command_id="other")
        assert other.id == lost.id, "it has the number of the lost one"
        proxy.is_refusing = False
        until(lambda: began == ["lost", "other"], 20)
        proceed["lost"].set()
        until(lambda: len(worker._runtime.attempts.held) == 1)  # type: ignore[union-attr]
        assert _status(bus, "other") == "IN_PROGRESS"
        proceed["other"].set()
        until(lambda: _status(bus, "other") == "COMPLETED")
        found = bus.get_command("orders", "other")
        assert found is not None
        assert found.result == "other"
    worker.stop()


def test_what_was_claimed_while_the_standby_was_away_is_given_back(
    folder: Path, postgres_binaries: Path | None, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits wait for a standby that does not come, and our own clock cancels them: none of it is acknowledged,
    so nothing starts, and no command pays for it."""
    monkeypatch.setattr("commandbus.db.service_connection.STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr("commandbus.db.service.FAILING_SECONDS", 3.0)
    ran: list[str] = []
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda command, ctx: ran.append(command.command_id))
    server = EmbeddedPostgres(folder / "alone", binaries=postgres_binaries, fsync=False)
    server.start()
    try:
        with CommandBus(server.dsn) as bus, psycopg.connect(server.dsn, autocommit=True) as admin:
            bus.migrate(domains=["orders"])
            bus.send_many("orders", [NewCommand("work", max_attempts=1) for _ in range(20)])
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin.execute("SELECT pg_reload_conf()")
            until(lambda: one(admin, "SHOW synchronous_standby_names") == "nobody")
            worker = start_worker(handlers, server.dsn)
            claimed = "SELECT count(*) FROM pgmq.q_orders__commands WHERE read_ct > 0"
            until(lambda: one(admin, claimed), 30)
            until(lambda: "claimer" in worker.health_status.critical_reasons, 30)
            runtime = worker._runtime
            assert runtime is not None
            assert not any(each.is_broken for each in runtime._threads), "another worker would get the same"
            assert ran == []
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")
            unfinished = "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'"
            until(lambda: one(admin, unfinished) == 0, 30)
            assert len(ran) == len(set(ran)) == 20
            verdicts = admin.execute("SELECT DISTINCT verdict FROM commandbus.attempt").fetchall()
            assert verdicts == [("GIVEN_BACK",)]
            assert worker.stop().is_clean
    finally:
        server.stop(force=True)
