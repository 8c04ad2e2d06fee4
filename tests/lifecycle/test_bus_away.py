"""A bus whose database is away says why, at once where nobody listens, and ends in its own time; in either bus."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus import (
    AsyncTroubleshootingQueue,
    CallTimeoutError,
    CommandBus,
    CommandBusError,
    DatabaseUnavailableError,
    Limit,
    LimitTimeoutError,
    Settings,
    TroubleshootingQueue,
)
from commandbus.db.bus_pool import is_hopeless
from support.calling import Caller
from support.network import Proxy
from support.waiting import until

AT_ONCE = 5.0  # seconds on a busy machine; what waits would take 30
LATE = 8.0


@pytest.fixture(params=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(driver: str) -> Iterator[Callable[..., Caller]]:
    """Makes callers, and ends them."""
    made: list[Caller] = []

    def make(url: str | None, **options: Any) -> Caller:
        caller = Caller(driver, url, **options)
        made.append(caller)
        return caller

    yield make
    for caller in made:
        caller.end()


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return f"postgresql://postgres@127.0.0.1:{port}/shop"


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """Between the bus and the server."""
    proxy = Proxy(int(str(conninfo_to_dict(database)["port"])))
    yield proxy
    proxy.close()


def through(proxy: Proxy, database: str) -> str:
    return make_conninfo(database, port=proxy.port)


def does(caller: Caller, method: Any, *args: Any, **kwargs: Any) -> Any:
    return caller._do(method, *args, **kwargs).result(60)


def test_a_send_is_refused_at_once_with_the_reason(make: Callable[..., Caller], nobody: str) -> None:
    caller = make(nobody)
    for _ in range(3):  # the second one does not wait for the pool's next attempt either
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailableError, match=r"cannot be reached: .*Connection refused") as raised:
            does(caller, caller.bus.send, "orders", "ship")
        assert time.monotonic() - began < AT_ONCE
        assert isinstance(raised.value, CommandBusError | ConnectionError)
        assert "\n" not in str(raised.value)


METHODS: list[tuple[str, tuple[Any, ...]]] = [
    ("send", ("orders", "ship")),
    ("send_many", ("orders", [{"command_type": "ship"}])),
    ("call", ("orders", "ship")),
    ("wait", ("orders", "x")),
    ("wait_all", ([("orders", "x")],)),
    ("cancel", ("orders", "x")),
    ("get_command", ("orders", "x")),
    ("get_outcome", ("orders", "x")),
    ("query_commands", ()),
    ("get_audit_trail", ("orders", "x")),
    ("get_attempts", ("orders", "x")),
    ("list_stuck", ()),
    ("list_stuck_groups", ()),
    ("rejected", ()),
    ("undelivered_replies", ()),
    ("status", ()),
    ("workers", ()),
    ("pause", ("orders",)),
    ("resume", ("orders",)),
    ("pauses", ()),
    ("prune", ()),
    ("migrate", ()),
    ("schema_state", ()),
    ("create_domain", ("orders",)),
    ("create_queue", ("answers",)),
    ("list_domains", ()),
    ("create_roles", ()),
    ("connect", ()),
    ("create_batch", ("orders", [{"command_type": "ship"}])),
    ("get_batch", ("orders", "b")),
    ("list_batches", ()),
    ("wait_for_batch", ("orders", "b")),
    ("cancel_batch", ("orders", "b")),
    ("close_batch", ("orders", "b")),
    ("list_processes", ()),
    ("declare_limit", (Limit("docai", concurrency=1),)),
    ("limits", ()),
    ("get_limit", ("docai",)),
    ("set_limit", ("docai",)),
    ("estimate", ("docai",)),
    ("breakers", ()),
]


def test_so_is_every_other_method(make: Callable[..., Caller], nobody: str) -> None:
    caller = make(nobody)
    tried = []
    for name, arguments in METHODS:
        if not hasattr(caller.bus, name):
            continue
        began = time.monotonic()
        method = getattr(caller.bus, name)
        with pytest.raises(DatabaseUnavailableError, match="Connection refused"):
            does(caller, method, *arguments)
        assert time.monotonic() - began < AT_ONCE, name
        tried.append(name)
    assert len(tried) >= len(METHODS) - 3
    queue = (TroubleshootingQueue if caller.driver == "sync" else AsyncTroubleshootingQueue)(caller.bus)
    with pytest.raises(DatabaseUnavailableError):
        does(caller, queue.operator_retry, "orders", "x", operator="ann")


def test_what_a_person_must_repair_is_told_at_once(make: Callable[..., Caller], database: str) -> None:
    caller = make(make_conninfo(database, dbname="no_such_database"))
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailableError, match='"no_such_database" does not exist'):
        does(caller, caller.bus.send, "orders", "ship")
    assert time.monotonic() - began < AT_ONCE


def test_what_passes_is_waited_for_and_named(make: Callable[..., Caller], database: str, proxy: Proxy) -> None:
    """A connection that is cut while it is made: a server that starts or a failover does that."""
    caller = make(None, settings=Settings(database_url=through(proxy, database), pool_timeout=1.0))
    proxy.is_refusing = True
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailableError, match=r"could not be reached for 1s: .*server"):
        does(caller, caller.bus.status)
    assert 1.0 <= time.monotonic() - began < 1.0 + AT_ONCE
    waiting = caller._do(caller.bus.status)
    proxy.is_refusing = False
    assert waiting.result(10).items == []


def test_it_is_there_again_when_the_server_is(make: Callable[..., Caller], database: str) -> None:
    """Refused now, served a moment later: nothing waits for the pool's back-off."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    caller = make(make_conninfo(database, port=port))
    for _ in range(3):
        with pytest.raises(DatabaseUnavailableError):
            does(caller, caller.bus.status)
    proxy = Proxy(int(str(conninfo_to_dict(database)["port"])), listen=port)
    try:
        began = time.monotonic()
        assert does(caller, caller.bus.status).items == []
        assert time.monotonic() - began < AT_ONCE
        # Several idle connections that all broke: each is found out once, without a pause.
        both = [caller._do(caller.bus.status) for _ in range(8)]
        assert [each.result(30).items for each in both] == [[]] * 8
        proxy.cut()
        time.sleep(0.2)  # a connection that was at work a moment ago is not looked at
        began = time.monotonic()
        assert does(caller, caller.bus.status).items == []
        assert time.monotonic() - began < AT_ONCE
    finally:
        proxy.close()


