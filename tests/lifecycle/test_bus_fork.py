"""A bus after fork(), as preforking servers make it: parent and children use one object, and share nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, Worker
from support.waiting import until
from support.workers import quick_settings

BEGIN = """
    import asyncio, gc, os, sys, threading
    from commandbus import AsyncCommandBus, CommandBus, ConfigurationError
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, NullConnectionPool

    url = sys.argv[1]

    def fork(body):
        child = os.fork()
        if child == 0:
            try:
                body()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            sys.exit(0)   # in order, as a server's child ends
        return child

    def ended(*children):
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        bus.declare_limit(Limit("docai", concurrency=4))
        yield bus


@pytest.fixture
def worker(database: str, bus: CommandBus) -> Iterator[Worker]:
    handlers = HandlerRegistry()
    handlers.register("orders", "echo", lambda command, ctx: command.data)
    worker = Worker(handlers, settings=quick_settings(database))
    worker.start()
    yield worker
    worker.stop(wait=4)


def run(program: str, *arguments: str) -> str:
    """The output of a program that takes warnings for errors and says nothing else."""
    code = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=False)
    assert done.stderr == ""
    return done.stdout


def sessions(bus: CommandBus) -> set[int]:
    """Those in this test's database: other tests use the same server at the same time."""
    with bus.connect() as conn:
        query = (
            "SELECT pid FROM pg_stat_activity "
            "WHERE application_name LIKE 'commandbus%' AND datname = current_database()"
        )
        return {pid for (pid,) in conn.execute(query)}


@pytest.mark.usefixtures("worker")
def test_parent_and_children_each_have_connections_of_their_own(database: str, bus: CommandBus) -> None:
    """Pool, listener and limit client were all in use before the fork. Each process sends, calls and takes places
    after it, and the parent's sessions outlive the children, who close their bus."""
    said = run(
        """
        bus = CommandBus(url)

        def use(n):
            for m in range(20):
                assert bus.send("orders", "echo", m, command_id=f"{n}-{m}").created
            assert bus.call("orders", "echo", n) == n
            with bus.limit("docai", wait=20):
                pass

        def pids():
            with bus._pool.connection() as conn:
                return conn.info.backend_pid

        use("before")
        own = pids()

        def body(n):
            use(n)
            assert pids() != own
            bus.close()
            gc.collect()

        children = [fork(lambda n=n: body(f"child{n}")) for n in range(3)]
        use("parent")
        ended(*children)
        assert pids() == own, "the parent's session is still there"
        use("after")
        bus.close()
        print("done")
        """,
        database,
    )
    assert said == "done\n"
    assert len(bus.query_commands(limit=500).items) == 6 * 21


@pytest.mark.usefixtures("worker")
def test_an_async_bus_too(database: str, bus: CommandBus) -> None:
    """Forked inside and outside of a running loop."""
    said = run(
        """
        bus = AsyncCommandBus(url)

        async def use(n):
            assert (await bus.send("orders", "echo", n, command_id=n)).created
            assert await bus.call("orders", "echo", n) == n
            async with bus.limit("docai", wait=20):
                pass

        async def body(n):
            await use(n)
            await bus.close()

        async def main():
            await use("before")
            child = fork_here("in-loop")
            await use("parent")
            await asyncio.to_thread(ended, child)
            await use("after")
            await bus.close()

        def fork_here(n):
            child = os.fork()
            if child:
                return child
            code = 1
            try:
                asyncio._set_running_loop(None)
                asyncio.run(body(n))
                code = 0
            finally:
                os._exit(code)

        asyncio.run(main())
        ended(fork(lambda: asyncio.run(body("later"))))
        print("done")
        """,
        database,
    )
    assert said == "done\n"
    assert len(bus.query_commands(limit=500).items) == 2 * 5


def test_a_lock_that_somebody_held_when_it_forked(database: str, bus: CommandBus) -> None:
    """Another thread was about to open the pool, the listener and the limit client."""
    said = run(
        """
        bus = CommandBus(url)
        held, over = threading.Event(), threading.Event()

        def hold():
            with bus._database.lock, bus._listening._lock, bus._limit_clients._lock:
                held.set()
                over.wait()

        threading.Thread(target=hold, daemon=True).start()
        held.wait()

        def body():
            bus.send("orders", "echo")
            with bus.limit("docai", wait=20):
                pass
            bus.close()

        ended(fork(body))
        over.set()
        print("done")
        """,
        database,
    )
    assert said == "done\n"


def test_an_inherited_socket_is_not_held_open(database: str, bus: CommandBus) -> None:
    """A parent that is killed leaves no session behind, though its child lives on."""
    code = textwrap.dedent(BEGIN) + textwrap.dedent(
        """
        bus = CommandBus(url)
        bus.list_domains()
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("forked", flush=True)
        sys.stdin.read()
        """
    )
    before = sessions(bus)
    with subprocess.Popen(
        [sys.executable, "-c", code, database], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"forked\n"
        assert until(lambda: sessions(bus) - before)
        one.kill()
        until(lambda: not sessions(bus) - before, what="the session ends, though the child has not")
        assert one.stdin is not None
        one.stdin.close()


def test_a_lent_pool_that_was_open_is_refused(database: str, bus: CommandBus) -> None:
    """It would hang: its threads are not in the child. One that is opened after the fork is fine."""
    said = run(
        """
        late = ConnectionPool(url, open=False)
        null = NullConnectionPool(url, open=True)
        with ConnectionPool(url, open=True) as pool:
            bus, lazy, nulled = CommandBus(pool=pool), CommandBus(pool=late), CommandBus(pool=null)
            bus.send("orders", "echo")

            def body():
                for _ in range(2):
                    try:
                        bus.send("orders", "echo")
                    except ConfigurationError as error:
                        assert "Open the pool after the fork" in str(error), error
                    else:
                        raise AssertionError
                with late:
                    lazy.send("orders", "echo")
                nulled.send("orders", "echo")
                os._exit(0)

            ended(fork(body))
            bus.send("orders", "echo")
        null.close()
        print("done")
        """,
        database,
    )
    assert said == "done\n"
    assert len(bus.query_commands().items) == 4


def test_an_embedded_server_is_used_by_parent_and_child(folder: Any) -> None:
    said = run(
        """
        bus = CommandBus(f"embedded:{url}")
        bus.migrate(domains=["orders"])

        def body():
            bus.send("orders", "echo")
            bus.close()

        ended(fork(body))
        bus.send("orders", "echo")
        print(len(bus.query_commands().items))
        bus.close()
        """,
        str(folder),
    )
    assert said == "2\n"
