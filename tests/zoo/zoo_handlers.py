"""What the workers of the zoo run: healthy handlers, and every animal of the kit, in a thread and in a process.

Every animal first says that it is there, and tries to write a row when it has ended or was woken: into the table
`marker`, through its context. `inside` marks are written in a ctx.transaction() around the animal, where it leaves
the connection to us; `after` marks through ctx.connection().
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from commandbus import HandlerRegistry
from commandbus.testing import hang

DOMAIN = "zoo"
MARK = "INSERT INTO marker (command_id, attempt, place) VALUES (%s, %s, %s)"
USES_THE_CONNECTION = {
    "pg_sleep", "row_lock", "change_session", "close_connection", "leave_thread", "fork_return",
}  # fmt: skip
handlers = HandlerRegistry()


@handlers.handler(DOMAIN, "work")
def work(ctx: Any) -> None:
    """A healthy handler of 50 ms."""
    time.sleep(0.05)


@handlers.handler(DOMAIN, "work_with_connection")
def work_with_connection(ctx: Any) -> dict[str, str]:
    """A healthy handler that uses the database, and tells how it finds the session."""
    left_before = ctx.remaining()
    with ctx.connection() as conn:
        left_after = ctx.remaining()
        names = ("statement_timeout", "search_path", "lock_timeout", "application_name")
        found = {name: conn.execute(f"SHOW {name}").fetchone()[0] for name in names}
        locks = conn.execute(
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
        )
        left = {"left_before": str(left_before), "left_after": str(left_after)}
        return found | left | {"advisory_locks": str(locks.fetchone()[0])}


@handlers.handler(DOMAIN, "meet", timeout=60)
def meet(command: Any, ctx: Any) -> None:
    """A healthy handler that blocks until the test lets it go."""
    with socket.create_connection(("127.0.0.1", command.data["port"])) as peer:
        peer.sendall(f"meet {os.getpid()}\n".encode())
        peer.settimeout(50)
        peer.recv(1)


@handlers.handler(DOMAIN, "meet_with_connection", timeout=60)
def meet_with_connection(command: Any, ctx: Any) -> None:
    """The same, with a connection in its hands."""
    with ctx.connection():
        meet(command, ctx)


@handlers.handler(DOMAIN, "traces")
def traces(ctx: Any) -> dict[str, str]:
    """What is left of `pollute`."""
    return hang.traces()


def announce(command: Any, ctx: Any) -> None:
    """Tell the test that this attempt begins."""
    data = command.data if isinstance(command.data, dict) else {}
    if "announce" in data:
        with socket.create_connection(("127.0.0.1", data["announce"])) as peer:
            peer.sendall(f"animal {command.command_id} {ctx.attempt_number} {os.getpid()}\n".encode())


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The animal, with its marks."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def handle_async(command: Any, ctx: Any) -> Any:
            announce(command, ctx)
            try:
                async with ctx.transaction() as tx:
                    await tx.execute(MARK, (command.command_id, ctx.attempt_number, "inside"))
                    return await function(command, ctx)
            finally:
                with suppress(Exception):
                    async with ctx.connection() as conn:
                        await conn.execute(MARK, (command.command_id, ctx.attempt_number, "after"))

        return handle_async

    @functools.wraps(function)
    def handle(command: Any, ctx: Any) -> Any:
        announce(command, ctx)
        try:
            if name in USES_THE_CONNECTION:
                return function(command, ctx)
            with ctx.transaction() as tx:
                tx.execute(MARK, (command.command_id, ctx.attempt_number, "inside"))
                return function(command, ctx)
        finally:
            with suppress(Exception), ctx.connection() as conn:
                conn.execute(MARK, (command.command_id, ctx.attempt_number, "after"))

    return handle


def fill(
    registry: HandlerRegistry, names: Iterable[str] = hang.ANIMALS, *, prefix: str = "hang.", **options: Any
) -> None:
    """Register animals with their marks."""
    for name in names:
        registry.register(DOMAIN, prefix + name, marked(name, hang.ANIMALS[name].handler), **options)


fill(handlers)
fill(handlers, prefix="isolated.", isolation="process")
