"""The listener of bus.call: what it survives, what it says when it cannot go on, and what it leaves: nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus import (
    BusClosedError,
    CallTimeoutError,
    CommandBus,
    CommandNotFoundError,
    ConfigurationError,
    HandlerRegistry,
    Worker,
)
from support.calling import LISTENERS, Caller, caller_of, listeners, until_listening
from support.waiting import one, statuses, until, until_settled
from support.workers import quick_settings

Admin = Callable[[sql.Composable], None]
SOON = 15.0


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        yield bus


@pytest.fixture(params=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(driver: str, database: str, bus: CommandBus) -> Iterator[Caller]:
    with caller_of(driver, database) as caller:
        yield caller


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    go_on = threading.Event()
    yield go_on
    go_on.set()


@pytest.fixture
def worker(database: str, bus: CommandBus, go_on: threading.Event) -> Iterator[Worker]:
    handlers = HandlerRegistry()
    handlers.register("orders", "echo", lambda command, ctx: command.data)

    @handlers.handler("orders", "wait")
    def wait(command: Any, ctx: Any) -> Any:
        assert go_on.wait(60)
        return command.data

    worker = Worker(handlers, settings=quick_settings(database), name="test")
    worker.start()
    yield worker
    go_on.set()
    worker.stop(wait=4)


@pytest.fixture
def let_in(db: psycopg.Connection[Any], server_admin: Admin) -> Callable[[bool], None]:
    """Says whether the server takes new connections to the database; those that are open stay."""
    name = sql.Identifier(one(db, "SELECT current_database()"))

    def let_in(yes: bool) -> None:
        server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(name, sql.SQL(str(yes).lower())))

    return let_in


def end(db: psycopg.Connection[Any], pid: int) -> None:
    assert one(db, "SELECT pg_terminate_backend(%s, 10000)", pid)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bus-listener"]


def test_it_comes_back_when_its_connection_is_ended(
    caller: Caller, db: psycopg.Connection[Any], worker: Worker, go_on: threading.Event
) -> None:
    waiting = caller.call("orders", "wait", 1)
    first = until_listening(db)
    end(db, first)
    until_listening(db, not_pid=first)
    go_on.set()
    assert waiting.result(SOON) == 1
    assert caller.call("orders", "echo", 2).result(SOON) == 2


def test_an_outcome_that_came_while_it_was_away_is_seen_when_it_is_back(
    caller: Caller,
    db: psycopg.Connection[Any],
    worker: Worker,
    go_on: threading.Event,
    let_in: Callable[[bool], None],
) -> None:
    caller.call("orders", "echo").result(SOON)  # the worker has its connections
    waiting = [caller.call("orders", "wait", n) for n in range(4)]
    until(lambda: statuses(db).get("PENDING") == 4)
    pid = until_listening(db)
    let_in(False)
    end(db, pid)
    go_on.set()
    until_settled(db)
    assert not any(each.done() for each in waiting)
    let_in(True)
    assert [each.result(SOON) for each in waiting] == list(range(4))


def test_while_it_is_away_a_caller_looks_once_more_when_the_time_is_up(
    caller: Caller,
    db: psycopg.Connection[Any],
    worker: Worker,
    go_on: threading.Event,
    let_in: Callable[[bool], None],
) -> None:
    caller.call("orders", "echo").result(SOON)
    waiting = caller.call("orders", "wait", 1, wait=3)
    until(lambda: statuses(db).get("PENDING") == 1)
    pid = until_listening(db)
    let_in(False)
    end(db, pid)
    go_on.set()
    until_settled(db)
    assert waiting.result(SOON) == 1
    assert listeners(db) == 0
    let_in(True)


def test_a_server_that_is_away_does_not_hold_up_the_timeout(
    caller: Caller, db: psycopg.Connection[Any], let_in: Callable[[bool], None]
) -> None:
    began = time.monotonic()
    waiting = caller.call("orders", "echo", command_id="o-1", wait=1)
    until_listening(db)
    let_in(False)
    ours = "datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'commandbus%'"
    db.execute(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {ours}".encode())
    with pytest.raises(CallTimeoutError, match="still there"):
        waiting.result(SOON)
    assert 1 <= time.monotonic() - began < 10  # of which the last look waits two seconds for a connection
    let_in(True)


def test_notifications_of_others_do_no_harm(
    caller: Caller, db: psycopg.Connection[Any], worker: Worker, go_on: threading.Event
) -> None:
    waiting = caller.call("orders", "wait", 1)
    until_listening(db)
    for payload in ("", "nonsense", "1,2,", "²", "-1", "9" * 7000, "99999999999999999999"):
        db.execute("SELECT pg_notify('commandbus_call', %s)", (payload,))
    go_on.set()
    assert waiting.result(SOON) == 1


def test_closing_the_bus_tells_those_who_wait(
    caller: Caller, db: psycopg.Connection[Any], bus: CommandBus
) -> None:
    waiting = [caller.call("orders", "echo", n, command_id=f"o-{n}") for n in range(3)]
    until(lambda: statuses(db).get("PENDING") == 3)
    until_listening(db)
    caller.close()
    for n, each in enumerate(waiting):
        with pytest.raises(BusClosedError, match=rf"'o-{n}'.*goes on") as it:
            each.result(SOON)
        assert (it.value.domain, it.value.command_id) == ("orders", f"o-{n}")
    until(lambda: listeners(db) == 0)
    assert threads() == []
    assert statuses(db) == {"PENDING": 3}


def test_a_bus_that_was_closed_can_be_used_again(
    caller: Caller, db: psycopg.Connection[Any], worker: Worker
) -> None:
    for n in range(3):
        assert caller.call("orders", "echo", n).result(SOON) == n
        assert listeners(db) == 1
        caller.close()
        until(lambda: listeners(db) == 0)


def test_a_bus_that_nobody_closed_takes_its_listener_along(
    database: str, db: psycopg.Connection[Any], worker: Worker
) -> None:
    with ConnectionPool(database, min_size=1, open=True) as pool:
        bus = CommandBus(pool=pool)
        assert bus.call("orders", "echo", 1) == 1
        assert len(threads()) == 1
        del bus
        gc.collect()
        until(lambda: not threads())
        until(lambda: listeners(db) == 0)


def test_a_bus_without_calls_has_no_listener(caller: Caller, db: psycopg.Connection[Any]) -> None:
    caller.send("orders", "echo")
    assert (threads(), listeners(db)) == ([], 0)


def test_a_cancelled_task_waits_no_more_and_its_command_goes_on(
    database: str, db: psycopg.Connection[Any], worker: Worker, go_on: threading.Event
) -> None:
    with caller_of("async", database) as caller:
        waiting = caller.call("orders", "wait", 1, command_id="o-1")
        until_listening(db)
        listener = caller.bus._listening._listener
        waiting.cancel()
        until(lambda: not listener._waiting)
        go_on.set()
        assert caller.call("orders", "wait", 1, command_id="o-1").result(SOON) == 1
        assert not listener._waiting
        assert not listener._to_look_at


def test_what_it_may_not_read_is_told_at_once(
    driver: str, database: str, bus: CommandBus, db: psycopg.Connection[Any]
) -> None:
    producer = bus.create_roles(f"call_{uuid.uuid4().hex[:8]}")["producer"]
    db.execute(f"REVOKE EXECUTE ON FUNCTION commandbus.outcomes FROM {producer}".encode())
    with caller_of(driver, f"{database}?options=-crole%3D{producer}") as caller:
        for _ in range(2):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                caller.call("orders", "echo").result(SOON)
        db.execute(f"GRANT EXECUTE ON FUNCTION commandbus.outcomes TO {producer}".encode())
        with pytest.raises(CallTimeoutError):
            caller.call("orders", "echo", wait=0.2).result(SOON)


def test_a_command_that_was_removed_meanwhile(caller: Caller, db: psycopg.Connection[Any]) -> None:
    waiting = caller.call("orders", "echo", command_id="o-1")
    until_listening(db)
    id_ = one(db, "DELETE FROM commandbus.command WHERE command_id = 'o-1' RETURNING id")
    db.execute("SELECT pg_notify('commandbus_call', %s)", (str(id_),))
    with pytest.raises(CommandNotFoundError, match=r"'o-1'.*is gone"):
        waiting.result(SOON)


# --- a pool that was lent ------------------------------------------------------------------------------------


def pool_of(driver: str, conninfo: Any, kwargs: Any = None) -> Any:
    kind = ConnectionPool if driver == "sync" else AsyncConnectionPool
    return kind(conninfo, kwargs=kwargs, min_size=1, open=False)


@pytest.fixture
def lend(driver: str) -> Iterator[Callable[..., Caller]]:
    """Makes callers whose bus has a pool of the application's."""
    lent: list[tuple[Caller, Any]] = []

    def lend(conninfo: Any, kwargs: Any = None, *, url: str | None = None) -> Caller:
        pool = pool_of(driver, conninfo, kwargs)
        caller = Caller(driver, url, pool=pool)
        lent.append((caller, pool))
        caller._do(pool.open).result()
        return caller

    yield lend
    for caller, pool in lent:
        caller._do(pool.close).result()
        caller.end()


