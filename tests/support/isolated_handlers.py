"""Handlers that run in processes of their own: a child imports this module by its name."""

from __future__ import annotations

import asyncio
import ctypes
import locale
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from commandbus import (
    BusinessRuleException,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    Snooze,
    TransientCommandError,
)
from support.waiting import until

handlers = HandlerRegistry()
HELD = 4711  # an advisory lock for which handlers wait
_kept: dict[str, Any] = {}


def process(command_type: str, **options: Any) -> Any:
    """Register for the domain `orders`, isolated."""
    return handlers.handler("orders", command_type, isolation="process", **options)


@process("echo")
def echo(command: Any, ctx: Any) -> Any:
    return {"pid": os.getpid(), "data": command.data, "attempt": ctx.attempt, "worker": ctx.worker}


@process("echo_async")
async def echo_async(command: Any, ctx: Any) -> Any:
    loop = asyncio.get_running_loop()
    is_same = _kept.setdefault("loop", loop) is loop
    await asyncio.sleep(0)
    return {"pid": os.getpid(), "data": command.data, "same_loop": is_same}


@process("echo_returned")
def echo_returned(command: Any, ctx: Any) -> Any:
    return echo_async(command, ctx)


@process("nothing")
def nothing(ctx: Any) -> None:
    pass


@process("created")
def created(command: Any, ctx: Any) -> str:
    return str(command.created_at.isoformat())


@process(
    "ruled",
    retry_policy=RetryPolicy(
        retry_on=[Snooze, ConnectionError], give_up_on=[ConnectionRefusedError], delay_from=lambda _: "1h"
    ),
)
def ruled(command: Any, ctx: Any) -> None:
    kinds = {"snooze": Snooze("2h", "later"), "retried": ConnectionResetError(), "other": KeyError("x")}
    raise kinds.get(command.data, ConnectionRefusedError())


@process("raise")
def raises(command: Any, ctx: Any) -> None:
    kind = command.data["kind"]
    if kind == "business":
        raise BusinessRuleException("no stock", code="NO_STOCK", details={"sku": 7})
    if kind == "permanent":
        raise PermanentCommandError("never", code="NEVER")
    if kind == "transient":
        raise TransientCommandError("not now", code="LATER")
    if kind == "exit":
        sys.exit(3)
    if kind == "surrogate":
        raise ValueError("bad \udc80 text \x00")
    raise KeyError("gone")


@process("not_json")
def not_json(ctx: Any) -> Any:
    return object()


@process("large")
def large(command: Any, ctx: Any) -> Any:
    return command.data["unit"] * command.data["times"]


@process("log")
def log(command: Any, ctx: Any) -> None:
    ctx.log.info("hello from %s", "there", extra={"step": 3})
    try:
        raise OSError("broken")
    except OSError:
        ctx.log.exception("it broke")


@process("progress")
def progress(command: Any, ctx: Any) -> None:
    ctx.heartbeat({"done": 3})


@process("snapshot")
def snapshot(command: Any, ctx: Any) -> None:
    """A transaction that keeps its snapshot for longer than its usual lease."""
    until = time.monotonic() + command.data["seconds"]
    with ctx.transaction(isolation="repeatable read") as tx:
        while time.monotonic() < until:
            tx.execute("SELECT count(*) FROM commandbus.command")
            ctx.sleep(0.05)
        tx.complete("kept")


