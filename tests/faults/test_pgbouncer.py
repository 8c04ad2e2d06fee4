"""Workers behind a real PgBouncer in transaction mode: nothing is left in a session, and the limits still hold.

`.ci/run` installs the program where it may; elsewhere these tests are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import sql

from commandbus import (
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Limit,
    NewCommand,
    RetryPolicy,
    Settings,
    Worker,
)
from commandbus.bus.call_listener import CallListener
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.rescue import Rule
from commandbus.model.crash_attribution import Cause, Death
from commandbus.supervisor.coroner import Case, Coroner
from commandbus.supervisor.worker_messages import Hello
from commandbus.web.app import create_console
from support.access import password_in
from support.consoles import served
from support.page_timeouts import page_timeouts
from support.waiting import one, statuses, until, until_settled, verdicts
from web.conftest import Visit

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]
PROGRAM = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
SESSIONS = 3

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed (Debian's package pgbouncer)"),
]


@pytest.fixture
def pooled(database: str, tmp_path: Path) -> Iterator[str]:
    """The database's address through a PgBouncer with a few server sessions."""
    found = re.search(r":(\d+)/(\w+)", database)
    assert found is not None
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    password = password_in(os.environ["PGPASSFILE"])
    (tmp_path / "users").write_text('"postgres" ""\n')
    (tmp_path / "pgbouncer.ini").write_text(
        "[databases]\n"
        f"* = host=127.0.0.1 port={found[1]} user=postgres password={password}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = any\nauth_file = {tmp_path / 'users'}\n"
        f"pool_mode = transaction\ndefault_pool_size = {SESSIONS}\nmax_client_conn = 100\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    user = ["-u", "nobody"] if os.geteuid() == 0 else []  # it refuses to run as root
    with (tmp_path / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROGRAM), *user, str(tmp_path / "pgbouncer.ini")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    address = f"postgresql://postgres@127.0.0.1:{port}/{found[2]}"

    def answers() -> bool:
        try:
            with psycopg.connect(address, connect_timeout=2) as conn:
                return bool(one(conn, "SELECT true"))
        except psycopg.OperationalError:
            return False

    try:
        until(answers, what=lambda: (tmp_path / "pgbouncer.log").read_text())
        yield address
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def start_pooled(start_worker: StartWorker, pooled: str) -> StartWorker:
    """Starts workers whose every connection goes through it."""

    def start(handlers: HandlerRegistry, **changes: Any) -> Worker:
        return start_worker(handlers, pooled, prepared_statements=False, **changes)

    return start


def leftovers(pooled: str) -> set[tuple[Any, ...]]:
    """What the next clients find in the sessions that they get."""
    looks = set()
    clients = [psycopg.connect(pooled, prepare_threshold=None) for _ in range(SESSIONS)]
    for conn in clients:  # each is in a transaction, so each has a session of its own
        looks.add(
            conn.execute(
                "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'), "
                "current_setting('idle_in_transaction_session_timeout'), current_user, "
                "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), "
                "(SELECT count(*) FROM pg_listening_channels()), "
                "(SELECT count(*) FROM pg_prepared_statements)"
            ).fetchone()
        )
    for conn in clients:
        conn.close()
    return looks


def test_commands_run_and_nothing_is_left_in_a_session(
    bus: CommandBus, db: Db, pooled: str, start_pooled: StartWorker
) -> None:
    handlers = HandlerRegistry()
    db.execute("CREATE TABLE shipments (command_id text PRIMARY KEY)")

    @handlers.handler("orders", "write", timeout=30)
    def write(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO shipments VALUES (%s)", (command.command_id,))

    @handlers.handler("orders", "write_async", timeout=30)
    async def write_async(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO shipments VALUES (%s)", (command.command_id,))

    @handlers.handler("orders", "look")
    def look(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            return one(conn, "SELECT current_setting('statement_timeout')")

    workers = [start_pooled(handlers) for _ in range(2)]
    with CommandBus(settings=Settings(database_url=pooled, prepared_statements=False)) as through:
        through.send_many("orders", [NewCommand(("write", "write_async")[n % 2], n) for n in range(200)])
        limit = through.call("orders", "look", wait=30)
        assert limit not in (None, "0"), "a handler's transaction has its limit"
        until_settled(db, 60)
    assert statuses(db) == {"COMPLETED": 201}
    assert one(db, "SELECT count(*) FROM shipments") == 200
    for worker in workers:
        assert worker.stop().is_clean
    assert leftovers(pooled) == {("0", "0", "0", "postgres", 0, 0, 0)}


def test_what_hangs_in_a_query_is_stopped_and_nobody_elses_session_is_hit(
    bus: CommandBus, db: Db, start_pooled: StartWorker
) -> None:
    """The session is found by the attempt's lock: process ids that a client of a pooler knows are invented."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "hang", timeout=1)
    def hang(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("SELECT pg_sleep(600)")

    @handlers.handler("orders", "long", timeout=60)
    def long(command: Any, ctx: Any) -> str:
        with ctx.transaction() as tx:
            tx.execute("SELECT pg_sleep(3)")
            tx.complete("slept")
        return "slept"

    start_pooled(handlers, statement_timeout=20.0, visibility_timeout=30.0)
    bus.send("orders", "long", command_id="long", max_attempts=1)
    bus.send("orders", "hang", command_id="hang", max_attempts=1)
    until_settled(db, 30)
    assert verdicts(db, "hang") == [(1, "EXHAUSTED")]
    assert bus.get_attempts("orders", "hang")[0].rung == "deadline"
    found = bus.get_command("orders", "long")
    assert found is not None
    assert (found.status, found.result) == (CommandStatus.COMPLETED, "slept")
    asleep = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND query = 'SELECT pg_sleep(600)'"
    )
    assert one(db, asleep) <= 1
    until(lambda: one(db, f"{asleep} AND state = 'active'") == 0)


@pytest.mark.parametrize("text", ["COMMIT", "COMMIT AND CHAIN", "COMMIT; BEGIN"])
@pytest.mark.parametrize("level", [None, "repeatable read"])
def test_a_handler_that_ends_its_transaction_is_noticed(
    bus: CommandBus, db: Db, start_pooled: StartWorker, text: str, level: str | None
) -> None:
    handlers = HandlerRegistry()
    db.execute("CREATE TABLE shipments (command_id text)")

    @handlers.handler("orders", "write", timeout=30)
    def write(command: Any, ctx: Any) -> None:
        with ctx.transaction(isolation=level) as tx:
            tx.execute("INSERT INTO shipments VALUES (%s)", (command.command_id,))
            if command.command_id == "bad":
                tx.execute(text)

    start_pooled(handlers)
    for command_id in ("bad", "good"):
        bus.send("orders", "write", command_id=command_id)
    until_settled(db, 30)
    assert statuses(db) == {"COMPLETED": 1, "IN_TROUBLESHOOTING_QUEUE": 1}
    assert [each.error_code for each in bus.get_attempts("orders", "bad")] == ["TRANSACTION_ENDED"]
    assert one(db, "SELECT count(*) FROM shipments") == 2


@pytest.mark.slow
def test_a_locked_reply_queue_holds_up_its_own_outcomes_alone(
    bus: CommandBus, db: Db, database: str, start_pooled: StartWorker
) -> None:
    """No limit can be left in the session: our own clock cancels the statement that waits."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: "done")
    bus.create_queue("answers")
    start_pooled(handlers)
    with psycopg.connect(database) as holder:
        holder.execute("LOCK TABLE pgmq.q_answers IN ACCESS EXCLUSIVE MODE")
        bus.send("orders", "work", command_id="told", reply_to="answers")
        ids = [sent.command_id for sent in bus.send_many("orders", [NewCommand("work") for _ in range(50)])]

        def all_are() -> bool:
            return all(
                (found := bus.get_command("orders", id_)) is not None and found.status is CommandStatus.COMPLETED
                for id_ in ids
            )

        until(all_are, 30)
        holder.rollback()
    until_settled(db, 30)
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own clock cancels sooner what waits for a lock, so that a test takes seconds."""
    monkeypatch.setattr("commandbus.db.service_connection.STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr("commandbus.db.service_connection.SILENT_SECONDS", 4.0)


OPEN = (
    "INSERT INTO commandbus.command (domain, command_id, command_type, msg_id) VALUES ('orders', 'x', 'work', 0)"
)
LOCKS = {  # what somebody holds, and the message or command that needs it
    "a raw message's command_id (claimer, adopter)": (OPEN, "raw"),
    "a queue row (settler)": ("SELECT FROM pgmq.q_orders__commands WHERE headers ? 'held_by' FOR UPDATE", "held"),
    "a command row (settler)": ("SELECT FROM commandbus.command WHERE command_id = 'x' FOR UPDATE", "held"),
    "a limit (limit client)": ("SELECT FROM commandbus.limits WHERE name = 'api' FOR UPDATE", "call"),
    "the worker's row (maintenance)": ("SELECT FROM commandbus.worker FOR UPDATE", "held"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lock", LOCKS)
def test_a_locked_row_holds_up_itself_alone(
    bus: CommandBus, db: Db, database: str, start_pooled: StartWorker, lock: str
) -> None:
    """The server keeps no `lock_timeout` for us: what our clock cancels is for later, and nothing else is."""
    release, handlers = threading.Event(), HandlerRegistry()
    bus.declare_limit(Limit("api", concurrency=5))
    bus.declare_limit(Limit("other", concurrency=5))
    handlers.register("orders", "held", lambda command, ctx: (release.wait(40), None)[1], timeout=60)
    handlers.register("orders", "work", lambda command, ctx: None, limits=["other"])
    handlers.register("orders", "call", lambda command, ctx: None, limits=["api"])
    worker = start_pooled(handlers, concurrency=8)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.worker"))
    statement, kind = LOCKS[lock]
    if kind == "held":
        bus.send("orders", "held", command_id="x")
        until(lambda: worker._runtime.attempts.running)  # type: ignore[union-attr]
    with psycopg.connect(database) as holder:
        holder.execute(statement.encode())
        if kind == "raw":
            raw = '{"command_type": "work", "command_id": "x"}'
            db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (raw,))
        elif kind == "call":
            bus.send("orders", "call", command_id="x")
        release.set()
        for portion in range(3):  # the thread that meets the lock goes on, and looks at it again
            ids = [f"{portion}-{n}" for n in range(10)]
            bus.send_many("orders", [NewCommand("work", command_id=id_) for id_ in ids])
            until(lambda ids=ids: all(_is_completed(bus, id_) for id_ in ids), 30)  # type: ignore[misc]
        holder.rollback()
    until(lambda: _is_completed(bus, "x"), 40)
    until_settled(db, 30)
    charged = "SELECT count(*) FROM commandbus.attempt WHERE verdict NOT IN ('PARKED', 'GIVEN_BACK')"
    assert one(db, charged) == 0
    assert worker.stop().is_clean


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_locked_queue_row_keeps_no_other_lease_from_its_renewal(
    bus: CommandBus, db: Db, database: str, start_pooled: StartWorker
) -> None:
    release, handlers = threading.Event(), HandlerRegistry()
    handlers.register("orders", "held", lambda command, ctx: (release.wait(40), None)[1], timeout=60)
    worker = start_pooled(handlers, visibility_timeout=9.0, statement_timeout=1.0, cancel_grace=0.5)
    bus.send_many("orders", [NewCommand("held", command_id=name) for name in ("locked", "free")])
    until(lambda: len(worker._runtime.attempts.running) == 2)  # type: ignore[union-attr]
    lease = (
        "SELECT vt FROM pgmq.q_orders__commands q JOIN commandbus.command c ON c.msg_id = q.msg_id "
        "WHERE command_id = %s"
    )
    claimed = {name: one(db, lease, name) for name in ("locked", "free")}
    with psycopg.connect(database) as holder:
        holder.execute(
            "SELECT FROM pgmq.q_orders__commands WHERE msg_id = "
            "(SELECT msg_id FROM commandbus.command WHERE command_id = 'locked') FOR UPDATE"
        )
        until(lambda: one(db, lease, "free") > claimed["free"])
        assert one(db, lease, "locked") == claimed["locked"], "a skipped renewal is not one"
        holder.rollback()
    until(lambda: one(db, lease, "locked") > claimed["locked"])
    release.set()
    until_settled(db, 30)
    assert [verdicts(db, name) for name in claimed] == [[], []]
    assert worker.stop().is_clean


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("table", ["pgmq.q_orders__commands", "commandbus.command"])
def test_a_locked_row_of_a_dead_worker_holds_up_no_other_case(
    bus: CommandBus, db: Db, database: str, pooled: str, table: str
) -> None:
    settings = Settings(database_url=pooled, prepared_statements=False)
    for worker in ("one", "two"):
        bus.send("orders", "work", command_id=f"of {worker}")
        run(db, claim(domain="orders", worker=worker, n=1, lease_seconds=30, cursor=None))
    coroner = Coroner(settings, "test")
    coroner.start()
    try:
        with psycopg.connect(database) as holder:
            of_one = "SELECT msg_id FROM commandbus.command WHERE command_id = 'of one'"
            locked = holder.execute(f"SELECT FROM {table} WHERE msg_id = ({of_one}) FOR UPDATE".encode())
            assert locked.rowcount == 1
            for worker in ("one", "two"):
                hello = Hello(worker, ["orders"], {}, Rule(RetryPolicy(3, (0.0,), 0.0)))
                coroner.add(Case(hello, Death(Cause.EXITED, exit_code=1), [], monotonic(), settings))
            until(lambda: [case.worker for case in coroner.open_cases] == ["one"], 30)
            assert verdicts(db, "of two") == [(1, "GIVEN_BACK")]
            holder.rollback()
        until(lambda: not coroner.open_cases, 30)
        assert verdicts(db, "of one") == [(1, "GIVEN_BACK")]
    finally:
        coroner.stop(5)


def _is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED


def test_a_pooler_that_refuses_settings_is_found_out_though_statements_are_prepared(
    bus: CommandBus, pooled: str
) -> None:
    """`prepared_statements` is on, as it is by default: nobody listens in a session that is others', too."""
    settings = Settings(database_url=pooled)
    listener = CallListener(settings)
    listener.start()
    try:
        sent = bus.send("orders", "work", command_id="k")
        with listener.awaiting(sent) as heard:
            until(lambda: not listener.can_listen)
            bus.cancel("orders", "k", operator="ann")
            assert heard.result(20).status is CommandStatus.CANCELED, "it asks, instead of listening"
    finally:
        listener.close()
    bus.create_queue("answers")
    with CommandBus(settings=settings) as through:
        assert not through.queues.wait_for("answers", wait=0.1)
        assert {look[5] for look in leftovers(pooled)} == {0}, "nothing listens"


@pytest.mark.parametrize("prepared", [True, False])
def test_the_statements_of_a_page_end_in_time_and_leave_no_limit_in_a_session(
    bus: CommandBus, pooled: str, prepared: bool
) -> None:
    settings = Settings(database_url=pooled, prepared_statements=prepared)
    assert page_timeouts(settings) == [("2s", "2s"), ("1min", "2s")]
    assert {look[:2] for look in leftovers(pooled)} == {("0", "0")}
    with served(create_console(settings)) as port, psycopg.connect(bus.settings.database_url or "") as other:
        other.execute("LOCK TABLE commandbus.command IN ACCESS EXCLUSIVE MODE")
        answer = Visit(port).get("/api/commands")
    assert answer.status == 503
    assert "two seconds" in answer.text


def test_a_prepared_send_of_another_client_is_never_taken_for_an_own_one(
    bus: CommandBus, db: Db, pooled: str
) -> None:
    """`prepared_statements` is on, as it is by default: clients find in a session what others have prepared."""
    bus.create_domain("mail")
    settings = Settings(database_url=pooled)
    with CommandBus(settings=settings) as first, CommandBus(settings=settings) as second:
        for _ in range(10):
            first.send("orders", "ship")
            second.send("mail", "write")
            first.send("mail", "write")
    counts = "SELECT domain, command_type, count(*) FROM commandbus.command GROUP BY 1, 2 ORDER BY 1"
    assert db.execute(counts).fetchall() == [("mail", "write", 20), ("orders", "ship", 10)]
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 10


@pytest.fixture
def snapshots(database: str) -> None:
    """Sessions that begin from now on keep their snapshots by default; those of the pooler begin later."""
    name = sql.Identifier(database.rsplit("/", 1)[1])
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'").format(name)
        )


@pytest.mark.usefixtures("snapshots")
def test_own_statements_are_read_committed_whatever_the_database_says(
    bus: CommandBus,
    db: Db,
    pooled: str,
    start_pooled: StartWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing can be set as a session starts. Claims and settlements of several workers meet at the same rows:
    those of a higher level would fail again and again."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: "done")
    settings = Settings(database_url=pooled, prepared_statements=False)
    with CommandBus(settings=settings) as through:
        workers = [start_pooled(handlers) for _ in range(3)]
        batch = through.create_batch("orders", [NewCommand("work")], is_open=True)
        for n in range(20):
            through.add_to_batch("orders", batch.batch_id, [NewCommand("work") for _ in range(50)])
            if n == 10:
                through.pause("orders", "work")
        through.close_batch("orders", batch.batch_id)
        through.resume("orders", "work")
        until_settled(db, 60)
        assert through.wait_for_batch("orders", batch.batch_id, wait=15).completed == 1001
    for worker in workers:
        assert worker.stop().is_clean
    assert "could not serialize" not in caplog.text
