"""What a handler changes and leaves behind: the next one does not see what can be put back.

Seed 003, "Handler Corrupts Thread State". Thread-locals and context variables are reset in every worker; working
directory, umask and locale only in a process that is the worker's own, under a supervisor (tests/zoo). Signal
handlers cannot be changed by a handler at all.
"""

from __future__ import annotations

import contextvars
import locale
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commandbus import CommandBus, CommandRecord, CommandStatus, HandlerRegistry, NewCommand, Worker
from commandbus.testing import hang
from support.waiting import until

StartWorker = Callable[..., Worker]
CLEAN_SLOT = {"thread_local": "", "context_variable": ""}
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
    return {name: found[name] for name in CLEAN_SLOT}


def process_part(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in PROCESS_STATE}


def test_thread_locals_and_context_variables_end_with_the_attempt(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    start_worker(handlers, concurrency=1)
    before, after, again = traces_after(bus, ["look", *POLLUTED, *POLLUTED])
    assert [slot_part(found) for found in (before, after, again)] == [CLEAN_SLOT] * 3
    assert after["sigterm"] == before["sigterm"], "a handler cannot set a signal handler"


def test_thread_locals_can_be_kept(bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    """reset_thread_locals = false, for clients that live in thread-locals."""
    start_worker(handlers, concurrency=1, reset_thread_locals=False)
    _, after = traces_after(bus, ["look", "hang.pollute", "look"])
    assert slot_part(after) == {"thread_local": "polluted", "context_variable": ""}


def test_many_thread_locals_are_forgotten(bus: CommandBus, start_worker: StartWorker) -> None:
    handlers, lives = HandlerRegistry(), [threading.local() for _ in range(50)]

    @handlers.handler("orders", "fill")
    def fill(command: Any, ctx: Any) -> None:
        for life in lives:
            life.value = command.command_id

    @handlers.handler("orders", "count")
    def count(command: Any, ctx: Any) -> int:
        return sum(hasattr(life, "value") for life in lives)

    start_worker(handlers, concurrency=1)
    bus.send_many("orders", [NewCommand("fill", command_id="a"), NewCommand("count", command_id="b")])
    assert result_of(bus, "b") == 0


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
