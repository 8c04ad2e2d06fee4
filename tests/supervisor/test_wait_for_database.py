"""Supervisors and workers that start while the database is away: they wait, say for what, and can be stopped."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from commandbus import CommandBus
from commandbus.cli.exit_codes import ExitCode
from commandbus.db.wait_for_server import passes_by_itself
from support.network import Proxy
from support.supervised import Supervised
from support.waiting import Stopwatch, one, until, until_settled

Db = psycopg.Connection[Any]
WAITS = "so this start waits for it"


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A network between the supervisor and the database. Nobody gets through at first."""
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    proxy.is_refusing = True
    yield proxy
    proxy.close()


@pytest.fixture
def away(tasks: Path, database: str, bus: CommandBus, proxy: Proxy) -> Iterator[Callable[..., Supervised]]:
    """Starts a supervisor whose database is behind the proxy."""
    started: list[Supervised] = []

    def start(**options: Any) -> Supervised:
        started.append(Supervised(tasks, re.sub(r":\d+/", f":{proxy.port}/", database), **options))
        return started[-1]

    yield start
    for supervised in started:
        supervised.clear_away()


def test_a_supervisor_waits_unready_and_says_for_what(
    away: Callable[..., Supervised], proxy: Proxy, bus: CommandBus, db: Db
) -> None:
    bus.send("orders", "quick", command_id="a")
    supervised = away()
    supervised.until_said(WAITS)
    assert supervised.ask("/health/live")[0] == 200
    until(lambda: "waiting for the database for " in str(supervised.ask("/health/ready")))
    code, document = supervised.ask("/health/ready")
    (reason,) = document["reasons"]
    assert code == 503
    assert f"port {proxy.port}" in reason
    assert "commandbus_database_up 0" in supervised.ask("/metrics")[1]
    assert supervised.workers() == {}
    proxy.is_refusing = False
    supervised.until_said("the database is reachable after")
    supervised.until_ready()
    until_settled(db)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert supervised.log.count(WAITS) == 1
    assert supervised.stop()[0] == 0


@pytest.mark.parametrize("silent", [False, True])
def test_sigterm_ends_the_wait_at_once(away: Callable[..., Supervised], proxy: Proxy, silent: bool) -> None:
    if silent:
        proxy.is_refusing = False
        proxy.hearing.clear()
    supervised = away()
    until(lambda: "health checks: http://" in supervised.log)
    if not silent:
        supervised.until_said(WAITS)
    stopwatch = Stopwatch()
    code, report = supervised.stop()
    assert (code, report["reason"]) == (0, "SIGTERM")
    assert stopwatch.seconds() < 3


def test_a_worker_process_that_loses_the_database_while_it_starts_waits_too(
    away: Callable[..., Supervised], proxy: Proxy, tasks: Path, bus: CommandBus, db: Db
) -> None:
    (tasks / "tasks.py").write_text(
        "import time\nfrom pathlib import Path\nPath('importing').touch()\n"
        "while not Path('import').exists(): time.sleep(0.01)\n" + (tasks / "tasks.py").read_text()
    )
    proxy.is_refusing = False
    bus.send("orders", "quick", command_id="a")
    supervised = away()
    until(lambda: (tasks / "importing").exists())
    proxy.is_refusing = True
    proxy.cut()
    (tasks / "import").touch()
    supervised.until_said(WAITS)
    proxy.is_refusing = False
    supervised.until_ready()
    until_settled(db)
    code, report = supervised.stop()
    assert (code, report["settled"], report["restarts"]) == (0, 1, 0)


def test_a_stop_ends_a_worker_process_that_waits(
    away: Callable[..., Supervised], proxy: Proxy, tasks: Path
) -> None:
    (tasks / "tasks.py").write_text(
        "import time\nfrom pathlib import Path\nPath('importing').touch()\n"
        "while not Path('import').exists(): time.sleep(0.01)\n" + (tasks / "tasks.py").read_text()
    )
    proxy.is_refusing = False
    supervised = away()
    until(lambda: (tasks / "importing").exists())
    proxy.is_refusing = True
    proxy.cut()
    (tasks / "import").touch()
    supervised.until_said(WAITS)
    stopwatch = Stopwatch()
    code, report = supervised.stop()
    assert (code, report["abandoned"], report["unwritten"]) == (0, 0, 0)
    assert stopwatch.seconds() < 3
    assert supervised.processes() == {}


def test_systemd_gives_it_more_time(
    away: Callable[..., Supervised], tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tasks / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tasks / "notify"))
        supervised = away()
        while "EXTEND_TIMEOUT_USEC=60000000" not in (message := manager.recv(4096).decode()):
            assert "READY=1" not in message
        assert "STATUS=waiting for the database" in message
        assert supervised.stop()[0] == 0


def test_what_a_person_must_repair_ends_it_at_once(
    tasks: Path, database: str, empty_database: str, bus: CommandBus
) -> None:
    missing = database.rpartition("/")[0] + "/no_such_database"
    nobody = re.sub(r"//[^@/]*@?", "//nobody_of_that_name@", database)
    told = {missing: "does not exist", nobody: "does not exist", empty_database: "commandbus migrate"}
    for url, text in told.items():
        supervised = Supervised(tasks, url)
        try:
            assert supervised.end()[0] == ExitCode.DATABASE
            assert text in supervised.log
            assert WAITS not in supervised.log
        finally:
            supervised.clear_away()


def test_too_many_connections_and_a_closed_database_pass(
    database: str, db: Db, server_admin: Callable[[sql.Composable], None]
) -> None:
    crowded = f"crowded_{uuid.uuid4().hex[:8]}"
    name = sql.Identifier(database.rpartition("/")[2])
    server_admin(sql.SQL("CREATE ROLE {} LOGIN CONNECTION LIMIT 0").format(sql.Identifier(crowded)))
    server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
    try:
        assert passes_by_itself(refusal(database))
        server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        assert passes_by_itself(refusal(database, user=crowded))
    finally:
        server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(crowded)))
    assert one(db, "SELECT 1") == 1


def refusal(url: str, **more: Any) -> psycopg.OperationalError:
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect(url, connect_timeout=5, **more)
    return caught.value


@pytest.mark.parametrize(
    ("url", "passes"),
    [
        ("postgresql://127.0.0.1:1/a", True),
        ("postgresql://nowhere.invalid/a", True),
        ("host=/nonexistent dbname=a", True),
        ("postgresql://127.0.0.1:1/a?sslmode=verify-full&sslrootcert=/nonexistent", True),  # not even asked
        ("postgresql://127.0.0.1:1/a?sslmode=sometimes", False),
        ("host=127.0.0.1 port=none", False),
    ],
)
def test_errors_of_libpq_itself(url: str, passes: bool) -> None:
    assert passes_by_itself(refusal(url)) is passes


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  the database system is shutting down", True),
        ("FATAL:  the database system is in recovery mode", True),
        ("FATAL:  sorry, too many clients already", True),
        ("FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute", True),
        ("could not connect to server: No route to host", True),
        ("FATAL:  Das Datenbanksystem startet", True),
        ('FATAL:  password authentication failed for user "app"', False),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", database "app", no encryption', False),
        ("fe_sendauth: no password supplied", False),
        ('FATAL:  permission denied for database "app"', False),
        ("SSL error: certificate verify failed", False),
        ("server does not support SSL, but SSL was required", False),
        ('FATAL:  role "app" is not permitted to log in', False),
    ],
)
def test_words_of_servers(text: str, passes: bool) -> None:
    assert passes_by_itself(psycopg.OperationalError(f"connection failed: {text}")) is passes
