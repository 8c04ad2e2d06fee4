"""Handlers that hang, crash and misbehave in every way we know. Use them to watch what your workers do about it.

    from commandbus.testing import hang

    hang.register(handlers, "staging")                     # hang.spin, hang.sleep, hang.segfault, …
    bus.send("staging", "hang.spin", {"seconds": 1000})    # then: commandbus show ID, commandbus stuck

Not for production: some of them end or freeze the process that runs them, and only a supervisor (`commandbus
worker`) brings back what they take along. `ANIMALS` says of each what stops it and whether it needs that
supervisor.

Limits come from the command's data ({…} in the descriptions); without them an animal hangs for 1000 seconds. A
forgotten one does no more harm than being stuck: all that it takes (memory, a child process, a thread, a session)
is let go after that time.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import locale
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Final

import psycopg
from psycopg import sql

from commandbus.model.command import Command
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.context import AsyncHandlerContext, HandlerContext
from commandbus.worker.execution.handlers import HandlerRegistry

SECONDS: Final = 1000.0
MEGABYTES: Final = 512
_PAUSE: Final = 0.01
_MEGABYTE: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class Animal:
    """A handler that misbehaves.

    `stopped_by` is the rung of the ladder that ends it, as the attempt's record says: "deadline" (it gives in when
    asked), "stuck" (its slot is replaced), "kill" (its process is killed), "crash" (it takes its process along);
    None if it ends by itself and only leaves something behind. `needs_supervisor`: a worker inside an application
    dies of it, or freezes.
    """

    name: str
    handler: Callable[..., Any]
    stopped_by: str | None
    needs_supervisor: bool

    @property
    def summary(self) -> str:
        """What it does and what an operator sees."""
        return (self.handler.__doc__ or "").strip()


_found: dict[str, Animal] = {}
ANIMALS: Final = MappingProxyType(_found)
"""All of them by name."""


def register(
    handlers: HandlerRegistry,
    domain: str,
    *,
    prefix: str = "hang.",
    only: Iterable[str] | None = None,
    **options: Any,
) -> list[str]:
    """Register all animals, or only some, as handlers of a domain. Returns their command types.

    Options are those of `HandlerRegistry.register`: timeout, on_timeout, retry_policy, isolation.
    """
    names = list(ANIMALS) if only is None else list(only)
    if unknown := [name for name in names if name not in ANIMALS]:
        raise ValueError(f"no such animal: {', '.join(unknown)}; there are {', '.join(ANIMALS)}")
    for name in names:
        handlers.register(domain, prefix + name, ANIMALS[name].handler, **options)
    return [prefix + name for name in names]


def _animal(stopped_by: str | None, *, needs_supervisor: bool = False) -> Callable[[Callable[..., Any]], Any]:
    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        name = handler.__name__.rstrip("_")
        _found[name] = Animal(name, handler, stopped_by, needs_supervisor)
        return handler

    return add


def _given(command: Command, name: str, default: Any) -> Any:
    data = command.data
    return data[name] if isinstance(data, dict) and name in data else default


def _until(command: Command) -> float:
    return time.monotonic() + float(_given(command, "seconds", SECONDS))


# --- Python code that does not come back -----------------------------------------------------------------------


@_animal("stuck")
def spin(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """`while True: pass`: burns a CPU and never looks. Seen: ExecutionStuck, its stack in the loop.
    {seconds}"""
    until = _until(command)
    while time.monotonic() < until:
        pass


@_animal("stuck")
def sleep(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """`time.sleep(1000)`: waits where nothing can wake it. Seen: ExecutionStuck, its stack in sleep.
    {seconds}"""
    time.sleep(float(_given(command, "seconds", SECONDS)))


@_animal("stuck")
def swallow(command: Command, ctx: HandlerContext) -> None:
    """A loop that swallows BaseException, the cancellation too. Seen: ExecutionStuck. {seconds}"""
    until = _until(command)
    while time.monotonic() < until:
        try:
            ctx.raise_if_canceled()
            time.sleep(_PAUSE)
        except BaseException:  # noqa: BLE001, S112 - that is its nature
            continue


@_animal("kill", needs_supervisor=True)
def regex(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """A regular expression that takes hours and holds the GIL: the process freezes. Seen: ExecutionStuck, rung
    kill: the supervisor killed the worker, CPU time names this attempt, its neighbors are tried again.
    {length}"""
    re.match(r"(a+)+$", "a" * int(_given(command, "length", 40)) + "b")


@_animal("stuck")
def recv(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Reads from a peer that says nothing. Seen: ExecutionStuck, its stack in recv. {seconds, port}"""
    port = _given(command, "port", None)
    pair = socket.socketpair() if port is None else (socket.create_connection(("127.0.0.1", int(port))),)
    with pair[0] as ours, pair[-1]:
        ours.settimeout(float(_given(command, "seconds", SECONDS)))
        with suppress(TimeoutError):
            ours.recv(1)


