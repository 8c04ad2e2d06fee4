"""Handlers that use a limit in processes of their own: a child imports this module by its name.

They talk to the test through files in the folder that their command names: lines in `log`, and `go`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from commandbus import ApiTimeoutError, HandlerRegistry, Limit, LimitLostError, RateLimitError

LEASE_SECONDS = 2.0
handlers = HandlerRegistry()
handlers.declare_limit(Limit("one", concurrency=1, lease=LEASE_SECONDS, breaker_failures=0, store="postgres"))


def process(command_type: str, **options: Any) -> Any:
    """Register for the domain `orders`, isolated."""
    return handlers.handler("orders", command_type, isolation="process", **options)


def note(command: Any, line: str) -> None:
    """One write of one line is never mixed with another's."""
    log = os.open(Path(command.data["folder"], "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{line}\n".encode())
    os.close(log)


def may_go(command: Any) -> bool:
    return Path(command.data["folder"], "go").exists()


@process("level", limits=["one"])
def level(command: Any, ctx: Any) -> None:
    note(command, "in")
    ctx.sleep(0.02)
    note(command, "out")


@process("level_async", limits=["one"])
async def level_async(command: Any, ctx: Any) -> None:
    note(command, "in")
    await ctx.sleep(0.02)
    note(command, "out")


@process("block")
def block(command: Any, ctx: Any) -> None:
    with ctx.limit("one") as held:
        note(command, "in")
        ctx.sleep(0.02)
        assert held.limit == "one"
        note(command, "out")


@process("block_async")
async def block_async(command: Any, ctx: Any) -> None:
    async with ctx.limit("one") as held:
        note(command, "in")
        await ctx.sleep(0.02)
        assert held.limit == "one"
        note(command, "out")


class _Inside:
    """Lines `in` and `out` around what stands inside the limit."""

    def __init__(self, command: Any) -> None:
        self._command = command

    def __enter__(self) -> None:
        note(self._command, "in")

    def __exit__(self, *_: object) -> None:
        note(self._command, "out")


@process("cut_off", limits=["one"], timeout=0)
def cut_off(command: Any, ctx: Any) -> None:
    if ctx.attempt_number == 1:
        with _Inside(command):
            ctx.sleep(60)


@process("cut_off_async", limits=["one"], timeout=0)
async def cut_off_async(command: Any, ctx: Any) -> None:
    if ctx.attempt_number == 1:
        with _Inside(command):
            await asyncio.sleep(60)


@process("cut_off_in_block", timeout=0)
def cut_off_in_block(command: Any, ctx: Any) -> None:
    """Goes on although it was asked to stop, until its permit is lost, and uses the block once more."""
    if ctx.attempt_number > 1:
        return
    ctx.extend(300)
    with ctx.limit("one") as call, _Inside(command):
        while not call.is_lost:
            time.sleep(0.01)
        try:
            call.remaining()
        except LimitLostError as error:
            note(command, f"told: {error}")
            raise


@process("cut_off_in_async_block", timeout=0)
async def cut_off_in_async_block(command: Any, ctx: Any) -> None:
    if ctx.attempt_number > 1:
        return
    await ctx.extend(300)
    async with ctx.limit("one") as call:
        with _Inside(command):
            try:
                await asyncio.sleep(60)
            finally:
                note(command, f"lost: {call.is_lost}")


@process("hold")
def hold(command: Any, ctx: Any) -> bool:
    with ctx.limit("one") as held:
        note(command, "in")
        while not may_go(command) and not held.is_lost:
            time.sleep(0.01)
        return bool(held.is_lost)


@process("die")
def die(command: Any, ctx: Any) -> None:
    with ctx.limit("one"):
        note(command, "in")
        os.kill(os.getpid(), signal.SIGKILL)


@process("die_level", limits=["one"])
def die_level(command: Any, ctx: Any) -> None:
    note(command, "in")
    os.kill(os.getpid(), signal.SIGKILL)


@process("lent", limits=["one"])
def lent(command: Any, ctx: Any) -> None:
    """Its blocks use the permit that it has anyway."""
    for _ in range(3):
        with ctx.limit("one", wait=0):
            note(command, "in")
    if command.data.get("dies"):
        with ctx.limit("one", wait=0):
            os.kill(os.getpid(), signal.SIGKILL)


@process("in_line")
def in_line(command: Any, ctx: Any) -> None:
    note(command, f"asks {os.getpid()}")
    with ctx.limit("one", wait=60):
        note(command, "in")


@process("late")
def late(command: Any, ctx: Any) -> None:
    with ctx.limit("one", timeout=0.3):
        ctx.sleep(60)


@process("late_deaf")
def late_deaf(command: Any, ctx: Any) -> None:
    with ctx.limit("one", timeout=0.3):
        while True:
            with suppress(BaseException):
                time.sleep(60)


@process("late_back")
def late_back(command: Any, ctx: Any) -> None:
    with ctx.limit("one") as call:
        until = time.monotonic() + call.remaining()
        while time.monotonic() < until:
            time.sleep(0.01)


@process("late_lent", limits=["one"])
def late_lent(command: Any, ctx: Any) -> None:
    late_deaf(command, ctx)


@process("late_async")
async def late_async(command: Any, ctx: Any) -> Any:
    try:
        async with ctx.limit("one", timeout=0.3):
            await asyncio.sleep(60)
    except ApiTimeoutError as error:
        return str(error)


@process("in_time")
def in_time(command: Any, ctx: Any) -> Any:
    with ctx.limit("one", timeout=0.3) as call:
        assert call.remaining() <= 0.3
        assert ctx.remaining() <= 0.3
    ctx.sleep(1.0)  # past the deadline that the block had
    return ctx.remaining()


@process("refused")
def refused(command: Any, ctx: Any) -> str:
    with ctx.limit("one"):
        return answer_once(command)


@process("refused_async")
async def refused_async(command: Any, ctx: Any) -> str:
    async with ctx.limit("one"):
        return answer_once(command)


@process("refused_level", limits=["one"])
def refused_level(command: Any, ctx: Any) -> str:
    return answer_once(command)


def answer_once(command: Any) -> str:
    """No at first, then yes."""
    asked = Path(command.data["folder"], "asked")
    if not asked.exists():
        asked.touch()
        raise RateLimitError("429 from example", retry_after=0.2)
    return "yes"


@process("ask")
def ask(command: Any, ctx: Any) -> list[Any]:
    try:
        with ctx.limit(command.data["name"], wait=command.data["wait"]):
            return ["a permit"]
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "limit", None)]


@process("leave_thread")
def leave_thread(command: Any, ctx: Any) -> None:
    """Returns while a thread of it is in the block."""
    entered = threading.Event()

    def stay() -> None:
        with ctx.limit("one"):
            entered.set()
            while not may_go(command):
                time.sleep(0.01)
        note(command, "left")

    threading.Thread(target=stay, daemon=True).start()
    assert entered.wait(60)


@process("ask_later")
def ask_later(command: Any, ctx: Any) -> None:
    """Returns, and a thread of it asks after that."""

    def later() -> None:
        while not may_go(command):
            time.sleep(0.01)
        try:
            with ctx.limit("one"):
                note(command, "a permit")
        except Exception as error:
            note(command, type(error).__name__)

    threading.Thread(target=later, daemon=True).start()
