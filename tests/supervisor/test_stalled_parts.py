"""The stall matrix: each of our own threads in turn hears nothing from the database, or is blocked itself.

/health/ready names the part in time, work that waits moves again unaided, and nothing is lost.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, Limit
from support.network import Proxy
from support.supervised import Supervised
from support.waiting import one, statuses, until, until_settled, verdicts, within

pytestmark = pytest.mark.waits
Supervise = Callable[..., Supervised]
Db = psycopg.Connection[Any]
NAMED_SECONDS = 15.0
BACK_SECONDS = 5.0
PARTS = ("claimer", "settler", "lease keeper", "maintenance", "limit client", "adopter")
RAW = '{"command_type": "quick", "command_id": "raw"}'
MORE_TASKS = '''

handlers.register("orders", "call", lambda command, ctx: "called", limits=["api"])

def _end():
    raise SystemExit("out of order")

def _block():
    import threading
    threading.Event().wait()

@handlers.handler("orders", "harm")
def harm(command, ctx):
    """Blocks or ends one of the worker's own threads, in our own code and for good; once."""
    import gc
    from commandbus.db.service import DatabaseService
    from commandbus.worker.deadlines.ladder import Ladder
    part, how = command.data
    if not Path("harmed").exists():
        Path("harmed").write_text(str(os.getpid()))
        if part == "ladder":
            (ladder,) = [each for each in gc.get_objects() if isinstance(each, Ladder)]
            ladder._on_tick = lambda now: {"block": _block, "end": _end}[how]()
            return
        (service,) = [each for each in gc.get_objects() if isinstance(each, DatabaseService) and each.part == part]
        service.order({"block": _block, "end": _end}[how])
