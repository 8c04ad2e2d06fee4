"""A worker's own threads: somebody's locks, a silent server, a read-only second, and an end that nobody expected.

Whatever happens to one of them, health names it, the others go on, nothing is lost, and work moves again unaided.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from commandbus import (
    CommandBus,
    HandlerRegistry,
    HealthState,
    Limit,
    NewCommand,
    Schedule,
    Settings,
    Worker,
    WorkerWatchdog,
)
from commandbus.cli.session import connect as cli_connect
from commandbus.db.pool import ALIVE, lasting_conninfo
from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LOCK_SECONDS, STATEMENT_SECONDS, LastingConnection
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import settle
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.stalled_thread import StalledThread
from commandbus.worker.execution.attempt import Attempt
from support.network import Proxy
from support.waiting import one, statuses, until, until_settled, verdicts, within
from support.workers import short_lease

pytestmark = pytest.mark.waits
StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
PARTS = ("claimer", "settler", "lease keeper", "maintenance", "limit client", "scheduler")


@pytest.fixture
def ran() -> list[str]:
    """The command ids that handlers have begun with, in order."""
    return []


@pytest.fixture
def handlers(ran: list[str], bus: CommandBus) -> HandlerRegistry:
    """`work`, and `call`, which needs a permit of a limit: that is the limit client's; and a schedule: that is the
    scheduler's."""
    bus.declare_limit(Limit("api", concurrency=5))
    handlers = HandlerRegistry()

    def work(command: Any, ctx: Any) -> str:
        ran.append(command.command_id)
        return "done"

    handlers.register("orders", "work", work)
    handlers.register("orders", "call", work, limits=["api"])
    handlers.declare_schedule(Schedule("orders", "yearly", cron="@yearly", command_type="work"))
    return handlers


def part_of(worker: Worker, part: str) -> DatabaseService:
    """One of its own threads."""
    runtime = worker._runtime
    assert runtime is not None
    return next(each for each in [*runtime._threads, *runtime._limited.services] if each.part == part)


@contextmanager
def holding(database: str, *statements: str) -> Iterator[Db]:
    """A transaction that stays open."""
    with psycopg.connect(database) as conn:
        for statement in statements:
            conn.execute(statement.encode())
        yield conn
        conn.rollback()


def until_completed(bus: CommandBus, *ids: str, seconds: float = 15.0) -> None:
    def all_are() -> bool:
        found = [bus.get_command("orders", each) for each in ids]
        return all(record is not None and record.status == "COMPLETED" for record in found)

    until(all_are, seconds, what=lambda: [bus.get_command("orders", each) for each in ids])


# --- limits -----------------------------------------------------------------------------------------------------


def test_every_session_of_ours_has_limits_that_the_server_keeps(database: str) -> None:
    connection = LastingConnection(Settings(database_url=database), name="test")
    shown = {
        name: one(connection.conn, f"SHOW {name}")
        for name in ("statement_timeout", "lock_timeout", "default_transaction_isolation")
    }
    connection.close()
    assert shown == {
        "statement_timeout": f"{STATEMENT_SECONDS:.0f}s",
        "lock_timeout": f"{LOCK_SECONDS:.0f}s",
        "default_transaction_isolation": "read committed",
    }


def test_where_statements_are_not_prepared_nothing_is_left_in_a_session(database: str) -> None:
    """Behind PgBouncer in transaction mode a setting would be the next client's."""
    connection = LastingConnection(Settings(database_url=database, prepared_statements=False), name="test")
    shown = [one(connection.conn, f"SHOW {name}") for name in ("statement_timeout", "lock_timeout")]
    connection.close()
    assert shown == ["0", "0"]


