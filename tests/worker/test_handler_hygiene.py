"""What a handler changes and leaves behind: the next one does not see what can be put back.

Seed 003, "Handler Corrupts Thread State". Context variables are reset in every worker; working directory, umask
and locale only in a process that is the worker's own, under a supervisor (tests/zoo). Signal handlers cannot be
changed by a handler at all. Thread-locals stay, because libraries keep connections there; a handler with
`fresh_thread=True` has a thread of its own for each attempt.
"""

from __future__ import annotations

import contextvars
import locale
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import commandbus
from commandbus import CommandBus, CommandRecord, CommandStatus, HandlerRegistry, NewCommand, Worker
from commandbus.testing import hang
from support.waiting import until
from support.workers import AT_ONCE

StartWorker = Callable[..., Worker]
SLOT_STATE = ("thread_local", "context_variable")
POLLUTED = ("hang.pollute", "look")
PROCESS_STATE = ("directory", "umask", "locale")


@pytest.fixture(autouse=True)
def unpolluted() -> Iterator[None]:
    """Whatever a test's handlers did to this process."""
    folder, umask, language = os.getcwd(), os.umask(0o022), locale.setlocale(locale.LC_ALL)
    os.umask(umask)
    yield
    os.chdir(folder)
    os.umask(umask)
    locale.setlocale(locale.LC_ALL, language)


@pytest.fixture
def handlers() -> HandlerRegistry:
    """`hang.pollute`, and `look`, which tells what is left of it."""
    handlers = HandlerRegistry()
    hang.register(handlers, "orders", only=["pollute"])
    handlers.register("orders", "look", lambda command, ctx: hang.traces())
    return handlers


def traces_after(bus: CommandBus, kinds: list[str]) -> list[dict[str, str]]:
    """What `look` told, in the order of the commands, in one slot."""
    bus.send_many("orders", [NewCommand(kind, command_id=f"{index}") for index, kind in enumerate(kinds)])
    looks = [f"{index}" for index, kind in enumerate(kinds) if kind == "look"]
    return [result_of(bus, item) for item in looks]


def result_of(bus: CommandBus, command_id: str) -> Any:
    """Its result, when it has completed."""

    def completed() -> CommandRecord | None:
        found = bus.get_command("orders", command_id)
        return found if found is not None and found.status is CommandStatus.COMPLETED else None

    return until(completed).result


def slot_part(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in SLOT_STATE}


def process_part(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in PROCESS_STATE}