'''


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A network between the supervisor with its workers and the database."""
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    yield proxy
    proxy.close()


@pytest.fixture
def through(database: str, proxy: Proxy, tasks: Path, bus: CommandBus) -> str:
    """The database's address through the proxy, for handlers that need every part of a worker."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + MORE_TASKS)
    bus.declare_limit(Limit("api", concurrency=5))
    return re.sub(r":\d+/", f":{proxy.port}/", database)


def is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED


def put_all_to_work(bus: CommandBus, db: Db) -> None:
    """Afterwards every part has its thread and its connection."""
    bus.send("orders", "call", command_id="before")
    db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (RAW,))
    until(lambda: is_completed(bus, "before") and is_completed(bus, "raw"))


def send_more(bus: CommandBus, db: Db) -> None:
    """Work for each part, while one of them stalls."""
    bus.send("orders", "call", command_id="after")
    bus.send("orders", "quick", command_id="plain")
    db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (RAW.replace('"raw"', '"raw2"'),))


def names(supervised: Supervised, text: str) -> Callable[[], bool]:
    """Is it unready, and does it say so?"""

    def look() -> bool:
        code, document = supervised.ask("/health/ready")
        return code == 503 and text in str(document)

    return look


@pytest.mark.slow
@pytest.mark.parametrize("part", [*PARTS, "coroner"])
def test_a_part_that_hears_nothing_is_named_in_time_and_nothing_is_lost(
    supervise: Supervise, bus: CommandBus, db: Db, through: str, proxy: Proxy, part: str
) -> None:
    supervised = supervise(database_url=through, visibility_timeout="60s").until_ready()
    put_all_to_work(bus, db)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert proxy.silence(part.encode()) == 1
    send_more(bus, db)
    said = f"the {part} has had no answer"
    within(NAMED_SECONDS, names(supervised, said), what=lambda: supervised.ask("/health/ready"))
    until_settled(db, 30)
    until(lambda: is_completed(bus, "raw2"))
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert statuses(db) == {"COMPLETED": 5}
    assert [verdicts(db, each) for each in ("after", "plain")] == [[], []], "nothing ran twice"


@pytest.mark.slow
def test_a_server_that_falls_silent_as_a_whole(
    supervise: Supervise, bus: CommandBus, db: Db, through: str, proxy: Proxy
) -> None:
    """As when its host is gone, or a pooler froze: bytes are taken, and nobody answers, nor to those who
    connect."""
    supervised = supervise(database_url=through, visibility_timeout="60s").until_ready()
    put_all_to_work(bus, db)
    until(lambda: "commandbus_database_up 1" in supervised.ask("/metrics")[1])
    proxy.hearing.clear()
    send_more(bus, db)
    within(NAMED_SECONDS, lambda: supervised.ask("/health/ready")[0] == 503)
    within(NAMED_SECONDS, lambda: "commandbus_database_up 0" in supervised.ask("/metrics")[1])
    until(lambda: supervised.log.count("its connection is cut") >= 5, 30)
    proxy.hearing.set()
    within(
        BACK_SECONDS,
        lambda: is_completed(bus, "after") and is_completed(bus, "plain"),
        what=lambda: supervised.log,
    )
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    until_settled(db)
    until(lambda: is_completed(bus, "raw2"))
    assert len(supervised.workers()) == 1
    assert "drains" not in supervised.log, "nobody was replaced for it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("block", "has not moved"), ("end", "has ended: SystemExit: out of order")]
)
@pytest.mark.parametrize("part", [*PARTS, "ladder"])
def test_a_part_that_is_blocked_or_ends_is_named_in_time_and_its_worker_is_replaced(
    supervise: Supervise, bus: CommandBus, db: Db, through: str, part: str, tasks: Path, how: str, said: str
) -> None:
    supervised = supervise(database_url=through).until_ready()
    put_all_to_work(bus, db)
    (first,) = supervised.workers()
    bus.send("orders", "harm", [part, how], command_id="harm")
    until(lambda: (tasks / "harmed").exists() and (tasks / "harmed").read_text() == str(first))
    send_more(bus, db)
    if how == "block":
        ready = f"the {part} {said}"
        within(NAMED_SECONDS, lambda: ready in str(supervised.ask("/health/ready")), what=lambda: supervised.log)
    else:
        supervised.until_said("out of order")  # and the worker ends at once
    until(lambda: is_completed(bus, "after") and is_completed(bus, "plain"), 40, what=lambda: supervised.log)
    until(lambda: is_completed(bus, "raw2"), 20, what=lambda: supervised.log)
    until(lambda: first not in supervised.workers(), 40, what=lambda: supervised.log)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    until_settled(db, 20)
    assert statuses(db) == {"COMPLETED": 6}


HARM_CORONER = """import threading, pathlib
    from commandbus.supervisor.coroner import Coroner
    look = Coroner._look_for_work
    def look_or_harm(self):
        harm = pathlib.Path("harm")
        if harm.exists():
            how = harm.read_text()
            harm.rename("harmed")
            if how == "end":
                raise SystemExit("out of order")
            threading.Event().wait()
        look(self)
    Coroner._look_for_work = look_or_harm"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("block", "has not moved"), ("end", "has ended: SystemExit: out of order")]
)
def test_a_coroner_that_is_blocked_or_ends_is_named_in_time_and_another_one_takes_over(
    supervise: Supervise,
    bus: CommandBus,
    db: Db,
    through: str,
    tasks: Path,
    impatient: Callable[[str], None],
    how: str,
    said: str,
) -> None:
    """A worker is killed while nobody can settle what it held."""
    impatient(HARM_CORONER)
    supervised = supervise(database_url=through, visibility_timeout="60s").until_ready()
    put_all_to_work(bus, db)
    (first,) = supervised.workers()
    (tasks / "harm").write_text(how)
    until(lambda: (tasks / "harmed").exists())
    bus.send("orders", "sleep", 600, command_id="held")
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'"))
    os.kill(first, signal.SIGKILL)
    within(NAMED_SECONDS, names(supervised, f"the coroner {said}"), what=lambda: supervised.log)
    until(lambda: verdicts(db, "held") != [], 30, what=lambda: supervised.log)  # long before its lease ends
    until(lambda: supervised.ask("/health/ready")[0] == 200, 30)
    send_more(bus, db)
    until(lambda: is_completed(bus, "after") and is_completed(bus, "plain"), 30)
