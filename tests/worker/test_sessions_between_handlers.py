"""What one handler leaves in its database session is gone before the next handler gets that session."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.adapt import Loader
from psycopg_pool import ConnectionPool

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Worker
from support.waiting import until_settled
from support.workers import add, done, either

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
LEFT = """
SELECT session_user::text, current_user::text, current_setting('work_mem'),
       coalesce(current_setting('app.tenant', true), ''),
       ARRAY(SELECT name FROM pg_cursors WHERE is_holdable),
       ARRAY(SELECT name FROM pg_prepared_statements WHERE from_sql),
       ARRAY(SELECT pg_listening_channels()),
       ARRAY(SELECT relname::text FROM pg_class WHERE relnamespace = pg_my_temp_schema() ORDER BY 1),
       ARRAY(SELECT proname::text FROM pg_proc WHERE pronamespace = pg_my_temp_schema()),
       ARRAY(SELECT objid::text FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
"""
SPOILS = {
    "role": ["SET ROLE {role}"],
    "session authorization": ["SET SESSION AUTHORIZATION {role}"],
    "setting": ["SET work_mem = '3MB'"],
    "custom setting": ["SET app.tenant = 'acme'"],
    "cursor": ["DECLARE left_open CURSOR WITH HOLD FOR SELECT generate_series(1, 1000)"],
    "prepared": ["PREPARE left_over AS SELECT 1"],
    "prepared inside": ["DO $$ BEGIN EXECUTE 'PREPARE hidden AS SELECT 1'; END $$"],
    "temporary table": ["CREATE TEMP TABLE command (id int)", "INSERT INTO pg_temp.command VALUES (1)"],
    "temporary function": ["CREATE FUNCTION pg_temp.now() RETURNS int LANGUAGE sql AS 'SELECT 1'"],
    "channel": ["LISTEN left_over"],
    "advisory lock": ["SELECT pg_advisory_lock(4711)"],
}
OF_A_LENT_POOL = [name for name in SPOILS if name != "custom setting"]  # PostgreSQL does not list those


@pytest.fixture
def role(server_admin: Callable[[sql.Composable], None]) -> Iterator[str]:
    """A role that handlers can become."""
    name = f"other_{uuid.uuid4().hex[:8]}"
    server_admin(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def add_handlers(handlers: HandlerRegistry, lane: str, statements: list[str]) -> None:
    """`spoil` runs the statements, `look` tells what it finds in its session, and whose it is."""

    async def spoil(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            for statement in statements:
                await done(conn.execute(statement))
            await done(conn.commit())
            return conn.info.backend_pid

    async def spoil_in_one(command: Any, ctx: Any) -> Any:
        async with either(ctx.transaction()) as tx:
            for statement in statements:
                await done(tx.execute(statement))
            tx.complete(tx.connection.info.backend_pid)

    async def look(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            found = await done((await done(conn.execute(LEFT))).fetchone())
            return [conn.info.backend_pid, list(found)]

    add(handlers, lane, "spoil", spoil)
    add(handlers, lane, "spoil_in_one", spoil_in_one)
    add(handlers, lane, "look", look)


def result(bus: CommandBus, db: Db, command_type: str) -> Any:
    """Send one command, and return its result."""
    sent = bus.send("orders", command_type, max_attempts=1)
    until_settled(db)
    record = bus.get_command("orders", sent.command_id)
    assert record is not None
    assert record.status is CommandStatus.COMPLETED, record
    return record.result


@pytest.mark.parametrize("spoil", SPOILS)
def test_nothing_is_left_for_the_next_handler(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, role: str, spoil: str
) -> None:
    add_handlers(handlers, lane, [statement.format(role=role) for statement in SPOILS[spoil]])
    start_worker(handlers, concurrency=1)
    pid, before = result(bus, db, "look")
    assert result(bus, db, "spoil") == pid
    assert result(bus, db, "look") == [pid, before]


@pytest.mark.parametrize("spoil", [name for name in SPOILS if "role" not in SPOILS[name][0]])
def test_nothing_is_left_of_a_transaction(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, spoil: str
) -> None:
    """Its COMMIT and what resets the session are one round trip, from the second handler of the session on."""
    add_handlers(handlers, lane, SPOILS[spoil])
    start_worker(handlers, concurrency=1)
    pid, before = result(bus, db, "look")
    assert result(bus, db, "spoil_in_one") == pid
    assert result(bus, db, "look") == [pid, before]
    assert result(bus, db, "spoil_in_one") == pid  # what psycopg knows of the session is right


@pytest.mark.parametrize("spoil", OF_A_LENT_POOL)
def test_a_lent_pool_gets_its_session_back_as_it_was(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    database: str,
    lane: str,
    role: str,
    spoil: str,
) -> None:
    """What the application itself had left in it stays."""
    add_handlers(handlers, lane, [statement.format(role=role) for statement in SPOILS[spoil]])
    with ConnectionPool(database, min_size=1, max_size=1, configure=_furnish) as pool:
        with pool.connection() as conn:
            pid, before = conn.info.backend_pid, conn.execute(LEFT.encode()).fetchone()
        worker = start_worker(handlers, concurrency=1, pool=pool)
        assert result(bus, db, "spoil") == pid
        with pool.connection() as conn:
            assert (conn.info.backend_pid, conn.execute(LEFT.encode()).fetchone()) == (pid, before)
        worker.stop()


def _furnish(conn: psycopg.Connection[Any]) -> None:
    """What the application wants in each of its sessions."""
    conn.execute("SET work_mem = '5MB'")
    conn.execute("LISTEN ours")
    conn.execute("PREPARE ours AS SELECT 1")
    conn.execute("DECLARE ours CURSOR WITH HOLD FOR SELECT 1")
    conn.commit()


def test_temporary_tables_of_a_lent_session_stay_and_those_of_handlers_do_not(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str, lane: str
) -> None:
    add_handlers(handlers, lane, ["CREATE TEMP TABLE theirs (id serial)", "CREATE TEMP VIEW seen AS SELECT 1"])

    def furnish(conn: psycopg.Connection[Any]) -> None:
        conn.execute("CREATE TEMP TABLE ours (id int)")
        conn.commit()

    with ConnectionPool(database, min_size=1, max_size=1, configure=furnish) as pool:
        with pool.connection() as conn:
            before = conn.execute(LEFT.encode()).fetchone()
        worker = start_worker(handlers, concurrency=1, pool=pool)
        result(bus, db, "spoil")
        with pool.connection() as conn:
            assert conn.execute(LEFT.encode()).fetchone() == before
        worker.stop()


def test_what_an_async_handler_prepared_is_in_nobodys_way(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """An async handler's connection and a sync handler's count their prepared statements apart, in one session."""

    @handlers.handler("orders", "asynchronous")
    async def asynchronous(command: Any, ctx: Any) -> Any:
        async with ctx.connection() as conn:
            conn.prepare_threshold = 0
            await conn.execute("SELECT 'async', %s::int", (1,))
            return conn.info.backend_pid

    @handlers.handler("orders", "sync")
    def sync(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            for number in range(3):
                conn.execute(f"SELECT {number}, %s::int", (1,), prepare=True)
            return conn.info.backend_pid

    start_worker(handlers, concurrency=1)
    kinds = ["asynchronous", "sync", "asynchronous", "sync", "sync"]
    assert len({result(bus, db, kind) for kind in kinds}) == 1


def test_what_sync_handlers_prepare_is_kept_for_the_next(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """psycopg knows its own prepared statements: they are worth keeping."""

    @handlers.handler("orders", "prepare")
    def prepare(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            conn.execute("SELECT %s::int", (1,), prepare=True)
            return conn.execute("SELECT count(*) FROM pg_prepared_statements", prepare=False).fetchone()[0]

    @handlers.handler("orders", "drop")
    def drop(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")

    start_worker(handlers, concurrency=1)
    assert [result(bus, db, kind) for kind in ("prepare", "prepare", "drop", "prepare")] == [1, 1, None, 1]


class _Shout(Loader):
    def load(self, data: Any) -> str:
        return bytes(data).decode().upper()


def test_adapters_and_handlers_of_notices_are_the_handlers_own(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """They are kept in the Python object, beside the session."""
    said: list[str] = []

    async def spoil(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            conn.adapters.register_loader("text", _Shout)
            conn.add_notice_handler(lambda notice: said.append(command.command_id))
            conn.add_notify_handler(lambda notify: said.append(command.command_id))
            conn.server_cursor_factory = None
            conn.prepared_max = 1

    async def look(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("DO $$ BEGIN RAISE NOTICE 'said'; END $$"))
            found = await done((await done(conn.execute("SELECT 'quiet'::text"))).fetchone())
            return [found[0], conn.server_cursor_factory is not None, conn.prepared_max]

    add(handlers, lane, "spoil", spoil)
    add(handlers, lane, "look", look)
    start_worker(handlers, concurrency=1)
    result(bus, db, "spoil")
    assert (result(bus, db, "look"), said) == (["quiet", True, 100], [])


def test_a_sync_handler_hears_notices_after_an_async_one(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Each connection object takes the notices of the session for itself when it is made."""
    said: list[str] = []

    @handlers.handler("orders", "asynchronous")
    async def asynchronous(command: Any, ctx: Any) -> None:
        async with ctx.connection():
            pass

    @handlers.handler("orders", "sync")
    def sync(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
            conn.execute("DO $$ BEGIN RAISE NOTICE 'said'; END $$")

    start_worker(handlers, concurrency=1)
    result(bus, db, "asynchronous")
    result(bus, db, "sync")
    assert said == ["said"]