def test_the_listener_goes_where_the_pool_goes(
    lend: Callable[..., Caller], database: str, db: psycopg.Connection[Any], worker: Worker
) -> None:
    assert lend(database).call("orders", "echo", 1).result(SOON) == 1
    parts = psycopg.conninfo.conninfo_to_dict(database)
    name = parts.pop("dbname")
    rest = psycopg.conninfo.make_conninfo(**{key: str(value) for key, value in parts.items()})
    kwargs = {"dbname": name, "autocommit": True, "prepare_threshold": None, "row_factory": psycopg.rows.dict_row}
    assert lend(rest, kwargs).call("orders", "echo", 2).result(SOON) == 2
    assert listeners(db) == 2


def test_a_pool_that_does_not_say_where_needs_a_database_url(
    lend: Callable[..., Caller], database: str, db: psycopg.Connection[Any], worker: Worker
) -> None:
    with pytest.raises(ConfigurationError, match="pass database_url"):
        lend(lambda: database).call("orders", "echo", 1).result(SOON)
    assert statuses(db) == {}
    assert lend(lambda: database, url=database).call("orders", "echo", 1).result(SOON) == 1


def test_a_database_url_that_names_another_database_is_found_out(
    lend: Callable[..., Caller], database: str, empty_database: str, db: psycopg.Connection[Any], bus: CommandBus
) -> None:
    with CommandBus(empty_database) as elsewhere:
        elsewhere.migrate(domains=["orders"])
        elsewhere.send("orders", "echo", command_id="theirs")
        caller = lend(database, url=empty_database)
        for _ in range(2):  # the first has the number of the other database's command
            with pytest.raises(ConfigurationError, match="names another one"):
                caller.call("orders", "echo").result(SOON)


# --- fork -----------------------------------------------------------------------------------------------------


def test_a_forked_process_calls_with_a_listener_of_its_own(
    database: str, worker: Worker, db: psycopg.Connection[Any]
) -> None:
    """The parent's listener does not exist in the child, and its connection outlives the child's end."""
    program = """
        import gc, os, sys, warnings
        from commandbus import CommandBus
        warnings.simplefilter("ignore")
        bus = CommandBus(sys.argv[1])
        assert bus.call("orders", "echo", 1) == 1
        inherited = bus._listening._listener
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert not inherited.is_serving
                with CommandBus(sys.argv[1]) as own:
                    assert own.call("orders", "echo", 2) == 2
                listener = bus._listening.get(lambda: bus.settings)
                assert listener is not inherited and listener.is_serving
                bus._listening.close()
                del inherited
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert bus.call("orders", "echo", 3) == 3
        assert bus._listening._listener is inherited
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), database]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=os.environ, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
    until(lambda: one(db, f"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE {LISTENERS})"))
