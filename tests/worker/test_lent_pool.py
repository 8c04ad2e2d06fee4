"""A worker on a lent pool: capacity comes back after stuck attempts and leaks, sessions come back as they were."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool, NullConnectionPool

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Worker
from support.waiting import one, until, until_settled, verdicts
from support.workers import add, done, either, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SIZE = 2
HASTY = {"cancel_grace": 0.3, "max_attempts": 1, "pool_timeout": 3.0, "concurrency": 4}
STATE = """
SELECT ARRAY[session_user::text, current_user::text, current_setting('role'), current_setting('search_path'),
             current_setting('work_mem'), current_setting('statement_timeout'), current_setting('lock_timeout'),
             current_setting('idle_in_transaction_session_timeout'), current_setting('timezone'),
             current_setting('client_connection_check_interval')] AS state
"""


def _configure(conn: psycopg.Connection[Any]) -> None:
    """What the application wants of its sessions."""
    conn.execute("SET search_path = app, public")
    conn.execute("SET statement_timeout = '7s'")
    conn.commit()


@pytest.fixture(params=["kept", "null"])
def pool(request: pytest.FixtureRequest, database: str) -> Iterator[ConnectionPool[Any]]:
    """The application's own, with two connections; or one that keeps none open."""
    kind, least = (ConnectionPool, SIZE) if request.param == "kept" else (NullConnectionPool, 0)
    with kind(database, min_size=least, max_size=SIZE, configure=_configure) as pool:
        yield pool