@_animal("stuck")
def double_lock(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Takes a lock twice: a deadlock with itself. Seen: ExecutionStuck, its stack at the lock. {seconds}"""
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=float(_given(command, "seconds", SECONDS)))


@_animal("stuck")
def hostile_error(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Raises an error whose text never comes: formatting it hangs. Seen: ExecutionStuck. {seconds}"""
    until = _until(command)

    class HostileError(Exception):
        def __str__(self) -> str:
            while time.monotonic() < until:
                time.sleep(_PAUSE)
            return "hostile"

    raise HostileError


# --- the database ----------------------------------------------------------------------------------------------


@_animal("deadline")
def pg_sleep(command: Command, ctx: HandlerContext) -> None:
    """A query without end on the context's connection: canceled at the deadline, or by statement_timeout if
    that is shorter. Seen: DeadlineExceededError TIMEOUT, or QueryCanceled TIMEOUT (layer 1). {seconds}"""
    with ctx.connection() as conn:
        conn.execute("SELECT pg_sleep(%s)", (float(_given(command, "seconds", SECONDS)),))


@_animal("stuck")
def own_pg_sleep(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """A query without end on a connection of the handler's own, which nobody else can cancel. Seen:
    ExecutionStuck; the slot comes back, the query goes on (client_connection_check_interval ends it).
    {database_url, seconds}"""
    with psycopg.connect(_given(command, "database_url", ""), application_name="hang.own_pg_sleep") as conn:
        conn.execute("SELECT pg_sleep(%s)", (float(_given(command, "seconds", SECONDS)),))


@_animal("deadline")
def row_lock(command: Command, ctx: HandlerContext) -> None:
    """Waits for a row that another session has locked. Seen: DeadlineExceededError TIMEOUT, or LockNotAvailable
    LOCK_TIMEOUT (layer 1) if the deadline is later. {table, id}"""
    query = sql.SQL("SELECT 1 FROM {} WHERE id = %s FOR UPDATE")
    table = sql.Identifier(*str(_given(command, "table", "locked")).split("."))
    with ctx.connection() as conn:
        conn.execute(query.format(table), (_given(command, "id", 1),))


@_animal("deadline")
def change_session(command: Command, ctx: HandlerContext) -> None:
    """Switches the session's time limits off, then sends a query without end. Seen: DeadlineExceededError
    TIMEOUT; the next handler gets a session with its limits. {seconds}"""
    with ctx.connection() as conn:
        conn.execute(
            "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0"
        )
        conn.execute("SET search_path = pg_temp; SET application_name = 'hang.change_session'")
        conn.execute("SELECT pg_advisory_lock(%s)", (int(_given(command, "lock", 727)),))
        conn.commit()
        conn.execute("SELECT pg_sleep(%s)", (float(_given(command, "seconds", SECONDS)),))


@_animal(None)
def close_connection(command: Command, ctx: HandlerContext) -> None:
    """Closes the context's connection. Seen: it completes, and the pool opens another; in a transaction
    ({transaction: true}) the completion cannot be written: TransientCommandError COMMIT_LOST, tried again."""
    if _given(command, "transaction", False):
        with ctx.transaction() as tx:
            tx.connection.close()
    else:
        with ctx.connection() as conn:
            conn.execute("SELECT 1")
            conn.close()


# --- the process -----------------------------------------------------------------------------------------------


@_animal("crash", needs_supervisor=True)
def segfault(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """SIGSEGV in C code. Seen: WorkerLost, rung crash, its stack; its neighbors are tried again, not
    charged."""
    ctypes.string_at(0)


@_animal("crash", needs_supervisor=True)
def exit_(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """`os._exit(1)`. Seen: WorkerLost with the exit code; if others ran at that moment, all are suspects first,
    and run again in processes of their own, where the next exit is charged twice. {code}"""
    os._exit(int(_given(command, "code", 1)))


@_animal("crash", needs_supervisor=True)
def kill(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """SIGKILL for its own process, as the kernel does when memory runs out. Seen: first a suspect, not charged;
    in a process of its own then WorkerLost with the signal."""
    os.kill(os.getpid(), signal.SIGKILL)


@_animal("kill", needs_supervisor=True)
def stop(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """SIGSTOP for its own process: nothing in it moves any more. Seen: first a suspect, not charged; in a
    process of its own then ExecutionStuck, rung kill."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)  # the kernel stops one thread after another: this one could finish before it is stopped


@_animal("kill", needs_supervisor=True)
def hog(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Takes memory, up to {mb}, and keeps it. Seen: beyond twice max_memory_mb the worker is killed and this
    attempt is a suspect; in a process of its own then MemoryLimitExceeded. Below that: ExecutionStuck, rung
    stuck. {mb, seconds}"""
    until = _until(command)
    size = int(_given(command, "mb", MEGABYTES))
    taken = [bytearray(b"x") * _MEGABYTE for _ in range(size)]  # written to, so that it is really there
    while taken and time.monotonic() < until:
        time.sleep(_PAUSE)


@_animal("stuck")
def fork(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Forks without exec and waits for the child, which sleeps with copies of all our files. Seen:
    ExecutionStuck, its stack in waitpid; the child goes with the worker. {seconds}"""
    seconds = float(_given(command, "seconds", SECONDS))
    child = os.fork()
    if child == 0:
        try:
            time.sleep(seconds)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@_animal(None)
def fork_return(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Forks, and *both* processes return: the child believes that it is the worker. Seen: it completes once,
    and the child ends without running anything."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)


# --- async handlers --------------------------------------------------------------------------------------------


@_animal("stuck")
async def block_loop(command: Command, ctx: AsyncHandlerContext) -> None:  # noqa: ARG001
    """`time.sleep` in an `async def`: nothing else on its event loop moves. Seen: ExecutionStuck; the loop is
    replaced, what else ran on it is tried again, not charged. {seconds}"""
    time.sleep(float(_given(command, "seconds", SECONDS)))  # noqa: ASYNC251 - that is its nature


@_animal("stuck")
async def swallow_cancel(command: Command, ctx: AsyncHandlerContext) -> None:  # noqa: ARG001
    """Swallows CancelledError and goes on. Seen: ExecutionStuck, its task's stack. {seconds}"""
    until = _until(command)
    while time.monotonic() < until:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(_PAUSE)


# --- what is left behind ---------------------------------------------------------------------------------------


@_animal(None)
def sys_exit(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """`sys.exit()` in a handler. Seen: SystemExit, a failure as any other; the slot goes on."""
    sys.exit("a handler wants to leave")


@_animal(None)
def leave_thread(command: Command, ctx: HandlerContext) -> None:
    """Returns, and leaves a thread behind. Seen: it completes; if the thread holds the context's connection
    ({connection: true}), that is taken from it. {seconds, connection}"""
    until, ready = _until(command), threading.Event()

    def stay() -> None:
        with suppress(Exception), _connection_if(ctx, wanted=bool(_given(command, "connection", False))) as conn:
            ready.set()
            while time.monotonic() < until:
                time.sleep(_PAUSE)
                if conn is not None:
                    conn.execute("SELECT 1")
        ready.set()

    threading.Thread(target=stay, name="hang.leave_thread", daemon=True).start()
    ready.wait(SECONDS)


_left_in_thread = threading.local()
_left_in_context: contextvars.ContextVar[str] = contextvars.ContextVar("hang.pollute", default="")


@_animal(None)
def pollute(command: Command, ctx: HandlerContext) -> None:  # noqa: ARG001
    """Changes working directory, umask, locale, a thread-local and a context variable, and tries to set a
    signal handler. Seen: it completes; `hang.traces()` in the next handler of that slot says what is left of
    it."""
    os.chdir(tempfile.gettempdir())
    os.umask(0o077)
    wanted = "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, wanted)
    _left_in_thread.value = "polluted"
    _left_in_context.set("polluted")
    with suppress(ValueError):  # Python refuses it in any thread but the main one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def traces() -> dict[str, str]:
    """What a handler sees of the state that `pollute` changes."""
    umask = os.umask(0o022)
    os.umask(umask)
    return {
        "directory": str(os.getcwd()),
        "umask": oct(umask),
        "locale": locale.setlocale(locale.LC_ALL),
        "thread_local": getattr(_left_in_thread, "value", ""),
        "context_variable": _left_in_context.get(),
        "sigterm": str(signal.getsignal(signal.SIGTERM)),
    }


@contextmanager
def _connection_if(ctx: HandlerContext, *, wanted: bool) -> Iterator[psycopg.Connection[Any] | None]:
    if wanted:
        with ctx.connection() as conn:
            yield conn
    else:
        yield None