def test_every_connection_of_ours_notices_that_its_network_is_gone(
    database: str, bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: dict[str, dict[str, str]] = {}

    @handlers.handler("orders", "look")
    def look(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            seen["handlers"] = conn.info.get_parameters()

    start_worker(handlers, database)
    bus.call("orders", "look", wait=20)
    connection = LastingConnection(Settings(database_url=database), name="test")
    seen["own threads"] = connection.conn.info.get_parameters()
    connection.close()
    with (
        bus.connect() as conn,
        bus._pool.connection() as pooled,
        cli_connect(Settings(database_url=database)) as cli,
    ):
        seen |= {"bus.connect": conn.info.get_parameters(), "bus": pooled.info.get_parameters()}
        seen["command line"] = cli.info.get_parameters()
    wanted = ALIVE | {"keepalives": "1"}
    for who, parameters in seen.items():
        assert {name: parameters.get(name, "1") for name in wanted} == wanted, who
    assert ALIVE["connect_timeout"] == "3"
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("url", "variables", "wanted"),
    [
        ("host=a,b dbname=x", {}, "read-write"),
        ("hostaddr=127.0.0.1,127.0.0.2 dbname=x", {}, "read-write"),
        ("dbname=x", {"PGHOST": "a,b"}, "read-write"),
        ("postgresql://a,b/x?target_session_attrs=any", {}, "any"),
        ("host=a,b dbname=x", {"PGTARGETSESSIONATTRS": "primary"}, None),
        ("host=a dbname=x", {"PGHOST": "a,b"}, None),
        ("host=a dbname=x", {}, None),
    ],
)
def test_of_several_hosts_the_one_that_can_write_is_wanted(
    url: str, variables: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert conninfo_to_dict(lasting_conninfo(url)).get("target_session_attrs") == wanted


@pytest.mark.parametrize("prepared", [True, False], ids=["direct", "behind_a_pooler"])
def test_the_limits_cost_no_round_trip_on_claim_and_settle(
    database: str, bus: CommandBus, prepared: bool, tmp_path: Path
) -> None:
    connection = LastingConnection(Settings(database_url=database, prepared_statements=prepared), name="test")

    def claimed() -> Attempt:
        asked = claim(domain="orders", worker="w", n=1, lease_seconds=60, cursor=None)
        (row,) = connection.run(asked).ready
        return Attempt("orders", row, None, 0.0)

    def trips(act: Callable[[], object]) -> int:
        """How often the server was asked to answer, as libpq's own protocol says."""
        with (tmp_path / "trace").open("w+") as file:
            connection.conn.planned_at = monotonic()  # the plans of prepared statements are new
            connection.conn.pgconn.trace(file.fileno())
            act()
            connection.conn.pgconn.untrace()
            file.seek(0)
            return sum("\tSync" in line or "\tQuery" in line for line in file)

    bus.send_many("orders", [NewCommand("work") for _ in range(8)])
    for _ in range(4):  # by then everything is prepared, or never will be
        connection.run(settle("orders", "w", [claimed().complete(None)]))
    attempt: list[Attempt] = []
    assert trips(lambda: attempt.append(claimed())) == 1
    assert trips(lambda: connection.run(settle("orders", "w", [attempt[0].complete(None)]))) == 1
    connection.close()


def test_own_sessions_are_read_committed_whatever_the_database_says(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    name = sql.Identifier(database.rsplit("/", 1)[1])
    setting = sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'")
    db.execute(setting.format(name))
    with CommandBus(database) as fresh:
        batch = fresh.create_batch("orders", [NewCommand("work")], is_open=True)
        fresh.add_to_batch("orders", batch.batch_id, [NewCommand("work")])
        fresh.close_batch("orders", batch.batch_id)
        worker = start_worker(handlers, database)
        assert fresh.wait_for_batch("orders", batch.batch_id, wait=15).completed == 2
        isolation = "SELECT current_setting('transaction_isolation')"
        connection = LastingConnection(Settings(database_url=database), name="test")
        assert one(connection.conn, isolation) == "read committed"
        connection.close()
    assert worker.stop().is_clean


# --- somebody's locks -------------------------------------------------------------------------------------------


def test_a_raw_message_whose_command_id_is_in_an_open_transaction_holds_up_itself_alone(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: list[str],
) -> None:
    insert = (
        "INSERT INTO commandbus.command (domain, command_id, command_type, msg_id) VALUES ('orders', 'x', 'y', 0)"
    )
    with holding(database, insert):
        raw = '{"command_type": "work", "command_id": "x"}'
        db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (raw,))
        start_worker(handlers, database, **short_lease())
        for n in range(5):
            bus.send("orders", "work", command_id=f"c{n}")
        until_completed(bus, *(f"c{n}" for n in range(5)), seconds=8)
        assert "x" not in ran
    until_completed(bus, "x")
    assert ran.count("x") == 1


def test_a_locked_reply_queue_holds_up_its_own_outcomes_alone(
    database: str, bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, ran: list[str], db: Db
) -> None:
    bus.create_queue("replies")
    with holding(database, "SELECT pgmq.purge_queue('replies')"):
        worker = start_worker(handlers, database)
        bus.send("orders", "work", command_id="told", reply_to="replies")
        until(lambda: "told" in ran)
        bus.send_many("orders", [NewCommand("work", command_id=f"c{n}") for n in range(100)])
        until_completed(bus, *(f"c{n}" for n in range(100)), seconds=10)
        assert bus.get_command("orders", "told").status != "COMPLETED"  # type: ignore[union-attr]
    until_completed(bus, "told")
    assert ran.count("told") == 1
    assert one(db, "SELECT count(*) FROM pgmq.q_replies") == 1
    assert worker.stop().is_clean


def test_a_cancellation_that_waits_for_a_lock_delays_no_lease_and_no_stuck_attempt(
    database: str, bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, db: Db
) -> None:
    """The worker carries on with a canceled batch, and somebody has locked the table of batches. Meanwhile healthy
    attempts keep their leases, and a stuck one is settled in time."""
    release = threading.Event()

    @handlers.handler("orders", "long", timeout=30)
    def long(ctx: Any) -> None:
        assert release.wait(60)

    @handlers.handler("orders", "stuck", timeout=1)
    def stuck(ctx: Any) -> None:
        release.wait(20)

    batch = bus.create_batch("orders", [NewCommand("later", delay=3600) for _ in range(3)])
    blocked = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE '%%maintenance' AND wait_event_type = 'Lock'"
    )
    db.execute("""UPDATE commandbus.batch SET cancel = '{"by": "kim", "reason": null}'""")
    with holding(database, "LOCK TABLE commandbus.batch"):
        worker = start_worker(handlers, database, concurrency=4, max_attempts=1, **short_lease())
        until(lambda: one(db, blocked))
        bus.send("orders", "long", command_id="long")
        bus.send("orders", "stuck", command_id="stuck")
        within(1 + 0.5 + 2 + 2, lambda: verdicts(db, "stuck"))
        assert verdicts(db, "long") == []
    release.set()
    until_completed(bus, "long")
    assert verdicts(db, "long") == [], "its lease was kept: one attempt, and no more"
    canceled = "SELECT count(*) FROM commandbus.command WHERE command_type = 'later' AND status = 'CANCELED'"
    until(lambda: one(db, canceled) == batch.total, 90, what=lambda: statuses(db))
    worker.stop()


def test_claiming_stops_when_outcomes_pile_up_and_health_says_so(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commandbus.worker.dispatcher.MOST_UNWRITTEN", 50)
    bus.create_queue("replies")
    commands = [NewCommand("work", command_id=f"c{n}", reply_to="replies") for n in range(2000)]
    bus.send_many("orders", commands)
    with holding(database, "SELECT pgmq.purge_queue('replies')"):
        worker = start_worker(handlers, database)
        until(lambda: any("outcomes" in reason for reason in worker.health_status.reasons))
        assert worker.health_status.state is HealthState.CRITICAL
        assert len(ran) < 1000, "memory is bounded"
    until_settled(db, 30)
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    assert statuses(db) == {"COMPLETED": 2000}
    assert len(ran) == 2000


# --- silence ----------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, shorter, so that a test takes seconds."""
    monkeypatch.setattr("commandbus.db.service_connection.STATEMENT_SECONDS", 2.0)
    monkeypatch.setattr("commandbus.db.service_connection.SILENT_SECONDS", 4.0)
    monkeypatch.setattr("commandbus.db.service.SILENT_SECONDS", 2.5)
    monkeypatch.setattr("commandbus.db.service.STILL_SECONDS", 2.0)
    monkeypatch.setattr("commandbus.worker.deadlines.ladder.STILL_SECONDS", 2.0)
    monkeypatch.setattr("commandbus.db.service.FAILING_SECONDS", 2.0)
    monkeypatch.setattr("commandbus.db.service.AWAY_SECONDS", 1.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("part", PARTS)
def test_a_connection_that_falls_silent_is_named_cut_and_made_anew(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    part: str,
    ran: list[str],
) -> None:
    worker = start_worker(handlers, through)
    bus.send("orders", "call", command_id="before")
    until_completed(bus, "before")
    assert proxy.silence(part.encode()) == 1
    bus.send("orders", "call", command_id="after")
    reasons: set[str] = set()
    until(lambda: reasons.update(worker.health_status.critical_reasons) or part.replace(" ", "_") in reasons)
    until_completed(bus, "after", seconds=20)
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    assert ran == ["before", "after"]
    assert worker.stop().is_clean


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("part", PARTS)
def test_a_thread_that_is_blocked_is_named(
    bus: CommandBus, handlers: HandlerRegistry, database: str, start_worker: StartWorker, part: str, ran: list[str]
) -> None:
    """Blocked in our own code, not in the database."""
    worker = start_worker(handlers, database)
    bus.send("orders", "call", command_id="before")
    until_completed(bus, "before")
    service = part_of(worker, part)
    release = threading.Event()
    service.order(lambda: (release.wait(20), None)[1])
    until(lambda: part.replace(" ", "_") in worker.health_status.critical_reasons)
    assert any("has not moved" in reason for reason in worker.health_status.reasons)
    release.set()
    bus.send("orders", "call", command_id="after")
    until_completed(bus, "after")
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    assert ran == ["before", "after"]


def test_a_thread_that_has_just_heard_is_not_named(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the answer for longer than a thread may stand still, and goes on in the same round."""
    monkeypatch.setattr("commandbus.db.service.STILL_SECONDS", 1.0)
    heard, go_on = threading.Event(), threading.Event()

    @operation(atomic=False)
    def slow() -> Steps[None]:
        yield Statement(b"SELECT pg_sleep(1.5)", {})

    class Slow(DatabaseService):
        def round(self) -> None:
            self._connection.run(slow())
            heard.set()
            go_on.wait(20)

    service = Slow(Settings(database_url=database), name="test", part="slow")
    service.start()
    try:
        assert heard.wait(60)
        assert service.trouble is None
        until(lambda: service.trouble is not None)
        assert "the slow has not moved for" in str(service.trouble)
    finally:
        go_on.set()
        service.stop(10)


def harm_ladder(worker: Worker, how: str, release: threading.Event) -> None:
    """Its next tick blocks, or ends its thread."""
    runtime = worker._runtime
    assert runtime is not None
    usual = runtime.ladder._on_tick

    def tick(now: float) -> None:
        if how == "end":
            raise SystemExit("out of order")
        release.wait(30)
        usual(now)

    runtime.ladder._on_tick = tick


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("how", "said"),
    [("block", "the ladder has not moved for"), ("end", "the ladder has ended: SystemExit: out of")],
)
def test_health_itself_notices_a_ladder_that_does_not_look(
    handlers: HandlerRegistry,
    database: str,
    start_worker: StartWorker,
    bus: CommandBus,
    db: Db,
    how: str,
    said: str,
) -> None:
    """Without a supervisor or a watchdog: whoever asks for the health looks at the clock. The heartbeat asks."""
    worker = start_worker(handlers, database)
    release = threading.Event()
    harm_ladder(worker, how, release)
    told = "SELECT bool_or(health ->> 'state' = 'critical' AND health::text LIKE %s) FROM commandbus.worker"
    until(lambda: one(db, told, f"%{said}%"))
    assert worker.health_status.is_critical()
    assert "ladder" in worker.health_status.critical_reasons
    assert any(said in reason for reason in worker.health_status.as_dict()["reasons"])
    release.set()
    if how == "block":
        until(lambda: worker.health_status.state is HealthState.HEALTHY)
        assert worker.stop().is_clean
        return
    bus.send("orders", "work", command_id="later")
    with pytest.raises(SystemExit, match="out of order"):
        worker.stop(wait=3)
    assert statuses(db) == {"PENDING": 1}, "what nobody watches is not claimed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("part", PARTS)
def test_health_itself_notices_every_thread_that_is_blocked(
    bus: CommandBus, handlers: HandlerRegistry, database: str, start_worker: StartWorker, part: str
) -> None:
    """The ladder, which tells of the others as a rule, has stopped, too."""
    worker = start_worker(handlers, database)
    bus.send("orders", "call", command_id="before")
    until_completed(bus, "before")
    release = threading.Event()
    harm_ladder(worker, "block", release)
    part_of(worker, part).order(lambda: (release.wait(30), None)[1])
    wanted = {part.replace(" ", "_"), "ladder"}
    until(lambda: wanted <= set(worker.health_status.critical_reasons))
    release.set()
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    assert worker.stop().is_clean


def test_whoever_wakes_first_does_not_find_the_others_still() -> None:
    """As after a SIGSTOP: all are late, and move a moment later."""
    stalled = StalledThread()
    assert stalled.seconds(monotonic() - 20) == 0.0
    assert stalled.seconds(monotonic()) == 0.0
    moved_at = monotonic() - 20
    until(lambda: stalled.seconds(moved_at) >= 21)


@pytest.mark.parametrize("lane", ["running", "waiting"])
def test_what_could_not_be_written_at_the_end_was_not_settled(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, proxy: Proxy, through: str, lane: str
) -> None:
    """An attempt that is cut off, or given back, while the database is away leaves no outcome to report."""
    proceed = threading.Event()
    handlers.register("orders", "hang", lambda command, ctx: (proceed.wait(20), None)[1], timeout=0)
    worker = start_worker(handlers, through, concurrency=1)
    bus.send("orders", "hang")
    runtime = worker._runtime
    assert runtime is not None
    until(lambda: bool(runtime.attempts.running))
    proxy.is_refusing = True
    proxy.cut()
    until(lambda: runtime.settler.is_down)
    if lane == "waiting":
        (attempt,) = runtime.attempts.held
        runtime.dispatcher.return_one(attempt, "nobody has a slot for it")
    report = worker.stop(wait=2)
    assert (report.settled, report.is_clean) == (0, False)
    proceed.set()


# --- read-only, and the end of a thread ------------------------------------------------------------------------


def test_a_second_of_read_only_costs_nothing(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, ran: list[str]
) -> None:
    """As on a standby before its promotion: every new session is read-only."""
    proceed = threading.Event()

    @handlers.handler("orders", "slow", timeout=30)
    def slow(command: Any, ctx: Any) -> str:
        ran.append(command.command_id)
        assert proceed.wait(60)
        return "done"

    worker = start_worker(handlers, database)
    bus.send("orders", "slow", command_id="slow")
    until(lambda: "slow" in ran)
    name = sql.Identifier(database.rsplit("/", 1)[1])
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    ours = "datname = current_database() AND application_name LIKE 'commandbus test-%'"
    db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}".encode())
    read_only = f"SELECT count(*) FROM pg_stat_activity WHERE {ours}"
    until(lambda: one(db, read_only.replace("%", "%%")) > 0)
    proceed.set()
    until(lambda: worker._runtime.settler.backlog > 0)  # type: ignore[union-attr]
    db.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    until_completed(bus, "slow", seconds=20)
    bus.send("orders", "work", command_id="after")
    until_completed(bus, "after", seconds=20)
    assert ran.count("slow") == 1, "its outcome was kept until it could be written"
    assert verdicts(db, "slow") == []
    assert worker.stop().is_clean


@pytest.mark.parametrize("kind", ["write", "write_async"])
def test_no_pool_keeps_a_session_that_began_while_the_database_was_read_only(
    database: str, bus: CommandBus, db: Db, start_worker: StartWorker, kind: str
) -> None:
    """Such a session stays read-only when the database can write again: every handler that got it would fail."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "write")
    def write(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("UPDATE commandbus.command SET data = data WHERE false")

    @handlers.handler("orders", "write_async")
    async def write_async(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("UPDATE commandbus.command SET data = data WHERE false")

    worker = start_worker(
        handlers, database, backoff_schedule=(0.2,), max_attempts=1000, concurrency=1, pool_max_size=1
    )
    name = sql.Identifier(database.rsplit("/", 1)[1])
    bus.send("orders", kind, command_id="before")
    until_completed(bus, "before")
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    ended = one(
        db,
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
        "AND (application_name LIKE 'commandbus%%handlers' OR application_name = 'commandbus bus')",
    )
    assert ended >= 2

    def is_sent(command_id: str) -> bool:
        try:
            bus.send("orders", kind, command_id=command_id)
        except (psycopg.errors.ReadOnlySqlTransaction, psycopg.OperationalError):
            return False  # that session leaves the pool
        return True

    assert not is_sent("refused")
    with psycopg.connect(database, options="-c default_transaction_read_only=off", autocommit=True) as able:
        bus.send("orders", kind, command_id="during", conn=able)
    until(lambda: (1, "RETRY") in verdicts(db, "during"))
    db.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    until_completed(bus, "during")
    until(lambda: is_sent("after"))
    until_completed(bus, "after")
    assert verdicts(db, "after") == []
    assert worker.stop().is_clean


@pytest.mark.usefixtures("impatient")
def test_a_database_that_refuses_to_write_for_long_is_named(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """The database answers, so nothing is silent; but nothing can be claimed. As with a full disk."""
    worker = start_worker(handlers, database)
    name = sql.Identifier(database.rsplit("/", 1)[1])
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    ours = "datname = current_database() AND application_name LIKE 'commandbus test-%'"
    db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}".encode())
    until(lambda: "claimer" in worker.health_status.critical_reasons)
    assert any("read-only transaction" in reason for reason in worker.health_status.reasons)
    claimer = part_of(worker, "claimer")
    assert not claimer.is_broken, "another worker would get the same: it is not replaced"
    db.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    with CommandBus(database) as again:
        again.send("orders", "work", command_id="after")
        until_completed(again, "after", seconds=20)
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    assert worker.stop().is_clean


@pytest.mark.usefixtures("impatient")
def test_after_an_outage_no_part_counts_as_failing(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, proxy: Proxy, through: str
) -> None:
    """Else a supervisor would replace every worker after every outage."""
    worker = start_worker(handlers, through, poll_interval=3.0)
    bus.send("orders", "work", command_id="before")
    until_completed(bus, "before")  # every part is connected
    until(lambda: proxy.connections >= 4)
    runtime = worker._runtime
    assert runtime is not None
    proxy.is_refusing = True
    proxy.cut()
    on_demand = ("adopter", "fenced writer")  # nobody has needed them
    until(lambda: all(each.is_away for each in runtime._threads if each.part not in on_demand), 20)
    proxy.is_refusing = False
    seen: set[str] = set()

    def is_back() -> bool:
        seen.update(each.trouble for each in runtime._threads if each.trouble is not None)
        return not any(each.is_down for each in runtime._threads)

    until(is_back, 20)
    end = monotonic() + 4  # longer than any round
    while monotonic() < end:
        is_back()
    assert seen == set()
    assert worker.stop().is_clean


REFUSALS = {  # what a part writes again and again: a trigger there refuses it
    "claimer": "pgmq.q_orders__commands",
    "lease keeper": "pgmq.q_orders__commands",
    "maintenance": "commandbus.worker",
    "limit client": "commandbus.limits",
}


@pytest.mark.parametrize(
    ("part", "state"),
    [
        *((part, "55000") for part in REFUSALS),
        ("claimer", "54001"),
        ("claimer", "57000"),
        ("lease keeper", "26000"),
    ],
)
def test_what_does_not_pass_ends_the_thread_visibly_whatever_its_class(
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    part: str,
    state: str,
    bus: CommandBus,
    db: Db,
) -> None:
    """psycopg calls them OperationalError, as it does what passes. The table of SQLSTATEs decides."""
    proceed = threading.Event()
    handlers.register("orders", "slow", lambda command, ctx: proceed.wait(20))
    worker = start_worker(handlers, database, **short_lease())
    bus.send("orders", "slow")
    until(lambda: bool(worker._runtime and worker._runtime.attempts.running))
    restarted = threading.Event()
    with WorkerWatchdog(worker, check_interval=0.1, restart_callback=restarted.set):
        db.execute(
            f"""CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF current_setting('application_name') LIKE '%{part}' THEN
                    RAISE EXCEPTION 'not in this state' USING ERRCODE = '{state}'; END IF;
                RETURN NULL; END $$;
            CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {REFUSALS[part]}
                EXECUTE FUNCTION public.refuse()""".encode()
        )
        bus.send("orders", "call")
        until(lambda: part.replace(" ", "_") in worker.health_status.critical_reasons)
        assert any(
            f"the {part} has ended: " in text and "not in this state" in text
            for text in worker.health_status.reasons
        )
        assert restarted.wait(60), "the watchdog's callback runs"
    proceed.set()
    with pytest.raises(psycopg.Error) as raised:
        worker.stop(wait=3)
    assert raised.value.sqlstate == state


def test_an_error_text_that_cannot_be_stored_does_not_silence_a_worker(
    database: str, handlers: HandlerRegistry, start_worker: StartWorker, db: Db
) -> None:
    """Health names the last error, and the heartbeat tells it."""
    worker = start_worker(handlers, database)
    worker.health_status.set_degraded("odd", "a NUL \0 and half a character \ud800")
    told = "SELECT bool_or(health::text LIKE '%%a NUL%%') FROM commandbus.worker"
    until(lambda: one(db, told))
    assert worker.stop().is_clean


@pytest.mark.parametrize("part", PARTS)
def test_the_end_of_a_thread_is_critical(
    database: str, handlers: HandlerRegistry, start_worker: StartWorker, part: str, bus: CommandBus, db: Db
) -> None:
    worker = start_worker(handlers, database)
    service = part_of(worker, part)

    def end() -> None:
        raise SystemExit("out of order")

    restarted = threading.Event()
    said = f"the {part} has ended: SystemExit: out of order"
    with WorkerWatchdog(worker, check_interval=0.1, restart_callback=restarted.set):
        service.order(end)
        until(lambda: part.replace(" ", "_") in worker.health_status.critical_reasons)
        assert any(said in text for text in worker.health_status.reasons)
        assert restarted.wait(60), "the watchdog's callback runs"
    if part != "maintenance":  # it is the one that writes there; its worker counts as silent
        registry = (
            "SELECT bool_or(health ->> 'state' = 'critical' AND health::text LIKE %s) FROM commandbus.worker"
        )
        until(lambda: one(db, registry, f"%{said}%"))
    with pytest.raises(SystemExit, match="out of order"):
        worker.stop(wait=3)
