"""conn=: what is sent joins the caller's transaction, whichever library made it. A rollback leaves nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, async_only, one, queue_length, sync_only
from psycopg.rows import dict_row

import commandbus
from commandbus import AsyncCommandBus, CommandBus, InvalidOperationError, NewCommand, UnknownDomainError


@pytest.fixture
def there(orders: Bus, db: psycopg.Connection[Any]) -> Any:
    """How many commands and messages another session sees."""

    def count() -> tuple[int, int]:
        return one(db, "SELECT count(*) FROM commandbus.command"), queue_length(db)

    return count


class UndoError(Exception):
    """The caller's transaction is rolled back."""


def _sqlalchemy_url(database: str) -> str:
    return database.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.mark.parametrize("rows", [None, dict_row])
def test_psycopg(orders: Bus, there: Any, rows: Any) -> None:
    options = {} if rows is None else {"row_factory": rows}
    if orders.driver == "sync":
        with psycopg.connect(orders.url, **options) as conn:
            orders.send("orders", "Ship", conn=conn)
            orders.send_many("orders", [NewCommand("Ship"), NewCommand("Ship")], chunk_size=1, conn=conn)
            assert there() == (0, 0)
            conn.rollback()
            assert there() == (0, 0)
            sent = orders.send("orders", "Ship", command_id="k", conn=conn)
            assert not orders.send("orders", "Ship", command_id="k", conn=conn).created
            assert orders.get_command("orders", "k", conn=conn).id == sent.id
            conn.commit()
            assert there() == (1, 1)
    else:

        async def use() -> None:
            async with await psycopg.AsyncConnection.connect(orders.url, **options) as conn:
                bus = orders.bus._target
                await bus.send("orders", "Ship", conn=conn)
                await bus.send_many("orders", [NewCommand("Ship"), NewCommand("Ship")], chunk_size=1, conn=conn)
                assert there() == (0, 0)
                await conn.rollback()
                assert there() == (0, 0)
                sent = await bus.send("orders", "Ship", command_id="k", conn=conn)
                assert not (await bus.send("orders", "Ship", command_id="k", conn=conn)).created
                assert (await bus.get_command("orders", "k", conn=conn)).id == sent.id
                await conn.commit()
                assert there() == (1, 1)

        orders.runner.run(use())


def test_psycopg_in_autocommit_mode(orders: Bus, there: Any) -> None:
    """Without a block each call is a transaction; in a block it is part of the block's."""

    if orders.driver == "sync":
        with psycopg.connect(orders.url, autocommit=True) as conn:
            orders.send("orders", "Ship", conn=conn)
            assert there() == (1, 1)
            orders.send_many("orders", [NewCommand("Ship")], conn=conn)
            assert there() == (2, 2)
            with pytest.raises(UndoError), conn.transaction():  # noqa: PT012
                orders.send("orders", "Ship", conn=conn)
                orders.send_many("orders", [NewCommand("Ship")], conn=conn)
                raise UndoError
            assert there() == (2, 2)
            with conn.transaction():
                orders.send("orders", "Ship", conn=conn)
                assert there() == (2, 2)
            assert there() == (3, 3)
    else:

        async def use() -> None:
            async with await psycopg.AsyncConnection.connect(orders.url, autocommit=True) as conn:
                bus = orders.bus._target
                await bus.send("orders", "Ship", conn=conn)
                await bus.send_many("orders", [NewCommand("Ship")], conn=conn)
                assert there() == (2, 2)
                with pytest.raises(UndoError):  # noqa: PT012
                    async with conn.transaction():
                        await bus.send("orders", "Ship", conn=conn)
                        await bus.send_many("orders", [NewCommand("Ship")], conn=conn)
                        raise UndoError
                assert there() == (2, 2)
                async with conn.transaction():
                    await bus.send("orders", "Ship", conn=conn)
                    assert there() == (2, 2)
                assert there() == (3, 3)

        orders.runner.run(use())


@sync_only
def test_a_cancel_joins_too(orders: Bus, there: Any) -> None:
    orders.send("orders", "Ship", command_id="k")
    with psycopg.connect(orders.url) as conn:
        orders.cancel("orders", "k", conn=conn)
        conn.rollback()
        assert there() == (1, 1)
        orders.cancel("orders", "k", conn=conn)
        conn.commit()
        assert there() == (1, 0)
        with pytest.raises(InvalidOperationError):
            orders.cancel("orders", "k", conn=conn)