@process("commits")
def commits(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES ('committed')")
        tx.execute(command.data)


@process("extend")
def extend(command: Any, ctx: Any) -> Any:
    before = ctx.remaining()
    ctx.extend(command.data["seconds"])
    return [before, ctx.remaining()]


@process("extend_after")
def extend_after(command: Any, ctx: Any) -> Any:
    """Says that it is there, waits for a file, and extends. After a TimeoutError it goes on to the next file."""
    folder = _here(command, ctx)
    try:
        ctx.extend(60)
    except BaseException as error:
        _go_on_after(error, folder)
    return [os.getpid(), ctx.attempt_number, ctx.remaining()]


@process("extend_after_async")
async def extend_after_async(command: Any, ctx: Any) -> Any:
    folder = _here(command, ctx)
    try:
        await ctx.extend(60)
    except BaseException as error:
        _go_on_after(error, folder)
    return [os.getpid(), ctx.attempt_number, ctx.remaining()]


def _here(command: Any, ctx: Any) -> Path:
    folder = Path(command.data["folder"])
    (folder / f"here{ctx.attempt_number}").touch()
    until(lambda: (folder / "go").exists())
    return folder


def _go_on_after(error: BaseException, folder: Path) -> None:
    (folder / "said").write_text(f"{type(error).__name__}: {error}")
    (folder / "said").rename(folder / "raised")
    if not isinstance(error, TimeoutError):
        raise error
    until(lambda: (folder / "end").exists())


@process("stop_clock")
def stop_clock(command: Any, ctx: Any) -> int:
    """As freezegun does, for the rest of this process's life."""
    moment = time.monotonic()
    time.monotonic = lambda: moment
    return os.getpid()


@process("nap_async")
async def nap_async(command: Any, ctx: Any) -> int:
    await asyncio.sleep(0.05)
    async with ctx.child(timeout=5):
        await ctx.sleep(0.05)
    return os.getpid()


@process("extend_async")
async def extend_async(command: Any, ctx: Any) -> Any:
    before = ctx.remaining()
    await ctx.extend(command.data["seconds"])
    return [before, ctx.remaining()]


@process("write")
def write(command: Any, ctx: Any) -> Any:
    with ctx.connection() as conn:
        conn.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
        row = conn.execute("SELECT pg_backend_pid(), current_setting('application_name')").fetchone()
    return list(row)


@process("transact")
def transact(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
        tx.complete({"by": "tx"})


@process("transact_async")
async def transact_async(command: Any, ctx: Any) -> None:
    async with ctx.transaction() as tx:
        await tx.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
        tx.complete({"by": "tx"})


@process("option", transaction=True)
def option(command: Any, ctx: Any, tx: Any) -> Any:
    tx.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
    return {"by": "tx"}


@process("option_async", transaction=True)
async def option_async(command: Any, ctx: Any, tx: Any) -> Any:
    await tx.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
    return {"by": "tx"}


@process("option_unused", transaction=True)
def option_unused(command: Any, ctx: Any, tx: Any) -> Any:
    return command.data


@process("transact_and_raise")
def transact_and_raise(command: Any, ctx: Any) -> None:
    transact(command, ctx)
    raise ValueError("afterwards")


@process("sleep_in_sql")
def sleep_in_sql(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES (%s)", (command.command_id,))
        tx.execute("SELECT pg_sleep(1000)")


@process("wait")
def wait(command: Any, ctx: Any) -> str:
    ctx.canceled.wait(30)
    return "canceled" if ctx.canceled.is_set() else "not"


@process("sleep")
def sleep(command: Any, ctx: Any) -> None:
    ctx.sleep(30)


@process("scope")
def scope(command: Any, ctx: Any) -> bool:
    with ctx.child(timeout=0.1) as child:
        return bool(child.canceled.wait(10))


@process("sleep_async")
async def sleep_async(command: Any, ctx: Any) -> None:
    await asyncio.sleep(30)


@process("swallow_async")
async def swallow_async(command: Any, ctx: Any) -> None:
    ctx.heartbeat("here")
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)


@process("hang")
def hang(command: Any, ctx: Any) -> None:
    ctx.heartbeat("here")
    how = command.data["how"]
    if how == "spin":
        while True:
            pass
    if how == "sleep":
        time.sleep(1000)
    if how == "swallow":
        while True:
            with suppress(BaseException):
                time.sleep(1000)
    if how == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "recv":
        ours, _theirs = socket.socketpair()
        ours.recv(1)
    if how == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(1000)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


@process("die")
def die(command: Any, ctx: Any) -> None:
    how = command.data["how"]
    if how == "segv":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(1)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.abort()
    if how == "closed":
        os.closerange(3, 256)
        time.sleep(1000)
    if how == "exec":
        os.execv("/bin/true", ["true"])


@process("hog")
def hog(command: Any, ctx: Any) -> None:
    held = []
    while True:
        held.append(b"x" * (8 << 20))
        time.sleep(0.02)


@process("grow")
def grow(command: Any, ctx: Any) -> int:
    _kept["ballast"] = b"x" * (command.data["mb"] << 20)
    return os.getpid()


@process("fork")
def fork(command: Any, ctx: Any) -> str:
    child = os.fork()
    if child == 0:
        ctx.log.info("from the fork")
        return "the fork"
    os.waitpid(child, 0)
    return "the original"


@process("fork_and_stay")
def fork_and_stay(command: Any, ctx: Any) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    return child


@process("daemonize")
def daemonize(command: Any, ctx: Any) -> int:
    """Leave a process behind as daemons do: two forks, a session of its own, perhaps without an environment."""
    pids = Path(command.data["file"])
    clears = ["env", "-i"] if command.data.get("clears") else []
    if (first := os.fork()) == 0:
        os.setsid()
        sleeper = subprocess.Popen([*clears, "/bin/sleep", "1000"], start_new_session=True)
        pids.write_text(str(sleeper.pid))
        os._exit(0)
    os.waitpid(first, 0)
    if (then := command.data.get("then")) == "hang":
        ctx.heartbeat("left it")
        time.sleep(1000)
    if then == "exit":
        os._exit(0)
    return int(pids.read_text())


@process("zombies")
def zombies(command: Any, ctx: Any) -> int:
    """How many dead children nobody has buried, its own and an orphan's that has just died among them."""
    ended, inherited = os.pipe()
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
        os._exit(0)
    os.close(inherited)
    os.read(ended, 1)  # both have closed the other end, and are about to end
    os.close(ended)
    while (found := _dead_children()) < 2:
        time.sleep(0.001)
    return found


def _dead_children() -> int:
    mine, found = f" {os.getpid()} ", 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text().rpartition(")")[2]
        except OSError:
            continue
        found += text.startswith(f" Z{mine}")
    return found


@process("name_session")
def name_session(command: Any, ctx: Any) -> None:
    """Say that a session of somebody else is its own, and die."""
    channel = ctx._services.connections._channel
    channel.send({"k": "lent", "n": 1, "key": None, **command.data})
    os._exit(1)  # what was sent is read all the same


@process("change")
def change(command: Any, ctx: Any) -> None:
    os.chdir("/")
    os.umask(0o777)
    locale.setlocale(locale.LC_ALL, "C")
    signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 60)
    _kept["locals"] = threading.local()
    _kept["locals"].seen = True


@process("fresh_surroundings", fresh_thread=True)
@process("surroundings")
def surroundings(command: Any, ctx: Any) -> Any:
    umask = os.umask(0)
    os.umask(umask)
    return [
        os.getcwd(),
        umask,
        signal.getsignal(signal.SIGALRM) == signal.SIG_DFL,
        signal.getitimer(signal.ITIMER_REAL)[0],
        hasattr(_kept.get("locals"), "seen"),
    ]


@process("fresh", fresh_thread=True)
def fresh(command: Any, ctx: Any) -> Any:
    local = _kept.setdefault("fresh", threading.local())
    found = getattr(local, "seen", None)
    local.seen = command.command_id
    if command.data == "raise":
        raise PermanentCommandError("from a fresh thread")
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES ('fresh')")
        tx.complete([found, threading.current_thread() is threading.main_thread()])


@process("leave_thread")
def leave_thread(command: Any, ctx: Any) -> None:
    def go_on() -> None:
        for tries in count(1):
            try:
                with ctx.connection() as conn:
                    conn.execute("INSERT INTO effects VALUES ('late')")
            except Exception as error:
                _kept["late"] = type(error).__name__
            with suppress(Exception):
                ctx.heartbeat({"late": True})
            _kept["tries"] = tries
            time.sleep(0.01)

    threading.Thread(target=go_on, daemon=True).start()


@process("what_was_late")
def what_was_late(command: Any, ctx: Any) -> Any:
    """What the thread that was left behind was told, after it has tried twice more."""
    before = until(lambda: _kept.get("tries"))
    until(lambda: _kept["tries"] >= before + 2)
    return _kept.get("late")


@process("lie")
def lie(command: Any, ctx: Any) -> str | None:
    """As C code might that has overwritten things: speak on the socket by itself."""
    from commandbus.worker.isolation.channel import frame

    channel = ctx._services.connections._channel
    what = command.data["what"]
    if what == "garbage":
        channel._socket.sendall(b"\x00\x00\x00\x05hello")
    if what == "huge":
        channel._socket.sendall(b"\xff\xff\xff\xff")
    if what == "shape":
        channel.send({"k": "lent", "n": 1, "pid": "none", "key": None})
    if what == "unknown":
        channel.send({"k": "settle", "n": 1})
    if what == "result":
        text = '1}, {"m": 1, "r": 1, "c": 1'
        channel._socket.sendall(frame({"k": "ended", "n": 1, "result": text, "error": None, "committed": False}))
    if what == "extend":
        return str(ctx._services.extend(ctx._attempt, 1e9).exception(10))  # the context would have refused
    time.sleep(1000)
    return None


@handlers.handler("orders", "thread")
def thread(command: Any, ctx: Any) -> int:
    return os.getpid()


@process("wait_for_lock", timeout=60)
def wait_for_lock(command: Any, ctx: Any) -> None:
    with ctx.connection() as conn:
        conn.execute("SELECT pg_advisory_xact_lock_shared(%s)", (HELD,))
