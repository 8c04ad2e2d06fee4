"""Sessions that handlers opened themselves: they end with their killed worker, where nobody else can be meant."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from commandbus import CommandBus, CommandStatus
from support.network import Proxy
from support.supervised import Supervised
from support.waiting import one, until

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
OPENS = '''
import threading
import psycopg

@handlers.handler("orders", "open_and_freeze", timeout=3)
def open_and_freeze(command, ctx):
    """Connects by itself (as another role, too), leaves a long query to a thread, and holds the GIL."""
    url, *others = command.data if isinstance(command.data, list) else [command.data]
    for name, address in [("mine", url), ("idle mine", url), *(("other role", other) for other in others)]:
        own = psycopg.connect(address, application_name=name, autocommit=True)
        if name != "idle mine":
            threading.Thread(target=own.execute, args=("SELECT pg_sleep(600)",), daemon=True).start()
        globals()[name] = own
    while not ready(url):
        time.sleep(0.01)
    freeze(command, ctx)

def ready(url):
    with psycopg.connect(url, application_name="asks") as conn:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'mine' AND wait_event = 'PgSleep'"
        return conn.execute(query + " AND datname = current_database()").fetchone()[0]
'''


@pytest.fixture
def named(db: Db) -> Callable[[str], int]:
    """How many sessions there are under a name."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
    return lambda name: int(one(db, query, name))


def end_mine(db: Db) -> None:
    """In this database: another test may have such sessions at the same time."""
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'mine' AND datname = current_database()"
    )


@pytest.fixture
def other_role(database: str, db: Db, server_admin: Callable[[sql.Composable], None]) -> Iterator[str]:
    """The database's address for another role."""
    name = f"stranger_{uuid.uuid4().hex[:8]}"
    server_admin(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    yield make_conninfo(database, user=name)
    db.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", (name,))
    server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.mark.waits
@pytest.mark.alone  # the server is asked whose they are in the moment before the kill, if there is time
def test_they_end_with_their_killed_worker_and_nobody_elses_do(
    supervise: Supervise,
    tasks: Path,
    bus: CommandBus,
    database: str,
    other_role: str,
    named: Callable[[str], int],
) -> None:
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + OPENS)
    with psycopg.connect(database, application_name="innocent", autocommit=True) as innocent:
        supervised = supervise(max_attempts=1).until_ready()
        bus.send("orders", "open_and_freeze", [database, other_role], command_id="a")
        until(lambda: named("mine") == 1)
        until(lambda: bus.get_command("orders", "a").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)  # type: ignore[union-attr]
        until(lambda: named("mine") == 0, 5)
        supervised.until_said("database sessions that handlers of worker")
        assert named("other role") == 1, "what a handler does as another role is not ours to end"
        assert one(innocent, "SELECT 1") == 1
    assert supervised.stop()[0] == 0


@pytest.mark.waits
@pytest.mark.alone  # the kill waits for 0.4 s at most, of which the test takes 0.25 s
def test_a_worker_is_not_killed_before_the_server_has_said_whose_they_are(
    supervise: Supervise,
    tasks: Path,
    bus: CommandBus,
    db: Db,
    database: str,
    named: Callable[[str], int],
    impatient: Callable[[str], None],
) -> None:
    """The coroner needs a quarter of a second for it, more than the worker has for its stacks."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + OPENS)
    impatient(
        "import time; from commandbus.supervisor.coroner import Coroner; look = Coroner._look_at_trace; "
        "Coroner._look_at_trace = lambda *args: (time.sleep(0.25), look(*args))"
    )
    supervised = supervise(max_attempts=1).until_ready()
    bus.send("orders", "open_and_freeze", database, command_id="a")
    try:
        supervised.until_said("post-mortem of worker", 30)
        supervised.until_said("database sessions that handlers of worker", 5)
        until(lambda: named("mine") == named("idle mine") == 0, 5)
    finally:
        end_mine(db)


def test_with_something_in_between_nothing_is_ended(
    tasks: Path, bus: CommandBus, db: Db, database: str, named: Callable[[str], int]
) -> None:
    """The server sees the addresses of what is in between, which others may use as well."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + OPENS)
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    supervised = Supervised(tasks, re.sub(r":\d+/", f":{proxy.port}/", database), max_attempts=1)
    try:
        supervised.until_ready()
        bus.send("orders", "open_and_freeze", database, command_id="a")
        supervised.until_said("post-mortem of worker", 30)
        assert named("mine") == 1, supervised.log
        assert "had opened themselves" not in supervised.log
        assert supervised.stop()[0] == 0
    finally:
        supervised.clear_away()
        proxy.close()
        end_mine(db)