def test_context_variables_end_with_the_attempt_and_thread_locals_stay(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    start_worker(handlers, concurrency=1)
    before, after, again = traces_after(bus, ["look", *POLLUTED, *POLLUTED])
    assert slot_part(before) == {"thread_local": "", "context_variable": ""}
    assert slot_part(after) == slot_part(again) == {"thread_local": "polluted", "context_variable": ""}
    assert after["sigterm"] == before["sigterm"], "a handler cannot set a signal handler"


def fresh_handlers() -> HandlerRegistry:
    """`fill` leaves something in a thread-local, `tell` says what it finds there and who runs it; both in fresh
    threads. `used` says the same from the slot's own thread."""
    handlers, left = HandlerRegistry(), threading.local()

    @handlers.handler("orders", "fill", fresh_thread=True)
    def fill(command: Any, ctx: Any) -> None:
        left.value = command.command_id

    def tell(command: Any, ctx: Any) -> dict[str, Any]:
        return {"found": getattr(left, "value", None), "thread": threading.current_thread().name}

    handlers.register("orders", "tell", tell, fresh_thread=True)
    handlers.register("orders", "used", tell)
    return handlers


def test_a_fresh_thread_sees_nothing_of_others_and_leaves_nothing(
    bus: CommandBus, start_worker: StartWorker
) -> None:
    start_worker(fresh_handlers(), concurrency=1)
    kinds = ["used", "fill", "tell", "used", "tell"]
    bus.send_many("orders", [NewCommand(kind, command_id=f"{index}") for index, kind in enumerate(kinds)])
    told = [result_of(bus, f"{index}") for index, kind in enumerate(kinds) if kind != "fill"]
    assert [each["found"] for each in told] == [None] * 4
    used, fresh, used_again, _ = (each["thread"] for each in told)
    assert used == used_again
    assert fresh == f"{used}-fresh"
    until(lambda: not [each.name for each in threading.enumerate() if each.name.endswith("-fresh")])


def test_a_fresh_thread_has_transactions_context_variables_and_failures(
    bus: CommandBus, db: psycopg.Connection[Any], start_worker: StartWorker
) -> None:
    """All that a handler can do, it can do there."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "work", fresh_thread=True)
    def work(command: Any, ctx: Any) -> None:
        if ctx.attempt == 1:
            raise LookupError("not yet")
        with ctx.transaction() as tx:
            tx.execute("SELECT 1")
            tx.complete({"attempt": ctx.attempt})

    bus.send("orders", "work", command_id="w")
    start_worker(handlers, retry_policy=AT_ONCE)
    assert result_of(bus, "w") == {"attempt": 2}
    (failed,) = bus.get_attempts("orders", "w")
    assert failed.error == "not yet"
    assert "fresh_thread.py" not in (failed.traceback or "")


def test_a_stuck_fresh_thread_is_seen_and_its_slot_goes_on(
    bus: CommandBus, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """The autopsy shows the thread that hangs, not the one that waits for it."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "hang", fresh_thread=True)
    def hang_here(command: Any, ctx: Any) -> None:
        go_on.wait()

    handlers.register("orders", "look", lambda command, ctx: threading.current_thread().name, fresh_thread=True)
    start_worker(handlers, concurrency=1, cancel_grace=0.2)
    bus.send("orders", "hang", command_id="h", timeout=0.3, max_attempts=1)
    bus.send("orders", "look", command_id="after", delay=0.1)
    assert result_of(bus, "after").endswith("-fresh")
    (stuck,) = until(lambda: bus.list_stuck("orders"))
    assert "hang_here" in str(stuck.autopsy)
    go_on.set()
    bus.send("orders", "look", command_id="again")
    assert result_of(bus, "again").endswith("-fresh")


def test_fresh_thread_is_for_sync_handlers(handlers: HandlerRegistry) -> None:
    async def work(ctx: Any) -> None: ...

    with pytest.raises(ValueError, match="is `async def`, which runs on an event loop"):
        handlers.register("orders", "work", work, fresh_thread=True)
    with pytest.raises(TypeError, match="fresh_thread must be True or False, not 1"):
        handlers.register("orders", "work", lambda ctx: None, fresh_thread=1)  # type: ignore[arg-type]
    assert handlers.get("orders", "work") is None


DJANGO = """
    import sys
    import django
    from django.conf import settings
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(sys.argv[1])
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": given["dbname"], "USER": given["user"],
        "HOST": given["host"], "PORT": given["port"], "OPTIONS": {"application_name": "the django of the test"},
    }})
    django.setup()
    from django.db import connection
    from commandbus import CommandBus, HandlerRegistry, NewCommand, Worker

    handlers = HandlerRegistry()

    def work(command, ctx):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'the django %'")
            return cursor.fetchone()[0]

    handlers.register("orders", "work", work)
    with CommandBus(sys.argv[1]) as bus:
        bus.send_many("orders", [NewCommand("work") for _ in range(600)])
        Worker(handlers, database_url=sys.argv[1], concurrency=4).run(until_idle=True)
        with bus.connect() as conn:
            query = "SELECT status, count(*), max(result::text::int) FROM commandbus.command GROUP BY 1"
            print(*conn.execute(query))
"""


def test_django_keeps_one_session_per_slot(bus: CommandBus, database: str) -> None:
    """Django keeps its connection in a thread-local. 600 commands in 4 slots do not open 600 sessions."""
    pytest.importorskip("django")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DJANGO), database],
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
    status, count, most = done.stdout.strip().strip("()").split(", ")
    assert (status, count) == ("'COMPLETED'", "600"), done.stdout
    assert 1 <= int(most) <= 4


def test_context_variables_of_async_handlers_end_with_the_attempt(
    bus: CommandBus, start_worker: StartWorker
) -> None:
    handlers, left = HandlerRegistry(), contextvars.ContextVar("left", default="clean")

    @handlers.handler("orders", "set")
    async def set_it(command: Any, ctx: Any) -> None:
        left.set("polluted")

    @handlers.handler("orders", "get")
    async def get_it(command: Any, ctx: Any) -> str:
        return left.get()

    start_worker(handlers, concurrency=1)
    bus.send_many("orders", [NewCommand("set", command_id="a"), NewCommand("get", command_id="b")])
    assert result_of(bus, "b") == "clean"


def test_in_an_application_the_process_belongs_to_the_application(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Without a supervisor nobody watches or restores the directory, the umask or the locale."""
    chdir = os.chdir
    start_worker(handlers, concurrency=1)
    before, after = traces_after(bus, ["look", "hang.pollute", "look"])
    assert process_part(after) != process_part(before)
    assert os.chdir is chdir