def test_capacity_comes_back_after_stuck_attempts(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    pool: ConnectionPool[Any],
    go_on: threading.Event,
    lane: str,
) -> None:
    """Promise 5. With every stuck attempt the pool lost a connection, until everything ended in PoolTimeout."""

    async def hang(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("SELECT 1"))
            if lane == "sync":
                go_on.wait(60)
            while not go_on.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    continue  # as a handler does that does not want to stop

    async def work(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            return (await done((await done(conn.execute("SELECT 1"))).fetchone()))[0]

    add(handlers, lane, "hang", hang, timeout=0.3)
    add(handlers, lane, "work", work, timeout=20)
    start_worker(handlers, pool=pool, **HASTY)
    for n in range(2 * SIZE):
        bus.send("orders", "hang", command_id=f"h{n}")
        until(lambda n=n: verdicts(db, f"h{n}"))
        bus.send("orders", "work", command_id=f"w{n}")
        until(lambda n=n: status_of(bus, f"w{n}") is CommandStatus.COMPLETED)
    go_on.set()
    until_settled(db)
    assert sessions_of(pool, db) <= SIZE


def test_capacity_comes_back_after_leaks(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    pool: ConnectionPool[Any],
    go_on: threading.Event,
    lane: str,
) -> None:
    """A thread or a task that a handler left behind holds its connection."""
    left: list[Any] = []

    async def leak(command: Any, ctx: Any) -> None:
        held = threading.Event()

        async def hold() -> None:
            async with either(ctx.connection()):
                held.set()
                await opened(go_on, 60)

        if lane == "sync":
            left.append(threading.Thread(target=asyncio.run, args=(hold(),), daemon=True))
            left[-1].start()
        else:
            left.append(asyncio.ensure_future(hold()))
        await opened(held)

    async def work(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            return (await done((await done(conn.execute("SELECT 1"))).fetchone()))[0]

    add(handlers, lane, "leak", leak)
    add(handlers, lane, "work", work, timeout=20)
    start_worker(handlers, pool=pool, **HASTY)
    for n in range(2 * SIZE):
        bus.send("orders", "leak", command_id=f"l{n}")
        bus.send("orders", "work", command_id=f"w{n}")
        until(lambda n=n: status_of(bus, f"w{n}") is CommandStatus.COMPLETED)
    go_on.set()
    until_settled(db)
    with pool.connection(timeout=5) as first, pool.connection(timeout=5) as second:
        assert one(first, "SELECT 1") == one(second, "SELECT 1") == 1


def test_capacity_comes_back_from_those_who_waited_for_a_connection_on_a_blocked_loop(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    pool: ConnectionPool[Any],
    go_on: threading.Event,
) -> None:
    """A thread waits for them. What it gets when their loop was given up belongs to nobody."""
    here: dict[str, int] = {}

    @handlers.handler("orders", "hold", timeout=20)
    async def hold(command: Any, ctx: Any) -> None:
        if ctx.attempt_number == 1:
            async with ctx.connection():
                here[command.command_id] = 1
                await asyncio.sleep(20)

    @handlers.handler("orders", "wait", timeout=20)
    async def wait(command: Any, ctx: Any) -> None:
        if ctx.attempt_number == 1:
            here[command.command_id] = 1
            async with ctx.connection():
                await asyncio.sleep(20)

    @handlers.handler("orders", "block", timeout=0.3)
    async def block(command: Any, ctx: Any) -> None:
        go_on.wait(60)

    start_worker(handlers, pool=pool, **HASTY | {"concurrency": 2 * SIZE + 1, "pool_timeout": 30.0})
    names = [f"{kind}{n}" for kind in ("hold", "wait") for n in range(SIZE)]
    for name in names:
        bus.send("orders", name[:4], command_id=name)
        until(lambda name=name: name in here)
    until(lambda: pool.get_stats().get("requests_waiting") == SIZE)
    bus.send("orders", "block", command_id="b")
    until(lambda: verdicts(db, "b"))
    until(lambda: all(status_of(bus, name) is CommandStatus.COMPLETED for name in names))
    until(lambda: pool.get_stats().get("requests_waiting", 0) == 0)
    with pool.connection(timeout=5) as first, pool.connection(timeout=5) as second:
        assert one(first, "SELECT 1") == one(second, "SELECT 1") == 1


def test_a_session_comes_back_with_the_role_and_the_settings_that_it_had(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    database: str,
    lane: str,
    role: str,
) -> None:
    async def spoil(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            for statement in (
                f"SET SESSION AUTHORIZATION {role}",
                f"SET ROLE {role}",
                "SET search_path = elsewhere",
                "SET work_mem = '3MB'",
                "SET statement_timeout = 0",
                "SET timezone = 'Asia/Tokyo'",
            ):
                await done(conn.execute(statement))
            await done(conn.commit())

    add(handlers, lane, "spoil", spoil)
    with ConnectionPool(
        database, min_size=1, max_size=1, configure=_configure, kwargs={"row_factory": dict_row}
    ) as pool:
        with pool.connection() as conn:
            before = conn.execute(STATE.encode()).fetchone()
            pid = conn.info.backend_pid
        bus.send("orders", "spoil", command_id="a")
        start_worker(handlers, pool=pool, max_attempts=1)
        until_settled(db)
        assert status_of(bus, "a") is CommandStatus.COMPLETED
        with pool.connection() as conn:
            assert conn.info.backend_pid == pid
            assert conn.execute(STATE.encode()).fetchone() == before
            assert not conn.autocommit


def test_a_role_set_by_one_handler_is_not_the_next_ones(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, role: str
) -> None:
    """In our own pool, too: RESET ALL spares it."""

    async def become(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            found = await done((await done(conn.execute("SELECT current_user::text"))).fetchone())
            await done(conn.execute(f"SET ROLE {role}"))
        return found[0]

    add(handlers, lane, "become", become)
    start_worker(handlers, concurrency=1, max_attempts=1)
    for n in range(2):
        bus.send("orders", "become", command_id=f"c{n}")
    until_settled(db)
    assert {record.result for n in range(2) if (record := bus.get_command("orders", f"c{n}"))} == {
        one(db, "SELECT current_user::text")
    }


@pytest.fixture
def role(server_admin: Callable[[sql.Composable], None]) -> Iterator[str]:
    """A role that handlers can become."""
    name = f"other_{uuid.uuid4().hex[:8]}"
    server_admin(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def status_of(bus: CommandBus, command_id: str) -> CommandStatus | None:
    record = bus.get_command("orders", command_id)
    return None if record is None else record.status


def sessions_of(pool: ConnectionPool[Any], db: Db) -> int:
    """How many sessions the pool has on the server: those without a name, as a plain pool gives them none."""
    found: int = one(
        db,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = '' "
        "AND pid <> pg_backend_pid()",
    )
    return found