def test_a_pool_that_is_in_use_says_so(make: Callable[..., Caller], database: str, driver: str) -> None:
    settings = Settings(database_url=database, pool_max_size=1, pool_timeout=0.5)
    caller = make(None, settings=settings)
    with psycopg.connect(database) as holder:
        does(caller, caller.bus.create_domain, "orders")
        holder.execute("LOCK TABLE commandbus.command")
        stuck = caller._do(caller.bus.send, "orders", "ship")
        with pytest.raises(
            DatabaseUnavailableError, match="no connection became free for 500ms: all 1 of the pool"
        ):
            until(lambda: does(caller, caller.bus.list_domains) is None)
    stuck.result(20)


def test_a_lent_pool_is_explained_too(make: Callable[..., Caller], nobody: str, driver: str) -> None:
    if driver == "async":
        kind: Any = AsyncConnectionPool
    else:
        kind = ConnectionPool
    pool = kind(nobody, min_size=1, open=False, timeout=0.5)
    caller = make(None, pool=pool)
    does(caller, pool.open)
    try:
        with pytest.raises(DatabaseUnavailableError, match=r"pool that was lent .* attempts to connect failed"):
            does(caller, caller.bus.send, "orders", "ship")
    finally:
        does(caller, pool.close)


def test_a_call_ends_in_its_own_time(make: Callable[..., Caller], database: str, proxy: Proxy) -> None:
    """The server is away when it is to be sent (and only passing errors are seen)."""
    caller = make(through(proxy, database))
    proxy.is_refusing = True
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailableError):
        does(caller, caller.bus.call, "orders", "ship", wait=1)
    assert time.monotonic() - began < LATE


@pytest.mark.parametrize("when", ["sending", "waiting"])
def test_a_call_to_a_server_that_fell_silent_ends_in_its_own_time(
    make: Callable[..., Caller], database: str, proxy: Proxy, when: str
) -> None:
    """Nothing is refused, and nothing answers."""
    caller = make(through(proxy, database))
    does(caller, caller.bus.create_domain, "orders")
    if when == "sending":
        proxy.hearing.clear()
    began = time.monotonic()
    waiting = caller._do(caller.bus.call, "orders", "ship", wait=3)
    if when == "waiting":
        with psycopg.connect(database, autocommit=True) as db:
            until(lambda: db.execute("SELECT FROM commandbus.command").fetchone() is not None)
        proxy.hearing.clear()
    with pytest.raises(DatabaseUnavailableError if when == "sending" else CallTimeoutError) as raised:
        waiting.result(60)
    assert 2.9 <= time.monotonic() - began < 3 + LATE
    assert "may have been done" in str(raised.value) or "still there" in str(raised.value)
    proxy.hearing.set()


def test_a_permit_of_a_limit_ends_in_its_own_time(database: str, proxy: Proxy) -> None:
    with CommandBus(through(proxy, database)) as bus:
        bus.declare_limit(Limit("docai", concurrency=1))
        proxy.is_refusing = True
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(LimitTimeoutError, match="database is unreachable"), bus.limit("docai", wait=1):
            pass
        assert time.monotonic() - began < LATE


@pytest.mark.parametrize(
    ("text", "hopeless"),
    [
        ('connection failed: connection to server at "::1", port 1 failed: Connection refused', True),
        ('connection to server on socket "/run/x" failed: No such file or directory', True),
        ("failed to resolve host 'x': [Errno -2] Name or service not known", True),
        ("failed to resolve host 'x': [Errno -3] Temporary failure in name resolution", False),
        ("FATAL:  the database system is starting up", False),
        ("connection timeout expired", False),
        ('FATAL:  password authentication failed for user "x"', True),
        (
            "Connection refused\nMultiple connection attempts failed. All failures were:\n"
            "- host: 'a': Connection refused\n- host: 'b': Connection refused",
            True,
        ),
        (
            "Connection refused\nMultiple connection attempts failed. All failures were:\n"
            "- host: 'a': connection timeout expired\n- host: 'b': Connection refused",
            False,
        ),
    ],
)
def test_what_waiting_does_not_help(text: str, hopeless: bool) -> None:
    """Of several hosts all must refuse: in a failover one does, and the other is on its way."""
    assert is_hopeless(psycopg.OperationalError(text)) is hopeless


def test_an_embedded_server_is_waited_for(folder: Any) -> None:
    """It is started again when it dies, so a refusal is not the end."""
    with CommandBus(f"embedded:{folder}") as bus:
        assert bus._pool.is_patient


def test_senders_without_end_are_all_told_at_once(make: Callable[..., Caller], nobody: str) -> None:
    """Each comes while the pool gives up an attempt for another one."""
    caller = make(nobody)

    def send() -> float:
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailableError):
            does(caller, caller.bus.send, "orders", "ship")
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as senders:
        longest = max(senders.map(lambda _: send(), range(400)))
    assert longest < AT_ONCE