@sync_only
def test_a_savepoint_of_the_caller_survives_our_refusal(orders: Bus, there: Any) -> None:
    with psycopg.connect(orders.url) as conn:
        orders.send("orders", "Ship", conn=conn)
        with pytest.raises(UnknownDomainError), conn.transaction():
            orders.send("nowhere", "Ship", conn=conn)
        conn.commit()
    assert there() == (1, 1)


def test_what_is_no_connection_is_named(orders: Bus, there: Any) -> None:
    for wrong in (object(), "postgresql://x", 5, [], CommandBus):
        with pytest.raises(TypeError, match="psycopg"):
            orders.send("orders", "Ship", conn=wrong)
    assert there() == (0, 0)


def test_the_wrong_colour_is_named(orders: Bus) -> None:
    with psycopg.connect(orders.url) as sync_conn:
        if orders.driver == "async":
            with pytest.raises(TypeError, match="use CommandBus"):
                orders.send("orders", "Ship", conn=sync_conn)
            return

    async def open_one() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(orders.url)

    async def use() -> None:
        conn = await open_one()
        with pytest.raises(TypeError, match="use AsyncCommandBus"):
            orders.send("orders", "Ship", conn=conn)
        await conn.close()

    orders.runner.run(use())


@sync_only
def test_sqlalchemy_session(orders: Bus, there: Any) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(_sqlalchemy_url(orders.url))
    try:
        with Session(engine) as session:
            orders.send("orders", "Ship", {"n": 1}, conn=session)  # the first thing in it
            session.rollback()
            assert there() == (0, 0)
            session.execute(sqlalchemy.text("CREATE TABLE theirs (n int)"))
            orders.send("orders", "Ship", {"n": 1}, delay=5, headers={"a": 1}, conn=session)
            orders.send_many("orders", [NewCommand("Ship", n) for n in range(3)], conn=session)
            assert there() == (0, 0)
            session.commit()
            assert there() == (4, 4)
        with Session(engine) as session, session.begin():
            session.execute(sqlalchemy.text("INSERT INTO theirs VALUES (1)"))
            orders.send("orders", "Ship", conn=session)
        assert there() == (5, 5)
        with pytest.raises(ZeroDivisionError), Session(engine) as session, session.begin():  # noqa: PT012
            orders.send("orders", "Ship", conn=session)
            raise ZeroDivisionError
        assert there() == (5, 5)
    finally:
        engine.dispose()


@sync_only
def test_sqlalchemy_connection(orders: Bus, there: Any) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(_sqlalchemy_url(orders.url))
    try:
        with engine.connect() as conn:
            orders.send("orders", "Ship", conn=conn)  # the first thing on it: commit() must commit it
            assert there() == (0, 0)
            conn.commit()
            assert there() == (1, 1)
            orders.send("orders", "Ship", conn=conn)
            conn.rollback()
            assert there() == (1, 1)
        with engine.begin() as conn:
            orders.send("orders", "Ship", conn=conn)
            assert there() == (1, 1)
        assert there() == (2, 2)
        with engine.connect() as conn:
            orders.send("orders", "Ship", conn=conn)
        assert there() == (2, 2)
    finally:
        engine.dispose()


def test_sqlalchemy_with_another_driver_is_named(orders: Bus) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(TypeError, match=r"no psycopg 3.*postgresql\+psycopg"):
        orders.send("orders", "Ship", conn=conn)
    engine.dispose()


@async_only
def test_sqlalchemy_async(orders: Bus, there: Any) -> None:
    pytest.importorskip("greenlet", reason="sqlalchemy[asyncio]")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def use() -> None:
        engine = create_async_engine(_sqlalchemy_url(orders.url))
        async with AsyncCommandBus(orders.url) as bus:
            async with AsyncSession(engine) as session:
                await bus.send("orders", "Ship", conn=session)  # the first thing in it
                await session.rollback()
                assert there() == (0, 0)
                await session.execute(sqlalchemy.text("CREATE TABLE theirs (n int)"))
                await bus.send("orders", "Ship", {"n": 1}, delay=5, conn=session)
                await bus.send_many("orders", [NewCommand("Ship", n) for n in range(3)], conn=session)
                assert there() == (0, 0)
                await session.commit()
                assert there() == (4, 4)
            async with engine.connect() as conn:
                await bus.send("orders", "Ship", conn=conn)
                await conn.commit()
                assert there() == (5, 5)
                await bus.send("orders", "Ship", conn=conn)
                await conn.rollback()
                assert there() == (5, 5)
            async with engine.begin() as conn:
                await bus.send("orders", "Ship", conn=conn)
            assert there() == (6, 6)
        await engine.dispose()

    asyncio.run(use())


