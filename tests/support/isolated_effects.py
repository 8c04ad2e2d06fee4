"""Handlers that use effects and checkpoints in processes of their own: a child imports this module by its name.

They charge by adding a line to the file that their command names.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from commandbus import NOT_DONE, HandlerRegistry

handlers = HandlerRegistry()


def charge(command: Any, key: str) -> Any:
    with Path(command.data["charges"]).open("a") as charges:
        charges.write(f"{key}\n")
    return {"charged": key}


def verify(command: Any) -> Any:
    def find_charge(effect: Any) -> Any:
        file = Path(command.data["charges"])
        is_there = file.exists() and effect.key in file.read_text().split()
        return {"found": effect.key} if is_there else NOT_DONE

    return find_charge


def die(command: Any, ctx: Any, where: str) -> None:
    if ctx.attempt_number == 1 and command.data["dies"] == where:
        os.kill(os.getpid(), signal.SIGKILL)


@handlers.handler("orders", "pay", isolation="process")
def pay(command: Any, ctx: Any) -> Any:
    ctx.checkpoint([ctx.last_checkpoint, ctx.attempt_number])
    with ctx.effect("charge", verify=verify(command)) as effect:
        key = effect.key
        die(command, ctx, "before")
        receipt = charge(command, key)
        die(command, ctx, "after")
        effect.receipt = receipt
    return [effect.receipt, ctx.last_checkpoint]


@handlers.handler("orders", "pay_async", isolation="process")
async def pay_async(command: Any, ctx: Any) -> Any:
    await ctx.checkpoint([ctx.last_checkpoint, ctx.attempt_number])
    async with ctx.effect("charge", verify=verify(command)) as effect:
        key = effect.key
        die(command, ctx, "before")
        receipt = charge(command, key)
        die(command, ctx, "after")
        effect.receipt = receipt
    return [effect.receipt, ctx.last_checkpoint]


@handlers.handler("orders", "refuse", isolation="process")
def refuse(command: Any, ctx: Any) -> Any:
    with ctx.effect("charge") as effect:
        charge(command, effect.key)
        raise ConnectionResetError("no answer")