@sync_only
def test_a_sync_bus_says_what_to_use_with_an_async_session(orders: Bus, there: Any) -> None:
    pytest.importorskip("greenlet", reason="sqlalchemy[asyncio]")
    pytest.importorskip("sqlalchemy")
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine

    async def use() -> None:
        engine = create_async_engine(_sqlalchemy_url(orders.url))
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
        async with AsyncSession(engine) as session, engine.connect() as conn:
            for wrong, kind in ((session, "AsyncSession"), (conn, "AsyncConnection"), (scoped, "async_scoped")):
                with pytest.raises(TypeError, match=rf"{kind}.*which is async: use AsyncCommandBus with it"):
                    orders.send("orders", "Ship", conn=wrong)
        async with AsyncCommandBus(orders.url) as bus:
            await bus.send("orders", "Ship", conn=scoped)
            await scoped.commit()
        await scoped.remove()
        await engine.dispose()

    asyncio.run(use())
    assert there() == (1, 1)


@sync_only
def test_a_sync_bus_on_a_running_loop_says_what_to_use(orders: Bus) -> None:
    """Once for each bus, at the caller's own line; in a thread beside the loop it is fine."""

    async def use() -> None:
        with CommandBus(orders.url) as bus:
            await asyncio.to_thread(bus.list_domains)
            with pytest.warns(RuntimeWarning, match="use AsyncCommandBus there and await") as said:
                bus.send("orders", "Ship")
            assert [each.filename for each in said] == [__file__]
            bus.send("orders", "Ship")
        for method in ("connect", "status"):
            with CommandBus(orders.url) as bus, pytest.warns(RuntimeWarning, match="AsyncCommandBus"):
                found = getattr(bus, method)()
            if method == "connect":
                found.close()
        told = pytest.warns(RuntimeWarning, match="AsyncCommandBus")
        with psycopg.connect(orders.url) as conn, CommandBus(orders.url) as bus, told:
            bus.send("orders", "Ship", conn=conn)

    asyncio.run(use())


DJANGO = """
    import sys
    from urllib.parse import urlsplit
    import django
    from django.conf import settings
    address = urlsplit(sys.argv[1])
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": address.path[1:], "USER": address.username,
        "HOST": address.hostname, "PORT": address.port,
        "OPTIONS": {"server_side_binding": sys.argv[2] == "server"},
    }}, USE_TZ=True)
    django.setup()
    from django.db import connection, transaction
    from commandbus import CommandBus, NewCommand

    def counts():
        with connection.cursor() as cursor:
            cursor.execute("SELECT (SELECT count(*) FROM commandbus.command), "
                           "(SELECT count(*) FROM pgmq.q_orders__commands)")
            return cursor.fetchone()

    with CommandBus(sys.argv[1]) as bus:
        try:
            with transaction.atomic():
                bus.send("orders", "Ship", {"n": 1}, headers={"a": 1}, delay=0.5, conn=connection)
                assert counts() == (1, 1), counts()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert counts() == (0, 0), counts()
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("CREATE TABLE theirs (n int)")
            bus.send("orders", "Ship", {"n": "%s ' é"}, command_id="k", conn=connection)
            bus.send("orders", "Ship", {"n": "%s ' é"}, command_id="k", conn=connection)
            bus.send_many("orders", [NewCommand("Ship", n) for n in range(3)], conn=connection)
            assert bus.get_command("orders", "k") is None
            assert bus.get_command("orders", "k", conn=connection).created_at.tzinfo is not None
        assert counts() == (4, 4), counts()
        assert bus.get_command("orders", "k").data == {"n": "%s ' é"}
        bus.send("orders", "Ship", conn=connection)  # outside a block Django is in autocommit mode
        assert bus.query_commands(limit=9).items[4:] != []
        with transaction.atomic():
            try:
                with transaction.atomic():
                    bus.send("orders", "Ship", conn=connection)
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            bus.send("orders", "Ship", conn=connection)
        assert counts() == (6, 6), counts()
    connection.close()
    print("fine")
"""


@sync_only
@pytest.mark.parametrize("binding", ["client", "server"])
def test_django(orders: Bus, binding: str) -> None:
    """In a process of its own: Django's settings are a process's."""
    pytest.importorskip("django")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DJANGO), orders.url, binding],
        env={
            "PYTHONPATH": str(Path(commandbus.__file__).parent.parent),
            "PATH": "/usr/bin:/bin",
            "PGPASSFILE": os.environ["PGPASSFILE"],
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
